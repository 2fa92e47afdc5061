#include "experts/cpu/kernels/kernels.hpp"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "platform/cpu_features.hpp"
#include "weights/codebook.hpp"
#include "weights/float6_factors.hpp"

namespace fusedmoe::cpu {

#if defined(__x86_64__)
extern const KernelTable kKernelTableAvx2;
extern const KernelTable kKernelTableAvx512;
extern const KernelTable kKernelTableAvx512Vnni;
extern const KernelTable kIntegerKernelsAvx2Vnni;
extern const KernelTable kIntegerKernelsEmulated;
extern const KernelTable kPairKernelsAvx512Bf16;
extern const KernelTable kPairKernelsAvx512Fp16;
extern const KernelTable kPairKernelsEmulated;
extern const TileKernels kTileKernelsAmx, kTileKernelsF32Amx;
#elif defined(__aarch64__)
extern const KernelTable kKernelTableNeon;
#endif
extern const TileKernels kTileKernelsEmulated, kTileKernelsF32Emulated;

namespace {

/// A level of its own, or what a level adds to the table of another one that it contains.
struct Level {
  Isa isa;
  const KernelTable* table;
  const KernelTable* added = nullptr;
  const KernelTable* emulated = nullptr;  ///< the same without its instructions
};

#if defined(__x86_64__)
/// Best first. Where FP16 is, vdpbf16ps is slow (Sapphire Rapids: half of the fp32 rate; Zen 5: twice).
constexpr std::array kLevels = {
    Level{Isa::kAmx, &kKernelTableAvx512Vnni},  // with tile kernels for experts with many tokens
    Level{Isa::kAvx512Fp16, &kKernelTableAvx512Vnni, &kPairKernelsAvx512Fp16, &kPairKernelsEmulated},
    Level{Isa::kAvx512Bf16, &kKernelTableAvx512Vnni, &kPairKernelsAvx512Bf16, &kPairKernelsEmulated},
    Level{Isa::kAvx512Vnni, &kKernelTableAvx512Vnni},
    Level{Isa::kAvx512, &kKernelTableAvx512},
    Level{Isa::kAvx2Vnni, &kKernelTableAvx2, &kIntegerKernelsAvx2Vnni, &kIntegerKernelsEmulated},
    Level{Isa::kAvx2, &kKernelTableAvx2},
};
#elif defined(__aarch64__)
constexpr std::array kLevels = {Level{Isa::kNeon, &kKernelTableNeon}};
#else
constexpr std::array<Level, 0> kLevels{};
#endif

/// Whether `table` has kernels for such tiles.
bool Multiplies(const KernelTable& table, TileKind tile) {
  return std::any_of(std::begin(table.dot), std::end(table.dot),
                     [tile](const auto& kinds) { return kinds[tile][0] != nullptr; });
}

/// The table of a level with what it adds. On a host without its instructions (a plan for a machine that was
/// described) the emulation takes the place of that.
KernelTable WithAdded(const Level& level) {
  const KernelTable& added = HostMachine().Has(level.isa) ? *level.added : *level.emulated;
  KernelTable table = *level.table;
  table.isa = level.added->isa;
  for (int tile = 0; tile < kNumTileKinds; ++tile) {
    if (!Multiplies(*level.added, static_cast<TileKind>(tile))) {
      continue;
    }
    table.pack[tile] = added.pack[tile] != nullptr ? added.pack[tile] : table.pack[tile];
    for (int kernel = 0; kernel < kNumWeightKernels; ++kernel) {
      std::copy_n(added.dot[kernel][tile], kNumHeights, table.dot[kernel][tile]);
      table.prefetches_twice[kernel][tile] = added.prefetches_twice[kernel][tile];
      table.batch[kernel][tile] = added.batch[kernel][tile];
    }
  }
  return table;
}

/// The panels that a kernel reads.
struct PanelKernel {
  DType code;
  PanelScale scale;
  int64_t group;
  WeightKernel kernel;
};

constexpr PanelKernel kPanelKernels[] = {
#define FMOE_PANEL_KERNEL(id, name, bits, group, zero, two_levels, codebook, panel_code, panel_scale, \
                          panel_group)                                                                \
  {DType::panel_code, PanelScale::panel_scale, panel_group, id},
    FMOE_WEIGHT_KERNEL_TABLE(FMOE_PANEL_KERNEL)
#undef FMOE_PANEL_KERNEL
};

}  // namespace

