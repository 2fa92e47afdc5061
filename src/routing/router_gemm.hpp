#pragma once

#include <fusedmoe/executor.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// logits[m, e] = sum_h hidden[m, h] * weight[e, h] + bias[e], in fp32. `hidden` [M, H] and `weight` [E, H]
/// are F32, BF16 or F16, `bias` F32 [E] or empty; `logits` is dense [M, E]. The order of additions is fixed
/// by H alone (sixteen interleaved partial sums, added pairwise), so that the bits depend neither on threads
/// nor on M nor on the machine: the choice of experts must not. Allocates nothing.
void RouterGemm(TensorView hidden, TensorView weight, TensorView bias, float* logits,
                const Executor& executor);

}  // namespace fusedmoe
