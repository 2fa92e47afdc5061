#pragma once

#include <optional>
#include <vector>

#include <fusedmoe/tensor.hpp>

#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"
#include "support/golden.hpp"

/// What the operations on quantized rows share.
namespace fusedmoe::golden {

/// Memory of a produced tensor, with the view that compares it.
struct Produced {
  std::vector<std::byte> bytes;
  DType dtype = DType::kU8;
  Shape shape;

  Produced() = default;
  Produced(DType type, const Shape& dims) : dtype(type), shape(dims) {
    bytes.resize(static_cast<size_t>(TensorView(nullptr, type, dims).total_bytes()) + 1);
  }
  MutableTensorView view() { return {bytes.data(), dtype, shape}; }
};

/// The parameter "block": rows and columns that share a scale.
inline GroupShape BlockOf(const GoldenCase& golden_case) {
  const auto& block = golden_case.parameters().at("block");
  return {block.at(0).get<int64_t>(), block.at(1).get<int64_t>()};
}

/// The shape with the last dimension replaced.
inline Shape WithColumns(Shape shape, int64_t columns) {
  shape[shape.rank() - 1] = columns;
  return shape;
}

struct QuantizedCase {
  Produced codes, scales;
  float tensor_scale = 1.0F;
  Outcome failure;
};

/// Quantizes a [M, K] or [E, M, K] tensor as a whole.
inline QuantizedCase QuantizeTensor(const ActivationFormat& format, std::optional<float> static_scale,
                                    const TensorView& x,
                                    BlockScaleLayout layout = BlockScaleLayout::kLinear) {
  QuantizedCase result;
  const int64_t columns = x.dim(x.rank() - 1);
  result.codes = Produced(*format.element, x.shape());
  const int64_t scale_columns = ScalesPerRow(format, columns);
  if (layout == BlockScaleLayout::kLinear) {
    result.scales = Produced(format.scale_dtype, WithColumns(x.shape(), scale_columns));
  } else {
    const int64_t experts = x.rank() == 3 ? x.dim(0) : 1;
    result.scales =
        Produced(format.scale_dtype, {experts * BlockScaleBytes(layout, x.dim(x.rank() - 2), scale_columns)});
  }
  const auto scale = QuantizeInput(Executor{}, format, static_scale, {.values = x},
                                   {result.codes.view(), result.scales.view(), layout});
  if (!scale.ok()) {
    result.failure = scale.status().ToString();
  } else {
    result.tensor_scale = *scale;
  }
  return result;
}

/// All rows decoded to fp32.
inline std::vector<float> DequantizeTensor(const ActivationFormat& format, QuantizedCase& quantized) {
  const Shape& shape = quantized.codes.shape;
  const int64_t columns = shape[shape.rank() - 1];
  std::vector<float> values(static_cast<size_t>(shape.count()));
  for (int64_t row = 0; row * columns < shape.count(); ++row) {
    DequantizeRow(format, quantized.tensor_scale,
                  quantized.codes.bytes.data() + row * CodeRowBytes(format, columns),
                  quantized.scales.bytes.data() + row * ScaleRowBytes(format, columns), columns,
                  values.data() + row * columns);
  }
  return values;
}

/// Values rounded to the type of the tensor that they are compared with.
inline Outcome CompareRounded(const GoldenCase& golden_case, std::string_view tensor,
                              std::vector<float> values) {
  Produced rounded(golden_case.Input(tensor).dtype(), {static_cast<int64_t>(values.size())});
  EncodeRow(rounded.dtype, values.data(), static_cast<int64_t>(values.size()), rounded.bytes.data());
  return golden_case.Compare(tensor, rounded.view());
}

inline Outcome UnknownOperation(const GoldenCase& golden_case) {
  return "unknown operation '" + golden_case.topic() + "/" + golden_case.name() + "'";
}

}  // namespace fusedmoe::golden
