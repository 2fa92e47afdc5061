#include "jobs/convert/transform.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include "checkpoint/matrices/unpack.hpp"
#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "quant/packing.hpp"
#include "weights/dequantize.hpp"
#include "weights/quantize.hpp"

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

// auto-round gives a group a negative scale to use its code -8; no other tool reads that.
bool HasNegativeScale(const Tensor& scale) {
  if (scale.empty() || DTypeBits(scale.dtype()) < 16) {
    return false;
  }
  std::vector<float> row(static_cast<size_t>(scale.dim(1)));
  for (int64_t r = 0; r < scale.dim(0); ++r) {
    DecodeRow(scale.dtype(), scale.view().data() + r * scale.view().stride_bytes(0), 0, scale.dim(1),
              row.data());
    if (std::any_of(row.begin(), row.end(), [](float value) { return std::signbit(value); })) {
      return true;
    }
  }
  return false;
}

// Zero points and indices that were left out on one matrix and stand on another of the checkpoint.
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

// Multiplies inputs by one power of two in the scales instead.
void FoldSmoothing(float factor, CanonicalMatrix& matrix) {
  matrix.pre_quant_scale = Tensor();
  if (matrix.tensor_scale) {
    *matrix.tensor_scale *= factor;
  }
  if (matrix.input_tensor_scale) {
    *matrix.input_tensor_scale /= factor;
  }
}

