#include "weights/fragment.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "fragment_case.hpp"
#include "weights/dequantize.hpp"
#include "weights/fragment_codes.hpp"

namespace fusedmoe::fragment_test {
namespace {

/// What the group of column k adds to its weights; 0 where groups have no offsets.
float OffsetOf(const FragmentTraits& traits, const BlockView& block, int row, int64_t k) {
  if (traits.scale != FragmentScale::kOffset) {
    return 0.0F;
  }
  uint32_t word = 0;
  const int group = static_cast<int>(k % kFragmentSlab / traits.group);
  std::memcpy(
      &word, block.scales + k / kFragmentSlab * traits.scale_stride() + ScaleOffset(traits.scale, row, group),
      4);
  return DecodeCode(DType::kBF16, word >> 16);
}

/// One weight of the packed form with all its scales; 0 and true for padding that decodes to zero.
void ExpectRow(const CanonicalMatrix& matrix, const FragmentSpec& spec, const BlockView& block, int row,
               int64_t matrix_row, float tensor, float row_scale, float bias, const std::string& what) {
  const int64_t padded = FragmentCols(spec.format, matrix.cols);
  std::vector<float> expected(static_cast<size_t>(padded), 0.0F);
  if (matrix_row < matrix.rows) {
    DequantizeRow(matrix, matrix_row, expected.data());
    const bool has_bias = !matrix.bias.empty();
    ASSERT_EQ(bias, has_bias ? matrix.bias.view().as<float>()[matrix_row] : 0.0F) << what;
  } else {
    ASSERT_EQ(bias, 0.0F) << what;
    row_scale = 1.0F;
  }
  // Scales beside zero points keep 15 mantissa bits, those that act on weights 8, and so do offsets: both are
  // rounded, and the product is what the weight leaves to the offset. Otherwise only the order of two
  // products differs.
  const FragmentTraits traits = FragmentTraitsOf(spec.format);
  const bool in_bf16 = traits.scale == FragmentScale::kOffset || traits.scale == FragmentScale::kBf16;
  const float bound = traits.scale == FragmentScale::kF32Zero ? 1.6e-5F : in_bf16 ? 0x1.01p-8F : 2.4e-7F;
  for (int64_t k = 0; k < padded; ++k) {
    const float want = expected[static_cast<size_t>(k)];
    const float value = FragmentValue(spec, block.codes, block.scales, row, k) * row_scale * tensor;
    const float offset = OffsetOf(traits, block, row, k) * row_scale * tensor;
    ASSERT_LE(std::fabs(value - want), bound * (std::fabs(want) + 2 * std::fabs(offset)))
        << what << " row " << matrix_row << " column " << k << ": " << value << " for " << want;
  }
}

void CheckCase(const Case& c, int64_t hidden, int64_t intermediate, bool gated) {
  const std::string what = c.scheme + (c.zero_points ? " with zero points" : "") + (gated ? "" : " ungated") +
                           " " + std::to_string(hidden) + "x" + std::to_string(intermediate);
  std::mt19937 generator(17);
  const CanonicalExpert expert = RandomExpert(c, hidden, intermediate, gated, generator);
  const Result<FragmentSpec> spec = ChooseFragmentSpec(expert.up.format, c.zero_points);
  ASSERT_TRUE(spec.ok()) << what << ": " << spec.status().ToString();
  ASSERT_EQ(spec->format, c.format) << what << ": " << spec->ToString();
  Packed packed = Allocate(*spec, hidden, intermediate, gated);
  const Status status = PackFragmentExpert(expert, *spec, packed.view());
  ASSERT_TRUE(status.ok()) << what << ": " << status.ToString();

  const FragmentPlaces gate_up = FragmentPlacesOf(spec->format, GateUpBlocks(intermediate, gated), hidden);
  std::vector<int> seen(static_cast<size_t>(intermediate), 0);
  for (int64_t b = 0; b < GateUpBlocks(intermediate, gated); ++b) {
    for (int row = 0; row < 16; ++row) {
      const FragmentSource source = GateUpSource(b, row, gated);
      const size_t part = gated && source.up ? 1 : 0;
      const auto at =
          part * static_cast<size_t>(packed.sizes.gate_up_rows) + static_cast<size_t>(source.column);
      if (source.column < intermediate) {
        seen[static_cast<size_t>(source.column)] += source.up ? 1 : 16;
      }
      ExpectRow(source.up ? expert.up : expert.gate, *spec, BlockOf(packed.gate_up, gate_up, b), row,
                source.column, packed.gate_up_tensor[part], packed.gate_up_row[at], packed.gate_up_bias[at],
                what + (source.up ? " up" : " gate"));
    }
  }
  for (const int count : seen) {
    ASSERT_EQ(count, gated ? 17 : 1) << what << ": every row once";
  }
  const FragmentPlaces down = FragmentPlacesOf(spec->format, DownBlocks(hidden), intermediate);
  for (int64_t row = 0; row < DownBlocks(hidden) * 16; ++row) {
    ExpectRow(expert.down, *spec, BlockOf(packed.down, down, row / 16), static_cast<int>(row % 16), row,
              packed.down_tensor[0], packed.down_row[static_cast<size_t>(row)],
              packed.down_bias[static_cast<size_t>(row)], what + " down");
  }

  // And back: other numbers in every tensor first.
  std::mt19937 other(99);
  CanonicalExpert back = RandomExpert(c, hidden, intermediate, gated, other);
  const auto copy_scalars = [](const CanonicalMatrix& from, CanonicalMatrix& to) {
    to.tensor_scale = from.tensor_scale;
  };
  copy_scalars(expert.gate, back.gate);
  copy_scalars(expert.up, back.up);
  copy_scalars(expert.down, back.down);
  const Status unpacked = UnpackFragmentExpert(*spec, packed.view(), back);
  if (spec->products || FragmentTraitsOf(spec->format).scale == FragmentScale::kOffset) {
    EXPECT_EQ(unpacked.code(), StatusCode::kUnsupported) << what;
    return;
  }
  ASSERT_TRUE(unpacked.ok()) << what << ": " << unpacked.ToString();
  const auto expect_same = [&](const CanonicalMatrix& a, const CanonicalMatrix& b, const char* name) {
    if (a.empty()) {
      return;
    }
    ASSERT_EQ(std::memcmp(a.codes.view().data(), b.codes.view().data(),
                          static_cast<size_t>(a.codes.view().total_bytes())),
              0)
        << what << " codes of " << name;
    const DType dtype = FormatOf(c).block_scale_dtype;
    const bool rounded =
        c.scale == DType::kF32 || dtype == DType::kF32 ||  // F32 scales keep 15 bits
        (FragmentTraitsOf(spec->format).scale == FragmentScale::kBf16 && dtype != DType::kBF16);
    const bool held = FragmentTraitsOf(spec->format).group > 0;
    if (held && !rounded) {
      ASSERT_EQ(std::memcmp(a.block_scale.view().data(), b.block_scale.view().data(),
                            static_cast<size_t>(a.block_scale.view().total_bytes())),
                0)
          << what << " scales of " << name;
    }
    if (!a.zero_point.empty()) {
      ASSERT_EQ(std::memcmp(a.zero_point.view().data(), b.zero_point.view().data(),
                            static_cast<size_t>(a.zero_point.view().total_bytes())),
                0)
          << what << " zero points of " << name;
    }
  };
  expect_same(expert.gate, back.gate, "gate");
  expect_same(expert.up, back.up, "up");
  expect_same(expert.down, back.down, "down");
}

TEST(Fragment, EveryFormat_PackedValueIsTheDefinitionAndUnpackGivesItBack) {
  for (const Case& c : Cases()) {
    CheckCase(c, 256, 128, true);
  }
}

TEST(Fragment, SizesWithTails_PaddingIsZero) {
  for (const Case& c : Cases()) {
    // K tails: hidden cuts a slab, intermediate a slab and its group; rows that are no multiple of 16.
    const bool grouped =
        FormatOf(c).has_block_scale() && FormatOf(c).block.row == 1 && FormatOf(c).block.col > 0;
    const int64_t group = grouped ? FormatOf(c).block.col : 2;
    CheckCase(c, 5 * group + (group < 64 ? 64 : 0), 3 * group, true);
    CheckCase(c, 3 * group, group, false);
  }
}

TEST(Fragment, ZeroNvfp4Scale_ClearsItsBlock) {
  const Case c{"nvfp4_w4a16", FragmentFormat::kNvfp4};
  std::mt19937 generator(3);
  CanonicalExpert expert = RandomExpert(c, 64, 64, true, generator);
  expert.down.block_scale.mutable_view().data()[5] = std::byte{0};
  expert.down.block_scale.mutable_view().data()[6] = std::byte{1};  // the smallest subnormal
  const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, false);
  Packed packed = Allocate(spec, 64, 64, true);
  ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok());
  std::vector<float> row(64);
  DequantizeRow(expert.down, 1, row.data());
  const BlockView block = BlockOf(packed.down, FragmentPlacesOf(spec.format, DownBlocks(64), 64), 0);
  for (int64_t k = 0; k < 64; ++k) {
    const float value = FragmentValue(spec, block.codes, block.scales, 1, k) * packed.down_tensor[0];
    EXPECT_FLOAT_EQ(value, row[static_cast<size_t>(k)]) << "column " << k;
    if (k >= 16 && k < 32) {
      EXPECT_EQ(value, 0.0F) << "column " << k;
    }
  }
}

