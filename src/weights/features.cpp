#include "weights/features.hpp"

#include <algorithm>

#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

MatrixFeatures FeaturesOf(const CanonicalMatrix& matrix) {
  MatrixFeatures features;
  if (!matrix.empty()) {
    features.stored = matrix.stored;
  }
  features.zero_point = !matrix.zero_point.empty();
  if (features.zero_point) {
    features.zero_point_dtype = matrix.format.zero_point_dtype;
  }
  features.group_index = !matrix.group_index.empty();
  features.pre_quant_scale = !matrix.pre_quant_scale.empty();
  features.bias = !matrix.bias.empty();
  if (!matrix.block_scale.empty()) {
    features.scale_dtype = matrix.format.block_scale_dtype;
  }
  return features;
}

Result<Tensor> Filled(int64_t count, float value) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kF32, Shape{count}));
  std::fill_n(tensor.mutable_view().as<float>(), count, value);
  return tensor;
}

Result<Tensor> MiddleCodes(const CanonicalMatrix& matrix) {
  FMOE_ASSIGN_OR_RETURN(Tensor zeros, Tensor::Allocate(DType::kU8, matrix.block_scale.shape()));
  std::fill_n(zeros.mutable_view().as<uint8_t>(), zeros.view().count(),
              static_cast<uint8_t>(matrix.format.implied_zero()));
  return zeros;
}

Result<Tensor> GroupsInOrder(const CanonicalMatrix& matrix) {
  FMOE_ASSIGN_OR_RETURN(Tensor index, Tensor::Allocate(DType::kI32, Shape{matrix.cols}));
  auto* groups = index.mutable_view().as<int32_t>();
  const int64_t group = matrix.format.block.col;
  for (int64_t col = 0; col < matrix.cols; ++col) {
    groups[col] = group <= 0 ? 0 : static_cast<int32_t>((matrix.scale_col_offset + col) / group);
  }
  return index;
}

Result<Tensor> InF32(const Tensor& numbers) {
  FMOE_ASSIGN_OR_RETURN(Tensor wide, Tensor::Allocate(DType::kF32, numbers.shape()));
  const TensorView from = numbers.view();
  for (int64_t row = 0; row < from.dim(0); ++row) {
    DecodeRow(from.dtype(), from.data() + row * from.stride_bytes(0), 0, from.dim(1),
              wide.mutable_view().as<float>() + row * from.dim(1));
  }
  return wide;
}

Status AddFeatures(const MatrixFeatures& features, CanonicalMatrix& matrix) {
  const DType element = matrix.format.element;
  const bool has_scales = !matrix.block_scale.empty();
  if (!(features.stored == matrix.stored)) {
    matrix.stored = {};
  }
  if (features.zero_point && matrix.zero_point.empty() && has_scales &&
      (element == DType::kU4 || element == DType::kU8)) {
    FMOE_ASSIGN_OR_RETURN(matrix.zero_point, MiddleCodes(matrix));
    matrix.format.zero_point_dtype = DType::kU8;
    matrix.format.super_cols = 0;  // these are no minima
    matrix.super_scale = {};
    matrix.stored = {};
  }
  if (!matrix.zero_point.empty() && matrix.format.zero_point_dtype != features.zero_point_dtype) {
    FMOE_ASSIGN_OR_RETURN(matrix.zero_point, InF32(matrix.zero_point));
    matrix.format.zero_point_dtype = DType::kF32;
  }
  if (features.group_index && matrix.group_index.empty() && has_scales) {
    FMOE_ASSIGN_OR_RETURN(matrix.group_index, GroupsInOrder(matrix));
  }
  if (features.pre_quant_scale && matrix.pre_quant_scale.empty()) {
    FMOE_ASSIGN_OR_RETURN(matrix.pre_quant_scale, Filled(matrix.cols, 1.0F));
  }
  if (features.bias && matrix.bias.empty()) {
    FMOE_ASSIGN_OR_RETURN(matrix.bias, Filled(matrix.rows, 0.0F));
  }
  const DType scales = matrix.format.block_scale_dtype;
  if (has_scales && features.scale_dtype == DType::kF32 && IsPlainFloat(scales) && scales != DType::kF32) {
    FMOE_ASSIGN_OR_RETURN(matrix.block_scale, InF32(matrix.block_scale));
    matrix.format.block_scale_dtype = DType::kF32;
  }
  return Status::Ok();
}

}  // namespace

void MatrixFeatures::Join(const MatrixFeatures& other) {
  zero_point = zero_point || other.zero_point;
  group_index = group_index || other.group_index;
  pre_quant_scale = pre_quant_scale || other.pre_quant_scale;
  bias = bias || other.bias;
  if (other.zero_point_dtype == DType::kF32) {
    zero_point_dtype = DType::kF32;
  }
  if (!stored) {
    stored = other.stored;
  } else if (other.stored && other.stored != stored) {
    stored = StoredIntegers();
  }
  if (!scale_dtype) {
    scale_dtype = other.scale_dtype;
  } else if (other.scale_dtype && other.scale_dtype != scale_dtype) {
    scale_dtype = DType::kF32;
  }
}

void ExpertFeatures::Join(const ExpertFeatures& other) {
  gate_up.Join(other.gate_up);
  down.Join(other.down);
}

ExpertFeatures FeaturesOf(const CanonicalExpert& expert) {
  ExpertFeatures features;
  features.gate_up = FeaturesOf(expert.gate);
  features.gate_up.Join(FeaturesOf(expert.up));
  features.down = FeaturesOf(expert.down);
  return features;
}

Status AddFeatures(const ExpertFeatures& features, CanonicalExpert& expert) {
  if (!expert.gate.empty()) {
    FMOE_RETURN_IF_ERROR(AddFeatures(features.gate_up, expert.gate));
  }
  FMOE_RETURN_IF_ERROR(AddFeatures(features.gate_up, expert.up));
  return AddFeatures(features.down, expert.down);
}

}  // namespace fusedmoe
