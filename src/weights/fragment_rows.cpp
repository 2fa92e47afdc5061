#include "weights/fragment_rows.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

/// e4m3 (sign clear) as unsigned e5m3 with bias 10: subnormals become normal numbers.
constexpr uint8_t E5m3OfE4m3(uint32_t code) {
  const uint32_t mantissa = code & 7, exponent = code >> 3 & 15;
  if (code == 0x7f) {
    return kE5m3NaN;
  }
  if (exponent != 0) {
    return static_cast<uint8_t>((exponent + 3) << 3 | mantissa);
  }
  if (mantissa == 0) {
    return 0;
  }
  const int up = std::countl_zero(mantissa) - 28;
  return static_cast<uint8_t>((4 - up) << 3 | (mantissa << up & 7));
}

constexpr std::array<uint8_t, 256> kE5m3Table = [] {
  std::array<uint8_t, 256> table{};
  for (uint32_t code = 0; code < 256; ++code) {
    table[code] = E5m3OfE4m3(code & 0x7f);
  }
  return table;
}();

const std::byte* RowAt(const Tensor& tensor, int64_t row) {
  return tensor.view().data() + row * tensor.view().stride_bytes(0);
}
const uint8_t* Bytes(const std::byte* at) {
  return reinterpret_cast<const uint8_t*>(at);
}

float BlockScale(const CanonicalMatrix& matrix, int64_t scale_row, int64_t scale_col) {
  if (matrix.block_scale.empty()) {
    return 1.0F;
  }
  float scale = 0;
  DecodeRow(matrix.block_scale.dtype(), RowAt(matrix.block_scale, scale_row), scale_col, 1, &scale);
  return scale;
}

int LargestExponent(const CanonicalMatrix& matrix) {
  uint8_t largest = 1;
  for (int64_t row = 0; row < matrix.block_scale.dim(0); ++row) {
    const uint8_t* codes = Bytes(RowAt(matrix.block_scale, row));
    for (int64_t col = 0; col < matrix.block_scale.dim(1); ++col) {
      const uint8_t finite = codes[col] == kE8m0NaN ? uint8_t{0} : codes[col];
      largest = std::max(largest, finite);
    }
  }
  return largest;
}

/// fp32 to nearest even in 15 bits of mantissa, so that a zero point fits below.
uint32_t ShortScale(float scale) {
  uint32_t bits = std::bit_cast<uint32_t>(scale);
  if (std::isfinite(scale)) {
    bits += 0x7fU + (bits >> 8 & 1U);
  }
  return bits & ~0xffU;
}

bool HasNanE4m3(const uint8_t* codes, int64_t count) {
  uint8_t any = 0;
  for (int64_t i = 0; i < count; ++i) {
    any |= static_cast<uint8_t>((codes[i] & 0x7f) == 0x7f);
  }
  return any != 0;
}

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

/// Of a staged row.
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

FragmentRows::FragmentRows(const CanonicalMatrix& matrix, const FragmentSpec& spec,
                           std::span<const int32_t> row_order, std::span<const int32_t> col_order)
    : matrix_(&matrix), traits_(FragmentTraitsOf(spec.format)), row_order_(row_order), col_order_(col_order) {
  if (traits_.scale == FragmentScale::kE8M0 && !matrix.empty()) {
    largest_ = LargestExponent(matrix);
  }
}

bool FragmentRows::Read(int64_t row, int64_t code_bytes, uint8_t* codes, int64_t scale_bytes,
                        uint8_t* scales) const {
  const bool there = row < matrix_->rows;
  if (there) {
    Codes(SourceRow(row), code_bytes, codes);
  } else {
    const int empty = traits_.code == FragmentCode::kInt4 ? 0x88 : 0;
    std::memset(codes, empty, static_cast<size_t>(code_bytes));
  }
  if (scale_bytes > 0) {
    Scales(there ? SourceRow(row) : matrix_->rows, scale_bytes, scales, codes);
  }
  return there && traits_.code == FragmentCode::kE4M3 && HasNanE4m3(codes, matrix_->cols);
}

