#pragma once

#include <cstdint>

#include "weights/fragment.hpp"

/// Groups whose zero point is any number, or which have too few columns for scales beside the sums of a lane,
/// as the fragment layout holds them (FragmentScale::kOffset):
///
///     weight = scale * (code - zero)                     code 0 to 15 or 255, in fp32
///            = scale * (moved - middle) + offset         moved = code + step, middle 8 or 128
///                                                        offset = scale * (middle - step - zero)
///
/// with scale and offset in BF16.
///
/// The step brings zero as near to the middle as the codes of the group leave room for: 5- and 6-bit codes in
/// bytes all of it, so that |offset| is at most half a scale. Both multiply-adds of a kernel then round to
/// what the weight is worth, not to what its minimum is.
namespace fusedmoe {

/// Relative to the weights of a group, root mean square: scale, offset and product are rounded to BF16, each
/// by 2^-9 of itself in the mean (2^-8 at most). Offset beside weights is largest where all 16 codes are used
/// and zero lies between the lowest and the middle: sqrt(scale^2 + offset^2 + product^2) is 1.45 then.
inline constexpr double kOffsetError = 1.7320508075688772 * 0x1p-9;

/// Moves the `count` codes of a group (a row's, as staged: nibbles, or bytes in two's complement) and gives
/// the word that is stored for it. `zero`: in codes from 0 on.
uint32_t MoveToMiddle(FragmentCode code, float scale, float zero, int64_t count, uint8_t* codes);

}  // namespace fusedmoe
