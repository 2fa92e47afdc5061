#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/oracle.hpp>
#include <fusedmoe/status.hpp>

#include "oracle/scheme_key.hpp"

namespace fusedmoe {

/// Environment switches as given, with upstream's two questions: is it set at all, and is it true.
class Switches {
 public:
  /// "NAME=VALUE" each; a later value of a name replaces the earlier one. Errors: kUsage for text without
  /// '=', for a name that no switch has, with those that come nearest, and for a value that a flag cannot
  /// have.
  static Result<Switches> Parse(std::span<const std::string> env);

  bool IsSet(std::string_view name) const;
  /// The value of a flag, or upstream's default when it is not set.
  bool IsTrue(std::string_view name) const;
  /// The text given; empty when not set.
  std::string_view Value(std::string_view name) const;

  /// The same without one of them.
  Switches Without(std::string_view name) const;

  struct Given {
    std::string name;
    std::string value;
  };
  const std::vector<Given>& given() const { return given_; }

 private:
  std::vector<Given> given_;
};

/// What the switches, or a name, leave of a family's table.
struct Overrides {
  /// Set when something decided: only these may be chosen, in this order.
  std::optional<std::vector<std::string_view>> only;
  Verdict only_verdict;  ///< what all others are told
  struct Removed {
    std::string_view backend;
    Verdict verdict;
  };
  std::vector<Removed> removed;
  std::vector<std::string> notes;
};

/// Applies upstream's overrides of the family, in upstream's order: the first that names backends decides,
/// those that only remove add up.
Overrides ApplySwitches(SchemeFamily family, const Switches& switches, const Platform& platform);

/// The backend that a word of VLLM_FLASHINFER_MOE_BACKEND means on a compute capability (90, 100 ...):
/// latency is FLASHINFER_TRTLLM on the sm100 family and FLASHINFER_CUTLASS elsewhere; any word is the latter
/// on sm90. Empty: the word means nothing there.
std::string_view FlashInferBackendOf(std::string_view wish, int capability);

/// True when the switch concerns the family at all.
bool Concerns(const SwitchInfo& info, SchemeFamily family);
const SwitchInfo* FindSwitch(std::string_view name);

}  // namespace fusedmoe
