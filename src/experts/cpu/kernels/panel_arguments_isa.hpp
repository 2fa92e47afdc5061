#pragma once

#include <stdint.h>

/// What packs rows of codes and scales into panels (weights/panel.hpp draws them), in plain C terms: compiled
/// once for each instruction set, so nothing here may have external linkage (kernel_table_isa.hpp).
namespace fusedmoe::cpu {

/// How rows of codes become lines of a panel.
enum PanelTransform : int {
  kPanelNibbles,    ///< 4-bit codes
  kPanelBytes,      ///< int8
  kPanelHalfLanes,  ///< fp8: the words of a lane stand apart
  kPanelWords,      ///< bf16
  kPanelHalfWords,  ///< f16: as fp8
  kPanelFloats,     ///< f32
  kPanelSixBits,    ///< codes of six bits, to planes: their lowest two bits are the second one
  kPanelU2,         ///< bytes whose codes have fewer bits, to vectors that they share
  kPanelU3,
  kPanelU5,
  kPanelU6,
  kNumPanelTransforms
};

/// `blocks` blocks of sixteen rows; each row holds all of their codes.
struct PanelArguments {
  const uint8_t* rows[16];
  int64_t blocks;
  int64_t units_per_block;
  int32_t flip;             ///< exclusive-or of codes
  const uint8_t* next[16];  ///< rows that are packed next: their beginnings are prefetched
  /// Scales and zero points, behind the codes of each block, block after block; null: room is left for them.
  const uint8_t* params;
  int64_t param_bytes;  ///< of one block, a multiple of 16
  uint8_t* out;
  uint32_t* nan_rows;  ///< kPanelHalfLanes: bit r is set where a code of row r is NaN in e4m3 (0x7f, 0xff)
};
typedef void (*PackPanelKernel)(const PanelArguments* arguments);

/// Codes of a row times the scales of their columns, as bf16.
struct ProductArguments {
  const uint8_t* codes;
  int64_t columns;
  /// Of columns 0, 2, 4, ... and 1, 3, 5, ...: zeros behind the last one, up to the next kProductColumns.
  const float* even_scales;
  const float* odd_scales;
  uint16_t* out;  ///< with room for as many
};
constexpr int64_t kProductColumns = 32;
typedef void (*MultiplyCodesKernel)(const ProductArguments* arguments);

/// How codes become columns: a code of each of sixteen rows, in 16 bytes (4 bits: in 8), column after column.
/// As PanelArguments, with one unit a block and nothing behind it; null where no panel needs it.
typedef void (*TransposeCodesKernel)(const PanelArguments* arguments);

/// Blocks of sixteen rows from such columns, in any order.
struct ColumnsArguments {
  const uint8_t* transposed;  ///< of TransposeCodesKernel
  const int32_t* columns;     ///< of every k of the blocks: where its sixteen codes stand
  int64_t blocks;
  int64_t units_per_block;
  const uint8_t* params;  ///< as PanelArguments has them
  int64_t param_bytes;
  uint8_t* out;
  const uint8_t* next[16];  ///< rows that are transposed next: what TransposeCodes leaves of them
  int64_t row_bytes;        ///< of each
};
typedef void (*PackColumnsKernel)(const ColumnsArguments* arguments);

/// How rows of scales or zero points become lines of a panel, sixteen rows of a column each.
enum ParamTransform : int {
  kParamBytes,  ///< scales of one byte, zero points
  kParamWords,  ///< bf16, f16
  kParamFloats,
  kParamBf16ToFloat,
  kParamF16ToFloat,
  kNumParamTransforms
};

/// A line for each group; groups that follow each other share a column.
struct ParamsArguments {
  const uint8_t* rows[16];  ///< the first column of each; readable up to the next 32 bytes
  int64_t columns, groups;
  int64_t groups_per_column;
  int32_t flip, mask, least;  ///< bytes become max((x ^ flip) & mask, least)
  int64_t stride;             ///< from one line to the next
  uint8_t* out;               ///< the line of the first group
};
typedef void (*PackParamsKernel)(const ParamsArguments* arguments);

}  // namespace fusedmoe::cpu
