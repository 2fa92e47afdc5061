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
#include "quant/activation_formulas.hpp"

namespace fusedmoe {
namespace {

constexpr float kLargestE4m3 = 448.0F;

struct Extremes {
  float low = 0.0F, high = 0.0F;  // zero is always inside, as every range of codes holds it
  float amax() const { return std::max(-low, high); }
  void Take(float value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

struct Job {
  TensorView weights;
  int64_t rows, cols, block_rows, block_cols;
  WeightFormat format;
  WeightQuantizerOptions options;
  DType input_dtype;
  bool integer = false;
  float largest_low = 0.0F, largest_high = 0.0F;  // the codes that a value may become, relative to zero
  float divisor = 1.0F;                           // scale = amax / divisor
};

int64_t ColumnBlocks(const Job& job) {
  return CeilDiv(job.cols, job.block_cols);
}

Status LoadRow(const Job& job, int64_t row, float* values) {
  DecodeRow(job.input_dtype, job.weights.data() + row * job.weights.stride_bytes(0), 0, job.cols, values);
  if (std::isnan(RowAmax(values, job.cols)) || std::isinf(RowAmax(values, job.cols))) {
    for (int64_t col = 0; col < job.cols; ++col) {
      if (!std::isfinite(values[col])) {
        return Status::BadInput(
            fmt::format("weight[{}, {}] is {}; finite weights are required", row, col, values[col]));
      }
    }
  }
  return Status::Ok();
}

ElementRange RangeOfElement(DType element) {
  switch (element) {
    case DType::kF4E2M1:
      return RangeOf<E2m1>();
    case DType::kF6E3M2:
      return RangeOf<E3m2>();
    case DType::kF6E2M3:
      return RangeOf<E2m3>();
    case DType::kF8E5M2:
      return RangeOf<E5m2>();
    default:
      return RangeOf<E4m3fn>();
  }
}

/// A scale as its type holds it; what would become zero becomes the smallest positive code, so that codes
/// exist.
uint32_t ScaleCode(DType dtype, float scale) {
  const uint32_t code = EncodeCode(dtype, scale);
  return DecodeCode(dtype, code) > 0.0F ? code : 1;
}

float StoreScale(DType dtype, std::byte* row, int64_t index, float scale) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(row)[index] = scale;
    return scale;
  }
  const uint32_t code = dtype == DType::kF8E8M0 ? EncodeE8m0Ceil(scale) : ScaleCode(dtype, scale);
  StoreCode(dtype, row, index, code);
  return DecodeCode(dtype, code);
}

/// The tensor scale of a two-level float format. compressed-tensors files store its reciprocal and the
/// quantizer there computes with that.
struct TwoLevelScale {
  float tensor_scale = 1.0F;
  std::optional<float> encode_multiplier;
};

TwoLevelScale ChooseTwoLevelScale(const Job& job, float amax) {
  // Groups of 32 (NVFP4 weights for e4m3 activations): the tensor scale is amax / 448 there, so that block
  // scales end at 448 / 6 and e2m1 * block scale stays within e4m3.
  const float range = job.format.block.col == 32 ? kLargestE4m3 : job.divisor * kLargestE4m3;
  const bool compressed_tensors = job.options.recipe == WeightRecipe::kCompressedTensors;
  const float multiplier = range / amax;
  const float scale = compressed_tensors ? 1.0F / multiplier : amax / range;
  if (!(std::isfinite(scale) && std::isfinite(multiplier) && scale > 0.0F)) {
    return {};  // nothing but zeros, or values near the ends of fp32
  }
  return {scale, compressed_tensors ? std::optional(multiplier) : std::nullopt};
}

uint8_t TwoLevelBlockScale(const Job& job, const TwoLevelScale& level, float amax) {
  if (level.encode_multiplier) {
    float local = amax / job.divisor;
    RoundRow(job.input_dtype, &local, 1);
    const uint8_t code = EncodeE4m3RneSaturating(local * *level.encode_multiplier);
    return code != 0 ? code : EncodeE4m3RneSaturating(0.125F);
  }
  const float scale = amax == 0.0F ? 1.0F : amax / (job.divisor * level.tensor_scale);
  return EncodeE4m3RneSaturating(std::clamp(scale, 0x1p-9F, kLargestE4m3));
}

struct IntegerScale {
  float scale;
  float zero;  // of the codes as stored
};

IntegerScale ScaleOfIntegers(const Job& job, const Extremes& extremes) {
  const auto implied = static_cast<float>(job.format.implied_zero());
  if (job.options.symmetric) {
    const float amax = extremes.amax();
    return {amax == 0.0F ? 1.0F : amax / job.divisor, implied};
  }
  const float codes = job.format.element == DType::kU4 ? 15.0F : 255.0F;
  const float range = extremes.high - extremes.low;
  if (range == 0.0F) {
    return {1.0F, implied};
  }
  return {range / codes, 0.0F};  // the zero follows from the scale as stored
}

/// Codes of columns [begin, end): value / scale to nearest even, saturating, above `zero`.
void EncodeIntegers(const Job& job, float* values, int64_t count, float scale, float zero) {
  const float low = job.options.symmetric ? job.largest_low : -zero;
  const float high =
      job.options.symmetric ? job.largest_high : (job.format.element == DType::kU4 ? 15.0F : 255.0F) - zero;
  for (int64_t i = 0; i < count; ++i) {
    values[i] = RoundHalfEven(std::clamp(values[i] / scale, low, high)) + zero;
  }
}

/// Quotients; -0 becomes +0, as the producers of these files have it.
void DivideBy(float* values, int64_t count, float scale) {
  for (int64_t i = 0; i < count; ++i) {
    values[i] = values[i] / scale + 0.0F;
  }
}

class Quantizer {
 public:
  explicit Quantizer(Job job) : job_(std::move(job)), row_(static_cast<size_t>(job_.cols)) {}

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
    const Shape blocks{CeilDiv(job_.rows, job_.block_rows), ColumnBlocks(job_)};
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
      tensor_scale_ = amax > 0.0F && amax / job_.divisor > 0.0F ? amax / job_.divisor : 1.0F;
    }
    result_.tensor_scale = tensor_scale_;
    return Status::Ok();
  }

