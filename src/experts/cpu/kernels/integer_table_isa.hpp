#pragma once

#include "experts/cpu/kernels/dot_few_isa.hpp"
#include "experts/cpu/kernels/dot_isa.hpp"

/// Which integers, and small floats that become integers, meet which tiles: part of every table, and all that
/// avx2_vnni adds to that of avx2 (kernels.cpp puts them together).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <WeightKernel kWeight, TileKind kKind>
constexpr void SetIntegerDots(KernelTable& table) {
  table.dot[kWeight][kKind][0] = &IntegerDot<kWeight, kKind, 1>;
  table.dot[kWeight][kKind][1] = &IntegerDot<kWeight, kKind, 2>;
  table.prefetches_twice[kWeight][kKind] = PrefetchesIntegersTwice<kWeight, kKind>();
  constexpr bool kWords = IntegerPanel<kWeight>::kProducts, k22Bits = kKind == kTileA24;
  if constexpr (kHasWideDot && !kWords && !k22Bits) {
    table.batch[kWeight][kKind] = &TallBatch<kWeight, kKind>;
  } else if constexpr (kHasUnsignedDot || kWords) {
    table.batch[kWeight][kKind] = &SlabBatch<kWeight, kKind>;
  } else if constexpr (!kHasByteDot && !k22Bits) {
    table.batch[kWeight][kKind] = &FewOrSlabBatch<kWeight, kKind>;
  } else {
    table.dot[kWeight][kKind][2] = &IntegerDot<kWeight, kKind, 4>;
  }
}

template <WeightKernel kWeight>
constexpr void SetInteger(KernelTable& table) {
  if constexpr (!IsWeightOnly(kWeight)) {
    SetIntegerDots<kWeight, kTileA24>(table);
  }
  SetIntegerDots<kWeight, kTileA16>(table);
  SetIntegerDots<kWeight, kTileA8>(table);
}

constexpr void SetIntegers(KernelTable& table) {
  SetInteger<kWeightNvfp4>(table);
  SetInteger<kWeightMxfp4>(table);
  SetIntegerDots<kWeightNvfp4, kTileA4>(table);
  SetIntegerDots<kWeightMxfp4, kTileA4>(table);
  SetInteger<kWeightMxfp6>(table);
  SetIntegerDots<kWeightMxfp4, kTileMx>(table);
  SetIntegerDots<kWeightMxfp6, kTileMx>(table);
#define FMOE_SET_INTEGER(id, ...) SetInteger<id>(table);
  FMOE_INTEGER_WEIGHT_TABLE(FMOE_SET_INTEGER)
#undef FMOE_SET_INTEGER
}

constexpr KernelTable MakeIntegerTable(const char* isa) {
  KernelTable table = {};
  table.isa = isa;
  SetIntegers(table);
  return table;
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
