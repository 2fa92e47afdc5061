#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>

/// Schemes and the formats that they are made of: plain values. All functions here are pure and thread-safe.

namespace fusedmoe {

/// Rows x columns of a matrix that share one scale; -1 means "all". For activations rows are tokens, for
/// weights output rows: {-1,-1} per tensor, {1,-1} per token or output channel, {1,g} groups of g along K,
/// {128,128} blocks.
struct GroupShape {
  int64_t row = -1;
  int64_t col = -1;
  bool operator==(const GroupShape&) const = default;
};

inline constexpr GroupShape kPerTensor{-1, -1};
inline constexpr GroupShape kPerRow{1, -1};  ///< per token (activations) or per output channel (weights)

/// Numbers that codes of few bits stand for, where these are no numbers themselves: GGUF's IQ types have
/// sixteen values or fewer (weights/codebook.hpp).
enum class Codebook : uint8_t { kNone, kIq4, kIq3Xxs, kIq3S, kIq2, kIq1S, kIq1M, kE2m1 };

/// How a weight matrix is encoded: real = (code - zero) * block_scale * channel_scale * tensor_scale, with
/// the factors that exist. Decoding always multiplies (docs/scales.md).
struct WeightFormat {
  DType element = DType::kBF16;
  /// Extent of one block scale; {-1,-1} when there is none.
  GroupShape block = kPerTensor;
  DType block_scale_dtype = DType::kF32;
  bool has_channel_scale = false;  ///< F32 [rows]
  bool has_tensor_scale = false;   ///< one F32 for the matrix (gate, up and down have their own)
  bool may_have_zero_point = false;
  /// dtype of stored zero points: kU8 (codes of the element) or kF32 (any finite number: the minima of GGUF's
  /// types).
  DType zero_point_dtype = DType::kU8;
  /// Columns of a super-block (GGUF's K types): in a row of it each F32 scale is an 8-bit integer times one
  /// unit, each minimum (zero * scale) such an integer times another (CanonicalMatrix::super_scale). 0: none.
  int64_t super_cols = 0;
  /// Codes (kU4, or kU8 of code_bits) index this codebook. Set by layouts only, from what
  /// StoredIntegers::codebook says; sources of weights deliver the decoded bytes.
  Codebook codebook = Codebook::kNone;
  /// Bits that codes of kU8 take: 2, 3, 5 or 6; 0: all eight. Set by layouts too, from StoredIntegers::bits
  /// and wider codes.
  int code_bits = 0;
  /// The code that means zero when no zero points are stored: the middle of all codes of integers, else 0.
  int implied_zero() const {
    return codebook != Codebook::kNone ? 0
           : code_bits != 0            ? 1 << (code_bits - 1)
           : element == DType::kU4     ? 8
           : element == DType::kU8     ? 128
                                       : 0;
  }
  bool has_block_scale() const { return !(block == kPerTensor); }
  bool quantized() const {
    return element != DType::kF32 && element != DType::kF16 && element != DType::kBF16;
  }
  bool operator==(const WeightFormat&) const = default;
};

/// How a matrix was stored before it was widened to the common format of its layer: bytes in the shortest
/// groups, with zero points where one of the types has minima (GGUF: Q4_K beside Q6_K), or bytes for types of
/// few values. A layout with a format for each GEMM can narrow it again without loss (weights/narrow.hpp).
struct StoredIntegers {
  int bits = 0;       ///< 1 to 8: they fit around the middle of a code, or below zero points; 0: unknown
  int64_t group = 0;  ///< columns of a scale
  bool zero_points = false;         ///< they have some, F32; else `center`, or that of the codebook, is zero
  int center = 0;                   ///< of codes as they stand below zero points
  DType scale_dtype = DType::kF32;  ///< that holds the scales: F16 or F32
  int64_t super_cols = 0;           ///< as WeightFormat::super_cols; the matrix has the units
  int super_exponent = 0;           ///< scales are integers of their units times two to the power of this
  Codebook codebook = Codebook::kNone;  ///< all values are numbers of it, and `bits` are those of an index
  bool operator==(const StoredIntegers&) const = default;
};

/// The exponent of an MX block scale, from the largest magnitude of the block (docs/numerics.md, "MX rules").
enum class MxScaleRule : uint8_t {
  kEven,   ///< compressed-tensors, Quark: the exponent is bumped from 1.75 * 2^n upwards; then minus emax
  kFloor,  ///< OCP text: floor(log2 amax) - emax
  kCeil,   ///< ModelOpt: ceil(log2(amax / max element))
  kNoElementMax,     ///< vLLM's torch MXFP8: floor(log2 amax), without subtracting emax
  kFloorOfQuotient,  ///< vLLM's CUDA experts quantizer: floor(log2(amax / max element))
  kEvenE2m1  ///< compressed-tensors' MXFP8: bumped from 1.75 * 2^n upwards, as for e2m1, then minus emax
};

enum class IntRounding : uint8_t { kHalfEven, kHalfAway, kTruncate };

/// How scales and codes of activations come about. Set by the producer of a checkpoint; the defaults are the
/// accurate definition (IEEE division, round to nearest even, no floor beyond what avoids 0/0).
struct ActivationRule {
  float amax_divisor = 0.0F;  ///< scale = amax / divisor; 0: the largest finite element (448, 127, 6 ...)
  /// Smallest scale; 0: an all-zero group gets codes 0 and the scale that its format gives.
  float scale_floor = 0.0F;
  bool multiply_by_reciprocal = false;         ///< codes from x * (1/scale) instead of x / scale
  bool multiply_by_divisor_over_amax = false;  ///< integer codes from x * (1/amax * divisor), in fp64
  MxScaleRule mx_scale = MxScaleRule::kEven;
  IntRounding int_rounding = IntRounding::kHalfEven;
  bool round_to_bf16_first = false;  ///< rows are rounded to bf16 before their amax is taken
  bool power_of_two_scale = false;   ///< scales rounded up to a power of two (UE8M0 mode of block FP8)
  float amax_upper_bound = 0.0F;     ///< larger amax count as this, and their values saturate (0: no bound)
  float zero_scale = 0.0F;           ///< stored in place of a scale that is, or rounds to, zero
  bool ties_toward_zero = false;     ///< F4 codes: every tie goes down and zero is code 8 (ModelOpt's MXFP4)
  bool operator==(const ActivationRule&) const = default;
};

/// How the input of a GEMM is quantized; `element` empty: it is not.
struct ActivationFormat {
  std::optional<DType> element;
  GroupShape group = kPerTensor;
  DType scale_dtype = DType::kF32;
  /// A stored F32 input scale is needed: the scale itself (FP8, INT8 per tensor, static) or the second level
  /// above the block scales (NVFP4).
  bool static_tensor_scale = false;
  ActivationRule rule;
  bool quantized() const { return element.has_value(); }
  bool operator==(const ActivationFormat&) const = default;
};

/// A scheme: weights and activations with their scales.
struct Scheme {
  std::string name;  ///< "nvfp4_w4a4", "fp8_w8a8:block128"
  WeightFormat weight;
  ActivationFormat activation;  ///< both GEMMs quantize their input by this format
};

/// One line of the scheme table (src/quant/schemes.inc).
struct SchemeInfo {
  std::string_view name;           ///< without granularity
  std::string_view granularities;  ///< accepted after the colon, comma-separated; empty: none
  std::string_view what;
};

/// All schemes, in the order of the table.
std::span<const SchemeInfo> SchemeTable();

/// Every scheme in full: each line of the table with each of its granularities ("fp8_w8a8:block128").
std::vector<std::string> SchemeNames();

/// The scheme of that name, with granularity after a colon ("int4_w4a16:g128"). Unknown names: kUsage with
/// the names that exist.
///
/// A bare "int4_w4a16" or "int4_w4a8" is the groups-of-128 form; where 128 does not divide the matrices at
/// hand, use the second form, which takes the reduction sizes (hidden, intermediate) and falls back to 64,
/// 32, then channel. A granularity that is named is never changed.
Result<Scheme> ParseScheme(std::string_view name);
Result<Scheme> ParseScheme(std::string_view name, std::span<const int64_t> reduction_sizes);

/// The name under which ParseScheme finds these formats. Types of the scales (F32 or BF16), activation rules
/// and the signedness of weight-only integers do not matter. kUnsupported when no line of the table describes
/// the pair.
Result<std::string> SchemeNameFor(const WeightFormat& weight, const ActivationFormat& activation);

/// "e2m1, e4m3 scale per 1x16, F32 scale per matrix", for messages and listings.
std::string Describe(const WeightFormat& format);
std::string Describe(const ActivationFormat& format);

}  // namespace fusedmoe
