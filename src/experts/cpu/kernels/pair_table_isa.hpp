#pragma once

#include "experts/cpu/kernels/dot_float_isa.hpp"
#include "experts/cpu/kernels/pack_pairs_isa.hpp"
#include "experts/cpu/kernels/pair_units_isa.hpp"

/// What a level with a unit for 16-bit floats adds to the table of avx512_vnni (kernels.cpp puts them
/// together).
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <TileKind kKind>
constexpr void SetBf16(KernelTable& table) {
  SetFloatDots<kWeightBf16, kKind>(table);
  SetFloatDots<kWeightE4m3, kKind>(table);
  SetFloatDots<kWeightE4m3Scaled, kKind>(table);
  SetFloatDots<kWeightE4m3Stripe, kKind>(table);
  SetFloatDots<kWeightMxfp8, kKind>(table);
  SetFloatDots<kWeightE5m2, kKind>(table);
  if constexpr (kKind == kTileBf16) {  // for codes of 6 and 8 bits; 16-bit rows are faster on integers
    SetFloatDots<kWeightNvfp4, kKind>(table);
    SetFloatDots<kWeightMxfp4, kKind>(table);
    SetFloatDots<kWeightU4Group32, kKind>(table);
    SetFloatDots<kWeightU4Group64, kKind>(table);
    SetFloatDots<kWeightU4Group128, kKind>(table);
  }
  table.pack[kKind] = &PackBf16<kKind>;
}

/// F16 and e5m2 weights have no bound that would keep sums below 65504.
constexpr void SetF16(KernelTable& table) {
  SetFloatDots<kWeightE4m3, kTileF16>(table);
  SetFloatDots<kWeightE4m3Scaled, kTileF16>(table);
  SetFloatDots<kWeightE4m3Stripe, kTileF16>(table);
  SetFloatDots<kWeightMxfp8, kTileF16>(table);
  table.pack[kTileF16] = &PackF16;
}

template <bool kBf16, bool kF16>
constexpr KernelTable MakePairTable(const char* isa) {
  KernelTable table = {};
  table.isa = isa;
  if constexpr (kBf16) {
    SetBf16<kTileBf16>(table);
    SetBf16<kTileBf16Pair>(table);
  }
  if constexpr (kF16) {
    SetF16(table);
  }
  return table;
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
