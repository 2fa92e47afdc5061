#include "weights/fragment_pack.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

bool IsSigned(DType element) {
  return element == DType::kI4 || element == DType::kI8;
}

/// The bits of a code of pair `slot` (a0..a3) in its 16-bit half of a word: fragments.cuh reads them.
/// e2m1: three pairs lie under the mask 0x81c0 at shifts 0, 3, 6; the fourth takes the bits left over.
constexpr uint32_t PairBits(FragmentCode code, int slot, uint32_t c) {
  switch (code) {
    case FragmentCode::kE2M1:
      return slot < 3 ? (c >> 3) << (15 - 3 * slot) | (c & 7) << (6 - 3 * slot)
                      : (c >> 3) << 14 | (c >> 1 & 3) << 10 | (c & 1) << 13;
    case FragmentCode::kInt4:
      return c << (4 * slot);
    case FragmentCode::kE4M3:
    case FragmentCode::kInt8:
      return c << (8 * (slot / 2));
    default:
      return c;
  }
}

constexpr uint32_t CodeOfBits(FragmentCode code, int slot, uint32_t bits) {
  switch (code) {
    case FragmentCode::kE2M1:
      return slot < 3 ? (bits >> (15 - 3 * slot) & 1) << 3 | (bits >> (6 - 3 * slot) & 7)
                      : (bits >> 14 & 1) << 3 | (bits >> 10 & 3) << 1 | (bits >> 13 & 1);
    case FragmentCode::kInt4:
      return bits >> (4 * slot) & 15;
    case FragmentCode::kE4M3:
    case FragmentCode::kInt8:
      return bits >> (8 * (slot / 2)) & 0xff;
    default:
      return bits & 0xffff;
  }
}

/// Two neighboring codes in the two halves of a word, for every byte of codes: one look-up for two 4-bit
/// codes (a byte as it stands in the matrix), or for one 8-bit code (low half).
struct CodeTable {
  std::array<std::array<uint32_t, 256>, 4> bits;
};

CodeTable MakeCodeTable(FragmentCode code, bool nibbles) {
  CodeTable table{};
  for (int slot = 0; slot < 4; ++slot) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      table.bits[static_cast<size_t>(slot)][byte] =
          nibbles ? PairBits(code, slot, byte & 15) | PairBits(code, slot, byte >> 4) << 16
                  : PairBits(code, slot, byte);
    }
  }
  return table;
}

const CodeTable& TableOf(FragmentCode code) {
  static const CodeTable kTables[] = {
      MakeCodeTable(FragmentCode::kE2M1, true), MakeCodeTable(FragmentCode::kInt4, true),
      MakeCodeTable(FragmentCode::kE4M3, false), MakeCodeTable(FragmentCode::kInt8, false)};
  return kTables[static_cast<int>(code)];
}

/// The kernels' multiply-add makes BF16 0x7fc0 of it, so that a scale of NaN makes its group NaN.
constexpr uint8_t kE5m3NaN = 0xa4;
static_assert(kE5m3NaN * 0x10 + 0x7580 == 0x7fc0);
/// As BF16 infinity; nothing finite gets this byte (LargestExponentByte).
constexpr int kE8m0NaN = 255;

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

constexpr uint8_t E4m3OfE5m3(uint32_t code) {
  if (code == 0) {
    return 0;
  }
  if (code == kE5m3NaN) {
    return 0x7f;
  }
  const int exponent = static_cast<int>(code >> 3) - 3;
  const uint32_t mantissa = code & 7;
  return exponent > 0 ? static_cast<uint8_t>(static_cast<uint32_t>(exponent) << 3 | mantissa)
                      : static_cast<uint8_t>((8 | mantissa) >> (1 - exponent));
}

/// What a stored e8m0 exponent is relative to: a block with the largest scale of the matrix gets this byte
/// (fragments.cuh multiplies e2m1 codes by 2^126, e4m3 codes by 2^120).
constexpr int LargestExponentByte(FragmentCode code) {
  return 127 + (code == FragmentCode::kE2M1 ? 126 : 120);
}

