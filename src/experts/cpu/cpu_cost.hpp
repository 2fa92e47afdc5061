#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include <fusedmoe/cpu_costs.hpp>
#include <fusedmoe/machine.hpp>

#include "experts/cpu/kernels/kernels.hpp"

/// Which path multiplies an expert, as a pure function of its token count and a few constants (CpuPathCost).
/// Vectors are the micro-kernels, short tiles (few tokens: bound by reading) as well as tall ones: a pass for
/// every `max_height` tokens, no rows but tokens. The matrix unit (CpuCostRow::tiles): a pass for
/// kMaxJobTokens, and the rows of all its tiles.
namespace fusedmoe::cpu {

/// The weights of an expert, as far as costs go.
struct ExpertWork {
  int64_t blocks = 0;      ///< of 16 rows and 64 k, both GEMMs
  int64_t max_height = 8;  ///< tokens that vectors decode a block for: of the tallest tile, or of several
  bool padded = false;     ///< vectors multiply every row of a tile, those without a token too (NextTile)
};

/// How often the constants of a path count.
struct PathCounts {
  double passes = 0, rows = 0, tokens = 0;
};
PathCounts VectorCounts(const ExpertWork& work, int64_t tokens);
PathCounts MatrixUnitCounts(int64_t tokens);

/// Nanoseconds of one thread; 0 for no tokens. Never less for more tokens.
double VectorNanoseconds(const CpuPathCost& cost, const ExpertWork& work, int64_t tokens);
double MatrixUnitNanoseconds(const CpuPathCost& cost, const ExpertWork& work, int64_t tokens);

/// Token counts beyond this one are taken to behave like it.
inline constexpr int64_t kMostCrossoverTokens = 1024;
/// The count from which on the unit takes the expert: the one that keeps the worst ratio of the chosen path
/// to the other as small as it can be, since the unit takes as long for 17 tokens as for 32 and curves may
/// cross more than once. The smallest of equals; kMostCrossoverTokens + 1: never.
int64_t MatrixUnitCrossover(const CpuCostRow& row, const ExpertWork& work);

/// Up to so many tokens of an expert, reading or decoding a block takes longer than multiplying it; at
/// least 1.
int64_t LatencyTokens(const CpuPathCost& vectors);

std::string_view WeightKernelName(WeightKernel kernel);
std::string_view TileKindName(TileKind tile);

/// Figures and where they come from, as plans print it.
struct CostChoice {
  const CpuCostRow* row = nullptr;  ///< null: nobody has measured these kernels
  std::string source;
};
/// The row of `tuned` (may be null), or else the nearest of the figures that come with the library: of this
/// kernel, of these weights with other activations, of weights with other groups.
CostChoice FindCost(const CpuCosts* tuned, const Machine& machine, Isa isa, WeightKernel kernel,
                    TileKind tile, bool codes);

}  // namespace fusedmoe::cpu
