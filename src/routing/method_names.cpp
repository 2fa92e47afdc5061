#include <fusedmoe/routing.hpp>

#include "core/names.hpp"

namespace fusedmoe {
namespace {

constexpr std::string_view kMethodNames[] = {
#define FMOE_ROUTING_NAME(id, name, what) name,
    FMOE_ROUTING_METHOD_TABLE(FMOE_ROUTING_NAME)
#undef FMOE_ROUTING_NAME
};

constexpr std::string_view kScoreNames[] = {"softmax", "sigmoid", "sqrtsoftplus"};

constexpr int kNone = -1;

/// Numbers by era: seed, head, newest, FlashInfer.
struct Numbers {
  RoutingMethod method;
  int values[4];
};
constexpr Numbers kNumbers[] = {
    {RoutingMethod::kDefault, {0, 0, 0, 0}},           {RoutingMethod::kRenormalize, {1, 1, 1, 1}},
    {RoutingMethod::kDeepSeekV3, {2, 2, 2, 2}},        {RoutingMethod::kLlama4, {3, 3, 3, 3}},
    {RoutingMethod::kRenormalizeNaive, {4, 4, 4, 4}},  {RoutingMethod::kTopK, {5, 5, 5, 5}},
    {RoutingMethod::kSigmoidRenorm, {kNone, 6, 6, 6}}, {RoutingMethod::kMiniMax2, {kNone, 7, 7, 7}},
    {RoutingMethod::kSigmoid, {kNone, kNone, 8, 8}},   {RoutingMethod::kDeepseekV4, {kNone, 100, 100, kNone}},
    {RoutingMethod::kCustom, {6, 101, 101, kNone}},    {RoutingMethod::kSimulated, {7, 102, 102, kNone}},
    {RoutingMethod::kUnspecified, {8, 8, 9, 10}},
};

/// The label of sigmoid scores.
RoutingMethod DeriveSigmoid(const RouterDescription& router, RoutingEra era) {
  const bool old = era == RoutingEra::kVllm202604;
  const bool newest = era == RoutingEra::kVllmNewest || era == RoutingEra::kFlashInfer;
  if (router.has_correction_bias) {
    if (newest && !router.renormalize) {
      return RoutingMethod::kUnspecified;
    }
    if (router.num_expert_groups > 0) {
      return RoutingMethod::kDeepSeekV3;
    }
    const bool minimax = !old && (!newest || router.scaling_factor == 1.0F);
    return minimax ? RoutingMethod::kMiniMax2 : RoutingMethod::kUnspecified;
  }
  if (router.top_k == 1) {
    return RoutingMethod::kLlama4;
  }
  if (old) {
    return RoutingMethod::kUnspecified;
  }
  if (router.renormalize) {
    return RoutingMethod::kSigmoidRenorm;
  }
  return newest ? RoutingMethod::kSigmoid : RoutingMethod::kUnspecified;
}

}  // namespace

std::string_view RoutingMethodName(RoutingMethod method) {
  return kMethodNames[static_cast<size_t>(method)];
}

std::optional<RoutingMethod> ParseRoutingMethod(std::string_view name) {
  return ParseName<RoutingMethod>(kMethodNames, name);
}

std::string RoutingMethodNames() {
  return JoinNames(kMethodNames);
}

std::string_view ScoreFunctionName(ScoreFunction score) {
  return kScoreNames[static_cast<size_t>(score)];
}

std::optional<ScoreFunction> ParseScoreFunction(std::string_view name) {
  return ParseName<ScoreFunction>(kScoreNames, name);
}

std::string ScoreFunctionNames() {
  return JoinNames(kScoreNames);
}

std::optional<int> RoutingMethodValue(RoutingMethod method, RoutingEra era) {
  for (const Numbers& numbers : kNumbers) {
    const int value = numbers.values[static_cast<size_t>(era)];
    if (numbers.method == method && value != kNone) {
      return value;
    }
  }
  return std::nullopt;
}

std::optional<RoutingMethod> RoutingMethodOfValue(int value, RoutingEra era) {
  for (const Numbers& numbers : kNumbers) {
    if (value != kNone && numbers.values[static_cast<size_t>(era)] == value) {
      return numbers.method;
    }
  }
  return std::nullopt;
}

RoutingMethod DeriveRoutingMethod(const RouterDescription& router, RoutingEra era) {
  const bool newest = era == RoutingEra::kVllmNewest || era == RoutingEra::kFlashInfer;
  if (!router.score) {
    return RoutingMethod::kUnspecified;
  }
  switch (*router.score) {
    case ScoreFunction::kSqrtSoftplus:
      return router.renormalize && era != RoutingEra::kVllm202604 ? RoutingMethod::kDeepseekV4
                                                                  : RoutingMethod::kUnspecified;
    case ScoreFunction::kSigmoid:
      return DeriveSigmoid(router, era);
    case ScoreFunction::kSoftmax:
      break;
  }
  if (router.has_correction_bias) {
    return RoutingMethod::kUnspecified;
  }
  if (!router.renormalize) {
    return RoutingMethod::kDefault;
  }
  return newest ? RoutingMethod::kRenormalizeNaive : RoutingMethod::kRenormalize;
}

}  // namespace fusedmoe
