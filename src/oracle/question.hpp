#pragma once

#include <fusedmoe/oracle.hpp>
#include <fusedmoe/parallel.hpp>

#include "oracle/platforms.hpp"
#include "oracle/scheme_key.hpp"
#include "oracle/switches.hpp"

namespace fusedmoe {

/// What a capability record is compared with: the request with everything derived that checks look at.
struct Question {
  MoeConfig config;  ///< as one rank sees it
  Scheme scheme;
  WeightKey weight = WeightKey::kNone;
  ActivationKey activation = ActivationKey::kNone;
  SchemeFamily family = SchemeFamily::kUnquantized;
  Platform platform;
  PlatformMask platform_bit = 0;
  ActivationFormatKind format = ActivationFormatKind::kStandard;
  Determinism determinism = Determinism::kThreadInvariant;
  ActivationMode activation_mode = ActivationMode::kAsCheckpoint;
  WeightTraits weights;
  bool lora = false;
  bool on_card = false;  ///< of a host
  DType router_logits_dtype = DType::kF32;
  bool allow_vllm_cutlass = false;
  Switches switches;
};

/// Ranks that share the experts.
inline int64_t NumRanks(const ParallelConfig& parallel) {
  return parallel.use_ep ? parallel.ep_size : parallel.tp_size;
}
/// How this build exchanges rows: by the protocol of the named backend, where upstream would use one.
WireProtocol WireOf(const ParallelConfig& parallel);

/// "tp 1, dp 8, ep 8, deepep_low_latency"
std::string ParallelText(const ParallelConfig& config);

}  // namespace fusedmoe