int64_t ScaleRow(const CanonicalMatrix& matrix, int64_t row) {
  const int64_t block = matrix.format.block.row;
  return block <= 0 ? 0 : (matrix.scale_row_offset + row) / block;
}
int64_t ScaleColumn(const CanonicalMatrix& matrix, int64_t col) {
  const int64_t block = matrix.format.block.col;
  return block <= 0 ? 0 : (matrix.scale_col_offset + col) / block;
}
const std::byte* RowOf(const Tensor& tensor, int64_t row) {
  return tensor.view().data() + row * tensor.view().stride_bytes(0);
}

float BlockScale(const CanonicalMatrix& matrix, int64_t scale_row, int64_t scale_col) {
  if (matrix.block_scale.empty()) {
    return 1.0F;
  }
  float scale = 0;
  const DType dtype = matrix.block_scale.dtype();
  DecodeRow(dtype, RowOf(matrix.block_scale, scale_row), scale_col, 1, &scale);
  return scale;
}

/// Scales of whole rows that stand as block scales of one column: they act like channel scales.
bool BlocksAreRows(const WeightFormat& format) {
  return format.block.row == 1 && format.block.col <= 0;
}

int LargestExponent(const CanonicalMatrix& matrix) {
  int largest = 1;
  for (int64_t row = 0; row < matrix.block_scale.dim(0); ++row) {
    const auto* codes = reinterpret_cast<const uint8_t*>(RowOf(matrix.block_scale, row));
    for (int64_t col = 0; col < matrix.block_scale.dim(1); ++col) {
      largest = codes[col] == kE8m0NaN ? largest : std::max<int>(largest, codes[col]);
    }
  }
  return largest;
}

/// What the layout's codes leave to the tensor scale.
float FragmentFactor(const CanonicalMatrix& matrix, const FragmentTraits& traits) {
  if (traits.scale == FragmentScale::kE4M3) {
    return 256.0F;  // 2^-126 of the codes times 2^118 of the scales
  }
  return traits.scale == FragmentScale::kE8M0 ? std::ldexp(1.0F, LargestExponent(matrix) - 127) : 1.0F;
}

/// Rows of a matrix in packed codes, one projection.
class RowReader {
 public:
  RowReader(const CanonicalMatrix& matrix, const FragmentSpec& spec)
      : matrix_(matrix), traits_(FragmentTraitsOf(spec.format)), scale_(ScalePlan(matrix, traits_)) {}

  const FragmentTraits& traits() const { return traits_; }
  const CanonicalMatrix& matrix() const { return matrix_; }

  /// Codes of a row as bytes (pairs of nibbles, bytes, or 16-bit words) over `padded` columns; what is
  /// missing decodes to zero.
  void Codes(int64_t row, int64_t padded, uint8_t* out) const {
    const int bits = traits_.code_bits;
    const uint8_t empty = traits_.code == FragmentCode::kInt4   ? 0x88
                          : traits_.code == FragmentCode::kInt8 ? 0x80
                                                                : 0;
    std::memset(out, empty, static_cast<size_t>(padded * bits / 8));
    if (row >= matrix_.rows) {
      return;
    }
    const std::byte* source = RowOf(matrix_.codes, row);
    const DType element = matrix_.format.element;
    const int64_t cols = matrix_.cols;
    if (element == DType::kF6E2M3 || element == DType::kF6E3M2) {
      for (int64_t c = 0; c < cols; ++c) {  // every e2m3 and e3m2 value is an e4m3 value
        out[c] = static_cast<uint8_t>(
            EncodeCode(DType::kF8E4M3, DecodeCode(element, LoadCode(element, source, c))));
      }
      return;
    }
    std::memcpy(out, source, static_cast<size_t>(cols * bits / 8));
    const uint8_t flip = element == DType::kI4 ? 0x88 : element == DType::kI8 ? 0x80 : 0;
    if (flip != 0) {
      for (int64_t i = 0; i < cols * bits / 8; ++i) {
        out[i] ^= flip;
      }
    }
    if (bits == 4 && cols % 2 != 0) {
      const uint32_t last = LoadCode(element, source, cols - 1) ^ (flip & 15U);
      out[cols / 2] = static_cast<uint8_t>(last | (empty & 0xf0U));
    }
  }

