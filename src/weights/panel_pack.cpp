#include <algorithm>
#include <cstring>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/block_products.hpp"
#include "weights/code_planes.hpp"
#include "weights/panel.hpp"

/// Matrices to stripes: the codes; their scales are those of panel_scales.cpp.
namespace fusedmoe {
namespace {

/// Codes of one source row in packed order, one code in each element of `out` (a byte up to 8 bits, else the
/// width).
template <typename Code>
void GatherCodes(const CanonicalMatrix& matrix, std::span<const int32_t> columns, int64_t row, Code* out) {
  const std::byte* source = matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0);
  const DType element = matrix.format.element;
  const auto count = static_cast<int64_t>(columns.size());
  if constexpr (sizeof(Code) > 1) {
    const auto* codes = reinterpret_cast<const Code*>(source);
    for (int64_t k = 0; k < count; ++k) {
      Code code = 0;
      if (columns[static_cast<size_t>(k)] >= 0) {
        std::memcpy(&code, codes + columns[static_cast<size_t>(k)], sizeof(Code));
      }
      out[k] = code;
    }
  } else {
    for (int64_t k = 0; k < count; ++k) {
      const int32_t col = columns[static_cast<size_t>(k)];
      out[k] = col < 0 ? Code{0} : static_cast<Code>(PanelCode(element, LoadCode(element, source, col)));
    }
  }
}

/// The same for columns in their own order, a loop that compilers turn into vectors.
void CopyNibbles(const std::byte* source, int64_t cols, uint32_t flip, uint8_t* out) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(source);
  for (int64_t i = 0; i < cols / 2; ++i) {
    const uint8_t pair = static_cast<uint8_t>(bytes[i] ^ (flip | flip << 4));
    out[2 * i] = pair & 15;
    out[2 * i + 1] = pair >> 4;
  }
  if (cols % 2 != 0) {
    out[cols - 1] = static_cast<uint8_t>((bytes[cols / 2] ^ flip) & 15);
  }
}

void CopyBytes(const std::byte* source, int64_t cols, uint32_t flip, uint8_t* out) {
  for (int64_t i = 0; i < cols; ++i) {
    out[i] = static_cast<uint8_t>(static_cast<uint8_t>(source[i]) ^ flip);
  }
}

void LoadByteCodes(const CanonicalMatrix& matrix, std::span<const int32_t> columns, bool identity,
                   int64_t row, uint8_t* out) {
  const DType element = matrix.format.element;
  const bool nibbles = DTypeBits(element) == 4;
  if (!identity || DTypeBits(element) == 6) {
    GatherCodes(matrix, columns, row, out);
    return;
  }
  const std::byte* source = matrix.codes.view().data() + row * matrix.codes.view().stride_bytes(0);
  const uint32_t flip = PanelCode(element, 0);
  if (nibbles) {
    CopyNibbles(source, matrix.cols, flip, out);
  } else {
    CopyBytes(source, matrix.cols, flip, out);
  }
  std::fill(out + matrix.cols, out + columns.size(), uint8_t{0});
}

/// One row of codes of a block, by their bits.
void ScatterPlanes(const PanelFormat& format, const uint8_t* codes, int64_t row, uint8_t* block) {
  const CodePlanes planes = CodePlanesOf(format);
  const int64_t unit_bytes = kPanelUnit * kPanelRows * format.bits() / 8;
  for (int index = 0; index < planes.count; ++index) {
    const CodePlane plane = planes.planes[index];
    const PackedSet set = PackedSetOf(plane.bits);
    for (int64_t k = 0; k < format.block; k += 4 * set.fours) {
      uint32_t words[kMostPackedVectors] = {};
      for (int four = 0; four < set.fours; ++four) {
        uint32_t bytes = 0;
        std::memcpy(&bytes, codes + k + 4 * four, 4);
        const PackedPieces pieces = PackedPiecesOf(plane.bits, four);
        for (int i = 0; i < pieces.count; ++i) {
          const PackedPiece& piece = pieces.of[i];
          const uint32_t mask = ((1U << piece.count) - 1) * 0x01010101U;
          words[piece.vector] |= (bytes >> (plane.first_bit + piece.at) & mask) << piece.from;
        }
      }
      uint8_t* at = block + k / kPanelUnit * unit_bytes + plane.SetOf(k % kPanelUnit) + row * 4;
      for (int vector = 0; vector < set.vectors; ++vector) {
        std::memcpy(at + vector * 64, &words[vector], 4);
      }
    }
  }
}

