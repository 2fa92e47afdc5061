#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "numerics/rows.hpp"
#include "quant/activation_formats.hpp"
#include "quant/activation_quantizer.hpp"
#include "support/tensors.hpp"

namespace fusedmoe {
namespace {

using quant_testing::AllFormats;
using quant_testing::GaussianRow;
using quant_testing::NamedFormat;

/// Codes and scales of a batch, filled with a pattern that shows what was not written.
struct Output {
  std::vector<std::byte> codes, scales;
  MutableTensorView code_view, scale_view;
  Result<float> tensor_scale = 0.0F;

  Output(const ActivationFormat& format, const Shape& shape,
         BlockScaleLayout layout = BlockScaleLayout::kLinear) {
    const int64_t columns = shape[shape.rank() - 1];
    const int64_t scale_columns = ScalesPerRow(format, columns);
    Shape scale_shape = shape;
    scale_shape[shape.rank() - 1] = scale_columns;
    if (layout != BlockScaleLayout::kLinear) {
      const int64_t experts = shape.rank() == 3 ? shape[0] : 1;
      scale_shape = Shape{experts * BlockScaleBytes(layout, shape[shape.rank() - 2], scale_columns)};
    }
    codes.assign(static_cast<size_t>(TensorView(nullptr, *format.element, shape).total_bytes()),
                 std::byte{0xa5});
    scales.assign(static_cast<size_t>(TensorView(nullptr, format.scale_dtype, scale_shape).total_bytes()),
                  std::byte{0xa5});
    code_view = MutableTensorView(codes.data(), *format.element, shape);
    scale_view = MutableTensorView(scales.data(), format.scale_dtype, scale_shape);
  }
};

Output Quantize(const NamedFormat& named, const TensorView& values, std::span<const int32_t> valid = {},
                const Executor& executor = {}, BlockScaleLayout layout = BlockScaleLayout::kLinear) {
  Output out(named.format, values.shape(), layout);
  const std::optional<float> scale =
      named.format.static_tensor_scale ? std::optional<float>(named.tensor_scale) : std::nullopt;
  out.tensor_scale =
      QuantizeInput(executor, named.format, scale, {values, valid}, {out.code_view, out.scale_view, layout});
  EXPECT_TRUE(out.tensor_scale.ok()) << out.tensor_scale.status().ToString();
  return out;
}

/// Like memcmp, but ranges of no bytes may have no address.
bool SameBytes(const void* a, const void* b, size_t bytes) {
  return bytes == 0 || std::memcmp(a, b, bytes) == 0;
}

class QuantizeInputTest : public testing::TestWithParam<NamedFormat> {};

INSTANTIATE_TEST_SUITE_P(EveryFormat, QuantizeInputTest, testing::ValuesIn(AllFormats()),
                         [](const auto& test) { return test.param.name; });

TEST_P(QuantizeInputTest, Matrix_EqualsItsRows_OnAnyExecutor) {
  const NamedFormat& named = GetParam();
  auto pool = ThreadPool::Create(2);
  ASSERT_TRUE(pool.ok());
  for (const auto& [rows, columns] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {3, 50}, {37, 131}, {5, 300}}) {
    const auto x = GaussianRow(rows * columns, static_cast<uint32_t>(rows + columns));
    const Output serial = Quantize(named, test::ViewOf(x, {rows, columns}));
    const Output threaded = Quantize(named, test::ViewOf(x, {rows, columns}), {}, (*pool)->executor());
    EXPECT_EQ(serial.codes, threaded.codes);
    EXPECT_EQ(serial.scales, threaded.scales);
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<std::byte> codes(static_cast<size_t>(CodeRowBytes(named.format, columns)));
      std::vector<std::byte> scales(static_cast<size_t>(ScaleRowBytes(named.format, columns)));
      QuantizeRow(named.format, *serial.tensor_scale, x.data() + row * columns, columns, codes.data(),
                  scales.data());
      EXPECT_TRUE(SameBytes(codes.data(), serial.codes.data() + row * static_cast<int64_t>(codes.size()),
                            codes.size()));
      EXPECT_TRUE(SameBytes(scales.data(), serial.scales.data() + row * static_cast<int64_t>(scales.size()),
                            scales.size()));
    }
  }
}

TEST_P(QuantizeInputTest, RowsBeyondTheCount_AreNeitherReadNorWritten) {
  const NamedFormat& named = GetParam();
  const int64_t experts = 3, rows = 4, columns = 50;
  const std::vector<int32_t> valid = {2, 0, 4};
  auto x = GaussianRow(experts * rows * columns, 11);
  const auto value = [&](int64_t expert, int64_t row) { return x.data() + (expert * rows + row) * columns; };
  const Output clean = Quantize(named, test::ViewOf(x, {experts, rows, columns}), valid);
  for (int64_t expert = 0; expert < experts; ++expert) {
    for (int64_t row = valid[static_cast<size_t>(expert)]; row < rows; ++row) {
      std::fill_n(value(expert, row), columns, 1e30F);
    }
  }
  const Output out = Quantize(named, test::ViewOf(x, {experts, rows, columns}), valid);
  EXPECT_EQ(*out.tensor_scale, *clean.tensor_scale) << "the scale looked at rows that are not valid";
  EXPECT_EQ(out.codes, clean.codes);
  EXPECT_EQ(out.scales, clean.scales);
  const auto row_bytes = static_cast<size_t>(CodeRowBytes(named.format, columns));
  for (size_t i = 0; i < row_bytes; ++i) {
    EXPECT_EQ(out.codes[static_cast<size_t>(rows) * row_bytes + i], std::byte{0xa5})
        << "expert 1 has no rows";
  }
}

