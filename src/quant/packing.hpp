#pragma once

#include <cstdint>
#include <string_view>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// How integer codes lie in the words of checkpoint files, and the way back. "Codes" are U8, one a byte;
/// "words" are I32 (U32 is accepted) whose lowest bits come first. Every function checks type, rank and sizes
/// (kBadInput) and refuses bit widths that it does not know by their number (kUnsupported).
namespace fusedmoe {

/// Which code of its group of 32 / bits a lane of a word holds.
enum class LaneOrder : uint8_t {
  kSequential,  ///< lane i holds code i
  kAwq          ///< lane i holds code 0,2,4,6,1,3,5,7 (4 bits) or 0,2,1,3 (8 bits)
};

/// kUnsupported unless `bits` is 2, 4 or 8 (AWQ lanes: 4 or 8); `what` names the storage in the message.
Status CheckPackedBits(int bits, LaneOrder order, std::string_view what);

/// Codes [rows, cols] from words packed along the first axis, [ceil(rows * bits / 32), cols], as GPTQ packs
/// weights and compressed-tensors packs zero points. `rows` may leave the last word partly unused.
Result<Tensor> UnpackRows(TensorView words, int bits, int64_t rows);
Result<Tensor> PackRows(TensorView codes, int bits);

/// Codes [rows, cols] from words packed along the last axis, [rows, ceil(cols * bits / 32)]: AWQ, zero points
/// of GPTQ, weights of compressed-tensors (for 2, 4 and 8 bits its dense stream is this). kAwq needs whole
/// words.
Result<Tensor> UnpackColumns(TensorView words, int bits, LaneOrder order, int64_t cols);
Result<Tensor> PackColumns(TensorView codes, int bits, LaneOrder order);

/// Each nibble minus 8, in two's complement: biased codes to signed ones, and back. Any packed tensor of
/// whole bytes.
Result<Tensor> FlipNibbleSigns(TensorView packed);

/// [rows, cols] to [cols, rows]; elements of 1, 2, 4 or 8 bytes.
Result<Tensor> Transpose(TensorView matrix);

/// Codes, one a byte, to a dense row-major tensor of a 4- or 8-bit type (U4, I4, U8, I8), and back (two's
/// complement codes come back as their bits: 0..15).
Result<Tensor> NarrowCodes(TensorView codes, DType element);
Result<Tensor> WidenCodes(TensorView packed);

}  // namespace fusedmoe
