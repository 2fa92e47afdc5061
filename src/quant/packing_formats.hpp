#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// Integer weights of each kind of checkpoint in canonical order: codes [rows, cols] = [outputs, inputs],
/// zero points U8 [outputs, groups], as CanonicalMatrix wants them. `cols` is the number of inputs. Two-bit
/// codes are widened to U4, so they always need explicit zero points. 3, 5, 6 and 7 bits are refused by
/// number.
namespace fusedmoe {

/// GPTQ files of version 1 store each zero point minus one.
enum class GptqVersion : uint8_t { kV1, kV2 };
/// Quark: "reorder" (AWQ lanes) or "order".
enum class QuarkPacking : uint8_t { kReorder, kOrder };

/// I32 [inputs * bits / 32, outputs] -> U4 or U8.
Result<Tensor> UnpackGptqWeights(TensorView qweight, int bits);
/// I32 [groups, outputs * bits / 32] -> U8 [outputs, groups]. Version 1 adds one to each field after
/// unpacking, modulo 2^bits, so that a stored 15 becomes 0 and does not carry into its neighbour.
Result<Tensor> UnpackGptqZeroPoints(TensorView qzeros, int bits, GptqVersion version);
Result<Tensor> PackGptqWeights(TensorView codes, int bits);
Result<Tensor> PackGptqZeroPoints(TensorView zero_points, int bits, GptqVersion version);

/// I32 [inputs, outputs * bits / 32] in AWQ lanes -> U4 or U8; zero points I32 [groups, outputs * bits / 32].
Result<Tensor> UnpackAwqWeights(TensorView qweight, int bits);
Result<Tensor> UnpackAwqZeroPoints(TensorView qzeros, int bits);
Result<Tensor> PackAwqWeights(TensorView codes, int bits);
Result<Tensor> PackAwqZeroPoints(TensorView zero_points, int bits);

/// compressed-tensors "pack-quantized": I32 [outputs, ceil(inputs * bits / 32)] -> U4 or U8, zero points
/// I32 [ceil(outputs * bits / 32), groups]; both are stored with the offset 2^(bits - 1).
Result<Tensor> UnpackCompressedTensorsWeights(TensorView weight_packed, int bits, int64_t cols);
Result<Tensor> UnpackCompressedTensorsZeroPoints(TensorView weight_zero_point, int bits, int64_t rows);
Result<Tensor> PackCompressedTensorsWeights(TensorView codes, int bits);
Result<Tensor> PackCompressedTensorsZeroPoints(TensorView zero_points, int bits);

/// Zero points of the moe_wna16 kernels: U8 [outputs / 2, groups], even output in the low nibble (4 bits), or
/// U8 [outputs, groups] (8 bits). Their weights are canonical as they are.
Result<Tensor> UnpackWna16ZeroPoints(TensorView zero_points, int bits);
Result<Tensor> PackWna16ZeroPoints(TensorView zero_points, int bits);

/// Quark: I32 [inputs, outputs / 8] -> I4 (int4, two's complement) or U4 (uint4).
Result<Tensor> UnpackQuarkWeights(TensorView weight, DType element, QuarkPacking packing);

/// ModelOpt W4A16_AWQ: U8 [outputs / 2, inputs], even output in the low nibble, two's complement -> I4.
Result<Tensor> UnpackModelOptAwqWeights(TensorView weight);
Result<Tensor> PackModelOptAwqWeights(TensorView codes);

}  // namespace fusedmoe