TEST_P(QuantizeInputTest, BadRows_DoNotChangeTheOthers) {
  NamedFormat named = GetParam();
  if (IsPerTensor(named.format)) {
    named.format.static_tensor_scale = false;  // the dynamic scale must not see them either
  }
  const int64_t rows = 5, columns = 70;
  auto x = GaussianRow(rows * columns, 21);
  x[4] = 9.0F;  // the largest of all, in row 0
  const Output clean = Quantize(named, test::ViewOf(x, {rows, columns}));
  x[2 * columns + 3] = std::nanf("");
  x[3 * columns + 3] = -INFINITY;
  const Output out = Quantize(named, test::ViewOf(x, {rows, columns}));
  EXPECT_EQ(*out.tensor_scale, *clean.tensor_scale);
  for (const int64_t row : {0, 1, 4}) {
    EXPECT_TRUE(SameBytes(out.codes.data() + row * CodeRowBytes(named.format, columns),
                          clean.codes.data() + row * CodeRowBytes(named.format, columns),
                          static_cast<size_t>(CodeRowBytes(named.format, columns))));
    EXPECT_TRUE(SameBytes(out.scales.data() + row * ScaleRowBytes(named.format, columns),
                          clean.scales.data() + row * ScaleRowBytes(named.format, columns),
                          static_cast<size_t>(ScaleRowBytes(named.format, columns))));
  }
}

TEST_P(QuantizeInputTest, SixteenBitValues_EqualTheSameValuesInFp32) {
  const NamedFormat& named = GetParam();
  const int64_t rows = 3, columns = 70;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    auto x = GaussianRow(rows * columns, 31);
    std::vector<std::byte> narrow(static_cast<size_t>(rows * columns * 2));
    EncodeRow(dtype, x.data(), rows * columns, narrow.data());
    RoundRow(dtype, x.data(), rows * columns);
    const Output wide = Quantize(named, test::ViewOf(x, {rows, columns}));
    const Output out = Quantize(named, TensorView(narrow.data(), dtype, {rows, columns}));
    EXPECT_EQ(out.codes, wide.codes);
    EXPECT_EQ(out.scales, wide.scales);
  }
}

TEST_P(QuantizeInputTest, FakeForm_EqualsRealForm) {
  const NamedFormat& named = GetParam();
  const int64_t rows = 4, columns = 90;
  auto x = GaussianRow(rows * columns, 41);
  const Output real = Quantize(named, test::ViewOf(x, {rows, columns}));
  std::vector<float> decoded(x.size());
  for (int64_t row = 0; row < rows; ++row) {
    DequantizeRow(named.format, *real.tensor_scale,
                  real.codes.data() + row * CodeRowBytes(named.format, columns),
                  real.scales.data() + row * ScaleRowBytes(named.format, columns), columns,
                  decoded.data() + row * columns);
  }
  for (int64_t row = 0; row < rows; ++row) {
    FakeQuantizeRow(named.format, *real.tensor_scale, x.data() + row * columns, columns);
  }
  EXPECT_TRUE(SameBytes(x.data(), decoded.data(), x.size() * sizeof(float)));
}

TEST_P(QuantizeInputTest, SwizzledScales_AreTheLinearOnesMovedAndPadded) {
  const NamedFormat& named = GetParam();
  if (IsPerTensor(named.format) || DTypeBits(named.format.scale_dtype) != 8) {
    Output out(named.format, {2, 64});
    const std::vector<float> x(128);
    const auto refused =
        QuantizeInput(Executor{}, named.format, named.tensor_scale, {test::ViewOf(x, {2, 64})},
                      {out.code_view, out.scale_view, BlockScaleLayout::k128x4});
    EXPECT_EQ(refused.ok(), IsPerTensor(named.format)) << "F32 scales have no swizzled form";
    return;
  }
  for (const auto layout : {BlockScaleLayout::k128x4, BlockScaleLayout::k8x4}) {
    const int64_t experts = 2, rows = 9, columns = 170;
    const auto x = GaussianRow(experts * rows * columns, 51);
    const std::vector<int32_t> valid = {9, 5};
    const Output linear = Quantize(named, test::ViewOf(x, {experts, rows, columns}), valid);
    const Output moved = Quantize(named, test::ViewOf(x, {experts, rows, columns}), valid, {}, layout);
    EXPECT_EQ(moved.codes, linear.codes);
    std::vector<std::byte> zeroed = linear.scales;
    const int64_t scale_columns = ScalesPerRow(named.format, columns);
    std::fill(zeroed.begin() + (rows + 5) * scale_columns, zeroed.end(), std::byte{0});
    std::vector<std::byte> expected(moved.scales.size());
    SwizzleBlockScales(layout, zeroed.data(), experts, rows, scale_columns, expected.data());
    EXPECT_EQ(moved.scales, expected);
  }
}

