#include "quant/packing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "quant/packing_formats.hpp"
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
  for (const int bits : {2, 4, 8}) {
    for (int64_t rows = 1; rows <= 40; rows += 3) {
      const int64_t cols = 1 + static_cast<int64_t>(generator() % 70);
      const Tensor codes = Codes(rows, cols, bits, generator);
      const std::string label =
          std::to_string(rows) + " x " + std::to_string(cols) + ", " + std::to_string(bits);
      ExpectSame(UnpackRows(PackRows(codes.view(), bits)->view(), bits, rows), codes, label + " rows");
      ExpectSame(UnpackColumns(PackColumns(codes.view(), bits, LaneOrder::kSequential)->view(), bits,
                               LaneOrder::kSequential, cols),
                 codes, label + " columns");
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
  const auto canonical = NarrowCodes(signed_codes->view(), DType::kU4);
  ExpectSame(PackCompressedTensorsWeights(canonical->view(), 4), Words({0xAB4F9870U}, {1, 1}),
             "pack-quantized");
  // AWQ: columns 1..8.
  auto columns = Tensor::Allocate(DType::kU8, Shape{1, 8});
  for (int i = 0; i < 8; ++i) {
    columns->mutable_view().as<uint8_t>()[i] = static_cast<uint8_t>(i + 1);
  }
  ExpectSame(PackColumns(columns->view(), 4, LaneOrder::kAwq), Words({0x86427531U}, {1, 1}), "AWQ");
}

TEST(Packing_GptqZeroPoints, AddOneWithoutCarryingIntoTheNeighbour) {
  // A stored 15 beside a stored 3: adding 0x11111111 to the word would give 0 and 5.
  const Tensor words = Words({0x0000003FU}, {1, 1});
  const auto zeros = UnpackGptqZeroPoints(words.view(), 4, GptqVersion::kV1);
  ASSERT_TRUE(zeros.ok());
  EXPECT_EQ(zeros->shape(), (Shape{8, 1}));
  EXPECT_EQ(zeros->view().as<uint8_t>()[0], 0);
  EXPECT_EQ(zeros->view().as<uint8_t>()[1], 4);
  const auto v2 = UnpackGptqZeroPoints(words.view(), 4, GptqVersion::kV2);
  EXPECT_EQ(v2->view().as<uint8_t>()[0], 15);
  // Symmetric files: 0x77777777 in version 1 and 0x88888888 in version 2 both mean 8.
  for (const auto& [word, version] :
       {std::pair<uint32_t, GptqVersion>{0x77777777U, GptqVersion::kV1}, {0x88888888U, GptqVersion::kV2}}) {
    const Tensor symmetric = Words({word}, {1, 1});
    const auto eight = UnpackGptqZeroPoints(symmetric.view(), 4, version);
    EXPECT_TRUE(std::all_of(eight->view().as<uint8_t>(), eight->view().as<uint8_t>() + 8,
                            [](uint8_t code) { return code == 8; }));
  }
}

TEST(Packing_CheckpointKinds, RoundTripThroughCanonicalOrder) {
  std::mt19937 generator(22);
  for (int repeat = 0; repeat < 20; ++repeat) {
    const int64_t outputs = 8 * (1 + static_cast<int64_t>(generator() % 6));
    const int64_t inputs = 16 * (1 + static_cast<int64_t>(generator() % 6));
    for (const int bits : {4, 8}) {
      const DType element = bits == 4 ? DType::kU4 : DType::kU8;
      const Tensor codes = *NarrowCodes(Codes(outputs, inputs, bits, generator).view(), element);
      const Tensor zeros = Codes(outputs, 3, bits, generator);
      ExpectSame(UnpackGptqWeights(PackGptqWeights(codes.view(), bits)->view(), bits), codes, "GPTQ");
      ExpectSame(UnpackAwqWeights(PackAwqWeights(codes.view(), bits)->view(), bits), codes, "AWQ");
      ExpectSame(UnpackCompressedTensorsWeights(PackCompressedTensorsWeights(codes.view(), bits)->view(),
                                                bits, inputs),
                 codes, "compressed-tensors");
      for (const GptqVersion version : {GptqVersion::kV1, GptqVersion::kV2}) {
        ExpectSame(
            UnpackGptqZeroPoints(PackGptqZeroPoints(zeros.view(), bits, version)->view(), bits, version),
            zeros, "GPTQ zero points");
      }
      ExpectSame(UnpackAwqZeroPoints(PackAwqZeroPoints(zeros.view(), bits)->view(), bits), zeros,
                 "AWQ zero points");
      ExpectSame(UnpackCompressedTensorsZeroPoints(
                     PackCompressedTensorsZeroPoints(zeros.view(), bits)->view(), bits, outputs),
                 zeros, "compressed-tensors zero points");
      ExpectSame(UnpackWna16ZeroPoints(PackWna16ZeroPoints(zeros.view(), bits)->view(), bits), zeros,
                 "wna16");
    }
    const Tensor int4 = *NarrowCodes(Codes(outputs, inputs, 4, generator).view(), DType::kI4);
    ExpectSame(UnpackModelOptAwqWeights(PackModelOptAwqWeights(int4.view())->view()), int4, "W4A16_AWQ");
    const Tensor turned = *Transpose(WidenCodes(int4.view())->view());
    ExpectSame(UnpackQuarkWeights(PackColumns(turned.view(), 4, LaneOrder::kAwq)->view(), DType::kI4,
                                  QuarkPacking::kReorder),
               int4, "Quark reorder");
    ExpectSame(UnpackQuarkWeights(PackColumns(turned.view(), 4, LaneOrder::kSequential)->view(), DType::kI4,
                                  QuarkPacking::kOrder),
               int4, "Quark order");
  }
}

TEST(Packing_TwoBits, AreWidenedToNibbles) {
  std::mt19937 generator(23);
  const Tensor codes = Codes(32, 24, 2, generator);
  const auto canonical = UnpackGptqWeights(PackRows(codes.view(), 2)->view(), 2);
  ASSERT_TRUE(canonical.ok()) << canonical.status().ToString();
  EXPECT_EQ(canonical->dtype(), DType::kU4);
  ExpectSame(WidenCodes(canonical->view()), *Transpose(codes.view()), "2 bits");
}

TEST(Packing_FlippedSigns, AreMinusEight) {
  std::mt19937 generator(24);
  const Tensor codes = Codes(1, 16, 4, generator);
  const auto flipped = FlipNibbleSigns(NarrowCodes(codes.view(), DType::kU4)->view());
  const auto wide = WidenCodes(flipped->view());
  for (int i = 0; i < 16; ++i) {
    EXPECT_EQ(wide->view().as<uint8_t>()[i], (codes.view().as<uint8_t>()[i] - 8) & 15);
  }
}

TEST(Packing_UnsupportedBits, AreRefusedByNumber) {
  const Tensor words = Words({0, 0, 0}, {3, 1});
  for (const int bits : {-1, 0, 1, 3, 5, 6, 7, 16}) {
    for (const Status& status :
         {UnpackGptqWeights(words.view(), bits).status(), UnpackAwqWeights(words.view(), bits).status(),
          UnpackGptqZeroPoints(words.view(), bits, GptqVersion::kV1).status(),
          UnpackCompressedTensorsWeights(words.view(), bits, 10).status(),
          UnpackWna16ZeroPoints(words.view(), bits).status(), UnpackRows(words.view(), bits, 32).status()}) {
      EXPECT_EQ(status.code(), StatusCode::kUnsupported) << bits;
      EXPECT_NE(status.message().find(std::to_string(bits) + " bits"), std::string::npos) << status.message();
    }
  }
  EXPECT_EQ(UnpackAwqWeights(words.view(), 2).status().code(), StatusCode::kUnsupported);
}

TEST(Packing_WrongShapesAndTypes, AreBadInput) {
  std::mt19937 generator(25);
  const Tensor words = Words({0, 0, 0, 0}, {2, 2});
  EXPECT_EQ(UnpackRows(words.view(), 4, 17).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackRows(words.view(), 4, 8).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackRows(words.view(), 4, -1).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackColumns(words.view(), 4, LaneOrder::kAwq, 12).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackRows(TensorView(), 4, 0).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(UnpackGptqWeights(Codes(4, 4, 8, generator).view(), 4).status().code(), StatusCode::kBadInput);
  const Tensor wide = Codes(1, 64, 8, generator);
  EXPECT_EQ(PackRows(wide.view(), 4).status().code(), StatusCode::kBadInput)
      << "codes beyond 15 do not fit 4 bits";
  EXPECT_EQ(PackModelOptAwqWeights(NarrowCodes(Codes(3, 4, 4, generator).view(), DType::kI4)->view())
                .status()
                .code(),
            StatusCode::kBadInput);
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
