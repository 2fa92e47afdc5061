#include "experts/cpu/cpu_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "core/checked_math.hpp"
#include "experts/cpu/row_quantizer.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe::cpu {
namespace {

/// Bytes of activations that may be in flight. Below it a piece has enough tokens per expert to be bound by
/// arithmetic with the largest layers in use (DeepSeek-V3 at 1024 tokens: 240 MB); far above it pieces only
/// cost memory.
constexpr int64_t kInFlightBytes = int64_t{256} << 20;
constexpr int64_t kFewestTokens = 64;
/// Jobs with fewer tokens would decode weights too often; where these many overflow L2, blocks of K do not.
constexpr int64_t kFewestJobTokens = 256;
bool IsFloatKernel(WeightKernel kernel) {
  return kernel < kWeightNvfp4;
}

Isa IsaOf(const MoeProblem& problem, const Machine& machine) {
  return (problem.isa.empty() ? BestIsa(machine) : ParseIsa(problem.isa)).value_or(Isa::kAvx2);
}

/// The activation format that counts for the kernels: none when only weights are quantized.
ActivationFormat ActivationOf(const MoeProblem& problem) {
  return problem.activation == ActivationMode::kAsCheckpoint ? problem.scheme.activation : ActivationFormat{};
}

/// How tiles hold the activations of a scheme in the two GEMMs, and what becomes of its codes.
struct TileChoice {
  TileKind gate_up, down;
  RowRule rows;
};

/// Whether codes enter 16-bit tiles as they are, with fp32 scales for each 64 k or none.
bool FitsPairTile(const MoeProblem& problem, TileKind tile) {
  const ActivationFormat activation = ActivationOf(problem);
  const bool fp32_scales = activation.scale_dtype == DType::kF32 || IsPerTensor(activation);
  if (!CanRoundRows(activation) ||
      (tile == kTileF16 && (activation.element != DType::kF8E4M3 || !fp32_scales))) {
    return false;
  }
  const bool reordered = problem.weights_have_group_index || problem.config.parallel.tp_size > 1;
  const GroupShape group = activation.group;
  return !fp32_scales || group == kPerTensor || group == kPerRow ||
         (group.row == 1 && group.col > 0 && group.col % kPanelUnit == 0 && !reordered);
}

/// Units for 16-bit floats, where the level has one for such weights and the activations allow it
/// (docs/kernels_cpu.md, "Units for 16-bit floats"). Layers with F32 hidden states stay in fp32.
std::optional<TileChoice> ChoosePairTile(const MoeProblem& problem, WeightKernel kernel, Isa isa) {
  const KernelTable* table = FindKernelTable(isa);
  const auto has = [&](TileKind tile) { return table != nullptr && table->dot[kernel][tile][0] != nullptr; };
  const TileKind exact = has(kTileBf16) ? kTileBf16 : kTileF16;
  if (!has(exact)) {
    return std::nullopt;
  }
  if (ActivationOf(problem).quantized()) {
    return FitsPairTile(problem, exact) ? std::optional(TileChoice{exact, exact, RowRule::kCodes})
                                        : std::nullopt;
  }
  if (problem.activation == ActivationMode::kA8) {
    return TileChoice{exact, exact, RowRule::kAsTheyAre};
  }
  if (exact == kTileF16 || problem.config.dtype == DType::kF32) {
    return std::nullopt;
  }
  const bool bf16_rows = problem.config.dtype == DType::kBF16 && !problem.weights_have_pre_quant_scale;
  return TileChoice{bf16_rows ? kTileBf16 : kTileBf16Pair, kTileBf16Pair, RowRule::kAsTheyAre};
}

TileChoice ChooseTile(const MoeProblem& problem, WeightKernel kernel, Isa isa) {
  const ActivationFormat activation = ActivationOf(problem);
  const auto both = [](TileKind tile, RowRule rows) { return TileChoice{tile, tile, rows}; };
  if (const auto pair = ChoosePairTile(problem, kernel, isa)) {
    return *pair;
  }
  if (IsFloatKernel(kernel)) {
    return both(kTileF32, activation.quantized() ? RowRule::kFakeQuantized : RowRule::kAsTheyAre);
  }
  if (!activation.quantized()) {
    return both(problem.activation == ActivationMode::kA8 ? kTileA8 : kTileA16, RowRule::kAsTheyAre);
  }
  const GroupShape group = activation.group;
  const bool reordered = problem.weights_have_group_index;
  const bool e2m1_weights = kernel == kWeightNvfp4 || kernel == kWeightMxfp4;
  if (activation.element == DType::kF4E2M1 && e2m1_weights && group == GroupShape{1, WeightGroup(kernel)} &&
      !reordered) {
    return both(kTileA4, RowRule::kCodes);
  }
  const bool whole_rows = group == kPerTensor || group == kPerRow;
  const bool whole_units = group.row == 1 && group.col > 0 && group.col % kPanelUnit == 0 && !reordered;
  if (activation.element == DType::kI8 && (whole_rows || whole_units)) {
    return both(kTileA8, RowRule::kCodes);
  }
  // Quantizing the intermediate again amplifies errors to whole steps of its codes: only sums as good as fp32
  // keep nearly all of them on the reference's side of a tie. 15 bits left 0.6 % in an NVFP4 layer.
  return both(kTileA24, RowRule::kFakeQuantized);
}

GemmShape MakeGemm(const CpuPlan& plan, const MoeProblem& problem, TileKind tile, int64_t rows, int64_t cols,
                   int64_t parts) {
  GemmShape shape;
  shape.tile = tile;
  shape.rows = rows;
  shape.cols = cols;
  shape.parts = parts;
  shape.stripes = CeilDiv(rows, kPanelRows);
  // Tensor parallelism cuts the intermediate, which is K of the second GEMM, maybe inside a group of scales.
  const int64_t group = problem.scheme.weight.block.col;
  const bool cut =
      problem.config.parallel.tp_size > 1 && group > 0 && problem.config.intermediate % group != 0;
  shape.padded_cols =
      PanelColumnsBound(problem.scheme.weight, plan.panel, cols, problem.weights_have_group_index || cut);
  shape.blocks = shape.padded_cols / plan.panel.block;
  shape.stripe_bytes = shape.blocks * plan.panel.block_bytes();
  shape.tile_row_bytes = RoundUp(TileRowBytes(plan.kernel, tile, shape.padded_cols), 4 * kTileWords);
  return shape;
}

Verdict Objection(Reason reason, std::string sentence, std::string actual, std::string required) {
  return {reason, std::move(sentence), std::move(actual), std::move(required)};
}

void CheckIsa(const MoeProblem& problem, const Machine& machine, std::vector<Verdict>& verdicts) {
  if (problem.isa.empty()) {
    if (!BestIsa(machine)) {
      verdicts.push_back(Objection(Reason::kIsa,
                                   "the kernels need AVX2, FMA and F16C at least, this CPU lacks them",
                                   machine.cpu_name, "avx2"));
    }
    return;
  }
  const std::optional<Isa> isa = ParseIsa(problem.isa);
  if (!isa || FindKernelTable(*isa) == nullptr) {
    verdicts.push_back(Objection(
        Reason::kNotBuilt, fmt::format("this build has no kernels for the instruction set '{}'", problem.isa),
        problem.isa, "avx2, avx512, avx512_vnni, avx512_bf16, avx512_fp16 or amx"));
  } else if (!machine.Has(*isa)) {
    const auto best = BestIsa(machine);
    verdicts.push_back(Objection(Reason::kIsa, fmt::format("this CPU cannot run {}", problem.isa),
                                 best ? std::string(IsaName(*best)) : "none", problem.isa));
  }
}

void CheckActivations(const MoeProblem& problem, std::vector<Verdict>& verdicts) {
  const ActivationFormat activation = ActivationOf(problem);
  if (problem.activation == ActivationMode::kMaxExpanded ||
      problem.activation == ActivationMode::kMaxGateUp) {
    verdicts.push_back(
        Objection(Reason::kScheme,
                  "the activation scales of the experts stay their own; shared scales are a contract of "
                  "other backends",
                  std::string(ActivationModeName(problem.activation)), "as_checkpoint, weight_only or a8"));
  }
  if (problem.activation == ActivationMode::kA8 && problem.scheme.activation.quantized()) {
    verdicts.push_back(Objection(Reason::kScheme,
                                 "a8 replaces 16-bit activations; this scheme quantizes its own",
                                 problem.scheme.name, "a weight-only scheme"));
  }
  if (const Status status = CheckActivationFormat(activation); !status.ok()) {
    verdicts.push_back(Objection(Reason::kScheme, status.message(), problem.scheme.name, ""));
  }
  if (NeedsDynamicTensorScale(activation) && problem.determinism >= Determinism::kBatchInvariant) {
    verdicts.push_back(Objection(Reason::kDeterminism,
                                 "one activation scale over the batch makes a token depend on its neighbours",
                                 std::string(DeterminismName(problem.determinism)), "thread_invariant"));
  }
}

/// Whether and how the matrix unit multiplies experts with many tokens.
TilePlan PlanTiles(const MoeProblem& problem, const Machine& machine, const CpuPlan& plan,
                   const CostChoice& cost) {
  TilePlan tiles;
  if (plan.isa != Isa::kAmx || problem.mode == ModeName(Mode::kLatency)) {
    return tiles;
  }
  const bool forced = problem.mode == ModeName(Mode::kThroughput);
  // The number of neighbours must not choose the kernel.
  if (problem.determinism >= Determinism::kBatchInvariant && !forced) {
    return tiles;
  }
  const ActivationFormat activation = ActivationOf(problem);
  const bool reordered = problem.weights_have_group_index || problem.config.parallel.tp_size > 1;
  const GroupShape group = activation.group;
  const bool whole_rows = group == kPerTensor || group == kPerRow;
  tiles.codes = activation.quantized();
  if (!tiles.codes && !problem.scheme.weight.quantized() && problem.config.dtype != DType::kBF16) {
    return tiles;  // bf16 tokens would lose bits that such a layer keeps
  }
  // Bytes take four bits without their zero points, and eight where zero is in the middle.
  tiles.int8 = activation.element == DType::kI8 && FindTileFormat(plan.kernel, true, false) != nullptr &&
               !(plan.panel.code == DType::kU8 && plan.panel.zero_points);
  // Where activations are rounded to bf16 anyhow, so are weights whose scales do not fit in it.
  tiles.rounded = !tiles.codes && FindTileFormat(plan.kernel, false, true) != nullptr;
  const TileFormat* format = FindTileFormat(plan.kernel, tiles.int8, tiles.rounded);
  if (format == nullptr) {
    return tiles;
  }
  if (tiles.codes && activation.scale_dtype == DType::kF32 && !whole_rows) {
    const bool fits = format->scale_group > 0 && group.row == 1 && (group.col == 64 || group.col == 128) &&
                      group.col % format->scale_group == 0;
    if (!fits || reordered) {
      return tiles;
    }
    tiles.scale_group = group.col;
  }
  tiles.weight_group = problem.scheme.weight.block.col % 128 == 0 && !reordered ? 128 : 64;
  const GemmShape* shapes[2] = {&plan.gate_up, &plan.down};
  for (int i = 0; i < 2; ++i) {
    const int64_t k = shapes[i]->padded_cols;
    tiles.row_bytes[i] = tiles.int8 ? k : 2 * k;
    const int64_t scales = tiles.scale_group > 0 ? CeilDiv(k, tiles.scale_group) : 1;
    const int64_t sums = tiles.int8 ? 1 : format->sum_group > 0 ? k / format->sum_group : 0;
    tiles.sides[i] = scales + sums;
    tiles.num_sums[i] = sums;
  }
  // Without figures nobody knows that tiles are faster: they take every expert when asked to, else none.
  const int64_t crossover =
      cost.row == nullptr ? kMostCrossoverTokens + 1 : TileCrossover(*cost.row, WorkOf(plan));
  if (!forced && crossover > kMostCrossoverTokens) {
    return tiles;
  }
  tiles.from_tokens = forced ? 1 : crossover;
  // A forward may come with more threads than the layer was loaded with.
  tiles.num_scratch =
      std::clamp<int64_t>(std::max(problem.num_threads, machine.num_cores), 1, kMaxTileScratch);
  tiles.enabled = true;
  return tiles;
}

/// Scales in the type that the weights have, with zero points where they have some.
Result<PanelFormat> PanelOf(const MoeProblem& problem) {
  WeightFormat format = problem.scheme.weight;
  format.block_scale_dtype = problem.weights_scale_dtype.value_or(format.block_scale_dtype);
  return ChoosePanelFormat(format, problem.weights_have_zero_points);
}

}  // namespace

