#pragma once

#include <cstdint>
#include <optional>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// Whose arithmetic a weight quantizer repeats (docs/scales.md has the formulas).
enum class WeightRecipe : uint8_t {
  kAccurate,          ///< ours: ModelOpt's NVFP4, "even" MX, integers with the divisor of the smaller error
  kModelOpt,          ///< NVIDIA ModelOpt: fp32 throughout; MX by the ceiling rule, MXFP4 ties toward zero
  kCompressedTensors  ///< local scales in the weight's own type, integers over (2^bits - 1) / 2, zero scales
                      ///< 0.125
};

struct WeightQuantizerOptions {
  WeightRecipe recipe = WeightRecipe::kAccurate;
  /// MX exponent rule; absent: kCeil for kModelOpt, else kEven; for MXFP8 kEvenE2m1 with
  /// kCompressedTensors, else kFloor.
  std::optional<MxScaleRule> mx_scale;
  /// Integer weights with zero points: false gives each group its own zero.
  bool symmetric = true;
  /// Largest magnitude of all matrices that share the tensor scale (gate and up of an expert); absent: of
  /// this one.
  std::optional<float> shared_amax;
};

/// A matrix in the canonical form of its format: real = (code - zero) * block_scale * channel_scale *
/// tensor_scale.
struct QuantizedMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  WeightFormat format;
  Tensor codes;          ///< [rows, cols] of format.element
  Tensor block_scale;    ///< [row blocks, column blocks] of format.block_scale_dtype
  Tensor zero_point;     ///< U8, shape of block_scale; only without `symmetric`
  Tensor channel_scale;  ///< F32 [rows]
  std::optional<float> tensor_scale;
};

/// Quantizes `weights` (F32, F16 or BF16, [rows, cols]) to a format.
///
/// Group scales along the reduction must divide `cols` (kUnsupported otherwise, with both numbers: no partial
/// group is padded); blocks of several rows may be partial at the edges. Weights that are NaN or infinite are
/// refused (kBadInput, with the place). Groups of zeros get the scale 1, so that no scale is zero. Bytes
/// depend on the input alone. Thread-safe.
Result<QuantizedMatrix> QuantizeWeights(TensorView weights, const WeightFormat& format,
                                        const WeightQuantizerOptions& options = {});

/// Largest magnitude of F32, F16 or BF16 weights [rows, cols]; kBadInput when one is NaN or infinite.
Result<float> WeightAmax(TensorView weights);

}  // namespace fusedmoe
