#include <initializer_list>
#include <utility>

#include "support/rank_cells.hpp"

namespace fusedmoe::testing_support {
namespace {

constexpr TokenPattern kAllTokens[] = {TokenPattern::kEqual, TokenPattern::kDescending,
                                       TokenPattern::kZeroOnOne, TokenPattern::kZeroOnAll,
                                       TokenPattern::kOneToken};
constexpr IdPattern kAllIds[] = {IdPattern::kUniform, IdPattern::kOneExpert, IdPattern::kOneRank,
                                 IdPattern::kHoles};

/// Cells in the order of their seeds; what a seed decides is decided by how many cells stand before.
class Cells {
 public:
  uint64_t count() const { return cells_.size(); }
  void Add(RankCell cell) {
    cell.seed = cells_.size() + 1;
    cells_.push_back(std::move(cell));
  }
  std::vector<RankCell> Take() && { return std::move(cells_); }

 private:
  std::vector<RankCell> cells_;
};

// Data parallel, with and without sequence-parallel groups of two: the three protocols.
void AddDataParallel(int64_t ranks, Cells& cells) {
  for (const char* name : {"naive", "allgather_reducescatter", "deepep_high_throughput",
                           "flashinfer_all2allv", "mori", "deepep_low_latency", "nixl_ep", "pplx"}) {
    for (const char* scheme : {"unquantized", "fp8_w8a8:block128", "nvfp4_w4a4", "int4_w4a16"}) {
      for (const TokenPattern tokens : kAllTokens) {
        for (const IdPattern ids : kAllIds) {
          for (const int64_t sp : {1, 2}) {
            if (sp > 1 && ranks < 4) {
              continue;
            }
            const uint64_t before = cells.count();
            RankCell cell;
            cell.sizes.tp = cell.sizes.sp = sp;
            cell.sizes.dp = ranks / sp;
            cell.sizes.enable_expert_parallel = true;
            cell.sizes.all2all = name;
            cell.scheme = scheme;
            cell.tokens = tokens;
            cell.ids = ids;
            cell.num_experts = before % 3 == 0 ? 11 : 8;  // 11: no rank count divides it
            cell.determinism = before % 2 == 0 ? Determinism::kRankInvariant : Determinism::kThreadInvariant;
            cell.output = before % 5 == 0 ? DType::kF32 : DType::kBF16;
            cell.shared = before % 7 == 0 && cell.determinism == Determinism::kRankInvariant;
            cells.Add(cell);
          }
        }
      }
    }
  }
}

// TP, PCP and DP mixed, with and without EP.
void AddMixed(int64_t ranks, Cells& cells) {
  for (const bool expert_parallel : {false, true}) {
    for (int64_t tp = 1; tp <= ranks; tp *= 2) {
      for (int64_t pcp = 1; tp * pcp <= ranks; pcp *= 2) {
        if (ranks % (tp * pcp) != 0) {
          continue;
        }
        for (const char* scheme : {"unquantized", "nvfp4_w4a4", "int4_w4a16"}) {
          for (const TokenPattern tokens : kAllTokens) {
            const bool even = cells.count() % 2 == 0;
            RankCell cell;
            cell.sizes.tp = tp;
            cell.sizes.pcp = pcp;
            cell.sizes.dp = ranks / tp / pcp;
            cell.sizes.enable_expert_parallel = expert_parallel;
            cell.sizes.all2all = even ? "deepep_high_throughput" : "allgather_reducescatter";
            cell.scheme = scheme;
            cell.tokens = tokens;
            cell.determinism =
                expert_parallel && even ? Determinism::kRankInvariant : Determinism::kThreadInvariant;
            cells.Add(cell);
          }
        }
      }
    }
  }
}

// The fused experts, and experts with replicas.
void AddFused(int64_t ranks, Cells& cells) {
  for (const char* name : {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"}) {
    for (const TokenPattern tokens : kAllTokens) {
      RankCell cell;
      cell.sizes.dp = ranks;
      cell.sizes.enable_expert_parallel = true;
      cell.sizes.all2all = name;
      cell.tokens = tokens;
      cell.backend = "CPU_FUSED";
      cell.scheme = "int4_w4a16";
      cell.determinism = Determinism::kBatchInvariant;
      cells.Add(cell);
      cell.determinism = Determinism::kRankInvariant;
      for (const char* scheme : {"nvfp4_w4a4", "fp8_w8a8:block128", "int4_w4a16", "unquantized"}) {
        cell.scheme = scheme;
        cells.Add(cell);
      }
      for (const char* backend : {"REFERENCE", "CPU_FUSED"}) {
        cell.backend = backend;
        for (const char* scheme : {"int8_w8a8", "mxfp8_w8a8", "mxfp4_w4a4"}) {
          cell.scheme = scheme;
          cells.Add(cell);
        }
        cell.scheme = "nvfp4_w4a4";  // as codes: one stored scale for all experts
        cell.same_input_scale = true;
        cells.Add(cell);
        cell.same_input_scale = false;
      }
      cell.backend = "REFERENCE";
      cell.sizes.enable_eplb = true;
      cell.sizes.num_redundant_experts = ranks - cell.num_experts % ranks;  // equal shares
      cells.Add(cell);
    }
  }
}

void AddOnCards(const ParallelSizes& sizes, std::initializer_list<const char*> schemes, Cells& cells) {
  for (const char* scheme : schemes) {
    for (const TokenPattern tokens : kAllTokens) {
      const uint64_t seed = cells.count() + 1;
      RankCell cell;
      cell.device = "cuda";
      cell.backend = "CUDA_FUSED";
      cell.sizes = sizes;
      cell.scheme = scheme;
      cell.tokens = tokens;
      cell.ids = kAllIds[seed % 4];
      cell.num_experts = seed % 3 == 0 ? 11 : 8;
      cell.determinism = seed % 2 == 0 ? Determinism::kBatchInvariant : Determinism::kThreadInvariant;
      cell.output = seed % 5 == 0 ? DType::kF32 : DType::kBF16;
      cell.shared = seed % 7 == 0 && !sizes.enable_expert_parallel;
      cells.Add(cell);
    }
  }
}

}  // namespace

std::vector<RankCell> RankCells(int64_t ranks) {
  Cells cells;
  AddDataParallel(ranks, cells);
  AddMixed(ranks, cells);
  AddFused(ranks, cells);
  return std::move(cells).Take();
}

std::vector<RankCell> CardRankCells(int64_t ranks) {
  Cells cells;
  // Whole experts on each rank, then slices of every expert: sizes of tp, pcp, dp, sp.
  for (const bool expert_parallel : {true, false}) {
    for (const int64_t tp : {int64_t{1}, int64_t{2}, ranks}) {
      for (int64_t pcp = 1; tp * pcp <= ranks; pcp *= 2) {
        ParallelSizes sizes;
        sizes.tp = tp;
        sizes.pcp = pcp;
        sizes.dp = ranks / tp / pcp;
        sizes.enable_expert_parallel = expert_parallel;
        if (tp == 2 && ranks == 2) {
          continue;  // comes again as `ranks`
        }
        if (ranks == 2 && pcp == 1) {
          AddOnCards(sizes,
                     {"unquantized", "fp8_w8a8:block128", "fp8_w8a8:channel", "int8_w8a8", "int4_w4a16",
                      "nvfp4_w4a4", "nvfp4_w4a16", "mxfp4_w4a4", "mxfp8_w8a8"},
                     cells);
        } else {  // a slice of 64 columns holds no block of 128
          AddOnCards(sizes, {"unquantized", "nvfp4_w4a4", "mxfp8_w8a8"}, cells);
        }
        if (expert_parallel && tp == 2 && sizes.dp > 1) {
          sizes.sp = tp;  // tokens of its own on each rank
          AddOnCards(sizes, {"fp8_w8a8:block128", "nvfp4_w4a16"}, cells);
        }
      }
    }
  }
  return std::move(cells).Take();
}

}  // namespace fusedmoe::testing_support
