#include "jobs/prepare/canonical_tensors.hpp"

#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "weights/canonical.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::prepared {
namespace {

using Matrix = CanonicalMatrix;

/// What stands beside the codes.
constexpr std::span<const CanonicalTensor> kTensors = std::span(kCanonicalTensors).subspan(1);

constexpr std::pair<const char*, std::optional<float> Matrix::*> kScalars[] = {
    {"tensor_scale", &Matrix::tensor_scale}, {"input_tensor_scale", &Matrix::input_tensor_scale}};

template <typename Value>
NamedTensor Vector(const std::string& name, DType dtype, std::initializer_list<Value> values) {
  Result<Tensor> tensor = Tensor::Allocate(dtype, Shape{static_cast<int64_t>(values.size())});
  if (!tensor.ok()) {
    return {name, {}};
  }
  std::copy(values.begin(), values.end(), tensor->mutable_view().template as<Value>());
  return {name, *std::move(tensor)};
}

}  // namespace

NamedTensor AsStored(const std::string& name, const Tensor& tensor) {
  const DType dtype = tensor.dtype();
  if (DTypeBits(dtype) >= 8) {
    return {name, tensor};
  }
  std::vector<int64_t> dims(tensor.shape().dims().begin(), tensor.shape().dims().end());
  dims.back() = PackedBytes(dtype, dims.back());
  TensorView view(tensor.view().data(), DType::kU8, Shape(std::span<const int64_t>(dims)));
  for (int axis = 0; axis + 1 < view.rank(); ++axis) {
    view.set_stride_bytes(axis, tensor.view().stride_bytes(axis));
  }
  return {name, Tensor::Borrow(view, tensor.owner())};
}

Result<Tensor> AsType(const std::string& name, const Tensor& stored, DType dtype, const Shape& shape) {
  std::optional<int64_t> bytes = PackedBytes(dtype, shape[shape.rank() - 1]);
  for (int axis = 0; bytes && axis + 1 < shape.rank(); ++axis) {
    bytes = CheckedMultiply(*bytes, shape[axis]);
  }
  if (!bytes || *bytes != stored.view().total_bytes()) {
    return Status::BadInput(fmt::format("{} bytes are there, {} {} has {}", stored.view().total_bytes(),
                                        DTypeName(dtype), shape.ToString(), bytes.value_or(-1)))
        .WithTensor(name);
  }
  return Tensor::Borrow(TensorView(stored.view().data(), dtype, shape), stored.owner());
}

void AppendMatrix(const std::string& prefix, const CanonicalMatrix& matrix, std::vector<NamedTensor>& out) {
  out.push_back(AsStored(prefix + ".codes", matrix.codes));
  for (const auto& [name, member] : kTensors) {
    if (!(matrix.*member).empty()) {
      out.push_back(AsStored(fmt::format("{}.{}", prefix, name), matrix.*member));
    }
  }
  for (const auto& [name, member] : kScalars) {
    if (matrix.*member) {
      out.push_back(Vector<float>(prefix + "." + name, DType::kF32, {*(matrix.*member)}));
    }
  }
  if (matrix.scale_row_offset != 0 || matrix.scale_col_offset != 0) {
    out.push_back(Vector<int64_t>(prefix + ".scale_offset", DType::kI64,
                                  {matrix.scale_row_offset, matrix.scale_col_offset}));
  }
}

Result<CanonicalMatrix> TakeMatrix(const SafetensorsFile& file, const std::string& prefix, int64_t rows,
                                   int64_t cols, const WeightFormat& format) {
  CanonicalMatrix matrix;
  matrix.rows = rows;
  matrix.cols = cols;
  matrix.format = format;
  const Tensor* codes = file.Find(prefix + ".codes");
  if (codes == nullptr) {
    return Status::BadInput("the tensor is missing").WithTensor(prefix + ".codes");
  }
  FMOE_ASSIGN_OR_RETURN(matrix.codes, AsType(prefix + ".codes", *codes, format.element, Shape{rows, cols}));
  for (const auto& [name, member] : kTensors) {
    if (const Tensor* tensor = file.Find(fmt::format("{}.{}", prefix, name)); tensor != nullptr) {
      matrix.*member = *tensor;
    }
  }
  for (const auto& [name, member] : kScalars) {
    if (const Tensor* tensor = file.Find(prefix + "." + name); tensor != nullptr) {
      if (tensor->dtype() != DType::kF32 || tensor->view().count() != 1) {
        return Status::BadInput(fmt::format("is {} {}; F32 [1] is required", DTypeName(tensor->dtype()),
                                            tensor->shape().ToString()))
            .WithTensor(prefix + "." + name);
      }
      float value = 0.0F;
      std::memcpy(&value, tensor->view().data(), sizeof(value));
      matrix.*member = value;
    }
  }
  if (const Tensor* offset = file.Find(prefix + ".scale_offset"); offset != nullptr) {
    if (offset->dtype() != DType::kI64 || offset->view().count() != 2) {
      return Status::BadInput(fmt::format("is {} {}; I64 [2] (row and column offset) is required",
                                          DTypeName(offset->dtype()), offset->shape().ToString()))
          .WithTensor(prefix + ".scale_offset");
    }
    int64_t values[2];
    std::memcpy(values, offset->view().data(), sizeof(values));
    matrix.scale_row_offset = values[0];
    matrix.scale_col_offset = values[1];
  }
  if (Status status = ValidateCanonical(matrix); !status.ok()) {
    return std::move(status).WithTensor(prefix);
  }
  return matrix;
}

}  // namespace fusedmoe::prepared
