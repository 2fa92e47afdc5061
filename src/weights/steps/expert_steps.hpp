#pragma once

#include "weights/steps/layout_step.hpp"

/// Layout steps on the tensors of an expert: those that need several of them (folded and joined scales,
/// sorted inputs) are here, the others are ApplyStep and InvertStep on one.
namespace fusedmoe {

/// kBadInput when a tensor that the step needs is not there.
Status ApplyTo(const LayoutStep& step, const LayoutGlobals& globals, ExpertTensors& expert);
/// The way back, for steps without a loss.
Status InvertOn(const LayoutStep& step, ExpertTensors& expert);

}  // namespace fusedmoe