// Why codes that are the same cannot stay; empty: they can.
std::string WhyNotKept(const CanonicalMatrix& from, const Target& target) {
  if (from.scale_row_offset != 0 || from.scale_col_offset != 0) {
    return "its blocks start before its first row or column";
  }
  if (!target.negative_scales && HasNegativeScale(from.block_scale)) {
    return "groups have negative scales, as auto-round and GGUF use them, and the target reads none";
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

// Empty when the float type of the target's scales does not hold those that are there.
Result<CanonicalMatrix> KeepCodes(const CanonicalMatrix& from, const Target& target) {
  CanonicalMatrix to = from;
  to.format = target.format;
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

// MXFP4 as NVFP4: the tensor scale takes the largest exponent of all blocks down to what e4m3 reaches (2^8),
// each block of 32 becomes two of 16. Powers of two from 2^8 to 2^-9 are e4m3 codes.
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

Result<CanonicalMatrix> Plain(const CanonicalMatrix& from, const Target& target) {
  CanonicalMatrix to;
  to.rows = from.rows;
  to.cols = from.cols;
  to.format = target.format;
  to.bias = from.bias;
  FMOE_ASSIGN_OR_RETURN(to.codes, Tensor::Allocate(target.format.element, {from.rows, from.cols}));
  const RowDecoder decoder(from);
  std::vector<float> row(static_cast<size_t>(from.cols));
  for (int64_t r = 0; r < from.rows; ++r) {
    decoder.Decode(r, 0, from.cols, row.data());
    Smooth(from, row.data());
    EncodeRow(target.format.element, row.data(), from.cols,
              to.codes.mutable_view().data() + r * to.codes.view().stride_bytes(0));
  }
  return to;
}

Result<std::vector<CanonicalMatrix>> Requantize(std::span<const CanonicalMatrix* const> matrices,
                                                const Target& target) {
  std::vector<Tensor> decoded;
  WeightQuantizerOptions quantizer;
  quantizer.recipe = target.recipe;
  float amax = 0;
  for (const CanonicalMatrix* matrix : matrices) {
    FMOE_ASSIGN_OR_RETURN(Tensor values, DequantizeMatrix(*matrix));
    for (int64_t row = 0; row < matrix->rows && !matrix->pre_quant_scale.empty(); ++row) {
      Smooth(*matrix, values.mutable_view().as<float>() + row * matrix->cols);
    }
    FMOE_ASSIGN_OR_RETURN(const float own, WeightAmax(values.view()));
    amax = std::max(amax, own);
    decoded.push_back(std::move(values));
  }
  if (target.format.has_tensor_scale) {
    quantizer.shared_amax = amax;
  }
  std::vector<CanonicalMatrix> result;
  for (size_t index = 0; index < matrices.size(); ++index) {
    FMOE_ASSIGN_OR_RETURN(CanonicalMatrix to,
                          QuantizeMatrix(decoded[index].view(), target.format, quantizer));
    to.bias = matrices[index]->bias;
    to.input_tensor_scale = matrices[index]->input_tensor_scale;
    FMOE_RETURN_IF_ERROR(Complete(target.storage, to));
    result.push_back(std::move(to));
  }
  return result;
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

void Smooth(const CanonicalMatrix& matrix, float* row) {
  if (!matrix.pre_quant_scale.empty()) {
    const auto* factors = matrix.pre_quant_scale.view().as<float>();
    for (int64_t col = 0; col < matrix.cols; ++col) {
      row[col] *= factors[col];
    }
  }
}

std::optional<float> UniformSmoothing(const CanonicalMatrix& matrix) {
  if (matrix.pre_quant_scale.empty()) {
    return 1.0F;
  }
  const auto* factors = matrix.pre_quant_scale.view().as<float>();
  int exponent = 0;
  const bool uniform =
      std::all_of(factors, factors + matrix.cols, [&](float factor) { return factor == factors[0]; }) &&
      std::frexp(factors[0], &exponent) == 0.5F;
  return uniform ? std::optional(factors[0]) : std::nullopt;
}

Result<std::vector<CanonicalMatrix>> Transform(std::span<const CanonicalMatrix* const> given,
                                               const Target& target) {
  std::vector<CanonicalMatrix> result;
  if (!target.format.quantized()) {
    for (const CanonicalMatrix* matrix : given) {
      FMOE_ASSIGN_OR_RETURN(CanonicalMatrix to, Plain(*matrix, target));
      result.push_back(std::move(to));
    }
    return result;
  }
  std::vector<CanonicalMatrix> folded(given.size());
  std::vector<const CanonicalMatrix*> matrices(given.begin(), given.end());
  bool smoothed = false;
  for (size_t index = 0; index < given.size() && !target.storage.smoothing; ++index) {
    const std::optional<float> factor = UniformSmoothing(*given[index]);
    // Without a tensor scale only the factor 1 goes anywhere.
    const bool folds = factor && (*factor == 1.0F || given[index]->tensor_scale);
    smoothed |= !folds;
    if (folds && !given[index]->pre_quant_scale.empty()) {
      folded[index] = *given[index];
      FoldSmoothing(*factor, folded[index]);
      matrices[index] = &folded[index];
    }
  }
  const WeightFormat& format = matrices.front()->format;
  std::string why = smoothed ? "its inputs are multiplied by factors of each channel" : "";
  if (!smoothed && SameCodes(format, target.format)) {
    for (const CanonicalMatrix* matrix : matrices) {
      why = WhyNotKept(*matrix, target);
      if (!why.empty()) {
        break;
      }
      FMOE_ASSIGN_OR_RETURN(CanonicalMatrix to, KeepCodes(*matrix, target));
      if (to.empty()) {
        why = "the target's type of scales does not hold those that are there";
        break;
      }
      result.push_back(std::move(to));
    }
    if (result.size() == matrices.size()) {
      return result;
    }
  }
  const bool mx_to_nvfp4 =
      !smoothed && format.element == DType::kF4E2M1 && format.block_scale_dtype == DType::kF8E8M0 &&
      target.format.element == DType::kF4E2M1 && target.format.block == GroupShape{1, 16};
  if (mx_to_nvfp4) {
    if (auto exact = MxAsNvfp4(matrices, target)) {
      return *std::move(exact);
    }
    why = "its exponents lie more than 17 apart";
  }
  if (smoothed && matrices.front()->input_tensor_scale) {
    return Status::Unsupported(
        "its inputs are multiplied by factors of each channel, which the target has no place for, and its "
        "input scale is that of the product");
  }
  if (!target.allow_lossy) {
    return Status::Unsupported(fmt::format("{} cannot become {} without rounding again{}{}", Describe(format),
                                           Describe(target.format), why.empty() ? "" : ": ", why))
        .WithHint(why.find("negative") == std::string::npos
                      ? "--allow-lossy accepts it and states the error"
                      : "--to bf16 or f32 keeps the values; --allow-lossy rounds again and states the error");
  }
  return Requantize(matrices, target);
}

}  // namespace fusedmoe::jobs
