#pragma once

#include <fusedmoe/status.hpp>

/// The ceilings of the card, measured now, in the run whose rates are held against them.
namespace fusedmoe::cuda {

/// Bytes a second that a kernel reads from the card's memory when it does nothing else: the best of several
/// passes over a buffer many times larger than its caches (2 GiB, or a quarter of the free memory).
Result<double> MeasureReadBandwidth();

/// Floating-point operations a second of the tensor cores, bf16 inputs and fp32 sums, operands in shared
/// memory: the best of several launches of about a millisecond, after a rest.
Result<double> MeasureBf16Peak();

/// Bytes a second from pinned host memory to the card.
Result<double> MeasureUploadBandwidth();

}  // namespace fusedmoe::cuda
