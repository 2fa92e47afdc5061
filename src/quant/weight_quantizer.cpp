#include "quant/weight_quantizer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/checked_math.hpp"
#include "numerics/codecs.hpp"
#include "numerics/element_types.hpp"
#include "numerics/integer_codecs.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_rows.hpp"
#include "quant/weight_scales.hpp"

namespace fusedmoe {
namespace {

using namespace weight_scales;  // NOLINT: the formulas of this quantizer

Status LoadRow(const WeightJob& job, int64_t row, float* values) {
  DecodeRow(job.input_dtype, job.weights.data() + row * job.weights.stride_bytes(0), 0, job.cols, values);
  if (!std::isfinite(RowAmax(values, job.cols))) {
    for (int64_t col = 0; col < job.cols; ++col) {
      if (!std::isfinite(values[col])) {
        return Status::BadInput(
            fmt::format("weight[{}, {}] is {}; finite weights are required", row, col, values[col]));
      }
    }
  }
  return Status::Ok();
}

/// Quotients; -0 becomes +0, as the producers of these files have it.
void DivideBy(float* values, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = values[i] / scale + 0.0F;
  }
}

class Quantizer {
 public:
  explicit Quantizer(WeightJob job) : job_(std::move(job)), row_(static_cast<size_t>(job_.cols)) {}

  Result<QuantizedMatrix> Run() {
    FMOE_RETURN_IF_ERROR(Allocate());
    FMOE_RETURN_IF_ERROR(ChooseTensorScale());
    for (int64_t row = 0; row < job_.rows; row += job_.block_rows) {
      FMOE_RETURN_IF_ERROR(QuantizeBand(row, std::min(row + job_.block_rows, job_.rows)));
    }
    return std::move(result_);
  }

 private:
  Status Allocate() {
    const WeightFormat& format = job_.format;
    result_.rows = job_.rows;
    result_.cols = job_.cols;
    result_.format = format;
    FMOE_ASSIGN_OR_RETURN(result_.codes, Tensor::Allocate(format.element, Shape{job_.rows, job_.cols}));
    const Shape blocks{CeilDiv(job_.rows, job_.block_rows), job_.column_blocks()};
    if (format.has_block_scale()) {
      FMOE_ASSIGN_OR_RETURN(result_.block_scale, Tensor::Allocate(format.block_scale_dtype, blocks));
    }
    if (job_.integer && !job_.options.symmetric) {
      FMOE_ASSIGN_OR_RETURN(result_.zero_point, Tensor::Allocate(DType::kU8, blocks));
    }
    if (format.has_channel_scale) {
      FMOE_ASSIGN_OR_RETURN(result_.channel_scale, Tensor::Allocate(DType::kF32, Shape{job_.rows}));
    }
    return Status::Ok();
  }

  Status ChooseTensorScale() {
    if (!job_.format.has_tensor_scale) {
      return Status::Ok();
    }
    float amax = 0.0F;
    if (job_.options.shared_amax) {
      amax = *job_.options.shared_amax;
      if (!(std::isfinite(amax) && amax >= 0.0F)) {
        return Status::Usage(fmt::format("shared_amax is {}; finite and >= 0 is required", amax));
      }
    } else {
      FMOE_ASSIGN_OR_RETURN(amax, WeightAmax(job_.weights));
    }
    if (job_.format.has_block_scale()) {
      two_level_ = ChooseTwoLevelScale(job_, amax);
      tensor_scale_ = two_level_.tensor_scale;
    } else {
      tensor_scale_ = ScaleOf(amax);
    }
    result_.tensor_scale = tensor_scale_;
    return Status::Ok();
  }

  /// 1 where the quotient would be zero, also of the smallest amax: zeros are divided by it.
  float ScaleOf(float amax) const {
    const float scale = amax / job_.divisor;
    return scale > 0.0F ? scale : 1.0F;
  }

  /// Rows [begin, end) share their block scales.
  Status QuantizeBand(int64_t begin, int64_t end) {
    extremes_.assign(static_cast<size_t>(job_.column_blocks()), {});
    for (int64_t row = begin; row < end; ++row) {
      FMOE_RETURN_IF_ERROR(LoadRow(job_, row, row_.data()));
      for (int64_t block = 0; block < job_.column_blocks(); ++block) {
        Extremes& extremes = extremes_[static_cast<size_t>(block)];
        const int64_t stop = std::min((block + 1) * job_.block_cols, job_.cols);
        for (int64_t col = block * job_.block_cols; col < stop; ++col) {
          extremes.Take(row_[static_cast<size_t>(col)]);
        }
      }
    }
    ChooseScales(begin);
    for (int64_t row = begin; row < end; ++row) {
      if (end - begin > 1) {
        FMOE_RETURN_IF_ERROR(LoadRow(job_, row, row_.data()));  // with one row it is still there
      }
      EncodeWeights(row);
    }
    return Status::Ok();
  }

