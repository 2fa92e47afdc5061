#include "weights/steps/fused_expert.hpp"

#include <cstring>

#include <fmt/format.h>

#include "core/checked_math.hpp"

namespace fusedmoe {
namespace {

int64_t Blocks(int64_t size, int64_t block) {
  return block < 0 ? 1 : CeilDiv(size, block);
}

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

/// The part of `pick(matrix)` of each projection, one above the other.
template <typename Pick>
Result<Tensor> Stack(std::initializer_list<const CanonicalMatrix*> parts, bool blocks, Pick pick) {
  const CanonicalMatrix& first = **parts.begin();
  const GroupShape& block = first.format.block;
  const int64_t rows = blocks ? Blocks(first.rows, block.row) : first.rows;
  const int64_t cols = blocks ? Blocks(first.cols, block.col) : first.cols;
  const DType dtype = pick(first).dtype();
  FMOE_ASSIGN_OR_RETURN(Tensor stacked,
                        Tensor::Allocate(dtype, Shape{rows * static_cast<int64_t>(parts.size()), cols}));
  const int64_t bytes = PackedBytes(dtype, cols);
  std::byte* out = stacked.mutable_view().data();
  for (const CanonicalMatrix* part : parts) {
    int64_t row = 0, col = 0;
    if (blocks) {
      FMOE_RETURN_IF_ERROR(FirstBlock(*part, &row, &col));
    }
    CopyMatrix(pick(*part).view(), row, PackedBytes(dtype, col), rows, bytes, out);
    out += rows * bytes;
  }
  return stacked;
}

Result<Tensor> StackVectors(std::initializer_list<const CanonicalMatrix*> parts,
                            Tensor CanonicalMatrix::*member) {
  const int64_t rows = (*parts.begin())->rows;
  FMOE_ASSIGN_OR_RETURN(Tensor stacked,
                        Tensor::Allocate(DType::kF32, Shape{rows * static_cast<int64_t>(parts.size()), 1}));
  auto* out = stacked.mutable_view().as<float>();
  for (const CanonicalMatrix* part : parts) {
    std::memcpy(out, (part->*member).view().data(), static_cast<size_t>(rows) * sizeof(float));
    out += rows;
  }
  return stacked;
}

Result<Tensor> StackScalars(std::initializer_list<const CanonicalMatrix*> parts,
                            std::optional<float> CanonicalMatrix::*member) {
  FMOE_ASSIGN_OR_RETURN(Tensor stacked,
                        Tensor::Allocate(DType::kF32, Shape{1, static_cast<int64_t>(parts.size())}));
  auto* out = stacked.mutable_view().as<float>();
  for (const CanonicalMatrix* part : parts) {
    *out++ = (part->*member).value_or(1.0F);
  }
  return stacked;
}

Status FuseMatrices(const std::string& name, const char* input_scale,
                    std::initializer_list<const CanonicalMatrix*> parts, ExpertTensors& out) {
  const CanonicalMatrix& first = **parts.begin();
  for (const CanonicalMatrix* part : parts) {
    if (!part->group_index.empty() || !part->pre_quant_scale.empty()) {
      return Status::Unsupported(
          fmt::format("{} carries {}, which no prepared layout has a place for", name,
                      part->group_index.empty() ? "smoothing factors" : "an activation order"));
    }
  }
  using Matrix = CanonicalMatrix;
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Stack(parts, false, [](const Matrix& m) { return m.codes; }));
  out.Set(name, std::move(codes));
  if (first.format.has_block_scale()) {
    FMOE_ASSIGN_OR_RETURN(Tensor scale, Stack(parts, true, [](const Matrix& m) { return m.block_scale; }));
    out.Set(name + "_block_scale", std::move(scale));
  }
  if (!first.zero_point.empty()) {
    FMOE_ASSIGN_OR_RETURN(Tensor zeros, Stack(parts, true, [](const Matrix& m) { return m.zero_point; }));
    out.Set(name + "_zero_point", std::move(zeros));
  }
  if (first.format.has_channel_scale) {
    FMOE_ASSIGN_OR_RETURN(Tensor scale, StackVectors(parts, &Matrix::channel_scale));
    out.Set(name + "_channel_scale", std::move(scale));
  }
  if (!first.bias.empty()) {
    FMOE_ASSIGN_OR_RETURN(Tensor bias, StackVectors(parts, &Matrix::bias));
    out.Set(name + "_bias", std::move(bias));
  }
  if (first.format.has_tensor_scale) {
    FMOE_ASSIGN_OR_RETURN(Tensor scale, StackScalars(parts, &Matrix::tensor_scale));
    out.Set(name + "_tensor_scale", std::move(scale));
  }
  if (first.input_tensor_scale) {
    FMOE_ASSIGN_OR_RETURN(Tensor scale, StackScalars(parts, &Matrix::input_tensor_scale));
    out.Set(input_scale, std::move(scale));
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
  matrix.codes = RowsOf(tensors.Find(name), part, parts);
  matrix.block_scale = RowsOf(tensors.Find(name + "_block_scale"), part, parts);
  matrix.zero_point = RowsOf(tensors.Find(name + "_zero_point"), part, parts);
  matrix.channel_scale = VectorOf(tensors.Find(name + "_channel_scale"), part, parts);
  matrix.bias = VectorOf(tensors.Find(name + "_bias"), part, parts);
  matrix.tensor_scale = ScalarOf(tensors.Find(name + "_tensor_scale"), part);
  matrix.input_tensor_scale = ScalarOf(tensors.Find(input_scale), part);
  return matrix;
}

}  // namespace

Result<ExpertTensors> FuseExpert(const CanonicalExpert& expert) {
  ExpertTensors fused;
  if (expert.gate.empty()) {
    FMOE_RETURN_IF_ERROR(FuseMatrices("gate_up", "input_tensor_scale", {&expert.up}, fused));
  } else {
    FMOE_RETURN_IF_ERROR(FuseMatrices("gate_up", "input_tensor_scale", {&expert.gate, &expert.up}, fused));
  }
  FMOE_RETURN_IF_ERROR(FuseMatrices("down", "mid_tensor_scale", {&expert.down}, fused));
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
