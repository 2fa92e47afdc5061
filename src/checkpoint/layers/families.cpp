#include "checkpoint/layers/families.hpp"

#include <algorithm>

#include "checkpoint/layers/model_config.hpp"

namespace fusedmoe::checkpoint {
namespace {

using enum FusedLayout;

// Routing that several families share.
constexpr FamilyRouting kSoftmaxAlways{.renormalize = Renormalize::kAlways, .ignore_groups = true};
constexpr FamilyRouting kSoftmaxNever{.renormalize = Renormalize::kNever, .ignore_groups = true};
constexpr FamilyRouting kSoftmaxByConfig{.renormalize = Renormalize::kConfigFalse, .ignore_groups = true};
constexpr FamilyRouting kSoftmaxRenormalized{.renormalize = Renormalize::kConfigTrue, .ignore_groups = true};
constexpr FamilyRouting With(FamilyRouting routing, Renormalize renormalize) {
  routing.renormalize = renormalize;
  return routing;
}
// DeepSeek-V3 and its many followers.
constexpr FamilyRouting kDeepSeek{.score = ScoreFunction::kSigmoid,
                                  .renormalize = Renormalize::kConfigTrue,
                                  .method = RoutingMethod::kDeepSeekV3,
                                  .norm_epsilon = 1e-20F,
                                  .corrected = true};
constexpr FamilyRouting kDeepSeekOnlySigmoid = With(kDeepSeek, Renormalize::kOnlySigmoid);
constexpr FamilyRouting kDeepSeekByConfig = With(kDeepSeek, Renormalize::kConfigFalse);
constexpr FamilyRouting kSigmoidBias{.score = ScoreFunction::kSigmoid,
                                     .renormalize = Renormalize::kAlways,
                                     .method = RoutingMethod::kDeepSeekV3,
                                     .norm_epsilon = 1e-20F,
                                     .ignore_groups = true,
                                     .corrected = true};
constexpr FamilyRouting kSigmoidBiasByConfig = With(kSigmoidBias, Renormalize::kConfigTrue);
constexpr FamilyActivation kSwigluOai{.kind = ActivationKind::kSwigluOai,
                                      .fixed = true,
                                      .alpha = CanonicalActivation(ActivationKind::kSwigluOai).alpha,
                                      .beta = CanonicalActivation(ActivationKind::kSwigluOai).beta,
                                      .limit = CanonicalActivation(ActivationKind::kSwigluOai).limit,
                                      .has_limit = true};

constexpr Family kFamilies[] = {
#include "checkpoint/layers/families.inc"
};

// Without what spellings of one name differ in.
std::string Letters(std::string_view name) {
  std::string letters;
  for (const char letter : name) {
    if (letter != '_' && letter != '-') {
      letters += letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
    }
  }
  return letters;
}

}  // namespace

std::span<const Family> FamilyTable() {
  return kFamilies;
}

const Family* FindFamily(std::string_view model_type) {
  for (const Family& family : kFamilies) {
    const auto types = SplitWords(family.model_types);
    if (std::find(types.begin(), types.end(), model_type) != types.end()) {
      return &family;
    }
  }
  return nullptr;
}

const Family* FindFamilyOfClass(std::string_view architecture) {
  const std::string wanted = Letters(architecture.substr(0, architecture.find("For")));
  for (const Family& family : kFamilies) {
    for (const std::string_view type : SplitWords(family.model_types)) {
      if (Letters(type) == wanted) {
        return &family;
      }
    }
  }
  return nullptr;
}

}  // namespace fusedmoe::checkpoint