  /// The stored scale of row `row` for the group that starts at column `col`: the low bytes of the result.
  uint32_t Scale(int64_t row, int64_t col) const {
    if (row >= matrix_.rows || col >= matrix_.cols) {
      return traits_.scale == FragmentScale::kF32Zero ? ImpliedZero() : 0;
    }
    const int64_t scale_row = ScaleRow(matrix_, row), scale_col = ScaleColumn(matrix_, col);
    switch (traits_.scale) {
      case FragmentScale::kE4M3:
        return E5m3OfE4m3(std::to_integer<uint32_t>(RowOf(matrix_.block_scale, scale_row)[scale_col]) &
                          0x7fU);
      case FragmentScale::kE8M0: {
        const int code = std::to_integer<int>(RowOf(matrix_.block_scale, scale_row)[scale_col]);
        if (code == kE8m0NaN) {
          return kE8m0NaN;
        }
        // Beyond 2^-246 of the largest scale nothing is left of a weight.
        return static_cast<uint32_t>(std::max(0, code - scale_ + LargestExponentByte(traits_.code)));
      }
      case FragmentScale::kHalf:
        if (matrix_.block_scale.dtype() == DType::kF8E4M3) {  // exact in BF16
          return EncodeCode(DType::kBF16, BlockScale(matrix_, scale_row, scale_col));
        }
        return LoadCode(matrix_.block_scale.dtype(), RowOf(matrix_.block_scale, scale_row), scale_col);
      case FragmentScale::kF32Zero: {
        uint32_t bits = std::bit_cast<uint32_t>(BlockScale(matrix_, scale_row, scale_col));
        if (std::isfinite(std::bit_cast<float>(bits))) {
          bits += 0x7fU + (bits >> 8 & 1U);  // to nearest even in 15 mantissa bits
        }
        bits &= ~0xffU;
        return bits | Zero(scale_row, scale_col);
      }
      case FragmentScale::kF32Halves:
        return std::bit_cast<uint32_t>(BlockScale(matrix_, scale_row, scale_col));
      default:
        return 0;
    }
  }

 private:
  static int ScalePlan(const CanonicalMatrix& matrix, const FragmentTraits& traits) {
    return traits.scale == FragmentScale::kE8M0 ? LargestExponent(matrix) : 0;
  }
  uint32_t ImpliedZero() const { return traits_.code == FragmentCode::kInt4 ? 8 : 128; }
  uint32_t Zero(int64_t scale_row, int64_t scale_col) const {
    if (matrix_.zero_point.empty()) {
      return ImpliedZero();
    }
    const uint32_t mask = traits_.code == FragmentCode::kInt4 ? 15 : 255;
    const uint32_t zero = std::to_integer<uint32_t>(RowOf(matrix_.zero_point, scale_row)[scale_col]);
    return (IsSigned(matrix_.format.element) ? zero ^ ImpliedZero() : zero) & mask;
  }

  const CanonicalMatrix& matrix_;
  FragmentTraits traits_;
  int scale_;  ///< largest exponent of an MX matrix
};

/// Byte offset, in the codes of a slab, of the word of k-step j that holds fragment register a0 + slot of a
/// lane.
int64_t WordOffset(int bits, int lane, int j, int slot) {
  switch (bits) {
    case 4:
      return lane * 16 + j * 4;
    case 8:
      return j / 2 * 512 + lane * 16 + (j % 2 * 2 + slot % 2) * 4;
    default:
      return j * 512 + lane * 16 + slot * 4;
  }
}

struct BlockRow {
  const RowReader* reader;
  int64_t row;  ///< may be beyond the matrix
};

void PackSlabCodes(const FragmentTraits& traits, const std::array<const uint8_t*, 16>& rows, uint8_t* out) {
  for (int lane = 0; lane < 32; ++lane) {
    const size_t r = static_cast<size_t>(lane >> 2);
    const int first = 16 * (lane & 3);
    const uint8_t* pair[2] = {rows[r], rows[r + 8]};
    for (int j = 0; j < 4; ++j) {
      const int k = first + 4 * j;
      if (traits.code_bits == 16) {
        for (int slot = 0; slot < 4; ++slot) {
          std::memcpy(out + WordOffset(16, lane, j, slot), pair[slot & 1] + (k + slot / 2 * 2) * 2, 4);
        }
        continue;
      }
      const CodeTable& table = TableOf(traits.code);
      uint32_t words[2] = {};
      for (int slot = 0; slot < 4; ++slot) {
        const uint8_t* at = pair[slot & 1];
        const int col = k + slot / 2 * 2;
        const auto& bits = table.bits[static_cast<size_t>(slot)];
        words[traits.code_bits == 4 ? 0 : slot % 2] |=
            traits.code_bits == 4 ? bits[at[col / 2]] : bits[at[col]] | bits[at[col + 1]] << 16;
      }
      std::memcpy(out + WordOffset(traits.code_bits, lane, j, 0), words, traits.code_bits == 4 ? 4 : 8);
    }
  }
}

