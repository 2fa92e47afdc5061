#include "experts/cpu/cpu_cost_table.hpp"

#include <vector>

/// What `fusedmoe tune` found on the machines that this was developed on, so that a layer chooses well before
/// anybody has measured. A line: scheme, instruction set, kernel, whether rows enter as codes, then what a
/// fixed part, a read, a decoded block, a row and a token take: of the vectors, and of the tiles (all 0:
/// none).
#define FMOE_COST(scheme, isa, weights, activations, codes, vf, vr, vd, vt, tf, tr, td, tw, tt)            \
  {scheme, isa, weights, activations, codes, {vf, vr, vd, 0, vt}, {tf, tr, td, tw, tt}, (tw) + (tt) > 0.0, \
   0.0},

namespace fusedmoe::cpu {

std::span<const KnownCpu> KnownCpus() {
  static const std::vector<KnownCpu> known = {
#include "experts/cpu/cpu_costs.inc"
  };
  return known;
}

}  // namespace fusedmoe::cpu
