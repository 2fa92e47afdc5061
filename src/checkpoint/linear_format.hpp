#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe::checkpoint {

/// How the codes of a matrix [out, in] lie in its tensor.
enum class Packing : uint8_t {
  kDirect,   ///< [out, in], sub-byte elements as their type packs them along `in` (F4, F6, U8 or I8)
  kBits,     ///< compressed-tensors: I32 [out, ceil(in * bits / 32)], a bit stream of value + 2^(bits-1)
  kGptq,     ///< I32 [ceil(in * bits / 32), out], a bit stream too
  kAwq,      ///< I32 [in, out * bits / 32], nibbles in AWQ's order
  kRowPairs  ///< ModelOpt INT4: U8 [out / 2, in], output rows 2j and 2j + 1 in one byte
};

/// How a module that multiplies by a matrix is stored: which tensors, and what they mean. Suffixes follow the
/// module's name; empty ones do not exist. The first scale has the extent that `weight` says: blocks, rows or
/// the matrix.
struct LinearFormat {
  WeightFormat weight;
  ActivationFormat activation;
  Packing packing = Packing::kDirect;
  StoredIntegers stored;  ///< of CanonicalMatrix
  int bits = 0;           ///< of a stored integer, which becomes one of 4 or 8 bits; 0 for floats
  std::string_view codes = ".weight";
  std::string_view scale;         ///< the first level
  std::string_view second_scale;  ///< F32 of the matrix above blocks
  std::string_view input_scale;
  std::string_view zero_point;
  std::string_view super_scale, super_minimum;  ///< of CanonicalMatrix
  std::string_view group_index;
  bool group_index_required = false;  ///< the metadata say that columns are reordered
  std::string_view pre_quant_scale;
  std::string_view shape;         ///< I64 or I32 [2]: rows and columns, to be compared
  std::string_view row_major;     ///< U8, 0: codes lie row by row
  std::string_view idle;          ///< stands there too, and no value depends on it
  bool reciprocal = false;        ///< second_scale and input_scale are stored as 1 / scale
  bool reciprocal_scale = false;  ///< so is the first scale (GPTQModel's FP8)
  float scale_divisor = 1.0F;     ///< of stored scales of blocks and rows
  float second_scale_divisor = 1.0F;
  bool bytes_are_exponents = false;  ///< scales of type U8 are E8M0, where floats are expected otherwise
  /// `zero_point` are floats like the scales, which are added: weights are code * scale + bias (MLX).
  bool zero_point_is_bias = false;
  /// Where a tool would leave zero points if they were not all 0: the metadata say that there are none.
  std::string_view no_zero_point;
  bool zero_point_optional = false;  ///< without the tensor, zero is the middle of the codes
  bool zero_plus_one = false;        ///< stored zero points are one too small (GPTQ v1)
  bool nibbles_in_order = false;     ///< kAwq without AWQ's order (Quark's pack_method "order")
  bool twos_complement = false;      ///< packed integers are signed (Quark int4)
  int64_t stored_block_rows = 0;     ///< of a stored block, where it is more than weight.block.row
  int64_t stored_block_cols = 0;     ///< of a stored group, where it is several of weight.block.col
  bool whole_groups = false;  ///< the writers refuse columns that end inside of a group, and so do readers
  bool blocks_begin_at_up = false;  ///< of gate and up in one matrix: up has blocks of its own
  bool planes = false;              ///< kGptq in bit planes: of 32 codes the low bits first (gptq_p)
  bool codes_along_out = false;     ///< of [in, out] tensors: the nibbles of a byte are neighbouring outputs
  bool scale_is_in_out = false;     ///< scale and zero points are [in / group, out]
  bool negative_scales = false;     ///< the writer uses them (auto-round); elsewhere they are refused
  bool input_scale_optional = false;  ///< a missing input scale makes the scheme weight-only
  bool quantized() const { return weight.quantized(); }
  /// Of all tensors that a file may have for the module, those that do not exist empty. (The levels above
  /// scales are parts of blocks, in the tensor of the codes.)
  std::array<std::string_view, 10> Suffixes() const {
    return {codes,       scale,           second_scale, input_scale, zero_point,
            group_index, pre_quant_scale, shape,        row_major,   idle};
  }
  /// Weight-only: of modules whose file has no scales of inputs.
  void LeaveInputsAlone() {
    activation = {};
    input_scale = "";
  }
};

/// Everything that a format's readers fill in of a scheme: the name from the scheme table.
Result<Scheme> SchemeOf(const LinearFormat& format);

}  // namespace fusedmoe::checkpoint
