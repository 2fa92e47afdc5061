#include <fusedmoe/machine.hpp>

#include "platform/cpu_features.hpp"
#include "platform/cuda/card.hpp"
#include "platform/topology.hpp"

namespace fusedmoe {
namespace {

Machine Detect() {
  const Topology& topology = HostTopology();
  Machine machine;
  machine.cpu_name = CpuName();
  machine.isa_mask = HostIsaMask();
  machine.num_cores = topology.num_cores;
  machine.num_numa_nodes = topology.num_numa_nodes;
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

}  // namespace

std::string_view IsaName(Isa isa) {
  switch (isa) {
#define FMOE_ISA_CASE(id, name, needs) \
  case Isa::id:                        \
    return name;
    FMOE_ISA_TABLE(FMOE_ISA_CASE)
#undef FMOE_ISA_CASE
  }
  return "unknown";
}

std::string_view IsaNeeds(Isa isa) {
  switch (isa) {
#define FMOE_ISA_CASE(id, name, needs) \
  case Isa::id:                        \
    return needs;
    FMOE_ISA_TABLE(FMOE_ISA_CASE)
#undef FMOE_ISA_CASE
  }
  return "unknown";
}

std::optional<Isa> ParseIsa(std::string_view name) {
#define FMOE_ISA_MATCH(id, text, needs) \
  if (name == text) {                   \
    return Isa::id;                     \
  }
  FMOE_ISA_TABLE(FMOE_ISA_MATCH)
#undef FMOE_ISA_MATCH
  return std::nullopt;
}

std::string IsaNames() {
  std::string names;
#define FMOE_ISA_LIST(id, text, needs) names += (names.empty() ? "" : ", ") + std::string(text);
  FMOE_ISA_TABLE(FMOE_ISA_LIST)
#undef FMOE_ISA_LIST
  return names;
}

const Machine& HostMachine() {
  static const Machine machine = Detect();
  return machine;
}

}  // namespace fusedmoe
