#pragma once

#include <cstddef>
#include <cstdint>

#include "quant/word_layout.hpp"

/// Codes of 4 and 8 bits from whole words to rows, a tile of sixteen lines at a time instead of code by code:
/// the layouts that nearly all integer checkpoints have. Words need no alignment; `flip` is xored with every
/// word of the result.
namespace fusedmoe {

/// Words [words, rows] as the words of rows, [rows, words]: GPTQ, whose words hold neighbouring inputs of one
/// output.
void TransposeWords(const std::byte* stored, int64_t words, int64_t rows, uint32_t flip, std::byte* out);

/// Nibbles of words [cols, rows / 8] as rows of nibbles, [rows, cols / 2] bytes: AWQ, whose words hold
/// neighbouring outputs of one input, in the lanes of 4 bits. `rows` and `cols` are multiples of 8.
void TransposeNibbles(const std::byte* stored, int64_t cols, int64_t rows, const Lanes& lanes, uint32_t flip,
                      std::byte* out);

/// Bytes [rows / 2, cols] that hold two neighbouring outputs each, as rows of nibbles, [rows, cols / 2]
/// bytes; what an odd number leaves of a byte is zero.
void PartRowPairs(const std::byte* stored, int64_t rows, int64_t cols, uint8_t flip, std::byte* out);

}  // namespace fusedmoe