ExpertWork WorkOf(const CpuPlan& plan) {
  const GemmShape& gate_up = plan.gate_up;
  const GemmShape& down = plan.down;
  ExpertWork work;
  work.blocks =
      (gate_up.parts * gate_up.stripes * gate_up.padded_cols + down.stripes * down.padded_cols) / kPanelUnit;
  work.max_height = kHeights[plan.max_height_index];
  if (IsPairTile(gate_up.tile)) {
    work.max_height *= plan.batch_tiles;
  }
  work.padded = !plan.tall;
  return work;
}

std::string_view ModeName(Mode mode) {
  constexpr std::string_view kNames[] = {"latency", "throughput", "masked"};
  return kNames[static_cast<int>(mode)];
}

Mode ChooseMode(const MoeProblem& problem, int64_t num_tokens, int64_t latency_tokens) {
  if (problem.config.activation_format == ActivationFormatKind::kBatchedExperts) {
    return Mode::kMasked;
  }
  if (problem.mode == ModeName(Mode::kLatency)) {
    return Mode::kLatency;
  }
  if (problem.mode == ModeName(Mode::kThroughput)) {
    return Mode::kThroughput;
  }
  const int64_t experts = std::max<int64_t>(problem.config.num_experts, 1);
  return num_tokens * problem.config.top_k() <= latency_tokens * experts ? Mode::kLatency : Mode::kThroughput;
}

