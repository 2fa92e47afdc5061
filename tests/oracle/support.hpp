#pragma once

#include <string>
#include <string_view>

#include <gtest/gtest.h>

#include <fusedmoe/oracle.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/problems.hpp>

namespace fusedmoe::testing {

/// A layer that every table has a kernel for: sizes divide by 256, softmax routing, silu.
inline ExplainRequest Request(std::string_view scheme, std::string_view platform) {
  ExplainRequest request;
  request.config.num_experts = 128;
  request.config.num_local_experts = 128;
  request.config.hidden = 2048;
  request.config.intermediate = 1024;
  request.config.routing.method = RoutingMethod::kRenormalize;
  request.config.routing.top_k = 8;
  Result<Scheme> parsed = ParseScheme(scheme);
  EXPECT_TRUE(parsed.ok()) << scheme;
  request.scheme = parsed.ok() ? *parsed : Scheme{};
  request.platform = platform;
  return request;
}

/// DP over `ranks` with expert parallelism and that exchange.
inline ParallelConfig ExpertParallel(int64_t ranks, std::string_view all2all) {
  ParallelSizes sizes;
  sizes.dp = ranks;
  sizes.enable_expert_parallel = true;
  sizes.all2all = all2all;
  Result<ParallelConfig> config = MakeParallelConfig(sizes);
  EXPECT_TRUE(config.ok()) << config.status().ToString();
  return config.ok() ? *config : ParallelConfig{};
}

inline Explanation Answer(const ExplainRequest& request) {
  Result<Explanation> explanation = Explain(request);
  EXPECT_TRUE(explanation.ok()) << explanation.status().ToString();
  return explanation.ok() ? *explanation : Explanation{};
}

inline std::string Chosen(const Selection& selection) {
  return selection.chosen ? selection.chosen->backend : "none";
}

inline const Candidate* Find(const Selection& selection, std::string_view backend) {
  for (const Candidate& candidate : selection.candidates) {
    if (candidate.backend == backend) {
      return &candidate;
    }
  }
  return nullptr;
}

inline const Verdict* FindVerdict(const Selection& selection, std::string_view backend, Reason reason) {
  const Candidate* candidate = Find(selection, backend);
  if (candidate == nullptr) {
    return nullptr;
  }
  for (const Verdict& verdict : candidate->verdicts) {
    if (verdict.reason == reason) {
      return &verdict;
    }
  }
  return nullptr;
}

inline bool AnyNote(const Selection& selection, std::string_view part) {
  for (const std::string& note : selection.notes) {
    if (note.find(part) != std::string::npos) {
      return true;
    }
  }
  return false;
}

}  // namespace fusedmoe::testing
