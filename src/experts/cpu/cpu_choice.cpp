#include "experts/cpu/cpu_choice.hpp"

#include <tuple>

#include "experts/cpu/row_quantizer.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/narrow.hpp"

namespace fusedmoe::cpu {
namespace {

/// Whether codes enter 16-bit tiles as they are, with fp32 scales for each 64 k or none.
bool FitsPairTile(const MoeProblem& problem, TileKind tile) {
  const ActivationFormat activation = ActivationOf(problem);
  const bool fp32_scales = activation.scale_dtype == DType::kF32 || IsPerTensor(activation);
  if (!CanRoundRows(activation) ||
      (tile == kTileF16 && (activation.element != DType::kF8E4M3 || !fp32_scales))) {
    return false;
  }
  const bool reordered = problem.weights.has_group_index || problem.config.parallel.tp_size > 1;
  const GroupShape group = activation.group;
  return !fp32_scales || group == kPerTensor || group == kPerRow ||
         (group.row == 1 && group.col > 0 && group.col % kPanelUnit == 0 && !reordered);
}

/// Integers are multiplied as 16-bit floats where their groups have scales of BF16 (as those of e4m3 become)
/// and no zero points: what schemes with float codes have.
bool FitsPairPanel(const MoeProblem& problem, WeightKernel kernel) {
  if (kernel < kWeightU4) {
    return true;
  }
  const Result<PanelFormat> panel = PanelOf(problem);
  return panel.ok() && panel->scale == PanelScale::kBF16 && !panel->has_zero_points();
}

/// Floats of 6 and 8 bits, which no integers hold.
bool HasFloatCodes(const ActivationFormat& activation) {
  return activation.quantized() && activation.element != DType::kI8 && activation.element != DType::kF4E2M1;
}

int MaxHeightIndex(const KernelTable& table, WeightKernel kernel, TileKind tile) {
  int index = kNumHeights - 1;
  while (index > 0 && table.batch[kernel][tile] == nullptr && table.dot[kernel][tile][index] == nullptr) {
    --index;
  }
  return index;
}

/// Cores of AMD, Hygon's among them. The name of a guest says nothing ("QEMU Virtual CPU"); machines that are
/// described by a name alone have no vendor.
bool IsAmd(const Machine& machine) {
  if (!machine.cpu_vendor.empty()) {
    return machine.cpu_vendor == "AuthenticAMD" || machine.cpu_vendor == "HygonGenuine";
  }
  return machine.cpu_name.find("AMD") != std::string::npos ||
         machine.cpu_name.find("Hygon") != std::string::npos;
}

/// Figures with weights from memory, percentages of a plain read (docs/kernels_reading.md). AMD: the longer a
/// kernel computes per block, the further ahead it prefetches. 16 bits (95 % at 5 KB) and int8 that meets one
/// plane do with less, 16 bits on Zen 3 with least (one token: 1 KB 18.4 GB/s, 2 17.5, 4 15.9, 6 13.8; four
/// tokens 9.4, 11.2, 12.3, 11.9). Intel: kernels that can prefetch twice; the others once, beyond the page,
/// which the hardware prefetches to its end by itself.
void SetPrefetch(const Machine& machine, const KernelTable* table, TileKind tile, GemmShape& shape) {
  const int bits = shape.panel.bits();
  const int64_t wide_ahead = machine.Has(Isa::kAvx512) ? 5120 : 2048;
  if (!IsAmd(machine)) {
    const bool twice = table != nullptr && table->prefetches_twice[shape.kernel][tile];
    shape.prefetch_far = twice ? 9216 : 0;
    shape.prefetch[0] = shape.prefetch[1] = twice ? 2048 : IsPanelInteger(shape.panel.code) ? 7680 : 4608;
    return;
  }
  for (const int tokens : {1, 2}) {
    const int products = tokens * Planes(tile);  // of a weight
    shape.prefetch[tokens - 1] = bits == 4                        ? (products == 1   ? 7680
                                                                     : products == 2 ? 9216
                                                                                     : 12288)
                                 : bits > 8                       ? wide_ahead
                                 : shape.panel.code == DType::kU8 ? (products == tokens ? 5120 : 7680)
                                                                  : 10752;
  }
}

/// From how many tall tiles on weights are decoded into L1 for all of them, instead of for each in registers.
/// Cores of Intel decode with the two ports that multiply: INT4 g128 gains 11 % with two tiles and 18 with
/// three, MXFP4 in 15 bits 12 and 18; NVFP4 and groups of INT8 lose 2 to 5 % with two; bytes without scales,
/// which need no decoding, lose 10 with two, nothing with three, and gain 12 with eight; codes that share
/// bytes gain 20 to 75 with two (Sapphire Rapids, wide slabs). On Zen 5 what is decoded has to be stored,
/// which costs as much (layers at 64 tokens an expert: MXFP4 61 to 62 % of the peak in registers, 58 to 60
/// through L1), but for NVFP4 with its four scales a unit (56 and 59.5), and for scales of two levels (eight
/// tiles alone, groups of 32 and 16: INT4 5 and 9 %, `a8` 2 and 22; INT8 4 and 6, `a8` 5 and 0).
int SlabTiles(const Machine& machine, WeightKernel kernel) {
  if (IsAmd(machine)) {
    return kernel == kWeightNvfp4 || HasTwoLevels(kernel) || IsPacked(kernel) ? 4 : kNoSlabs;
  }
  if (IsPacked(kernel)) {
    return 2;
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
/// or more half of the time, and a second batch decodes once more. Not measured on cores of AMD at the levels
/// of wide registers with VNNI; at those below, all tiles share what is decoded (dot_slab_isa.hpp).
int BatchTiles(const Machine& machine, Isa isa) {
  const bool slabs = isa <= Isa::kAvx512;
  return IsAmd(machine) && !slabs ? kBatchTiles / 2 : kBatchTiles;
}

}  // namespace

bool IsFloatKernel(WeightKernel kernel) {
  return kernel < kWeightNvfp4;
}

Isa IsaOf(const MoeProblem& problem, const Machine& machine) {
  return (problem.isa.empty() ? BestIsa(machine) : ParseIsa(problem.isa)).value_or(Isa::kAvx2);
}

std::optional<TileChoice> ChoosePairTile(const MoeProblem& problem, WeightKernel kernel, Isa isa) {
  const KernelTable* table = FindKernelTable(isa);
  const auto has = [&](TileKind tile) { return table != nullptr && table->dot[kernel][tile][0] != nullptr; };
  const TileKind exact = has(kTileBf16) ? kTileBf16 : kTileF16;
  const ActivationFormat activation = ActivationOf(problem);
  // Beside weights of 4 bits, integers hold other activations in fewer products.
  if (!has(exact) || !FitsPairPanel(problem, kernel) ||
      (!IsFloatKernel(kernel) && !HasFloatCodes(activation))) {
    return std::nullopt;
  }
  if (activation.quantized()) {
    // Sums in f16 move one in a hundred of the values between the GEMMs to another code (a layer of FP8 is
    // 8e-3 to 1.2e-2 off, not 1e-3): more than a scheme says. Who asks for `a8` takes it.
    const bool allowed = exact != kTileF16 || problem.activation == ActivationMode::kA8;
    return allowed && FitsPairTile(problem, exact) ? std::optional(TileChoice{exact, exact, RowRule::kCodes})
                                                   : std::nullopt;
  }
  if (problem.activation == ActivationMode::kA8) {
    return TileChoice{exact, exact, RowRule::kAsTheyAre};
  }
  if (exact == kTileF16 || problem.config.dtype == DType::kF32) {
    return std::nullopt;
  }
  if (problem.config.dtype != DType::kBF16) {
    return TileChoice{kTileBf16Pair, kTileBf16Pair, RowRule::kAsTheyAre};
  }
  // Rows of such a model are BF16, and what it was trained with rounds the intermediate to BF16 as well. A
  // factor on the input makes values of more bits.
  return TileChoice{problem.weights.has_pre_quant_scale ? kTileBf16Pair : kTileBf16, kTileBf16,
                    RowRule::kAsTheyAre};
}

TileChoice ChooseTile(const MoeProblem& problem, const Machine& machine, WeightKernel kernel, Isa isa) {
  const KernelTable* table = FindKernelTable(isa);
  const auto has = [&](TileKind tile) { return table != nullptr && table->dot[kernel][tile][0] != nullptr; };
  const ActivationFormat activation = ActivationOf(problem);
  const auto both = [](TileKind tile, RowRule rows) { return TileChoice{tile, tile, rows}; };
  if (const auto pair = ChoosePairTile(problem, kernel, isa)) {
    return *pair;
  }
  if (IsFloatKernel(kernel)) {
    // Elsewhere subnormal weights take a hundred times as long (dot_bytes_avx2_isa.hpp).
    const TileKind tile = IsAmd(machine) && has(kTileRaised) ? kTileRaised : kTileF32;
    return both(tile, activation.quantized() ? RowRule::kFakeQuantized : RowRule::kAsTheyAre);
  }
  if (!activation.quantized()) {
    return both(problem.activation == ActivationMode::kA8 ? kTileA8 : kTileA16, RowRule::kAsTheyAre);
  }
  const GroupShape group = activation.group;
  const bool reordered = problem.weights.has_group_index;
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
  // Groups of activations and weights begin in the same places, except in slices for ranks.
  if (has(kTileMx) && DTypeBits(*activation.element) == 6 && activation.scale_dtype == DType::kF8E8M0 &&
      group == GroupShape{1, 32} && problem.config.parallel.tp_size == 1) {
    return both(kTileMx, RowRule::kFakeQuantized);
  }
  // Quantizing the intermediate again amplifies errors to whole steps of its codes: only sums as good as fp32
  // keep nearly all of them on the reference's side of a tie. 15 bits left 0.6 % in an NVFP4 layer.
  return both(kTileA24, RowRule::kFakeQuantized);
}

Result<PanelFormat> PanelOf(const MoeProblem& problem) {
  return ChoosePanelFormat(WeightsOf(problem), problem.weights.has_zero_points, problem.weights.cuts_stripes);
}

std::optional<PanelFormat> NarrowPanelOf(const MoeProblem& problem, const StoredIntegers& stored) {
  if (stored.bits == 0) {
    return std::nullopt;
  }
  const Result<PanelFormat> panel =
      ChoosePanelFormat(NarrowFormat(problem.scheme.weight, stored), stored.zero_points);
  const WeightKernel kernel = panel.ok() ? KernelFor(*panel) : kNumWeightKernels;
  const bool has_kernels =
      kernel != kNumWeightKernels && !(IsWeightOnly(kernel) && ActivationOf(problem).quantized());
  return has_kernels ? std::optional(*panel) : std::nullopt;
}

bool CutAlike(const CpuPlan& plan, const MoeProblem& problem, const Machine& machine, WeightKernel kernel) {
  const KernelTable* table = FindKernelTable(plan.vector_isa);
  const auto cut = [&](WeightKernel weights) {
    const TileChoice choice = ChooseTile(problem, machine, weights, plan.vector_isa);
    return std::tuple(choice.gate_up, choice.down, choice.rows,
                      MaxHeightIndex(*table, weights, choice.gate_up),
                      table->batch[weights][choice.gate_up] == nullptr);
  };
  return table != nullptr && cut(kernel) == cut(plan.gate_up.kernel);
}

void FitVectorKernels(const Machine& machine, CpuPlan& plan) {
  const KernelTable* table = FindKernelTable(plan.vector_isa);
  const TileKind tile = plan.gate_up.tile;
  const WeightKernel kernel = plan.gate_up.kernel;  // CutAlike: down has such a one
  plan.max_height_index = table == nullptr ? 0 : MaxHeightIndex(*table, kernel, tile);
  plan.tall =
      table != nullptr && table->batch[kernel][tile] != nullptr && !IsPairTile(tile) && !IsFloatTile(tile);
  plan.batch_tiles = BatchTiles(machine, plan.vector_isa);
  plan.next_into_l2 = !IsAmd(machine);
  for (GemmShape* shape : {&plan.gate_up, &plan.down}) {
    shape->slab_tiles = SlabTiles(machine, shape->kernel);
    shape->wide_slabs = WideSlabs(machine, shape->kernel, tile);
    SetPrefetch(machine, table, tile, *shape);
  }
}

}  // namespace fusedmoe::cpu
