#pragma once

/// e^x to 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a Taylor polynomial of degree 7 for e^r (its remainder
/// r^8/8! is below 6e-9), scaled by 2^n. The figures, for the vectors (epilogue_isa.hpp) and the matrix unit
/// (tile_finish_isa.hpp).
namespace fusedmoe::cpu {

/// Larger arguments give infinity, smaller ones zero, as at these bounds.
constexpr float kExpLowest = -104.0F, kExpHighest = 89.0F;
constexpr float kLog2OfE = 1.44269504F;
/// ln 2 in two pieces, the first with few bits: n times it is exact.
constexpr float kLn2High = 0.693145752F, kLn2Low = 1.42860677e-6F;
constexpr int kExpDegree = 7;
constexpr float kExpTaylor[kExpDegree + 1] = {1.0F / 5040.0F, 1.0F / 720.0F, 1.0F / 120.0F, 1.0F / 24.0F,
                                              1.0F / 6.0F,    0.5F,          1.0F,          1.0F};

}  // namespace fusedmoe::cpu
