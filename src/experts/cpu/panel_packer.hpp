#pragma once

#include <span>
#include <vector>

#include "experts/cpu/kernels.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::cpu {

/// Stripes of one matrix with the kernels of an instruction set, byte for byte those of PackPanelStripe.
///
///   rows of codes  ─► lines, transposed in registers ─► the stripe
///   rows of scales ─► sixteen rows beside each other in L1 ─► behind the codes of their block
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
  void PackPlainScales(const Stripe& stripe, uint8_t* out) const;
  void PrefetchScales(int64_t first_row) const;
  void PackScaleWords(int64_t first_row, int64_t rows, uint8_t* out) const;
  void ScaleWords(int64_t row, int64_t first, int64_t count, uint32_t* words) const;

  const CanonicalMatrix& matrix_;
  PanelFormat format_;
  std::span<const int32_t> columns_;
  const KernelTable& table_;
  PanelTransform transform_ = kNumPanelTransforms;  ///< none: PackPanelStripe does it
  uint8_t flip_ = 0;
  int64_t row_bytes_ = 0;  ///< of one row's codes in a unit of 64 k
  std::vector<int32_t> scale_columns_;
  int64_t real_groups_ = 0;    ///< of scale_columns_; the others are padding
  bool plain_scales_ = false;  ///< bytes in the order of the panel's groups
  bool plain_words_ =
      false;           ///< F32, BF16 or F16 scales in the order of the panel's groups, one zero for all
  uint32_t zero_ = 0;  ///< it
  std::vector<uint8_t> blank_;  ///< a row that does not exist
};

}  // namespace fusedmoe::cpu
