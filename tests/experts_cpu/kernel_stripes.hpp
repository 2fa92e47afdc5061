#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <random>

#include "experts/cpu/kernels/kernels.hpp"
#include "numerics/rows.hpp"
#include "weights/panel.hpp"

/// Stripes of random weights for the micro-kernels. Numbers come from the generator alone, so that they are
/// the same on every machine.
namespace fusedmoe::cpu_test {

struct KernelWeights {
  cpu::WeightKernel kernel;
  PanelFormat panel;
};

inline constexpr KernelWeights kIntegerWeights[] = {
    {cpu::kWeightNvfp4, {DType::kF4E2M1, PanelScale::kE4M3, 16}},
    {cpu::kWeightMxfp4, {DType::kF4E2M1, PanelScale::kE8M0, 32}},
    {cpu::kWeightMxfp6, {DType::kF6E2M3, PanelScale::kE8M0, 32}},
    {cpu::kWeightMxfp6, {DType::kF6E3M2, PanelScale::kE8M0, 32}},
    {cpu::kWeightU4, {DType::kU4}},
    {cpu::kWeightU4Group16, {DType::kU4, PanelScale::kF32, 16, 64, PanelZero::kFloats}},
    {cpu::kWeightU4Group16, {DType::kU4, PanelScale::kBF16, 16}},
    {cpu::kWeightU4Group32, {DType::kU4, PanelScale::kF16, 32, 64, PanelZero::kBytes}},
    {cpu::kWeightU4Group32, {DType::kU4, PanelScale::kF32, 32, 64, PanelZero::kFloats}},
    {cpu::kWeightU4Group64, {DType::kU4, PanelScale::kBF16, 64}},
    {cpu::kWeightU4Group128, {DType::kU4, PanelScale::kBF16, 128, 128, PanelZero::kBytes}},
    {cpu::kWeightU4Super16, {DType::kU4, PanelScale::kI8, 16, 128, PanelZero::kMinima}},
    {cpu::kWeightU4Super16, {DType::kU4, PanelScale::kI8, 16, 128}},
    {cpu::kWeightU4Super32, {DType::kU4, PanelScale::kI8, 32, 128, PanelZero::kMinima}},
    {cpu::kWeightU8, {DType::kU8}},
    {cpu::kWeightU8Group16, {DType::kU8, PanelScale::kF32, 16}},
    {cpu::kWeightU8Group16, {DType::kU8, PanelScale::kF16, 16, 64, PanelZero::kBytes}},
    {cpu::kWeightU8Group32, {DType::kU8, PanelScale::kF32, 32}},
    {cpu::kWeightU8Group32, {DType::kU8, PanelScale::kF32, 32, 64, PanelZero::kFloats}},
    {cpu::kWeightU8Group64, {DType::kU8, PanelScale::kF16, 64}},
    {cpu::kWeightU8Group128, {DType::kU8, PanelScale::kF32, 128, 128, PanelZero::kBytes}},
    {cpu::kWeightU8Super16, {DType::kU8, PanelScale::kI8, 16, 128}},
    {cpu::kWeightU8Super32, {DType::kU8, PanelScale::kI8, 32, 128}},
    {cpu::kWeightU8Super32, {DType::kU8, PanelScale::kI8, 32, 128, PanelZero::kMinima}},
    {cpu::kWeightBookGroup32, {DType::kU4, PanelScale::kF16, 32, 64, PanelZero::kNone, Codebook::kIq4}},
    {cpu::kWeightBookSuper32, {DType::kU4, PanelScale::kI8, 32, 128, PanelZero::kNone, Codebook::kIq3S}},
    {cpu::kWeightIq1Super16, {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kNone, Codebook::kIq1M, 3}},
    {cpu::kWeightIq1Super32, {DType::kU8, PanelScale::kI8, 32, 128, PanelZero::kNone, Codebook::kIq1S, 3}},
    {cpu::kWeightIq2Super16, {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kNone, Codebook::kIq2, 3}},
    {cpu::kWeightIq2Super32, {DType::kU8, PanelScale::kI8, 32, 128, PanelZero::kNone, Codebook::kIq2, 3}},
    {cpu::kWeightU2Super16, {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kMinima, Codebook::kNone, 2}},
    {cpu::kWeightU3Super16, {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kNone, Codebook::kNone, 3}},
    {cpu::kWeightU5Group32, {DType::kU8, PanelScale::kF16, 32, 64, PanelZero::kNone, Codebook::kNone, 5}},
    {cpu::kWeightU5Group32, {DType::kU8, PanelScale::kF32, 32, 64, PanelZero::kFloats, Codebook::kNone, 5}},
    {cpu::kWeightU5Super32, {DType::kU8, PanelScale::kI8, 32, 128, PanelZero::kMinima, Codebook::kNone, 5}},
    {cpu::kWeightU6Super16, {DType::kU8, PanelScale::kI8, 16, 128, PanelZero::kNone, Codebook::kNone, 6}},
};

inline constexpr KernelWeights kFloatWeights[] = {
    {cpu::kWeightF32, {DType::kF32}},
    {cpu::kWeightBf16, {DType::kBF16}},
    {cpu::kWeightF16, {DType::kF16}},
    {cpu::kWeightE4m3, {DType::kF8E4M3}},
    {cpu::kWeightE4m3Scaled, {DType::kF8E4M3, PanelScale::kF32, 64}},
    {cpu::kWeightE4m3Stripe, {DType::kF8E4M3, PanelScale::kStripeF32, 64}},
    {cpu::kWeightMxfp8, {DType::kF8E4M3, PanelScale::kE8M0, 32}},
    {cpu::kWeightE5m2, {DType::kF8E5M2}},
};

/// Any bytes are codes, but for floats of 16 and 32 bits and e5m2, which are below 2; scales are small, so
/// that sums stay finite.
inline void FillStripes(const PanelFormat& panel, int64_t stripes, int64_t blocks, std::mt19937& random,
                        std::byte* bytes) {
  if (const int64_t header = panel.header_bytes(blocks); header > 0) {
    const PanelFormat codes{panel.code};
    for (int64_t stripe = 0; stripe < stripes; ++stripe) {
      for (int64_t i = 0; i < header; ++i) {
        *bytes++ = static_cast<std::byte>(0x30 + (random() & 15));
      }
      FillStripes(codes, 1, blocks, random, bytes);
      bytes += blocks * codes.block_bytes();
    }
    return;
  }
  const int64_t codes = panel.code_bytes();
  const int64_t float_bytes = DTypeBits(panel.code) >= 16 ? DTypeBits(panel.code) / 8 : 0;
  const unsigned mask = panel.code == DType::kF8E5M2 ? 0xbfU : 0xffU;
  for (int64_t block = 0; block < stripes * blocks; ++block, bytes += panel.block_bytes()) {
    for (int64_t i = 0; i < panel.block_bytes(); ++i) {
      bytes[i] = static_cast<std::byte>(i < codes ? random() & mask : 0x30 + (random() & 15));
    }
    for (int64_t i = 0; float_bytes > 0 && i < codes; i += float_bytes) {
      const float value = static_cast<float>(random() & 0xffff) / 32768.0F - 1.0F;
      EncodeRow(panel.code, &value, 1, bytes + i);
    }
    if (panel.scale == PanelScale::kI8) {  // any bytes are scales and minima
      for (int64_t i = codes; i < panel.block_bytes(); ++i) {
        bytes[i] = static_cast<std::byte>(random() & 255);
      }
      for (int64_t at = codes; at < codes + panel.unit_bytes(); at += 2) {
        const float unit = static_cast<float>(static_cast<int>(random() & 2047) - 1024) / 65536.0F;
        EncodeRow(DType::kF16, &unit, 1, bytes + at);
      }
      continue;
    }
    for (int64_t group = codes; IsPanelInteger(panel.code) && group < panel.block_bytes();
         group += panel.group_bytes()) {
      const DType dtype = panel.scale == PanelScale::kF32    ? DType::kF32
                          : panel.scale == PanelScale::kBF16 ? DType::kBF16
                                                             : DType::kF16;
      float scales[kPanelRows];
      for (float& scale : scales) {
        scale = 0.5F + static_cast<float>(random() & 255) / 64.0F;
      }
      EncodeRow(dtype, scales, kPanelRows, bytes + group);
      for (int64_t row = 0; panel.zeros == PanelZero::kFloats && row < kPanelRows; ++row) {
        const float zero = static_cast<float>(random() & 4095) / 64.0F - 16.0F;
        std::memcpy(bytes + group + 64 + 4 * row, &zero, 4);
      }
    }
  }
}

}  // namespace fusedmoe::cpu_test
