#include "weights/marlin.hpp"

#include <fmt/format.h>

#include <cmath>

#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "quant/packing.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kTile = 16;
constexpr int64_t kTileCodes = 1024;

std::vector<int32_t> Interleave(MarlinKind kind) {
  const bool int8 = kind.activation_bits == 8;
  if (kind.bits == 4) {
    return int8 ? std::vector<int32_t>{0, 4, 1, 5, 2, 6, 3, 7} : std::vector<int32_t>{0, 2, 4, 6, 1, 3, 5, 7};
  }
  return int8 ? std::vector<int32_t>{0, 1, 2, 3} : std::vector<int32_t>{0, 2, 1, 3};
}

/// result[i] = source[permutation[i]] within consecutive pieces, or the inverse.
template <typename T>
void PermutePieces(const std::vector<int32_t>& permutation, bool inverse, const T* source, int64_t count,
                   T* result) {
  const auto piece = static_cast<int64_t>(permutation.size());
  for (int64_t begin = 0; begin < count; begin += piece) {
    for (int64_t i = 0; i < piece; ++i) {
      const int64_t other = permutation[static_cast<size_t>(i)];
      result[begin + (inverse ? other : i)] = source[begin + (inverse ? i : other)];
    }
  }
}

Result<Tensor> Permuted(TensorView matrix, const std::vector<int32_t>& permutation, bool inverse) {
  const auto piece = static_cast<int64_t>(permutation.size());
  if (matrix.empty() || matrix.rank() != 2 || !matrix.dense() || matrix.dim(1) % piece != 0) {
    return Status::BadInput(fmt::format("Marlin permutes dense rows in pieces of {}; the shape is {}", piece,
                                        matrix.shape().ToString()));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor result, Tensor::Allocate(matrix.dtype(), matrix.shape()));
  std::byte* out = result.mutable_view().data();
  switch (DTypeBits(matrix.dtype())) {
    case 8:
      PermutePieces(permutation, inverse, matrix.as<uint8_t>(), matrix.count(),
                    reinterpret_cast<uint8_t*>(out));
      return result;
    case 16:
      PermutePieces(permutation, inverse, matrix.as<uint16_t>(), matrix.count(),
                    reinterpret_cast<uint16_t*>(out));
      return result;
    case 32:
      PermutePieces(permutation, inverse, matrix.as<uint32_t>(), matrix.count(),
                    reinterpret_cast<uint32_t*>(out));
      return result;
    default:
      return Status::Unsupported(fmt::format("Marlin does not permute {}", DTypeName(matrix.dtype())));
  }
}

/// Tiles are taken from bands of this many inputs.
int64_t BandRows(MarlinKind kind) {
  return kind.activation_bits == 8 ? 2 * kTile : kTile;
}

Status CheckWeightShape(int64_t inputs, int64_t outputs, MarlinKind kind) {
  if (inputs <= 0 || outputs <= 0 || inputs % BandRows(kind) != 0 || outputs % 64 != 0) {
    return Status::Unsupported(fmt::format(
        "Marlin weights of {} inputs and {} outputs: inputs must be a multiple of {}, outputs of 64", inputs,
        outputs, BandRows(kind)));
  }
  return Status::Ok();
}

/// Calls visit(position in the permuted stream, position in [inputs, outputs]) for every code.
template <typename Visit>
void ForEachCode(int64_t inputs, int64_t outputs, MarlinKind kind, Visit visit) {
  const std::vector<int32_t> permutation = MarlinWeightPermutation(kind);
  const int64_t band_rows = BandRows(kind);
  const int64_t band_codes = band_rows * outputs;
  const int64_t square = band_rows * kTile;  // codes of one tile of a band, before the permutation
  for (int64_t position = 0; position < inputs * outputs; ++position) {
    const int64_t piece = position / kTileCodes * kTileCodes;
    const int64_t tiled = piece + permutation[static_cast<size_t>(position - piece)];
    const int64_t band = tiled / band_codes;
    const int64_t in_band = tiled % band_codes;
    const int64_t row = in_band % square / kTile;
    const int64_t col = in_band / square * kTile + in_band % kTile;
    visit(position, (band * band_rows + row) * outputs + col);
  }
}

Status CheckKind(MarlinKind kind) {
  const bool known =
      (kind.bits == 4 || kind.bits == 8) && (kind.activation_bits == 8 || kind.activation_bits == 16);
  return known ? Status::Ok()
               : Status::Unsupported(fmt::format("Marlin has no layout for {}-bit weights with {}-bit "
                                                 "activations; 4 or 8 with 8 or 16 exist",
                                                 kind.bits, kind.activation_bits));
}

}  // namespace

