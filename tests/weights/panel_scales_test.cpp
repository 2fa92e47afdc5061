// Scales and zero points in panels: their bits, those of two levels, those that stripes have in common.
#include "weights/panel.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "support/float_zeros.hpp"
#include "support/super_scales.hpp"
#include "weights/panels.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

TEST(Panel_ZeroPointsThatAreNumbers, AreKept) {
  std::mt19937 random(11);
  for (const char* scheme : {"int4_w4a16:g16", "int4_w4a16:g32", "int4_w4a16:g128", "int8_w8a16:g16"}) {
    CanonicalMatrix matrix = Quantized(scheme, 20, 256, /*symmetric=*/false);
    testing_support::MakeZerosFloats(matrix, random);
    const Panels panels = Pack(matrix);
    EXPECT_EQ(panels.format.zeros, PanelZero::kFloats);
    EXPECT_EQ(panels.format.scale, PanelScale::kF32) << "of BF16 in the checkpoint";
    ExpectSameValues(matrix, panels, scheme);
    ExpectSameCodes(matrix, panels, scheme);
    const Result<CanonicalMatrix> slice = SliceMatrix(matrix, 0, 20, 8, 200);  // begins inside a group
    ASSERT_TRUE(slice.ok()) << slice.status().ToString();
    ExpectSameValues(*slice, Pack(*slice), scheme);
  }
}

TEST(Panel_SuperBlocks, HoldIntegersAndUnits) {
  std::mt19937 random(5);
  for (const char* scheme : {"int4_w4a16:g16", "int4_w4a16:g32", "int8_w8a16:g16", "int8_w8a16:g32"}) {
    for (const bool minima : {false, true}) {
      CanonicalMatrix matrix = Quantized(scheme, 37, 768);
      testing_support::MakeSuper(matrix, minima, random);
      ASSERT_TRUE(ValidateCanonical(matrix).ok()) << ValidateCanonical(matrix).ToString();
      const auto expect_same = [&](const CanonicalMatrix& part) {
        const Panels panels = Pack(part);
        EXPECT_EQ(panels.format.zeros, minima ? PanelZero::kMinima : PanelZero::kNone);
        EXPECT_EQ(panels.format.scale, PanelScale::kI8);
        const int64_t codes = 128 * DTypeBits(panels.format.code) / 8;  // of a row of a block
        EXPECT_EQ(panels.format.block_bytes() / 16,
                  codes + (128 / panels.format.group + 2) * (minima ? 2 : 1));
        EXPECT_LE(static_cast<int64_t>(panels.columns.size()),
                  PanelColumnsBound(part.format, panels.format, part.cols, part.cols != 768));
        if (minima) {
          ExpectSameSums(part, panels, scheme);
        } else {
          ExpectSameValues(part, panels, scheme);
        }
      };
      expect_same(matrix);
      ExpectSameCodes(matrix, Pack(matrix), scheme);
      // On blocks of the panel, on groups, inside of a group; within a super-block and across some.
      for (const auto& [col, cols] : {std::pair<int64_t, int64_t>{128, 256},
                                      {192, 192},
                                      {96, 64},
                                      {32, 640},
                                      {40, 500},
                                      {250, 20},
                                      {256, 512},
                                      {0, 100}}) {
        const Result<CanonicalMatrix> slice = SliceMatrix(matrix, 3, 33, col, cols);
        ASSERT_TRUE(slice.ok()) << slice.status().ToString();
        ASSERT_TRUE(ValidateCanonical(*slice).ok());
        expect_same(*slice);
      }
    }
  }
}

