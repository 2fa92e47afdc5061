#include <fusedmoe/machine.hpp>

#include <array>

#include "core/names.hpp"
#include "platform/cpu_features.hpp"
#include "platform/cuda/card.hpp"
#include "platform/topology.hpp"

namespace fusedmoe {
namespace {

Machine Detect() {
  const Topology& topology = HostTopology();
  Machine machine;
  machine.cpu_name = CpuName();
  machine.cpu_vendor = CpuVendor();
  machine.isa_mask = HostIsaMask();
  machine.num_cores = topology.num_cores;
  machine.memory_nodes = topology.memory_nodes;
  if (topology.l1d_bytes > 0) {
    machine.l1d_bytes = topology.l1d_bytes;
  }
  if (topology.l2_bytes > 0) {
    machine.l2_bytes = topology.l2_bytes;
  }
  machine.l3_bytes = topology.l3_bytes;
  machine.memory_bytes = topology.memory_bytes;
  cuda::DetectCard(machine);
  return machine;
}

struct IsaText {
  std::string_view name, needs;
};
/// In the order of Isa.
constexpr std::array kIsaTexts = {
#define FMOE_ISA_TEXT(id, name, needs) IsaText{name, needs},
    FMOE_ISA_TABLE(FMOE_ISA_TEXT)
#undef FMOE_ISA_TEXT
};

IsaText TextOf(Isa isa) {
  const auto index = static_cast<size_t>(isa);
  return index < kIsaTexts.size() ? kIsaTexts[index] : IsaText{"unknown", "unknown"};
}

}  // namespace

std::string_view IsaName(Isa isa) {
  return TextOf(isa).name;
}

std::string_view IsaNeeds(Isa isa) {
  return TextOf(isa).needs;
}

std::optional<Isa> ParseIsa(std::string_view name) {
  return ParseName<Isa>(kIsaTexts, name, &IsaText::name);
}

std::string IsaNames() {
  return JoinNames(kIsaTexts, &IsaText::name);
}

const Machine& HostMachine() {
  static const Machine machine = Detect();
  return machine;
}

}  // namespace fusedmoe
