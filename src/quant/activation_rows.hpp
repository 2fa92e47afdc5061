#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <fusedmoe/quant.hpp>

#include "numerics/codecs.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_formulas.hpp"
#include "quant/swizzle.hpp"

/// How one row goes through a format, whatever its type and wherever its scales lie. Internal to quant.
namespace fusedmoe::quant_rows {

/// Elements that are worked on at once, on the stack. A multiple of every group of packed elements (8 nibbles
/// or four 6-bit codes fill whole bytes).
inline constexpr int64_t kChunk = 256;

/// A row of F32, BF16 or F16, read as fp32 in chunks.
struct Source {
  DType dtype = DType::kF32;
  const std::byte* row = nullptr;
  bool round_to_bf16 = false;

  const float* Chunk(int64_t first, int64_t count, float* buffer) const {
    DecodeRow(dtype, row, first, count, buffer);
    if (round_to_bf16) {
      for (int64_t i = 0; i < count; ++i) {
        buffer[i] = RoundToBf16(buffer[i]);
      }
    }
    return buffer;
  }

  float Amax(int64_t first, int64_t count) const {
    float buffer[kChunk];
    float amax = 0.0F;
    for (int64_t i = 0; i < count; i += kChunk) {
      const int64_t length = std::min(kChunk, count - i);
      const float part = RowAmax(Chunk(first + i, length, buffer), length);
      amax = FloatBits(part) > FloatBits(amax) ? part : amax;  // NaN above all
    }
    return amax;
  }
};

/// Where the scales of a row go: `base` is the first scale of the matrix.
struct ScaleTarget {
  std::byte* base = nullptr;
  BlockScaleLayout layout = BlockScaleLayout::kLinear;
  int64_t row = 0;
  int64_t row_bytes = 0;  ///< linear only
  int64_t columns = 0;

  std::byte* At(int64_t group, int64_t scale_bytes) const {
    return layout == BlockScaleLayout::kLinear ? base + row * row_bytes + group * scale_bytes
                                               : base + BlockScaleOffset(layout, row, group, columns);
  }
};

ElementRange RangeOfElement(DType element);

/// The divisor of the rule, or the largest value of the element.
float DivisorOf(const ActivationFormat& format);

/// The scale of one group: stores its code at `stored` and returns what a code of the group is multiplied
/// with.
float StoreGroupScale(const ActivationFormat& format, float tensor_scale, float amax, std::byte* stored);
/// The same multiplier from a stored code.
float LoadGroupScale(const ActivationFormat& format, float tensor_scale, const std::byte* stored);

/// How the values of a group become codes. `amax` is read where the rule forms the factor from it instead of
/// from the rounded scale.
EncodeStep StepOfGroup(const ActivationFormat& format, float scale, float amax);

/// Codes of `count` (<= kChunk) values, in place scaled by `step`, into whole bytes at `codes`.
void EncodeChunk(const ActivationFormat& format, const EncodeStep& step, float* values, int64_t count,
                 std::byte* codes);

void Quantize(const ActivationFormat& format, float tensor_scale, const Source& source, int64_t count,
              std::byte* codes, const ScaleTarget& scales);

/// `out` may be the source row itself.
void FakeQuantize(const ActivationFormat& format, float tensor_scale, const Source& source, int64_t count,
                  float* out);

}  // namespace fusedmoe::quant_rows
