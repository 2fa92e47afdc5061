#include "routing/methods.hpp"

namespace fusedmoe {
namespace {

Score FromFunction(ScoreFunction function) {
  switch (function) {
    case ScoreFunction::kSoftmax:
      return Score::kSoftmax;
    case ScoreFunction::kSigmoid:
      return Score::kSigmoid;
    case ScoreFunction::kSqrtSoftplus:
      return Score::kSqrtSoftplus;
  }
  return Score::kSoftmax;
}

}  // namespace

RoutingRule RuleOf(const RoutingConfig& config) {
  const Weighting by_flag = config.renormalize ? Weighting::kSum : Weighting::kScore;
  switch (config.method) {
    case RoutingMethod::kDefault:
      if (config.select_on_logits) {
        return {.score = Score::kLogit, .weighting = Weighting::kSoftmaxAll};
      }
      return {.score = Score::kSoftmax, .weighting = Weighting::kScore};
    case RoutingMethod::kRenormalize:
      return {.score = Score::kLogit, .weighting = Weighting::kSoftmax};
    case RoutingMethod::kDeepSeekV3:
      return {.score = Score::kSigmoid, .weighting = by_flag, .takes_bias = true, .groups_by_two = true};
    case RoutingMethod::kLlama4:
      return {.score = Score::kLogit, .weighting = Weighting::kSigmoid};
    case RoutingMethod::kRenormalizeNaive:
      return {.score = Score::kSoftmax, .weighting = Weighting::kSum};
    case RoutingMethod::kTopK:
      return {.score = Score::kLogit, .weighting = Weighting::kScore};
    case RoutingMethod::kSigmoidRenorm:
      return {.score = Score::kSigmoid, .weighting = Weighting::kSum};
    case RoutingMethod::kMiniMax2:
      return {.score = Score::kSigmoid, .weighting = by_flag, .takes_bias = true};
    case RoutingMethod::kSigmoid:
      return {.score = Score::kSigmoid, .weighting = Weighting::kScore};
    case RoutingMethod::kGroupedTopK:
      return {.score = FromFunction(config.score), .weighting = by_flag, .takes_bias = true};
    case RoutingMethod::kSoftmaxBias:
      return {.score = Score::kSoftmax, .weighting = by_flag, .takes_bias = true};
    case RoutingMethod::kDeepseekV4:
      return {.score = Score::kSqrtSoftplus, .weighting = by_flag, .takes_bias = true, .takes_hash = true};
    case RoutingMethod::kUnspecified:
      return {
          .score = FromFunction(config.score), .weighting = by_flag, .takes_bias = true, .takes_hash = true};
    case RoutingMethod::kSparseMixer:
    case RoutingMethod::kCustom:
    case RoutingMethod::kSimulated:
      break;
  }
  return {};
}

}  // namespace fusedmoe
