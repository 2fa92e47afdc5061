#pragma once

#include <cstddef>
#include <cstdint>

#include <fusedmoe/quant.hpp>

#include "experts/cpu/kernels/kernels.hpp"

/// Rows of activations by the rule of a scheme with the kernels of an instruction set, bit for bit what
/// QuantizeRow (quant/activation_quantizer.hpp) makes of them: scales of groups by its formulas, one at a
/// time, the values many at once (docs/kernels_cpu.md, "Activations").
///
/// All functions allocate nothing and may run in any thread.
namespace fusedmoe::cpu {

/// True where the kernels round as the format asks. The rare rules that they lack (fp64 products, ties toward
/// zero, rows through bf16, 4-bit integers, fnuz) go through QuantizeRow.
bool CanRoundRows(const ActivationFormat& format);

/// FakeQuantizeRow, for every format: the row becomes code * scale.
void RoundRowInPlace(const KernelTable& table, const ActivationFormat& format, float tensor_scale, float* row,
                     int64_t count);

/// Codes as integers: int8 as they are, e2m1 doubled. scales[g] is what a code of group g (of a doubled code:
/// half of it) is multiplied with; per tensor there is one, the tensor scale. The format must be I8 or
/// F4_E2M1 and pass CanRoundRows.
void QuantizeRowToCodes(const KernelTable& table, const ActivationFormat& format, float tensor_scale,
                        const float* row, int64_t count, int8_t* codes, float* scales);

/// Codes as fp32 numbers that bf16 holds exactly, with the scales that it does not hold apart: values[k] is
/// the code, times its block scale where that is e4m3 or e8m0 (a code of at most 4 bits times e4m3, or a
/// power of two); the product with scales[g * stride] is the value that was meant. One scale a group where
/// scales are F32, one a row otherwise (the tensor scale, or 1). `values` may be `row`. The format must pass
/// CanRoundRows.
void QuantizeRowToBlocks(const KernelTable& table, const ActivationFormat& format, float tensor_scale,
                         const float* row, int64_t count, float* values, float* scales, int64_t stride);

/// QuantizeRowToBlocks straight into tiles, where their kernels can round: `pack` with the row and all of its
/// columns. False where they cannot: FP8 codes with scales of groups or rows in fp32 only, finite values,
/// ordinary scales. Then some of the tiles may be written.
bool PackRoundedRow(const KernelTable& table, const TileKernels& tiles, const ActivationFormat& format,
                    const TilePack& pack, float* scales, int64_t stride);

/// QuantizeRowToBlocks of a row that is quantized already: codes and block scales as QuantizeRow leaves them.
void DecodeRowToBlocks(const ActivationFormat& format, float tensor_scale, const std::byte* codes,
                       const std::byte* block_scales, int64_t count, float* values, float* scales,
                       int64_t stride);

/// Largest finite magnitude of a row: RowFiniteAmax.
float FiniteAmaxOfRow(const KernelTable& table, const float* row, int64_t count);

}  // namespace fusedmoe::cpu
