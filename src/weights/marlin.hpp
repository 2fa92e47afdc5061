#pragma once

#include <cstdint>
#include <vector>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// The layout of the Marlin kernels (W4A16, W8A16 and their 8-bit activation forms). Matrices are [inputs,
/// outputs] here, as those kernels have them. Every step has its inverse.
namespace fusedmoe {

/// What decides the permutations: 4- or 8-bit codes against 16- or 8-bit activations.
struct MarlinKind {
  int bits = 4;
  int activation_bits = 16;
};

/// Where each of the 1024 codes of a tile comes from: 16 x 64 codes with 16-bit activations, 32 x 32 with
/// 8-bit ones. Threads of a tensor-core fragment find their codes side by side, and lanes of a word are
/// interleaved so that one shift and mask unpacks two of them.
std::vector<int32_t> MarlinWeightPermutation(MarlinKind kind);

/// Columns of grouped scales (64 at a time) and of scales per channel or biases (32 at a time).
std::vector<int32_t> MarlinGroupedScalePermutation();
std::vector<int32_t> MarlinSingleScalePermutation();

/// Codes U8 [inputs, outputs] -> I32 [inputs / 16, outputs * bits / 2]. Inputs must be a multiple of 16 (32
/// with 8-bit activations) and outputs of 64.
Result<Tensor> MarlinPackWeights(TensorView codes, MarlinKind kind);
Result<Tensor> MarlinUnpackWeights(TensorView packed, MarlinKind kind);

/// The same from and to weights as they are stored, [outputs, inputs] of any 4- or 8-bit type (`element`),
/// without copies in between.
Result<Tensor> MarlinPackStored(TensorView weights, int activation_bits);
Result<Tensor> MarlinUnpackStored(TensorView packed, DType element, int activation_bits);

/// [groups, outputs], elements of 1, 2 or 4 bytes. Grouped: more than one group a column and 16-bit
/// activations.
Result<Tensor> MarlinPermuteScales(TensorView scales, bool grouped);
Result<Tensor> MarlinRestoreScales(TensorView permuted, bool grouped);
/// True when `group_size` (-1: all inputs) makes the grouped permutation the right one.
bool MarlinScalesAreGrouped(int64_t inputs, int64_t group_size, MarlinKind kind);

/// [experts, outputs] or [outputs as one row].
Result<Tensor> MarlinPermuteBias(TensorView bias);

/// Codes U8 [groups, outputs] -> I32 [groups, outputs * bits / 32]; outputs a multiple of 64.
Result<Tensor> MarlinPackZeroPoints(TensorView zero_points, MarlinKind kind);
Result<Tensor> MarlinUnpackZeroPoints(TensorView packed, MarlinKind kind);

struct MarlinInt8Scales {
  Tensor codes;         ///< I16, shape of the scales: round(scale / largest * 4096)
  float factor = 0.0F;  ///< largest / 4096
};

/// Group scales for int8 activations: 16-bit integers in units of largest / 4096, where `largest` is that of
/// all experts; scales, largest and quotients are rounded to `dtype`, BF16 or F16, as upstream does.
Result<MarlinInt8Scales> MarlinScalesForInt8Activations(TensorView scales, float largest, DType dtype);

}  // namespace fusedmoe
