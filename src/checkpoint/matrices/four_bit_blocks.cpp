#include "checkpoint/matrices/four_bit_blocks.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "checkpoint/files/json.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kLargestSide = int64_t{1} << 24;

float FloatAt(const std::byte* bytes, int64_t index) {
  float value = 0.0F;
  std::memcpy(&value, bytes + index * 4, sizeof(value));
  return value;
}

Result<int64_t> Count(const JsonValue& state, std::string_view key) {
  const JsonValue* value = state.Find(key);
  const int64_t count = value == nullptr ? 0 : value->integer().value_or(0);
  // The sizes that bitsandbytes knows end at 4096.
  if (count < 2 || count > 65536) {
    return Status::BadInput(fmt::format("'{}' is {}; 2 to 65536 is needed", key,
                                        value == nullptr ? "missing" : value->ToString()));
  }
  return count;
}

// The scales of blocks [first, first + count).
Result<std::vector<float>> Scales(const FourBitMatrix& matrix, const FourBitReader& read, int64_t first,
                                  int64_t count) {
  std::vector<float> scales(static_cast<size_t>(count));
  if (matrix.nested_block == 0) {
    FMOE_ASSIGN_OR_RETURN(const platform::FileBytes stored, read(".absmax", first * 4, count * 4));
    for (int64_t i = 0; i < count; ++i) {
      scales[static_cast<size_t>(i)] = FloatAt(stored.data, i);
    }
  } else {
    const int64_t first_outer = first / matrix.nested_block;
    const int64_t num_outer = (first + count - 1) / matrix.nested_block - first_outer + 1;
    FMOE_ASSIGN_OR_RETURN(const platform::FileBytes codes, read(".absmax", first, count));
    FMOE_ASSIGN_OR_RETURN(const platform::FileBytes outer,
                          read(".nested_absmax", first_outer * 4, num_outer * 4));
    FMOE_ASSIGN_OR_RETURN(const platform::FileBytes table, read(".nested_quant_map", 0, 256 * 4));
    for (int64_t i = 0; i < count; ++i) {
      const float of_codes = FloatAt(table.data, std::to_integer<int64_t>(codes.data[i]));
      const float of_outer = FloatAt(outer.data, (first + i) / matrix.nested_block - first_outer);
      scales[static_cast<size_t>(i)] = of_codes * of_outer + matrix.nested_offset;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const float scale = scales[static_cast<size_t>(i)];
    // Double quantization may take a tiny scale a little below zero.
    if (!std::isfinite(scale) || (scale < 0.0F && matrix.nested_block == 0)) {
      return Status::BadInput(fmt::format("the scale of block {} is {}; {} is required", first + i, scale,
                                          matrix.nested_block == 0 ? "finite and >= 0" : "finite"));
    }
  }
  return scales;
}

}  // namespace

std::string_view FourBitWeightOf(std::string_view name) {
  for (const std::string_view ending : {".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"}) {
    if (name.ends_with(ending)) {
      return name.substr(0, name.size() - ending.size());
    }
  }
  return "";
}

Result<FourBitMatrix> ParseFourBitState(std::string_view json) {
  FMOE_ASSIGN_OR_RETURN(const JsonValue state, JsonValue::Parse(json));
  FourBitMatrix matrix;
  const JsonValue* dtype = state.Find("dtype");
  const std::string type = dtype == nullptr ? "" : dtype->string();
  if (type != "bfloat16" && type != "float16" && type != "float32") {
    return Status::BadInput(fmt::format("'dtype' is {}; bfloat16, float16 or float32 is needed",
                                        dtype == nullptr ? "missing" : dtype->ToString()));
  }
  matrix.dtype = type == "bfloat16" ? DType::kBF16 : type == "float16" ? DType::kF16 : DType::kF32;
  const JsonValue* shape = state.Find("shape");
  const auto side = [&](size_t i) {
    return shape != nullptr && shape->is_array() && shape->items().size() == 2
               ? shape->items()[i].integer().value_or(0)
               : 0;
  };
  if (side(0) < 1 || side(1) < 1 || side(0) > kLargestSide || side(1) > kLargestSide) {
    return Status::BadInput(
        fmt::format("'shape' is {}; two sizes are needed", shape == nullptr ? "missing" : shape->ToString()));
  }
  matrix.shape = Shape{side(0), side(1)};
  FMOE_ASSIGN_OR_RETURN(matrix.block, Count(state, "blocksize"));
  const JsonValue* offset = state.Find("nested_offset");
  if (offset == nullptr && state.Find("nested_blocksize") == nullptr) {
    return matrix;
  }
  FMOE_ASSIGN_OR_RETURN(matrix.nested_block, Count(state, "nested_blocksize"));
  const JsonValue* nested = state.Find("nested_dtype");
  if (nested == nullptr || nested->string() != "float32") {
    return Status::BadInput(fmt::format("'nested_dtype' is {}; float32 is needed",
                                        nested == nullptr ? "missing" : nested->ToString()));
  }
  if (offset == nullptr || !offset->is_number() || !std::isfinite(offset->number())) {
    return Status::BadInput(fmt::format("'nested_offset' is {}; a finite number is needed",
                                        offset == nullptr ? "missing" : offset->ToString()));
  }
  matrix.nested_offset = static_cast<float>(offset->number());
  return matrix;
}

Result<platform::FileBytes> ReadFourBit(const FourBitMatrix& matrix, const FourBitReader& read, int64_t first,
                                        int64_t count) {
  const int64_t width = DTypeBits(matrix.dtype) / 8;
  FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, platform::AllocateBytes(count * width));
  const std::byte* data = memory.get();
  if (count == 0) {
    return platform::FileBytes{data, 0, std::move(memory)};
  }
  const int64_t first_block = first / matrix.block, last_block = (first + count - 1) / matrix.block;
  FMOE_ASSIGN_OR_RETURN(const std::vector<float> scales,
                        Scales(matrix, read, first_block, last_block - first_block + 1));
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes table, read(".quant_map", 0, 16 * 4));
  const int64_t first_byte = first / 2;
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes codes,
                        read("", first_byte, (first + count - 1) / 2 - first_byte + 1));
  std::vector<float> values(static_cast<size_t>(matrix.block));
  for (int64_t block = first_block; block <= last_block; ++block) {
    const int64_t begin = std::max(first, block * matrix.block);
    const int64_t end = std::min(first + count, (block + 1) * matrix.block);
    const float scale = scales[static_cast<size_t>(block - first_block)];
    for (int64_t i = begin; i < end; ++i) {
      // The first of two neighbours has the high nibble.
      const auto pair = std::to_integer<int64_t>(codes.data[i / 2 - first_byte]);
      values[static_cast<size_t>(i - begin)] =
          FloatAt(table.data, i % 2 == 0 ? pair >> 4 : pair & 15) * scale;
    }
    EncodeRow(matrix.dtype, values.data(), end - begin, memory.get() + (begin - first) * width);
  }
  return platform::FileBytes{data, count * width, std::move(memory)};
}

}  // namespace fusedmoe::checkpoint
