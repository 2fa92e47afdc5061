#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

/// The panel layout "N16K64": weights as the CPU kernels read them.
///
/// A stripe is 16 output rows over all of K, one contiguous stream of blocks of 64 (or 128) k. Everything
/// that a block needs lies inside it, so that decoding follows one pointer and one prefetch stream:
///
///     matrix  | stripe 0 | stripe 1 | ...     rows 0-15, rows 16-31, ...; missing rows are zero
///     stripe  | block 0 | block 1 | ...       k 0-63, k 64-127, ...; missing columns are zero
///     block   | 64-byte vectors of codes | 16 scales a group |     lane n of a vector belongs to row n
///     scales  | group 0: 16 scales, 16 zero points | group 1 | ...     in the types that the checkpoint has
///     levels  | 16 units of scales, 16 of minima | group 0: 16 scales, 16 minima | group 1 | ...
///     header  | 1 scale a group, filled up to 64 bytes |     in front of block 0, where stripes share scales
///
///     int8    vector v = 4 k: byte 4n+j holds k = 4v+j
///     4 bit   vector v = 8 k: byte 4n+j holds k = 8v+j in its low and k = 8v+4+j in its high nibble
///     2 bit   vector v = 16 k: byte 4n+j holds k = 16v+j in its low two bits, then 16v+4+j, +8+j, +12+j
///     3, 5, 6 bit   4 k of a vector of int8 each, which share vectors (weights/packed_bits.hpp)
///     mxfp6   a unit of 64 k: 8 vectors of the upper four bits as 4 bit, then 4 of the low two as 2 bit
///     fp8     vector v = 4 k: byte 2n+j holds k = 4v+j, byte 32+2n+j holds k = 4v+2+j (for f16 units)
///     bf16    vector v = 2 k: word 2n+j holds k = 2v+j
///     f16     vector v = 2 k: word 16j+n holds k = 2v+j
///     32 bit  vector v = 1 k: float n
///
/// Codes of 3 and 4 bits are indices of numbers where the format has a codebook.
///
/// A dot product instruction that adds four products a lane takes 4-bit (after one table look-up) and int8
/// vectors as they are. The weights of a block also form the rows of an AMX tile.
namespace fusedmoe {

inline constexpr int64_t kPanelRows = 16;
/// Activations are quantized in units of this many k, so every K is padded to it.
inline constexpr int64_t kPanelUnit = 64;

/// What stands behind the codes of a block, 16 values for each group of k.
enum class PanelScale : uint8_t {
  kNone,  ///< only scales of whole rows, which stand beside the stripes
  kE4M3,  ///< one byte; sign bit clear
  kE8M0,  ///< one byte; the code 0 (2^-127, not a normal float) is stored as 1
  kF32,
  kBF16,
  kF16,
  kI8,        ///< one byte, times the F16 unit of the row and block (WeightFormat::super_cols)
  kStripeF32  ///< one F32 for all rows of a stripe: in front of its blocks (PanelFormat::header_bytes)
};
/// Bytes and dtype of one scale.
int64_t PanelScaleBytes(PanelScale scale);
DType PanelScaleDType(PanelScale scale);

/// What stands behind the scales of a group of integers.
enum class PanelZero : uint8_t {
  kNone,    ///< PanelZeroPoint of the code
  kBytes,   ///< codes
  kFloats,  ///< numbers, F32; scales beside them are F32 too
  kMinima   ///< beside kI8: a byte, times a unit of its own, that is taken from code * scale
};
/// Bytes of one zero point.
int64_t PanelZeroBytes(PanelZero zeros);

/// Floats of 6 bits.
constexpr bool IsPanelFloat6(DType code) {
  return code == DType::kF6E2M3 || code == DType::kF6E3M2;
}
/// Integers of 4 and 8 bits, which panels hold unsigned.
constexpr bool IsPanelInteger(DType code) {
  return code == DType::kU4 || code == DType::kU8;
}

struct PanelFormat {
  DType code = DType::kBF16;  ///< kF4E2M1, kF6E2M3, kF6E3M2, kU4, kU8, kF8E4M3, kF8E5M2, kBF16, kF16, kF32
  PanelScale scale = PanelScale::kNone;
  int64_t group = 0;                    ///< k of one group of scales: 16, 32, 64 or 128
  int64_t block = kPanelUnit;           ///< k of a block
  PanelZero zeros = PanelZero::kNone;   ///< one for each scale, behind those of its group
  Codebook codebook = Codebook::kNone;  ///< of kU4, and of kU8 in 3 bits: codes are indices of numbers
  int code_bits = 0;                    ///< of kU8: those that codes need, where these are 2, 3, 5 or 6
  bool operator==(const PanelFormat&) const = default;

