#pragma once

#include <cstdint>

#include "routing/methods.hpp"
#include "routing/score_math.hpp"

namespace fusedmoe {

/// Room for one token. Lives on the stack of the task that routes it.
struct TokenScratch {
  float logit[kMaxRoutedExperts];
  float score[kMaxRoutedExperts];   ///< unbiased
  float choice[kMaxRoutedExperts];  ///< what decides: biased, -inf outside of the groups kept
  float chosen[kMaxRoutedExperts];  ///< choices of the selected, in descending order
};

/// `scratch.score` from `scratch.logit`. NaN and infinite scores become 0, except that a logit of -inf keeps
/// its meaning "never" where logits are the scores.
void ComputeScores(Score score, int64_t num_experts, TokenScratch& scratch);

/// `scratch.choice` from the scores: plus `bias` (may be null), then, with more than one group, -inf in all
/// but the best `topk_groups` groups (none with kEveryGroup). A group counts by its largest choice, or by the
/// sum of its two largest where `groups_by_two`.
void ComputeChoices(int64_t num_experts, const float* bias, int64_t num_groups, int64_t topk_groups,
                    bool groups_by_two, TokenScratch& scratch);

/// Ids of the `top_k` best choices among `count` experts from `first`, best first.
void SelectTopK(int64_t first, int64_t count, int64_t top_k, TokenScratch& scratch, int32_t* ids);

/// Weights of the selected ids: what `weighting` says, not yet scaled.
void ComputeWeights(Weighting weighting, int64_t num_experts, int64_t top_k, float epsilon,
                    const TokenScratch& scratch, const int32_t* ids, float* weights);

/// Phi-MoE: `top_k` successive maxima of the logits, each weighted by the softmax over the experts not yet
/// taken whose logit is near the maximum: (max - x) / max(|x|, max) <= 2 jitter.
void SelectSparseMixer(int64_t num_experts, int64_t top_k, float jitter, TokenScratch& scratch, int32_t* ids,
                       float* weights);

/// Divides by (sum + epsilon); a sum of 0 counts as 1.
void Renormalize(int64_t top_k, float epsilon, float* weights);

/// Puts a token's slots into descending weight, equal weights by ascending id.
void SortByWeight(int64_t top_k, int32_t* ids, float* weights);

}  // namespace fusedmoe