const KernelTable* FindKernelTable(Isa isa) {
  static const std::vector<KernelTable> tables = [] {
    std::vector<KernelTable> all;
    for (const Level& level : kLevels) {
      all.push_back(level.added == nullptr ? *level.table : WithAdded(level));
    }
    return all;
  }();
  for (size_t i = 0; i < kLevels.size(); ++i) {
    if (kLevels[i].isa == isa) {
      return &tables[i];
    }
  }
  return nullptr;
}

std::vector<Isa> BuiltIsas() {
  std::vector<Isa> isas;
  for (const Level& level : kLevels) {
    isas.insert(isas.begin(), level.isa);
  }
  return isas;
}

std::optional<Isa> BestIsa(const Machine& machine) {
  for (const Level& level : kLevels) {
    if (machine.Has(level.isa)) {
      return level.isa;
    }
  }
  return std::nullopt;
}

Isa VectorIsa(Isa isa, const Machine& machine) {
  if (isa != Isa::kAmx) {
    return isa;
  }
  // Experts with few tokens are bound by reading: what units for pairs could add there, tiles do better.
  for (const Level& level : kLevels) {
    if (level.isa != Isa::kAmx && level.added == nullptr && machine.Has(level.isa)) {
      return level.isa;
    }
  }
  return Isa::kAvx2;
}

const TileKernels& HostTileKernels(TileWeights weights) {
#if defined(__x86_64__)
  if (HostMachine().Has(Isa::kAmx) && RequestAmxPermission().ok()) {
    return weights == kRoundedInF32 ? kTileKernelsF32Amx : kTileKernelsAmx;
  }
#endif
  return weights == kRoundedInF32 ? kTileKernelsF32Emulated : kTileKernelsEmulated;
}

const TileFormat* FindTileFormat(WeightKernel kernel, TileWeights weights) {
  const TileKernels& kernels = weights == kRoundedInF32 ? kTileKernelsF32Emulated : kTileKernelsEmulated;
  const TileFormat& format = kernels.formats[weights][kernel];
  return format.gemm == nullptr ? nullptr : &format;
}

Isa IsaOfKernel(Isa isa, TileKind tile) {
  const auto level =
      std::find_if(kLevels.begin(), kLevels.end(), [isa](const Level& x) { return x.isa == isa; });
  if (level == kLevels.end() || level->added == nullptr || Multiplies(*level->added, tile)) {
    return isa;
  }
  const auto contained = std::find_if(level, kLevels.end(), [level](const Level& x) {
    return x.added == nullptr && x.table == level->table;
  });
  return contained->isa;
}

WeightKernel KernelFor(const PanelFormat& format) {
  const bool integers = format.code == DType::kU4 || format.code == DType::kU8;
  const bool of_any_type = integers && format.group > 0 && format.scale != PanelScale::kI8;
  const PanelScale scale = of_any_type ? PanelScale::kBF16 : format.scale;
  const DType code = IsPanelFloat6(format.code) ? DType::kF6E2M3 : format.code;  // one kernel for both
  const bool codebook = format.codebook != Codebook::kNone;
  for (const PanelKernel& row : kPanelKernels) {
    const CodeTraits& traits = kCodeTraits[row.kernel];
    const int code_bits = row.code == DType::kU8 && traits.bits < 8 ? traits.bits : 0;
    const int zero = codebook ? NumbersZero(format.codebook, format.bits()) : traits.zero;
    if (row.code == code && row.scale == scale && row.group == format.group && traits.codebook == codebook &&
        code_bits == format.code_bits && traits.zero == zero) {
      return row.kernel;
    }
  }
  return kNumWeightKernels;
}

GroupScales GroupScalesOf(const PanelFormat& format) {
  return {format.scale == PanelScale::kBF16  ? kRowBf16
          : format.scale == PanelScale::kF16 ? kRowF16
                                             : kRowF32,
          format.zeros == PanelZero::kFloats ? kZeroFloats
          : format.has_zero_points()         ? kZeroBytes
                                             : kZeroNone,
          format.codebook != Codebook::kNone ? CodebookBytes(format.codebook, format.bits())
          : IsPanelFloat6(format.code)       ? Float6Factors(format.code)
                                             : nullptr};
}

float KernelOutputScale(WeightKernel kernel) {
  switch (kernel) {
    case kWeightE4m3:
    case kWeightE4m3Scaled:
    case kWeightE4m3Stripe:
    case kWeightMxfp8:
      return 256.0F;
    case kWeightNvfp4:
      return 128.0F;  // 2^8 of the e4m3 scale, halved for the doubled code
    case kWeightMxfp4:
      return 0.5F;
    case kWeightMxfp6:
      return 0.0625F;
    default:
      return 1.0F;
  }
}

}  // namespace fusedmoe::cpu
