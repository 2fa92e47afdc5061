#pragma once

#include <span>
#include <vector>

#include "experts/cpu/kernels.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::cpu {

/// Stripes of one matrix with the kernels of an instruction set, byte for byte those of PackPanelStripe.
///
///   rows of scales, zero points ─► lines of sixteen rows, transposed in registers ─► sides, in L1
///   rows of codes ─► lines, transposed alike ─► block by block, with its sides behind it ─► the stripe
///
/// Columns in an order of their own and 6-bit codes take PackPanelStripe. A packer belongs to one thread; the
/// matrix and its columns must outlive it.
class PanelPacker {
 public:
  PanelPacker(const CanonicalMatrix& matrix, const PanelFormat& format, std::span<const int32_t> columns,
              const KernelTable& table);

  /// All blocks of a stripe. On its way it asks for what the packer of the next one will read, if there is
  /// one: gate and up are packed in turn.
  void Pack(int64_t stripe, std::byte* out, const PanelPacker* next = nullptr, int64_t next_stripe = 0);

 private:
  using RowOf = const std::byte* (*)(const CanonicalMatrix&, int64_t row);
  /// Scales or zero points as they are stored.
  struct SideRows {
    RowOf row_of = nullptr;
    bool own = true;                 ///< each row of the matrix has one
    int64_t offset = 0, bytes = 0;   ///< of the columns that count in a row
    const uint8_t* first = nullptr;  ///< those of row 0; null: there are none
    int64_t stride = 0;              ///< of own rows
    const uint8_t* end = nullptr;    ///< of what may be read
  };
  void ChooseSides();
  SideRows RowsOf(const Tensor& tensor, RowOf row_of) const;
  const uint8_t* RowAt(const SideRows& rows, int64_t row) const {
    return rows.own ? rows.first + row * rows.stride
                    : reinterpret_cast<const uint8_t*>(rows.row_of(matrix_, row)) + rows.offset;
  }
  void PrefetchSides(const SideRows& rows, int64_t first_row) const;
  void PointAtSides(const SideRows& rows, int64_t first_row, int64_t count, const uint8_t** pointers);
  void PointAtCodes(int64_t first_row, const uint8_t** rows) const;
  void PackSides(int64_t first_row, int64_t rows);
  void PackCodes(int64_t first_row, int64_t rows, uint8_t* out);

  const CanonicalMatrix& matrix_;
  PanelFormat format_;
  std::span<const int32_t> columns_;
  const KernelTable& table_;
  PanelTransform transform_ = kNumPanelTransforms;  ///< none: PackPanelStripe does it
  uint8_t flip_ = 0;
  int64_t blocks_ = 0;
  int64_t block_row_bytes_ = 0;  ///< of one row's codes in a block
  /// Of the kernels; what is the same for all stripes is set once.
  PanelArguments codes_{};
  SidesArguments scales_{}, zeros_{};
  std::vector<uint8_t> blank_;  ///< codes of rows that do not exist
  std::vector<int32_t> scale_columns_;
  int64_t real_groups_ = 0;        ///< of scale_columns_; the others are padding
  int64_t groups_per_column_ = 1;  ///< neighbours that share a column
  SideTransform side_transform_ = kNumSideTransforms;
  SideRows scale_rows_, zero_rows_;
  std::vector<uint8_t> sides_;   ///< of the present stripe; none: PackPanelScales does it
  std::vector<uint8_t> copies_;  ///< of scale rows at the end of a tensor
};

}  // namespace fusedmoe::cpu