/// Byte offset of the scale of fragment row `row` and group `group` of a unit behind the codes, and its size.
struct ScaleSlot {
  int offset, bytes;
};
ScaleSlot ScaleSlotOf(const FragmentTraits& traits, int row, int group) {
  const int r = row & 7, half = row >> 3;
  switch (traits.scale) {
    case FragmentScale::kE4M3:  // lane 4 r + q: group q
      return {(4 * r + group) * 2 + half, 1};
    case FragmentScale::kE8M0:
      return {group * 16 + r * 2 + half, 1};
    case FragmentScale::kHalf:
      return {r * 4 + half * 2, 2};
    case FragmentScale::kF32Zero:
      return {(group * 8 + r) * 8 + half * 4, 4};
    case FragmentScale::kF32Halves:
      return {half * 4, 4};
    default:
      return {0, 0};
  }
}

/// Sixteen rows over all of K.
void PackBlock(const std::array<BlockRow, 16>& rows, int64_t cols, std::vector<uint8_t>& buffer,
               uint8_t* out) {
  const FragmentTraits traits = rows[0].reader->traits();
  const int64_t unit_k = traits.unit_slabs() * kFragmentSlab, padded = RoundUp(cols, unit_k);
  const int64_t row_bytes = padded * traits.code_bits / 8, slab_bytes = kFragmentSlab * traits.code_bits / 8;
  buffer.resize(static_cast<size_t>(16 * row_bytes));
  for (size_t i = 0; i < 16; ++i) {
    rows[i].reader->Codes(rows[i].row, padded, buffer.data() + static_cast<int64_t>(i) * row_bytes);
  }
  const int groups = traits.group == 0 ? 0 : static_cast<int>(unit_k / traits.group);
  for (int64_t k = 0; k < padded; k += unit_k, out += traits.unit_bytes()) {
    std::memset(out + traits.scale_offset(), 0, static_cast<size_t>(traits.scale_bytes()));
    for (int row = 0; row < 16 && groups > 0; ++row) {
      for (int group = 0; group < groups; ++group) {
        const BlockRow& source = rows[static_cast<size_t>(row)];
        const int64_t col = k + group * traits.group;
        const uint32_t scale = source.reader->Scale(source.row, col);
        const ScaleSlot slot = ScaleSlotOf(traits, row, group);
        if (traits.scale != FragmentScale::kF32Halves || source.row < source.reader->matrix().rows) {
          std::memcpy(out + traits.scale_offset() + slot.offset, &scale, static_cast<size_t>(slot.bytes));
        }
        if (traits.scale == FragmentScale::kE4M3 && scale == 0) {
          // The kernels' scale of the byte 0 is not zero: a block whose scale is zero has its codes cleared.
          std::memset(buffer.data() + row * row_bytes + col / 2, 0, static_cast<size_t>(traits.group / 2));
        }
      }
    }
    for (int slab = 0; slab < traits.unit_slabs(); ++slab) {
      std::array<const uint8_t*, 16> at{};
      for (size_t i = 0; i < 16; ++i) {
        at[i] = buffer.data() + static_cast<int64_t>(i) * row_bytes + (k / kFragmentSlab + slab) * slab_bytes;
      }
      PackSlabCodes(traits, at, out + slab * traits.slab_code_bytes());
    }
  }
}

void PackRowVector(const CanonicalMatrix& matrix, int64_t padded, bool scales, float* out) {
  for (int64_t row = 0; row < padded; ++row) {
    float value = 0;
    if (row < matrix.rows && scales) {
      value = matrix.channel_scale.empty() ? 1.0F : matrix.channel_scale.view().as<float>()[row];
      if (BlocksAreRows(matrix.format) && matrix.zero_point.empty()) {
        value *= BlockScale(matrix, ScaleRow(matrix, row), 0);
      }
    } else if (row < matrix.rows && !matrix.bias.empty()) {
      value = matrix.bias.view().as<float>()[row];
    }
    out[row] = value;
  }
}

