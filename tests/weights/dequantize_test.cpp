#include "weights/dequantize.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "weights/canonical.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

/// Every column range of a few rows, fp32 and fp64, against the definition. The tolerance is the rounding of
/// the fp64 products (a few 2^-53) and, for fp32, one rounding of it: the float nearest to the exact product,
/// or its neighbour where the fp64 product fell on the other side of a tie.
void ExpectByDefinition(const CanonicalMatrix& matrix, const std::string& label, std::mt19937& generator) {
  const Status valid = ValidateCanonical(matrix);
  ASSERT_TRUE(valid.ok()) << label << ": " << valid.ToString();
  const RowDecoder decoder(matrix);
  std::vector<float> out(static_cast<size_t>(matrix.cols));
  std::vector<double> wide(static_cast<size_t>(matrix.cols));
  for (int64_t row = 0; row < matrix.rows; ++row) {
    int64_t begin = static_cast<int64_t>(generator() % static_cast<uint32_t>(matrix.cols));
    int64_t end = begin + static_cast<int64_t>(generator() % static_cast<uint32_t>(matrix.cols - begin)) + 1;
    if (row % 2 == 0) {
      begin = 0;
      end = matrix.cols;
    }
    decoder.Decode(row, begin, end, out.data());
    decoder.Decode(row, begin, end, wide.data());
    for (int64_t col = begin; col < end; ++col) {
      const double exact = ElementByDefinition(matrix, row, col);
      const double produced = wide[static_cast<size_t>(col - begin)];
      ASSERT_LE(std::fabs(produced - exact), std::fabs(exact) * 0x1p-50)
          << label << " at " << row << ", " << col;
      const float single = out[static_cast<size_t>(col - begin)];
      ASSERT_LE(std::fabs(static_cast<double>(single) - exact), std::fabs(exact) * 0x1.000001p-24 + 0x1p-150)
          << label << " at " << row << ", " << col;
    }
  }
}

TEST(Dequantize_EverySchemesWeights, FollowTheDefinitionAtAnySize) {
  std::mt19937 generator(11);
  for (const SchemeInfo& info : SchemeTable()) {
    const auto scheme = ParseScheme(info.name);
    ASSERT_TRUE(scheme.ok());
    for (const int64_t cols : {1, 2, 31, 32, 33, 127, 130, 300, 1500}) {
      const int64_t rows = 1 + static_cast<int64_t>(generator() % 5);
      const bool six_bits = DTypeBits(scheme->weight.element) == 6;
      ExpectByDefinition(RandomMatrix(rows, six_bits ? (cols + 3) / 4 * 4 : cols, scheme->weight, generator),
                         std::string(info.name) + " of " + std::to_string(cols), generator);
    }
  }
}

TEST(Dequantize_GroupsZeroPointsOffsetsAndOrder, FollowTheDefinition) {
  std::mt19937 generator(12);
  const WeightFormat formats[] = {
      {.element = DType::kU4,
       .block = {1, 32},
       .block_scale_dtype = DType::kF16,
       .may_have_zero_point = true},
      {.element = DType::kU4,
       .block = {1, 64},
       .block_scale_dtype = DType::kF32,
       .may_have_zero_point = true},
      {.element = DType::kU8,
       .block = {1, 128},
       .block_scale_dtype = DType::kBF16,
       .may_have_zero_point = true},
      {.element = DType::kU8,
       .block = kPerRow,
       .block_scale_dtype = DType::kBF16,
       .may_have_zero_point = true},
      {.element = DType::kI8, .block = {128, 128}},
      {.element = DType::kF8E4M3, .block = {64, 32}, .block_scale_dtype = DType::kF8E8M0},
      {.element = DType::kF8E4M3, .block = {-1, 48}},
      {.element = DType::kF8E4M3, .block = {1, 16}, .has_channel_scale = true},  // two F32 factors
  };
  for (const WeightFormat& format : formats) {
    for (int repeat = 0; repeat < 6; ++repeat) {
      const bool unsigned_codes = format.element == DType::kU4 || format.element == DType::kU8;
      const MatrixOptions options{.zero_points = unsigned_codes && repeat % 2 == 0,
                                  .group_index = repeat >= 4 && format.block.col > 0,
                                  .row_offset = static_cast<int64_t>(generator() % 200),
                                  .col_offset = static_cast<int64_t>(generator() % 200)};
      const int64_t rows = 1 + static_cast<int64_t>(generator() % 6);
      const int64_t cols = 1 + static_cast<int64_t>(generator() % 400);
      ExpectByDefinition(RandomMatrix(rows, cols, format, generator, options), Describe(format), generator);
    }
  }
}