TEST(Panel_SuperBlocks, AreRefusedWhereUnitsDoNotDivide) {
  std::mt19937 random(6);
  for (const bool minima : {false, true}) {
    CanonicalMatrix matrix = Quantized("int4_w4a16:g32", 16, 512);
    testing_support::MakeSuper(matrix, minima, random);
    const auto status_with = [&](auto change) {
      CanonicalMatrix changed = matrix;
      for (Tensor* tensor :
           {&changed.block_scale, &changed.zero_point, &changed.super_scale, &changed.super_minimum}) {
        if (!tensor->empty()) {
          Tensor copy = *Tensor::Allocate(tensor->dtype(), tensor->shape());
          std::memcpy(copy.mutable_view().data(), tensor->view().data(),
                      static_cast<size_t>(tensor->view().total_bytes()));
          *tensor = std::move(copy);
        }
      }
      change(changed);
      return ValidateCanonical(changed).ToString();
    };
    EXPECT_NE(status_with([](CanonicalMatrix& m) {
                m.block_scale.mutable_view().as<float>()[17] += 0x1p-17F;
              }).find("row 1 does not divide"),
              std::string::npos);
    EXPECT_NE(status_with([](CanonicalMatrix& m) {
                m.block_scale.mutable_view().as<float>()[0] *= 256.0F;
              }).find("row 0 does not divide"),
              std::string::npos);
    EXPECT_NE(status_with([](CanonicalMatrix& m) { m.super_scale = {}; }).find("super_scale is missing"),
              std::string::npos);
    EXPECT_NE(status_with([](CanonicalMatrix& m) { m.format.super_cols = 48; }).find("super_cols is 48"),
              std::string::npos);
    if (minima) {
      EXPECT_NE(
          status_with([](CanonicalMatrix& m) { m.super_minimum = {}; }).find("super_minimum is missing"),
          std::string::npos);
      EXPECT_NE(status_with([](CanonicalMatrix& m) {
                  const uint16_t infinite = 0x7c00;
                  std::memcpy(m.super_minimum.mutable_view().data(), &infinite, sizeof(infinite));
                }).find("row 0 does not divide"),
                std::string::npos);
      EXPECT_NE(status_with([](CanonicalMatrix& m) {
                  m.zero_point.mutable_view().as<float>()[16] *= 1.01F;
                }).find("row 1 does not divide"),
                std::string::npos);
    }
  }
}

// Fractions, negative numbers, ones far outside the codes, subnormal ones.
TEST(Panel_ZeroPointsThatAreNumbers, KeepEveryBit) {
  constexpr int64_t kGroups = 4096;
  for (const char* scheme : {"int4_w4a16:g16", "int8_w8a16:g32", "int4_w4a16:g128"}) {
    CanonicalMatrix matrix;
    matrix.format = ParseScheme(scheme)->weight;
    matrix.format.block_scale_dtype = matrix.format.zero_point_dtype = DType::kF32;
    matrix.rows = kPanelRows;
    matrix.cols = kGroups * matrix.format.block.col;
    matrix.block_scale = *Tensor::Allocate(DType::kF32, Shape{kPanelRows, kGroups});
    matrix.zero_point = *Tensor::Allocate(DType::kF32, Shape{kPanelRows, kGroups});
    auto* zeros = matrix.zero_point.mutable_view().as<uint32_t>();
    for (uint32_t i = 0; i < kPanelRows * kGroups; ++i) {
      zeros[i] = i * 65521U;
    }
    const PanelFormat format = *ChoosePanelFormat(matrix.format, true);
    const std::vector<int32_t> columns = PanelColumns(matrix, format);
    std::vector<std::byte> stripe(columns.size() / static_cast<size_t>(format.block) *
                                  static_cast<size_t>(format.block_bytes()));
    PackPanelScales(matrix, format, PanelScaleColumns(matrix, format, columns), 0, stripe.data());
    for (int64_t i = 0; i < kPanelRows * kGroups; ++i) {
      const int64_t row = i / kGroups, k = i % kGroups * format.group;
      const std::byte* group = stripe.data() + k / format.block * format.block_bytes() + format.code_bytes() +
                               k % format.block / format.group * format.group_bytes();
      ASSERT_EQ(0, std::memcmp(group + 64 + 4 * row, zeros + i, 4)) << scheme << " row " << row;
    }
  }
}

