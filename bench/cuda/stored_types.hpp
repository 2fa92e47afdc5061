#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <random>
#include <string_view>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/weights.hpp>

#include "core/checked_math.hpp"

/// Types of GGUF that no scheme names, since layers have them as bytes: "q6_k" and "iq4".
namespace fusedmoe::cuda {

struct StoredType {
  std::string_view name;
  std::string_view scheme;  ///< of a layer
  StoredIntegers stored;
  WeightFormat format;  ///< of a matrix that went back to it
};

inline std::optional<StoredType> StoredTypeOf(std::string_view name) {
  StoredType type{name, {}, {}, {}};
  if (name == "q6_k") {
    type.scheme = "int8_w8a16:g16";
    type.stored.bits = 6, type.stored.group = 16;
    type.format = ParseScheme(type.scheme)->weight;
    type.format.code_bits = 6;
  } else if (name == "iq4") {
    type.scheme = "int8_w8a16:g32";
    type.stored.bits = 4, type.stored.group = 32, type.stored.codebook = Codebook::kIq4;
    type.format = ParseScheme("int4_w4a16:g32")->weight;
    type.format.codebook = Codebook::kIq4;
  } else {
    return std::nullopt;
  }
  type.stored.center = 128;
  type.format.block_scale_dtype = DType::kF32;
  return type;
}

/// Codes at random under scales of powers of two, by which a weight is a BF16 number as it is.
inline CanonicalMatrix RandomOfType(const StoredType& type, int64_t rows, int64_t cols,
                                    std::mt19937& generator) {
  CanonicalMatrix matrix;
  matrix.rows = rows, matrix.cols = cols, matrix.format = type.format;
  matrix.codes = *Tensor::Allocate(type.format.element, Shape{rows, cols});
  const uint32_t mask = type.format.code_bits == 6 ? 63 : 255;
  auto* codes = reinterpret_cast<uint8_t*>(matrix.codes.mutable_view().data());
  for (int64_t i = 0; i < matrix.codes.view().total_bytes(); ++i) {
    codes[i] = static_cast<uint8_t>(generator() & mask);
  }
  const int of_sum = static_cast<int>(std::lround(std::log2(static_cast<double>(cols)) / 2));
  const int of_code = type.format.code_bits == 6 ? 4 : 6;  // of their root mean square
  matrix.block_scale = *Tensor::Allocate(DType::kF32, Shape{rows, CeilDiv(cols, type.format.block.col)});
  auto* scales = matrix.block_scale.mutable_view().as<float>();
  for (int64_t i = 0; i < matrix.block_scale.view().count(); ++i) {
    scales[i] = std::ldexp(1.0F, -of_sum - of_code - static_cast<int>(generator() % 2));
  }
  return matrix;
}

}  // namespace fusedmoe::cuda