/// Row scales, biases and the tensor scale of one projection.
void PackVectors(const CanonicalMatrix& matrix, const FragmentTraits& traits, int64_t padded, float* tensor,
                 float* row_scale, float* bias) {
  *tensor = matrix.tensor_scale.value_or(1.0F) * FragmentFactor(matrix, traits);
  if (row_scale != nullptr) {
    PackRowVector(matrix, padded, true, row_scale);
  }
  if (bias != nullptr) {
    PackRowVector(matrix, padded, false, bias);
  }
}

float* Offset(float* base, int64_t count) {
  return base == nullptr ? nullptr : base + count;
}

}  // namespace

std::string FragmentSpec::ToString() const {
  const FragmentTraits traits = FragmentTraitsOf(format);
  return fmt::format("fragment({}{}, {} bytes a unit of 16 x {})", traits.name,
                     traits.scale == FragmentScale::kHalf ? fmt::format(" {}", DTypeName(half_scale)) : "",
                     traits.unit_bytes(), traits.unit_slabs() * kFragmentSlab);
}

Result<FragmentSpec> ChooseFragmentSpec(const WeightFormat& format, bool has_zero_points) {
  FragmentSpec spec;
  const int64_t group = format.block.col;
  const bool rows_alone = format.block.row == 1;
  const bool row_blocks = BlocksAreRows(format) && !has_zero_points;
  spec.row_scale = format.has_channel_scale || row_blocks;
  const bool plain = !format.has_block_scale() || row_blocks;
  const auto unsupported = [&] {
    return Status::Unsupported(fmt::format("no fragment layout holds {}", Describe(format)));
  };
  switch (format.element) {
    case DType::kBF16:
    case DType::kF16:
      spec.format = format.element == DType::kBF16 ? FragmentFormat::kBf16 : FragmentFormat::kF16;
      return plain ? Result<FragmentSpec>(spec) : unsupported();
    case DType::kF4E2M1:
      if (!plain && rows_alone && format.block_scale_dtype == DType::kF8E4M3 && group > 0 &&
          group % 16 == 0) {
        spec.format = FragmentFormat::kNvfp4;
        return spec;
      }
      if (!plain && rows_alone && format.block_scale_dtype == DType::kF8E8M0 && group > 0 &&
          group % 32 == 0) {
        spec.format = FragmentFormat::kMxfp4;
        return spec;
      }
      return unsupported();
    case DType::kF6E2M3:
    case DType::kF6E3M2:
    case DType::kF8E4M3:
      if (plain && format.element == DType::kF8E4M3) {
        spec.format = FragmentFormat::kFp8;
        return spec;
      }
      if (!plain && rows_alone && format.block_scale_dtype == DType::kF8E8M0 && group > 0 &&
          group % 32 == 0) {
        spec.format = FragmentFormat::kMxfp8;
        return spec;
      }
      if (!plain && format.element == DType::kF8E4M3 && format.block.row % 64 == 0 && group > 0 &&
          group % 128 == 0 && format.block_scale_dtype != DType::kF8E8M0) {
        spec.format = FragmentFormat::kFp8Block;
        return spec;
      }
      return unsupported();
    case DType::kU4:
    case DType::kI4:
    case DType::kU8:
    case DType::kI8:
      break;
    default:
      return unsupported();
  }
  const bool four = DTypeBits(format.element) == 4;
  if (plain && !has_zero_points) {
    spec.format = four ? FragmentFormat::kInt4 : FragmentFormat::kInt8;
    return spec;
  }
  const bool wide = group <= 0 || group % 128 == 0;
  const DType scale = format.block_scale_dtype;
  if (four && wide && !has_zero_points && scale != DType::kF32 && rows_alone) {
    spec.format = FragmentFormat::kInt4Half128;
    spec.half_scale = scale == DType::kF16 ? DType::kF16 : DType::kBF16;
  } else if (wide) {
    spec.format = four ? FragmentFormat::kInt4Zero128 : FragmentFormat::kInt8Zero128;
  } else if (four && group % 64 == 0) {
    spec.format = FragmentFormat::kInt4Zero64;
  } else if (group % 32 == 0) {
    spec.format = four ? FragmentFormat::kInt4Zero32 : FragmentFormat::kInt8Zero32;
  } else {
    return unsupported();
  }
  return spec;
}

