#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "experts/cpu/kernels/kernels.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::cpu {

/// What an exclusive or has to do with each byte of codes with a sign: panels hold them without.
constexpr uint8_t SignFlip(DType element) {
  return element == DType::kI4 ? 0x88 : element == DType::kI8 ? 0x80 : 0;
}

/// What stands behind the codes of each block of a stripe, scales and zero points, where kernels can take it
/// as it is stored: lines of sixteen rows, transposed in registers, in the order of the blocks. Belongs to
/// one thread.
class PanelParams {
 public:
  PanelParams(const CanonicalMatrix& matrix, const PanelFormat& format, const KernelTable& table)
      : matrix_(matrix), format_(format), table_(table) {}

  /// Given the scale columns of the panel's groups (PanelScaleColumns), -1 for padding. Kernels take scales
  /// whose groups follow each other as their columns do, several to a column where the panel has more of them
  /// (128 x 128 blocks, channels); else this stays empty, and PackPanelScales has to do it.
  void Choose(std::span<const int32_t> columns, int64_t blocks);
  bool empty() const { return lines_.empty(); }

  /// Lines of the stripe of rows [first_row, first_row + rows); zeros for rows that do not exist.
  void Pack(int64_t first_row, int64_t rows);
  /// The lines of the last Pack; null: empty.
  const uint8_t* lines() const { return lines_.empty() ? nullptr : lines_.data(); }
  /// Prefetches what Pack will read.
  void Prefetch(int64_t first_row) const;

 private:
  using RowOf = const std::byte* (*)(const CanonicalMatrix&, int64_t row);
  /// Scales or zero points as they are stored.
  struct ParamRows {
    RowOf row_of = nullptr;
    bool own = true;                 ///< each row of the matrix has one
    int64_t offset = 0, bytes = 0;   ///< of the columns that count in a row
    const uint8_t* first = nullptr;  ///< those of row 0; null: there are none
    int64_t stride = 0;              ///< of own rows
    const uint8_t* end = nullptr;    ///< of what may be read
  };
  ParamRows RowsOf(const Tensor& tensor, RowOf row_of) const;
  const uint8_t* RowAt(const ParamRows& rows, int64_t row) const {
    return rows.own ? rows.first + row * rows.stride
                    : reinterpret_cast<const uint8_t*>(rows.row_of(matrix_, row)) + rows.offset;
  }
  void Prefetch(const ParamRows& rows, int64_t first_row) const;
  void PointAt(const ParamRows& rows, int64_t first_row, int64_t count, const uint8_t** pointers);

  const CanonicalMatrix& matrix_;
  PanelFormat format_;
  const KernelTable& table_;
  int64_t num_groups_ = 0;         ///< of the panel, in all blocks
  int64_t real_groups_ = 0;        ///< of these; the others are padding
  int64_t groups_per_column_ = 1;  ///< neighbours that share a column
  int64_t first_column_ = 0;
  ParamTransform transform_ = kNumParamTransforms;
  ParamRows scale_rows_, zero_rows_;
  ParamsArguments scales_{}, zeros_{};  ///< of the kernels; what is the same for all stripes is set once
  std::vector<uint8_t> lines_;
  std::vector<uint8_t> copies_;  ///< of scale rows at the end of a tensor
};

}  // namespace fusedmoe::cpu