// Whatever bits a scale of a checkpoint has stand in the panel, zeros, subnormals, negative numbers and NaN
// too.
TEST(Panel_GroupScales, KeepEveryBit) {
  constexpr int64_t kGroups = 4096;  // of each of 16 rows: 65536 codes of a 16-bit type
  for (const char* scheme : {"int4_w4a16:g32", "int8_w8a16:g64", "int4_w4a16:g128"}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      const int64_t bytes = DTypeBits(dtype) / 8;
      CanonicalMatrix matrix;
      matrix.format = ParseScheme(scheme)->weight;
      matrix.format.block_scale_dtype = dtype;
      matrix.rows = kPanelRows;
      matrix.cols = kGroups * matrix.format.block.col;
      matrix.block_scale = *Tensor::Allocate(dtype, Shape{kPanelRows, kGroups});
      std::byte* scales = matrix.block_scale.mutable_view().data();
      for (uint32_t i = 0; i < kPanelRows * kGroups; ++i) {
        const uint32_t code = dtype == DType::kF32 ? i * 65521U : i;
        std::memcpy(scales + i * bytes, &code, static_cast<size_t>(bytes));
      }
      for (const bool zero_points : {false, true}) {
        const PanelFormat format = *ChoosePanelFormat(matrix.format, zero_points);
        const std::vector<int32_t> columns = PanelColumns(matrix, format);
        const int64_t blocks = static_cast<int64_t>(columns.size()) / format.block;
        std::vector<std::byte> stripe(static_cast<size_t>(blocks * format.block_bytes()));
        PackPanelScales(matrix, format, PanelScaleColumns(matrix, format, columns), 0, stripe.data());
        for (int64_t row = 0; row < kPanelRows; ++row) {
          for (int64_t g = 0; g < kGroups; ++g) {
            const int64_t k = g * format.group;
            const std::byte* group = stripe.data() + k / format.block * format.block_bytes() +
                                     format.code_bytes() +
                                     k % format.block / format.group * format.group_bytes();
            ASSERT_EQ(0, std::memcmp(group + row * bytes, scales + (row * kGroups + g) * bytes,
                                     static_cast<size_t>(bytes)))
                << scheme << " " << DTypeName(dtype) << " row " << row << " group " << g;
          }
        }
      }
    }
  }
}

TEST(Panel_OfF32Scales, HoldsNarrowOnesToo) {
  const WeightFormat bf16 = ParseScheme("int4_w4a16:g64")->weight;
  WeightFormat f32 = bf16, f16 = bf16;
  f32.block_scale_dtype = DType::kF32;
  f16.block_scale_dtype = DType::kF16;
  const auto panel = [](const WeightFormat& format, bool zeros) { return *ChoosePanelFormat(format, zeros); };
  EXPECT_TRUE(panel(f32, false).Holds(panel(bf16, false)));
  EXPECT_TRUE(panel(f32, true).Holds(panel(f16, false)));
  EXPECT_FALSE(panel(f32, false).Holds(panel(bf16, true)));
  EXPECT_FALSE(panel(bf16, false).Holds(panel(f16, false)));
  EXPECT_FALSE(panel(f16, false).Holds(panel(f32, false)));
  EXPECT_EQ(panel(bf16, false).block_bytes(), 512 + 32);
  EXPECT_EQ(panel(f32, true).block_bytes(), 512 + 64 + 16);
  WeightFormat numbers = bf16;
  numbers.zero_point_dtype = DType::kF32;
  EXPECT_TRUE(panel(numbers, true).Holds(panel(bf16, true)));
  EXPECT_TRUE(panel(numbers, true).Holds(panel(f16, false)));
  EXPECT_FALSE(panel(f32, true).Holds(panel(numbers, true)));
  EXPECT_EQ(panel(numbers, false), panel(bf16, false)) << "none stored: what they would be does not matter";
  EXPECT_EQ(panel(numbers, true).block_bytes(), 512 + 64 + 64);
  EXPECT_EQ(panel(numbers, true).ToString(), "n16k64(U4, F32 and F32 zero per 64)");
}