Status CheckFragmentMatrix(const CanonicalMatrix& matrix, const FragmentSpec& spec) {
  if (!matrix.group_index.empty()) {
    return Status::Unsupported("weights in activation order have no fragment layout");
  }
  const FragmentTraits traits = FragmentTraitsOf(spec.format);
  const int64_t group = matrix.format.block.col;
  if (traits.group > 0 && group > 0 && matrix.scale_col_offset % traits.group != 0) {
    return Status::Unsupported(
        fmt::format("a slice that starts at column {} cuts a group of {}; its start must "
                    "be a multiple of {}",
                    matrix.scale_col_offset, group, traits.group));
  }
  if (traits.scale == FragmentScale::kF32Halves && matrix.scale_row_offset % kFragmentSlab != 0) {
    return Status::Unsupported(
        fmt::format("a slice that starts at row {} cuts a block of {} rows; its start must "
                    "be a multiple of {}",
                    matrix.scale_row_offset, matrix.format.block.row, kFragmentSlab));
  }
  return Status::Ok();
}

FragmentSizes FragmentSizesOf(const FragmentSpec& spec, int64_t hidden, int64_t intermediate, bool gated) {
  FragmentSizes sizes;
  sizes.parts = gated ? 2 : 1;
  sizes.gate_up_rows = FragmentIntermediate(intermediate);
  sizes.down_rows = DownBlocks(hidden) * kFragmentRows;
  sizes.gate_up_bytes = GateUpBlocks(intermediate, gated) * FragmentBlockBytes(spec.format, hidden);
  sizes.down_bytes = DownBlocks(hidden) * FragmentBlockBytes(spec.format, intermediate);
  return sizes;
}

Status PackFragmentExpert(const CanonicalExpert& expert, const FragmentSpec& spec,
                          const FragmentOutput& out) {
  const bool gated = !expert.gate.empty();
  for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    if (matrix != &expert.gate || gated) {
      FMOE_RETURN_IF_ERROR(CheckFragmentMatrix(*matrix, spec));
    }
  }
  const RowReader up(expert.up, spec), down(expert.down, spec), gate(gated ? expert.gate : expert.up, spec);
  const int64_t hidden = expert.up.cols, intermediate = expert.up.rows;
  const FragmentSizes sizes = FragmentSizesOf(spec, hidden, intermediate, gated);
  std::vector<uint8_t> buffer;
  std::array<BlockRow, 16> rows{};
  const int64_t gate_up_block = FragmentBlockBytes(spec.format, hidden);
  for (int64_t b = 0; b < GateUpBlocks(intermediate, gated); ++b) {
    for (int i = 0; i < 16; ++i) {
      const FragmentSource source = GateUpSource(b, i, gated);
      rows[static_cast<size_t>(i)] = {source.up ? &up : &gate, source.column};
    }
    PackBlock(rows, hidden, buffer, out.gate_up + b * gate_up_block);
  }
  const int64_t down_block = FragmentBlockBytes(spec.format, intermediate);
  for (int64_t b = 0; b < DownBlocks(hidden); ++b) {
    for (int i = 0; i < 16; ++i) {
      rows[static_cast<size_t>(i)] = {&down, DownSource(b, i).column};
    }
    PackBlock(rows, intermediate, buffer, out.down + b * down_block);
  }
  const FragmentTraits traits = FragmentTraitsOf(spec.format);
  if (gated) {
    PackVectors(expert.gate, traits, sizes.gate_up_rows, out.gate_up_tensor_scale, out.gate_up_row_scale,
                out.gate_up_bias);
  }
  const int64_t part = gated ? sizes.gate_up_rows : 0;
  PackVectors(expert.up, traits, sizes.gate_up_rows, out.gate_up_tensor_scale + (gated ? 1 : 0),
              Offset(out.gate_up_row_scale, part), Offset(out.gate_up_bias, part));
  PackVectors(expert.down, traits, sizes.down_rows, out.down_tensor_scale, out.down_row_scale, out.down_bias);
  return Status::Ok();
}

