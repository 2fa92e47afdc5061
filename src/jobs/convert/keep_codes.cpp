#include "jobs/convert/keep_codes.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/matrices/unpack.hpp"
#include "numerics/rows.hpp"
#include "quant/packing.hpp"

namespace fusedmoe::jobs {
namespace {

Result<Tensor> Dense(const Tensor& tensor) {
  if (tensor.empty() || tensor.view().dense()) {
    return tensor;
  }
  FMOE_ASSIGN_OR_RETURN(Tensor copy, Tensor::Allocate(tensor.dtype(), tensor.shape()));
  for (int64_t row = 0; row < tensor.dim(0); ++row) {
    std::memcpy(copy.mutable_view().data() + row * copy.view().stride_bytes(0),
                tensor.view().data() + row * tensor.view().stride_bytes(0),
                static_cast<size_t>(tensor.view().row_bytes()));
  }
  return copy;
}

// Scales in another float type; empty when it does not hold one of them.
Result<Tensor> Recode(const Tensor& tensor, DType dtype) {
  if (tensor.empty() || tensor.dtype() == dtype) {
    return tensor;
  }
  const int64_t count = tensor.shape().count();
  FMOE_ASSIGN_OR_RETURN(Tensor out, Tensor::Allocate(dtype, tensor.shape()));
  std::vector<float> values(static_cast<size_t>(count)), kept(values.size());
  DecodeRow(tensor.dtype(), tensor.view().data(), 0, count, values.data());
  EncodeRow(dtype, values.data(), count, out.mutable_view().data());
  DecodeRow(dtype, out.view().data(), 0, count, kept.data());
  return kept == values ? std::move(out) : Tensor();
}

// Each group becomes several; an absent tensor stays absent.
Result<Tensor> SplitGroups(const Tensor& tensor, int64_t from, int64_t to, int64_t cols) {
  return tensor.empty() || from == to ? Result<Tensor>(tensor)
                                      : checkpoint::RepeatColumns(tensor, from / to, cols / to);
}

int64_t GroupOf(const CanonicalMatrix& matrix) {
  return matrix.format.block.col < 0 ? matrix.cols : matrix.format.block.col;
}

// auto-round gives a group, or a row of INT8, a negative scale to use its code -8 or -128; no other tool
// reads that.
bool HasNegativeScale(const Tensor& scale) {
  if (scale.empty() || DTypeBits(scale.dtype()) < 16) {
    return false;
  }
  const bool of_rows = scale.view().rank() == 1;
  const int64_t lines = of_rows ? 1 : scale.dim(0), count = of_rows ? scale.dim(0) : scale.dim(1);
  std::vector<float> row(static_cast<size_t>(count));
  for (int64_t r = 0; r < lines; ++r) {
    DecodeRow(scale.dtype(), scale.view().data() + r * scale.view().stride_bytes(0), 0, count, row.data());
    if (std::any_of(row.begin(), row.end(), [](float value) { return std::signbit(value); })) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool SameCodes(const WeightFormat& from, const WeightFormat& to) {
  const bool same_element = from.element == to.element ||
                            (from.element == DType::kI4 && to.element == DType::kU4) ||
                            (from.element == DType::kI8 && to.element == DType::kU8);
  const auto is_float = [](const WeightFormat& format) { return DTypeBits(format.block_scale_dtype) >= 16; };
  const bool rows_to_groups = from.has_channel_scale && !from.has_block_scale() && !to.has_channel_scale &&
                              to.block.row == 1 && is_float(to);
  if (!same_element || from.has_tensor_scale != to.has_tensor_scale ||
      (from.has_channel_scale != to.has_channel_scale && !rows_to_groups)) {
    return false;
  }
  if (rows_to_groups) {
    return true;
  }
  const bool scales_fit = !from.has_block_scale() || from.block_scale_dtype == to.block_scale_dtype ||
                          (is_float(from) && is_float(to));
  const bool groups = from.block.row == 1 && to.block.row == 1;
  const bool several = groups && to.block.col > 0 &&
                       (from.block.col < 0 || (from.block.col > 0 && from.block.col % to.block.col == 0));
  return scales_fit && (from.block == to.block || several);
}

bool NeedsZeroPoints(const CanonicalMatrix& matrix) {
  if (matrix.zero_point.empty()) {
    return false;
  }
  if (matrix.format.zero_point_dtype != DType::kU8) {
    return true;
  }
  const TensorView view = matrix.zero_point.view();
  for (int64_t row = 0; row < view.dim(0); ++row) {
    const auto* values = reinterpret_cast<const uint8_t*>(view.data() + row * view.stride_bytes(0));
    for (int64_t group = 0; group < view.dim(1); ++group) {
      if (values[group] != matrix.format.implied_zero()) {
        return true;
      }
    }
  }
  return false;
}

bool NeedsGroupIndex(const CanonicalMatrix& matrix) {
  if (matrix.group_index.empty()) {
    return false;
  }
  const auto* index = matrix.group_index.view().as<int32_t>();
  for (int64_t col = 0; col < matrix.cols; ++col) {
    if (index[col] != col / GroupOf(matrix)) {
      return true;
    }
  }
  return false;
}

Status Complete(const checkpoint::StorageOptions& storage, CanonicalMatrix& matrix) {
  if (storage.zero_points && matrix.zero_point.empty()) {
    FMOE_ASSIGN_OR_RETURN(matrix.zero_point, Tensor::Allocate(DType::kU8, matrix.block_scale.shape()));
    std::memset(matrix.zero_point.mutable_view().data(), matrix.format.implied_zero(),
                static_cast<size_t>(matrix.zero_point.shape().count()));
  }
  if (storage.group_index && matrix.group_index.empty()) {
    FMOE_ASSIGN_OR_RETURN(matrix.group_index, Tensor::Allocate(DType::kI32, {matrix.cols}));
    for (int64_t col = 0; col < matrix.cols; ++col) {
      matrix.group_index.mutable_view().as<int32_t>()[col] = static_cast<int32_t>(col / GroupOf(matrix));
    }
  }
  if (storage.smoothing && matrix.pre_quant_scale.empty()) {
    FMOE_ASSIGN_OR_RETURN(matrix.pre_quant_scale, Tensor::Allocate(DType::kF32, {matrix.cols}));
    std::fill_n(matrix.pre_quant_scale.mutable_view().as<float>(), matrix.cols, 1.0F);
  }
  return Status::Ok();
}

std::string WhyNotKept(const CanonicalMatrix& from, const Target& target) {
  if (from.scale_row_offset != 0 || from.scale_col_offset != 0) {
    return "its blocks start before its first row or column";
  }
  if (!target.negative_scales &&
      (HasNegativeScale(from.block_scale) || HasNegativeScale(from.channel_scale))) {
    return "groups or rows have negative scales, as auto-round and GGUF use them, and the target reads none";
  }
  if (!from.zero_point.empty() && from.format.zero_point_dtype != DType::kU8) {
    return "its zero points are no codes, and no target stores such";
  }
  if (!target.storage.zero_points && NeedsZeroPoints(from)) {
    return "it has zero points, which the target or the first experts lack";
  }
  if (!target.storage.group_index && NeedsGroupIndex(from)) {
    return "it has an activation order, which the target or the first experts lack";
  }
  if (target.format.has_block_scale() && target.format.block.row == 1) {
    const int64_t into = target.format.block.col < 0 ? from.cols : target.format.block.col;
    if (from.cols % into != 0) {
      return fmt::format("{} columns are no multiple of {}", from.cols, into);
    }
    if (GroupOf(from) != into && !from.group_index.empty()) {
      return fmt::format("groups of {} in an activation order do not become groups of {}", GroupOf(from),
                         into);
    }
  }
  return "";
}

Result<CanonicalMatrix> KeepCodes(const CanonicalMatrix& from, const Target& target) {
  CanonicalMatrix to = from;
  to.format = target.format;
  to.stored = {};
  FMOE_ASSIGN_OR_RETURN(to.codes, Dense(from.codes));
  if (from.format.element != target.format.element) {
    FMOE_ASSIGN_OR_RETURN(to.codes, FlipSigns(to.codes.view()));
  }
  int64_t group = GroupOf(from);
  FMOE_ASSIGN_OR_RETURN(to.block_scale, Dense(from.block_scale));
  FMOE_ASSIGN_OR_RETURN(to.zero_point, Dense(from.zero_point));
  if (from.format.has_channel_scale && !target.format.has_channel_scale) {
    const Shape column{from.rows, 1};
    to.block_scale = Tensor::Borrow(TensorView(from.channel_scale.view().data(), DType::kF32, column),
                                    from.channel_scale.owner());
    to.channel_scale = Tensor();
    group = from.cols;
  }
  if (target.format.has_block_scale() && target.format.block.row == 1) {
    const int64_t into = GroupOf(to);
    FMOE_ASSIGN_OR_RETURN(to.block_scale, SplitGroups(to.block_scale, group, into, from.cols));
    FMOE_ASSIGN_OR_RETURN(to.zero_point, SplitGroups(to.zero_point, group, into, from.cols));
    FMOE_ASSIGN_OR_RETURN(to.block_scale, Recode(to.block_scale, target.format.block_scale_dtype));
    if (to.block_scale.empty()) {
      return CanonicalMatrix();
    }
  }
  FMOE_RETURN_IF_ERROR(Complete(target.storage, to));
  return to;
}

std::optional<std::vector<CanonicalMatrix>> MxAsNvfp4(std::span<const CanonicalMatrix* const> matrices,
                                                      const Target& target) {
  constexpr int kBias = 127, kHighest = 8, kLowest = -9;
  const auto used = [](const CanonicalMatrix& matrix, int64_t row, int64_t block) {
    const std::byte* codes =
        matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0) + block * 16;
    return std::any_of(codes, codes + 16,
                       [](std::byte pair) { return (pair & std::byte{0x77}) != std::byte{0}; });
  };
  const auto exponent = [](const CanonicalMatrix& matrix, int64_t row, int64_t block) {
    const TensorView view = matrix.block_scale.view();
    return static_cast<int>(view.data()[row * view.stride_bytes(0) + block]) - kBias;
  };
  int highest = -1000;
  for (const CanonicalMatrix* matrix : matrices) {
    for (int64_t row = 0; row < matrix->rows; ++row) {
      for (int64_t block = 0; block < matrix->cols / 32; ++block) {
        if (used(*matrix, row, block)) {
          highest = std::max(highest, exponent(*matrix, row, block));
        }
      }
    }
  }
  if (highest == -1000) {
    highest = 0;
  }
  const int shift = highest - kHighest;
  std::vector<CanonicalMatrix> result;
  for (const CanonicalMatrix* matrix : matrices) {
    CanonicalMatrix to = *matrix;
    to.format = target.format;
    to.stored = {};
    to.tensor_scale = std::ldexp(1.0F, shift);
    auto codes = Dense(matrix->codes);
    auto scales = Tensor::Allocate(DType::kF8E4M3, {matrix->rows, matrix->cols / 16});
    if (!codes.ok() || !scales.ok() || !(*to.tensor_scale >= 0x1p-126F)) {
      return std::nullopt;
    }
    for (int64_t row = 0; row < matrix->rows; ++row) {
      for (int64_t block = 0; block < matrix->cols / 32; ++block) {
        const int own = used(*matrix, row, block) ? exponent(*matrix, row, block) - shift : 0;
        if (own < kLowest || own > kHighest) {
          return std::nullopt;
        }
        const uint32_t code = EncodeCode(DType::kF8E4M3, std::ldexp(1.0F, own));
        for (int64_t half = 0; half < 2; ++half) {
          StoreCode(DType::kF8E4M3, scales->mutable_view().data() + row * (matrix->cols / 16),
                    2 * block + half, code);
        }
      }
    }
    to.codes = *std::move(codes);
    to.block_scale = *std::move(scales);
    result.push_back(std::move(to));
  }
  return result;
}

}  // namespace fusedmoe::jobs
