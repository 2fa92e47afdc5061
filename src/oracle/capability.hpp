#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "oracle/question.hpp"

/// What a backend of upstream can do, as data, and the one function that compares it with a question.

namespace fusedmoe {

/// A set of enumerators as bits.
template <typename Enum>
constexpr uint32_t Set(std::initializer_list<Enum> members) {
  uint32_t set = 0;
  for (const Enum member : members) {
    set |= uint32_t{1} << static_cast<int>(member);
  }
  return set;
}
template <typename Enum>
constexpr bool Contains(uint32_t set, Enum member) {
  return (set >> static_cast<int>(member) & 1U) != 0;
}
inline constexpr uint32_t kAny = ~uint32_t{0};

/// Weight formats together with activation formats, and where (beside the platforms of the record) they work.
struct SchemePair {
  uint32_t weights = 0;
  uint32_t activations = 0;
  PlatformMask platforms = kAny;
};

/// Deployments that a record excludes, as bits.
enum class Excludes : uint32_t {
  kNothing = 0,
  kAllToAll = 1,           ///< any all-to-all backend
  kAllToAllButGather = 2,  ///< any but allgather_reducescatter and what runs as it
  kDeepEpHighThroughput = 4,
  kFlashInferAllToAll = 8,
  kExpertParallel = 16,  ///< ep_size above 1
  kSeveralRanks = 32,
  kEplb = 64,
};
constexpr Excludes operator|(Excludes left, Excludes right) {
  return static_cast<Excludes>(static_cast<uint32_t>(left) | static_cast<uint32_t>(right));
}
constexpr bool Has(Excludes set, Excludes one) {
  return (static_cast<uint32_t>(set) & static_cast<uint32_t>(one)) != 0;
}

/// How a backend learns which of the global experts are its own.
enum class ExpertIds : uint8_t {
  kMapped,      ///< an expert map: any placement
  kContiguous,  ///< an offset and a count: equal shards of consecutive experts
  kLocal        ///< not at all: rows must arrive grouped by local expert, or the rank owns all
};

/// Clamps and constants of the activation beyond its kind.
enum class Parameters : uint8_t {
  kFixed,      ///< swigluoai with alpha 1.702, beta 1, limit 7; swiglustep with limit 7; silu without a limit
  kSiluLimit,  ///< the same, and a clamp in silu
  kFree        ///< any alpha, beta and limit
};

struct SizeRule {
  int64_t multiple = 1;
  int64_t max = std::numeric_limits<int64_t>::max();
};

/// Which formula of temporary memory applies.
enum class Scratch : uint8_t {
  kNone,
  kTriton,
  kMarlin,
  kCutlass,
  kCutlassFp4,
  kDeepGemm,
  kOutputOnly,
  kBatched,
  kOneActivation
};

/// What one kernel of a backend can do. Defaults are the permissive ones of modular kernels.
struct Capability {
  std::string_view variant;  ///< "monolithic" where a backend has several kernels; else empty
  PlatformMask platforms = 0;
  std::span<const SchemePair> schemes;
  uint32_t activations = 0;
  Parameters parameters = Parameters::kFixed;
  Excludes excludes = Excludes::kNothing;
  bool routes_inside = false;
  uint32_t routing = kAny;        ///< of those that route inside
  uint32_t router_logits = kAny;  ///< dtypes, of those that route inside
  bool f32_logits_for_deepseek = false;
  SizeRule hidden, intermediate;
  int64_t max_top_k = std::numeric_limits<int64_t>::max();
  SizeRule experts;
  ExpertIds ids = ExpertIds::kMapped;
  ActivationFormatKind format = ActivationFormatKind::kStandard;
  bool bias = false;
  bool zero_points = false;    ///< codes of the element
  int64_t group_multiple = 1;  ///< of integers: columns of a group
  bool group_index = false;
  bool batch_invariant = false;
  bool lora = false;
  bool needs_aiter = false;  ///< off unless VLLM_ROCM_USE_AITER=1
  bool int8_input = false;   ///< can quantize activations of weight-only schemes to int8
  uint32_t dtypes = Set({DType::kBF16, DType::kF16});
  ActivationMode activation_mode = ActivationMode::kAsCheckpoint;
  std::string_view mode = "throughput";
  int64_t pad_hidden = 1, pad_intermediate = 1;  ///< zero-padded up to these multiples when prepared
  std::span<const std::string_view> recipe;
  Scratch scratch = Scratch::kNone;
};

/// Every check that fails, in a fixed order: device, scheme, activation, deployment, routing, sizes, the
/// rest.
std::vector<Verdict> Check(const Capability& capability, const Question& question);

}  // namespace fusedmoe