TEST(Dequantize_Slices, EqualTheSameElementsOfTheWhole) {
  std::mt19937 generator(13);
  for (const char* name :
       {"fp8_w8a8:block128", "nvfp4_w4a16", "int4_w4a16:g32", "int4_w4afp8", "w_mxfp6_e3m2"}) {
    const auto scheme = ParseScheme(name);
    ASSERT_TRUE(scheme.ok());
    const CanonicalMatrix whole = RandomMatrix(150, 384, scheme->weight, generator);
    std::vector<float> all(384);
    std::vector<float> part(384);
    for (const auto& [row0, rows, col0, cols] :
         {std::array<int64_t, 4>{0, 150, 0, 192}, {0, 150, 192, 192}, {75, 75, 0, 384}, {37, 50, 40, 200}}) {
      const auto slice = SliceMatrix(whole, row0, rows, col0, cols);
      ASSERT_TRUE(slice.ok()) << slice.status().ToString();
      ASSERT_TRUE(ValidateCanonical(*slice).ok()) << ValidateCanonical(*slice).ToString();
      for (int64_t row = 0; row < rows; ++row) {
        DequantizeRow(whole, row0 + row, all.data());
        DequantizeRow(*slice, row, part.data());
        ASSERT_TRUE(std::equal(part.begin(), part.begin() + cols, all.begin() + col0))
            << name << " row " << row;
      }
    }
  }
  const auto int4 = ParseScheme("int4_w4a16:g32");
  const CanonicalMatrix whole = RandomMatrix(4, 64, int4->weight, generator);
  EXPECT_EQ(SliceMatrix(whole, 0, 4, 1, 32).status().code(), StatusCode::kUnsupported);
  EXPECT_EQ(SliceMatrix(whole, 0, 5, 0, 64).status().code(), StatusCode::kUsage);
  EXPECT_EQ(SliceMatrix(whole, 0, 4, INT64_MAX, 2).status().code(), StatusCode::kUsage);
}

void ExpectInvalid(const CanonicalMatrix& matrix, const char* word) {
  const Status status = ValidateCanonical(matrix);
  ASSERT_FALSE(status.ok()) << word;
  EXPECT_EQ(status.code(), StatusCode::kBadInput);
  EXPECT_NE(status.message().find(word), std::string::npos) << "'" << status.message() << "' lacks " << word;
}

CanonicalMatrix Valid(const char* name, const MatrixOptions& options = {}) {
  std::mt19937 generator(14);
  return RandomMatrix(4, 64, ParseScheme(name)->weight, generator, options);
}

Tensor WithByte(const Tensor& tensor, int64_t index, uint8_t value) {
  auto copy = Tensor::Allocate(tensor.dtype(), tensor.shape());
  std::copy_n(tensor.view().data(), tensor.view().total_bytes(), copy->mutable_view().data());
  copy->mutable_view().data()[index] = static_cast<std::byte>(value);
  return *std::move(copy);
}

