#include "weights/quantize.hpp"

#include <algorithm>

namespace fusedmoe {

Result<CanonicalMatrix> QuantizeMatrix(TensorView weights, const WeightFormat& format,
                                       const WeightQuantizerOptions& options) {
  FMOE_ASSIGN_OR_RETURN(QuantizedMatrix quantized, QuantizeWeights(weights, format, options));
  CanonicalMatrix matrix;
  matrix.rows = quantized.rows;
  matrix.cols = quantized.cols;
  matrix.format = quantized.format;
  matrix.codes = std::move(quantized.codes);
  matrix.block_scale = std::move(quantized.block_scale);
  matrix.zero_point = std::move(quantized.zero_point);
  matrix.channel_scale = std::move(quantized.channel_scale);
  matrix.tensor_scale = quantized.tensor_scale;
  return matrix;
}

Result<CanonicalExpert> QuantizeExpert(TensorView gate, TensorView up, TensorView down,
                                       const WeightFormat& format, const WeightQuantizerOptions& options) {
  WeightQuantizerOptions fused = options;
  CanonicalExpert expert;
  if (!gate.empty()) {
    if (format.has_tensor_scale && !options.shared_amax) {
      FMOE_ASSIGN_OR_RETURN(const float gate_amax, WeightAmax(gate));
      FMOE_ASSIGN_OR_RETURN(const float up_amax, WeightAmax(up));
      fused.shared_amax = std::max(gate_amax, up_amax);
    }
    FMOE_ASSIGN_OR_RETURN(expert.gate, QuantizeMatrix(gate, format, fused));
  }
  FMOE_ASSIGN_OR_RETURN(expert.up, QuantizeMatrix(up, format, fused));
  FMOE_ASSIGN_OR_RETURN(expert.down, QuantizeMatrix(down, format, options));
  return expert;
}

}  // namespace fusedmoe