namespace {

/// The code of fragment row `row`, column k of a row block.
uint32_t CodeAt(const FragmentTraits& traits, const uint8_t* block, int row, int64_t k) {
  const int64_t slab = k / kFragmentSlab;
  const uint8_t* codes = block + slab / traits.unit_slabs() * traits.unit_bytes() +
                         slab % traits.unit_slabs() * traits.slab_code_bytes();
  const int in_slab = static_cast<int>(k % kFragmentSlab);
  const int lane = 4 * (row & 7) + in_slab / 16, j = in_slab % 16 / 4;
  const int slot = (in_slab % 4 / 2) * 2 + (row >> 3);
  uint32_t word = 0;
  std::memcpy(&word, codes + WordOffset(traits.code_bits, lane, j, slot), 4);
  return CodeOfBits(traits.code, slot, word >> (16 * (k % 2)) & 0xffffU);
}

uint32_t ScaleAt(const FragmentTraits& traits, const uint8_t* block, int row, int64_t k) {
  const int64_t unit_k = traits.unit_slabs() * kFragmentSlab;
  const ScaleSlot slot = ScaleSlotOf(traits, row, static_cast<int>(k % unit_k / traits.group));
  uint32_t scale = 0;
  std::memcpy(&scale, block + k / unit_k * traits.unit_bytes() + traits.scale_offset() + slot.offset,
              static_cast<size_t>(slot.bytes));
  return scale;
}

/// A stored scale back into the matrix.
void StoreScale(CanonicalMatrix& matrix, const FragmentTraits& traits, int largest, uint32_t scale,
                int64_t scale_row, int64_t scale_col) {
  std::byte* at =
      matrix.block_scale.mutable_view().data() + scale_row * matrix.block_scale.view().stride_bytes(0);
  const DType dtype = matrix.block_scale.dtype();
  float value = 0;
  switch (traits.scale) {
    case FragmentScale::kE4M3:
      StoreCode(dtype, at, scale_col, E4m3OfE5m3(scale));
      return;
    case FragmentScale::kE8M0:
      StoreCode(dtype, at, scale_col,
                scale == kE8m0NaN ? scale
                                  : static_cast<uint32_t>(static_cast<int>(scale) + largest -
                                                          LargestExponentByte(traits.code)));
      return;
    case FragmentScale::kHalf:
      if (dtype != DType::kF8E4M3) {
        StoreCode(dtype, at, scale_col, scale);
        return;
      }
      value = DecodeCode(DType::kBF16, scale);
      break;
    case FragmentScale::kF32Zero:
      value = std::bit_cast<float>(scale & ~0xffU);
      if (!matrix.zero_point.empty()) {
        const uint32_t implied = traits.code == FragmentCode::kInt4 ? 8 : 128;
        const uint32_t zero = scale & 0xffU;
        matrix.zero_point.mutable_view()
            .data()[scale_row * matrix.zero_point.view().stride_bytes(0) + scale_col] =
            static_cast<std::byte>(IsSigned(matrix.format.element) ? zero ^ implied : zero);
      }
      break;
    default:
      value = std::bit_cast<float>(scale);
      break;
  }
  if (dtype == DType::kF32) {
    std::memcpy(at + scale_col * 4, &value, 4);
  } else {
    StoreCode(dtype, at, scale_col, EncodeCode(dtype, value));
  }
}

void UnpackRow(CanonicalMatrix& matrix, const FragmentTraits& traits, const uint8_t* block, int row,
               int64_t matrix_row, int largest) {
  if (matrix_row >= matrix.rows) {
    return;
  }
  const DType element = matrix.format.element;
  std::byte* codes = matrix.codes.mutable_view().data() + matrix_row * matrix.codes.view().stride_bytes(0);
  const uint32_t flip = element == DType::kI4 ? 8 : element == DType::kI8 ? 128 : 0;
  const bool six = DTypeBits(element) == 6;
  for (int64_t k = 0; k < matrix.cols; ++k) {
    const uint32_t code = CodeAt(traits, block, row, k);
    StoreCode(element, codes, k, six ? EncodeCode(element, DecodeCode(DType::kF8E4M3, code)) : code ^ flip);
  }
  if (traits.group > 0 && !matrix.block_scale.empty()) {
    for (int64_t k = 0; k < matrix.cols; k += traits.group) {
      StoreScale(matrix, traits, largest, ScaleAt(traits, block, row, k), ScaleRow(matrix, matrix_row),
                 ScaleColumn(matrix, k));
    }
  }
}

/// The exponent that MX scales of a packed matrix are relative to.
int LargestOf(const CanonicalMatrix& matrix, const float* tensor_scale) {
  return 127 + std::ilogb(*tensor_scale / matrix.tensor_scale.value_or(1.0F));
}

}  // namespace

