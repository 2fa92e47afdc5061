#pragma once

#include <span>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/storage.hpp"
#include "quant/weight_quantizer.hpp"

namespace fusedmoe::jobs {

/// What the matrices of a checkpoint become.
struct Target {
  WeightFormat format;  ///< not quantized: plain matrices of format.element
  checkpoint::StorageOptions storage;
  bool allow_lossy = false;
  WeightRecipe recipe = WeightRecipe::kAccurate;  ///< of values that are rounded again
};

/// True when codes and scales carry over as they are.
bool SameCodes(const WeightFormat& from, const WeightFormat& to);

/// Matrices in the format of the target; those given together share a tensor scale where a new one is made
/// (gate and up). Biases and input scales stay. kUnsupported when values would be rounded again and the
/// target does not allow it.
Result<std::vector<CanonicalMatrix>> Transform(std::span<const CanonicalMatrix* const> matrices,
                                               const Target& target);

/// Zero points or column indices that say something: not those which the format implies.
bool NeedsZeroPoints(const CanonicalMatrix& matrix);
bool NeedsGroupIndex(const CanonicalMatrix& matrix);

}  // namespace fusedmoe::jobs
