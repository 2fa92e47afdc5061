#include "weights/codebook.hpp"

#include <cstddef>

namespace fusedmoe {
namespace {

constexpr std::array<float, 2> kAround128 = {128.0F, 128.0F};

/// In the order of the enumerators. Where a type numbers its values, in that order.
constexpr CodebookNumbers kNumbers[] = {
    {"none", {}, {0.0F, 0.0F}, 1},
    {"IQ4", kIq4Numbers, kAround128, 1},
    {"IQ3_XXS", {4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62}, kAround128, 1},
    {"IQ3_S", {-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15}, {7.5F, 7.5F}, 2},
    {"IQ2", {8, 25, 43, -8, -25, -43}, kAround128, 1},
    {"IQ1_S", {-9, -7, -1, 1, 7, 9}, {0.875F, 1.125F}, 8},
    {"IQ1_M", {-9, -7, -1, 1, 7, 9}, kAround128, 1},
    {"E2M1", {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, kAround128, 1},
};
constexpr size_t kCount = std::size(kNumbers);

struct Table {
  std::array<uint8_t, 16> bytes, bytes_of_three_bits;
  std::array<uint8_t, 256> indices[2];
};

constexpr Table TableOf(Codebook codebook, const CodebookNumbers& numbers) {
  Table table = {};
  for (size_t index = 0; index < 16; ++index) {
    table.bytes[index] = static_cast<uint8_t>(numbers.values[index] + NumbersZero(codebook, 4));
    table.bytes_of_three_bits[index] = static_cast<uint8_t>(numbers.values[index] + NumbersZero(codebook, 3));
  }
  for (size_t which = 0; which < 2; ++which) {
    for (size_t code = 0; code < 256; ++code) {
      uint8_t& found = table.indices[which][code];
      found = kNoIndex;
      const float value =
          (static_cast<float>(code) - numbers.zeros[which]) * static_cast<float>(numbers.factor);
      for (size_t index = 16; index > 0; --index) {  // the first one of equal values
        if (static_cast<float>(numbers.values[index - 1]) == value) {
          found = static_cast<uint8_t>(index - 1);
        }
      }
    }
  }
  return table;
}

constexpr std::array<Table, kCount> kTables = [] {
  std::array<Table, kCount> tables = {};
  for (size_t i = 0; i < kCount; ++i) {
    tables[i] = TableOf(static_cast<Codebook>(i), kNumbers[i]);
  }
  return tables;
}();

}  // namespace

const CodebookNumbers& CodebookOf(Codebook codebook) {
  return kNumbers[static_cast<size_t>(codebook)];
}

const uint8_t* CodebookBytes(Codebook codebook, int bits) {
  const Table& table = kTables[static_cast<size_t>(codebook)];
  return bits == 3 ? table.bytes_of_three_bits.data() : table.bytes.data();
}

const std::array<uint8_t, 256>& CodebookIndices(Codebook codebook, size_t which) {
  return kTables[static_cast<size_t>(codebook)].indices[which];
}

}  // namespace fusedmoe
