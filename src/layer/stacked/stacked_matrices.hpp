#pragma once

#include <string>
#include <vector>

#include "layer/stacked/stacked_scheme.hpp"

namespace fusedmoe::stacked {

/// Rows of a matrix of w1 or w2: one every `step` from `first` on.
struct Rows {
  int64_t first = 0, step = 1, count = 0;
};

/// All that is known of w1 or of w2, checked but for the values of large tensors. Views have the experts in
/// front and three axes.
struct Stack {
  /// Of the fields, in messages: "w1_scale", "w1_zp", "w1_bias", "g1_alphas".
  std::string scale_name, zero_point_name, bias_name, product_name;
  WeightFormat format;  ///< with the types that the scales have
  TensorView codes;     ///< [E, rows, columns] of the element; I8 also where that is U8
  TensorView block_scale, zero_point, channel_scale, bias;
  std::vector<float> tensor_scale;  ///< E, or two an expert: of the first and the second half of the rows
  std::vector<float> input_scale;   ///< E
};

/// Codes as [E, rows, columns] of `element`, where a tensor of vLLM has bytes.
Result<TensorView> CodesOf(std::string_view name, const TensorView& stored, DType element,
                           std::string_view kind);

/// The sizes that w1 and w2 agree on.
Result<Sizes> SizesOf(const TensorView& w1, const TensorView& w2);

/// w1 or w2 with what `weight` and `input` say of it. `halves`: the order of gate and up, where its rows are
/// both. `number`: "1" or "2", of the fields in messages.
Result<Stack> StackOf(std::string_view number, const TensorView& codes, const QuantDesc& weight,
                      const QuantDesc& input, const Scheme& scheme, std::optional<GateUpOrder> halves);

/// Matrix of those rows of an expert; `part` of its stack, the first or the second in order.
Result<CanonicalMatrix> CutMatrix(const Stack& stack, int64_t expert, Rows rows, int64_t part);

}  // namespace fusedmoe::stacked
