#pragma once

#include <cstring>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include <fusedmoe/stacked.hpp>

#include "numerics/rows.hpp"

/// Canonical experts as vLLM stacks and packs them, byte by byte. Owns what its views show.
namespace fusedmoe::testing_support {

class ExpertStacker {
 public:
  ExpertStacker(std::vector<CanonicalExpert> experts, GateUpOrder order)
      : experts_(std::move(experts)), order_(order) {}

  const std::vector<CanonicalExpert>& experts() const { return experts_; }

  /// Codes as they lie in torch tensors: several of 4 and 6 bits to a byte, `dtype` says as what.
  TensorView Codes(int number, DType dtype) {
    const CanonicalMatrix& first = number == 1 ? experts_[0].up : experts_[0].down;
    const DType element = first.format.element;
    const int bits = DTypeBits(element);
    const int64_t columns = bits < 8 ? first.cols * bits / 8 : first.cols;
    const int bytes_each = bits < 8 ? 1 : bits / 8;
    std::vector<std::byte>& out =
        New(static_cast<int64_t>(experts_.size()) * RowCount(number) * columns * bytes_each);
    std::byte* to = out.data();
    ForEachRow(number, [&](int64_t, const CanonicalMatrix& matrix, int64_t row) {
      const std::byte* from = matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0);
      if (bits >= 16) {
        std::memcpy(to, from, static_cast<size_t>(columns * bytes_each));
      }
      std::byte* next = to;
      uint32_t word = 0;
      int filled = 0;
      for (int64_t col = 0; bits < 16 && col < matrix.cols; ++col) {
        word |= LoadCode(element, from, col) << filled;
        for (filled += bits; filled >= 8; filled -= 8, word >>= 8) {
          *next++ = static_cast<std::byte>(word & 255);
        }
      }
      to += columns * bytes_each;
    });
    return {out.data(), dtype, Shape{static_cast<int64_t>(experts_.size()), RowCount(number), columns}};
  }

  /// Signed bytes for those around 128.
  TensorView SignedCodes(int number) {
    const TensorView unsigned_ones = Codes(number, DType::kU8);
    for (std::byte& code : memory_.back()) {
      code ^= std::byte{0x80};
    }
    return {unsigned_ones.data(), DType::kI8, unsigned_ones.shape()};
  }

  /// Block scales [E, rows, groups], of blocks of `block_rows` rows.
  TensorView BlockScales(int number, DType dtype, int64_t block_rows = 1) {
    const CanonicalMatrix& first = number == 1 ? experts_[0].up : experts_[0].down;
    const int64_t groups = first.block_scale.dim(1), size = DTypeBits(dtype) / 8;
    std::vector<std::byte>& out = New(0);
    ForEachRow(number, [&](int64_t, const CanonicalMatrix& matrix, int64_t row) {
      if (row % block_rows == 0) {
        const TensorView scales = matrix.block_scale.view();
        const std::byte* from = scales.data() + row / block_rows * scales.stride_bytes(0);
        out.insert(out.end(), from, from + groups * size);
      }
    });
    const auto experts = static_cast<int64_t>(experts_.size());
    return {out.data(), dtype,
            Shape{experts, static_cast<int64_t>(out.size()) / (experts * groups * size), groups}};
  }

  /// U8 [E, rows, groups], or two rows a byte.
  TensorView ZeroPoints(int number, bool two_a_byte) {
    const CanonicalMatrix& first = number == 1 ? experts_[0].up : experts_[0].down;
    const int64_t groups = first.zero_point.dim(1), rows = RowCount(number) / (two_a_byte ? 2 : 1);
    const auto experts = static_cast<int64_t>(experts_.size());
    std::vector<std::byte>& out = New(experts * rows * groups);
    int64_t at = 0;
    ForEachRow(number, [&](int64_t, const CanonicalMatrix& matrix, int64_t row) {
      const auto* zeros = matrix.zero_point.view().as<uint8_t>() + row * groups;
      for (int64_t group = 0; group < groups; ++group) {
        std::byte& to = out[static_cast<size_t>((two_a_byte ? at / 2 : at) * groups + group)];
        to |= static_cast<std::byte>(zeros[group] << (two_a_byte && at % 2 == 1 ? 4 : 0));
      }
      ++at;
    });
    return {out.data(), DType::kU8, Shape{experts, rows, groups}};
  }

