#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "canonical.hpp"
#include "support/float_zeros.hpp"
#include "weights/fragment_pack.hpp"

/// Random experts of every fragment format, and memory for their packed form.
namespace fusedmoe::fragment_test {

struct Case {
  std::string scheme;
  FragmentFormat format;
  bool zero_points = false;
  DType scale = DType::kBF16;  ///< of integer groups
  bool float_zeros = false;    ///< zero points as numbers
  int code_bits = 0;           ///< of bytes: WeightFormat
  Codebook codebook = Codebook::kNone;
};

inline std::vector<Case> Cases() {
  return {{"unquantized", FragmentFormat::kBf16},
          {"fp8_w8a8:channel", FragmentFormat::kFp8},
          {"fp8_w8a8:tensor", FragmentFormat::kFp8},
          {"fp8_w8a8:block128", FragmentFormat::kFp8Block},
          {"int8_w8a8:channel", FragmentFormat::kInt8},
          {"int8_w8a8:block128", FragmentFormat::kInt8Zero128},
          {"int8_w8a16:g32", FragmentFormat::kInt8Zero32},
          {"int8_w8a16:g128", FragmentFormat::kInt8Zero128, true},
          {"int4_w4a16:g128", FragmentFormat::kInt4Half128},
          {"int4_w4a16:g128", FragmentFormat::kInt4Half128, false, DType::kF16},
          {"int4_w4a16:g128", FragmentFormat::kInt4Zero128, false, DType::kF32},
          {"int4_w4a16:g128", FragmentFormat::kInt4Zero128, true},
          {"int4_w4a16:g64", FragmentFormat::kInt4Zero64, true},
          {"int4_w4a16:g32", FragmentFormat::kInt4Zero32},
          {"int4_w4a16:g16", FragmentFormat::kInt4Offset16, false, DType::kF32},
          {"int4_w4a16:g16", FragmentFormat::kInt4Offset16, true, DType::kF32, true},
          {"int4_w4a16:g32", FragmentFormat::kInt4Offset32, true, DType::kF32, true},
          {"int4_w4a16:g64", FragmentFormat::kInt4Offset32, true, DType::kF16, true},
          {"int8_w8a16:g16", FragmentFormat::kInt8Offset16},
          {"int8_w8a16:g16", FragmentFormat::kInt8Offset16, true},
          {"int8_w8a16:g32", FragmentFormat::kInt8Offset32, true, DType::kF32, true},
          {"int4_w4a16:channel", FragmentFormat::kInt4},
          {"int4_w4afp8:g128", FragmentFormat::kInt4Half128, false, DType::kF8E4M3},
          {"nvfp4_w4a16", FragmentFormat::kNvfp4},
          {"nvfp4_w4a8:g32", FragmentFormat::kNvfp4},
          {"mxfp8_w8a8", FragmentFormat::kMxfp8},
          {"mxfp4_w4a16", FragmentFormat::kMxfp4},
          {"w_mxfp6_e3m2", FragmentFormat::kMxfp6E3M2},
          {"w_mxfp6_e2m3", FragmentFormat::kMxfp6E2M3},
          {"int8_w8a16:g16", FragmentFormat::kInt6, false, DType::kF32, false, 6},
          {"int8_w8a16:g32", FragmentFormat::kInt6, false, DType::kBF16, false, 6},
          {"int4_w4a16:g32", FragmentFormat::kIq4, false, DType::kF16, false, 0, Codebook::kIq4},
          {"int4_w4a16:g64", FragmentFormat::kIq4, false, DType::kBF16, false, 0, Codebook::kIq4},
          {"mxfp8_w8a8_out", FragmentFormat::kBf16},
          {"nvfp4_w4a8_out", FragmentFormat::kBf16},
          {"mxfp4_w4a8_out:out16_static", FragmentFormat::kBf16}};
}

inline WeightFormat FormatOf(const Case& c) {
  WeightFormat format = ParseScheme(c.scheme)->weight;
  if ((c.scheme.starts_with("int4") || c.code_bits != 0) && format.has_block_scale()) {
    format.block_scale_dtype = c.scale;
  }
  format.code_bits = c.code_bits;
  format.codebook = c.codebook;
  format.zero_point_dtype = c.float_zeros ? DType::kF32 : DType::kU8;
  return format;
}

struct Packed {
  std::vector<uint8_t> gate_up, down;
  std::vector<float> gate_up_tensor, down_tensor, gate_up_row, down_row, gate_up_bias, down_bias;
  FragmentSizes sizes;
  FragmentOutput view() {
    return {gate_up.data(),     down.data(),     gate_up_tensor.data(), down_tensor.data(),
            gate_up_row.data(), down_row.data(), gate_up_bias.data(),   down_bias.data()};
  }
};

inline Packed Allocate(const FragmentSpec& spec, int64_t hidden, int64_t intermediate, bool gated) {
  Packed packed;
  packed.sizes = FragmentSizesOf(spec, hidden, intermediate, gated);
  const auto rows = static_cast<size_t>(packed.sizes.gate_up_rows * packed.sizes.parts);
  packed.gate_up.assign(static_cast<size_t>(packed.sizes.gate_up_bytes), 0xa5);
  packed.down.assign(static_cast<size_t>(packed.sizes.down_bytes), 0xa5);
  packed.gate_up_tensor.resize(2);
  packed.down_tensor.resize(1);
  packed.gate_up_row.assign(rows, NAN);
  packed.gate_up_bias.assign(rows, NAN);
  packed.down_row.assign(static_cast<size_t>(packed.sizes.down_rows), NAN);
  packed.down_bias.assign(static_cast<size_t>(packed.sizes.down_rows), NAN);
  return packed;
}

inline CanonicalExpert RandomExpert(const Case& c, int64_t hidden, int64_t intermediate, bool gated,
                                    std::mt19937& generator) {
  MatrixOptions options;
  options.zero_points = c.zero_points;
  CanonicalExpert expert;
  const auto random = [&](int64_t rows, int64_t cols) {
    CanonicalMatrix matrix = RandomMatrix(rows, cols, FormatOf(c), generator, options);
    if (c.code_bits != 0) {
      for (std::byte& code :
           std::span(matrix.codes.mutable_view().data(), static_cast<size_t>(rows * cols))) {
        code &= static_cast<std::byte>((1 << c.code_bits) - 1);
      }
    }
    if (c.float_zeros) {
      testing_support::MakeZerosFloats(matrix, generator);
    }
    return matrix;
  };
  if (gated) {
    expert.gate = random(intermediate, hidden);
    expert.gate.bias = RandomFloats(DType::kF32, Shape{intermediate}, generator, -1, 1);
  }
  expert.up = random(intermediate, hidden);
  expert.up.bias = RandomFloats(DType::kF32, Shape{intermediate}, generator, -1, 1);
  expert.down = random(hidden, intermediate);
  return expert;
}

/// The codes and scales of a row block.
struct BlockView {
  const uint8_t* codes;
  const uint8_t* scales;
};

inline BlockView BlockOf(const std::vector<uint8_t>& matrix, const FragmentPlaces& places, int64_t b) {
  EXPECT_EQ(matrix.size(), static_cast<size_t>(places.bytes));
  return {matrix.data() + places.Codes(b), matrix.data() + places.Scales(b)};
}

}  // namespace fusedmoe::fragment_test
