#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/workspace.hpp>

/// Every reason for which a backend may be refused, once: enumerator, code as JSON prints it, what is
/// compared.
#define FMOE_REASON_TABLE(X)                                                                    \
  X(kNone, "supported", "nothing stands against it")                                            \
  X(kDevice, "device", "the kind of device")                                                    \
  X(kIsa, "isa", "instruction sets of the CPU, compute capability of the card")                 \
  X(kNotBuilt, "not_built", "this build has no code for it")                                    \
  X(kScheme, "scheme", "weight and activation format")                                          \
  X(kActivation, "activation", "the non-linearity")                                             \
  X(kActivationParameters, "activation_parameters", "its alpha, beta or limit")                 \
  X(kNotGated, "not_gated", "experts without a gate projection")                                \
  X(kBias, "bias", "biases of the projections")                                                 \
  X(kZeroPoint, "zero_point", "zero points or activation order of the weights")                 \
  X(kParallel, "parallel", "the parallel configuration")                                        \
  X(kAllToAll, "all2all", "the all-to-all backend")                                             \
  X(kRouting, "routing", "the routing method")                                                  \
  X(kRouterLogitsDtype, "router_logits_dtype", "dtype of the router logits")                    \
  X(kHiddenSize, "hidden", "range or alignment of the hidden size")                             \
  X(kIntermediateSize, "intermediate", "range or alignment of the intermediate size")           \
  X(kTopK, "top_k", "experts per token")                                                        \
  X(kNumExperts, "num_experts", "number of experts")                                            \
  X(kExpertMap, "expert_map", "how local experts are described")                                \
  X(kActivationFormat, "activation_format", "Standard or BatchedExperts")                       \
  X(kRouterWeightOnInput, "router_weight_on_input", "router weights multiplied into the input") \
  X(kDtype, "dtype", "dtype of hidden states")                                                  \
  X(kDeterminism, "determinism", "the determinism level asked for")                             \
  X(kLora, "lora", "LoRA adapters")                                                             \
  X(kEplb, "eplb", "expert load balancing")                                                     \
  X(kSwitch, "switch", "an environment switch removed it")                                      \
  X(kNotNamed, "not_named", "chosen only by name, or another backend was named")                \
  X(kNotFirst, "not_first", "supported, but an earlier candidate was chosen")                   \
  X(kMemory, "memory", "bytes needed and available")

namespace fusedmoe {

enum class Reason : uint8_t {
#define FMOE_REASON_ENUMERATOR(id, code, what) id,
  FMOE_REASON_TABLE(FMOE_REASON_ENUMERATOR)
#undef FMOE_REASON_ENUMERATOR
};

/// The code of the table, e.g. "not_gated".
std::string_view ReasonCode(Reason reason);

/// One objection: a code, a sentence with the actual and the required value, and both values alone.
struct Verdict {
  Reason reason = Reason::kNone;
  std::string sentence;
  std::string actual;
  std::string required;
};

/// How a backend treats the activations of the scheme.
enum class ActivationMode : uint8_t {
  kAsCheckpoint,  ///< as the scheme says
  kWeightOnly,    ///< activation scales are ignored; 15 bits, bf16 or better
  kMaxExpanded,   ///< one activation scale, the maximum over all experts
  kMaxGateUp,     ///< one activation scale an expert, the larger of gate's and up's
  kA8             ///< opt-in: int8 per 64 in weight-only schemes; FP8 that is quantized has sums in f16
};
std::string_view ActivationModeName(ActivationMode mode);  ///< "as_checkpoint", "weight_only", "a8", ...

/// A named step of a layout recipe with its parameters, as `explain` and prepared files print it:
/// "pad_rows(96 -> 128)".
using RecipeText = std::vector<std::string>;

/// What will run, and what it is expected to cost. `mode` is "latency", "throughput", "masked" or
/// "reference".
struct Plan {
  std::string backend;
  std::string isa;  ///< empty where it does not apply
  std::string mode;
  ActivationFormatKind activation_format = ActivationFormatKind::kStandard;
  ActivationMode activation = ActivationMode::kAsCheckpoint;
  std::string prepare_finalize;  ///< the steps around the experts by name, "no_ep" on one rank
  std::string communicator;  ///< that joins the ranks, with the version of what moves rows; empty: one rank
  RecipeText recipe;         ///< how the layout of the weights is made of their canonical form
  /// How kernels hold activations that the scheme does not quantize: "BF16", "F32", or integers of 8, 15 or
  /// 22 bits with a scale for each 64 columns ("I15"); "..., BF16 on tiles" where a matrix unit takes some
  /// experts. Empty: the codes of the scheme.
  std::string input_dtype;
  std::string intermediate_dtype;  ///< of the values between the GEMMs before they are requantized
  std::string rows_dtype;          ///< of expert output rows before a token's rows are summed; empty: F32
  std::string arithmetic;   ///< the unit of probe.hpp that bounds its GEMMs ("vnni_int8"); empty: not named
  int64_t tile_tokens = 0;  ///< tokens of an expert from which on a CPU's matrix unit multiplies it; 0: never
  std::string costs;        ///< where that number and `mode` come from; empty: from nothing measured
  std::vector<WorkspaceBook::Entry> workspace;  ///< what a forward of max_tokens needs, piece by piece
  int64_t workspace_bytes = 0;
  double layout_error = 0.0;  ///< relative change of the weights by steps with a loss, root mean square
  int64_t weight_bytes = 0;   ///< prepared weights of this rank
  /// Memory nodes over which their pages are spread in turn; empty: wherever threads touch them first, the
  /// process's own policy says, or the system has what a file brought.
  std::vector<int> weight_nodes;
  int64_t read_bytes = 0;    ///< weight bytes one forward of `tokens` is expected to read
  int64_t flops = 0;         ///< of one forward of `tokens`, two per multiply-add
  int64_t latent = 0;        ///< width of the experts' rows, behind projections; 0: they read hidden states
  int64_t latent_bytes = 0;  ///< weights of the projections, which every forward reads
  int64_t latent_flops = 0;  ///< of the projections, not counted in `flops`
  int64_t tokens = 0;        ///< M that the costs are for (LayerOptions::plan_tokens)
  std::shared_ptr<const Plan> shared;  ///< plan of the shared expert, when there is one
};

/// One line of the table behind a choice.
struct Candidate {
  std::string backend;
  bool supported = false;         ///< could run
  std::vector<Verdict> verdicts;  ///< every failing check, or why a supported one was not chosen
};

/// The oracle's answer.
struct Selection {
  std::optional<Plan> chosen;
  std::vector<Candidate> candidates;
  std::vector<std::string> notes;  ///< switches without effect, fallbacks taken
};

/// The plan as the JSON of the command has it (docs/cli.md, `plan`), in one line.
std::string JsonText(const Plan& plan);

/// As a person reads it: the choice, then every candidate with its verdicts.
std::string ToString(const Selection& selection);
std::string ToString(const Plan& plan);
/// The candidates of a selection, one line a verdict.
std::string CandidateLines(const Selection& selection);
/// "3.4 MiB" and "16 tokens", as these texts and the command have them.
std::string BytesText(int64_t bytes);
std::string CountText(int64_t count, std::string_view what);

}  // namespace fusedmoe