/// As bytes: pairs of nibbles, bytes, or 16-bit words; nibbles with their offset, 8-bit integers without.
void FragmentRows::Codes(int64_t row, int64_t code_bytes, uint8_t* out) const {
  const std::byte* source = RowAt(matrix_->codes, row);
  const DType element = matrix_->format.element;
  const int bits = traits_.code_bits;
  const int64_t cols = matrix_->cols, whole = cols * bits / 8;
  const uint8_t flip = element == DType::kI4 ? 0x88 : element == DType::kU8 ? 0x80 : 0;
  const uint8_t empty = traits_.code == FragmentCode::kInt4 ? 0x88 : 0;
  if (element == DType::kF6E2M3 || element == DType::kF6E3M2) {
    for (int64_t c = 0; c < cols; ++c) {  // every e2m3 and e3m2 value is an e4m3 value
      out[c] =
          static_cast<uint8_t>(EncodeCode(DType::kF8E4M3, DecodeCode(element, LoadCode(element, source, c))));
    }
  } else if (!col_order_.empty()) {
    std::memset(out, 0, static_cast<size_t>(CeilDiv(cols * bits, 8)));
    for (int64_t c = 0; c < cols; ++c) {
      const uint32_t code = LoadCode(element, source, col_order_[static_cast<size_t>(c)]);
      out[c * bits / 8] |= static_cast<uint8_t>(code << (c * bits % 8));
    }
  } else {
    std::memcpy(out, source, static_cast<size_t>(CeilDiv(cols * bits, 8)));
  }
  if (flip != 0) {
    for (int64_t i = 0; i < CeilDiv(cols * bits, 8); ++i) {
      out[i] ^= flip;
    }
  }
  if (bits == 4 && cols % 2 != 0) {
    out[whole] = static_cast<uint8_t>((out[whole] & 0xf) | (empty & 0xf0));
  }
  const int64_t filled = CeilDiv(cols * bits, 8);
  std::memset(out + filled, empty, static_cast<size_t>(code_bytes - filled));
}

/// In the form in which they are stored. Codes of NVFP4 groups whose scale is zero are cleared: the kernels'
/// scale of the byte 0 is not zero.
void FragmentRows::Scales(int64_t row, int64_t scale_bytes, uint8_t* out, uint8_t* codes) const {
  const int size = ScaleSize(traits_.scale);
  const int64_t groups = scale_bytes / size,
                there = row < matrix_->rows ? CeilDiv(matrix_->cols, traits_.group) : 0;
  const bool zeros = traits_.scale == FragmentScale::kF32Zero;
  const int64_t scale_row = there > 0 ? FragmentScaleRow(*matrix_, row) : 0;
  const int64_t first = FragmentScaleColumn(*matrix_, 0);
  const bool in_order = matrix_->format.block.col == traits_.group;
  if (in_order && traits_.scale == FragmentScale::kE4M3 && there > 0) {
    const uint8_t* from = Bytes(RowAt(matrix_->block_scale, scale_row)) + first;
    for (int64_t g = 0; g < there; ++g) {
      out[g] = kE5m3Table[from[g]];
    }
  } else if (in_order && traits_.scale == FragmentScale::kE8M0 && there > 0) {
    const uint8_t* from = Bytes(RowAt(matrix_->block_scale, scale_row)) + first;
    const int shift = LargestExponentByte(traits_.code) - largest_;
    for (int64_t g = 0; g < there; ++g) {  // beyond 2^-246 of the largest scale nothing is left of a weight
      out[g] = from[g] == kE8m0NaN ? uint8_t{kE8m0NaN} : static_cast<uint8_t>(std::max(0, from[g] + shift));
    }
  } else if (in_order && zeros && there > 0) {
    constexpr int64_t kBatch = 64;
    float values[kBatch];
    for (int64_t g = 0; g < there; g += kBatch) {
      const int64_t count = std::min(kBatch, there - g);
      const Tensor& scales = matrix_->block_scale;
      DecodeRow(scales.dtype(), RowAt(scales, scale_row), first + g, count, values);
      for (int64_t i = 0; i < count; ++i) {
        const uint32_t scale = ShortScale(values[i]) | Zero(scale_row, first + g + i);
        std::memcpy(out + (g + i) * size, &scale, sizeof scale);
      }
    }
  } else {
    for (int64_t g = 0; g < there; ++g) {
      const uint32_t scale = Scale(scale_row, FragmentScaleColumn(*matrix_, g * traits_.group));
      std::memcpy(out + g * size, &scale, static_cast<size_t>(size));
    }
  }
  const uint32_t missing = zeros ? ImpliedZero() : 0;
  for (int64_t g = there; g < groups; ++g) {
    std::memcpy(out + g * size, &missing, static_cast<size_t>(size));
  }
  if (traits_.scale == FragmentScale::kE4M3) {
    const int64_t group_bytes = traits_.group / 2;
    for (int64_t g = 0; g < there; ++g) {
      if (out[g] == 0) {
        std::memset(codes + g * group_bytes, 0, static_cast<size_t>(group_bytes));
      }
    }
  }
}