void SetOrder(CanonicalMatrix& matrix, std::mt19937& generator) {
  auto index = *Tensor::Allocate(DType::kI32, Shape{matrix.cols});
  auto* values = index.mutable_view().as<int32_t>();
  for (int64_t col = 0; col < matrix.cols; ++col) {
    values[col] = static_cast<int32_t>(col / matrix.format.block.col);
  }
  std::shuffle(values, values + matrix.cols, generator);
  matrix.group_index = std::move(index);
}

/// Weights in activation order are sorted by groups: the input is told, the intermediate comes out sorted.
TEST(Fragment, ActivationOrder_ColumnsByGroup_IntermediateInTheOrderOfDown) {
  for (const Case& c : {Case{"int4_w4a16:g128", FragmentFormat::kInt4Half128},
                        Case{"int4_w4a16:g32", FragmentFormat::kInt4Zero32, true},
                        Case{"int8_w8a16:g128", FragmentFormat::kInt8Zero128, true}}) {
    std::mt19937 generator(29);
    constexpr int64_t kHidden = 256, kIntermediate = 384;
    CanonicalExpert expert = RandomExpert(c, kHidden, kIntermediate, true, generator);
    SetOrder(expert.up, generator);
    expert.gate.group_index = expert.up.group_index;
    SetOrder(expert.down, generator);
    const FragmentSpec spec = *ChooseFragmentSpec(expert.up.format, c.zero_points);
    Packed packed = Allocate(spec, kHidden, kIntermediate, true);
    std::vector<int32_t> input(kHidden, -1);
    FragmentOutput out = packed.view();
    EXPECT_EQ(PackFragmentExpert(expert, spec, out).code(), StatusCode::kUnsupported) << "nowhere to tell it";
    out.input_order = input.data();
    ASSERT_TRUE(PackFragmentExpert(expert, spec, out).ok()) << c.scheme;
    std::vector<float> row(kHidden), down_row(kIntermediate);
    std::vector<int> seen(kHidden, 0);
    DequantizeRow(expert.down, 3, down_row.data());
    const FragmentPlaces places = FragmentPlacesOf(spec.format, GateUpBlocks(kIntermediate, true), kHidden);
    const FragmentPlaces down_places = FragmentPlacesOf(spec.format, DownBlocks(kHidden), kIntermediate);
    const auto near = [](float value, float want) {
      return std::fabs(value - want) <= 1.6e-5F * std::fabs(want);
    };
    for (int64_t k = 0; k < kHidden; ++k) {
      ++seen[static_cast<size_t>(input[static_cast<size_t>(k)])];
    }
    EXPECT_EQ(seen, std::vector<int>(kHidden, 1)) << "every column once";
    // Each intermediate column of the layout is one of the matrix: its row of up and its column of down.
    std::vector<int> columns(kIntermediate, 0);
    for (int64_t i = 0; i < kIntermediate; ++i) {
      const int64_t b = (i / 64) * 8 + (i % 16 / 4) * 2 + (i % 4) / 2;
      const int r = static_cast<int>(i % 64 / 16 * 2 + i % 2);
      ASSERT_EQ(IntermediateColumn(b, r), i);
      const auto find = [&](int64_t source) {  // is it this row of up?
        DequantizeRow(expert.up, source, row.data());
        for (int64_t k = 0; k < kHidden; ++k) {
          const BlockView block = BlockOf(packed.gate_up, places, b);
          const float value =
              FragmentValue(spec, block.codes, block.scales, r + 8, k) * packed.gate_up_tensor[1];
          if (!near(value, row[static_cast<size_t>(input[static_cast<size_t>(k)])])) {
            return false;
          }
        }
        return true;
      };
      int64_t source = 0;
      while (source < kIntermediate && !find(source)) {
        ++source;
      }
      ASSERT_LT(source, kIntermediate) << c.scheme << " column " << i;
      ++columns[static_cast<size_t>(source)];
      EXPECT_EQ(packed.gate_up_bias[static_cast<size_t>(packed.sizes.gate_up_rows + i)],
                expert.up.bias.view().as<float>()[source]);
      const BlockView block = BlockOf(packed.down, down_places, 0);
      const float value = FragmentValue(spec, block.codes, block.scales, 3, i) * packed.down_tensor[0];
      EXPECT_PRED2(near, value, down_row[static_cast<size_t>(source)]) << c.scheme << " column " << i;
    }
    EXPECT_EQ(columns, std::vector<int>(kIntermediate, 1)) << c.scheme;
    SetOrder(expert.gate, generator);
    const Status apart = PackFragmentExpert(expert, spec, out);
    EXPECT_NE(apart.message().find("one input"), std::string::npos) << apart.message();
    auto uneven = *Tensor::Allocate(DType::kI32, Shape{kHidden});
    std::fill_n(uneven.mutable_view().as<int32_t>(), kHidden, 0);
    expert.gate.group_index = expert.up.group_index = uneven;
    const Status full = PackFragmentExpert(expert, spec, out);
    EXPECT_NE(full.message().find("group 0"), std::string::npos) << full.message();
  }
}

