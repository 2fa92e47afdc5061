// Codes in panels, and back: every scheme, any size, any order.
#include "weights/panel.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "numerics/rows.hpp"
#include "weights/block_products.hpp"
#include "weights/panels.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

const char* const kSchemes[] = {
    "nvfp4_w4a16",        "nvfp4_w4a8:g32",     "mxfp4_w4a16",      "mxfp8_w8a16",        "w_mxfp6_e3m2",
    "w_mxfp6_e2m3",       "int4_w4a16:g16",     "int8_w8a16:g16",   "int4_w4a16:g32",     "int4_w4a16:g64",
    "int4_w4a16:g128",    "int4_w4a16:channel", "int4_w4a8:g128",   "int4_w4afp8:g64",    "int8_w8a16:g32",
    "int8_w8a16:channel", "int8_w8a8:channel",  "int8_w8a8:tensor", "int8_w8a8:block128", "fp8_w8a16:tensor",
    "fp8_w8a16:channel",  "fp8_w8a16:block128"};

TEST(Panel_EveryScheme, HoldsTheValuesAndGivesTheCodesBack) {
  for (const char* scheme : kSchemes) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 128}, {37, 256}, {130, 384}}) {
      const CanonicalMatrix matrix = Quantized(scheme, rows, cols);
      const Panels panels = Pack(matrix);
      ExpectSameValues(matrix, panels, scheme);
      ExpectSameCodes(matrix, panels, scheme);
    }
  }
}

// Their scales differ from column to column: panels hold codes times scales, all of whose bits BF16 has.
TEST(Panel_BlocksAlongTheOutputs, HoldTheValues) {
  for (const char* scheme :
       {"mxfp8_w8a8_out", "nvfp4_w4a8_out", "mxfp4_w4a8_out:out32_static", "mxfp4_w4a8_out:out16_static"}) {
    const CanonicalMatrix matrix = Quantized(scheme, 160, 100);
    const Panels panels = Pack(matrix);
    EXPECT_EQ(panels.format.code, DType::kBF16) << scheme;
    EXPECT_TRUE(BecomesProducts(matrix.format)) << scheme;
    ExpectSameValues(matrix, panels, scheme);
    const Result<CanonicalMatrix> slice = SliceMatrix(matrix, 24, 72, 10, 78);  // begins inside a block
    ASSERT_TRUE(slice.ok()) << slice.status().ToString();
    ExpectSameValues(*slice, Pack(*slice), scheme);
  }
}

TEST(Panel_ZeroPoints, AreKept) {
  for (const char* scheme : {"int4_w4a16:g32", "int4_w4a16:g128", "int4_w4a16:channel", "int8_w8a16:g64"}) {
    const CanonicalMatrix matrix = Quantized(scheme, 20, 256, /*symmetric=*/false);
    ASSERT_FALSE(matrix.zero_point.empty());
    ExpectSameValues(matrix, Pack(matrix), scheme);
  }
}

TEST(Panel_PlainWeightsOfAnySize, AreKept) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{1, 1}, {17, 63}, {16, 65}, {40, 130}}) {
      const Tensor values = Normal(rows, cols, 3);
      CanonicalMatrix matrix;
      matrix.rows = rows;
      matrix.cols = cols;
      matrix.format.element = dtype;
      matrix.codes = *Tensor::Allocate(dtype, Shape{rows, cols});
      auto codes = matrix.codes.mutable_view();
      EncodeRow(dtype, values.view().as<float>(), rows * cols, codes.data());
      const Panels panels = Pack(matrix);
      ExpectSameValues(matrix, panels, std::string(DTypeName(dtype)));
      ExpectSameCodes(matrix, panels, std::string(DTypeName(dtype)));
    }
  }
}

TEST(Panel_ActivationOrder, IsUndone) {
  for (const char* scheme : {"int4_w4a16:g32", "int4_w4a16:g128", "int8_w8a16:g64"}) {
    CanonicalMatrix matrix = Quantized(scheme, 20, 256, /*symmetric=*/false);
    const int64_t group = matrix.format.block.col;
    std::vector<int32_t> index(256);
    for (size_t k = 0; k < index.size(); ++k) {
      index[k] = static_cast<int32_t>(static_cast<int64_t>(k) / group);
    }
    std::shuffle(index.begin(), index.end(), std::mt19937(5));
    matrix.group_index = *Tensor::Allocate(DType::kI32, Shape{256});
    std::copy(index.begin(), index.end(), matrix.group_index.mutable_view().as<int32_t>());
    const Panels panels = Pack(matrix);
    EXPECT_FALSE(PanelColumnsAreIdentity(panels.columns));
    EXPECT_LE(static_cast<int64_t>(panels.columns.size()),
              PanelColumnsBound(matrix.format, panels.format, 256, /*reordered=*/true));
    ExpectSameValues(matrix, panels, scheme);
    ExpectSameCodes(matrix, panels, scheme);
  }
}

TEST(Panel_SlicesThatBeginInsideABlock, KeepTheirScales) {
  // Rows 40.. and columns 96.. of a matrix with blocks of 128 x 128.
  const CanonicalMatrix whole = Quantized("fp8_w8a16:block128", 200, 300);
  CanonicalMatrix slice = whole;
  slice.rows = 160;
  slice.cols = 204;
  slice.codes = *Tensor::Allocate(DType::kF8E4M3, Shape{160, 204});
  for (int64_t row = 0; row < 160; ++row) {
    std::memcpy(slice.codes.mutable_view().data() + row * 204,
                whole.codes.view().data() + (row + 40) * 300 + 96, 204);
  }
  slice.scale_row_offset = 40;
  slice.scale_col_offset = 96;
  const Panels panels = Pack(slice);
  EXPECT_FALSE(PanelColumnsAreIdentity(panels.columns));
  EXPECT_EQ(panels.format.scale, PanelScale::kF32) << "row 88 begins a block inside a stripe";
  ExpectSameValues(slice, panels, "slice");
  ExpectSameCodes(slice, panels, "slice");
}

TEST(Panel_FormatsWithoutPanels, AreRefusedByName) {
  WeightFormat format;
  format.element = DType::kF8E4M3Fnuz;
  const Result<PanelFormat> panel = ChoosePanelFormat(format, /*has_zero_points=*/false);
  ASSERT_FALSE(panel.ok());
  EXPECT_NE(panel.status().message().find("F8_E4M3FNUZ"), std::string::npos);
}

}  // namespace
}  // namespace fusedmoe
