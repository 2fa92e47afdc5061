#pragma once

#include <fusedmoe/jobs/verify.hpp>

#include "jobs/verify/runner.hpp"

namespace fusedmoe::verify {

/// A batch, and what the reference makes of it in F32.
struct ReferenceBatch {
  TensorView hidden, ids, weights;
  TensorView expected;
};

/// What the bound of `judged` takes from the values of a batch that `reference` has just run, so that its
/// workspace still holds the rows between the GEMMs. For a8 `load` gives the layer a second time; Errors:
/// those of MoeLayer::Load and Forward.
Result<ComparedValues> MeasureValues(const MoeLayer& judged, const Runner& reference, const LayerLoader& load,
                                     LayerOptions reference_options, const ReferenceBatch& batch);

}  // namespace fusedmoe::verify
