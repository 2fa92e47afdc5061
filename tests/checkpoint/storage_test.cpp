// What is stored reads back.
#include "checkpoint/storage/storage.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "checkpoint/matrices/unpack.hpp"

namespace fusedmoe::checkpoint {
namespace {

Tensor Random(DType dtype, const Shape& shape, uint32_t mask, std::mt19937& random) {
  Tensor tensor = *Tensor::Allocate(dtype, shape);
  for (int64_t i = 0; i < tensor.view().total_bytes(); ++i) {
    tensor.mutable_view().data()[i] = static_cast<std::byte>(random() & mask);
  }
  return tensor;
}

const Tensor* FindIn(const std::vector<NamedTensor>& tensors, const std::string& name) {
  for (const NamedTensor& tensor : tensors) {
    if (tensor.name == name) {
      return &tensor.tensor;
    }
  }
  return nullptr;
}

void ExpectSame(const Result<Tensor>& read, const Tensor& written) {
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ASSERT_EQ(read->shape(), written.shape());
  ASSERT_EQ(read->dtype(), written.dtype());
  EXPECT_EQ(std::memcmp(read->view().data(), written.view().data(),
                        static_cast<size_t>(written.view().total_bytes())),
            0);
}

// Zero points are packed along the outputs, which fill their words or leave part of the last one unused.
TEST(Storage, CodesAndZeroPointsOfIntegers_ReadBack) {
  std::mt19937 random(26);
  constexpr int64_t kCols = 256;
  for (const std::string name : {"int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g32", "int4_w4a16:channel",
                                 "int8_w8a16:g128", "int8_w8a16:g64", "int8_w8a16:g32"}) {
    for (const int64_t rows : {1, 11, 12, 64}) {
      SCOPED_TRACE(name + " of " + std::to_string(rows) + " rows");
      const auto scheme = ParseScheme(name);
      ASSERT_TRUE(scheme.ok()) << scheme.status().ToString();
      const StorageRow* row = FindStorageOf(*scheme, "compressed-tensors");
      ASSERT_TRUE(row != nullptr);
      CanonicalMatrix matrix;
      matrix.rows = rows;
      matrix.cols = kCols;
      matrix.format = scheme->weight;
      const int64_t group = matrix.format.block.col, groups = group < 0 ? 1 : kCols / group;
      LinearFormat format;
      format.packing = Packing::kBits;
      format.weight = matrix.format;
      format.bits = DTypeBits(matrix.format.element);
      const uint32_t mask = (1U << format.bits) - 1;
      matrix.codes = Random(matrix.format.element, Shape{rows, kCols}, 255, random);
      matrix.block_scale = Random(matrix.format.block_scale_dtype, Shape{rows, groups}, 127, random);
      matrix.zero_point = Random(DType::kU8, Shape{rows, groups}, mask, random);
      const auto stored = Store(*row, matrix, {.zero_points = true}, "up_proj");
      ASSERT_TRUE(stored.ok()) << stored.status().ToString();
      const Tensor* codes = FindIn(*stored, "up_proj.weight_packed");
      const Tensor* zeros = FindIn(*stored, "up_proj.weight_zero_point");
      ASSERT_TRUE(codes != nullptr && zeros != nullptr);
      ExpectSame(UnpackCodes(format, *codes, rows, kCols, true), matrix.codes);
      ExpectSame(UnpackZeroPoints(format, *zeros, rows, groups), matrix.zero_point);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::checkpoint
