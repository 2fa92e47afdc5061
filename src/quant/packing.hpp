#pragma once

#include <cstddef>
#include <cstdint>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "quant/word_layout.hpp"

/// Integer codes to the words of checkpoint files, and the way back. "Codes" are U8, one a byte; "words" are
/// I32 (U32 is accepted) at any address. Every function checks type, rank and sizes (kBadInput) and refuses
/// bit widths that it does not know by their number (kUnsupported).
namespace fusedmoe {

/// Codes [rows, cols] from words packed along the first axis, [WordsOf(rows), cols]: weights of GPTQ, zero
/// points of compressed-tensors.
Result<Tensor> UnpackRows(TensorView words, WordLayout layout, int64_t rows);
Result<Tensor> PackRows(TensorView codes, WordLayout layout);

/// `count` codes, one a byte, from words that follow each other; the layout is known to be one.
void UnpackLine(const std::byte* words, WordLayout layout, int64_t count, uint8_t* codes);

/// Codes [rows, cols] from words packed along the last axis, [rows, WordsOf(cols)]: AWQ, zero points of GPTQ,
/// weights of compressed-tensors.
Result<Tensor> UnpackColumns(TensorView words, WordLayout layout, int64_t cols);
Result<Tensor> PackColumns(TensorView codes, WordLayout layout);

/// U4 as I4, U8 as I8 and back, each code with its highest bit turned: those around 8 or 128 as signed ones.
/// Rows may lie apart.
Result<Tensor> FlipSigns(TensorView codes);

/// [rows, cols] to [cols, rows]; elements of 1, 2, 4 or 8 bytes.
Result<Tensor> Transpose(TensorView matrix);

/// Codes, one a byte, to a dense tensor of a type of 4 or 8 bits, and back (two's complement codes come back
/// as their bits: 0..15). Rows may lie apart.
Result<Tensor> NarrowCodes(TensorView codes, DType element);
Result<Tensor> WidenCodes(TensorView packed);

/// The low nibbles of a row of bytes, two a byte, the first one low.
void PackNibbles(const uint8_t* codes, int64_t columns, std::byte* row);

}  // namespace fusedmoe
