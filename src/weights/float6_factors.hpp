#pragma once

#include <cstdint>

#include <fusedmoe/dtype.hpp>

/// Floats of six bits as products of two bytes, which kernels multiply with 16-bit activations exactly.
namespace fusedmoe {

/// Of kF6E2M3 or kF6E3M2. With the upper four bits of a code as n and its low two as m,
///
///     16 * value = (factors[n] | m) * (int8_t)factors[16 + n]
///
/// e2m3: n is the sign, the exponent and the upper bit of the mantissa; e3m2: the sign and the exponent.
const uint8_t* Float6Factors(DType code);

}  // namespace fusedmoe