TEST(ValidateCanonical_BlockScales, RefusesSignsAndNotNumbers) {
  CanonicalMatrix nvfp4 = Valid("nvfp4_w4a16");
  for (int code = 0; code < 256; ++code) {
    CanonicalMatrix changed = nvfp4;
    changed.block_scale = WithByte(nvfp4.block_scale, 6, static_cast<uint8_t>(code));
    EXPECT_EQ(ValidateCanonical(changed).ok(), code < 0x7f) << code;
  }
  CanonicalMatrix mx = Valid("mxfp4_w4a16");
  for (int code = 0; code < 256; ++code) {
    CanonicalMatrix changed = mx;
    changed.block_scale = WithByte(mx.block_scale, 3, static_cast<uint8_t>(code));
    EXPECT_EQ(ValidateCanonical(changed).ok(), code != 0xff) << code;
  }
  nvfp4.block_scale = WithByte(nvfp4.block_scale, 6, 0x7f);
  ExpectInvalid(nvfp4, "block_scale[1, 2]");
}

TEST(ValidateCanonical_OtherScales, MustBeFiniteAndPositive) {
  for (const float bad : {0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    CanonicalMatrix matrix = Valid("nvfp4_w4a16");
    matrix.tensor_scale = bad;
    ExpectInvalid(matrix, "tensor_scale");
    matrix = Valid("nvfp4_w4a16");
    matrix.input_tensor_scale = bad;
    ExpectInvalid(matrix, "input_tensor_scale");
    matrix = Valid("fp8_w8a8");
    matrix.channel_scale.mutable_view().as<float>()[2] = bad;
    if (bad != 0.0F) {
      ExpectInvalid(matrix, "channel_scale[2]");
    }
    matrix = Valid("int8_w8a8");  // auto-round's rows have signs
    matrix.channel_scale.mutable_view().as<float>()[2] = bad;
    EXPECT_EQ(ValidateCanonical(matrix).ok(), std::isfinite(bad)) << bad;
  }
}

TEST(ValidateCanonical_WrongParts, AreNamed) {
  ExpectInvalid(CanonicalMatrix{}, "0 rows");
  CanonicalMatrix matrix = Valid("fp8_w8a8");
  matrix.codes = Tensor();
  ExpectInvalid(matrix, "codes is missing");
  matrix = Valid("fp8_w8a8");
  matrix.cols = 65;
  ExpectInvalid(matrix, "codes is F8_E4M3 [4, 64]");
  matrix = Valid("fp8_w8a8");
  matrix.channel_scale = Tensor();
  ExpectInvalid(matrix, "channel_scale is missing");
  matrix = Valid("fp8_w8a8:tensor");
  matrix.tensor_scale = std::nullopt;
  ExpectInvalid(matrix, "tensor_scale is missing");
  matrix = Valid("nvfp4_w4a16");
  matrix.block_scale = Tensor();
  ExpectInvalid(matrix, "block_scale is missing");
  matrix = Valid("nvfp4_w4a16");
  matrix.scale_col_offset = 16;
  ExpectInvalid(matrix, "block_scale is F8_E4M3 [4, 4]; F8_E4M3 [>= 4, >= 5]");
  matrix.scale_col_offset = INT64_MAX;
  ExpectInvalid(matrix, "block_scale");
  matrix = Valid("int4_w4a16:g32", {.zero_points = true});
  matrix.zero_point = WithByte(matrix.zero_point, 3, 16);
  ExpectInvalid(matrix, "zero_point[1, 1] is 16");
  matrix = Valid("int4_w4a16:g32", {.group_index = true});
  matrix.group_index.mutable_view().as<int32_t>()[5] = 2;
  ExpectInvalid(matrix, "group_index[5] is 2; 0 to 1");
  matrix.group_index.mutable_view().as<int32_t>()[5] = -1;
  ExpectInvalid(matrix, "group_index[5] is -1");
  ExpectInvalid(Valid("mxfp8_w8a8_out", {.group_index = true}), "no groups of columns");
}

}  // namespace
}  // namespace fusedmoe
