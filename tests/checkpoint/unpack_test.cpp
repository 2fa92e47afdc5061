#include "checkpoint/matrices/unpack.hpp"

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <cstring>
#include <random>
#include <vector>

#include "numerics/rows.hpp"
#include "quant/packing.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int kAwqOrder[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // which output a nibble holds

Tensor RandomBytes(DType dtype, const Shape& shape, std::mt19937& random) {
  Tensor tensor = *Tensor::Allocate(dtype, shape);
  for (int64_t i = 0; i < tensor.view().total_bytes(); ++i) {
    tensor.mutable_view().data()[i] = static_cast<std::byte>(random() & 255U);
  }
  return tensor;
}

uint32_t WordAt(const Tensor& words, int64_t row, int64_t column) {
  return words.view().as<uint32_t>()[row * words.dim(1) + column];
}

// Of one element, as docs/checkpoints.md has the layouts.
uint32_t CodeAt(const LinearFormat& format, const Tensor& stored, int64_t row, int64_t col) {
  const int bits = format.bits, per_word = 32 / bits;
  const uint32_t mask = (1U << bits) - 1;
  switch (format.packing) {
    case Packing::kGptq:
      return WordAt(stored, col / per_word, row) >> (col % per_word * bits) & mask;
    case Packing::kBits:
      return WordAt(stored, row, col / per_word) >> (col % per_word * bits) & mask;
    case Packing::kAwq:
      for (int nibble = 0; bits == 4 && nibble < 8; ++nibble) {
        if (kAwqOrder[nibble] == row % 8) {
          return WordAt(stored, col, row / 8) >> (4 * nibble) & mask;
        }
      }
      return WordAt(stored, col, row / per_word) >> (row % per_word * bits) & mask;
    default:
      return stored.view().as<uint8_t>()[row / 2 * stored.dim(1) + col] >> (row % 2 * 4) & mask;
  }
}

Shape StoredShape(const LinearFormat& format, int64_t rows, int64_t cols) {
  const int64_t per_word = 32 / format.bits;
  switch (format.packing) {
    case Packing::kGptq:
      return {(cols + per_word - 1) / per_word, rows};
    case Packing::kBits:
      return {rows, (cols + per_word - 1) / per_word};
    case Packing::kAwq:
      return {cols, (rows + per_word - 1) / per_word};
    default:
      return {(rows + 1) / 2, cols};
  }
}

void ExpectCodes(LinearFormat format, int64_t rows, int64_t cols, std::mt19937& random) {
  format.weight.element = format.bits == 4 ? DType::kU4 : DType::kU8;
  const DType stored_type = format.packing == Packing::kRowPairs ? DType::kU8 : DType::kI32;
  const Tensor stored = RandomBytes(stored_type, StoredShape(format, rows, cols), random);
  const Result<Tensor> codes = UnpackCodes(format, stored, rows, cols, true);
  ASSERT_TRUE(codes.ok()) << codes.status().ToString();
  ASSERT_EQ(codes->shape(), (Shape{rows, cols}));
  const uint32_t flip = format.twos_complement ? 1U << (format.bits - 1) : 0;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      ASSERT_EQ(LoadCode(codes->dtype(), codes->view().data() + row * codes->view().stride_bytes(0), col),
                CodeAt(format, stored, row, col) ^ flip)
          << fmt::format("packing {}, {} bits, {} x {}, flip {}: row {}, column {}",
                         static_cast<int>(format.packing), format.bits, rows, cols, flip, row, col);
    }
  }
}

// Whole tiles, tiles cut in either direction, words cut by the end of the columns or of the rows.
TEST(UnpackCodes_, PutEveryCodeWhereItsLayoutHasIt) {
  std::mt19937 random(7);
  for (const Packing packing : {Packing::kGptq, Packing::kBits, Packing::kAwq, Packing::kRowPairs}) {
    for (const int bits : {4, 8}) {
      if (bits == 8 && packing == Packing::kRowPairs) {
        continue;
      }
      for (const bool twos_complement : {false, true}) {
        LinearFormat format;
        format.packing = packing;
        format.bits = bits;
        format.twos_complement = twos_complement;
        for (const int64_t rows : {8, 16, 24, 128, 136, 152}) {
          for (const int64_t cols : {8, 64, 128, 136, 160}) {
            ExpectCodes(format, rows, cols, random);
          }
        }
        ExpectCodes(format, 10, 22, random);
        ExpectCodes(format, 16, 21, random);
        ExpectCodes(format, 11, 21, random);
      }
    }
  }
}

