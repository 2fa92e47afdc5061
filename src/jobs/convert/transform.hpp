#pragma once

#include <optional>
#include <span>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/storage/storage.hpp"
#include "quant/weight_quantizer.hpp"

namespace fusedmoe::jobs {

/// What the matrices of a checkpoint become.
struct Target {
  WeightFormat format;  ///< not quantized: plain matrices of format.element
  checkpoint::StorageOptions storage;
  bool allow_lossy = false;
  bool negative_scales = false;                   ///< groups of integers may have them (GGUF)
  WeightRecipe recipe = WeightRecipe::kAccurate;  ///< of values that are rounded again
};

/// True when codes carry over as they are: scales perhaps in another float type, or repeated where one group
/// becomes several. Whether the float type holds them shows when they are written.
bool SameCodes(const WeightFormat& from, const WeightFormat& to);

/// Matrices in the format of the target; those given together share a tensor scale where a new one is made
/// (gate and up). Biases and input scales stay. Smoothing factors stay where the target stores them;
/// elsewhere one power of two for all inputs becomes part of the tensor scale, and plain matrices take up
/// any. kUnsupported when values would be rounded again and the target does not allow it.
Result<std::vector<CanonicalMatrix>> Transform(std::span<const CanonicalMatrix* const> matrices,
                                               const Target& target);

/// Zero points or column indices that say something: not those which the format implies.
bool NeedsZeroPoints(const CanonicalMatrix& matrix);
bool NeedsGroupIndex(const CanonicalMatrix& matrix);

/// The power of two by which all inputs are multiplied (AWQ smoothing); nothing when it differs between them.
/// 1 without factors.
std::optional<float> UniformSmoothing(const CanonicalMatrix& matrix);
/// A decoded row as it acts on the input before it is smoothed.
void Smooth(const CanonicalMatrix& matrix, float* row);

}  // namespace fusedmoe::jobs
