#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "oracle/capability.hpp"
#include "oracle/host_table.hpp"

namespace fusedmoe {

/// A backend of upstream in one family's table.
struct DescribedBackend {
  std::string_view name;
  std::string_view word;  ///< what --moe-backend calls it; several rows may share one
  BackendChoice choice = BackendChoice::kAutomatic;
  std::string_view batched_of;          ///< takes the place of that one when rows arrive batched
  bool vllm_cutlass = false;            ///< refused unless allow_vllm_cutlass (FP8)
  std::span<const Capability> kernels;  ///< several: the first that can
};

/// A change of the order on some platforms or in some deployments.
struct OrderRule {
  enum class When : uint8_t { kAlways, kBlockFp8WithEp, kBlockFp8WithoutEp, kDataParallel };
  enum class Where : uint8_t { kFront, kBack };
  PlatformMask platforms = 0;
  When when = When::kAlways;
  std::string_view backend;
  Where where = Where::kFront;
};

struct DescribedTable {
  std::span<const DescribedBackend> rows;  ///< best first
  std::span<const OrderRule> order;
};

DescribedTable TableOf(SchemeFamily family);

/// Every name of this build's table and of all families', once.
std::vector<std::string_view> AllBackendNames();
/// Every --moe-backend word, once.
std::vector<std::string_view> AllBackendWords();

/// For a --moe-backend word that upstream knows and no table has, in any case: what it is there, and what to
/// name instead. Empty for all others.
std::string WhyNotDescribed(std::string_view word);

}  // namespace fusedmoe
