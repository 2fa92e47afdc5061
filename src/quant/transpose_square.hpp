#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

/// The step of all that exchanges axes: as many rows as elements fit into 16 bytes, 2, 4, 8 or 16 of each.
namespace fusedmoe {

template <size_t kBytes>
struct SquareLine;
template <>
struct SquareLine<1> {
  using Type = uint8_t __attribute__((vector_size(16)));
  static Type Low(Type a, Type b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  }
  static Type High(Type a, Type b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }
};
template <>
struct SquareLine<2> {
  using Type = uint16_t __attribute__((vector_size(16)));
  static Type Low(Type a, Type b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
  static Type High(Type a, Type b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
};
template <>
struct SquareLine<4> {
  using Type = uint32_t __attribute__((vector_size(16)));
  static Type Low(Type a, Type b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
  static Type High(Type a, Type b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
};
template <>
struct SquareLine<8> {
  using Type = uint64_t __attribute__((vector_size(16)));
  static Type Low(Type a, Type b) { return __builtin_shufflevector(a, b, 0, 2); }
  static Type High(Type a, Type b) { return __builtin_shufflevector(a, b, 1, 3); }
};

/// Elements of kBytes bytes, 16 / kBytes rows and columns of them; rows stand so many bytes apart.
///
///     a0 a1 a2 a3        a0 c0 a1 c1        a0 b0 c0 d0
///     b0 b1 b2 b3   ->   a2 c2 a3 c3   ->   a1 b1 c1 d1      row i with row i + half, as often as halves fit
///     c0 c1 c2 c3        b0 d0 b1 d1        a2 b2 c2 d2
///     d0 d1 d2 d3        b2 d2 b3 d3        a3 b3 c3 d3
template <size_t kBytes>
void TransposeSquare(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride) {
  using Line = SquareLine<kBytes>;
  constexpr size_t kSide = 16 / kBytes;
  std::array<typename Line::Type, kSide> x, y;
  for (size_t row = 0; row < kSide; ++row) {
    std::memcpy(&x[row], from + static_cast<int64_t>(row) * from_stride, 16);
  }
  for (size_t width = kSide; width > 1; width /= 2) {
    for (size_t row = 0; row < kSide / 2; ++row) {
      y[2 * row] = Line::Low(x[row], x[row + kSide / 2]);
      y[2 * row + 1] = Line::High(x[row], x[row + kSide / 2]);
    }
    x = y;
  }
  for (size_t row = 0; row < kSide; ++row) {
    std::memcpy(to + static_cast<int64_t>(row) * to_stride, &x[row], 16);
  }
}

}  // namespace fusedmoe
