#include "experts/cpu/kernels.hpp"

#include <optional>

#include "platform/cpu_features.hpp"

namespace fusedmoe::cpu {

extern const KernelTable kKernelTableAvx2;
extern const KernelTable kKernelTableAvx512;
extern const KernelTable kKernelTableAvx512Vnni;
extern const TileKernels kTileKernelsEmulated;
#if defined(__x86_64__)
extern const TileKernels kTileKernelsAmx;
#endif

namespace {

struct Level {
  Isa isa;
  const KernelTable* table;
};

/// Best first.
constexpr Level kLevels[] = {
    {Isa::kAmx, &kKernelTableAvx512Vnni},  // with tile kernels for experts with many tokens
    {Isa::kAvx512Vnni, &kKernelTableAvx512Vnni},
    {Isa::kAvx512, &kKernelTableAvx512},
    {Isa::kAvx2, &kKernelTableAvx2},
};

struct PanelKernel {
  DType code;
  PanelScale scale;
  int64_t group;
  WeightKernel kernel;
};

constexpr PanelKernel kPanelKernels[] = {
    {DType::kF32, PanelScale::kNone, 0, kWeightF32},
    {DType::kBF16, PanelScale::kNone, 0, kWeightBf16},
    {DType::kF16, PanelScale::kNone, 0, kWeightF16},
    {DType::kF8E4M3, PanelScale::kNone, 0, kWeightE4m3},
    {DType::kF8E4M3, PanelScale::kF32, 64, kWeightE4m3Scaled},
    {DType::kF8E4M3, PanelScale::kE8M0, 32, kWeightMxfp8},
    {DType::kF8E5M2, PanelScale::kNone, 0, kWeightE5m2},
    {DType::kF4E2M1, PanelScale::kE4M3, 16, kWeightNvfp4},
    {DType::kF4E2M1, PanelScale::kE8M0, 32, kWeightMxfp4},
    {DType::kU4, PanelScale::kNone, 0, kWeightU4},
    {DType::kU4, PanelScale::kF32Zero, 32, kWeightU4Group32},
    {DType::kU4, PanelScale::kF32Zero, 64, kWeightU4Group64},
    {DType::kU4, PanelScale::kF32Zero, 128, kWeightU4Group128},
    {DType::kU8, PanelScale::kNone, 0, kWeightU8},
    {DType::kU8, PanelScale::kF32Zero, 32, kWeightU8Group32},
    {DType::kU8, PanelScale::kF32Zero, 64, kWeightU8Group64},
    {DType::kU8, PanelScale::kF32Zero, 128, kWeightU8Group128},
};

}  // namespace

const KernelTable* FindKernelTable(Isa isa) {
  for (const Level& level : kLevels) {
    if (level.isa == isa) {
      return level.table;
    }
  }
  return nullptr;
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
  for (const Level& level : kLevels) {
    if (level.isa != Isa::kAmx && machine.Has(level.isa)) {
      return level.isa;
    }
  }
  return Isa::kAvx2;
}

const TileKernels& HostTileKernels() {
#if defined(__x86_64__)
  if (HostMachine().Has(Isa::kAmx) && RequestAmxPermission().ok()) {
    return kTileKernelsAmx;
  }
#endif
  return kTileKernelsEmulated;
}

const TileFormat& FormatOf(const TileKernels& kernels, WeightKernel kernel, bool int8, bool rounded) {
  return (int8 ? kernels.int8 : rounded ? kernels.rounded : kernels.bf16)[kernel];
}

const TileFormat* FindTileFormat(WeightKernel kernel, bool int8, bool rounded) {
  const TileFormat& format = FormatOf(kTileKernelsEmulated, kernel, int8, rounded);
  return format.gemm == nullptr ? nullptr : &format;
}

WeightKernel KernelFor(const PanelFormat& format) {
  for (const PanelKernel& row : kPanelKernels) {
    if (row.code == format.code && row.scale == format.scale && row.group == format.group) {
      return row.kernel;
    }
  }
  return kNumWeightKernels;
}

float KernelOutputScale(WeightKernel kernel) {
  switch (kernel) {
    case kWeightE4m3:
    case kWeightE4m3Scaled:
    case kWeightMxfp8:
      return 256.0F;
    case kWeightNvfp4:
      return 128.0F;  // 2^8 of the e4m3 scale, halved for the doubled code
    case kWeightMxfp4:
      return 0.5F;
    default:
      return 1.0F;
  }
}

}  // namespace fusedmoe::cpu
