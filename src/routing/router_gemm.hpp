#pragma once

#include <fusedmoe/executor.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "routing/router_kernels.hpp"

namespace fusedmoe {

/// logits[m, e] = sum over h of hidden[m, h] * weight[e, h], plus bias[e].
///
/// hidden [M, H] and weight [E, H] in F32, F16 or BF16 in any mixture, rows may have gaps; bias [E] of such a
/// type or empty; logits [M, E] F32, dense. Products and sums in fp32 by fused multiply-add in 16 lanes (lane
/// l takes the columns l, l + 16, ...), the lanes added pairwise: one order for every instruction set, thread
/// count and batch, so a token's experts depend on nothing but its hidden state. Allocates nothing. kUsage
/// when shapes or types disagree.
Status RouterGemm(TensorView hidden, TensorView weight, TensorView bias, float* logits,
                  const Executor& executor = {});

/// The same with the kernels given: tests hold the instruction sets against each other.
Status RouterGemmWith(const RouterKernels& kernels, TensorView hidden, TensorView weight, TensorView bias,
                      float* logits, const Executor& executor);

}  // namespace fusedmoe
