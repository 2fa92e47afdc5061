#include "weights/fragment_stager.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "core/checked_math.hpp"

namespace fusedmoe {
namespace {

/// Columns by group, each group in its own order; kUnsupported where groups are not whole.
Result<std::vector<int32_t>> OrderOf(const CanonicalMatrix& matrix) {
  if (matrix.group_index.empty()) {
    return std::vector<int32_t>();
  }
  const auto* index = matrix.group_index.view().as<int32_t>();
  const int64_t group = matrix.format.block.col, groups = CeilDiv(matrix.cols, group);
  std::vector<int64_t> next(static_cast<size_t>(groups));
  for (int64_t g = 0; g < groups; ++g) {
    next[static_cast<size_t>(g)] = g * group;
  }
  std::vector<int32_t> order(static_cast<size_t>(matrix.cols));
  for (int64_t col = 0; col < matrix.cols; ++col) {
    const int64_t g = index[col];
    if (g < 0 || g >= groups || next[static_cast<size_t>(g)] == std::min((g + 1) * group, matrix.cols)) {
      return Status::Unsupported(fmt::format(
          "activation order with more than {} columns in group {}; every group must be whole", group, g));
    }
    order[static_cast<size_t>(next[static_cast<size_t>(g)]++)] = static_cast<int32_t>(col);
  }
  return order;
}

/// Bytes of the codes, and of the scales, of a staged row.
int64_t CodeBytes(FragmentFormat format, int64_t cols) {
  return FragmentCols(format, cols) * FragmentTraitsOf(format).code_bits / 8;
}
int64_t ScaleBytes(FragmentFormat format, int64_t cols) {
  const FragmentTraits traits = FragmentTraitsOf(format);
  return traits.group == 0 ? 0 : FragmentCols(format, cols) / traits.group * ScaleSize(traits.scale);
}
int64_t RowBytes(FragmentFormat format, int64_t cols) {
  return CodeBytes(format, cols) + ScaleBytes(format, cols);
}

float* Offset(float* base, int64_t count) {
  return base == nullptr ? nullptr : base + count;
}

}  // namespace

FragmentStager::FragmentStager(const CanonicalExpert& expert, const FragmentSpec& spec,
                               std::vector<int32_t> input_order, std::vector<int32_t> mid_order)
    : spec_(spec),
      gated_(!expert.gate.empty()),
      hidden_(expert.up.cols),
      intermediate_(expert.up.rows),
      input_order_(std::move(input_order)),
      mid_order_(std::move(mid_order)),
      gate_(expert.gate, spec.OfGateUp(), mid_order_, input_order_),
      up_(expert.up, spec.OfGateUp(), mid_order_, input_order_),
      down_(expert.down, spec, {}, mid_order_) {}

Result<FragmentStager> FragmentStager::Create(const CanonicalExpert& expert, const FragmentSpec& spec) {
  for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    if (!matrix->empty()) {
      const bool down = matrix == &expert.down;
      FMOE_RETURN_IF_ERROR(CheckFragmentMatrix(*matrix, down ? spec : spec.OfGateUp()));
    }
  }
  FMOE_ASSIGN_OR_RETURN(std::vector<int32_t> input_order, OrderOf(expert.up));
  FMOE_ASSIGN_OR_RETURN(std::vector<int32_t> mid_order, OrderOf(expert.down));
  if (!expert.gate.empty()) {
    FMOE_ASSIGN_OR_RETURN(const std::vector<int32_t> gate_order, OrderOf(expert.gate));
    if (gate_order != input_order) {
      return Status::Unsupported(
          "gate and up have their columns in different activation orders; they read one input");
    }
  }
  return FragmentStager(expert, spec, std::move(input_order), std::move(mid_order));
}

int64_t FragmentStager::FewestBytes(const FragmentSpec& spec, int64_t hidden, int64_t intermediate,
                                    bool gated) {
  const int64_t gate_up = (gated ? 2 : 1) * kFragmentSlab * RowBytes(spec.gate_up_format(), hidden);
  return RoundUp(std::max(gate_up, kFragmentRows * RowBytes(spec.format, intermediate)), 16);
}

std::vector<FragmentPiece> FragmentStager::Cut(int64_t most_bytes) const {
  std::vector<FragmentPiece> pieces;
  const auto cut = [&](FragmentPart part, int64_t rows, int64_t step, int64_t step_blocks) {
    const FragmentPiece one{part, 0, step, step_blocks, 0};
    const int64_t all = CeilDiv(rows, step), fit = std::max<int64_t>(1, most_bytes / StagedBytes(one));
    const int64_t steps = CeilDiv(all, CeilDiv(all, fit));  // about one size
    for (int64_t at = 0; at < all; at += steps) {
      const int64_t count = std::min(steps, all - at);
      pieces.push_back({part, at * step, count * step, count * step_blocks, at * step_blocks});
    }
  };
  cut(gated() ? FragmentPart::kGateUp : FragmentPart::kUp, intermediate_, kFragmentSlab,
      GateUpBlocks(kFragmentSlab, gated()));
  cut(FragmentPart::kDown, hidden_, kFragmentRows, 1);
  return pieces;
}

