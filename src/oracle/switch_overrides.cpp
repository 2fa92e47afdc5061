// What upstream's switches do to the tables of its families.
#include <algorithm>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include "core/names.hpp"
#include "oracle/platforms.hpp"
#include "oracle/switches.hpp"

namespace fusedmoe {
namespace {

/// How an override reads its flags.
enum class OverrideKind : uint8_t {
  kFlashInfer,   ///< set and false removes; true alone tries the list; true with a wish takes that one
  kAllOrNone,    ///< any of its flags set: all true takes the list, otherwise the list is removed
  kForce,        ///< true takes the list
  kForceOrDrop,  ///< true takes the list, set and false removes it
};

struct Override {
  OverrideKind kind;
  std::string_view flags[2];
  std::string_view backends[3];  ///< in the order they are tried
  PlatformMask platforms = ~PlatformMask{0};
};

constexpr Override kNvfp4Overrides[] = {
    {OverrideKind::kFlashInfer,
     {"VLLM_USE_FLASHINFER_MOE_FP4"},
     {"FLASHINFER_CUTLASS", "FLASHINFER_TRTLLM", "FLASHINFER_CUTEDSL"}},
    {OverrideKind::kForce, {"VLLM_TEST_FORCE_FP8_MARLIN"}, {"MARLIN"}},
};
constexpr Override kFp8Overrides[] = {
    {OverrideKind::kFlashInfer, {"VLLM_USE_FLASHINFER_MOE_FP8"}, {"FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS"}},
    {OverrideKind::kAllOrNone,
     {"VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"},
     {"DEEPGEMM", "BATCHED_DEEPGEMM"}},
    {OverrideKind::kForce, {"VLLM_TEST_FORCE_FP8_MARLIN"}, {"MARLIN"}},
    {OverrideKind::kAllOrNone, {"VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"}, {"AITER"}, on::kAmd},
};
constexpr Override kUnquantizedOverrides[] = {
    {OverrideKind::kFlashInfer,
     {"VLLM_USE_FLASHINFER_MOE_FP16"},
     {"FLASHINFER_TRTLLM", "FLASHINFER_CUTLASS"}},
    {OverrideKind::kAllOrNone, {"VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"}, {"AITER"}, on::kAmd},
};
constexpr Override kMxfp4Overrides[] = {
    {OverrideKind::kForceOrDrop, {"VLLM_MXFP4_USE_MARLIN"}, {"MARLIN", "BATCHED_MARLIN"}},
    {OverrideKind::kForceOrDrop,
     {"VLLM_USE_FLASHINFER_MOE_MXFP4_BF16"},
     {"FLASHINFER_TRTLLM_BF16", "FLASHINFER_CUTLASS_BF16"}},
    {OverrideKind::kForceOrDrop, {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8"}, {"FLASHINFER_TRTLLM_MXFP8"}},
    {OverrideKind::kForceOrDrop,
     {"VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8_CUTLASS"},
     {"FLASHINFER_CUTLASS_MXFP8"}},
    {OverrideKind::kAllOrNone,
     {"VLLM_ROCM_USE_AITER", "VLLM_ROCM_USE_AITER_MOE"},
     {"AITER_MXFP4_BF16", "AITER_MXFP4_FP8", "AITER_MXFP4_MXFP4"},
     on::kAmd},
};

std::span<const Override> OverridesOf(SchemeFamily family) {
  switch (family) {
    case SchemeFamily::kNvfp4:
      return kNvfp4Overrides;
    case SchemeFamily::kFp8:
      return kFp8Overrides;
    case SchemeFamily::kUnquantized:
      return kUnquantizedOverrides;
    case SchemeFamily::kMxfp4:
    case SchemeFamily::kMxfp4GptOss:
      return kMxfp4Overrides;
    case SchemeFamily::kMxfp8:
    case SchemeFamily::kInt8:
    case SchemeFamily::kWna16:
    case SchemeFamily::kW4a8:
    case SchemeFamily::kOcpMx:
      return {};
  }
  return {};
}

std::string Given(const Switches& switches, std::string_view name) {
  return fmt::format("{}={}", name, switches.Value(name));
}

/// The backend that VLLM_FLASHINFER_MOE_BACKEND wishes for; empty: the wish cannot be met, and the note says
/// why.
std::string_view FlashInferWish(const Override& rule, const Switches& switches, PlatformMask platform,
                                Overrides& out) {
  constexpr std::string_view kName = "VLLM_FLASHINFER_MOE_BACKEND";
  const std::string_view wish = switches.Value(kName);
  const bool sm100 = (platform & on::kSm100Family) != 0;
  const std::string_view backend = FlashInferBackendOf(wish, sm100 ? 100 : platform == on::kSm90 ? 90 : 0);
  if (wish == "latency" && !sm100) {
    out.notes.push_back(
        fmt::format("{}=latency means FLASHINFER_TRTLLM only on the sm100 family; here it falls back to "
                    "FLASHINFER_CUTLASS",
                    kName));
  }
  if (backend.empty()) {
    out.notes.push_back(
        fmt::format("{}={} is none of throughput, latency, masked_gemm: nothing can be chosen", kName, wish));
    return {};
  }
  if (wish != "throughput" && wish != "latency" && wish != "masked_gemm") {
    out.notes.push_back(
        fmt::format("{}={} is none of throughput, latency, masked_gemm; on sm90 upstream then takes "
                    "FLASHINFER_CUTLASS",
                    kName, wish));
  }
  if (std::find(std::begin(rule.backends), std::end(rule.backends), backend) == std::end(rule.backends)) {
    out.notes.push_back(
        fmt::format("{}={} asks for {}, which has no kernel for these weights: nothing can be chosen", kName,
                    wish, backend));
    return {};
  }
  return backend;
}

std::vector<std::string_view> BackendsOf(const Override& rule) {
  std::vector<std::string_view> backends;
  for (const std::string_view backend : rule.backends) {
    if (!backend.empty()) {
      backends.push_back(backend);
    }
  }
  return backends;
}

Verdict SwitchVerdict(std::string sentence, std::string actual, std::string required) {
  return {Reason::kSwitch, std::move(sentence), std::move(actual), std::move(required)};
}

void Remove(const Override& rule, const std::string& cause, Overrides& out) {
  for (const std::string_view backend : BackendsOf(rule)) {
    out.removed.push_back(
        {backend, SwitchVerdict(fmt::format("{} removes {}", cause, backend), cause, "not set")});
  }
}

void Restrict(const std::string& cause, std::vector<std::string_view> backends, Overrides& out) {
  out.only_verdict = SwitchVerdict(
      fmt::format("{} allows only {}", cause, backends.empty() ? "what does not exist" : JoinNames(backends)),
      cause, "not set");
  out.only = std::move(backends);
}

void Apply(const Override& rule, const Switches& switches, PlatformMask platform, Overrides& out) {
  const std::string_view flag = rule.flags[0];
  switch (rule.kind) {
    case OverrideKind::kFlashInfer:
      if (!switches.IsSet(flag)) {
        return;
      }
      if (!switches.IsTrue(flag)) {
        Remove(rule, Given(switches, flag), out);
      } else if (switches.IsSet("VLLM_FLASHINFER_MOE_BACKEND")) {
        const std::string_view wish = FlashInferWish(rule, switches, platform, out);
        Restrict(
            fmt::format("{} with {}", Given(switches, flag), Given(switches, "VLLM_FLASHINFER_MOE_BACKEND")),
            wish.empty() ? std::vector<std::string_view>{} : std::vector<std::string_view>{wish}, out);
      } else {
        Restrict(Given(switches, flag), BackendsOf(rule), out);
      }
      return;
    case OverrideKind::kAllOrNone: {
      bool any_set = false;
      bool all_true = true;
      std::string cause;
      for (const std::string_view name : rule.flags) {
        any_set = any_set || switches.IsSet(name);
        all_true = all_true && switches.IsTrue(name);
        if (switches.IsSet(name)) {
          cause += fmt::format("{}{}", cause.empty() ? "" : " and ", Given(switches, name));
        }
      }
      if (any_set && all_true) {
        Restrict(cause, BackendsOf(rule), out);
      } else if (any_set) {
        Remove(rule, cause, out);
      }
      return;
    }
    case OverrideKind::kForce:
    case OverrideKind::kForceOrDrop:
      if (switches.IsTrue(flag)) {
        Restrict(Given(switches, flag), BackendsOf(rule), out);
      } else if (switches.IsSet(flag) && rule.kind == OverrideKind::kForceOrDrop) {
        Remove(rule, Given(switches, flag), out);
      }
      return;
  }
}

}  // namespace

std::string_view FlashInferBackendOf(std::string_view wish, int capability) {
  if (wish == "masked_gemm") {
    return "FLASHINFER_CUTEDSL";
  }
  if (wish == "latency" && capability / 10 == 10) {
    return "FLASHINFER_TRTLLM";
  }
  return wish == "latency" || wish == "throughput" || capability == 90 ? "FLASHINFER_CUTLASS" : "";
}

Overrides ApplySwitches(SchemeFamily family, const Switches& switches, const Platform& platform) {
  Overrides out;
  const PlatformMask bit = BitOf(platform);
  for (const Override& rule : OverridesOf(family)) {
    if (rule.platforms != ~PlatformMask{0} && (rule.platforms & bit) == 0) {
      continue;
    }
    const SwitchInfo* info = FindSwitch(rule.flags[0]);
    if (info == nullptr || !Concerns(*info, family)) {  // of gpt-oss alone, in a list of all MXFP4
      continue;
    }
    Apply(rule, switches, bit, out);
    if (out.only) {
      break;
    }
  }
  return out;
}

}  // namespace fusedmoe
