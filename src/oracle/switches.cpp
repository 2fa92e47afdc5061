#include "oracle/switches.hpp"

#include <algorithm>
#include <cctype>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "oracle/platforms.hpp"

namespace fusedmoe {
namespace {

enum class SwitchKind : uint8_t { kFlag, kText };

struct SwitchRow {
  SwitchInfo info;
  SwitchKind kind;
};

constexpr SwitchRow kSwitches[] = {
#define FMOE_SWITCH(name, kind, default_value, families, what) \
  {{name, default_value, families, what}, SwitchKind::kind},
#include "oracle/switches.inc"
#undef FMOE_SWITCH
};

const SwitchRow* FindRow(std::string_view name) {
  const auto* found = std::find_if(std::begin(kSwitches), std::end(kSwitches),
                                   [name](const SwitchRow& row) { return row.info.name == name; });
  return found == std::end(kSwitches) ? nullptr : found;
}

/// Letters to insert, remove or replace to make one word of the other.
size_t Distance(std::string_view from, std::string_view to) {
  std::vector<size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= from.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= to.size(); ++j) {
      const size_t replaced = diagonal + (from[i - 1] == to[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({replaced, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back();
}

/// The three names that take the fewest letters to write.
std::vector<std::string_view> NearestSwitches(std::string_view name) {
  std::vector<std::pair<size_t, std::string_view>> names;
  for (const SwitchRow& row : kSwitches) {
    names.emplace_back(Distance(name.substr(0, 100), row.info.name), row.info.name);
  }
  std::stable_sort(names.begin(), names.end(),
                   [](const auto& one, const auto& other) { return one.first < other.first; });
  std::vector<std::string_view> nearest;
  for (size_t at = 0; at < 3; ++at) {
    nearest.push_back(names[at].second);
  }
  return nearest;
}

/// Upstream reads int(value); the ROCm flags take "true" too. Both spellings are taken everywhere.
std::optional<bool> ParseFlag(std::string_view value) {
  std::string lower(value);
  std::transform(lower.begin(), lower.end(), lower.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  if (lower == "true" || lower == "false") {
    return lower == "true";
  }
  std::string_view digits = lower;
  if (!digits.empty() && (digits.front() == '-' || digits.front() == '+')) {
    digits.remove_prefix(1);
  }
  if (digits.empty() || digits.size() > 9 ||
      !std::all_of(digits.begin(), digits.end(),
                   [](unsigned char letter) { return std::isdigit(letter) != 0; })) {
    return std::nullopt;
  }
  return digits.find_first_not_of('0') != std::string_view::npos;
}

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
  std::string names;
  for (const std::string_view backend : backends) {
    names += fmt::format("{}{}", names.empty() ? "" : ", ", backend);
  }
  out.only_verdict = SwitchVerdict(
      fmt::format("{} allows only {}", cause, names.empty() ? std::string("what does not exist") : names),
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

std::span<const SwitchInfo> SwitchTable() {
  static const std::vector<SwitchInfo> table = [] {
    std::vector<SwitchInfo> infos;
    for (const SwitchRow& row : kSwitches) {
      infos.push_back(row.info);
    }
    return infos;
  }();
  return table;
}

const SwitchInfo* FindSwitch(std::string_view name) {
  const SwitchRow* row = FindRow(name);
  return row == nullptr ? nullptr : &row->info;
}

bool Concerns(const SwitchInfo& info, SchemeFamily family) {
  if (info.families == "*") {
    return true;
  }
  std::string_view rest = info.families;
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    if (rest.substr(0, comma) == Name(family)) {
      return true;
    }
    rest = comma == std::string_view::npos ? std::string_view{} : rest.substr(comma + 1);
  }
  return false;
}

Result<Switches> Switches::Parse(std::span<const std::string> env) {
  Switches switches;
  for (const std::string& text : env) {
    const size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0) {
      return Status::Usage(fmt::format("switch '{}' is not of the form NAME=VALUE", text));
    }
    const std::string name = text.substr(0, equals);
    const std::string value = text.substr(equals + 1);
    const SwitchRow* row = FindRow(name);
    if (row == nullptr) {  // misspelt, it would leave the question as it was
      return Status::Usage(fmt::format("'{}' is no switch that is known; nearest are {}", name,
                                       fmt::join(NearestSwitches(name), ", ")))
          .WithHint("fusedmoe explain --help lists them all");
    }
    if (row->kind == SwitchKind::kFlag && !ParseFlag(value)) {
      return Status::Usage(fmt::format("{} is '{}'; it takes 0 or 1", name, value));
    }
    const auto same = [&name](const Given& given) { return given.name == name; };
    switches.given_.erase(std::remove_if(switches.given_.begin(), switches.given_.end(), same),
                          switches.given_.end());
    switches.given_.push_back({name, value});
  }
  return switches;
}

bool Switches::IsSet(std::string_view name) const {
  return std::any_of(given_.begin(), given_.end(), [name](const Given& given) { return given.name == name; });
}

std::string_view Switches::Value(std::string_view name) const {
  for (const Given& given : given_) {
    if (given.name == name) {
      return given.value;
    }
  }
  return {};
}

bool Switches::IsTrue(std::string_view name) const {
  const SwitchInfo* info = FindSwitch(name);
  const std::string_view text = IsSet(name)       ? Value(name)
                                : info == nullptr ? std::string_view{}
                                                  : info->default_value;
  return ParseFlag(text).value_or(false);
}

Switches Switches::Without(std::string_view name) const {
  Switches rest;
  for (const Given& given : given_) {
    if (given.name != name) {
      rest.given_.push_back(given);
    }
  }
  return rest;
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