/// Parts of a matrix, as ranks have them: a product knows its scale, no group of the layout is cut.
TEST(Fragment, BlocksAlongTheOutputs_SlicesBeginInsideBlocks) {
  for (const char* scheme : {"mxfp8_w8a8_out", "nvfp4_w4a8_out", "mxfp4_w4a8_out:out16_static"}) {
    const WeightFormat format = ParseScheme(scheme)->weight;
    const FragmentSpec spec = *ChooseFragmentSpec(format, false);
    EXPECT_TRUE(spec.products) << scheme;
    std::mt19937 generator(7);
    const MatrixOptions options{.row_offset = 24, .col_offset = 10};
    CanonicalExpert expert;
    expert.up = RandomMatrix(72, 80, format, generator, options);
    expert.down = RandomMatrix(80, 72, format, generator, options);
    Packed packed = Allocate(spec, 80, 72, false);
    ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok()) << scheme;
    const FragmentPlaces down = FragmentPlacesOf(spec.format, DownBlocks(80), 72);
    for (int64_t row = 0; row < 80; ++row) {
      ExpectRow(expert.down, spec, BlockOf(packed.down, down, row / 16), static_cast<int>(row % 16), row,
                packed.down_tensor[0], 1.0F, 0.0F, scheme);
    }
  }
}

