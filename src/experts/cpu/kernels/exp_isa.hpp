#pragma once

/// The figures of two exponentials, for the vectors (epilogue_isa.hpp) and the matrix unit
/// (tile_finish_isa.hpp).
///
/// e^x to 2 ulp: x = n ln 2 + r with |r| <= ln 2 / 2, a Taylor polynomial of degree 7 for e^r (its remainder
/// r^8/8! is below 6e-9), scaled by 2^n.
namespace fusedmoe::cpu {

/// Larger arguments give infinity, smaller ones zero, as at these bounds.
constexpr float kExpLowest = -104.0F, kExpHighest = 89.0F;
constexpr float kLog2OfE = 1.44269504F;
/// ln 2 in two pieces, the first with few bits: n times it is exact.
constexpr float kLn2High = 0.693145752F, kLn2Low = 1.42860677e-6F;
constexpr int kExpDegree = 7;
constexpr float kExpTaylor[kExpDegree + 1] = {1.0F / 5040.0F, 1.0F / 720.0F, 1.0F / 120.0F, 1.0F / 24.0F,
                                              1.0F / 6.0F,    0.5F,          1.0F,          1.0F};

/// e^x = 2^n 2^f to 2 ulp, with n + f = x log2 e and |f| <= 1/2: log2 e in two pieces, so that f is exact to
/// its last bit or two; adding 1.5 x 2^23 leaves n to the adder. 2^f by the polynomial of degree 6 whose
/// largest relative error is the smallest, 2.1e-8 with these coefficients; it is 1 at 0.
constexpr float kLog2OfELow = 1.92596303e-8F, kExp2Round = 0x1.8p23F;
constexpr int kExp2Degree = 6;
constexpr float kExp2[kExp2Degree + 1] = {
    0.000155946778F, 0.00134066434F, 0.00961769279F, 0.0555031039F, 0.240226522F, 0.693147242F, 1.0F};

}  // namespace fusedmoe::cpu
