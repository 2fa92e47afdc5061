#pragma once

#include <cstdint>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "checkpoint/linear_format.hpp"

/// From packed storage to canonical codes: [rows, cols] of the format's element, [rows, groups] of zero
/// points.
namespace fusedmoe::checkpoint {

/// A copy of `rows` rows: each of the matrix `times` times, the last perhaps less often; elements of whole
/// bytes. Fewer rows where the matrix has not enough: callers compare its shape first.
Result<Tensor> RepeatRows(const Tensor& matrix, int64_t times, int64_t rows);
/// The same of columns.
Result<Tensor> RepeatColumns(const Tensor& matrix, int64_t times, int64_t columns);

/// I8 [rows, cols] of -8 .. 7 as I4.
Result<Tensor> PackSigned4(const Tensor& codes);

/// Codes packed by `format.packing` (not kDirect), as U4 up to 4 bits and U8 above. Narrower codes keep their
/// values with zero points; without, they are moved so that zero is in the middle of the wider ones.
Result<Tensor> UnpackCodes(const LinearFormat& format, const Tensor& stored, int64_t rows, int64_t cols,
                           bool has_zero_points);

/// U8 [rows, groups], one zero point a byte.
Result<Tensor> UnpackZeroPoints(const LinearFormat& format, const Tensor& stored, int64_t rows,
                                int64_t groups);

}  // namespace fusedmoe::checkpoint
