#include "weights/steps/fused_expert.hpp"

#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "weights/steps/layout_shapes.hpp"

namespace fusedmoe {
namespace {

/// The first block row and column of a slice; whole blocks only.
Status FirstBlock(const CanonicalMatrix& matrix, int64_t* row, int64_t* col) {
  const GroupShape& block = matrix.format.block;
  *row = block.row < 0 ? 0 : matrix.scale_row_offset / block.row;
  *col = block.col < 0 ? 0 : matrix.scale_col_offset / block.col;
  if ((block.row > 0 && matrix.scale_row_offset % block.row != 0) ||
      (block.col > 0 && matrix.scale_col_offset % block.col != 0)) {
    return Status::Unsupported(fmt::format(
        "the slice begins at row {} and column {} of blocks of {} x {}; kernels want whole blocks",
        matrix.scale_row_offset, matrix.scale_col_offset, block.row, block.col));
  }
  return Status::Ok();
}

void CopyMatrix(TensorView source, int64_t row, int64_t col_bytes, int64_t rows, int64_t bytes,
                std::byte* out) {
  for (int64_t index = 0; index < rows; ++index) {
    std::memcpy(out + index * bytes, source.data() + (row + index) * source.stride_bytes(0) + col_bytes,
                static_cast<size_t>(bytes));
  }
}

/// The projections whose tensors stand one above the other under this name.
std::vector<const CanonicalMatrix*> PartsUnder(const CanonicalExpert& expert, std::string_view tensor) {
  if (tensor.starts_with("down") || tensor == "mid_tensor_scale") {
    return {&expert.down};
  }
  return expert.gate.empty() ? std::vector<const CanonicalMatrix*>{&expert.up}
                             : std::vector<const CanonicalMatrix*>{&expert.gate, &expert.up};
}

/// What of a matrix stands under this name of a fused tensor.
std::string_view FieldOf(std::string_view tensor) {
  if (tensor == "input_tensor_scale" || tensor == "mid_tensor_scale") {
    return "input_tensor_scale";
  }
  tensor.remove_prefix(tensor.starts_with("down") ? 4 : 7);  // "down", "gate_up"
  return tensor.empty() ? tensor : tensor.substr(1);
}

const Tensor* TensorOf(const CanonicalMatrix& matrix, std::string_view field) {
  using Matrix = CanonicalMatrix;
  static constexpr std::pair<std::string_view, Tensor Matrix::*> kFields[] = {
      {"", &Matrix::codes},
      {"block_scale", &Matrix::block_scale},
      {"zero_point", &Matrix::zero_point},
      {"channel_scale", &Matrix::channel_scale},
      {"bias", &Matrix::bias},
      {"group_index", &Matrix::group_index}};
  for (const auto& [name, member] : kFields) {
    if (name == field) {
      return &(matrix.*member);
    }
  }
  return nullptr;
}

bool SameBytes(const Tensor& a, const Tensor& b) {
  return a.view().total_bytes() == b.view().total_bytes() &&
         std::memcmp(a.view().data(), b.view().data(), static_cast<size_t>(a.view().total_bytes())) == 0;
}

/// What no fused tensor can say.
Status CheckProjection(const std::string& name, std::initializer_list<const CanonicalMatrix*> parts) {
  const CanonicalMatrix& first = **parts.begin();
  for (const CanonicalMatrix* part : parts) {
    if (!part->pre_quant_scale.empty()) {
      return Status::Unsupported(
          fmt::format("{} carries smoothing factors, which no prepared layout has a place for", name));
    }
    const bool alike = part->rows == first.rows && part->cols == first.cols && part->format == first.format &&
                       part->zero_point.empty() == first.zero_point.empty() &&
                       part->bias.empty() == first.bias.empty() &&
                       part->input_tensor_scale.has_value() == first.input_tensor_scale.has_value() &&
                       part->group_index.empty() == first.group_index.empty();
    if (!alike) {
      return Status::Unsupported(
          "gate and up differ in size, format, zero points, bias, stored input scale or activation order; a "
          "fused layout needs them alike");
    }
    if (!part->group_index.empty() && !SameBytes(part->group_index, first.group_index)) {
      return Status::Unsupported(
          "gate and up have activation orders of their own; kernels read both by one list of groups");
    }
    if (!part->group_index.empty() && part->scale_col_offset != 0) {
      return Status::Unsupported("a slice of the inputs with an activation order has no prepared layout");
    }
  }
  return Status::Ok();
}

Tensor RowsOf(const Tensor* tensor, int64_t part, int64_t parts) {
  if (tensor == nullptr) {
    return {};
  }
  const int64_t rows = tensor->dim(0) / parts;
  return Tensor::Borrow(tensor->view().Rows(part * rows, rows), tensor->owner());
}

Tensor VectorOf(const Tensor* tensor, int64_t part, int64_t parts) {
  const Tensor rows = RowsOf(tensor, part, parts);
  return rows.empty()
             ? rows
             : Tensor::Borrow(TensorView(rows.view().data(), DType::kF32, Shape{rows.dim(0)}), rows.owner());
}

std::optional<float> ScalarOf(const Tensor* tensor, int64_t part) {
  if (tensor == nullptr) {
    return std::nullopt;
  }
  return tensor->view().as<float>()[std::min(part, tensor->view().count() - 1)];
}

CanonicalMatrix SplitMatrix(const FusedShape& shape, const ExpertTensors& tensors, const std::string& name,
                            const char* input_scale, int64_t part, int64_t parts) {
  const bool down = name == "down";
  CanonicalMatrix matrix;
  matrix.rows = down ? shape.hidden : shape.intermediate;
  matrix.cols = down ? shape.intermediate : shape.hidden;
  matrix.format = shape.format;
  matrix.format.super_cols = 0;  // fused tensors hold the numbers alone
  matrix.codes = RowsOf(tensors.Find(name), part, parts);
  matrix.block_scale = RowsOf(tensors.Find(name + "_block_scale"), part, parts);
  matrix.zero_point = RowsOf(tensors.Find(name + "_zero_point"), part, parts);
  matrix.channel_scale = VectorOf(tensors.Find(name + "_channel_scale"), part, parts);
  matrix.bias = VectorOf(tensors.Find(name + "_bias"), part, parts);
  if (const Tensor* groups = tensors.Find(name + "_group_index"); groups != nullptr) {
    matrix.group_index = Tensor::Borrow(
        TensorView(groups->view().data(), DType::kI32, Shape{groups->view().count()}), groups->owner());
  }
  matrix.tensor_scale = ScalarOf(tensors.Find(name + "_tensor_scale"), part);
  matrix.input_tensor_scale = ScalarOf(tensors.Find(input_scale), part);
  return matrix;
}

}  // namespace

Status CheckFusable(const CanonicalExpert& expert) {
  if (expert.gate.empty()) {
    FMOE_RETURN_IF_ERROR(CheckProjection("gate_up", {&expert.up}));
  } else {
    FMOE_RETURN_IF_ERROR(CheckProjection("gate_up", {&expert.gate, &expert.up}));
  }
  return CheckProjection("down", {&expert.down});
}

Status FuseTensor(const CanonicalExpert& expert, const TensorPlan& plan, std::byte* out) {
  const std::string_view field = FieldOf(plan.name);
  const std::vector<const CanonicalMatrix*> parts = PartsUnder(expert, plan.name);
  const int64_t bytes = plan.bytes() / static_cast<int64_t>(parts.size());
  for (const CanonicalMatrix* part : parts) {
    if (field == "tensor_scale" || field == "input_tensor_scale") {
      const float value =
          (field == "tensor_scale" ? part->tensor_scale : part->input_tensor_scale).value_or(1.0F);
      std::memcpy(out, &value, sizeof(value));
      out += sizeof(value);
      continue;
    }
    const Tensor* tensor = TensorOf(*part, field);
    if (tensor == nullptr || tensor->empty() || tensor->dtype() != plan.dtype) {
      return Status::BadInput(fmt::format("{} is missing, {} is required", plan.name, DTypeName(plan.dtype)))
          .WithTensor(plan.name);
    }
    if (field == "group_index") {  // one for both
      std::memcpy(out, tensor->view().data(), static_cast<size_t>(plan.bytes()));
      return Status::Ok();
    }
    const int64_t columns = plan.shape[1];
    const int64_t rows = plan.shape[0] / static_cast<int64_t>(parts.size());
    if (field == "channel_scale" || field == "bias") {
      std::memcpy(out, tensor->view().data(), static_cast<size_t>(bytes));
    } else {
      int64_t row = 0, col = 0;
      if (!field.empty()) {
        FMOE_RETURN_IF_ERROR(FirstBlock(*part, &row, &col));
      }
      if (tensor->dim(0) < row + rows || tensor->dim(1) < col + columns) {
        return Status::BadInput(fmt::format("{} is {}, {} x {} are required", plan.name,
                                            tensor->shape().ToString(), rows, columns))
            .WithTensor(plan.name);
      }
      CopyMatrix(tensor->view(), row, PackedBytes(plan.dtype, col), rows, PackedBytes(plan.dtype, columns),
                 out);
    }
    out += bytes;
  }
  return Status::Ok();
}

void ReleaseTensor(CanonicalExpert& expert, std::string_view name) {
  for (const CanonicalMatrix* part : PartsUnder(expert, name)) {
    if (const Tensor* tensor = TensorOf(*part, FieldOf(name)); tensor != nullptr) {
      *const_cast<Tensor*>(tensor) = Tensor();
    }
  }
}

FusedShape ShapeOf(const CanonicalExpert& expert) {
  return {expert.up.cols, expert.up.rows, !expert.gate.empty(), expert.up.format};
}

Result<ExpertTensors> FuseExpert(const CanonicalExpert& expert) {
  FMOE_RETURN_IF_ERROR(CheckFusable(expert));
  ExpertTensors fused;
  for (const TensorPlan& plan : FusedTensors(ShapeOf(expert), PartsOf(expert))) {
    FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(plan.dtype, plan.shape));
    FMOE_RETURN_IF_ERROR(FuseTensor(expert, plan, tensor.mutable_view().data()));
    fused.Set(plan.name, std::move(tensor));
  }
  return fused;
}

Result<CanonicalExpert> SplitExpert(const FusedShape& shape, const ExpertTensors& tensors) {
  for (const char* name : {"gate_up", "down"}) {
    const Tensor* codes = tensors.Find(name);
    const bool down = std::string_view(name) == "down";
    const Shape expected = down ? Shape{shape.hidden, shape.intermediate}
                                : Shape{(shape.gated ? 2 : 1) * shape.intermediate, shape.hidden};
    if (codes == nullptr || !(codes->shape() == expected)) {
      return Status::BadInput(fmt::format("{} is {}, {} is required", name,
                                          codes == nullptr ? "missing" : codes->shape().ToString(),
                                          expected.ToString()))
          .WithTensor(name);
    }
  }
  CanonicalExpert expert;
  const int64_t parts = shape.gated ? 2 : 1;
  if (shape.gated) {
    expert.gate = SplitMatrix(shape, tensors, "gate_up", "input_tensor_scale", 0, parts);
  }
  expert.up = SplitMatrix(shape, tensors, "gate_up", "input_tensor_scale", parts - 1, parts);
  expert.down = SplitMatrix(shape, tensors, "down", "mid_tensor_scale", 0, 1);
  return expert;
}

}  // namespace fusedmoe
