#include <fusedmoe/jobs/simulate.hpp>

#include <vector>

#include "core/names.hpp"

namespace fusedmoe {
namespace {

constexpr double kMicro = 1e-6;

// h800_cx7: bandwidths are those of the parts (400 Gb/s; NVLink as DeepEP measures it), latencies are fitted
// to the low-latency table that DeepEP publishes for it (128 tokens, hidden 7168, top 8, FP8 out, BF16 back).
// The same for h100_cx7 within a node. Memory and arithmetic rates are what kernels reach, about 85 % of the
// data sheet. shm and ethernet: MPI between processes of a two-core x86 machine.
const std::vector<LinkModel>& Table() {
  static const std::vector<LinkModel> links = {
      {"h800_cx7", "H800 nodes of 8, ConnectX-7 at 400 Gb/s a rank", 8, 50, 160, 42 * kMicro, 52 * kMicro,
       35 * kMicro, 34 * kMicro, 2850, 1.2e6},
      {"h100_cx7", "H100 nodes of 8, ConnectX-7 at 400 Gb/s a rank", 8, 50, 270, 42 * kMicro, 52 * kMicro,
       18 * kMicro, 25 * kMicro, 2850, 1.2e6},
      {"shm", "processes of one CPU machine, shared memory", 1 << 20, 1, 6, 15 * kMicro, 15 * kMicro,
       2 * kMicro, 2 * kMicro, 20, 500},
      {"ethernet", "CPU machines with one rank each, TCP at 10 Gb/s", 1, 1.1, 6, 18 * kMicro, 18 * kMicro,
       2 * kMicro, 2 * kMicro, 20, 500},
  };
  return links;
}

}  // namespace

std::span<const LinkModel> LinkModels() {
  return Table();
}

Result<LinkModel> ParseLink(std::string_view name) {
  for (const LinkModel& link : Table()) {
    if (link.name == name) {
      return link;
    }
  }
  return UnknownName("link", name, JoinNames(Table(), &LinkModel::name));
}

}  // namespace fusedmoe
