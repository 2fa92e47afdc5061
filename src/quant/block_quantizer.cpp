#include "quant/block_quantizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_rows.hpp"

namespace fusedmoe {
namespace {

using quant_rows::kChunk;
using quant_rows::Source;

bool IsElement(DType dtype) {
  return IsNumeric(dtype) && DTypeBits(dtype) == 8 && dtype != DType::kF8E8M0 && dtype != DType::kU8;
}

Status CheckOperands(GroupShape block, const TensorView& codes, const TensorView& scales,
                     const TensorView& values) {
  if ((block.row < 1 && block.row != -1) || (block.col < 1 && block.col != -1)) {
    return Status::BadInput(fmt::format(
        "block {}x{} is not a block; positive sizes, or -1 for all, are required", block.row, block.col));
  }
  if (!IsElement(codes.dtype()) || codes.rank() != 2) {
    return Status::BadInput(fmt::format("codes are {} {}; a matrix of F8 or I8 is required",
                                        DTypeName(codes.dtype()), codes.shape().ToString()));
  }
  const Shape expected = BlockScaleShape(block, codes.dim(0), codes.dim(1));
  if (scales.dtype() != DType::kF32 || !(scales.shape() == expected)) {
    return Status::BadInput(fmt::format("scales are {} {}; F32 {} is required", DTypeName(scales.dtype()),
                                        scales.shape().ToString(), expected.ToString()));
  }
  if (!IsPlainFloat(values.dtype()) || !(values.shape() == codes.shape())) {
    return Status::BadInput(fmt::format("values are {} {}; F32, BF16 or F16 {} is required",
                                        DTypeName(values.dtype()), values.shape().ToString(),
                                        codes.shape().ToString()));
  }
  return Status::Ok();
}

/// One block of a matrix: where it starts and how far it reaches.
struct Block {
  int64_t row = 0, column = 0;  ///< of its scale
  int64_t first_row = 0, rows = 0;
  int64_t first_column = 0, columns = 0;
};

template <typename F>
void ForBlocks(GroupShape block, int64_t rows, int64_t columns, F&& f) {
  const int64_t height = block.row == -1 ? std::max<int64_t>(rows, 1) : block.row;
  const int64_t width = block.col == -1 ? std::max<int64_t>(columns, 1) : block.col;
  for (int64_t row = 0; row * height < rows; ++row) {
    for (int64_t column = 0; column * width < columns; ++column) {
      f(Block{row, column, row * height, std::min(height, rows - row * height), column * width,
              std::min(width, columns - column * width)});
    }
  }
}

float LoadScale(const TensorView& scales, const Block& block) {
  float scale = 0.0F;
  DecodeRow(DType::kF32, scales.data() + block.row * scales.stride_bytes(0), block.column, 1, &scale);
  return scale;
}

void StoreScale(const MutableTensorView& scales, const Block& block, float scale) {
  EncodeRow(DType::kF32, &scale, 1, scales.data() + block.row * scales.stride_bytes(0) + block.column * 4);
}

struct ScaleAndStep {
  float scale = 0.0F;
  EncodeStep step;
};

/// Quantizes one block of rows that `load(row, first, count, buffer)` yields, by what `choose(amax)` says.
template <typename Load, typename Choose>
void QuantizeBlock(const ActivationFormat& format, const Block& block, Load&& load, Choose&& choose,
                   const MutableTensorView& codes, const MutableTensorView& scales) {
  float buffer[kChunk];
  float amax = 0.0F;
  const auto for_chunks = [&](auto&& body) {
    for (int64_t row = block.first_row; row < block.first_row + block.rows; ++row) {
      for (int64_t i = 0; i < block.columns; i += kChunk) {
        const int64_t length = std::min(kChunk, block.columns - i);
        load(row, block.first_column + i, length, buffer);
        body(row, block.first_column + i, length);
      }
    }
  };
  for_chunks([&](int64_t, int64_t, int64_t length) {
    const float part = RowAmax(buffer, length);
    amax = FloatBits(part) > FloatBits(amax) ? part : amax;
  });
  const ScaleAndStep chosen = choose(amax);
  for_chunks([&](int64_t row, int64_t first, int64_t length) {
    quant_rows::EncodeChunk(format, chosen.step, buffer, length,
                            codes.data() + row * codes.stride_bytes(0) + first);
  });
  StoreScale(scales, block, chosen.scale);
}

/// As the rule of the format says.
ScaleAndStep ByRule(const ActivationFormat& format, float amax) {
  const float scale = RealScale(format.rule, quant_rows::DivisorOf(format), amax);
  return {scale, StepFor(format.rule, scale)};
}

template <typename Choose>
void QuantizeMatrix(const ActivationFormat& format, const TensorView& weight, Choose&& choose,
                    const MutableTensorView& codes, const MutableTensorView& scales) {
  ForBlocks(format.group, codes.dim(0), codes.dim(1), [&](const Block& part) {
    QuantizeBlock(
        format, part,
        [&](int64_t row, int64_t first, int64_t count, float* out) {
          Source{weight.dtype(), weight.data() + row * weight.stride_bytes(0),
                 format.rule.round_to_bf16_first}
              .Chunk(first, count, out);
        },
        choose, codes, scales);
  });
}

}  // namespace

Shape BlockScaleShape(GroupShape block, int64_t rows, int64_t columns) {
  return {block.row == -1 ? std::min<int64_t>(rows, 1) : CeilDiv(rows, block.row),
          block.col == -1 ? std::min<int64_t>(columns, 1) : CeilDiv(columns, block.col)};
}

Status QuantizeBlocks(GroupShape block, const ActivationRule& rule, const TensorView& weight,
                      const MutableTensorView& codes, const MutableTensorView& scales) {
  FMOE_RETURN_IF_ERROR(CheckOperands(block, codes, scales, weight).WithContext("quantizing blocks"));
  const ActivationFormat format{.element = codes.dtype(), .group = block, .rule = rule};
  QuantizeMatrix(
      format, weight, [&](float amax) { return ByRule(format, amax); }, codes, scales);
  return Status::Ok();
}

Status ScaledQuantizeBlocks(GroupShape block, const TensorView& weight, const MutableTensorView& codes,
                            const MutableTensorView& scales) {
  FMOE_RETURN_IF_ERROR(CheckOperands(block, codes, scales, weight).WithContext("quantizing blocks"));
  const ActivationFormat format{.element = codes.dtype(), .group = block};
  const float largest = quant_rows::DivisorOf(format);
  QuantizeMatrix(
      format, weight,
      [&](float amax) {
        // torch evaluates largest / amax as the reciprocal of amax times largest.
        const float multiplier = 1.0F / (amax < 1e-12F ? 1e-12F : amax) * largest;
        return ScaleAndStep{1.0F / multiplier, {multiplier, true}};
      },
      codes, scales);
  return Status::Ok();
}

Status DequantizeBlocks(GroupShape block, const TensorView& codes, const TensorView& scales,
                        const MutableTensorView& out) {
  FMOE_RETURN_IF_ERROR(CheckOperands(block, codes, scales, out).WithContext("decoding blocks"));
  const int64_t out_bytes = DTypeBits(out.dtype()) / 8;
  ForBlocks(block, codes.dim(0), codes.dim(1), [&](const Block& part) {
    const float scale = LoadScale(scales, part);
    float buffer[kChunk];
    for (int64_t row = part.first_row; row < part.first_row + part.rows; ++row) {
      for (int64_t i = 0; i < part.columns; i += kChunk) {
        const int64_t first = part.first_column + i;
        const int64_t length = std::min(kChunk, part.columns - i);
        DecodeRow(codes.dtype(), codes.data() + row * codes.stride_bytes(0), first, length, buffer);
        for (int64_t k = 0; k < length; ++k) {
          buffer[k] *= scale;
        }
        EncodeRow(out.dtype(), buffer, length, out.data() + row * out.stride_bytes(0) + first * out_bytes);
      }
    }
  });
  return Status::Ok();
}

Status RequantizeBlocksToPowersOfTwo(GroupShape block, const ActivationRule& rule, const TensorView& codes,
                                     const TensorView& scales, const MutableTensorView& new_codes,
                                     const MutableTensorView& new_scales) {
  // Only shapes and types of the decoded values are checked here: they exist a chunk at a time.
  const TensorView values(nullptr, DType::kF32, codes.shape());
  FMOE_RETURN_IF_ERROR(CheckOperands(block, codes, scales, values).WithContext("requantizing blocks"));
  FMOE_RETURN_IF_ERROR(CheckOperands(block, new_codes, new_scales, values).WithContext("requantized blocks"));
  ActivationFormat format{.element = new_codes.dtype(), .group = block, .rule = rule};
  format.rule.power_of_two_scale = true;
  ForBlocks(block, codes.dim(0), codes.dim(1), [&](const Block& part) {
    const float old_scale = LoadScale(scales, part);
    QuantizeBlock(
        format, part,
        [&](int64_t row, int64_t first, int64_t count, float* out) {
          DecodeRow(codes.dtype(), codes.data() + row * codes.stride_bytes(0), first, count, out);
          for (int64_t i = 0; i < count; ++i) {
            out[i] *= old_scale;
          }
        },
        [&](float amax) { return ByRule(format, amax); }, new_codes, new_scales);
  });
  return Status::Ok();
}

Status RescaleCodes(float from_scale, float to_scale, const MutableTensorView& codes) {
  if (!IsElement(codes.dtype()) || codes.rank() != 2) {
    return Status::BadInput(fmt::format("codes are {} {}; a matrix of F8 or I8 is required",
                                        DTypeName(codes.dtype()), codes.shape().ToString()));
  }
  if (!(from_scale > 0.0F) || !(to_scale > 0.0F) || !std::isfinite(from_scale) || !std::isfinite(to_scale)) {
    return Status::BadInput(
        fmt::format("scales {} and {} must be finite and above 0 to convert codes", from_scale, to_scale));
  }
  if (from_scale == to_scale) {
    return Status::Ok();
  }
  // A byte has 256 codes: the rounding is done once for each.
  std::byte table[256];
  for (uint32_t code = 0; code < 256; ++code) {
    const double value = static_cast<double>(DecodeCode(codes.dtype(), code)) *
                         static_cast<double>(from_scale) / static_cast<double>(to_scale);
    table[code] = static_cast<std::byte>(EncodeCode(codes.dtype(), static_cast<float>(value)));
  }
  for (int64_t row = 0; row < codes.dim(0); ++row) {
    std::byte* out = codes.data() + row * codes.stride_bytes(0);
    for (int64_t i = 0; i < codes.dim(1); ++i) {
      out[i] = table[static_cast<size_t>(out[i])];
    }
  }
  return Status::Ok();
}

}  // namespace fusedmoe
