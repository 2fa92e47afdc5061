#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "weights/fragment_codes.hpp"
#include "weights/fragment_pack.hpp"
#include "weights/fragment_rows.hpp"

/// An expert as rows of codes and of scales in the form in which the fragment layout stores them, piece by
/// piece: what remains is to move bytes (fragment_codes.hpp), which a card does faster than its link brings
/// them.
namespace fusedmoe {

/// Whole row blocks of an expert, staged and arranged together.
struct FragmentPiece {
  FragmentPart part = FragmentPart::kDown;
  int64_t first_row = 0;  ///< of a matrix
  int64_t rows = 0;       ///< of a matrix; may reach beyond it
  int64_t blocks = 0;
  int64_t first_block = 0;  ///< of the matrix, or of gate and up together
};

/// One expert on its way to fragments; it must outlive this. Const after creation: pieces may be staged by
/// several threads.
class FragmentStager {
 public:
  /// kUnsupported as CheckFragmentMatrix says, or where gate and up want their common input in two orders.
  static Result<FragmentStager> Create(const CanonicalExpert& expert, const FragmentSpec& spec);
  FragmentStager(FragmentStager&&) = default;
  FragmentStager& operator=(FragmentStager&&) = default;

  /// The format of the GEMM that the piece belongs to, and where its row blocks stand.
  FragmentFormat FormatOf(const FragmentPiece& piece) const { return FormatOf(piece.part); }
  FragmentPlaces PlacesOf(const FragmentPiece& piece) const;
  /// The fewest bytes that hold any piece of such an expert.
  static int64_t FewestBytes(const FragmentSpec& spec, int64_t hidden, int64_t intermediate, bool gated);
  /// Pieces of at most `most_bytes` of staged rows, or of the fewest rows that make whole blocks.
  std::vector<FragmentPiece> Cut(int64_t most_bytes) const;
  int64_t StagedBytes(const FragmentPiece& piece) const;
  /// Writes StagedBytes to `out`, 16-byte aligned; the view of what was written there, or of a copy of it at
  /// `elsewhere`. Rows with NaN codes are added to `nan_rows` as Vectors wants them.
  void Stage(const FragmentPiece& piece, uint8_t* out, std::vector<int64_t>& nan_rows) const;
  StagedRows View(const FragmentPiece& piece, const uint8_t* staged) const;
  /// Everything of an expert that is not blocks. Rows in `nan_rows` get a row scale of NaN, so that every
  /// token makes a NaN of them, as it would with the code. kUnsupported where `out` has no row scales then,
  /// or no room for an input order.
  Status Vectors(const std::vector<int64_t>& nan_rows, const FragmentOutput& out) const;
  /// Columns of the input in the order in which the first GEMM wants them, and of the intermediate in the
  /// order in which it writes them; empty: as they are.
  std::span<const int32_t> input_order() const { return input_order_; }
  std::span<const int32_t> mid_order() const { return mid_order_; }

 private:
  FragmentStager(const CanonicalExpert& expert, const FragmentSpec& spec, std::vector<int32_t> input_order,
                 std::vector<int32_t> mid_order);
  bool gated() const { return gated_; }
  FragmentFormat FormatOf(FragmentPart part) const {
    return part == FragmentPart::kDown ? spec_.format : spec_.gate_up_format();
  }
  int64_t Cols(FragmentPart part) const { return part == FragmentPart::kDown ? intermediate_ : hidden_; }

  FragmentSpec spec_;
  bool gated_;
  int64_t hidden_, intermediate_;
  std::vector<int32_t> input_order_, mid_order_;
  FragmentRows gate_, up_, down_;  ///< they look at the orders: not copied
};

}  // namespace fusedmoe
