#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/oracle.hpp>

#include "options.hpp"
#include "ranks.hpp"

/// What `fusedmoe explain` was asked, as requests to the oracle.
namespace fusedmoe::cli {

struct ExplainFlags {
  CheckpointFlags checkpoint;
  PlanFlags plan;
  ParallelSizes parallel;
  bool sequence_parallel = false;
  int64_t rank = 0;
  std::optional<int64_t> layer;
  std::string problem;
  std::string scheme;
  std::string platform = "host";
  std::vector<std::string> diff;
  std::string why_not;
  std::vector<std::string> env;
  bool lora = false;
  std::string logits_dtype = "F32";
  std::string allow_vllm_cutlass;  // empty: as vLLM has it
  int64_t tokens = 1;
  int threads = 0;
  bool threads_given = false;  // not by the environment
};

/// The layer in question. Of a described one there is no checkpoint.
struct AskedLayer {
  std::shared_ptr<const Checkpoint> checkpoint;
  int64_t layer = 0;
};

/// Sets `asked` too. Errors: kUsage for options that do not go together; those of opening the checkpoint.
Result<ExplainRequest> RequestOf(const ExplainFlags& flags, AskedLayer& asked);

/// One side of --diff: the question with another platform, deployment, or both, as "sm90", "dp=8,ep" or
/// "sm90,dp=8,ep,all2all=deepep_low_latency". A word of a deployment replaces that of the options.
Result<ExplainRequest> SideOf(const ExplainFlags& flags, const AskedLayer& asked,
                              const ExplainRequest& question, const std::string& text);

}  // namespace fusedmoe::cli
