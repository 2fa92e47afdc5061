#pragma once

#include <string>
#include <vector>

namespace fusedmoe {

/// What one way of multiplying the tokens of an expert with its weights takes: nanoseconds of one thread. A
/// block is 16 rows of weights by 64 k; a pass brings every block of the expert to some tokens, in rows of a
/// tile. An expert takes fixed + blocks * max(read, passes * decode + rows * row + tokens * token).
struct CpuPathCost {
  double fixed_ns = 0;   ///< of an expert, whatever its size
  double read_ns = 0;    ///< of a block: from memory
  double decode_ns = 0;  ///< of a block and pass
  double row_ns = 0;     ///< of a block and row: multiplied, whether a token stands there or not
  double token_ns = 0;   ///< of a block and token: packed, multiplied, summed
  bool operator==(const CpuPathCost&) const = default;
};

/// The paths of one kind of layer on one instruction set. `weights` and `activations` name the kernel
/// ("nvfp4", "u4_group128"; "f32", "a24", "a16", "a8", "a4", "mx"); `codes`: rows enter as the scheme
/// quantizes them.
struct CpuCostRow {
  std::string scheme;  ///< the scheme that was measured; the kernel serves others as well
  std::string isa;     ///< "amx"
  std::string weights;
  std::string activations;
  bool codes = false;
  CpuPathCost vectors;  ///< the micro-kernels
  CpuPathCost tiles;    ///< the matrix unit
  bool has_tiles = false;
  double misfit = 0;  ///< largest relative difference between these figures and what they were made from
  bool operator==(const CpuCostRow&) const = default;
};

/// What `fusedmoe tune` found on one machine, and what chooses the path of an expert there
/// (LayerOptions::cpu_costs, docs/kernels_paths.md). Layers whose kernels have no row use the figures of this
/// build.
struct CpuCosts {
  std::string cpu;      ///< Machine::cpu_name
  std::string version;  ///< of the build whose kernels were measured
  int threads = 1;
  std::string source;  ///< where it was read from; plans name it
  std::vector<CpuCostRow> rows;
};

}  // namespace fusedmoe
