#pragma once

#include "experts/cpu/kernels/dot_isa.hpp"
#if defined(__AVX512BW__)
#include "experts/cpu/kernels/dot_staged_isa.hpp"
#elif defined(__AVX2__)
#include "experts/cpu/kernels/dot_bytes_avx2_isa.hpp"
#endif
#include "experts/cpu/kernels/epilogue_isa.hpp"
#include "experts/cpu/kernels/integer_table_isa.hpp"
#include "experts/cpu/kernels/pack_isa.hpp"
#include "experts/cpu/kernels/panel_isa.hpp"
#include "experts/cpu/kernels/panel_params_isa.hpp"
#include "experts/cpu/kernels/panel_products_isa.hpp"
#include "experts/cpu/kernels/quantize_isa.hpp"

/// The kernel table of one instruction set. Which floats meet which tiles is decided here and nowhere else,
/// which integers in integer_table_isa.hpp.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Codes of up to a byte may come in an order of their own.
template <PanelTransform kTransform>
constexpr void SetPanel(KernelTable& table) {
  table.pack_panel[kTransform] = &PackPanel<kTransform>;
  table.transpose_codes[kTransform] = &TransposeCodes<kTransform>;
  table.pack_columns[kTransform] = &PackColumns<kTransform>;
}

constexpr KernelTable MakeTable(const char* isa) {
  KernelTable table = {};
  table.isa = isa;
#define FMOE_SET_FLOAT(id, ...) SetFloatDots<id, kTileF32>(table);
  FMOE_FLOAT_WEIGHT_TABLE(FMOE_SET_FLOAT)
#undef FMOE_SET_FLOAT
#if defined(__AVX512BW__)
  SetStagedDots<kWeightE4m3>(table);
  SetStagedDots<kWeightE4m3Scaled>(table);
  SetStagedDots<kWeightE4m3Stripe>(table);
  SetStagedDots<kWeightMxfp8>(table);
  SetStagedDots<kWeightE5m2>(table);
#elif defined(__AVX2__)
  SetRaisedDots<kWeightE4m3>(table);
  SetRaisedDots<kWeightE4m3Scaled>(table);
  SetRaisedDots<kWeightE4m3Stripe>(table);
  SetRaisedDots<kWeightMxfp8>(table);
  table.pack[kTileRaised] = &PackRaised;
#endif
  SetIntegers(table);
  table.pack[kTileF32] = &PackF32;
  table.pack[kTileA24] = &PackIntegers<kTileA24>;
  table.pack[kTileA16] = &PackIntegers<kTileA16>;
  table.pack[kTileA8] = &PackIntegers<kTileA8>;
  table.pack[kTileMx] = &PackIntegers<kTileMx>;
  table.pack_codes = &PackCodes;
  table.interleave = &Interleave;
  table.amax = &Amax;
  table.round = &Round;
  table.two_level = &RoundTwoLevel;
  table.activate = &Activate;
  table.accumulate = &Accumulate;
  table.to_float[kRowF32] = &CopyFloats;
  table.to_float[kRowBf16] = &Bf16ToFloat;
  table.to_float[kRowF16] = &F16ToFloat;
  table.from_float[kRowF32] = &CopyFloatsOut;
  table.from_float[kRowBf16] = &FloatToBf16;
  table.from_float[kRowF16] = &FloatToF16;
  SetPanel<kPanelNibbles>(table);
  SetPanel<kPanelBytes>(table);
  SetPanel<kPanelHalfLanes>(table);
  for (int transform = 0; transform < kNumPanelTransforms; ++transform) {
    table.prefetches_line_by_line[transform] = PrefetchesLineByLine((PanelTransform)transform);
  }
  table.pack_panel[kPanelSixBits] = &PackPanel<kPanelSixBits>;
  table.pack_panel[kPanelU2] = &PackPanel<kPanelU2>;
  table.pack_panel[kPanelU3] = &PackPanel<kPanelU3>;
  table.pack_panel[kPanelU5] = &PackPanel<kPanelU5>;
  table.pack_panel[kPanelU6] = &PackPanel<kPanelU6>;
  table.pack_panel[kPanelWords] = &PackPanel<kPanelWords>;
  table.pack_panel[kPanelHalfWords] = &PackPanel<kPanelHalfWords>;
  table.pack_panel[kPanelFloats] = &PackPanel<kPanelFloats>;
  table.pack_params[kParamBytes] = &PackParams<kParamBytes>;
  table.pack_params[kParamWords] = &PackParams<kParamWords>;
  table.pack_params[kParamFloats] = &PackParams<kParamFloats>;
  table.pack_params[kParamBf16ToFloat] = &PackParams<kParamBf16ToFloat>;
  table.pack_params[kParamF16ToFloat] = &PackParams<kParamF16ToFloat>;
  table.multiply_e2m1 = &MultiplyCodes<4>;
  table.multiply_e4m3 = &MultiplyCodes<8>;
  return table;
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
