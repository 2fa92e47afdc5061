#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include <fusedmoe/quant.hpp>

/// The numbers of each Codebook, here and nowhere else, and the way back from the codes of a matrix to their
/// indices.
namespace fusedmoe {

/// `values[index]`; indices that no code has are zero.
struct CodebookNumbers {
  std::string_view name;  ///< "IQ4"
  std::array<int8_t, 16> values;
  /// What a canonical code is: value = (code - zero) * factor. The matrix then has scales for (code - zero).
  float zero;
  int factor;
};
const CodebookNumbers& CodebookOf(Codebook codebook);

/// The numbers plus 128, as kernels look them up.
const uint8_t* CodebookBytes(Codebook codebook);

/// The index of each canonical code; kNoIndex where the codebook lacks its value.
inline constexpr uint8_t kNoIndex = 0x80;
const std::array<uint8_t, 256>& CodebookIndices(Codebook codebook);

}  // namespace fusedmoe
