#include "routing/select.hpp"

#include <cmath>
#include <limits>

namespace fusedmoe {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
/// Marks experts that cannot be chosen. No score of an expert is NaN here, whereas -inf may be one.
constexpr float kOutOfChoice = std::numeric_limits<float>::quiet_NaN();

/// The sum of term(0) ... term(num_experts - 1) in lanes (score_math.hpp).
template <typename Term>
double AddInLanes(int64_t num_experts, Term&& term) {
  double lanes[kScoreLanes] = {};
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    lanes[expert % kScoreLanes] += term(expert);
  }
  for (int distance = kScoreLanes / 2; distance > 0; distance /= 2) {
    for (int lane = 0; lane < distance; ++lane) {
      lanes[lane] += lanes[lane + distance];
    }
  }
  return lanes[0];
}

float Largest(const float* values, int64_t count) {
  float largest = values[0];
  for (int64_t index = 1; index < count; ++index) {
    largest = values[index] > largest ? values[index] : largest;
  }
  return largest;
}

/// Softmax of the logits. A row with a NaN or +inf, or of nothing but -inf, has no softmax: all scores are 0.
void Softmax(int64_t num_experts, TokenScratch& scratch) {
  const float largest = Largest(scratch.logit, num_experts);
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    scratch.score[expert] = ScoreExp(scratch.logit[expert] - largest);
  }
  // In fp64: fp32 would lose two digits over hundreds of experts.
  const auto divisor = static_cast<float>(
      AddInLanes(num_experts, [&](int64_t expert) { return static_cast<double>(scratch.score[expert]); }));
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    scratch.score[expert] = ZeroUnlessFinite(scratch.score[expert] / divisor);
  }
}

/// The value by which a group competes.
float GroupValue(const float* choice, int64_t size, bool by_two) {
  float first = kMinusInfinity;
  float second = kMinusInfinity;
  for (int64_t index = 0; index < size; ++index) {
    if (choice[index] > first) {
      second = first;
      first = choice[index];
    } else if (choice[index] > second) {
      second = choice[index];
    }
  }
  return by_two && size > 1 ? first + second : first;
}

/// Marks all but the best groups. Quadratic in the groups kept, which are few.
void MaskGroups(int64_t num_experts, int64_t num_groups, int64_t topk_groups, bool by_two,
                TokenScratch& scratch) {
  const int64_t size = num_experts / num_groups;
  float* const value = scratch.chosen;  // free until the selection
  for (int64_t group = 0; group < num_groups; ++group) {
    value[group] = GroupValue(scratch.choice + group * size, size, by_two);
  }
  for (int64_t group = 0; group < num_groups; ++group) {
    int64_t better = 0;
    for (int64_t other = 0; other < num_groups && better < topk_groups; ++other) {
      better += Before(value[other], other, value[group], group) ? 1 : 0;
    }
    for (int64_t expert = group * size; better >= topk_groups && expert < (group + 1) * size; ++expert) {
      scratch.choice[expert] = kOutOfChoice;
    }
  }
}

/// The largest of the logits that count, or 0 where the softmax of the row does not exist.
bool HasSoftmax(const float* logit, int64_t num_experts, float& largest) {
  largest = kMinusInfinity;
  bool finite = true;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    largest = logit[expert] > largest ? logit[expert] : largest;
    finite = finite && logit[expert] < std::numeric_limits<float>::infinity();  // false for NaN, too
  }
  return finite && largest > kMinusInfinity;
}

}  // namespace

void ComputeScores(Score score, int64_t num_experts, TokenScratch& scratch) {
  switch (score) {
    case Score::kLogit:
      for (int64_t expert = 0; expert < num_experts; ++expert) {
        const float x = scratch.logit[expert];
        scratch.score[expert] = x == kMinusInfinity ? x : ZeroUnlessFinite(x);
      }
      return;
    case Score::kSoftmax:
      Softmax(num_experts, scratch);
      return;
    case Score::kSigmoid:
      for (int64_t expert = 0; expert < num_experts; ++expert) {
        scratch.score[expert] = ZeroUnlessFinite(ScoreSigmoid(scratch.logit[expert]));
      }
      return;
    case Score::kSqrtSoftplus:
      for (int64_t expert = 0; expert < num_experts; ++expert) {
        scratch.score[expert] = ZeroUnlessFinite(std::sqrt(ScoreSoftplus(scratch.logit[expert])));
      }
      return;
  }
}

void ComputeChoices(int64_t num_experts, const float* bias, int64_t num_groups, int64_t topk_groups,
                    bool groups_by_two, TokenScratch& scratch) {
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const float choice = scratch.score[expert] + (bias == nullptr ? 0.0F : bias[expert]);
    scratch.choice[expert] = std::isnan(choice) ? 0.0F : choice;
  }
  if (topk_groups != kEveryGroup && topk_groups < num_groups) {
    MaskGroups(num_experts, num_groups, topk_groups, groups_by_two, scratch);
  }
}

