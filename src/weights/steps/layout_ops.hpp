#pragma once

#include <cstdint>
#include <span>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// The movements of bytes behind the layout steps. Matrices are dense, [rows, columns] unless said otherwise.
namespace fusedmoe {

/// Each of `parts` equal parts of `from` rows grows to `to` rows of zero bytes; the inverse drops them.
Result<Tensor> PadRows(TensorView matrix, int64_t parts, int64_t from, int64_t to);
Result<Tensor> UnpadRows(TensorView matrix, int64_t parts, int64_t from, int64_t to);

/// Rows of `from` elements grow to `to`, behind their end; whole bytes on both sides.
Result<Tensor> PadColumns(TensorView matrix, int64_t from, int64_t to);
Result<Tensor> UnpadColumns(TensorView matrix, int64_t from, int64_t to);

/// New column c is old column order[c]; any element of 4 bits or whole bytes. `order` must hold columns.
Result<Tensor> GatherColumns(TensorView matrix, std::span<const int32_t> order);

/// Bytes [M, K] to [K / block, M, block]. K must be a multiple of `block`.
Result<Tensor> ToBlockMajor(TensorView matrix, int64_t block);
Result<Tensor> FromBlockMajor(TensorView blocks);

/// One-byte scales [rows, columns] into tiles of `tile_rows` (128 or 8) x 4; the result has the padded shape
/// but not its order. The inverse needs the sizes.
Result<Tensor> SwizzleScaleMatrix(TensorView scales, int64_t tile_rows);
Result<Tensor> UnswizzleScaleMatrix(TensorView swizzled, int64_t tile_rows, int64_t rows, int64_t columns);

/// 128x4-swizzled scales of E experts [E, padded rows, padded columns] as the six-dimensional view that
/// CuteDSL kernels name, [32, 4, rows / 128, 4, columns / 4, E], made contiguous.
Result<Tensor> ScaleMmaView(TensorView swizzled);

/// Each of `parts` parts of `from` rows becomes `to` rows, row r taken from r / times (a scale of a block of
/// rows given to each of its rows).
Result<Tensor> RepeatRows(TensorView matrix, int64_t parts, int64_t times, int64_t from, int64_t to);
Result<Tensor> UnrepeatRows(TensorView matrix, int64_t parts, int64_t times, int64_t from, int64_t to);

/// I4 to U4 (code - 8) or I8 to U8 (code - 128), and back: the sign bit of each code is flipped.
Result<Tensor> FlipSigns(TensorView codes, DType element);

/// F32 block scales of at least 1e-10: smaller ones (dead experts) made a kernel return NaN.
Result<Tensor> ClampScales(TensorView scales);

/// Weights [outputs, inputs] of 4- or 8-bit codes into Marlin's words and back.
Result<Tensor> ToMarlinWeights(TensorView weights);
Result<Tensor> FromMarlinWeights(TensorView words, DType element);

/// Scales [outputs, groups] to [groups, outputs] in Marlin's order and back.
Result<Tensor> ToMarlinScales(TensorView scales, bool grouped);
Result<Tensor> FromMarlinScales(TensorView scales, bool grouped);

/// Columns of each four in the order 0, 2, 1, 3, which is its own inverse: the lanes of a word are unpacked
/// two by two.
Result<Tensor> SwapInFours(TensorView scales);

/// U8 zero points [outputs, groups] to Marlin's words and back. `element` kU4 or kU8 tells the bits.
Result<Tensor> ToMarlinZeroPoints(TensorView zero_points, DType element);
Result<Tensor> FromMarlinZeroPoints(TensorView words, DType element);

/// The power of two by which NVFP4 block scales are multiplied before they become S0E5M3, as its exponent:
/// the largest that keeps `largest_scale` * 2^7 within 448 * 2^7; 0 for F16 activations, whose range does
/// not allow it.
int MarlinNvfp4Factor(float largest_scale, DType activation);
/// Scales (values of e4m3, in any float type, in Marlin's order) to S0E5M3 bytes: columns in fours, times
/// 2^factor and 2^7, as F16; below 2 they become 0, the rest loses its sign and lowest bits.
Result<Tensor> MarlinNvfp4Scales(TensorView scales, int factor);
/// What such a byte stands for as a scale before the factors, 2^(factor + 7) times too large.
float DecodeS0E5M3(uint8_t code);
/// The exponent of two on the tensor scale that makes up for them: bias - 7 - factor, with the bias 126 for
/// BF16 and 14 for F16 that the exponent trick of the kernel's e2m1 decoding leaves over.
int MarlinNvfp4TensorExponent(int factor, DType activation);
/// That bias: a decoded e2m1 counts 2^-bias.
constexpr int MarlinE2m1Bias(DType activation) {
  return activation == DType::kF16 ? 14 : 126;
}
/// E8M0 scales for 8-bit activations: the exponent trick of e2m1 in e4m3 leaves 2^6 over. kUnsupported above
/// 249.
Result<Tensor> MarlinMxfp4ScalesFor8Bit(TensorView scales);

}  // namespace fusedmoe
