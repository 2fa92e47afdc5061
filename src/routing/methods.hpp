#pragma once

#include <fusedmoe/routing.hpp>

namespace fusedmoe {

/// What a token's logits become before the selection.
enum class Score : uint8_t { kLogit, kSoftmax, kSigmoid, kSqrtSoftplus };

/// What the scores of the selected experts become.
enum class Weighting : uint8_t {
  kScore,       ///< the scores themselves
  kSum,         ///< divided by their sum
  kSoftmax,     ///< softmax over the selected logits
  kSoftmaxAll,  ///< exp(x - logsumexp of all x)
  kSigmoid      ///< sigmoid of the selected logits
};

/// A routing method as data: every method but SparseMixer, Custom and Simulated is one row of this kind.
struct RoutingRule {
  Score score = Score::kSoftmax;
  Weighting weighting = Weighting::kScore;
  bool takes_bias = false;
  bool takes_hash = false;
  bool groups_by_two = false;  ///< groups count by their two largest also without a bias
};

/// The rule of a configuration; the three methods that are procedures get the default rule.
RoutingRule RuleOf(const RoutingConfig& config);

}  // namespace fusedmoe