TileCut NextTile(int64_t left, int max_height_index, bool tall) {
  if (tall && left > 2) {
    return {static_cast<int32_t>(std::min<int64_t>(left, kMaxHeight)), kNumHeights - 1};
  }
  // A pass over a stripe costs about as much as two tokens (decoding), so padding by one or two is cheaper
  // than another tile: the last tile of 3 has height 4, of 6 and 7 height 8; 5 is 4 + 1.
  int index = max_height_index;
  while (index > 0 && kHeights[index - 1] >= left) {
    --index;
  }
  if (kHeights[index] - left > 2) {
    --index;
  }
  return {static_cast<int32_t>(std::min<int64_t>(left, kHeights[index])), index};
}

int MaxHeightIndex(const KernelTable& table, WeightKernel kernel, TileKind tile) {
  int index = kNumHeights - 1;
  while (index > 0 && table.batch[kernel][tile] == nullptr && table.dot[kernel][tile][index] == nullptr) {
    --index;
  }
  return index;
}

bool IsAmd(const Machine& machine) {
  return machine.cpu_name.find("AMD") != std::string::npos;
}

/// With weights from memory, share of a plain read (docs/kernels_cpu.md). On cores of AMD, the longer a
/// kernel computes on a block, the earlier it has to ask, which counts for 4 bits: int8 and 16 bits (95 % at
/// 5 KB) do with less. Cores of Intel prefetch to the end of a page by themselves; what they lack begins
/// behind it.
void SetPrefetch(const Machine& machine, CpuPlan& plan) {
  const int bits = DTypeBits(plan.panel.code);
  if (!IsAmd(machine)) {
    const bool integers = plan.panel.code == DType::kU4 || plan.panel.code == DType::kU8;
    plan.prefetch[0] = plan.prefetch[1] = integers ? 7680 : 4608;
    plan.next_into_l2 = true;
    return;
  }
  for (const int tokens : {1, 2}) {
    const int products = tokens * Planes(plan.gate_up.tile);  // of a weight
    plan.prefetch[tokens - 1] = bits == 4                       ? (products == 1   ? 7680
                                                                   : products == 2 ? 9216
                                                                                   : 12288)
                                : bits > 8                      ? 5120
                                : plan.panel.code == DType::kU8 ? 7680
                                                                : 10752;
  }
}