TEST(Fragment, WhatItCannotHold_IsRefusedWithReason) {
  const WeightFormat int4 = ParseScheme("int4_w4a16:g128")->weight;
  std::mt19937 generator(5);
  MatrixOptions options;
  const FragmentSpec spec = *ChooseFragmentSpec(int4, false);
  options.col_offset = 64;
  const Status cut = CheckFragmentMatrix(RandomMatrix(16, 128, int4, generator, options), spec);
  EXPECT_NE(cut.message().find("column 64"), std::string::npos) << cut.message();
  CanonicalMatrix halves = RandomMatrix(16, 128, int4, generator);
  EXPECT_TRUE(CheckFragmentMatrix(halves, spec).ok());
  halves.format.block_scale_dtype = DType::kF16;
  const Status other = CheckFragmentMatrix(halves, spec);
  EXPECT_NE(other.message().find("scales of F16; the layout was made for BF16"), std::string::npos)
      << other.message();
  EXPECT_FALSE(ChooseFragmentSpec({.element = DType::kF32}, false).ok());
  EXPECT_FALSE(ChooseFragmentSpec({.element = DType::kF8E5M2}, false).ok());
  WeightFormat bytes = ParseScheme("int8_w8a16:g16")->weight;
  for (const int bits : {2, 3, 5}) {
    bytes.code_bits = bits;
    EXPECT_FALSE(ChooseFragmentSpec(bytes, false).ok()) << bits << " bits";
  }
  bytes.code_bits = 6;
  EXPECT_FALSE(ChooseFragmentSpec(bytes, true).ok()) << "zero points";
  WeightFormat indices = ParseScheme("int4_w4a16:g32")->weight;
  indices.codebook = Codebook::kIq3S;
  EXPECT_FALSE(ChooseFragmentSpec(indices, false).ok()) << "another codebook";
}

