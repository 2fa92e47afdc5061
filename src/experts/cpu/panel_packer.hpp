#pragma once

#include <span>
#include <vector>

#include "experts/cpu/kernels/kernels.hpp"
#include "experts/cpu/panel_params.hpp"
#include "weights/panel.hpp"

namespace fusedmoe::cpu {

/// Stripes of one matrix with the kernels of an instruction set, byte for byte those of PackPanelStripe.
///
///   rows of scales, zero points ─► lines of sixteen rows, transposed in registers ─► PanelParams, in L1
///   rows of codes ─► lines, transposed alike ─► block by block, with those behind it ─► the stripe
///   columns in an order of their own:        ─► columns of sixteen codes ─► block by block ...
///
///   rows of codes whose scales differ by column ─► rows of products ─► lines, transposed alike ─► the stripe
///
/// Codes of more than a byte in an order of their own take PackPanelStripe. A packer belongs to one thread;
/// the matrix and its columns must outlive it.
class PanelPacker {
 public:
  PanelPacker(const CanonicalMatrix& matrix, const PanelFormat& format, std::span<const int32_t> columns,
              const KernelTable& table);

  /// All blocks of a stripe. On its way it prefetches what the packer of the next one will read, if there is
  /// one: gate and up are packed in turn. Gives the rows of the stripe with a NaN among their FP8 codes, bit
  /// r for row r: their scale has to become NaN, since kernels multiply by such codes as if they were
  /// numbers.
  uint32_t Pack(int64_t stripe, std::byte* out, const PanelPacker* next = nullptr, int64_t next_stripe = 0);

  /// For a stripe behind the next one: a line of each page of its codes, so that their addresses are known
  /// when the rest is prefetched line by line. Prefetches that wait for a page walk hold up those behind
  /// them: from pages of 4 KB nibbles packed at 86 % of a copy without, at 100 with it, codes alone (Zen 5).
  /// Bytes, which are prefetched by pieces, lost 3 %.
  void PrefetchPages(int64_t stripe) const;

 private:
  void PlaceColumns();
  void PointAtCodes(int64_t first_row, const uint8_t** rows) const;
  template <typename Kernel>
  void ForEachBlock(int64_t first_row, int64_t rows, uint8_t* out, Kernel kernel);
  void PackCodes(int64_t first_row, int64_t rows, uint8_t* out);
  void LoadColumnScales(const std::byte* row);
  void PackProducts(int64_t first_row, int64_t rows, uint8_t* out);

  const CanonicalMatrix& matrix_;
  PanelFormat format_;
  std::span<const int32_t> columns_;
  const KernelTable& table_;
  PanelTransform transform_ = kNumPanelTransforms;  ///< none: PackPanelStripe does it
  uint8_t flip_ = 0;
  /// What kernels take from the rows at a time: blocks of the panel, or of columns to be transposed.
  struct Source {
    int64_t columns = 0, blocks = 0, out_bytes = 0;
    int64_t row_bytes = 0;  ///< of one row's codes in a block
  };
  Source source_;
  uint32_t nan_rows_ = 0;  ///< of the present stripe
  /// Arguments of the kernels; what is the same for all stripes is set once.
  PanelArguments codes_{};
  ColumnsArguments ordered_{};
  std::vector<uint8_t> transposed_;  ///< columns of the present stripe; none: they are in order
  std::vector<int32_t> places_;      ///< in transposed_, of the columns of the panel
  /// Where weights become products: sixteen rows of these, and the scales of the columns that they share.
  std::vector<uint16_t> products_;
  std::vector<float> even_scales_, odd_scales_;
  const std::byte* column_scales_ = nullptr;  ///< whose they are
  std::vector<uint8_t> blank_;                ///< codes of rows that do not exist
  std::vector<int32_t> scale_columns_;        ///< of the groups of the panel
  PanelParams params_;                        ///< empty: PackPanelScales does it
};

}  // namespace fusedmoe::cpu