/// From how many tall tiles on weights are decoded into L1 for all of them, instead of for each in registers.
/// Cores of Intel decode with the two ports that multiply: INT4 g128 gains 11 % with two tiles and 18 with
/// three, MXFP4 in 15 bits 12 and 18; NVFP4 and groups of INT8 lose 2 to 5 % with two; bytes without scales,
/// which need no decoding, lose 10 with two, nothing with three, and gain 12 with eight (Sapphire Rapids,
/// wide slabs). On Zen 5 what is decoded has to be stored, which costs as much (layers at 64 tokens an
/// expert: MXFP4 61 to 62 % of the peak in registers, 58 to 60 through L1), but for NVFP4 with its four
/// scales a unit (56 and 59.5).
int SlabTiles(const Machine& machine, WeightKernel kernel) {
  if (IsAmd(machine)) {
    return kernel == kWeightNvfp4 ? 4 : kNoSlabs;
  }
  if (kernel == kWeightU8) {
    return 4;
  }
  return kernel == kWeightNvfp4 || kernel > kWeightU8 ? 3 : 2;
}

/// Whether what is decoded once meets all tokens of a tile at a time. Stores cost cores of AMD more than the
/// instructions that this saves; on cores of Intel, where two ports multiply and scale, it gains nothing with
/// e2m1 and activations of one scale for 64: half as many at a time are 3 to 13 % faster while the core's
/// other thread is idle, and as fast while it is not.
bool WideSlabs(const Machine& machine, WeightKernel kernel, TileKind tile) {
  const bool e2m1 = kernel == kWeightNvfp4 || kernel == kWeightMxfp4;
  return !IsAmd(machine) && !(e2m1 && tile == kTileA8);
}

