#include "experts/cpu/row_quantizer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_formulas.hpp"
#include "quant/activation_quantizer.hpp"
#include "quant/activation_rows.hpp"

namespace fusedmoe::cpu {
namespace {

/// Groups whose scales are worked out before their values are rounded: independent of each other, so that
/// divisions overlap.
constexpr int64_t kGroupsAtOnce = 64;

std::optional<CodeGrid> GridOf(const ActivationFormat& format) {
  const ActivationRule& rule = format.rule;
  if (!format.element || rule.round_to_bf16_first ||
      (rule.multiply_by_divisor_over_amax && !IsPerTensor(format))) {
    return std::nullopt;
  }
  switch (*format.element) {
    case DType::kI8:
      return rule.int_rounding == IntRounding::kHalfAway   ? kGridInt8Away
             : rule.int_rounding == IntRounding::kTruncate ? kGridInt8Truncate
                                                           : kGridInt8Even;
    case DType::kF4E2M1:
      return rule.ties_toward_zero ? std::nullopt : std::optional(kGridE2m1);
    case DType::kF6E2M3:
      return kGridE2m3;
    case DType::kF6E3M2:
      return kGridE3m2;
    case DType::kF8E4M3:
      return kGridE4m3;
    case DType::kF8E5M2:
      return kGridE5m2;
    default:
      return std::nullopt;
  }
}

/// Columns of a group of a row; the whole row where it is shorter.
int64_t GroupOf(const ActivationFormat& format, int64_t count) {
  return std::min(GroupColumns(format, count), std::max<int64_t>(count, 1));
}

/// use(first, length, largest) for one chunk of kGroupsAtOnce groups after the other, until it says false:
/// `largest` has the bits of each group's largest magnitude, 0 where the tensor has one scale.
template <typename Use>
bool ForEachChunk(const KernelTable& table, const ActivationFormat& format, const float* row, int64_t count,
                  Use&& use) {
  const int64_t group = GroupOf(format, count);
  for (int64_t first = 0; first < count; first += kGroupsAtOnce * group) {
    const int64_t length = std::min(kGroupsAtOnce * group, count - first);
    uint32_t largest[kGroupsAtOnce] = {};
    if (!IsPerTensor(format)) {
      const AmaxArguments amax{row + first, length, group, false, largest};
      table.amax(&amax);
    }
    if (!use(first, length, largest)) {
      return false;
    }
  }
  return true;
}

/// Rounds a row in chunks of groups. `choose(group, scale)` returns what codes of the group are multiplied
/// with in `out`.
template <typename Choose>
void RoundRow(const KernelTable& table, const ActivationFormat& format, float tensor_scale, const float* row,
              int64_t count, float* out, int8_t* codes, Choose&& choose) {
  RoundArguments round{};
  round.group = GroupOf(format, count);
  round.grid = *GridOf(format);
  int64_t index = 0;
  ForEachChunk(table, format, row, count, [&](int64_t first, int64_t length, const uint32_t* largest) {
    RoundStep steps[kGroupsAtOnce];
    for (int64_t g = 0; g * round.group < length; ++g, ++index) {
      const GroupScale scale = ScaleOfGroup(format, tensor_scale, FloatFromBits(largest[g]));
      steps[g] = {scale.step.factor, scale.step.multiply, choose(index, scale)};
    }
    round.values = row + first;
    round.count = length;
    round.steps = steps;
    round.out = out == nullptr ? nullptr : out + first;
    round.codes = codes == nullptr ? nullptr : codes + first;
    table.round(&round);
    return true;
  });
}

/// NVFP4, with scales of groups among the vectors, and by `by_groups(first, end)` where the kernel gives up.
/// False for other formats.
template <typename ByGroups>
bool RoundTwoLevel(const KernelTable& table, const ActivationFormat& format, float tensor_scale,
                   const float* row, int64_t count, float* out, int8_t* codes, float* scales,
                   ByGroups&& by_groups) {
  const ActivationRule& rule = format.rule;
  if (!IsTwoLevel(format) || GridOf(format) != kGridE2m1 || format.group.col != 16 ||
      !(tensor_scale > 0.0F)) {
    return false;
  }
  TwoLevelArguments arguments{};
  arguments.tensor_scale = tensor_scale;
  arguments.divisor = rule.amax_divisor > 0.0F ? rule.amax_divisor : LargestValue(*format.element);
  arguments.bound =
      rule.amax_upper_bound > 0.0F ? rule.amax_upper_bound : std::numeric_limits<float>::infinity();
  arguments.floor = rule.scale_floor;
  arguments.zero_scale = rule.zero_scale;
  arguments.reciprocals = rule.multiply_by_reciprocal;
  for (int64_t first = 0; first < count;) {
    arguments.values = row + first;
    arguments.count = count - first;
    arguments.codes = codes == nullptr ? nullptr : codes + first;
    arguments.scales = scales == nullptr ? nullptr : scales + first / 16;
    arguments.out = out == nullptr ? nullptr : out + first;
    first += table.two_level(&arguments);
    const int64_t end = std::min(first + kTwoLevelBatch, count);
    if (first < end) {
      by_groups(first, end);
      first = end;
    }
  }
  return true;
}

}  // namespace

bool CanRoundRows(const ActivationFormat& format) {
  return GridOf(format).has_value();
}

void RoundRowInPlace(const KernelTable& table, const ActivationFormat& format, float tensor_scale, float* row,
                     int64_t count) {
  if (!CanRoundRows(format)) {
    FakeQuantizeRow(format, tensor_scale, row, count);
    return;
  }
  RoundRow(table, format, tensor_scale, row, count, row, nullptr,
           [](int64_t, const GroupScale& scale) { return scale.multiplier; });
}

void QuantizeRowToCodes(const KernelTable& table, const ActivationFormat& format, float tensor_scale,
                        const float* row, int64_t count, int8_t* codes, float* scales) {
  const float halved = *format.element == DType::kF4E2M1 ? 0.5F : 1.0F;
  const auto by_groups = [&](int64_t first, int64_t end) {
    const int64_t first_group = first / GroupColumns(format, count);
    RoundRow(table, format, tensor_scale, row + first, end - first, nullptr, codes + first,
             [&](int64_t index, const GroupScale& scale) {
               scales[first_group + index] = scale.multiplier * halved;
               return 1.0F;
             });
  };
  if (!RoundTwoLevel(table, format, tensor_scale, row, count, nullptr, codes, scales, by_groups)) {
    by_groups(0, count);
  }
}

void QuantizeRowToBlocks(const KernelTable& table, const ActivationFormat& format, float tensor_scale,
                         const float* row, int64_t count, float* values, float* scales, int64_t stride) {
  const bool apart = format.scale_dtype == DType::kF32;
  const auto by_groups = [&](int64_t first, int64_t end) {
    RoundRow(table, format, tensor_scale, row + first, end - first, values + first, nullptr,
             [&](int64_t index, const GroupScale& scale) {
               if (apart) {
                 scales[index * stride] = scale.multiplier;
               }
               return apart ? 1.0F : scale.scale;
             });
  };
  if (!RoundTwoLevel(table, format, tensor_scale, row, count, values, nullptr, nullptr, by_groups)) {
    by_groups(0, count);
  }
  if (!apart) {
    scales[0] = IsTwoLevel(format) ? tensor_scale : 1.0F;
  }
}

bool PackRoundedRow(const KernelTable& table, const TileKernels& tiles, const ActivationFormat& format,
                    const TilePack& pack, float* scales, int64_t stride) {
  constexpr float kLeast = 0x1p-90F, kMost = 0x1p90F;  // of TilePackRoundedKernel
  const int64_t group = GroupOf(format, pack.count);
  if (GridOf(format) != kGridE4m3 || format.scale_dtype != DType::kF32 || IsPerTensor(format) ||
      format.rule.multiply_by_reciprocal || group % 32 != 0) {
    return false;
  }
  const float amax_divisor = quant_rows::DivisorOf(format);
  TilePack part = pack;
  const auto pack_chunk = [&](int64_t first, int64_t length, const uint32_t* largest) {
    part.values = pack.values + first;
    part.count = length;
    part.k = pack.k + first;
    float divisors[kGroupsAtOnce];
    for (int64_t g = 0; g * group < length; ++g, scales += stride) {
      const float magnitude = FloatFromBits(largest[g]);
      // The formula itself: by ScaleOfGroup a group takes 12 ns more, 2 % of a layer on tiles.
      divisors[g] = *scales = RealScale(format.rule, amax_divisor, magnitude);
      if (!(divisors[g] >= kLeast && divisors[g] <= kMost) || !std::isfinite(magnitude)) {
        return false;
      }
    }
    tiles.pack_rounded(&part, divisors, group);
    return true;
  };
  return ForEachChunk(table, format, pack.values, pack.count, pack_chunk);
}

void DecodeRowToBlocks(const ActivationFormat& format, float tensor_scale, const std::byte* codes,
                       const std::byte* block_scales, int64_t count, float* values, float* scales,
                       int64_t stride) {
  DecodeRow(*format.element, codes, 0, count, values);
  if (format.scale_dtype != DType::kF32) {
    for (int64_t k = 0; k < count; ++k) {
      values[k] *=
          DecodeCode(format.scale_dtype, LoadCode(format.scale_dtype, block_scales, k / format.group.col));
    }
    scales[0] = IsTwoLevel(format) ? tensor_scale : 1.0F;
  } else if (IsPerTensor(format)) {
    scales[0] = tensor_scale;
  } else {
    for (int64_t g = 0; g < std::max<int64_t>(ScalesPerRow(format, count), 1); ++g) {
      std::memcpy(scales + g * stride, block_scales + g * 4, 4);
    }
  }
}

float FiniteAmaxOfRow(const KernelTable& table, const float* row, int64_t count) {
  uint32_t largest = 0;
  const AmaxArguments amax{row, count, std::max<int64_t>(count, 1), true, &largest};
  table.amax(&amax);
  return FloatFromBits(largest);
}

}  // namespace fusedmoe::cpu
