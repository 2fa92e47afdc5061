#pragma once

#include <fusedmoe/stacked.hpp>

namespace fusedmoe::stacked {

/// The sizes that the shapes of w1 and w2 say.
struct Sizes {
  int64_t experts = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  bool gated = true;
  int64_t rows_of_w1() const { return gated ? 2 * intermediate : intermediate; }
};

/// [E], [E, rows] and one number as [E, rows, columns]: axes of one element behind the others. Anything else
/// as it is.
TensorView AsStack(const TensorView& view);

/// "F32 [4, 64, 2]", "missing", for messages.
std::string Found(const TensorView& view);

/// The scheme of the pair of kinds, whatever shares a scale. kUnsupported where the table has none.
Result<Scheme> SchemeOfKinds(const QuantConfig& quant);

/// The scheme that the descriptors mean, where they are silent together with the shapes of the scales.
/// Refuses fields that it has no place for.
Result<Scheme> SchemeOf(const QuantConfig& quant, const Sizes& sizes);

}  // namespace fusedmoe::stacked
