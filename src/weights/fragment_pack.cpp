#include "weights/fragment_pack.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "core/checked_math.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "weights/block_products.hpp"
#include "weights/codebook.hpp"
#include "weights/fragment_codes.hpp"
#include "weights/fragment_stager.hpp"

namespace fusedmoe {
namespace {

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

// Where zero points are any numbers, or groups too short for scales beside the codes of a lane.
std::optional<FragmentFormat> FormatOfOffsets(const WeightFormat& format) {
  const bool four = DTypeBits(format.element) == 4;
  const int64_t group = format.block.col;
  if (format.block.row != 1 || group <= 0 || group % 16 != 0) {
    return std::nullopt;
  }
  if (group % 32 == 0) {
    return four ? FragmentFormat::kInt4Offset32 : FragmentFormat::kInt8Offset32;
  }
  return four ? FragmentFormat::kInt4Offset16 : FragmentFormat::kInt8Offset16;
}

// Indices.
std::optional<FragmentFormat> FormatOfCodebook(const WeightFormat& format, bool zero_points) {
  const bool held = format.codebook == Codebook::kIq4 && format.element == DType::kU4 && !zero_points &&
                    format.block.row == 1 && format.block.col > 0 && format.block.col % 32 == 0;
  return held ? std::optional(FragmentFormat::kIq4) : std::nullopt;
}

// `plain`: no scales but those of rows and of the tensor, and no zero points.
std::optional<FragmentFormat> FormatOfIntegers(const WeightFormat& format, bool plain, bool zero_points) {
  const bool four = DTypeBits(format.element) == 4;
  const int64_t group = format.block.col;
  if (format.code_bits != 0) {
    const bool six =
        format.code_bits == 6 && !zero_points && format.block.row == 1 && group > 0 && group % 16 == 0;
    return six ? std::optional(FragmentFormat::kInt6) : std::nullopt;
  }
  if (plain) {
    return four ? FragmentFormat::kInt4 : FragmentFormat::kInt8;
  }
  if (zero_points && format.zero_point_dtype != DType::kU8) {
    return FormatOfOffsets(format);
  }
  if (group <= 0 || group % 128 == 0) {
    const bool half =
        four && !zero_points && format.block.row == 1 && format.block_scale_dtype != DType::kF32;
    return half   ? FragmentFormat::kInt4Half128
           : four ? FragmentFormat::kInt4Zero128
                  : FragmentFormat::kInt8Zero128;
  }
  if (four && group % 64 == 0) {
    return FragmentFormat::kInt4Zero64;
  }
  if (group % 32 == 0) {
    return four ? FragmentFormat::kInt4Zero32 : FragmentFormat::kInt8Zero32;
  }
  return FormatOfOffsets(format);
}

std::optional<FragmentFormat> FormatOfFloats(const WeightFormat& format, bool plain) {
  if (BecomesProducts(format)) {
    return FragmentFormat::kBf16;
  }
  // Groups of `least` columns, or a multiple, under scales of `scale`.
  const auto grouped = [&](DType scale, int64_t least) {
    return !plain && format.block.row == 1 && format.block_scale_dtype == scale && format.block.col > 0 &&
           format.block.col % least == 0;
  };
  const bool mx = grouped(DType::kF8E8M0, 32);
  const std::optional<FragmentFormat> none;
  switch (format.element) {
    case DType::kBF16:
      return plain ? FragmentFormat::kBf16 : none;
    case DType::kF16:
      return plain ? FragmentFormat::kF16 : none;
    case DType::kF4E2M1:
      return grouped(DType::kF8E4M3, 16) ? FragmentFormat::kNvfp4 : mx ? FragmentFormat::kMxfp4 : none;
    case DType::kF6E2M3:
      return mx ? FragmentFormat::kMxfp6E2M3 : none;
    case DType::kF6E3M2:
      return mx ? FragmentFormat::kMxfp6E3M2 : none;
    case DType::kF8E4M3: {
      const bool blocks = !plain && format.block.row % 64 == 0 && format.block.col > 0 &&
                          format.block.col % 128 == 0 && format.block_scale_dtype != DType::kF8E8M0;
      return plain    ? FragmentFormat::kFp8
             : mx     ? FragmentFormat::kMxfp8
             : blocks ? FragmentFormat::kFp8Block
                      : none;
    }
    default:
      return none;
  }
}

}  // namespace

FragmentSpec FragmentSpec::OfGateUp() const {
  FragmentSpec spec = *this;
  spec.format = gate_up_format();
  spec.own_gate_up.reset();
  return spec;
}

std::string FragmentSpec::ToString() const {
  if (own_gate_up) {
    FragmentSpec down = *this;
    down.own_gate_up.reset();
    return OfGateUp().ToString() + " and " + down.ToString();
  }
  const FragmentTraits traits = FragmentTraitsOf(format);
  return fmt::format("fragment({}{}, {} bytes a unit of 16 x {}{})", traits.name,
                     traits.scale == FragmentScale::kHalf ? fmt::format(" {}", DTypeName(half_scale)) : "",
                     traits.unit_bytes(), traits.unit_slabs() * kFragmentSlab,
                     traits.scales_apart() ? ", scales behind all codes" : "");
}

Result<FragmentSpec> ChooseFragmentSpec(const WeightFormat& format, bool has_zero_points) {
  const bool row_blocks = BlocksAreRows(format) && !has_zero_points;
  const bool plain = !format.has_block_scale() || row_blocks;
  const bool integers = IsIntegerCode(format.element);
  const std::optional<FragmentFormat> fragment =
      format.codebook != Codebook::kNone ? FormatOfCodebook(format, has_zero_points)
      : integers ? FormatOfIntegers(format, plain && !has_zero_points, has_zero_points)
                 : FormatOfFloats(format, plain);
  if (!fragment) {
    return Status::Unsupported(fmt::format("no fragment layout holds {}", Describe(format)));
  }
  FragmentSpec spec;
  spec.format = *fragment;
  spec.row_scale = format.has_channel_scale || row_blocks;
  spec.products = BecomesProducts(format);
  if (*fragment == FragmentFormat::kInt4Half128) {
    spec.half_scale = format.block_scale_dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
  }
  return spec;
}

Status CheckFragmentMatrix(const CanonicalMatrix& matrix, const FragmentSpec& spec) {
  const FragmentTraits traits = FragmentTraitsOf(spec.format);
  const int64_t group = matrix.format.block.col;
  if (traits.group > 0 && group > 0 && matrix.scale_col_offset % traits.group != 0) {
    return Status::Unsupported(
        fmt::format("a slice that starts at column {} cuts a group of {}; its start must "
                    "be a multiple of {}",
                    matrix.scale_col_offset, group, traits.group));
  }
  const DType scales = matrix.format.block_scale_dtype;
  if (traits.scale == FragmentScale::kHalf && scales != spec.half_scale && scales != DType::kF8E4M3) {
    return Status::BadInput(fmt::format("has scales of {}; the layout was made for {}", DTypeName(scales),
                                        DTypeName(spec.half_scale)));
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
  sizes.gate_up_bytes =
      FragmentPlacesOf(spec.gate_up_format(), GateUpBlocks(intermediate, gated), hidden).bytes;
  sizes.down_bytes = FragmentPlacesOf(spec.format, DownBlocks(hidden), intermediate).bytes;
  return sizes;
}

namespace {

template <FragmentFormat kFormat>
void ArrangePiece(const StagedRows& staged, const FragmentPiece& piece, const FragmentPlaces& places,
                  uint8_t* matrix) {
  const int64_t slabs = staged.code_bytes * 8 / FragmentTraitsOf(kFormat).code_bits / kFragmentSlab;
  for (int64_t b = 0; b < piece.blocks; ++b) {
    for (int64_t slab = 0; slab < slabs; ++slab) {
      for (int lane = 0; lane < 32; ++lane) {
        ArrangeSlab<kFormat>(staged, b, slab, lane, places, piece.first_block + b, matrix);
      }
    }
  }
}

}  // namespace

Status PackFragmentExpert(const CanonicalExpert& expert, const FragmentSpec& spec,
                          const FragmentOutput& out) {
  FMOE_ASSIGN_OR_RETURN(const FragmentStager stager, FragmentStager::Create(expert, spec));
  std::vector<uint32_t> staged;  // words: rows are read as such
  std::vector<int64_t> nan_rows;
  for (const FragmentPiece& piece : stager.Cut(0)) {
    staged.resize(static_cast<size_t>(stager.StagedBytes(piece) / 4));
    auto* const bytes = reinterpret_cast<uint8_t*>(staged.data());
    stager.Stage(piece, bytes, nan_rows);
    const bool down = piece.part == FragmentPart::kDown;
    uint8_t* const matrix = down ? out.down : out.gate_up;
    switch (down ? spec.format : spec.gate_up_format()) {
#define FMOE_ARRANGE_CASE(id, name, code, bits, scale, group)                                           \
  case FragmentFormat::id:                                                                              \
    ArrangePiece<FragmentFormat::id>(stager.View(piece, bytes), piece, stager.PlacesOf(piece), matrix); \
    break;
      FMOE_FRAGMENT_FORMATS(FMOE_ARRANGE_CASE)
#undef FMOE_ARRANGE_CASE
    }
  }
  return stager.Vectors(nan_rows, out);
}

namespace {

/// The code of fragment row `row`, column k of a row block.
uint32_t CodeAt(const FragmentTraits& traits, const uint8_t* block, int row, int64_t k) {
  const int64_t slab = k / kFragmentSlab;
  const uint8_t* codes = block + slab / traits.unit_slabs() * traits.unit_stride() +
                         slab % traits.unit_slabs() * traits.slab_code_bytes();
  const int in_slab = static_cast<int>(k % kFragmentSlab);
  const int lane = 4 * (row & 7) + in_slab / 16, j = in_slab % 16 / 4;
  const int slot = (in_slab % 4 / 2) * 2 + (row >> 3), column = in_slab % 2;
  const auto word_at = [codes](int offset) {
    uint32_t word = 0;
    std::memcpy(&word, codes + offset, 4);
    return word;
  };
  if (traits.code_bits == 6) {
    const SixBitTable table = SixBitTableOf(traits.code);
    const int pair = j % 2 * 4 + slot;
    uint32_t code = 0;
    for (int bit = 0; bit < 6; ++bit) {
      const uint32_t word = word_at(SixBitOffset(lane, j, table.Word(pair, bit)));
      code = code << 1 | (word >> ((table.Bit(pair, bit) + 16 * column) % 32) & 1);
    }
    return code;
  }
  const uint32_t word = word_at(WordOffset(traits.code, traits.code_bits, lane, j, slot));
  if (traits.code == FragmentCode::kIq4) {
    return word >> IndexBit(slot, column) & 15;
  }
  return CodeOfBits(traits.code, slot, column == 0 ? word : OtherHalf(word));
}

/// `scales`: of the first unit of the row block.
uint32_t ScaleAt(const FragmentTraits& traits, const uint8_t* scales, int row, int64_t k) {
  const int64_t unit_k = traits.unit_slabs() * kFragmentSlab;
  const int offset = ScaleOffset(traits.scale, row, static_cast<int>(k % unit_k / traits.group));
  uint32_t scale = 0;
  std::memcpy(&scale, scales + k / unit_k * traits.scale_stride() + offset,
              static_cast<size_t>(ScaleSize(traits.scale)));
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
    case FragmentScale::kBf16:
      value = DecodeCode(DType::kBF16, scale);
      break;
    case FragmentScale::kF32Zero:
      value = std::bit_cast<float>(scale & ~0xffU);
      if (!matrix.zero_point.empty()) {
        const uint32_t implied = traits.code == FragmentCode::kInt4 ? 8 : 128;
        const uint32_t zero = scale & 0xffU;
        matrix.zero_point.mutable_view()
            .data()[scale_row * matrix.zero_point.view().stride_bytes(0) + scale_col] =
            static_cast<std::byte>(IsSignedInteger(matrix.format.element) ? zero ^ implied : zero);
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

void UnpackRow(CanonicalMatrix& matrix, const FragmentTraits& traits, const uint8_t* block,
               const uint8_t* scales, int row, int64_t matrix_row, int largest) {
  if (matrix_row >= matrix.rows) {
    return;
  }
  const DType element = matrix.format.element;
  std::byte* codes = matrix.codes.mutable_view().data() + matrix_row * matrix.codes.view().stride_bytes(0);
  const uint32_t flip = element == DType::kI4                                         ? 8
                        : element == DType::kU8 && traits.code == FragmentCode::kInt8 ? 128
                                                                                      : 0;
  for (int64_t k = 0; k < matrix.cols; ++k) {
    StoreCode(element, codes, k, CodeAt(traits, block, row, k) ^ flip);
  }
  if (traits.group > 0 && !matrix.block_scale.empty()) {
    for (int64_t k = 0; k < matrix.cols; k += traits.group) {
      StoreScale(matrix, traits, largest, ScaleAt(traits, scales, row, k),
                 FragmentScaleRow(matrix, matrix_row), FragmentScaleColumn(matrix, k));
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
  if (spec.products) {
    return Status::Unsupported("fragments hold products of codes and scales; neither can be had back");
  }
  if (traits.scale == FragmentScale::kOffset || spec.own_gate_up) {
    return Status::Unsupported("fragments hold offsets; which zero points they were made of is not known");
  }
  for (const CanonicalMatrix* matrix : {&expert.up, &expert.down}) {
    if (matrix->codes.empty()) {
      return Status::Usage("unpacking needs matrices whose codes are allocated");
    }
  }
  const int64_t hidden = expert.up.cols, intermediate = expert.up.rows;
  const int up_largest = LargestOf(expert.up, packed.gate_up_tensor_scale + (gated ? 1 : 0));
  const int gate_largest = gated ? LargestOf(expert.gate, packed.gate_up_tensor_scale) : 0;
  const int64_t gate_up_blocks = GateUpBlocks(intermediate, gated);
  const FragmentPlaces gate_up = FragmentPlacesOf(spec.format, gate_up_blocks, hidden);
  for (int64_t b = 0; b < gate_up_blocks; ++b) {
    for (int i = 0; i < 16; ++i) {
      const FragmentSource source = GateUpSource(b, i, gated);
      UnpackRow(source.up ? expert.up : expert.gate, traits, packed.gate_up + gate_up.Codes(b),
                packed.gate_up + gate_up.Scales(b), i, source.column, source.up ? up_largest : gate_largest);
    }
  }
  const int down_largest = LargestOf(expert.down, packed.down_tensor_scale);
  const FragmentPlaces down = FragmentPlacesOf(spec.format, DownBlocks(hidden), intermediate);
  for (int64_t b = 0; b < DownBlocks(hidden); ++b) {
    for (int i = 0; i < 16; ++i) {
      UnpackRow(expert.down, traits, packed.down + down.Codes(b), packed.down + down.Scales(b), i,
                DownSource(b, i).column, down_largest);
    }
  }
  return Status::Ok();
}

float FragmentValue(const FragmentSpec& spec, const uint8_t* block, const uint8_t* scales, int row,
                    int64_t k) {
  const FragmentTraits traits = FragmentTraitsOf(spec.format);
  const uint32_t code = CodeAt(traits, block, row, k);
  const uint32_t scale = traits.group > 0 ? ScaleAt(traits, scales, row, k) : 0;
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
    case FragmentCode::kE2M3:
      value = DecodeCode(DType::kF6E2M3, code);
      break;
    case FragmentCode::kE3M2:
      value = DecodeCode(DType::kF6E3M2, code);
      break;
    case FragmentCode::kIq4:
      value = std::ldexp(static_cast<float>(CodebookOf(Codebook::kIq4).values[code]), kIntegerExponent);
      break;
    case FragmentCode::kInt6:
      value = std::ldexp(static_cast<float>(static_cast<int>(code) - 32), kIntegerExponent);
      break;
    case FragmentCode::kInt4:
    case FragmentCode::kInt8: {
      const bool four = traits.code == FragmentCode::kInt4;
      const uint32_t zero = traits.scale == FragmentScale::kF32Zero ? scale & 0xffU : four ? 8U : 128U;
      value =
          std::ldexp(static_cast<float>(static_cast<int>(four ? code : code ^ 128) - static_cast<int>(zero)),
                     kIntegerExponent);
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
    case FragmentScale::kBf16:
      return value * DecodeCode(DType::kBF16, scale);
    case FragmentScale::kF32Zero:
      return value * std::bit_cast<float>(scale & ~0xffU);
    case FragmentScale::kOffset:
      return value * DecodeCode(DType::kBF16, scale & 0xffffU) + DecodeCode(DType::kBF16, scale >> 16);
    case FragmentScale::kF32Halves:
      return value * std::bit_cast<float>(scale);
  }
  return value;
}

}  // namespace fusedmoe