/// Every place in three words is one bit of one code, and a kernel's masks meet no other: what is rotated to
/// where a code wants it are its own bits.
TEST(Fragment, SixBits_EveryPlaceOnce) {
  for (const FragmentCode code : {FragmentCode::kE2M3, FragmentCode::kE3M2, FragmentCode::kInt6}) {
    const SixBitTable table = SixBitTableOf(code);
    std::vector<int> seen(16 * kSixBitWords, 0);
    int operations = 0;
    std::vector<int> rotations;
    for (int pair = 0; pair < kSixBitPairs; ++pair) {
      std::vector<int> own;
      for (int bit = 0; bit < 6; ++bit) {
        ++seen[static_cast<size_t>(table.at[pair][bit])];
        EXPECT_LT(table.Wanted(pair, bit), 16);
        EXPECT_EQ(table.Bit(pair, bit) % 16, table.at[pair][bit] % 16);
        const int rotation = 16 * table.Word(pair, bit) + table.Rotation(pair, bit);
        if (std::find(own.begin(), own.end(), rotation) == own.end()) {
          own.push_back(rotation);
        }
        if (rotation % 16 != 0 &&
            std::find(rotations.begin(), rotations.end(), rotation) == rotations.end()) {
          rotations.push_back(rotation);
        }
      }
      operations += static_cast<int>(own.size());
    }
    EXPECT_EQ(seen, std::vector<int>(seen.size(), 1));
    operations += static_cast<int>(rotations.size());
    EXPECT_EQ(operations, code == FragmentCode::kInt6 ? 15 : code == FragmentCode::kE3M2 ? 19 : 22);
  }
}

TEST(Fragment, TokenPosition_IsAPermutationThatMatchesTheFragments) {
  std::vector<int> seen(64, 0);
  for (int k = 0; k < 64; ++k) {
    ++seen[static_cast<size_t>(TokenPosition(k))];
    // k-step j holds positions 16 j .. 16 j + 15; lane q's pairs stand at 2 q and 8 + 2 q.
    const int j = k % 16 / 4, q = k / 16;
    EXPECT_EQ(TokenPosition(k), 16 * j + (k % 4 < 2 ? 2 * q + k % 2 : 8 + 2 * q + k % 2)) << k;
  }
  for (const int count : seen) {
    EXPECT_EQ(count, 1);
  }
}

// Where the code of row `row`, column k of a row block of two slabs stands among its bytes, from what the
// 8-bit matrix instructions take, when rows of tokens stand in memory by TokenByte. Integers are A fragments
// of 16 rows x 32 k: byte i of register a0 + h of lane 4 r + q is row r + 8 (h % 2), column 4 q + i + 16 (h /
// 2). e4m3 are shared memory operands of 8 rows x 64 bytes, where the 64-byte swizzle puts chunk c of row r
// at c ^ (r / 2).
int64_t OperandByte(FragmentCode code, int row, int k) {
  const int at = TokenByte(code, k), r = row & 7;
  if (code == FragmentCode::kInt8) {
    const int column = at % 32;
    return at / 32 * 512 + (4 * r + column % 16 / 4) * 16 + ((row >> 3) + 2 * (column / 16)) * 4 + column % 4;
  }
  return at / 64 * 1024 + (row >> 3) * 512 + r * 64 + (at % 64 / 16 ^ r / 2) * 16 + at % 16;
}

TEST(Fragment, EightBitPieces_AreOperandsAsTheyStand) {
  for (const char* scheme : {"fp8_w8a8:channel", "int8_w8a8:channel"}) {
    const WeightFormat format = ParseScheme(scheme)->weight;
    const FragmentSpec spec = *ChooseFragmentSpec(format, false);
    const FragmentCode code = FragmentTraitsOf(spec.format).code;
    std::vector<int> seen(kFragmentByteSlab, 0);
    for (int k = 0; k < kFragmentByteSlab; ++k) {
      ++seen[static_cast<size_t>(TokenByte(code, k))];
    }
    EXPECT_EQ(seen, std::vector<int>(kFragmentByteSlab, 1)) << scheme;
    std::mt19937 generator(23);
    CanonicalExpert expert;
    expert.up = RandomMatrix(256, 64, format, generator);
    expert.down = RandomMatrix(64, 256, format, generator);
    Packed packed = Allocate(spec, 64, 256, false);
    ASSERT_TRUE(PackFragmentExpert(expert, spec, packed.view()).ok());
    const std::byte* const codes = expert.down.codes.view().data();
    for (int row = 0; row < 16; ++row) {
      for (int k = 0; k < 256; ++k) {
        const int64_t offset = k / kFragmentByteSlab * 2048 + OperandByte(code, row, k % kFragmentByteSlab);
        EXPECT_EQ(static_cast<int>(packed.down[static_cast<size_t>(offset)]),
                  static_cast<int>(codes[row * expert.down.codes.view().stride_bytes(0) + k]))
            << scheme << " " << row << " " << k;
      }
    }
  }
}

}  // namespace
}  // namespace fusedmoe::fragment_test
