#pragma once

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// The row operations of MoeKernel on the card: launches in the order of `stream`, nothing else. All views
/// lie on the card.
namespace fusedmoe::cuda {

/// output = first + gate * second by token, in fp32, rounded once; `gates` null: 1. Output may be one of the
/// inputs.
Status AddRows(TensorView first, TensorView second, const float* gates, MutableTensorView output,
               void* stream);

/// gates[m] = sigmoid(hidden[m] . gate), summed in fp64. `gate` F32 [H].
Status SharedGates(TensorView hidden, const float* gate, float* gates, void* stream);

}  // namespace fusedmoe::cuda
