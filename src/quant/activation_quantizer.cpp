#include "quant/activation_quantizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_rows.hpp"

namespace fusedmoe {
namespace {

using quant_rows::ScaleTarget;
using quant_rows::Source;

bool IsElement(DType dtype) {
  return IsNumeric(dtype) && DTypeBits(dtype) <= 8 && dtype != DType::kF8E8M0 && dtype != DType::kU8 &&
         dtype != DType::kU4;
}

Source SourceOf(const ActivationFormat& format, DType dtype, const std::byte* row) {
  return {dtype, row, format.rule.round_to_bf16_first && dtype != DType::kBF16};
}

/// The rows of a batch: experts x rows, and which of them count.
struct Geometry {
  int64_t experts = 1;
  int64_t rows = 0;
  int64_t columns = 0;

  static Geometry Of(const TensorView& view) {
    return view.rank() == 3 ? Geometry{view.dim(0), view.dim(1), view.dim(2)}
                            : Geometry{1, view.dim(0), view.dim(1)};
  }
};

/// Byte offset of row `row` of expert `expert`.
template <typename Byte>
Byte* RowOf(const BasicTensorView<Byte>& view, int64_t expert, int64_t row) {
  return view.rank() == 3 ? view.data() + expert * view.stride_bytes(0) + row * view.stride_bytes(1)
                          : view.data() + row * view.stride_bytes(0);
}

Status CheckRows(const ActivationRows& rows) {
  const TensorView& values = rows.values;
  if (!IsPlainFloat(values.dtype())) {
    return Status::BadInput(
        fmt::format("activations are {}; F32, BF16 or F16 is required", DTypeName(values.dtype())));
  }
  if (values.rank() != 2 && values.rank() != 3) {
    return Status::BadInput(
        fmt::format("activations have shape {}; [rows, columns] or [experts, rows, columns] "
                    "is required",
                    values.shape().ToString()));
  }
  const Geometry geometry = Geometry::Of(values);
  if (!rows.valid_rows.empty() && std::ssize(rows.valid_rows) != geometry.experts) {
    return Status::BadInput(fmt::format("{} row counts for {} matrices; one count a matrix is required",
                                        rows.valid_rows.size(), geometry.experts));
  }
  for (const int32_t count : rows.valid_rows) {
    if (count < 0 || count > geometry.rows) {
      return Status::BadInput(fmt::format("row count {} is outside 0..{}", count, geometry.rows));
    }
  }
  return Status::Ok();
}

Status CheckScales(const ActivationFormat& format, const Geometry& geometry, const QuantizedRows& out) {
  if (IsPerTensor(format)) {
    return Status::Ok();
  }
  if (out.scales.dtype() != format.scale_dtype) {
    return Status::BadInput(fmt::format("scales are {}; the format writes {}", DTypeName(out.scales.dtype()),
                                        DTypeName(format.scale_dtype)));
  }
  const int64_t columns = ScalesPerRow(format, geometry.columns);
  if (out.layout != BlockScaleLayout::kLinear) {
    if (DTypeBits(format.scale_dtype) != 8) {
      return Status::BadInput(fmt::format("{} scales cannot be swizzled; one-byte scales are required",
                                          DTypeName(format.scale_dtype)));
    }
    const int64_t needed = geometry.experts * BlockScaleBytes(out.layout, geometry.rows, columns);
    if (out.scales.count() != needed || !out.scales.dense()) {
      return Status::BadInput(fmt::format("swizzled scales have {} bytes; {} without gaps are required",
                                          out.scales.count(), needed));
    }
    return Status::Ok();
  }
  const int rank = out.scales.rank();
  const bool fits = rank >= 2 && rank <= 3 && out.scales.dim(rank - 1) == columns &&
                    out.scales.dim(rank - 2) == geometry.rows &&
                    (rank == 3 ? out.scales.dim(0) : 1) == geometry.experts;
  if (!fits) {
    return Status::BadInput(fmt::format("scales have shape {}; {} rows of {} scales are required",
                                        out.scales.shape().ToString(), geometry.experts * geometry.rows,
                                        columns));
  }
  return Status::Ok();
}

/// Calls f(expert, row) for all valid rows, in a few tasks a thread.
template <typename F>
void ForValidRows(const Executor& executor, const ActivationRows& rows, const Geometry& geometry, F&& f) {
  const int64_t total = geometry.experts * geometry.rows;
  const int64_t tasks = std::min<int64_t>(total, int64_t{4} * executor.num_threads);
  ParallelFor(executor, tasks, [&](int64_t task) {
    for (int64_t index = total * task / tasks; index < total * (task + 1) / tasks; ++index) {
      const int64_t expert = index / geometry.rows;
      const int64_t row = index % geometry.rows;
      if (rows.valid_rows.empty() || row < rows.valid_rows[static_cast<size_t>(expert)]) {
        f(expert, row);
      }
    }
  });
}

/// Largest finite magnitude of the valid rows. As bit patterns, magnitudes have one maximum in whatever order
/// they come.
float FiniteAmax(const Executor& executor, const ActivationFormat& format, const ActivationRows& rows,
                 const Geometry& geometry) {
  std::atomic<uint32_t> largest{0};
  ForValidRows(executor, rows, geometry, [&](int64_t expert, int64_t row) {
    const Source source = SourceOf(format, rows.values.dtype(), RowOf(rows.values, expert, row));
    float buffer[quant_rows::kChunk];
    float amax = 0.0F;
    for (int64_t first = 0; first < geometry.columns; first += quant_rows::kChunk) {
      const int64_t length = std::min(quant_rows::kChunk, geometry.columns - first);
      amax = std::max(amax, RowFiniteAmax(source.Chunk(first, length, buffer), length));
    }
    const uint32_t bits = FloatBits(amax);
    uint32_t seen = largest.load(std::memory_order_relaxed);
    while (bits > seen && !largest.compare_exchange_weak(seen, bits, std::memory_order_relaxed)) {
    }
  });
  return FloatFromBits(largest.load(std::memory_order_relaxed));
}

Result<float> TensorScaleInEffect(const Executor& executor, const ActivationFormat& format,
                                  std::optional<float> static_scale, const ActivationRows& rows) {
  if (!NeedsTensorScale(format)) {
    return 1.0F;
  }
  if (!format.static_tensor_scale) {
    return DynamicTensorScale(format, FiniteAmax(executor, format, rows, Geometry::Of(rows.values)));
  }
  if (!static_scale) {
    return Status::BadInput("the activation format has a static tensor scale, and none was given");
  }
  if (!(*static_scale > 0.0F) || !std::isfinite(*static_scale)) {
    return Status::BadInput(
        fmt::format("tensor scale {} of the activations must be finite and above 0", *static_scale));
  }
  return *static_scale;
}

}  // namespace

Status CheckActivationFormat(const ActivationFormat& format) {
  if (!format.element) {
    return Status::Ok();
  }
  if (!IsElement(*format.element)) {
    return Status::Unsupported(
        fmt::format("activations cannot be quantized to {}; F4, F6, F8, I8 or I4 is required",
                    DTypeName(*format.element)));
  }
  const GroupShape group = format.group;
  const bool grouped = group.row == 1 && group.col > 0;
  if (!(group == kPerTensor) && !(group == kPerRow) && !grouped) {
    return Status::Unsupported(fmt::format(
        "activations cannot share a scale over {}x{} elements; per tensor, per token or 1xG is required",
        group.row, group.col));
  }
  if (grouped && group.col * DTypeBits(*format.element) % 8 != 0) {
    return Status::Unsupported(fmt::format("groups of {} {} elements do not fill whole bytes", group.col,
                                           DTypeName(*format.element)));
  }
  const DType scale = format.scale_dtype;
  if (!IsPlainFloat(scale) && scale != DType::kF8E4M3 && scale != DType::kF8E8M0) {
    return Status::Unsupported(
        fmt::format("activation scales cannot be {}; F32, BF16, F16, F8_E4M3 or F8_E8M0 is "
                    "required",
                    DTypeName(scale)));
  }
  if (group == kPerTensor && scale != DType::kF32) {
    return Status::Unsupported(fmt::format("a scale per tensor is F32, not {}", DTypeName(scale)));
  }
  if (format.static_tensor_scale && !NeedsTensorScale(format)) {
    return Status::Unsupported(fmt::format("{} scales per {} elements have no tensor scale above them",
                                           DTypeName(scale), group.col));
  }
  return Status::Ok();
}

int64_t GroupColumns(const ActivationFormat& format, int64_t columns) {
  return format.group.col > 0 ? format.group.col : std::max<int64_t>(columns, 1);
}

int64_t ScalesPerRow(const ActivationFormat& format, int64_t columns) {
  return IsPerTensor(format) ? 0 : format.group.col > 0 ? CeilDiv(columns, format.group.col) : 1;
}

int64_t CodeRowBytes(const ActivationFormat& format, int64_t columns) {
  return PackedBytes(*format.element, columns);
}

int64_t ScaleRowBytes(const ActivationFormat& format, int64_t columns) {
  return ScalesPerRow(format, columns) * DTypeBits(format.scale_dtype) / 8;
}

float DynamicTensorScale(const ActivationFormat& format, float finite_amax) {
  if (IsPerTensor(format)) {
    return RealScale(format.rule, quant_rows::DivisorOf(format), finite_amax);
  }
  if (!IsTwoLevel(format)) {
    return 1.0F;
  }
  const float scale = finite_amax / (quant_rows::DivisorOf(format) * E4m3fn::Largest());
  return scale > 0.0F ? scale : 1.0F;
}

GroupScale ScaleOfGroup(const ActivationFormat& format, float tensor_scale, float amax) {
  GroupScale group{.scale = tensor_scale, .multiplier = tensor_scale};
  if (!IsPerTensor(format)) {
    std::byte stored[8] = {};
    group.multiplier = quant_rows::StoreGroupScale(format, tensor_scale, amax, stored);
    group.scale = IsTwoLevel(format) ? DecodeE4m3(static_cast<uint8_t>(stored[0])) : group.multiplier;
  }
  group.step = quant_rows::StepOfGroup(format, group.multiplier, amax);
  return group;
}

void QuantizeRow(const ActivationFormat& format, float tensor_scale, const float* x, int64_t count,
                 std::byte* codes, std::byte* scales) {
  const Source source = SourceOf(format, DType::kF32, reinterpret_cast<const std::byte*>(x));
  // A token of no elements still has its scale, so that rows of scales are never left unwritten.
  if (count == 0 && format.group == kPerRow) {
    quant_rows::StoreGroupScale(format, tensor_scale, 0.0F, scales);
  }
  quant_rows::Quantize(format, tensor_scale, source, count, codes, ScaleTarget{.base = scales});
}

void DequantizeRow(const ActivationFormat& format, float tensor_scale, const std::byte* codes,
                   const std::byte* scales, int64_t count, float* out) {
  DecodeRow(*format.element, codes, 0, count, out);
  const int64_t group = GroupColumns(format, count);
  const int64_t scale_bytes = DTypeBits(format.scale_dtype) / 8;
  for (int64_t first = 0, index = 0; first < count; first += group, ++index) {
    const float scale = IsPerTensor(format)
                            ? tensor_scale
                            : quant_rows::LoadGroupScale(format, tensor_scale, scales + index * scale_bytes);
    for (int64_t i = first; i < std::min(first + group, count); ++i) {
      out[i] *= scale;
    }
  }
}

void FakeQuantizeRow(const ActivationFormat& format, float tensor_scale, float* x, int64_t count) {
  if (!format.quantized()) {
    return;
  }
  const auto* bytes = reinterpret_cast<const std::byte*>(x);
  quant_rows::FakeQuantize(format, tensor_scale, SourceOf(format, DType::kF32, bytes), count, x);
}

Result<float> QuantizeInput(const Executor& executor, const ActivationFormat& format,
                            std::optional<float> static_scale, const ActivationRows& rows,
                            const QuantizedRows& out) {
  if (!format.element) {
    return Status::BadInput("the activation format does not quantize");
  }
  FMOE_RETURN_IF_ERROR(CheckActivationFormat(format));
  FMOE_RETURN_IF_ERROR(CheckRows(rows));
  if (out.codes.dtype() != *format.element || !(out.codes.shape() == rows.values.shape())) {
    return Status::BadInput(fmt::format("codes are {} {}; {} {} is required", DTypeName(out.codes.dtype()),
                                        out.codes.shape().ToString(), DTypeName(*format.element),
                                        rows.values.shape().ToString()));
  }
  const Geometry geometry = Geometry::Of(rows.values);
  FMOE_RETURN_IF_ERROR(CheckScales(format, geometry, out));
  FMOE_ASSIGN_OR_RETURN(const float tensor_scale, TensorScaleInEffect(executor, format, static_scale, rows));

  const int64_t scale_columns = ScalesPerRow(format, geometry.columns);
  const bool swizzled = out.layout != BlockScaleLayout::kLinear && !IsPerTensor(format);
  const int64_t expert_bytes = swizzled ? BlockScaleBytes(out.layout, geometry.rows, scale_columns) : 0;
  if (swizzled) {
    std::memset(out.scales.data(), 0, static_cast<size_t>(geometry.experts * expert_bytes));
  }
  ForValidRows(executor, rows, geometry, [&](int64_t expert, int64_t row) {
    const Source source = SourceOf(format, rows.values.dtype(), RowOf(rows.values, expert, row));
    ScaleTarget target{.layout = out.layout, .columns = scale_columns};
    if (swizzled) {
      target.base = out.scales.data() + expert * expert_bytes;
      target.row = row;
    } else if (!IsPerTensor(format)) {
      target.base = RowOf(out.scales, expert, row);
    }
    quant_rows::Quantize(format, tensor_scale, source, geometry.columns, RowOf(out.codes, expert, row),
                         target);
  });
  return tensor_scale;
}

}  // namespace fusedmoe
