#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string_view>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "platform/file.hpp"

/// The 4-bit matrices of bitsandbytes (NF4, FP4): codes of a table, in blocks of the flattened matrix that
/// are scaled by their largest magnitude, which is often quantized once more ("double quantization"). No
/// scheme has tables, so a reader sees the 16- or 32-bit matrix that they decode to, rounded as bitsandbytes
/// does it.
namespace fusedmoe::checkpoint {

/// Of "X.weight", the tensor "X.weight.quant_state.bitsandbytes__nf4" (or fp4) says in JSON how the others
/// are to be read. The empty view when `name` is no such tensor.
std::string_view FourBitWeightOf(std::string_view name);

/// What follows the weight's name in the names of the tensors that go with it.
inline constexpr std::array<std::string_view, 4> kFourBitParts = {".absmax", ".quant_map", ".nested_absmax",
                                                                  ".nested_quant_map"};

struct FourBitMatrix {
  DType dtype = DType::kBF16;  ///< of the matrix
  Shape shape;                 ///< [out, in]
  int64_t block = 0;           ///< elements that share a scale
  int64_t nested_block = 0;    ///< scales that share one of the second level; 0: they are F32
  float nested_offset = 0.0F;

  int64_t num_blocks() const { return (shape.count() + block - 1) / block; }
  int64_t num_nested_blocks() const { return (num_blocks() + nested_block - 1) / nested_block; }
};

/// kBadInput, saying what is wrong with it.
Result<FourBitMatrix> ParseFourBitState(std::string_view json);

/// Reads bytes of a tensor: "" is the codes, else a part.
using FourBitReader =
    std::function<Result<platform::FileBytes>(std::string_view part, int64_t offset, int64_t count)>;

/// Elements [first, first + count) of the flattened matrix, in its dtype.
Result<platform::FileBytes> ReadFourBit(const FourBitMatrix& matrix, const FourBitReader& read, int64_t first,
                                        int64_t count);

}  // namespace fusedmoe::checkpoint
