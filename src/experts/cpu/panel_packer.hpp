#pragma once

#include <span>
#include <vector>

#include "experts/cpu/kernels.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::cpu {

/// Stripes of one matrix with the kernels of an instruction set, byte for byte those of PackPanelStripe.
///
///   rows of codes ─► lines (transposed in registers) ─► a piece of the stripe in L1 ─► memory, past the
///   caches
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

  const CanonicalMatrix& matrix_;
  PanelFormat format_;
  std::span<const int32_t> columns_;
  const KernelTable& table_;
  PanelTransform transform_ = kNumPanelTransforms;  ///< none: PackPanelStripe does it
  uint8_t flip_ = 0;
  int64_t row_bytes_ = 0;  ///< of one row's codes in a unit of 64 k
  std::vector<int32_t> scale_columns_;
  bool plain_scales_ = false;   ///< bytes in the order of the panel's groups
  std::vector<uint8_t> blank_;  ///< a row that does not exist
};

}  // namespace fusedmoe::cpu
