#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/checked_math.hpp"
#include "quant/weight_quantizer.hpp"

/// How scales of weights are chosen and stored, by the recipe of each tool (docs/scales.md has the formulas).
namespace fusedmoe::weight_scales {

inline constexpr float kLargestE4m3 = 448.0F;

/// The extremes of a group of weights.
struct Extremes {
  float low = 0.0F, high = 0.0F;  // zero is always inside, as every range of codes holds it
  float amax() const { return std::max(high, -low); }  // in this order +0 of zeros, never -0
  void Take(float value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

/// A matrix that is to be quantized, and what follows from its format and the options.
struct WeightJob {
  TensorView weights;
  int64_t rows, cols, block_rows, block_cols;
  WeightFormat format;
  WeightQuantizerOptions options;
  DType input_dtype;
  bool integer = false;
  float largest_low = 0.0F, largest_high = 0.0F;  // the codes that a value may become, relative to zero
  float divisor = 1.0F;                           // scale = amax / divisor

  int64_t column_blocks() const { return CeilDiv(cols, block_cols); }
};

/// Divisors of integer scales. Dividing by half of the number of codes uses the one code more that negatives
/// have: at 4 bits that is 0.110 instead of 0.117 relative error on normal data (groups of 128); at 8 bits
/// nothing is won.
void SetIntegerRange(WeightJob& job);

/// Stores a scale as element `index` of a row of scales, and gives what the type holds of it. What would
/// become zero becomes the smallest positive code, so that codes exist.
float StoreScale(DType dtype, std::byte* row, int64_t index, float scale);

/// The tensor scale of a two-level float format. compressed-tensors files store its reciprocal and the
/// quantizer there computes with that.
struct TwoLevelScale {
  float tensor_scale = 1.0F;
  std::optional<float> encode_multiplier;
};

TwoLevelScale ChooseTwoLevelScale(const WeightJob& job, float amax);
/// The e4m3 code of one group below it.
uint8_t TwoLevelBlockScale(const WeightJob& job, const TwoLevelScale& level, float amax);

struct IntegerScale {
  float scale;
  float zero;  // of the codes as stored
};

IntegerScale ScaleOfIntegers(const WeightJob& job, const Extremes& extremes);

/// Codes of columns [begin, end): value / scale to nearest even, saturating, above `zero`.
void EncodeIntegers(const WeightJob& job, float* values, int64_t count, float scale, float zero);

}  // namespace fusedmoe::weight_scales
