#include "quant/weight_scales.hpp"

#include <cmath>

#include "numerics/codecs.hpp"
#include "numerics/integer_codecs.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::weight_scales {
namespace {

uint32_t ScaleCode(DType dtype, float scale) {
  const uint32_t code = EncodeCode(dtype, scale);
  return DecodeCode(dtype, code) > 0.0F ? code : 1;
}

}  // namespace

void SetIntegerRange(WeightJob& job) {
  const bool four = job.format.element == DType::kU4 || job.format.element == DType::kI4;
  const float codes = four ? 15.0F : 255.0F;
  const bool half = four ? job.options.recipe != WeightRecipe::kModelOpt
                         : job.options.recipe == WeightRecipe::kCompressedTensors;
  job.divisor = half ? codes / 2.0F : (codes - 1.0F) / 2.0F;
  job.largest_high = (codes - 1.0F) / 2.0F;
  job.largest_low = half ? -job.largest_high - 1.0F : -job.largest_high;
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

TwoLevelScale ChooseTwoLevelScale(const WeightJob& job, float amax) {
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

uint8_t TwoLevelBlockScale(const WeightJob& job, const TwoLevelScale& level, float amax) {
  if (level.encode_multiplier) {
    float local = amax / job.divisor;
    RoundRow(job.input_dtype, &local, 1);
    const uint8_t code = EncodeE4m3RneSaturating(local * *level.encode_multiplier);
    return code != 0 ? code : EncodeE4m3RneSaturating(0.125F);
  }
  const float scale = amax == 0.0F ? 1.0F : amax / (job.divisor * level.tensor_scale);
  return EncodeE4m3RneSaturating(std::clamp(scale, 0x1p-9F, kLargestE4m3));
}

IntegerScale ScaleOfIntegers(const WeightJob& job, const Extremes& extremes) {
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

void EncodeIntegers(const WeightJob& job, float* values, int64_t count, float scale, float zero) {
  const float low = job.options.symmetric ? job.largest_low : -zero;
  const float high =
      job.options.symmetric ? job.largest_high : (job.format.element == DType::kU4 ? 15.0F : 255.0F) - zero;
  for (int64_t i = 0; i < count; ++i) {
    values[i] = RoundHalfEven(std::clamp(values[i] / scale, low, high)) + zero;
  }
}

}  // namespace fusedmoe::weight_scales
