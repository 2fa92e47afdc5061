#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// What Marlin's layout steps do to matrices: the permutations (weights/marlin.hpp) on tensors as they are
/// stored, and what the kernels' decoding asks of scales. Matrices are dense.
namespace fusedmoe {

/// Weights [outputs, inputs] of 4- or 8-bit codes into Marlin's words and back.
Result<Tensor> ToMarlinWeights(TensorView weights, int activation_bits);
Result<Tensor> FromMarlinWeights(TensorView words, DType element, int activation_bits);

/// Scales [outputs, groups] to [groups, outputs] in Marlin's order and back.
Result<Tensor> ToMarlinScales(TensorView scales, bool grouped);
Result<Tensor> FromMarlinScales(TensorView scales, bool grouped);

/// Columns of each four in the order 0, 2, 1, 3, which is its own inverse: the lanes of a word are unpacked
/// two by two.
Result<Tensor> SwapInFours(TensorView scales);

/// U8 zero points [outputs, groups] to Marlin's words and back. `element` kU4 or kU8 tells the bits.
Result<Tensor> ToMarlinZeroPoints(TensorView zero_points, DType element, int activation_bits);
Result<Tensor> FromMarlinZeroPoints(TensorView words, DType element, int activation_bits);

/// The kernels decode e2m1 and e4m3 by moving their bits into the place of a 16-bit float: what comes out
/// counts 2^-bias, and some scale makes up for it.
constexpr int MarlinE2m1Bias(DType activation) {
  return activation == DType::kF16 ? 14 : 126;
}
constexpr int MarlinE4m3Bias(DType activation) {
  return activation == DType::kF16 ? 8 : 120;
}
/// The same for int4 that become e4m3 beside e4m3 activations: magnitudes are the last bits, 2^-9 each.
inline constexpr int kMarlinInt4AsE4m3Bias = 9;

/// F32, F16 or BF16 numbers rounded to `element`, F16 or BF16, then times 2^exponent. kUnsupported where
/// that exceeds the type.
Result<Tensor> MarlinScaleType(TensorView scales, DType element, int exponent);
/// The numbers that such scales stand for, as F32.
Result<Tensor> MarlinScaleValues(TensorView scales, int exponent);

/// Codes U4 for e4m3 activations: a code of at least `zero` (the zero point of its group, 8 where there are
/// none) becomes the distance from it, a smaller one 15 - code, so that negative numbers have the upper bit.
/// `zero_points` U8 [outputs, groups], or empty.
Result<Tensor> ToMarlinFp8Codes(TensorView codes, TensorView zero_points);
Result<Tensor> FromMarlinFp8Codes(TensorView codes, TensorView zero_points);

/// The power of two by which NVFP4 block scales are multiplied before they become S0E5M3, as its exponent:
/// the largest that keeps `largest_scale` * 2^7 within 448 * 2^7; 0 for F16 activations, whose range does
/// not allow it.
int MarlinNvfp4Factor(float largest_scale, DType activation);
/// Scales (values of e4m3, in any float type, in Marlin's order) to S0E5M3 bytes: columns in fours, times
/// 2^factor and 2^7, as F16; below 2 they become 0, the rest loses its sign and lowest bits.
Result<Tensor> MarlinNvfp4Scales(TensorView scales, int factor);
/// What such a byte stands for as a scale before the factors, 2^(factor + 7) times too large.
float DecodeS0E5M3(uint8_t code);
/// The exponent of two on the tensor scale that makes up for them and for the decoding of e2m1:
/// bias - 7 - factor.
int MarlinNvfp4TensorExponent(int factor, DType activation);
/// F32 scales times 2^exponent. kUnsupported where that exceeds F32.
Result<Tensor> TimesPowerOfTwo(TensorView scales, int exponent);

/// E8M0 scales whose codes grow by `by`, which may be negative. kUnsupported where one leaves 0..255: beside
/// 8-bit activations e2m1 in e4m3 leaves 2^6 over, and 249 is the largest code.
Result<Tensor> MoveExponents(TensorView scales, int by);

}  // namespace fusedmoe
