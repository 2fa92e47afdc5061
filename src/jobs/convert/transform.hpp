#pragma once

#include <optional>
#include <span>

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "jobs/convert/keep_codes.hpp"

namespace fusedmoe::jobs {

/// Matrices in the format of the target; those given together share a tensor scale where a new one is made
/// (gate and up). Biases and input scales stay. Smoothing factors stay where the target stores them;
/// elsewhere one power of two for all inputs becomes part of the tensor scale, and plain matrices take up
/// any. kUnsupported when values would be rounded again and the target does not allow it.
Result<std::vector<CanonicalMatrix>> Transform(std::span<const CanonicalMatrix* const> matrices,
                                               const Target& target);

/// The power of two by which all inputs are multiplied (AWQ smoothing); nothing when it differs between them.
/// 1 without factors.
std::optional<float> UniformSmoothing(const CanonicalMatrix& matrix);
/// A decoded row as it acts on the input before it is smoothed.
void Smooth(const CanonicalMatrix& matrix, float* row);

}  // namespace fusedmoe::jobs