  /// Rows [begin, end) share their block scales.
  Status QuantizeBand(int64_t begin, int64_t end) {
    extremes_.assign(static_cast<size_t>(ColumnBlocks(job_)), {});
    for (int64_t row = begin; row < end; ++row) {
      FMOE_RETURN_IF_ERROR(LoadRow(job_, row, row_.data()));
      for (int64_t block = 0; block < ColumnBlocks(job_); ++block) {
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
        const float scale = amax > 0.0F && amax / job_.divisor > 0.0F ? amax / job_.divisor : 1.0F;
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
        const uint8_t code = amax == 0.0F
                                 ? uint8_t{127}
                                 : MxScaleCode(*job_.options.mx_scale, RangeOfElement(format.element), amax);
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
        const float scale = amax == 0.0F ? 1.0F : amax / job_.divisor;
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

  Job job_;
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

/// Divisors of integer scales. Dividing by half of the number of codes uses the one code more that negatives
/// have: at 4 bits that is 0.110 instead of 0.117 relative error on normal data (groups of 128); at 8 bits
/// nothing is won.
void SetIntegerRange(Job& job) {
  const bool four = job.format.element == DType::kU4 || job.format.element == DType::kI4;
  const float codes = four ? 15.0F : 255.0F;
  const bool half = four ? job.options.recipe != WeightRecipe::kModelOpt
                         : job.options.recipe == WeightRecipe::kCompressedTensors;
  job.divisor = half ? codes / 2.0F : (codes - 1.0F) / 2.0F;
  job.largest_high = (codes - 1.0F) / 2.0F;
  job.largest_low = half ? -job.largest_high - 1.0F : -job.largest_high;
}

}  // namespace

Result<float> WeightAmax(TensorView weights) {
  FMOE_RETURN_IF_ERROR(CheckInput(weights));
  Job job{weights, weights.dim(0), weights.dim(1), 1, 1, {}, {}, weights.dtype()};
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
  Job job{weights, weights.dim(0), weights.dim(1), 1, weights.dim(1), format, options, weights.dtype()};
  const DType element = format.element;
  job.integer =
      element == DType::kU4 || element == DType::kI4 || element == DType::kU8 || element == DType::kI8;
  if (!IsNumeric(element) || !(job.integer || IsFloat(element)) || element == DType::kF8E8M0) {
    return Status::Unsupported(fmt::format("weights cannot be quantized to {}", DTypeName(element)));
  }
  if (format.has_block_scale()) {
    job.block_rows = format.block.row > 0 ? std::min(format.block.row, job.rows) : job.rows;
    job.block_cols = format.block.col > 0 ? format.block.col : job.cols;
    if (format.block.row == 1 && job.cols % job.block_cols != 0) {
      return Status::Unsupported(
          fmt::format("{} columns are no multiple of the group size {}; partial groups are not padded",
                      job.cols, job.block_cols));
    }
    if (format.block.row == 0 || format.block.col == 0) {
      return Status::Usage("block sizes of 0 are not possible");
    }
  } else if (format.has_channel_scale && format.has_tensor_scale) {
    return Status::Unsupported("channel and tensor scales together, without blocks, have no quantizer");
  }
  const bool one_level = format.block_scale_dtype != DType::kF8E4M3;
  if (format.has_block_scale() && (format.has_tensor_scale || format.has_channel_scale) && one_level) {
    return Status::Unsupported(
        fmt::format("two levels of scales with {} blocks have no quantizer; F8_E4M3 has",
                    DTypeName(format.block_scale_dtype)));
  }
  if (format.has_block_scale() && format.has_channel_scale && (!job.integer || format.has_tensor_scale)) {
    return Status::Unsupported("channel scales above block scales exist for integer weights only");
  }
  if (!options.symmetric && (!format.may_have_zero_point || !job.integer || !format.has_block_scale())) {
    return Status::Usage(fmt::format("{} weights cannot have zero points", Describe(format)));
  }
  if (job.integer) {
    SetIntegerRange(job);
  } else {
    job.divisor = LargestValue(element);
    if (!job.options.mx_scale) {
      job.options.mx_scale = options.recipe == WeightRecipe::kModelOpt            ? MxScaleRule::kCeil
                             : element != DType::kF8E4M3                          ? MxScaleRule::kEven
                             : options.recipe == WeightRecipe::kCompressedTensors ? MxScaleRule::kEvenE2m1
                                                                                  : MxScaleRule::kFloor;
    }
  }
  if (!format.quantized()) {
    job.divisor = 1.0F;
    if (format.has_block_scale() || format.has_channel_scale || format.has_tensor_scale) {
      return Status::Usage(fmt::format("{} weights have no scales", DTypeName(element)));
    }
  }
  return Quantizer(std::move(job)).Run();
}

}  // namespace fusedmoe