std::vector<int32_t> MarlinWeightPermutation(MarlinKind kind) {
  // A thread of a fragment owns, in each of two blocks of 8 columns, the rows of its quarter: pairs of
  // neighbours with 16-bit activations, fours with 8-bit ones, from both halves of the tile.
  const int32_t run = kind.activation_bits == 8 ? 4 : 2;
  const int32_t fragments = kind.activation_bits == 8 ? 2 : 4;
  const int32_t fragment_codes = static_cast<int32_t>(kTileCodes) / fragments;
  std::vector<int32_t> owned;
  for (int32_t thread = 0; thread < 32; ++thread) {
    for (int32_t fragment = 0; fragment < fragments; ++fragment) {
      for (int32_t block = 0; block < 2; ++block) {
        for (int32_t half = 0; half < 2; ++half) {
          for (int32_t i = 0; i < run; ++i) {
            const int32_t row = run * (thread % 4 + 4 * half) + i;
            owned.push_back(16 * row + thread / 4 + 8 * block + fragment_codes * fragment);
          }
        }
      }
    }
  }
  std::vector<int32_t> permutation(owned.size());
  PermutePieces(Interleave(kind), /*inverse=*/false, owned.data(), kTileCodes, permutation.data());
  return permutation;
}

std::vector<int32_t> MarlinGroupedScalePermutation() {
  std::vector<int32_t> permutation;
  for (int32_t i = 0; i < 64; ++i) {
    permutation.push_back(i / 8 + 8 * (i % 8));
  }
  return permutation;
}

std::vector<int32_t> MarlinSingleScalePermutation() {
  std::vector<int32_t> permutation;
  for (int32_t i = 0; i < 32; ++i) {
    permutation.push_back(2 * (i / 8) + 8 * (i % 8 / 2) + i % 2);
  }
  return permutation;
}

Result<Tensor> MarlinPackWeights(TensorView codes, MarlinKind kind) {
  FMOE_RETURN_IF_ERROR(CheckKind(kind));
  if (codes.empty() || codes.rank() != 2 || codes.dtype() != DType::kU8 || !codes.dense()) {
    return Status::BadInput(fmt::format("Marlin packs dense U8 codes [inputs, outputs], not {} {}",
                                        DTypeName(codes.dtype()), codes.shape().ToString()));
  }
  const int64_t inputs = codes.dim(0);
  const int64_t outputs = codes.dim(1);
  FMOE_RETURN_IF_ERROR(CheckWeightShape(inputs, outputs, kind));
  FMOE_ASSIGN_OR_RETURN(Tensor stream, Tensor::Allocate(DType::kU8, Shape{inputs / kTile, outputs * kTile}));
  auto* out = stream.mutable_view().as<uint8_t>();
  ForEachCode(inputs, outputs, kind,
              [&](int64_t position, int64_t source) { out[position] = codes.as<uint8_t>()[source]; });
  return PackColumns(stream.view(), {.bits = kind.bits});
}

Result<Tensor> MarlinUnpackWeights(TensorView packed, MarlinKind kind) {
  FMOE_RETURN_IF_ERROR(CheckKind(kind));
  if (packed.empty() || packed.rank() != 2) {
    return Status::BadInput("Marlin weights must be a matrix of words");
  }
  const int64_t inputs = packed.dim(0) * kTile;
  const int64_t row_codes = packed.dim(1) * (32 / kind.bits);
  const int64_t outputs = row_codes / kTile;
  FMOE_RETURN_IF_ERROR(CheckWeightShape(inputs, outputs, kind));
  FMOE_ASSIGN_OR_RETURN(const Tensor stream, UnpackColumns(packed, {.bits = kind.bits}, row_codes));
  FMOE_ASSIGN_OR_RETURN(Tensor codes, Tensor::Allocate(DType::kU8, Shape{inputs, outputs}));
  auto* out = codes.mutable_view().as<uint8_t>();
  ForEachCode(inputs, outputs, kind,
              [&](int64_t position, int64_t source) { out[source] = stream.view().as<uint8_t>()[position]; });
  return codes;
}

Result<Tensor> MarlinPackStored(TensorView weights, int activation_bits) {
  const int bits = DTypeBits(weights.dtype());
  const MarlinKind kind{bits, activation_bits};
  FMOE_RETURN_IF_ERROR(CheckKind(kind));
  const int64_t outputs = weights.dim(0), inputs = weights.dim(1);
  FMOE_RETURN_IF_ERROR(CheckWeightShape(inputs, outputs, kind));
  FMOE_ASSIGN_OR_RETURN(Tensor packed,
                        Tensor::Allocate(DType::kI32, Shape{inputs / kTile, outputs * bits / 2}));
  // Words are little-endian and filled from their lowest bits, so codes follow one another as in any row.
  auto* out = packed.mutable_view().as<uint8_t>();
  const auto* in = weights.as<uint8_t>();
  const int64_t row_bytes = weights.stride_bytes(0);
  ForEachCode(inputs, outputs, kind, [&](int64_t position, int64_t source) {
    const int64_t row = source % outputs, column = source / outputs;
    if (bits == 8) {
      out[position] = in[row * row_bytes + column];
    } else {
      const int code = in[row * row_bytes + column / 2] >> (column % 2 * 4) & 0xF;
      out[position / 2] = static_cast<uint8_t>(out[position / 2] | code << (position % 2 * 4));
    }
  });
  return packed;
}

