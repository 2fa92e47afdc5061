#pragma once

#include <string>
#include <string_view>

#include "weights/steps/layout_step.hpp"

/// Layout steps on the tensors of an expert: those that need several of them (folded and joined scales,
/// sorted inputs) are here, the others are ApplyStep and InvertStep on one.
namespace fusedmoe {

/// kBadInput when a tensor that the step needs is not there.
Status ApplyTo(const LayoutStep& step, const LayoutGlobals& globals, ExpertTensors& expert);
/// The way back, for steps without a loss.
Status InvertOn(const LayoutStep& step, ExpertTensors& expert);

/// What marlin_int8_scales leaves beside the block scales of that name: "gate_up_activation_factor".
std::string ActivationFactorName(std::string_view block_scale);

}  // namespace fusedmoe