/// Scales of 128 x 128 blocks stand in front of a stripe where all stripes lie within one row of blocks.
TEST(Panel_ScalesOfStripes, StandInFront) {
  const CanonicalMatrix matrix = Quantized("fp8_w8a16:block128", 200, 1100);
  const Panels panels = Pack(matrix);
  EXPECT_EQ(panels.format.ToString(), "n16k64(F8_E4M3, F32 per 16x64)");
  EXPECT_EQ(panels.stripe_bytes, 128 + 18 * 1024) << "18 scales, in two lines";
  ExpectSameValues(matrix, panels, "whole");
  ExpectSameCodes(matrix, panels, "whole");
  const float* scales = matrix.block_scale.view().as<float>();
  for (int64_t stripe = 0; stripe < 13; ++stripe) {
    float header[32];
    std::memcpy(header, panels.bytes.data() + stripe * panels.stripe_bytes, sizeof(header));
    for (int64_t group = 0; group < 32; ++group) {
      EXPECT_EQ(header[group], group < 18 ? scales[stripe / 8 * 9 + group / 2] : 0.0F)
          << stripe << " " << group;
    }
  }
  // Columns that begin inside a block, and end inside of one.
  for (const auto& [col, cols] : {std::pair<int64_t, int64_t>{64, 300}, {96, 204}, {128, 128}, {100, 20}}) {
    const CanonicalMatrix slice = *SliceMatrix(matrix, 16, 33, col, cols);
    const Panels cut = Pack(slice);
    EXPECT_EQ(cut.format.scale, PanelScale::kStripeF32);
    ExpectSameValues(slice, cut, "columns");
  }
}

TEST(Panel_ScalesOfStripes, OnlyWhereNoBlockEndsInAStripe) {
  const CanonicalMatrix matrix = Quantized("fp8_w8a16:block128", 300, 128);
  struct Case {
    int64_t first, rows;
    bool cut;
  };
  for (const Case& each :
       {Case{0, 300, false}, Case{48, 252, false}, Case{40, 260, true}, Case{8, 120, false},
        Case{8, 121, true}, Case{120, 8, false}, Case{124, 8, true}, Case{1, 15, false}}) {
    const CanonicalMatrix slice = *SliceMatrix(matrix, each.first, each.rows, 0, matrix.cols);
    EXPECT_EQ(CutsStripes(slice), each.cut) << each.first;
    const Panels panels = Pack(slice);
    EXPECT_EQ(panels.format.scale, each.cut ? PanelScale::kF32 : PanelScale::kStripeF32) << each.first;
    ExpectSameValues(slice, panels, "rows");
  }
  WeightFormat format = matrix.format;
  for (const auto& [rows, stripes] :
       {std::pair<int64_t, bool>{-1, true}, {16, true}, {48, true}, {8, false}, {1, false}, {24, false}}) {
    format.block.row = rows;
    EXPECT_EQ(ChoosePanelFormat(format, false)->scale == PanelScale::kStripeF32, stripes) << rows;
    EXPECT_EQ(ChoosePanelFormat(format, false, /*stripes_cut=*/true)->scale, PanelScale::kF32) << rows;
  }
}

TEST(Panel_ScalesOfStripes, FitWhereRowsHaveTheirOwn) {
  const CanonicalMatrix matrix = Quantized("fp8_w8a16:block128", 64, 256);
  const PanelFormat stripes = *ChoosePanelFormat(matrix);
  const PanelFormat rows = *ChoosePanelFormat(matrix.format, false, /*stripes_cut=*/true);
  EXPECT_TRUE(rows.Holds(stripes));
  EXPECT_FALSE(stripes.Holds(rows));
  EXPECT_EQ(rows.stripe_bytes(4), 4 * 1088);
  EXPECT_EQ(stripes.stripe_bytes(4), 64 + 4 * 1024);
}

}  // namespace
}  // namespace fusedmoe