Status UnpackFragmentExpert(const FragmentSpec& spec, const FragmentOutput& packed, CanonicalExpert& expert) {
  const FragmentTraits traits = FragmentTraitsOf(spec.format);
  const bool gated = !expert.gate.empty();
  for (const CanonicalMatrix* matrix : {&expert.up, &expert.down}) {
    if (matrix->codes.empty()) {
      return Status::Usage("unpacking needs matrices whose codes are allocated");
    }
  }
  const int64_t hidden = expert.up.cols, intermediate = expert.up.rows;
  const int up_largest = LargestOf(expert.up, packed.gate_up_tensor_scale + (gated ? 1 : 0));
  const int gate_largest = gated ? LargestOf(expert.gate, packed.gate_up_tensor_scale) : 0;
  const int64_t gate_up_block = FragmentBlockBytes(spec.format, hidden);
  for (int64_t b = 0; b < GateUpBlocks(intermediate, gated); ++b) {
    for (int i = 0; i < 16; ++i) {
      const FragmentSource source = GateUpSource(b, i, gated);
      UnpackRow(source.up ? expert.up : expert.gate, traits, packed.gate_up + b * gate_up_block, i,
                source.column, source.up ? up_largest : gate_largest);
    }
  }
  const int down_largest = LargestOf(expert.down, packed.down_tensor_scale);
  const int64_t down_block = FragmentBlockBytes(spec.format, intermediate);
  for (int64_t b = 0; b < DownBlocks(hidden); ++b) {
    for (int i = 0; i < 16; ++i) {
      UnpackRow(expert.down, traits, packed.down + b * down_block, i, DownSource(b, i).column, down_largest);
    }
  }
  return Status::Ok();
}

float FragmentValue(const FragmentSpec& spec, const uint8_t* block, int row, int64_t k) {
  const FragmentTraits traits = FragmentTraitsOf(spec.format);
  const uint32_t code = CodeAt(traits, block, row, k);
  const uint32_t scale = traits.group > 0 ? ScaleAt(traits, block, row, k) : 0;
  float value = 0;
  switch (traits.code) {
    case FragmentCode::kE2M1:
      value = DecodeCode(DType::kF4E2M1, code);
      break;
    case FragmentCode::kE4M3:
      value = DecodeCode(DType::kF8E4M3, code);
      break;
    case FragmentCode::kBF16:
      return DecodeCode(DType::kBF16, code);
    case FragmentCode::kF16:
      return DecodeCode(DType::kF16, code);
    case FragmentCode::kInt4:
    case FragmentCode::kInt8: {
      const uint32_t zero = traits.scale == FragmentScale::kF32Zero ? scale & 0xffU
                            : traits.code == FragmentCode::kInt4    ? 8U
                                                                    : 128U;
      value = static_cast<float>(static_cast<int>(code) - static_cast<int>(zero));
      break;
    }
  }
  switch (traits.scale) {
    case FragmentScale::kNone:
      return value;
    case FragmentScale::kE4M3:  // the layout's factor is 2^-8
      return value * DecodeCode(DType::kF8E4M3, E4m3OfE5m3(scale)) / 256.0F;
    case FragmentScale::kE8M0:
      return scale == kE8m0NaN ? std::numeric_limits<float>::quiet_NaN()
             : scale == 0      ? 0.0F
                          : std::ldexp(value, static_cast<int>(scale) - LargestExponentByte(traits.code));
    case FragmentScale::kHalf:
      return value * DecodeCode(spec.half_scale, scale);
    case FragmentScale::kF32Zero:
      return value * std::bit_cast<float>(scale & ~0xffU);
    case FragmentScale::kF32Halves:
      return value * std::bit_cast<float>(scale);
  }
  return value;
}

}  // namespace fusedmoe
