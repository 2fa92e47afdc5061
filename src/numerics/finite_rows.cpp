#include "numerics/finite_rows.hpp"

#include <cmath>
#include <cstring>

#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

template <typename Word>
bool WordsHold(const std::byte* row, int64_t count, uint32_t exponent, uint32_t sign) {
  const auto all_set = static_cast<Word>(exponent), refused = static_cast<Word>(sign);
  Word found = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word code;
    std::memcpy(&code, row + i * static_cast<int64_t>(sizeof(code)), sizeof(code));
    const auto infinite = static_cast<Word>((code & all_set) == all_set ? 1 : 0);
    found = static_cast<Word>(found | infinite | (code & refused));
  }
  return found == 0;
}

}  // namespace

FiniteRows::FiniteRows(DType dtype, bool may_be_negative) {
  switch (dtype) {
    case DType::kBF16:
      exponent_ = 0x7f80;
      break;
    case DType::kF16:
      exponent_ = 0x7c00;
      break;
    case DType::kF32:
      exponent_ = 0x7f800000;
      break;
    default:
      if (!IsNumeric(dtype) || DTypeBits(dtype) != 8) {
        return;
      }
      for (uint32_t code = 0; code < no_.size(); ++code) {
        const float value = DecodeCode(dtype, code);
        no_[code] = !std::isfinite(value) || (std::signbit(value) && !may_be_negative);
      }
  }
  bits_ = DTypeBits(dtype);
  sign_ = may_be_negative ? 0 : uint32_t{1} << (bits_ - 1);
}

bool FiniteRows::Hold(const std::byte* row, int64_t count) const {
  switch (bits_) {
    case 8: {
      bool found = false;
      for (int64_t i = 0; i < count; ++i) {
        found |= no_[std::to_integer<size_t>(row[i])];
      }
      return !found;
    }
    case 16:
      return WordsHold<uint16_t>(row, count, exponent_, sign_);
    case 32:
      return WordsHold<uint32_t>(row, count, exponent_, sign_);
    default:
      return false;
  }
}

}  // namespace fusedmoe
