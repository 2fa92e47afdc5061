#include "quant/packing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "quant/reference_generators.hpp"

namespace fusedmoe {
namespace {

Tensor Codes(int64_t rows, int64_t cols, int bits, std::mt19937& generator) {
  auto codes = Tensor::Allocate(DType::kU8, Shape{rows, cols});
  for (int64_t i = 0; i < rows * cols; ++i) {
    codes->mutable_view().as<uint8_t>()[i] = static_cast<uint8_t>(generator() & ((1U << bits) - 1));
  }
  return *std::move(codes);
}

Tensor Words(std::initializer_list<uint32_t> words, const Shape& shape) {
  auto tensor = Tensor::Allocate(DType::kI32, shape);
  std::copy(words.begin(), words.end(), tensor->mutable_view().as<uint32_t>());
  return *std::move(tensor);
}

void ExpectSame(const Result<Tensor>& produced, const Tensor& expected, const std::string& label) {
  ASSERT_TRUE(produced.ok()) << label << ": " << produced.status().ToString();
  ASSERT_EQ(produced->shape(), expected.shape()) << label;
  ASSERT_EQ(produced->dtype(), expected.dtype()) << label;
  const auto* a = produced->view().data();
  EXPECT_TRUE(std::equal(a, a + expected.view().total_bytes(), expected.view().data())) << label;
}

TEST(Packing_RowsAndColumns, RoundTripAtAnySize) {
  std::mt19937 generator(21);
  for (const int bits : {2, 3, 4, 5, 6, 7, 8}) {
    for (const LaneOrder order : {LaneOrder::kSequential, LaneOrder::kAwq, LaneOrder::kPlanes}) {
      const WordLayout layout{bits, order};
      if (!CheckWordLayout(layout, "").ok()) {
        continue;
      }
      for (int64_t size = 1; size <= 40; size += 3) {
        const int64_t other = 1 + static_cast<int64_t>(generator() % 70);
        const int64_t packed = order == LaneOrder::kPlanes ? 32 * size : size;
        const std::string label =
            std::to_string(packed) + " codes of " + std::to_string(bits) + " bits, " + std::to_string(other);
        const Tensor rows = Codes(packed, other, bits, generator);
        ExpectSame(UnpackRows(PackRows(rows.view(), layout)->view(), layout, packed), rows, label + " rows");
        const Tensor columns = Codes(other, packed, bits, generator);
        ExpectSame(UnpackColumns(PackColumns(columns.view(), layout)->view(), layout, packed), columns,
                   label + " columns");
      }
    }
  }
}

TEST(Packing_PublishedWords, AreReproduced) {
  // compressed-tensors: -8, -1, 0, 1, 7, -4, 3, 2 with the offset 8.
  auto signed_codes = Tensor::Allocate(DType::kU8, Shape{1, 8});
  const int values[] = {-8, -1, 0, 1, 7, -4, 3, 2};
  for (int i = 0; i < 8; ++i) {
    signed_codes->mutable_view().as<uint8_t>()[i] = static_cast<uint8_t>(values[i] + 8);
  }
  ExpectSame(PackColumns(signed_codes->view(), {.bits = 4}), Words({0xAB4F9870U}, {1, 1}), "pack-quantized");
  // AWQ: columns 1..8.
  auto columns = Tensor::Allocate(DType::kU8, Shape{1, 8});
  for (int i = 0; i < 8; ++i) {
    columns->mutable_view().as<uint8_t>()[i] = static_cast<uint8_t>(i + 1);
  }
  ExpectSame(PackColumns(columns->view(), {4, LaneOrder::kAwq}), Words({0x86427531U}, {1, 1}), "AWQ");
  // Of a word that three columns leave partly unused, the others' lanes are zero.
  const TensorView three(columns->view().data(), DType::kU8, Shape{1, 3});
  ExpectSame(PackColumns(three, {4, LaneOrder::kAwq}), Words({0x00020031U}, {1, 1}), "three of AWQ");
}

TEST(Packing_FlippedSigns, AreMinusEight) {
  std::mt19937 generator(24);
  const Tensor codes = Codes(1, 16, 4, generator);
  const auto flipped = FlipSigns(NarrowCodes(codes.view(), DType::kU4)->view());
  const auto wide = WidenCodes(flipped->view());
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(wide->view().as<uint8_t>()[i], (codes.view().as<uint8_t>()[i] - 8) & 15);
  }
}

TEST(Packing_UnsupportedBits, AreRefusedByNumber) {
  const Tensor words = Words({0, 0, 0}, {3, 1});
  for (const int bits : {-1, 0, 1, 9, 16}) {
    for (const LaneOrder order : {LaneOrder::kSequential, LaneOrder::kAwq, LaneOrder::kPlanes}) {
      const WordLayout layout{bits, order};
      for (const Status& status :
           {UnpackRows(words.view(), layout, 32).status(), UnpackColumns(words.view(), layout, 32).status(),
            PackRows(words.view(), layout).status(), PackColumns(words.view(), layout).status()}) {
        EXPECT_EQ(status.code(), StatusCode::kUnsupported) << bits;
        EXPECT_NE(status.message().find(std::to_string(bits) + " bits"), std::string::npos)
            << status.message();
      }
    }
  }
  EXPECT_EQ(UnpackColumns(words.view(), {2, LaneOrder::kAwq}, 16).status().code(), StatusCode::kUnsupported);
}

TEST(Packing_WrongShapesAndTypes, AreBadInput) {
  std::mt19937 generator(25);
  const Tensor words = Words({0, 0, 0, 0}, {2, 2});
  const WordLayout four{.bits = 4};
  EXPECT_EQ(UnpackRows(words.view(), four, 17).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackRows(words.view(), four, 8).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackRows(words.view(), four, -1).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackColumns(words.view(), {2, LaneOrder::kPlanes}, 20).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackRows(TensorView(), four, 0).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackRows(Codes(4, 4, 8, generator).view(), four, 32).status().code(), StatusCode::kBadInput);
  const Tensor wide = Codes(1, 64, 8, generator);
  EXPECT_EQ(PackRows(wide.view(), four).status().code(), StatusCode::kBadInput)
      << "codes beyond 15 do not fit 4 bits";
}

// The bits of 2^61 codes of 8 bits and more are beyond 64 bits: they looked like those of fewer words.
TEST(Packing_CountsThatCannotBe, AreRefusedBeforeTheirBitsAreCounted) {
  const Tensor words = Words({0, 0}, {1, 2}), none = *Tensor::Allocate(DType::kI32, Shape{0, 0});
  for (const int64_t codes : {int64_t{-1}, INT64_MIN, (int64_t{1} << 56) + 1, int64_t{1} << 61, INT64_MAX}) {
    for (const LaneOrder order : {LaneOrder::kSequential, LaneOrder::kAwq, LaneOrder::kPlanes}) {
      for (const Tensor& stored : {words, none}) {
        for (const Status& status : {UnpackRows(stored.view(), {8, order}, codes).status(),
                                     UnpackColumns(stored.view(), {8, order}, codes).status()}) {
          ASSERT_EQ(status.code(), StatusCode::kBadInput) << codes;
          if (stored.shape().count() != 0) {
            EXPECT_EQ(status.message(),
                      std::to_string(codes) + " codes; 0 to 72057594037927936 are possible");
          }
        }
      }
    }
  }
}

TEST(ReferenceGenerator_BadGroups, AreRefused) {
  auto weights = Tensor::Allocate(DType::kF32, Shape{48, 2});
  EXPECT_FALSE(QuantizeIntegerReference(weights->view(), IntegerType::kUint4, 32, true).ok());
  EXPECT_FALSE(QuantizeIntegerReference(weights->view(), IntegerType::kUint4b8, 16, true).ok());
  EXPECT_FALSE(QuantizeIntegerReference(weights->view(), IntegerType::kUint4, 0, true).ok());
  EXPECT_TRUE(QuantizeIntegerReference(weights->view(), IntegerType::kUint4, -1, true).ok());
}

TEST(ReferenceGenerator_TwoLevelScales, HaveTheFloorOfTheFp8Quantizer) {
  // Rows with amax / 448 above, below and far below 1 / (448 * 512); what vLLM's convert_bf16_scales_to_fp8
  // gives.
  constexpr float kFloor = 1.0F / (448.0F * 512.0F);
  auto scales = Tensor::Allocate(DType::kF32, Shape{3, 2});
  const float values[] = {0.01F, 0.005F, 0.001F, 0.0005F, 0.0F, 0.0F};
  std::copy(std::begin(values), std::end(values), scales->mutable_view().as<float>());
  const auto derived = DeriveTwoLevelScales(scales->view());
  ASSERT_TRUE(derived.ok()) << derived.status().ToString();
  const auto* channel = derived->channel_scale.view().as<float>();
  EXPECT_EQ(channel[0], 0.01F / 448.0F * 8.0F);
  EXPECT_EQ(channel[1], kFloor * 8.0F);
  EXPECT_EQ(channel[2], kFloor * 8.0F);
  const auto* group = derived->group_scale.view().as<uint8_t>();
  EXPECT_EQ(std::vector<int>(group, group + 6), (std::vector<int>{0x66, 0x5e, 0x5e, 0x56, 0, 0}));
}

// Whole tiles and squares, and what they leave; a view of every second row.
TEST(Transpose_, PutsEveryElementWhereItBelongs) {
  std::mt19937 generator(9);
  for (const DType dtype : {DType::kU8, DType::kBF16, DType::kF32, DType::kI64}) {
    const int64_t width = DTypeBits(dtype) / 8;
    for (const int64_t rows : {1, 7, 16, 64, 83, 130}) {
      for (const int64_t cols : {1, 16, 35, 64, 144}) {
        const Tensor bytes = Codes(2 * rows, cols * width, 8, generator);
        const std::byte* data = bytes.view().data();
        TensorView every_second(data, dtype, Shape{rows, cols});
        every_second.set_stride_bytes(0, 2 * cols * width);
        const Result<Tensor> turned = Transpose(every_second);
        ASSERT_TRUE(turned.ok());
        ASSERT_EQ(turned->shape(), (Shape{cols, rows}));
        for (int64_t row = 0; row < rows; ++row) {
          for (int64_t col = 0; col < cols; ++col) {
            ASSERT_EQ(std::memcmp(turned->view().data() + (col * rows + row) * width,
                                  data + (2 * row * cols + col) * width, static_cast<size_t>(width)),
                      0)
                << DTypeName(dtype) << " of " << rows << " x " << cols << ": row " << row << ", column "
                << col;
          }
        }
      }
    }
  }
}

TEST(Transpose_, RefusesElementsThatAreNoWholeBytes) {
  const Tensor nibbles = *Tensor::Allocate(DType::kU4, Shape{16, 16});
  EXPECT_EQ(Transpose(nibbles.view()).status().code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace fusedmoe
