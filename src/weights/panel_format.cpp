#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/block_products.hpp"
#include "weights/codebook.hpp"
#include "weights/panel.hpp"

namespace fusedmoe {
namespace {

const char* ScaleName(PanelScale scale) {
  constexpr const char* kNames[] = {"row", "E4M3", "E8M0", "F32", "BF16", "F16", "I8", "F32"};
  return kNames[static_cast<int>(scale)];
}

/// The codes of a panel: 4-bit and 8-bit integers without a sign.
std::optional<DType> PanelCodeOf(DType element) {
  switch (element) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E4M3:
    case DType::kF8E5M2:
    case DType::kF6E2M3:
    case DType::kF6E3M2:
    case DType::kF4E2M1:
      return element;
    case DType::kI4:
    case DType::kU4:
      return DType::kU4;
    case DType::kI8:
    case DType::kU8:
      return DType::kU8;
    default:
      return std::nullopt;
  }
}

/// k of a block with units: the longest that slices of super-blocks cut seldom.
constexpr int64_t kSuperBlock = 128;

bool IsSuperPanel(const WeightFormat& format, const PanelFormat& panel) {
  return format.super_cols > 0 && format.super_cols % kSuperBlock == 0 && panel.group <= 32 &&
         panel.scale == PanelScale::kF32 && panel.zeros != PanelZero::kBytes;
}

}  // namespace

int64_t PanelScaleBytes(PanelScale scale) {
  switch (scale) {
    case PanelScale::kNone:
      return 0;
    case PanelScale::kE4M3:
    case PanelScale::kE8M0:
    case PanelScale::kI8:
      return 1;
    case PanelScale::kBF16:
    case PanelScale::kF16:
      return 2;
    case PanelScale::kF32:
    case PanelScale::kStripeF32:
      return 4;
  }
  return 0;
}

DType PanelScaleDType(PanelScale scale) {
  switch (scale) {
    case PanelScale::kE4M3:
      return DType::kF8E4M3;
    case PanelScale::kE8M0:
      return DType::kF8E8M0;
    case PanelScale::kBF16:
      return DType::kBF16;
    case PanelScale::kF16:
      return DType::kF16;
    case PanelScale::kI8:
      return DType::kI8;
    default:
      return DType::kF32;
  }
}

int64_t PanelZeroBytes(PanelZero zeros) {
  return zeros == PanelZero::kFloats ? 4 : zeros == PanelZero::kNone ? 0 : 1;
}

uint32_t PanelCode(DType source, uint32_t code) {
  switch (source) {
    case DType::kI4:
      return code ^ 8U;
    case DType::kI8:
      return code ^ 128U;
    default:
      return code;
  }
}

int64_t PanelFormat::group_bytes() const {
  return scale == PanelScale::kStripeF32 ? 0 : kPanelRows * (PanelScaleBytes(scale) + PanelZeroBytes(zeros));
}

int64_t PanelFormat::header_bytes(int64_t blocks) const {
  return scale == PanelScale::kStripeF32 ? RoundUp(blocks * block / group * PanelScaleBytes(scale), 64) : 0;
}

int64_t PanelFormat::unit_bytes() const {
  return scale == PanelScale::kI8 ? kPanelRows * 2 * (has_zero_points() ? 2 : 1) : 0;
}

bool PanelFormat::Holds(const PanelFormat& other) const {
  PanelFormat needed = other;
  if (scale == PanelScale::kF32 && (other.scale == PanelScale::kBF16 || other.scale == PanelScale::kF16)) {
    needed.scale = scale;
  }
  if (scale == PanelScale::kF32 && other.scale == PanelScale::kStripeF32) {
    needed.scale = scale;
  }
  if (other.group > 0 && zeros > other.zeros && zeros != PanelZero::kMinima) {
    needed.zeros = zeros;
  }
  return *this == needed;
}

std::string PanelFormat::ToString() const {
  constexpr const char* kZeros[] = {"", " and zero", " and F32 zero", " and minimum"};
  const std::string scales =
      scale == PanelScale::kNone
          ? ""
          : fmt::format(", {}{} per {}{}", ScaleName(scale), kZeros[static_cast<int>(zeros)],
                        scale == PanelScale::kStripeF32 ? "16x" : "", group);
  std::string codes(codebook == Codebook::kNone ? DTypeName(code) : CodebookOf(codebook).name);
  if (code_bits != 0) {
    codes = codebook == Codebook::kNone ? "" : codes + " in ";
    codes += fmt::format("{} bits", code_bits);
  }
  return fmt::format("n16k{}({}{})", block, codes, scales);
}

