#pragma once

#include <span>
#include <vector>

#include "experts/cpu/kernels.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::cpu {

/// Stripes of one matrix with the kernels of an instruction set, byte for byte those of PackPanelStripe.
///
///   rows of codes  ─► lines, transposed in registers ─► the stripe
///   rows of scales, zero points ─► lines of sixteen rows, transposed alike ─► behind the codes of their
///   block
///
/// Columns in an order of their own and 6-bit codes take PackPanelStripe. Const calls are safe from many
/// threads; the matrix and its columns must outlive the packer.
class PanelPacker {
 public:
  PanelPacker(const CanonicalMatrix& matrix, const PanelFormat& format, std::span<const int32_t> columns,
              const KernelTable& table);

  /// All blocks of a stripe.
  void Pack(int64_t stripe, std::byte* out) const;

 private:
  struct Stripe;
  void PackCodes(const Stripe& stripe, uint8_t* out) const;
  void ChooseScales();
  void PrefetchScales(int64_t first_row) const;
  void RowPointers(const Tensor& tensor, const std::byte* (*of_row)(const CanonicalMatrix&, int64_t),
                   int64_t first_row, int64_t rows, const uint8_t** pointers) const;
  void PackByteScales(int64_t first_row, int64_t rows, uint8_t* out) const;
  void PackGroups(int64_t first_row, int64_t rows, uint8_t* out) const;

  const CanonicalMatrix& matrix_;
  PanelFormat format_;
  std::span<const int32_t> columns_;
  const KernelTable& table_;
  PanelTransform transform_ = kNumPanelTransforms;  ///< none: PackPanelStripe does it
  uint8_t flip_ = 0;
  int64_t row_bytes_ = 0;  ///< of one row's codes in a unit of 64 k
  std::vector<int32_t> scale_columns_;
  int64_t real_groups_ = 0;        ///< of scale_columns_; the others are padding
  int64_t groups_per_column_ = 1;  ///< neighbours that share a column
  enum class Scales { kAny, kBytes, kGroups } scales_ = Scales::kAny;
  GroupTransform scale_transform_ = kNumGroupTransforms;  ///< of kGroups
  const uint8_t* scales_end_ = nullptr;                   ///< of the tensor
  /// Rows that do not exist: codes; scales; zero points as they are stored, and those that are implied.
  std::vector<uint8_t> blank_, no_scales_, no_zeros_, implied_zeros_;
};

}  // namespace fusedmoe::cpu
