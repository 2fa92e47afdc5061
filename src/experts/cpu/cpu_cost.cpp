#include "experts/cpu/cpu_cost.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "core/checked_math.hpp"
#include "experts/cpu/cpu_cost_table.hpp"
#include "experts/cpu/tiles/tile_table_isa.hpp"
#include "experts/cpu/vectors/tiles.hpp"

namespace fusedmoe::cpu {
namespace {

constexpr int kOtherWeights = 3, kOtherActivations = 16, kStranger = 64;

/// The k of a group as the name of a kernel ends ("u4_super32"), as a power of two; 0: none.
int GroupBits(std::string_view name) {
  int group = 0;
  for (const char c : name.substr(std::min(name.find('_'), name.size()))) {
    group = c >= '0' && c <= '9' ? group * 10 + (c - '0') : 0;
  }
  return group == 0 ? 0 : std::ilogb(group);
}

/// How far a row is from the kernel in question: 0 is that kernel, up to 2 the same with other activations,
/// then come those whose codes are of the same kind: the same activations first, then groups nearly as long.
int Distance(const CpuCostRow& row, std::string_view isa, std::string_view weights,
             std::string_view activations, bool codes) {
  const auto kind = [](std::string_view name) { return name.substr(0, name.find('_')); };
  if (row.isa != isa || kind(row.weights) != kind(weights)) {
    return kStranger;
  }
  const bool same_activations = row.activations == activations;
  const int codes_apart = row.codes == codes ? 0 : 1;
  if (row.weights == weights) {
    return same_activations ? codes_apart : 2;
  }
  const int groups = std::abs(GroupBits(row.weights) - GroupBits(weights));
  return kOtherWeights + 2 * std::min(groups, 7) + codes_apart + (same_activations ? 0 : kOtherActivations);
}

struct Nearest {
  const CpuCostRow* row = nullptr;
  int distance = kStranger;
};

Nearest FindNearest(const std::vector<CpuCostRow>& rows, std::string_view isa, std::string_view weights,
                    std::string_view activations, bool codes) {
  Nearest nearest;
  for (const CpuCostRow& row : rows) {
    const int distance = Distance(row, isa, weights, activations, codes);
    if (distance < nearest.distance) {
      nearest = {&row, distance};
    }
  }
  return nearest;
}

double Nanoseconds(const CpuPathCost& cost, const ExpertWork& work, const PathCounts& counts) {
  const double block =
      counts.passes * cost.decode_ns + counts.rows * cost.row_ns + counts.tokens * cost.token_ns;
  return cost.fixed_ns + static_cast<double>(work.blocks) * std::max(cost.read_ns, block);
}

/// Rows of the tiles that vectors cut so many tokens into.
int64_t PaddedTokens(const ExpertWork& work, int64_t tokens) {
  int tallest = 0;
  while (tallest + 1 < kNumHeights && kHeights[tallest + 1] <= work.max_height) {
    ++tallest;
  }
  int64_t rows = tokens / kHeights[tallest] * kHeights[tallest];
  for (int64_t left = tokens - rows; left > 0;) {
    const TileCut cut = NextTile(left, tallest, false);
    rows += kHeights[cut.height_index];
    left -= cut.tokens;
  }
  return rows;
}

}  // namespace

PathCounts VectorCounts(const ExpertWork& work, int64_t tokens) {
  const int64_t passes = CeilDiv(tokens, std::max<int64_t>(work.max_height, 1));
  return {static_cast<double>(passes), 0,
          static_cast<double>(work.padded ? PaddedTokens(work, tokens) : tokens)};
}

PathCounts MatrixUnitCounts(int64_t tokens) {
  // Tiles of fewer than twelve rows are no faster.
  const int64_t rows = tokens <= 16 ? 16 : 2 * TileBlocks(tokens) * std::max<int64_t>(TileTokens(tokens), 12);
  return {static_cast<double>(CeilDiv(tokens, kMaxJobTokens)), static_cast<double>(rows),
          static_cast<double>(tokens)};
}

double VectorNanoseconds(const CpuPathCost& cost, const ExpertWork& work, int64_t tokens) {
  return tokens > 0 ? Nanoseconds(cost, work, VectorCounts(work, tokens)) : 0.0;
}

double MatrixUnitNanoseconds(const CpuPathCost& cost, const ExpertWork& work, int64_t tokens) {
  return tokens > 0 ? Nanoseconds(cost, work, MatrixUnitCounts(tokens)) : 0.0;
}

int64_t MatrixUnitCrossover(const CpuCostRow& row, const ExpertWork& work) {
  if (!row.has_tiles) {
    return kMostCrossoverTokens + 1;
  }
  // below[n]: the worst ratio when counts 1..n stay with the vectors; above: when n.. go to the unit.
  std::array<double, kMostCrossoverTokens + 2> below{}, above{};
  const auto ratio = [&](int64_t tokens) {
    return VectorNanoseconds(row.vectors, work, tokens) /
           std::max(MatrixUnitNanoseconds(row.tiles, work, tokens), 1e-9);
  };
  for (int64_t n = 1; n <= kMostCrossoverTokens; ++n) {
    below[static_cast<size_t>(n)] = std::max(below[static_cast<size_t>(n - 1)], ratio(n));
  }
  for (int64_t n = kMostCrossoverTokens; n >= 1; --n) {
    above[static_cast<size_t>(n)] = std::max(above[static_cast<size_t>(n + 1)], 1 / std::max(ratio(n), 1e-9));
  }
  int64_t best = 1;
  for (int64_t n = 2; n <= kMostCrossoverTokens + 1; ++n) {
    const auto worst = [&](int64_t from) {
      return std::max(below[static_cast<size_t>(from - 1)], above[static_cast<size_t>(from)]);
    };
    if (worst(n) < worst(best)) {
      best = n;
    }
  }
  return best;
}

int64_t LatencyTokens(const CpuPathCost& vectors) {
  // A token costs at least its share of a pass, however little it adds to one.
  const double token_ns = std::max(vectors.token_ns, vectors.decode_ns / kMaxHeight);
  if (!(token_ns > 0)) {
    return kMostCrossoverTokens;
  }
  const double tokens = std::max(vectors.read_ns, vectors.decode_ns) / token_ns;
  return static_cast<int64_t>(std::clamp(tokens, 1.0, static_cast<double>(kMostCrossoverTokens)));
}

std::string_view WeightKernelName(WeightKernel kernel) {
  constexpr std::string_view kNames[] = {
#define FMOE_WEIGHT_NAME(id, name, ...) name,
      FMOE_WEIGHT_KERNEL_TABLE(FMOE_WEIGHT_NAME)
#undef FMOE_WEIGHT_NAME
  };
  return kernel < kNumWeightKernels ? kNames[kernel] : "none";
}

std::string_view TileKindName(TileKind tile) {
  switch (tile) {
    case kTileF32:
    case kTileRaised:
      return "f32";
    case kTileA24:
      return "a24";
    case kTileA16:
      return "a16";
    case kTileA8:
      return "a8";
    case kTileA4:
      return "a4";
    case kTileMx:
      return "mx";
    case kTileBf16:
      return "bf16";
    case kTileBf16Pair:
      return "bf16_pair";
    case kTileF16:
      return "f16";
    case kNumTileKinds:
      break;
  }
  return "none";
}

CostChoice FindCost(const CpuCosts* tuned, const Machine& machine, Isa isa, WeightKernel kernel,
                    TileKind tile, bool codes) {
  const std::string_view weights = WeightKernelName(kernel), activations = TileKindName(tile);
  CostChoice choice;
  if (tuned != nullptr) {
    const Nearest nearest = FindNearest(tuned->rows, IsaName(isa), weights, activations, codes);
    if (nearest.distance == 0) {
      choice.row = nearest.row;
      choice.source =
          fmt::format("measured here, {}", tuned->source.empty() ? "given by the caller" : tuned->source);
      return choice;
    }
  }
  Nearest best;
  for (const KnownCpu& known : KnownCpus()) {
    const Nearest nearest = FindNearest(known.costs.rows, IsaName(isa), weights, activations, codes);
    if (nearest.distance < best.distance) {
      best = nearest;
      choice.row = best.row;
      const bool this_cpu = !known.match.empty() && machine.cpu_name.find(known.match) != std::string::npos;
      choice.source = fmt::format("built in, of {}{}{}", this_cpu ? "this CPU" : known.label,
                                  best.distance == 0 ? "" : fmt::format(" and {}", best.row->scheme),
                                  this_cpu ? "" : "; `fusedmoe tune` measures this CPU");
    }
  }
  if (choice.row != nullptr) {
    return choice;
  }
  choice.source = "built in, not measured";
  return choice;
}

}  // namespace fusedmoe::cpu