int PanelZeroPoint(const PanelFormat& format) {
  return IsPanelInteger(format.code) ? 1 << (format.bits() - 1) : 0;
}

bool CutsStripes(const CanonicalMatrix& matrix) {
  const int64_t block_rows = matrix.format.block.row;
  if (!matrix.format.has_block_scale() || block_rows <= 0) {
    return false;
  }
  for (int64_t first = 0; first < matrix.rows; first += kPanelRows) {
    const int64_t last = std::min(first + kPanelRows, matrix.rows) - 1;
    if ((matrix.scale_row_offset + first) / block_rows != (matrix.scale_row_offset + last) / block_rows) {
      return true;
    }
  }
  return false;
}

Result<PanelFormat> ChoosePanelFormat(const CanonicalMatrix& matrix) {
  return ChoosePanelFormat(matrix.format, !matrix.zero_point.empty(), CutsStripes(matrix));
}

Result<PanelFormat> ChoosePanelFormat(const WeightFormat& format, bool has_zero_points, bool stripes_cut) {
  PanelFormat panel;
  const std::optional<DType> code = PanelCodeOf(format.element);
  if (!code) {
    return Status::Unsupported(fmt::format("panels hold no {} weights", DTypeName(format.element)));
  }
  panel.code = *code;
  panel.codebook = format.codebook;
  panel.code_bits = format.code_bits;
  if (!format.has_block_scale()) {
    return panel;
  }
  const int64_t group = format.block.col;
  const bool one_row = format.block.row == 1;
  const bool one_column = format.block.col == 1 && !one_row;
  if (panel.code == DType::kF4E2M1 && one_row && format.block_scale_dtype == DType::kF8E4M3 && group > 0 &&
      group % 16 == 0) {
    panel.scale = PanelScale::kE4M3;
    panel.group = 16;
  } else if (format.block_scale_dtype == DType::kF8E8M0 && one_row && group > 0 && group % 32 == 0 &&
             (DTypeBits(panel.code) < 8 || panel.code == DType::kF8E4M3) && !IsPanelInteger(panel.code)) {
    panel.scale = PanelScale::kE8M0;
    panel.group = 32;
  } else if (IsPanelInteger(panel.code)) {
    // e4m3 and e8m0 are bf16 as well; the kernels read three types of scales beside integers.
    panel.zeros = !has_zero_points                         ? PanelZero::kNone
                  : format.zero_point_dtype == DType::kF32 ? PanelZero::kFloats
                                                           : PanelZero::kBytes;
    const bool wide = format.block_scale_dtype == DType::kF32 || panel.zeros == PanelZero::kFloats;
    panel.scale = wide                                      ? PanelScale::kF32
                  : format.block_scale_dtype == DType::kF16 ? PanelScale::kF16
                                                            : PanelScale::kBF16;
    panel.group = group < 0 || group % 128 == 0 ? 128 : group % 64 == 0 ? 64 : group % 32 == 0 ? 32 : 16;
    panel.block = std::max(kPanelUnit, panel.group);
    if (IsSuperPanel(format, panel)) {
      panel.scale = PanelScale::kI8;
      panel.zeros = has_zero_points ? PanelZero::kMinima : PanelZero::kNone;
      panel.block = kSuperBlock;
    }
  } else if (panel.code == DType::kF8E4M3 && !one_column) {
    const bool blocks_of_stripes = format.block.row <= 0 || format.block.row % kPanelRows == 0;
    panel.scale = blocks_of_stripes && !stripes_cut ? PanelScale::kStripeF32 : PanelScale::kF32;
    panel.group = 64;
  } else if (BecomesProducts(format)) {
    panel.code = DType::kBF16;
  } else {
    return Status::Unsupported(fmt::format("panels hold no {} weights with {} scales per {} x {}",
                                           DTypeName(format.element), DTypeName(format.block_scale_dtype),
                                           format.block.row, format.block.col));
  }
  return panel;
}

}  // namespace fusedmoe
