#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/cpu_costs.hpp>
#include <fusedmoe/dtype.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

/// The oracle: which backend would run a layer, on this machine or on a described one, what it would cost,
/// and why not the others. Everything here is a pure function of its arguments and thread-safe.
/// docs/oracle.md reads a verdict.

namespace fusedmoe {

/// What a caller asks of a selection beyond the problem itself.
struct SelectionRequest {
  /// The only backend that may be chosen, by its name or by upstream's --moe-backend word, in any case.
  /// Empty or "auto": the first of the table that can run the problem. Naming one restricts the choice, never
  /// the list.
  std::string backend;
  /// Environment switches as "NAME=VALUE"; the library itself never reads the environment (docs/oracle.md).
  std::vector<std::string> env;
  bool lora = false;  ///< adapters will be added to the experts
  /// Whether upstream's FP8 oracle may take its CUTLASS pair; empty: as upstream does, only for weights
  /// scaled per channel with activations scaled per token.
  std::optional<bool> allow_vllm_cutlass;
  DType router_logits_dtype = DType::kF32;
  bool operator==(const SelectionRequest&) const = default;
};

/// Success when something was chosen; otherwise kUnsupported with one clause for every candidate and every
/// reason.
Status ToStatus(const Selection& selection);

enum class PlatformKind : uint8_t { kNvidia, kAmd, kIntelGpu, kCpu };
std::string_view PlatformKindName(PlatformKind kind);  ///< "cuda", "rocm", "xpu", "cpu"

/// A machine as a row of facts: what verdicts and expected times need. Rates are dense peaks of one device; 0
/// means that the format has no matrix instruction there (or, for `host`, that nobody has measured it).
struct Platform {
  std::string name;   ///< "sm90", "cpu-amx", "host"
  std::string model;  ///< the device whose figures these are
  PlatformKind kind = PlatformKind::kCpu;
  int capability = 0;      ///< NVIDIA: 90 is 9.0; AMD: 942 is gfx942
  double memory_gbps = 0;  ///< 10^9 bytes a second
  double f16_tflops = 0;   ///< BF16 and FP16
  double fp8_tflops = 0;
  double fp4_tflops = 0;
  double int8_tops = 0;
  int64_t memory_bytes = 0;
  std::string source;  ///< where the figures stand
  /// CPUs by feature set and the host answer with the backends of this build; the others with upstream's
  /// tables.
  bool runs_this_build = false;
  Machine machine;  ///< only where runs_this_build
};

/// Every described platform. The host is not among them: it is detected (FindPlatform("host")).
std::span<const Platform> DescribedPlatforms();
/// A described platform or "host". Errors: kUsage with the names that exist.
Result<Platform> FindPlatform(std::string_view name);

/// A switch of upstream that the oracle knows: name, upstream's default, the scheme families it concerns, its
/// effect.
struct SwitchInfo {
  std::string_view name;
  std::string_view default_value;
  std::string_view families;
  std::string_view what;
};
std::span<const SwitchInfo> SwitchTable();  ///< every switch that `ExplainRequest` takes

/// A question to the oracle. `config` describes the whole layer with `config.parallel` flattened; what one
/// rank sees is derived from both.
struct ExplainRequest {
  std::string problem;  ///< a name for the answer, e.g. "deepseek-v3"; free text
  MoeConfig config;
  Scheme scheme;
  std::string platform = "host";
  int64_t tokens = 1;
  int num_threads = 1;
  Determinism determinism = Determinism::kThreadInvariant;
  ActivationMode activation = ActivationMode::kAsCheckpoint;
  WeightTraits weights;
  /// Bytes of the projections around latent experts; 0: not known, taken as two matrices of config.dtype.
  int64_t latent_bytes = 0;
  std::string isa;                            ///< forced by name; empty: free
  std::string mode;                           ///< forced by name; empty: by token count
  std::shared_ptr<const CpuCosts> cpu_costs;  ///< as LayerOptions::cpu_costs
  std::string device = "cpu";                 ///< "cpu" or "cuda": where the layer would run on a host
  /// Asked for by name; empty: what the all-to-all backend hands over.
  std::optional<ActivationFormatKind> activation_format;
  /// Read bandwidth of the host in GB/s where the caller has measured it (probe.hpp); 0: unknown.
  double host_memory_gbps = 0;
  SelectionRequest selection;
};

/// What one forward of `tokens` costs one rank. Times are lower bounds at the stated rates.
struct Costs {
  double active_experts = 0;  ///< local experts that at least one token visits, under uniform routing
  /// Routed experts of this rank as the chosen backend holds them; with none chosen, in the scheme of the
  /// checkpoint.
  int64_t weight_bytes = 0;
  int64_t read_bytes = 0;  ///< weights of the active experts, hidden states in, output out
  int64_t flops = 0;       ///< two per multiply-add, the routes of this rank
  int64_t workspace_bytes = 0;
  int64_t exchange_bytes = 0;  ///< rows sent to other ranks and back
  int64_t memory_bytes = 0;    ///< weights, workspace, input and output
  double read_seconds = 0;     ///< 0: bandwidth unknown
  double compute_seconds = 0;  ///< 0: rate unknown
  double seconds = 0;          ///< the larger of both
  std::string rate;            ///< which rates bound: "4800 GB/s", "989 TFLOP/s f16"
};

/// The whole answer.
struct Explanation {
  ExplainRequest request;
  MoeConfig rank_config;  ///< sizes of one rank
  Platform platform;
  std::string family;  ///< the table that was asked: "NVFP4", "FP8", ..., "this build"
  Selection selection;
  Selection prepare_finalize;  ///< the same for the step around the experts; its plan carries the name only
  Costs costs;
  /// When nothing was chosen: the smallest changes of the question that were tried and do work, nearest
  /// first.
  std::vector<std::string> alternatives;
};

/// `backend` where it names one, else empty: "auto" is upstream's word for no choice, in any case.
std::string_view NamedBackend(std::string_view backend);

/// What the weights themselves decide of a request: zero points, activation order, smoothing factors, biases,
/// types of scales, what integers were stored as, blocks that end inside a stripe. `experts` are those of the
/// rank that the request is about; if it has none, the request is unchanged. Errors: those of loading one
/// expert.
Status TakeWeights(const ExpertSource& experts, ExplainRequest& request);

/// Asks the oracle. Errors: kUsage for unknown names (platform, backend, all2all) and bad switch values,
/// kUnsupported for sizes that cannot be split. That no backend can run it is an answer: `selection.chosen`
/// is empty.
Result<Explanation> Explain(const ExplainRequest& request);

/// What would have to change for `backend` to be chosen: found by changing the question and asking again.
struct WhyNotAnswer {
  std::string backend;
  bool chosen_already = false;
  bool reachable = false;
  std::vector<Verdict> verdicts;     ///< why it is not chosen now
  std::vector<std::string> changes;  ///< all of them together make it the choice; none can be left out
  std::vector<Verdict> remaining;    ///< when not reachable: what no change could remove
};
/// Errors: those of Explain, and kUsage for a name that the table does not hold.
Result<WhyNotAnswer> WhyNot(const ExplainRequest& request, std::string_view backend);

/// Two answers side by side: what differs in choice, verdicts, machine and cost.
struct Difference {
  std::string field;  ///< "chosen", "prepare_finalize", "candidate MARLIN", "memory_gbps", ...
  std::string first;
  std::string second;
};
std::vector<Difference> Diff(const Explanation& first, const Explanation& second);

/// Tables for people.
std::string ToString(const Explanation& explanation);
std::string ToString(const WhyNotAnswer& answer);
std::string ToString(std::span<const Difference> differences);

}  // namespace fusedmoe