void SelectTopK(int64_t first, int64_t count, int64_t top_k, TokenScratch& scratch, int32_t* ids) {
  float* const chosen = scratch.chosen;
  int64_t filled = 0;
  for (int64_t expert = first; expert < first + count; ++expert) {
    const float value = scratch.choice[expert];
    if (std::isnan(value) || (filled == top_k && !(value > chosen[top_k - 1]))) {
      continue;  // later experts lose ties, so only a larger value enters
    }
    int64_t slot = filled < top_k ? filled++ : top_k - 1;
    for (; slot > 0 && value > chosen[slot - 1]; --slot) {
      chosen[slot] = chosen[slot - 1];
      ids[slot] = ids[slot - 1];
    }
    chosen[slot] = value;
    ids[slot] = static_cast<int32_t>(expert);
  }
}

void Renormalize(int64_t top_k, float epsilon, float* weights) {
  double sum = 0.0;
  for (int64_t slot = 0; slot < top_k; ++slot) {
    sum += weights[slot];
  }
  sum += epsilon;
  const float divisor = sum > 0.0 ? static_cast<float>(sum) : 1.0F;
  for (int64_t slot = 0; slot < top_k; ++slot) {
    weights[slot] = weights[slot] / divisor;
  }
}

void ComputeWeights(Weighting weighting, int64_t num_experts, int64_t top_k, float epsilon,
                    const TokenScratch& scratch, const int32_t* ids, float* weights) {
  switch (weighting) {
    case Weighting::kScore:
    case Weighting::kSum:
      for (int64_t slot = 0; slot < top_k; ++slot) {
        weights[slot] = ZeroUnlessFinite(scratch.score[ids[slot]]);
      }
      if (weighting == Weighting::kSum) {
        Renormalize(top_k, epsilon, weights);
      }
      return;
    case Weighting::kSigmoid:
      for (int64_t slot = 0; slot < top_k; ++slot) {
        weights[slot] = ScoreSigmoid(scratch.score[ids[slot]]);
      }
      return;
    case Weighting::kSoftmax:
    case Weighting::kSoftmaxAll: {
      float largest = 0.0F;
      if (!HasSoftmax(scratch.logit, num_experts, largest)) {
        for (int64_t slot = 0; slot < top_k; ++slot) {
          weights[slot] = 0.0F;
        }
        return;
      }
      for (int64_t slot = 0; slot < top_k; ++slot) {
        weights[slot] = ScoreExp(scratch.logit[ids[slot]] - largest);
      }
      if (weighting == Weighting::kSoftmax) {
        Renormalize(top_k, epsilon, weights);
        return;
      }
      const double sum = AddInLanes(num_experts, [&](int64_t expert) {
        return static_cast<double>(ScoreExp(scratch.logit[expert] - largest));
      });
      for (int64_t slot = 0; slot < top_k; ++slot) {
        weights[slot] = weights[slot] / static_cast<float>(sum);
      }
      return;
    }
  }
}

void SelectSparseMixer(int64_t num_experts, int64_t top_k, float jitter, TokenScratch& scratch, int32_t* ids,
                       float* weights) {
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    scratch.choice[expert] = scratch.score[expert];
  }
  for (int64_t slot = 0; slot < top_k; ++slot) {
    int64_t best = -1;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      const float x = scratch.choice[expert];
      best = !std::isnan(x) && (best < 0 || x > scratch.choice[best]) ? expert : best;
    }
    const float largest = scratch.choice[best];
    ids[slot] = static_cast<int32_t>(best);
    weights[slot] = 0.0F;
    if (largest > kMinusInfinity) {
      const double sum = AddInLanes(num_experts, [&](int64_t expert) {
        const float x = scratch.choice[expert];
        const float magnitude = std::fabs(x) > largest ? std::fabs(x) : largest;
        // 0/0, where the maximum and x are 0, is no distance: written so that it keeps the expert.
        const bool far = (largest - x) / magnitude > 2.0F * jitter;
        return far || std::isnan(x) || x == kMinusInfinity ? 0.0 : static_cast<double>(ScoreExp(x - largest));
      });
      weights[slot] = static_cast<float>(1.0 / sum);
    }
    scratch.choice[best] = kOutOfChoice;  // -inf logits stay selectable when nothing else is left
  }
}

void SortByWeight(int64_t top_k, int32_t* ids, float* weights) {
  for (int64_t slot = 1; slot < top_k; ++slot) {
    const int32_t id = ids[slot];
    const float weight = weights[slot];
    int64_t place = slot;
    for (; place > 0 && Before(weight, id, weights[place - 1], ids[place - 1]); --place) {
      ids[place] = ids[place - 1];
      weights[place] = weights[place - 1];
    }
    ids[place] = id;
    weights[place] = weight;
  }
}

}  // namespace fusedmoe