/// Tall tiles that meet what is decoded together, at most. An expert with 64 tokens on average has nine tiles
/// or more half of the time, and a second batch decodes once more. Not measured on cores of AMD.
int BatchTiles(const Machine& machine) {
  return IsAmd(machine) ? kBatchTiles / 2 : kBatchTiles;
}

/// Slots whose results wait to be added up by token, where there are threads to do so: they should stay in
/// the last-level cache, and be enough for all threads. A scale over the batch needs all of them.
int64_t SlotSums(const MoeProblem& problem, const Machine& machine, const CpuPlan& plan) {
  if (plan.tiles.num_scratch <= 1) {
    return 0;
  }
  if (NeedsDynamicTensorScale(ActivationOf(problem))) {
    return plan.max_slots;
  }
  const int64_t in_cache = std::min(machine.l3_bytes, kInFlightBytes) / 2 / (plan.down.row_stride() * 4);
  const int64_t for_threads = kGroupsPerThread * plan.tiles.num_scratch * plan.tiles.job_tokens;
  return std::min(plan.max_slots, std::max(in_cache, for_threads));
}

CpuPlan MakeCpuPlan(const MoeProblem& problem, const Machine& machine) {
  const MoeConfig& config = problem.config;
  CpuPlan plan;
  plan.isa = IsaOf(problem, machine);
  plan.vector_isa = VectorIsa(plan.isa, machine);
  plan.panel = *PanelOf(problem);
  plan.kernel = KernelFor(plan.panel);
  const TileChoice choice = ChooseTile(problem, plan.kernel, plan.vector_isa);
  plan.rows = choice.rows;
  plan.num_local_experts = config.num_local_experts;
  plan.top_k = config.top_k();
  plan.gate_up = MakeGemm(plan, problem, choice.gate_up, config.intermediate, config.hidden,
                          config.activation.gated() ? 2 : 1);
  plan.down = MakeGemm(plan, problem, choice.down, config.hidden, config.intermediate, 1);

  const bool batched = config.activation_format == ActivationFormatKind::kBatchedExperts;
  plan.slots_apart = !batched && problem.determinism >= Determinism::kRankInvariant;
  const bool output_by_slot = batched || plan.slots_apart;
  const int64_t most_tokens = std::max<int64_t>(config.max_tokens, 1);
  const int64_t slots_per_token = batched ? plan.num_local_experts : plan.top_k;
  const int64_t slot_bytes = plan.gate_up.tile_row_bytes + plan.down.tile_row_bytes +
                             plan.gate_up.row_stride() * 4 +
                             (output_by_slot ? plan.down.row_stride() * 4 : 0);
  const KernelTable* table = FindKernelTable(plan.vector_isa);
  plan.max_height_index = table == nullptr ? 0 : MaxHeightIndex(*table, plan.kernel, plan.gate_up.tile);
  plan.tall = table != nullptr && table->batch[plan.kernel][plan.gate_up.tile] != nullptr &&
              !IsFloatKernel(plan.kernel);
  plan.slab_tiles = SlabTiles(machine, plan.kernel);
  plan.batch_tiles = BatchTiles(machine);
  plan.wide_slabs = WideSlabs(machine, plan.kernel, plan.gate_up.tile);
  const CostChoice cost = FindCost(problem.cpu_costs.get(), machine, IsaOfKernel(plan.isa, choice.gate_up),
                                   plan.kernel, choice.gate_up, ActivationOf(problem).quantized());
  plan.cost_source = cost.source;
  constexpr int64_t kLatencyTokens = 4;  // of kernels that nobody has measured
  plan.mode = ChooseMode(problem, problem.plan_tokens,
                         cost.row == nullptr ? kLatencyTokens : LatencyTokens(cost.row->vectors));
  plan.tiles = PlanTiles(problem, machine, plan, cost);
  const TilePlan& tiles = plan.tiles;
  const int64_t token_bytes = std::max<int64_t>(1, slots_per_token * slot_bytes);
  const int64_t in_flight = tiles.enabled ? 2 * kInFlightBytes : kInFlightBytes;
  const int64_t tokens = std::clamp(in_flight / token_bytes, kFewestTokens,
                                    most_tokens < kFewestTokens ? kFewestTokens : most_tokens);
  // A scale over the batch needs all of it at once.
  const int64_t piece =
      NeedsDynamicTensorScale(ActivationOf(problem)) ? most_tokens : std::min(tokens, most_tokens);
  plan.max_slots = piece * slots_per_token;
  plan.max_tokens = batched ? 0 : piece;
  plan.max_rows = output_by_slot ? plan.max_slots : piece;
  const int64_t active = std::min(plan.num_local_experts, plan.max_slots);
  // NextTile ends an expert with at most two tiles that are not full, and pads by at most two tokens; tall
  // tiles have no padding.
  plan.max_tiles = plan.max_slots / kHeights[plan.max_height_index] + 2 * active;
  plan.max_tile_rows = plan.max_slots + (plan.tall ? 0 : 2) * active;
  SetPrefetch(machine, plan);
  plan.weight_nodes = std::clamp(machine.num_numa_nodes, 1, kMostMemoryNodes);
  if (tiles.enabled) {
    const int64_t jobs = std::min(active, plan.max_slots / std::max<int64_t>(tiles.from_tokens, 1));
    const int64_t packed_bytes = std::max(tiles.row_bytes[0], tiles.row_bytes[1]);
    plan.tiles.job_tokens =
        std::clamp<int64_t>(machine.l2_bytes / 2 / packed_bytes, kFewestJobTokens, kMaxJobTokens) /
        kTileTokens * kTileTokens;
    plan.tiles.group_rows =
        std::max<int64_t>(machine.l2_bytes * 5 / 16 / packed_bytes / kTileTokens, 1) * kTileTokens;
    plan.tiles.max_jobs = jobs + plan.max_slots / std::min(plan.tiles.job_tokens, kFewestSharedTokens);
    plan.tiles.shared_rows = batched ? 0 : piece;
    plan.tiles.max_rows = plan.max_slots + (kTileTokens - 1) * plan.tiles.max_jobs;
    plan.tiles.max_slot_sums = SlotSums(problem, machine, plan);
  }
  plan.tile_batch_bytes = std::max<int64_t>(machine.l2_bytes / 2, 64 << 10);
  return plan;
}