TEST(QuantizeInput, DynamicTensorScale_CoversAllValidRows) {
  const ActivationFormat format{.element = DType::kF8E4M3, .group = kPerTensor};
  const std::vector<float> x = {1.0F, -2.0F, 0.5F, 0.25F, 8.0F, 100.0F};
  const std::vector<int32_t> valid = {1, 1, 0};
  const NamedFormat named{"", format};
  EXPECT_EQ(*Quantize(named, test::ViewOf(x, {3, 1, 2}), valid).tensor_scale, 2.0F / 448.0F);
  EXPECT_EQ(*Quantize(named, test::ViewOf(x, {3, 2})).tensor_scale, 100.0F / 448.0F);
  const std::vector<float> zeros(6, 0.0F);
  const Output all_zero = Quantize(named, test::ViewOf(zeros, {3, 2}));
  EXPECT_EQ(*all_zero.tensor_scale, 0.0F);
  EXPECT_EQ(all_zero.codes, std::vector<std::byte>(6));
}

TEST(QuantizeInput, DynamicSecondLevel_UsesTheWholeRangeOfScales) {
  ActivationFormat format{.element = DType::kF4E2M1, .group = {1, 16}, .scale_dtype = DType::kF8E4M3};
  auto x = GaussianRow(64, 3);
  x[5] = 12.0F;
  const Output out = Quantize({"", format}, test::ViewOf(x, {2, 32}));
  EXPECT_EQ(*out.tensor_scale, 12.0F / 2688.0F);
  EXPECT_EQ(out.scales[0], std::byte{0x7e}) << "448 for the block of the largest value";
  const std::vector<float> zeros(32, 0.0F);
  EXPECT_EQ(*Quantize({"", format}, test::ViewOf(zeros, {1, 32})).tensor_scale, 1.0F);
}

TEST(QuantizeInput, EmptyBatches_AreFine) {
  for (const NamedFormat& named : AllFormats()) {
    const std::vector<float> nothing(1);
    EXPECT_TRUE(Quantize(named, test::ViewOf(nothing, {0, 64})).tensor_scale.ok());
    EXPECT_TRUE(Quantize(named, test::ViewOf(nothing, {5, 0})).tensor_scale.ok());
    EXPECT_TRUE(Quantize(named, test::ViewOf(nothing, {0, 4, 64})).tensor_scale.ok());
  }
}

TEST(QuantizeInput, OperandsThatDoNotFit_AreRefusedByName) {
  const ActivationFormat format{.element = DType::kF8E4M3, .group = {1, 32}};
  const std::vector<float> x(128);
  Output out(format, {2, 64});
  const auto refused = [&](const ActivationFormat& of, std::optional<float> scale, const ActivationRows& rows,
                           const QuantizedRows& target, const char* word) {
    const auto result = QuantizeInput(Executor{}, of, scale, rows, target);
    ASSERT_FALSE(result.ok()) << word;
    EXPECT_NE(result.status().message().find(word), std::string::npos) << result.status().message();
  };
  const QuantizedRows good{out.code_view, out.scale_view};
  const TensorView values = test::ViewOf(x, {2, 64});
  refused({}, {}, {values}, good, "does not quantize");
  refused(format, {}, {TensorView(values.data(), DType::kI32, {2, 64})}, good, "I32");
  refused(format, {}, {test::ViewOf(x, {128})}, good, "[128]");
  refused(format, {}, {test::ViewOf(x, {4, 32})}, good, "codes");
  const std::vector<int32_t> one = {2}, two = {1, 1}, many = {3}, negative = {-1};
  refused(format, {}, {values, two}, good, "2 row counts");
  refused(format, {}, {values, many}, good, "3");
  refused(format, {}, {values, negative}, good, "-1");
  refused(format, {}, {values, one}, {out.code_view, MutableTensorView(nullptr, DType::kF32, {2, 3})},
          "[2, 3]");
  refused(format, {}, {values}, {out.code_view, MutableTensorView(nullptr, DType::kF8E8M0, {2, 2})},
          "F8_E8M0");
  ActivationFormat per_tensor{.element = DType::kF8E4M3, .group = kPerTensor, .static_tensor_scale = true};
  refused(per_tensor, {}, {values}, good, "none was given");
  for (const float bad : {0.0F, -1.0F, INFINITY, std::nanf("")}) {
    refused(per_tensor, bad, {values}, good, "finite and above 0");
  }
}

}  // namespace
}  // namespace fusedmoe