// GPTQModel takes one away from all fields of a word of 2, 4 or 8 bits at once: zero points of 0 and 5 are
// written as 15 and 3, since the first borrows from the second. Of 3 bits it takes it from each.
TEST(UnpackZeroPoints_, GiveBackWhatAZeroPointOfZeroBorrowed) {
  LinearFormat format;
  format.packing = Packing::kGptq;
  const auto zeros = [&](uint32_t word, bool zero_plus_one, int bits = 4) {
    format.zero_plus_one = zero_plus_one;
    format.bits = bits;
    Tensor stored = *Tensor::Allocate(DType::kI32, Shape{1, 1});
    *stored.mutable_view().as<uint32_t>() = word;
    const Result<Tensor> unpacked = UnpackZeroPoints(format, stored, 32 / bits, 1);
    EXPECT_TRUE(unpacked.ok()) << unpacked.status().ToString();
    const auto* values = unpacked->view().as<uint8_t>();
    return std::vector<int>(values, values + unpacked->shape().count());
  };
  EXPECT_EQ(zeros(0x0000003fU, true), (std::vector<int>{0, 5, 1, 1, 1, 1, 1, 1}));
  EXPECT_EQ(zeros(0x000003ffU, true, 8), (std::vector<int>{0, 5, 1, 1}));
  EXPECT_EQ(zeros(0x00000007U, true, 2)[0], 0);
  EXPECT_EQ(zeros(0x00000007U, true, 2)[1], 3) << "of 1, which had lent one";
  EXPECT_EQ(zeros(0x0000003fU, false), (std::vector<int>{15, 3, 0, 0, 0, 0, 0, 0}));
  // Symmetric files: 0x77777777 in version 1 and 0x88888888 in version 2 both mean 8.
  EXPECT_EQ(zeros(0x77777777U, true), std::vector<int>(8, 8));
  EXPECT_EQ(zeros(0x88888888U, false), std::vector<int>(8, 8));
}

TEST(Nibbles_, ArePackedAndTakenApart) {
  std::mt19937 random(11);
  for (const int64_t columns : {1, 2, 17, 64, 131}) {
    Tensor bytes = RandomBytes(DType::kI8, Shape{3, columns}, random);
    auto* values = bytes.mutable_view().as<int8_t>();
    for (int64_t i = 0; i < 3 * columns; ++i) {
      values[i] = static_cast<int8_t>((values[i] & 15) - 8);
    }
    const Result<Tensor> packed = PackSigned4(bytes);
    ASSERT_TRUE(packed.ok());
    for (int64_t i = 0; i < 3 * columns; ++i) {
      const std::byte* row = packed->view().data() + i / columns * packed->view().stride_bytes(0);
      ASSERT_EQ(LoadCode(DType::kI4, row, i % columns), static_cast<uint32_t>(values[i]) & 15U) << i;
    }
    for (const int value : {-128, -9, 8, 127}) {
      const int8_t kept = values[2 * columns];
      values[2 * columns] = static_cast<int8_t>(value);
      const Result<Tensor> refused = PackSigned4(bytes);
      ASSERT_FALSE(refused.ok());
      EXPECT_EQ(refused.status().message(),
                fmt::format("the code at [2, 0] is {}; 4 bits hold -8 to 7", value));
      values[2 * columns] = kept;
    }
    const Tensor pairs = RandomBytes(DType::kU4, Shape{3, 2 * columns}, random);
    const Result<Tensor> apart = WidenCodes(pairs.view());
    ASSERT_TRUE(apart.ok());
    ASSERT_EQ(apart->shape(), (Shape{3, 2 * columns}));
    for (int64_t i = 0; i < 6 * columns; ++i) {
      ASSERT_EQ(apart->view().as<uint8_t>()[i], LoadCode(DType::kU4, pairs.view().data(), i)) << i;
    }
    const Result<Tensor> together = NarrowCodes(apart->view(), DType::kF4E2M1);
    ASSERT_TRUE(together.ok());
    EXPECT_EQ(std::memcmp(together->view().data(), pairs.view().data(), static_cast<size_t>(3 * columns)), 0);
  }
}

}  // namespace
}  // namespace fusedmoe::checkpoint
