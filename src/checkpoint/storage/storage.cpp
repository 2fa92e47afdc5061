#include "checkpoint/storage/storage.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "quant/packing.hpp"

namespace fusedmoe::checkpoint {
namespace {

// 16-bit group scales of integers keep the dtype that they have.
DType DTypeOf(const Part& part, const WeightFormat& format) {
  return part.source == Source::kBlockScale && part.dtype == DType::kBF16 ? format.block_scale_dtype
                                                                          : part.dtype;
}

bool Exists(const Part& part, const StorageOptions& options) {
  return part.source == Source::kZeroPoint       ? options.zero_points
         : part.source == Source::kGroupIndex    ? options.group_index
         : part.source == Source::kPreQuantScale ? options.smoothing
                                                 : true;
}

Shape ShapeOf(const Part& part, const WeightFormat& format, int64_t rows, int64_t cols) {
  switch (part.source) {
    case Source::kCodes:
      return {rows, CeilDiv(cols * DTypeBits(format.element), DTypeBits(part.dtype))};
    case Source::kBlockScale:
      return {CeilDiv(rows, format.block.row < 0 ? rows : format.block.row),
              CeilDiv(cols, format.block.col < 0 ? cols : format.block.col)};
    case Source::kChannelScale:
      return part.column ? Shape{rows, 1} : Shape{rows};
    case Source::kZeroPoint:
      return {CeilDiv(rows * DTypeBits(format.element), 32),
              CeilDiv(cols, format.block.col < 0 ? cols : format.block.col)};
    case Source::kGroupIndex:
    case Source::kPreQuantScale:
      return {cols};
    case Source::kMatrixShape:
      return {2};
    default:
      return part.scalar ? Shape{} : Shape{1};
  }
}

std::string NameOf(std::string_view projection, const Part& part) {
  return fmt::format("{}.{}", projection, part.suffix);
}

Result<Tensor> SingleValue(float value, const Shape& shape) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kF32, shape));
  std::memcpy(tensor.mutable_view().data(), &value, sizeof value);
  return tensor;
}

// The number whose reciprocal, rounded, is `scale`, if there is one among the neighbours; else the nearest.
// Several may share it: then the one that compressed-tensors makes of 16-bit weights, (6 * 448) / amax, goes
// first.
float ReciprocalOf(float scale) {
  constexpr float kRange = 6.0F * 448.0F;
  const float nearest = 1.0F / scale;
  const float candidates[] = {nearest, std::nextafterf(nearest, 0.0F), std::nextafterf(nearest, INFINITY)};
  for (const float candidate : candidates) {
    float amax = kRange / candidate;
    RoundRow(DType::kBF16, &amax, 1);
    if (1.0F / candidate == scale && kRange / amax == candidate) {
      return candidate;
    }
  }
  for (const float candidate : candidates) {
    if (1.0F / candidate == scale) {
      return candidate;
    }
  }
  return nearest;
}

Result<Tensor> DataOf(const Part& part, const CanonicalMatrix& matrix, const Shape& shape) {
  // The same bytes under the dtype and shape that the file gives them.
  const auto as_stored = [&](const Tensor& tensor) {
    return Tensor::Borrow(TensorView(tensor.view().data(), DTypeOf(part, matrix.format), shape),
                          tensor.owner());
  };
  switch (part.source) {
    case Source::kCodes: {
      const TensorView codes = matrix.codes.view();
      const int64_t row_bytes = shape[1] * DTypeBits(part.dtype) / 8;
      if (row_bytes == codes.row_bytes()) {
        return as_stored(matrix.codes);
      }
      FMOE_ASSIGN_OR_RETURN(Tensor words, Tensor::Allocate(part.dtype, shape));
      std::memset(words.mutable_view().data(), 0, static_cast<size_t>(words.view().total_bytes()));
      for (int64_t row = 0; row < matrix.rows; ++row) {  // the last word is not full
        std::memcpy(words.mutable_view().data() + row * row_bytes, codes.data() + row * codes.stride_bytes(0),
                    static_cast<size_t>(codes.row_bytes()));
      }
      return words;
    }
    case Source::kBlockScale:
      return as_stored(matrix.block_scale);
    case Source::kChannelScale:
      return as_stored(matrix.channel_scale);
    case Source::kTensorScale:
      return SingleValue(*matrix.tensor_scale, shape);
    case Source::kTensorScaleReciprocal:
      return SingleValue(ReciprocalOf(*matrix.tensor_scale), shape);
    case Source::kInputScale:
    case Source::kInputScaleReciprocal:
      if (!matrix.input_tensor_scale) {
        return Status::Unsupported("there is no input scale, and the scheme needs one");
      }
      return SingleValue(part.source == Source::kInputScale ? *matrix.input_tensor_scale
                                                            : ReciprocalOf(*matrix.input_tensor_scale),
                         shape);
    case Source::kMatrixShape: {
      FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kI64, shape));
      tensor.mutable_view().as<int64_t>()[0] = matrix.rows;
      tensor.mutable_view().as<int64_t>()[1] = matrix.cols;
      return tensor;
    }
    case Source::kZeroPoint:
      return PackRows(matrix.zero_point.view(), {.bits = DTypeBits(matrix.format.element)});
    case Source::kGroupIndex:
      return as_stored(matrix.group_index);
    case Source::kPreQuantScale:
      return as_stored(matrix.pre_quant_scale);
  }
  return Tensor();
}

}  // namespace

std::vector<TensorSpec> SpecsOf(const StorageRow& row, const Scheme& scheme, const StorageOptions& options,
                                std::string_view projection, int64_t rows, int64_t cols) {
  std::vector<TensorSpec> specs;
  for (const Part& part : row.parts) {
    if (Exists(part, options)) {
      specs.push_back(
          {NameOf(projection, part), DTypeOf(part, scheme.weight), ShapeOf(part, scheme.weight, rows, cols)});
    }
  }
  return specs;
}

Result<std::vector<NamedTensor>> Store(const StorageRow& row, const CanonicalMatrix& matrix,
                                       const StorageOptions& options, std::string_view projection) {
  std::vector<NamedTensor> tensors;
  for (const Part& part : row.parts) {
    if (!Exists(part, options)) {
      continue;
    }
    const Shape shape = ShapeOf(part, matrix.format, matrix.rows, matrix.cols);
    auto tensor = DataOf(part, matrix, shape);
    if (!tensor.ok()) {
      return std::move(tensor).status().WithTensor(NameOf(projection, part));
    }
    if (tensor->empty() || tensor->view().total_bytes() != PackedBytes(tensor->dtype(), shape.count())) {
      return Status::Unsupported("the matrix has nothing for this part").WithTensor(NameOf(projection, part));
    }
    tensors.push_back({NameOf(projection, part), *std::move(tensor)});
  }
  return tensors;
}

}  // namespace fusedmoe::checkpoint
