// The bytes of panels, which files of packed weights keep: they change with kPanelRevision alone.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "numerics/element_types.hpp"
#include "weights/panel_revision.hpp"
#include "weights/panels.hpp"

namespace fusedmoe {
namespace {

using testing_support::Pack;

/// FNV-1a of 64 bits.
uint64_t Checksum(const std::vector<std::byte>& bytes, uint64_t hash) {
  for (const std::byte byte : bytes) {
    hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3ULL;
  }
  return hash;
}

/// Bytes that are the same on every machine; none is a NaN or an infinity of the small floats, or zero.
Tensor Filled(DType dtype, const Shape& shape, uint32_t seed) {
  Tensor tensor = *Tensor::Allocate(dtype, shape);
  auto* bytes = reinterpret_cast<uint8_t*>(tensor.mutable_view().data());
  for (int64_t i = 0; i < tensor.view().total_bytes(); ++i) {
    seed = seed * 1664525U + 1013904223U;
    bytes[i] = static_cast<uint8_t>(1 + (seed >> 24) % 119);
  }
  return tensor;
}

CanonicalMatrix Matrix(const std::string& scheme, int64_t rows, int64_t cols) {
  CanonicalMatrix matrix;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.format = ParseScheme(scheme)->weight;
  matrix.codes = Filled(matrix.format.element, Shape{rows, cols}, 1);
  if (matrix.format.has_block_scale()) {
    const auto blocks = [](int64_t size, int64_t block) {
      return block > 0 ? (size + block - 1) / block : 1;
    };
    const Shape shape{blocks(rows, matrix.format.block.row), blocks(cols, matrix.format.block.col)};
    matrix.block_scale = Filled(matrix.format.block_scale_dtype, shape, 2);
  }
  if (matrix.format.has_channel_scale) {
    matrix.channel_scale = Filled(DType::kF32, Shape{rows}, 3);
  }
  if (matrix.format.has_tensor_scale) {
    matrix.tensor_scale = 0.5F;
  }
  return matrix;
}

TEST(PanelRevision, StandsForTheBytesOfEveryFormat) {
  const std::vector<std::pair<const char*, uint64_t>> expected = {
      {"unquantized", 0x3fd5b19e40d9fefd},        {"fp8_w8a16:channel", 0x9ea35b1e1c61ee2f},
      {"fp8_w8a16:block128", 0x7e266ba314923b1f}, {"int8_w8a16:g32", 0x0965d81567789dbf},
      {"int4_w4a16:g128", 0x52df721c22e0c0a0},    {"nvfp4_w4a16", 0x934d0711f008154b},
      {"mxfp4_w4a16", 0xfd5fd296d92a5491},        {"mxfp8_w8a16", 0x9d0dbb13b1eee50b},
      {"w_mxfp6_e3m2", 0xe628a1e271dc7679},       {"w_mxfp6_e2m3", 0xe628a1e271dc7679},
      {"int4_w4afp8:g64", 0x537db3611517456c},    {"mxfp8_w8a8_out", 0x05136c143a67ecbb}};
  EXPECT_EQ(kPanelRevision, 1) << "write the checksums of this revision";
  for (const auto& [scheme, checksum] : expected) {
    const uint64_t found = Checksum(Pack(Matrix(scheme, 37, 384)).bytes, 0xcbf29ce484222325ULL);
    EXPECT_EQ(found, checksum) << scheme << " is packed to other bytes: raise kPanelRevision, "
                               << "and write this checksum: 0x" << std::hex << found;
  }
}

}  // namespace
}  // namespace fusedmoe