  void ChooseScales(int64_t first_row) {
    const WeightFormat& format = job_.format;
    divisors_.assign(extremes_.size(), tensor_scale_);
    zeros_.assign(extremes_.size(), static_cast<float>(format.implied_zero()));
    if (!format.has_block_scale()) {
      if (format.has_channel_scale) {
        const float amax = extremes_[0].amax();
        const float scale = ScaleOf(amax);
        result_.channel_scale.mutable_view().as<float>()[first_row] = scale;
        divisors_[0] = scale;
      }
      return;
    }
    MutableTensorView scales = result_.block_scale.mutable_view();
    std::byte* scale_row = scales.data() + first_row / job_.block_rows * scales.stride_bytes(0);
    if (format.has_channel_scale) {
      ChooseTwoLevelIntegers(first_row, scale_row);
      return;
    }
    for (size_t block = 0; block < extremes_.size(); ++block) {
      const float amax = extremes_[block].amax();
      const auto index = static_cast<int64_t>(block);
      if (format.block_scale_dtype == DType::kF8E8M0 && format.block.row == 1) {
        const uint8_t code = amax == 0.0F ? uint8_t{127}
                                          : MxScaleCode(*job_.options.mx_scale,
                                                        quant_rows::RangeOfElement(format.element), amax);
        StoreCode(DType::kF8E8M0, scale_row, index, code);
        divisors_[block] = DecodeE8m0(code);
      } else if (format.has_tensor_scale) {
        const uint8_t code = TwoLevelBlockScale(job_, two_level_, amax);
        StoreCode(DType::kF8E4M3, scale_row, index, code);
        divisors_[block] = two_level_.encode_multiplier ? DecodeE4m3(code) / *two_level_.encode_multiplier
                                                        : DecodeE4m3(code) * tensor_scale_;
      } else if (job_.integer) {
        const IntegerScale choice = ScaleOfIntegers(job_, extremes_[block]);
        divisors_[block] = StoreScale(format.block_scale_dtype, scale_row, index, choice.scale);
        zeros_[block] = choice.zero;
        if (!job_.options.symmetric) {
          ChooseZero(first_row, block);
        }
      } else {
        const float scale = ScaleOf(amax);
        divisors_[block] = StoreScale(format.block_scale_dtype, scale_row, index, scale);
      }
    }
  }

  void ChooseZero(int64_t first_row, size_t block) {
    const float largest = job_.format.element == DType::kU4 ? 15.0F : 255.0F;
    const Extremes& extremes = extremes_[block];
    const float zero = extremes.high == extremes.low
                           ? static_cast<float>(job_.format.implied_zero())
                           : RoundHalfEven(std::clamp(-extremes.low / divisors_[block], 0.0F, largest));
    MutableTensorView zeros = result_.zero_point.mutable_view();
    auto* row =
        reinterpret_cast<uint8_t*>(zeros.data() + first_row / job_.block_rows * zeros.stride_bytes(0));
    row[block] = static_cast<uint8_t>(zero);
    zeros_[block] = zero;
  }

  /// e4m3 group scales below an F32 channel scale. They end at 448 / 8, so that int4 * e4m3 stays within
  /// e4m3.
  void ChooseTwoLevelIntegers(int64_t row, std::byte* scale_row) {
    float largest = 0.0F;
    for (const Extremes& extremes : extremes_) {
      largest = std::max(largest, extremes.amax() / job_.divisor);
    }
    float channel = largest / kLargestE4m3 * 8.0F;
    channel = channel > 0.0F ? channel : 1.0F;
    result_.channel_scale.mutable_view().as<float>()[row] = channel;
    for (size_t block = 0; block < extremes_.size(); ++block) {
      const float amax = extremes_[block].amax();
      const float scale = amax == 0.0F ? 1.0F : amax / job_.divisor / channel;
      const float stored =
          StoreScale(job_.format.block_scale_dtype, scale_row, static_cast<int64_t>(block), scale);
      divisors_[block] = stored * channel;
    }
  }

  void EncodeWeights(int64_t row) {
    const DType element = job_.format.element;
    MutableTensorView codes = result_.codes.mutable_view();
    std::byte* out = codes.data() + row * codes.stride_bytes(0);
    for (size_t block = 0; block < extremes_.size(); ++block) {
      const int64_t begin = static_cast<int64_t>(block) * job_.block_cols;
      const int64_t count = std::min(job_.block_cols, job_.cols - begin);
      if (job_.integer) {
        EncodeIntegers(job_, row_.data() + begin, count, divisors_[block], zeros_[block]);
      } else {
        DivideBy(row_.data() + begin, count, divisors_[block]);
      }
    }
    if (element == DType::kF4E2M1 && job_.options.recipe == WeightRecipe::kModelOpt &&
        job_.format.block_scale_dtype == DType::kF8E8M0) {
      for (int64_t col = 0; col < job_.cols; ++col) {
        StoreCode(element, out, col, EncodeE2m1TiesTowardZero(row_[static_cast<size_t>(col)]));
      }
      return;
    }
    EncodeRow(element, row_.data(), job_.cols, out);
  }