std::vector<Verdict> CpuObjections(const MoeProblem& problem, const Machine& machine) {
  std::vector<Verdict> verdicts;
  const MoeConfig& config = problem.config;
  CheckIsa(problem, machine, verdicts);
  const Result<PanelFormat> panel = PanelOf(problem);
  if (!panel.ok()) {
    verdicts.push_back(Objection(Reason::kScheme, panel.status().message(), problem.scheme.name,
                                 "F32, F16, BF16, FP8, MXFP6, NVFP4, MXFP4, INT4 or INT8 weights"));
  } else if (KernelFor(*panel) == kNumWeightKernels) {
    verdicts.push_back(Objection(Reason::kScheme, fmt::format("no kernel reads {}", panel->ToString()),
                                 problem.scheme.name, ""));
  } else if (problem.activation == ActivationMode::kA8 && IsFloatKernel(KernelFor(*panel)) &&
             !ChoosePairTile(problem, KernelFor(*panel), VectorIsa(IsaOf(problem, machine), machine))) {
    verdicts.push_back(Objection(
        Reason::kScheme, "8-bit activations need 4-bit or int8 weights, or a unit for 16-bit floats",
        problem.scheme.name,
        "NVFP4, MXFP4, INT4 or INT8 weights; BF16 or FP8 on avx512_bf16, FP8 (e4m3) on avx512_fp16"));
  }
  CheckActivations(problem, verdicts);
  if (config.apply_router_weight_on_input && config.top_k() != 1) {
    verdicts.push_back(Objection(Reason::kRouterWeightOnInput,
                                 "router weights on the input need one expert per token",
                                 std::to_string(config.top_k()), "1"));
  }
  const bool batched = config.activation_format == ActivationFormatKind::kBatchedExperts;
  const bool known_mode = problem.mode.empty() || (problem.mode == "masked") == batched;
  const bool any_mode = problem.mode.empty() || problem.mode == "latency" || problem.mode == "throughput" ||
                        problem.mode == "masked";
  if (!any_mode || !known_mode) {
    verdicts.push_back(
        Objection(Reason::kActivationFormat,
                  fmt::format("mode '{}' does not exist for this activation format", problem.mode),
                  problem.mode, batched ? "masked" : "latency or throughput"));
  }
  return verdicts;
}