/// The stored scale of a block: the low bytes of the result.
uint32_t FragmentRows::Scale(int64_t scale_row, int64_t scale_col) const {
  const Tensor& scales = matrix_->block_scale;
  switch (traits_.scale) {
    case FragmentScale::kE4M3:
      return kE5m3Table[Bytes(RowAt(scales, scale_row))[scale_col]];
    case FragmentScale::kE8M0: {
      const int code = Bytes(RowAt(scales, scale_row))[scale_col];
      const int shifted = std::max(0, code - largest_ + LargestExponentByte(traits_.code));
      return static_cast<uint32_t>(code == kE8m0NaN ? kE8m0NaN : shifted);
    }
    case FragmentScale::kHalf:
      if (scales.dtype() == DType::kF8E4M3) {  // exact in BF16
        return EncodeCode(DType::kBF16, BlockScale(*matrix_, scale_row, scale_col));
      }
      return LoadCode(scales.dtype(), RowAt(scales, scale_row), scale_col);
    case FragmentScale::kF32Zero:
      return ShortScale(BlockScale(*matrix_, scale_row, scale_col)) | Zero(scale_row, scale_col);
    case FragmentScale::kF32Halves:
      return std::bit_cast<uint32_t>(BlockScale(*matrix_, scale_row, scale_col));
    default:
      return 0;
  }
}

uint32_t FragmentRows::Zero(int64_t scale_row, int64_t scale_col) const {
  if (matrix_->zero_point.empty()) {
    return ImpliedZero();
  }
  const uint32_t mask = traits_.code == FragmentCode::kInt4 ? 15 : 255;
  const uint32_t zero = Bytes(RowAt(matrix_->zero_point, scale_row))[scale_col];
  return (IsSignedInteger(matrix_->format.element) ? zero ^ ImpliedZero() : zero) & mask;
}

void FragmentRows::Vector(int64_t padded, bool scales, float* out) const {
  for (int64_t row = 0; row < padded; ++row) {
    float value = 0;
    if (row < matrix_->rows) {
      const int64_t source = SourceRow(row);
      if (scales) {
        value = matrix_->channel_scale.empty() ? 1.0F : matrix_->channel_scale.view().as<float>()[source];
        if (BlocksAreRows(matrix_->format) && matrix_->zero_point.empty()) {
          value *= BlockScale(*matrix_, FragmentScaleRow(*matrix_, source), 0);
        }
      } else if (!matrix_->bias.empty()) {
        value = matrix_->bias.view().as<float>()[source];
      }
    }
    out[row] = value;
  }
}

float FragmentRows::TensorScale() const {
  const float own = matrix_->tensor_scale.value_or(1.0F);
  switch (traits_.scale) {
    case FragmentScale::kE4M3:
      return own * 256.0F;  // 2^-126 of the codes times 2^118 of the scales
    case FragmentScale::kE8M0:
      return own * std::ldexp(1.0F, largest_ - 127);
    default:
      return own;
  }
}