  /// F32 [E, rows] or [E, rows, 1] of channel scales or biases.
  TensorView Vectors(int number, Tensor CanonicalMatrix::*member, bool with_one = false) {
    std::vector<float> values;
    ForEachRow(number, [&](int64_t, const CanonicalMatrix& matrix, int64_t row) {
      values.push_back((matrix.*member).view().as<float>()[row]);
    });
    const auto experts = static_cast<int64_t>(experts_.size());
    return with_one ? Floats(values, Shape{experts, RowCount(number), 1})
                    : Floats(values, Shape{experts, RowCount(number)});
  }

  /// Tensor scales times `factor(expert)`: [E, 2] of gated w1, in the order of its rows, else [E].
  template <typename Factor>
  TensorView TensorScales(int number, Factor factor) {
    std::vector<float> values;
    for (size_t e = 0; e < experts_.size(); ++e) {
      const CanonicalExpert& expert = experts_[e];
      const bool gated = number == 1 && !expert.gate.empty();
      const CanonicalMatrix* of_one[] = {number == 1 ? &expert.up : &expert.down};
      const CanonicalMatrix* of_two[] = {&expert.gate, &expert.up};
      if (order_ == GateUpOrder::kUpFirst) {
        std::swap(of_two[0], of_two[1]);
      }
      for (const CanonicalMatrix* matrix : gated ? std::span<const CanonicalMatrix*>(of_two) : of_one) {
        values.push_back(*matrix->tensor_scale * factor(*matrix));
      }
    }
    const auto experts = static_cast<int64_t>(experts_.size()), count = static_cast<int64_t>(values.size());
    return count == experts ? Floats(values, Shape{experts})
                            : Floats(values, Shape{experts, count / experts});
  }

  /// [E]: input scales, or 1 / them.
  TensorView InputScales(int number, bool reciprocal) {
    std::vector<float> values;
    for (const CanonicalExpert& expert : experts_) {
      const float scale = *(number == 1 ? expert.up : expert.down).input_tensor_scale;
      values.push_back(reciprocal ? 1.0F / scale : scale);
    }
    return Floats(values, Shape{static_cast<int64_t>(values.size())});
  }

  TensorView Floats(const std::vector<float>& values, const Shape& shape) {
    std::vector<std::byte>& out = New(static_cast<int64_t>(values.size() * sizeof(float)));
    std::memcpy(out.data(), values.data(), out.size());
    return {out.data(), DType::kF32, shape};
  }

  /// The bytes of the tensor that was made last, to be damaged.
  std::vector<std::byte>& last() { return memory_.back(); }

 private:
  std::vector<std::byte>& New(int64_t bytes) { return memory_.emplace_back(static_cast<size_t>(bytes)); }

  int64_t RowCount(int number) const {
    const CanonicalExpert& expert = experts_[0];
    return number == 2 ? expert.down.rows : expert.up.rows + expert.gate.rows;
  }

  template <typename Visit>
  void ForEachRow(int number, Visit visit) const {
    for (size_t e = 0; e < experts_.size(); ++e) {
      const CanonicalExpert& expert = experts_[e];
      const int64_t inner = expert.up.rows;
      for (int64_t at = 0; at < RowCount(number); ++at) {
        if (number == 2) {
          visit(static_cast<int64_t>(e), expert.down, at);
        } else if (expert.gate.empty()) {
          visit(static_cast<int64_t>(e), expert.up, at);
        } else if (order_ == GateUpOrder::kInterleaved) {
          visit(static_cast<int64_t>(e), at % 2 == 0 ? expert.gate : expert.up, at / 2);
        } else {
          const bool first = at < inner, gate = first == (order_ == GateUpOrder::kGateFirst);
          visit(static_cast<int64_t>(e), gate ? expert.gate : expert.up, first ? at : at - inner);
        }
      }
    }
  }

  std::vector<CanonicalExpert> experts_;
  GateUpOrder order_;
  std::deque<std::vector<std::byte>> memory_;
};

}  // namespace fusedmoe::testing_support
