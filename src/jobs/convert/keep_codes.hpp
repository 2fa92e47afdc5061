#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/storage/storage.hpp"
#include "quant/weight_quantizer.hpp"

/// Matrices in another format with the values that they have: codes stay, or become others that mean the
/// same.
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

/// Why the codes of a matrix cannot stay where SameCodes holds; empty: they can.
std::string WhyNotKept(const CanonicalMatrix& from, const Target& target);

/// The matrix with its codes. Empty when the float type of the target's scales does not hold those that are
/// there.
Result<CanonicalMatrix> KeepCodes(const CanonicalMatrix& from, const Target& target);

/// MXFP4 as NVFP4: the tensor scale takes the largest exponent of all blocks down to what e4m3 reaches (2^8),
/// each block of 32 becomes two of 16. Powers of two from 2^8 to 2^-9 are e4m3 codes; nothing where exponents
/// lie farther apart.
std::optional<std::vector<CanonicalMatrix>> MxAsNvfp4(std::span<const CanonicalMatrix* const> matrices,
                                                      const Target& target);

/// Adds zero points, indices and factors that were left out on this matrix and stand on another of the
/// checkpoint.
Status Complete(const checkpoint::StorageOptions& storage, CanonicalMatrix& matrix);

/// Zero points or column indices that say something: not those which the format implies.
bool NeedsZeroPoints(const CanonicalMatrix& matrix);
bool NeedsGroupIndex(const CanonicalMatrix& matrix);

}  // namespace fusedmoe::jobs