Result<Tensor> MarlinUnpackStored(TensorView packed, DType element, int activation_bits) {
  const int bits = DTypeBits(element);
  const MarlinKind kind{bits, activation_bits};
  FMOE_RETURN_IF_ERROR(CheckKind(kind));
  if (packed.empty() || packed.rank() != 2 || !packed.dense() || DTypeBits(packed.dtype()) != 32) {
    return Status::BadInput("Marlin weights must be a dense matrix of words");
  }
  const int64_t inputs = packed.dim(0) * kTile;
  const int64_t outputs = packed.dim(1) * 2 / bits;
  FMOE_RETURN_IF_ERROR(CheckWeightShape(inputs, outputs, kind));
  FMOE_ASSIGN_OR_RETURN(Tensor weights, Tensor::Allocate(element, Shape{outputs, inputs}));
  auto* out = weights.mutable_view().as<uint8_t>();
  const auto* in = packed.as<uint8_t>();
  const int64_t row_bytes = weights.view().stride_bytes(0);
  ForEachCode(inputs, outputs, kind, [&](int64_t position, int64_t source) {
    const int64_t row = source % outputs, column = source / outputs;
    if (bits == 8) {
      out[row * row_bytes + column] = in[position];
    } else {
      const int code = in[position / 2] >> (position % 2 * 4) & 0xF;
      uint8_t& byte = out[row * row_bytes + column / 2];
      byte = static_cast<uint8_t>(byte | code << (column % 2 * 4));
    }
  });
  return weights;
}

bool MarlinScalesAreGrouped(int64_t inputs, int64_t group_size, MarlinKind kind) {
  return group_size != -1 && group_size < inputs && kind.activation_bits != 8;
}

Result<Tensor> MarlinPermuteScales(TensorView scales, bool grouped) {
  return Permuted(scales, grouped ? MarlinGroupedScalePermutation() : MarlinSingleScalePermutation(), false);
}

Result<Tensor> MarlinRestoreScales(TensorView permuted, bool grouped) {
  return Permuted(permuted, grouped ? MarlinGroupedScalePermutation() : MarlinSingleScalePermutation(), true);
}

Result<Tensor> MarlinPermuteBias(TensorView bias) {
  return Permuted(bias, MarlinSingleScalePermutation(), false);
}

Result<Tensor> MarlinPackZeroPoints(TensorView zero_points, MarlinKind kind) {
  FMOE_RETURN_IF_ERROR(CheckKind(kind));
  FMOE_ASSIGN_OR_RETURN(Tensor permuted, Permuted(zero_points, MarlinGroupedScalePermutation(), false));
  if (kind.activation_bits != 8) {
    FMOE_ASSIGN_OR_RETURN(permuted, Permuted(permuted.view(), Interleave(kind), false));
  }
  return PackColumns(permuted.view(), {.bits = kind.bits});
}

Result<Tensor> MarlinUnpackZeroPoints(TensorView packed, MarlinKind kind) {
  FMOE_RETURN_IF_ERROR(CheckKind(kind));
  const int64_t cols = packed.rank() == 2 ? packed.dim(1) * (32 / kind.bits) : 0;
  FMOE_ASSIGN_OR_RETURN(Tensor codes, UnpackColumns(packed, {.bits = kind.bits}, cols));
  if (kind.activation_bits != 8) {
    FMOE_ASSIGN_OR_RETURN(codes, Permuted(codes.view(), Interleave(kind), true));
  }
  return Permuted(codes.view(), MarlinGroupedScalePermutation(), true);
}

Result<MarlinInt8Scales> MarlinScalesForInt8Activations(TensorView scales, float largest, DType dtype) {
  if (scales.empty() || !IsFloat(scales.dtype()) || DTypeBits(scales.dtype()) < 16 || !scales.dense()) {
    return Status::BadInput(fmt::format("group scales are {} {}; dense F32, F16 or BF16 is required",
                                        DTypeName(scales.dtype()), scales.shape().ToString()));
  }
  RoundRow(dtype, &largest, 1);
  if (!(std::isfinite(largest) && largest > 0.0F)) {
    return Status::BadInput(fmt::format("the largest group scale is {} in {}; finite and > 0 is required",
                                        largest, DTypeName(dtype)));
  }
  std::vector<float> values(static_cast<size_t>(scales.count()));
  DecodeRow(scales.dtype(), scales.data(), 0, scales.count(), values.data());
  RoundRow(dtype, values.data(), scales.count());
  for (float& value : values) {
    if (value > largest) {
      return Status::BadInput(
          fmt::format("a group scale is {}, above {}, which is said to be the largest", value, largest));
    }
    value /= largest;
  }
  RoundRow(dtype, values.data(), scales.count());
  for (float& value : values) {
    value *= 4096.0F;  // a power of two: nothing is rounded
  }
  MarlinInt8Scales result;
  FMOE_ASSIGN_OR_RETURN(result.codes, Tensor::Allocate(DType::kI16, scales.shape()));
  EncodeRow(DType::kI16, values.data(), scales.count(), result.codes.mutable_view().data());
  result.factor = largest / 4096.0F;
  return result;
}

}  // namespace fusedmoe