FragmentStager::FragmentStager(const CanonicalExpert& expert, const FragmentSpec& spec,
                               std::vector<int32_t> input_order, std::vector<int32_t> mid_order)
    : spec_(spec),
      traits_(FragmentTraitsOf(spec.format)),
      gated_(!expert.gate.empty()),
      hidden_(expert.up.cols),
      intermediate_(expert.up.rows),
      input_order_(std::move(input_order)),
      mid_order_(std::move(mid_order)),
      gate_(expert.gate, spec, mid_order_, input_order_),
      up_(expert.up, spec, mid_order_, input_order_),
      down_(expert.down, spec, {}, mid_order_) {}

Result<FragmentStager> FragmentStager::Create(const CanonicalExpert& expert, const FragmentSpec& spec) {
  for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    if (!matrix->empty()) {
      FMOE_RETURN_IF_ERROR(CheckFragmentMatrix(*matrix, spec));
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
  const int64_t gate_up = (gated ? 2 : 1) * kFragmentSlab * RowBytes(spec.format, hidden);
  return RoundUp(std::max(gate_up, kFragmentRows * RowBytes(spec.format, intermediate)), 16);
}

FragmentPieces FragmentStager::Cut(int64_t most_bytes, int64_t first_bytes) const {
  FragmentPieces pieces;
  const auto cut = [&](FragmentPart part, int64_t rows, int64_t step, int64_t step_blocks) {
    const FragmentPiece one{part, 0, step, step_blocks, 0};
    const auto fit = [&](int64_t bytes) { return std::max<int64_t>(1, bytes / StagedBytes(one)); };
    const int64_t all = CeilDiv(rows, step), block_bytes = FragmentBlockBytes(spec_.format, Cols(part));
    int64_t at = 0;
    const auto take = [&](int64_t steps) {
      const int64_t count = std::min(steps, all - at);
      pieces.push_back({part, at * step, count * step, count * step_blocks, at * step_blocks * block_bytes});
      at += count;
    };
    if (pieces.empty() && first_bytes < most_bytes) {
      take(fit(first_bytes));
    }
    const int64_t left = all - at;
    const int64_t steps = left == 0 ? 0 : CeilDiv(left, CeilDiv(left, fit(most_bytes)));  // about one size
    while (at < all) {
      take(steps);
    }
  };
  cut(gated() ? FragmentPart::kGateUp : FragmentPart::kUp, intermediate_, kFragmentSlab,
      GateUpBlocks(kFragmentSlab, gated()));
  cut(FragmentPart::kDown, hidden_, kFragmentRows, 1);
  return pieces;
}

std::vector<FragmentPieces> FragmentStager::CutTogether(int64_t most_bytes, int64_t first_bytes) const {
  std::vector<FragmentPieces> together;
  int64_t bytes = 0;
  for (const FragmentPiece& piece : Cut(most_bytes, first_bytes)) {
    const bool behind_first = together.size() == 1 && first_bytes < most_bytes;
    bytes += StagedBytes(piece);
    if (together.empty() || behind_first || bytes > most_bytes) {
      together.emplace_back();
      bytes = StagedBytes(piece);
    }
    together.back().push_back(piece);
  }
  return together;
}

int64_t FragmentStager::StagedBytes(const FragmentPiece& piece) const {
  const int64_t matrices = piece.part == FragmentPart::kGateUp ? 2 : 1;
  return RoundUp(matrices * piece.rows * RowBytes(spec_.format, Cols(piece.part)), 16);
}

StagedRows FragmentStager::View(const FragmentPiece& piece, const uint8_t* staged) const {
  StagedRows rows;
  rows.part = piece.part;
  rows.rows = static_cast<int>(piece.rows);
  rows.code_bytes = static_cast<int>(CodeBytes(spec_.format, Cols(piece.part)));
  rows.scale_bytes = static_cast<int>(ScaleBytes(spec_.format, Cols(piece.part)));
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