CpuSlots BookCpuSlots(const CpuPlan& plan, WorkspaceBook& book) {
  CpuSlots slots;
  const int64_t widest = std::max(plan.gate_up.padded_cols, plan.down.padded_cols);
  slots.offsets = book.Book("expert_offsets", (plan.num_local_experts + 1) * 8);
  slots.slot_rows = book.Book("slot_rows", plan.max_slots * 4);
  slots.slot_outputs = book.Book("slot_outputs", plan.max_slots * 4);
  slots.slot_weights = book.Book("slot_weights", plan.max_slots * 4);
  slots.tiles = book.Book("tiles", plan.max_tiles * static_cast<int64_t>(sizeof(Tile)));
  const int64_t pack_tasks = std::min(kPackTasks, std::max(plan.max_tiles, plan.max_tokens));
  slots.row_buffers = book.Book("row_buffers", pack_tasks * 2 * widest * 4);
  slots.tile_rows =
      book.Book("tile_rows", pack_tasks * kHeights[plan.max_height_index] *
                                 std::max(plan.gate_up.tile_row_bytes, plan.down.tile_row_bytes));
  slots.token_places = book.Book("token_places", plan.max_tokens * 8);
  slots.token_tiles =
      book.Book("token_tiles", plan.input_sets * plan.max_tokens * plan.gate_up.tile_row_bytes);
  slots.input_tiles =
      book.Book("input_tiles", plan.input_sets * plan.max_tile_rows * plan.gate_up.tile_row_bytes);
  slots.slot_tiles = book.Book("slot_tiles", (plan.input_sets + 1) * plan.max_slots * 8);
  slots.mid = book.Book("mid", std::max(plan.max_slots, plan.tiles.max_rows) * plan.gate_up.row_stride() * 4);
  slots.mid_tiles = book.Book("mid_tiles", plan.max_tile_rows * plan.down.tile_row_bytes);
  slots.output = book.Book("output_sums", plan.max_rows * plan.down.row_stride() * 4);
  const TilePlan& tiles = plan.tiles;
  if (tiles.enabled) {
    slots.jobs = book.Book("tile_jobs", 2 * tiles.max_jobs * static_cast<int64_t>(sizeof(TileJob)));
    slots.job_groups = book.Book("tile_groups", tiles.max_jobs * static_cast<int64_t>(sizeof(JobGroup)));
    slots.tokens = book.Book("tile_tokens", tiles.max_rows * (tiles.row_bytes[0] + tiles.row_bytes[1]));
    slots.sides = book.Book("tile_sides", tiles.max_rows * (tiles.sides[0] + tiles.sides[1]) * 4);
    slots.token_rows = book.Book("token_rows", tiles.shared_rows * tiles.row_bytes[0]);
    slots.token_sides = book.Book("token_sides", tiles.shared_rows * tiles.sides[0] * 4);
    slots.scratch = book.Book("tile_scratch", tiles.num_scratch * kTileScratchBytes);
    slots.scratch_rows = book.Book("tile_scratch_rows", tiles.num_scratch * 3 * widest * 4);
    slots.slot_sums = book.Book("slot_sums", tiles.max_slot_sums * plan.down.row_stride() * 4);
    slots.slot_ends = book.Book("slot_ends", plan.max_slots * static_cast<int64_t>(sizeof(SlotEnds)));
    slots.output_offsets = book.Book("output_offsets", (plan.max_rows + 1) * 4);
    slots.output_slots = book.Book("output_slots", tiles.max_slot_sums * 4);
  }
  return slots;
}

}  // namespace fusedmoe::cpu