  /// True for codes of up to eight bits, except floats of eight (weights/code_planes.hpp).
  bool in_planes() const { return IsPanelInteger(code) || DTypeBits(code) < 8; }
  /// Bits that a code takes in the panel.
  int bits() const { return code_bits != 0 ? code_bits : DTypeBits(code); }
  int64_t code_bytes() const { return kPanelRows * block * bits() / 8; }
  bool has_zero_points() const { return zeros != PanelZero::kNone; }
  /// Bytes of the scales and zero points of one group in a block.
  int64_t group_bytes() const;
  /// Bytes of the units of a block's scales and minima, which stand in front of them.
  int64_t unit_bytes() const;
  int64_t scale_bytes() const { return group == 0 ? 0 : unit_bytes() + block / group * group_bytes(); }
  int64_t block_bytes() const { return code_bytes() + scale_bytes(); }
  /// What stands in front of the blocks of a stripe: whole lines.
  int64_t header_bytes(int64_t blocks) const;
  int64_t stripe_bytes(int64_t blocks) const { return header_bytes(blocks) + blocks * block_bytes(); }
  /// True where weights that ask for `other` lose nothing in this format: it is the same, except that it may
  /// have scales and zero points in fp32, scales of rows instead of stripes, and zero points that need not be
  /// there.
  bool Holds(const PanelFormat& other) const;
  /// "n16k64(F4, E4M3 per 16)", "n16k64(U4, BF16 and zero per 64)", "n16k64(F8, F32 per 16x64)",
  /// "n16k128(IQ4, I8 per 32)", "n16k128(6 bits, I8 per 16)", "n16k128(IQ2 in 3 bits, I8 per 32)"
  std::string ToString() const;
};

/// The panel format that holds such weights without loss, or why there is none. `has_zero_points`: stored
/// ones, of format.zero_point_dtype. `stripes_cut`: CutsStripes of some matrix of the layer.
Result<PanelFormat> ChoosePanelFormat(const WeightFormat& format, bool has_zero_points,
                                      bool stripes_cut = false);
/// The same of one matrix.
Result<PanelFormat> ChoosePanelFormat(const CanonicalMatrix& matrix);
/// True where a stripe of the matrix has more than one row of block scales: blocks of fewer than 16 rows, or
/// a slice that begins elsewhere in a block than on a stripe.
bool CutsStripes(const CanonicalMatrix& matrix);
/// The code of a source element as panels store it: integers unsigned.
uint32_t PanelCode(DType source, uint32_t code);
/// What a code of integers means that no zero point stands beside: the middle of all.
int PanelZeroPoint(const PanelFormat& format);

/// The position of every packed k in the source matrix; -1 is padding. Groups of scales start on multiples of
/// the panel's group: activation order is undone here, and a slice that starts inside a group pads before it.
/// Super-blocks start on its blocks, likewise.
std::vector<int32_t> PanelColumns(const CanonicalMatrix& matrix, const PanelFormat& format);
/// True when PanelColumns is 0, 1, 2, ... and then padding.
bool PanelColumnsAreIdentity(std::span<const int32_t> columns);

/// Largest number of columns that PanelColumns can give for a matrix of `cols` columns, and what kernels are
/// run with. `reordered`: the matrix has a group_index or may start inside a group.
int64_t PanelColumnsBound(const WeightFormat& weight, const PanelFormat& format, int64_t cols,
                          bool reordered);

/// Writes stripe `stripe` (rows 16 * stripe ...) of the matrix: `columns.size() / format.block` blocks.
/// Columns must be a multiple of format.block, as PanelColumns rounds them.
void PackPanelStripe(const CanonicalMatrix& matrix, const PanelFormat& format,
                     std::span<const int32_t> columns, int64_t stripe, std::byte* out);

/// The scale column of every packed group, -1 where it has no columns; a group takes that of its first one.
/// Empty for formats without scales.
std::vector<int32_t> PanelScaleColumns(const CanonicalMatrix& matrix, const PanelFormat& format,
                                       std::span<const int32_t> columns);
/// Block scales of the row that a row of the matrix uses.
const std::byte* PanelScaleRow(const CanonicalMatrix& matrix, int64_t row);
/// The same of zero points.
const std::byte* PanelZeroRow(const CanonicalMatrix& matrix, int64_t row);
/// The scales and zero points of a stripe to behind the codes of its blocks, or in front of all of them; rows
/// and groups that do not exist are zero.
void PackPanelScales(const CanonicalMatrix& matrix, const PanelFormat& format,
                     std::span<const int32_t> scale_columns, int64_t stripe, std::byte* out);

/// The factor of each of the 16 rows that the kernels apply at the end: channel scale times tensor scale.
void PanelRowScales(const CanonicalMatrix& matrix, int64_t stripe, float* out);

/// The inverse: the real value of element (row of the stripe of so many blocks, packed k), without row
/// scales.
float PanelValue(const PanelFormat& format, const std::byte* stripe, int64_t blocks, int64_t row,
                 int64_t packed_col);

/// The inverse step: the codes of a matrix (as `weight.element`) back from its stripes; scales are not
/// touched. Not of panels that hold products.
void UnpackPanelCodes(const WeightFormat& weight, const PanelFormat& format, std::span<const int32_t> columns,
                      const std::byte* stripes, int64_t rows, std::byte* codes, int64_t row_bytes);

}  // namespace fusedmoe
