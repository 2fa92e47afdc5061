#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include <fusedmoe/quant.hpp>

/// The numbers of each Codebook, here and nowhere else, and the way back from the codes of a matrix to their
/// indices.
namespace fusedmoe {

/// The numbers of IQ4_NL and IQ4_XS, which kernels of cards have as constants.
inline constexpr std::array<int8_t, 16> kIq4Numbers = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                       1,    13,   25,  38,  53,  69,  89,  113};

/// `values[index]`; indices that no code has are zero.
struct CodebookNumbers {
  std::string_view name;  ///< "IQ4"
  std::array<int8_t, 16> values;
  /// What a canonical code is: value = (code - zero) * factor. The matrix then has scales for (code - zero),
  /// and zero points where groups differ in which of both zeros is theirs.
  std::array<float, 2> zeros;
  int factor;
};
const CodebookNumbers& CodebookOf(Codebook codebook);

constexpr bool IsIq1(Codebook codebook) {
  return codebook == Codebook::kIq1S || codebook == Codebook::kIq1M;
}
/// Bits of an index in panels: three where six numbers are all that there are.
constexpr int IndexBits(Codebook codebook) {
  return codebook == Codebook::kIq2 || IsIq1(codebook) ? 3 : 4;
}
/// What kernels add to the numbers that indices of so many bits stand for, so that none is below zero: of
/// three bits the largest of them, since fewer bits leave words room to add products up.
constexpr int NumbersZero(Codebook codebook, int bits) {
  return bits == 4 ? 128 : IsIq1(codebook) ? 9 : 43;
}

/// The numbers as kernels look them up by indices of so many bits: plus NumbersZero.
const uint8_t* CodebookBytes(Codebook codebook, int bits);

/// The index of each canonical code around zeros[which]; kNoIndex where the codebook lacks its value.
inline constexpr uint8_t kNoIndex = 0x80;
const std::array<uint8_t, 256>& CodebookIndices(Codebook codebook, size_t which = 0);

}  // namespace fusedmoe
