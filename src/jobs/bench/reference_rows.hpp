#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>

#include "jobs/bench/routings.hpp"

namespace fusedmoe::bench {

/// What the reference backend makes of single tokens, kept from one token count to the next.
class ReferenceRows {
 public:
  /// `activation`: the rule of the backend that is judged (a8 is judged against the scheme itself).
  ReferenceRows(const MoeConfig& config, const ExpertSource& source, ActivationMode activation)
      : config_(config), source_(source), activation_(activation) {}

  /// Computes `tokens` (indices into hidden [M, H] and the routing), expert by expert, so that no more than
  /// one expert a thread is held. Where one activation scale spans the batch, `tokens` are the batch, and
  /// nothing is kept.
  Status Compute(const std::vector<int64_t>& tokens, TensorView hidden, const Routing& routing,
                 const Executor& executor);
  /// Row of a token that was computed, `hidden` wide.
  const std::vector<float>& Row(int64_t token) const { return rows_.at(token); }
  /// Relative L2 distance of `rows` of an output from `tokens` that were computed, one for one.
  double DistanceOf(const std::vector<int64_t>& tokens, TensorView output,
                    const std::vector<int64_t>& rows) const;

 private:
  struct Visit {
    int64_t token = 0;
    float weight = 0;
  };
  Status RunExpert(int64_t expert, const std::vector<Visit>& visits, TensorView hidden, Tensor* output) const;
  Status ShareInputScales(const Executor& executor);
  Status RunBatch(const std::vector<int64_t>& tokens, TensorView hidden, const Routing& routing,
                  const Executor& executor);

  MoeConfig config_;
  ExpertSource source_;
  ActivationMode activation_;
  std::map<int64_t, std::vector<float>> rows_;
};

}  // namespace fusedmoe::bench