/// Spreads one row of codes over the blocks of its stripe.
void ScatterRow(const PanelFormat& format, const uint8_t* codes, int64_t count, int64_t row,
                std::byte* stripe) {
  const int64_t block_bytes = format.block_bytes();
  for (int64_t first = 0; first < count; first += format.block, stripe += block_bytes) {
    const uint8_t* in = codes + first;
    auto* out = reinterpret_cast<uint8_t*>(stripe);
    if (format.in_planes()) {
      ScatterPlanes(format, in, row, out);
    } else {
      for (int64_t pair = 0; pair < format.block / 2; ++pair) {
        std::memcpy(out + pair * 32 + row * 2, in + 2 * pair, 2);
      }
    }
  }
}

template <typename Code>
void ScatterWide(const PanelFormat& format, const Code* codes, int64_t count, int64_t row,
                 std::byte* stripe) {
  const int64_t block_bytes = format.block_bytes();
  constexpr int64_t kPerLane = 4 / static_cast<int64_t>(sizeof(Code));
  if (format.code == DType::kF16) {
    for (int64_t first = 0; first < count; first += format.block, stripe += block_bytes) {
      for (int64_t k = 0; k < format.block; ++k) {
        std::memcpy(stripe + k * 32 + row * 2, codes + first + k, 2);
      }
    }
    return;
  }
  for (int64_t first = 0; first < count; first += format.block, stripe += block_bytes) {
    for (int64_t v = 0; v < format.block / kPerLane; ++v) {
      std::memcpy(stripe + v * 64 + row * 4, codes + first + v * kPerLane, 4);
    }
  }
}

}  // namespace

void PackPanelStripe(const CanonicalMatrix& matrix, const PanelFormat& format,
                     std::span<const int32_t> columns, int64_t stripe, std::byte* out) {
  const auto count = static_cast<int64_t>(columns.size());
  const int64_t first_row = stripe * kPanelRows;
  const int64_t num_rows = std::clamp<int64_t>(matrix.rows - first_row, 0, kPanelRows);
  if (num_rows < kPanelRows) {
    std::memset(out, 0, static_cast<size_t>(format.stripe_bytes(count / format.block)));
  }
  std::byte* blocks = out + format.header_bytes(count / format.block);
  const bool identity = PanelColumnsAreIdentity(columns);
  const int bits = DTypeBits(format.code);
  std::vector<uint16_t> products;
  if (BecomesProducts(matrix.format)) {
    products.resize(static_cast<size_t>(matrix.cols));
  }
  std::vector<uint32_t> buffer(static_cast<size_t>(CeilDiv(count * std::max(bits, 8), 32)));
  for (int64_t lane = 0; lane < num_rows; ++lane) {
    const int64_t row = first_row + lane;
    if (bits <= 8) {
      auto* codes = reinterpret_cast<uint8_t*>(buffer.data());
      LoadByteCodes(matrix, columns, identity, row, codes);
      ScatterRow(format, codes, count, lane, blocks);
    } else if (bits == 16) {
      auto* codes = reinterpret_cast<uint16_t*>(buffer.data());
      if (!products.empty()) {
        MultiplyRow(matrix, row, products.data());
        for (int64_t k = 0; k < count; ++k) {
          const int32_t col = columns[static_cast<size_t>(k)];
          codes[k] = col < 0 ? uint16_t{0} : products[static_cast<size_t>(col)];
        }
      } else {
        GatherCodes(matrix, columns, row, codes);
      }
      ScatterWide(format, codes, count, lane, blocks);
    } else {
      GatherCodes(matrix, columns, row, buffer.data());
      ScatterWide(format, buffer.data(), count, lane, blocks);
    }
  }
  if (format.scale != PanelScale::kNone) {
    PackPanelScales(matrix, format, PanelScaleColumns(matrix, format, columns), stripe, out);
  }
}

}  // namespace fusedmoe
