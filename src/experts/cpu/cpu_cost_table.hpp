#pragma once

#include <span>
#include <string_view>

#include <fusedmoe/cpu_costs.hpp>

namespace fusedmoe::cpu {

/// Figures that come with the library, best known first: `label` says of which CPU, `match` is a part of the
/// names of such CPUs (empty: names do not tell).
struct KnownCpu {
  std::string_view label;
  std::string_view match;
  CpuCosts costs;
};
std::span<const KnownCpu> KnownCpus();

}  // namespace fusedmoe::cpu