FragmentPlaces FragmentStager::PlacesOf(const FragmentPiece& piece) const {
  const int64_t blocks =
      piece.part == FragmentPart::kDown ? DownBlocks(hidden_) : GateUpBlocks(intermediate_, gated());
  return FragmentPlacesOf(FormatOf(piece.part), blocks, Cols(piece.part));
}

int64_t FragmentStager::StagedBytes(const FragmentPiece& piece) const {
  const int64_t matrices = piece.part == FragmentPart::kGateUp ? 2 : 1;
  return RoundUp(matrices * piece.rows * RowBytes(FormatOf(piece.part), Cols(piece.part)), 16);
}

StagedRows FragmentStager::View(const FragmentPiece& piece, const uint8_t* staged) const {
  StagedRows rows;
  rows.part = piece.part;
  rows.rows = static_cast<int>(piece.rows);
  rows.code_bytes = static_cast<int>(CodeBytes(FormatOf(piece.part), Cols(piece.part)));
  rows.scale_bytes = static_cast<int>(ScaleBytes(FormatOf(piece.part), Cols(piece.part)));
  rows.codes = staged;
  rows.scales = staged + (piece.part == FragmentPart::kGateUp ? 2 : 1) * piece.rows * rows.code_bytes;
  return rows;
}

void FragmentStager::Stage(const FragmentPiece& piece, uint8_t* out, std::vector<int64_t>& nan_rows) const {
  const StagedRows view = View(piece, out);
  uint8_t* codes = out;
  uint8_t* scales = out + (view.scales - view.codes);
  const int64_t gate_up_rows = FragmentIntermediate(intermediate_);
  const auto stage = [&](const FragmentRows& matrix, int64_t first_vector_row) {
    for (int64_t row = piece.first_row; row < piece.first_row + piece.rows; ++row) {
      if (matrix.Read(row, view.code_bytes, codes, view.scale_bytes, scales)) {
        nan_rows.push_back(first_vector_row + row);
      }
      codes += view.code_bytes;
      scales += view.scale_bytes;
    }
  };
  if (piece.part == FragmentPart::kDown) {
    stage(down_, (gated() ? 2 : 1) * gate_up_rows);
    return;
  }
  if (gated()) {
    stage(gate_, 0);
  }
  stage(up_, gated() ? gate_up_rows : 0);
}

Status FragmentStager::Vectors(const std::vector<int64_t>& nan_rows, const FragmentOutput& out) const {
  const int64_t gate_up_rows = FragmentIntermediate(intermediate_),
                down_rows = DownBlocks(hidden_) * kFragmentRows;
  const auto put = [](const FragmentRows& matrix, int64_t padded, float* tensor, float* row_scale,
                      float* bias) {
    *tensor = matrix.TensorScale();
    if (row_scale != nullptr) {
      matrix.Vector(padded, true, row_scale);
    }
    if (bias != nullptr) {
      matrix.Vector(padded, false, bias);
    }
  };
  const int64_t part = gated() ? gate_up_rows : 0;
  if (gated()) {
    put(gate_, gate_up_rows, out.gate_up_tensor_scale, out.gate_up_row_scale, out.gate_up_bias);
  }
  put(up_, gate_up_rows, out.gate_up_tensor_scale + (gated() ? 1 : 0), Offset(out.gate_up_row_scale, part),
      Offset(out.gate_up_bias, part));
  put(down_, down_rows, out.down_tensor_scale, out.down_row_scale, out.down_bias);
  if (out.input_order == nullptr && !input_order_.empty()) {
    return Status::Unsupported("an expert in activation order among others that are not");
  }
  for (int64_t k = 0; k < hidden_ && out.input_order != nullptr; ++k) {
    out.input_order[k] =
        input_order_.empty() ? static_cast<int32_t>(k) : input_order_[static_cast<size_t>(k)];
  }
  if (!nan_rows.empty() && (out.gate_up_row_scale == nullptr || out.down_row_scale == nullptr)) {
    return Status::Unsupported("weights with codes of NaN need scales of rows");
  }
  for (const int64_t row : nan_rows) {
    const bool down = row >= part + gate_up_rows;
    (down ? out.down_row_scale[row - part - gate_up_rows] : out.gate_up_row_scale[row]) =
        std::numeric_limits<float>::quiet_NaN();
  }
  return Status::Ok();
}

}  // namespace fusedmoe