  WeightJob job_;
  QuantizedMatrix result_;
  float tensor_scale_ = 1.0F;
  TwoLevelScale two_level_;
  std::vector<float> row_, divisors_, zeros_;
  std::vector<Extremes> extremes_;
};

Status CheckInput(TensorView weights) {
  const bool readable = !weights.empty() && weights.rank() == 2 && weights.dim(0) > 0 && weights.dim(1) > 0 &&
                        IsPlainFloat(weights.dtype());
  return readable
             ? Status::Ok()
             : Status::BadInput(fmt::format("weights are {} {}; F32, F16 or BF16 [rows, cols] is required",
                                            DTypeName(weights.dtype()), weights.shape().ToString()));
}

/// Whether there is a quantizer for the format, and it fits the matrix.
Status CheckFormat(const WeightJob& job) {
  const WeightFormat& format = job.format;
  const DType element = format.element;
  if (!IsNumeric(element) || !(job.integer || IsFloat(element)) || element == DType::kF8E8M0) {
    return Status::Unsupported(fmt::format("weights cannot be quantized to {}", DTypeName(element)));
  }
  const bool block = format.has_block_scale();
  if (block && (format.block.row == 0 || format.block.col == 0)) {
    return Status::Usage(
        fmt::format("a block is {} x {}; sizes of at least 1, or -1 for all rows or columns, are required",
                    format.block.row, format.block.col));
  }
  const int64_t group = format.block.col > 0 ? format.block.col : job.cols;
  if (block && format.block.row == 1 && job.cols % group != 0) {
    return Status::Unsupported(fmt::format(
        "{} columns are no multiple of the group size {}; partial groups are not padded", job.cols, group));
  }
  if (!block && format.has_channel_scale && format.has_tensor_scale) {
    return Status::Unsupported("channel and tensor scales together, without blocks, have no quantizer");
  }
  const bool one_level = format.block_scale_dtype != DType::kF8E4M3;
  if (block && (format.has_tensor_scale || format.has_channel_scale) && one_level) {
    return Status::Unsupported(
        fmt::format("two levels of scales with {} blocks have no quantizer; F8_E4M3 has",
                    DTypeName(format.block_scale_dtype)));
  }
  if (block && format.has_channel_scale && (!job.integer || format.has_tensor_scale)) {
    return Status::Unsupported("channel scales above block scales exist for integer weights only");
  }
  if (!job.options.symmetric && (!format.may_have_zero_point || !job.integer || !block)) {
    return Status::Usage(fmt::format("{} weights cannot have zero points", Describe(format)));
  }
  if (!format.quantized() && (block || format.has_channel_scale || format.has_tensor_scale)) {
    return Status::Usage(fmt::format("{} weights have no scales", DTypeName(element)));
  }
  return Status::Ok();
}

/// The divisor of float scales, and the rule of MX exponents that the options left open.
void SetFloatRange(WeightJob& job) {
  const DType element = job.format.element;
  const WeightRecipe recipe = job.options.recipe;
  job.divisor = job.format.quantized() ? LargestValue(element) : 1.0F;
  if (!job.options.mx_scale) {
    job.options.mx_scale = recipe == WeightRecipe::kModelOpt            ? MxScaleRule::kCeil
                           : element != DType::kF8E4M3                  ? MxScaleRule::kEven
                           : recipe == WeightRecipe::kCompressedTensors ? MxScaleRule::kEvenE2m1
                                                                        : MxScaleRule::kFloor;
  }
}

}  // namespace

Result<float> WeightAmax(TensorView weights) {
  FMOE_RETURN_IF_ERROR(CheckInput(weights));
  WeightJob job{weights, weights.dim(0), weights.dim(1), 1, 1, {}, {}, weights.dtype()};
  std::vector<float> row(static_cast<size_t>(job.cols));
  float amax = 0.0F;
  for (int64_t r = 0; r < job.rows; ++r) {
    FMOE_RETURN_IF_ERROR(LoadRow(job, r, row.data()));
    amax = std::max(amax, RowAmax(row.data(), job.cols));
  }
  return amax;
}

Result<QuantizedMatrix> QuantizeWeights(TensorView weights, const WeightFormat& format,
                                        const WeightQuantizerOptions& options) {
  FMOE_RETURN_IF_ERROR(CheckInput(weights));
  WeightJob job{weights, weights.dim(0), weights.dim(1), 1, weights.dim(1), format, options, weights.dtype()};
  job.integer = IsIntegerCode(format.element);
  FMOE_RETURN_IF_ERROR(CheckFormat(job));
  if (format.has_block_scale()) {
    job.block_rows = format.block.row > 0 ? std::min(format.block.row, job.rows) : job.rows;
    job.block_cols = format.block.col > 0 ? format.block.col : job.cols;
  }
  if (job.integer) {
    SetIntegerRange(job);
  } else {
    SetFloatRange(job);
  }
  return Quantizer(std::move(job)).Run();
}

}  // namespace fusedmoe
