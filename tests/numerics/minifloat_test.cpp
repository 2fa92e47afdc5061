#include "numerics/minifloat.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/codecs.hpp"

namespace fusedmoe {
namespace {

/// What the template must be equal to, from the textbook: value = (-1)^s * 2^(e - bias) * 1.m, in double.
template <typename Codec, MinifloatKind kKind>
struct Textbook {
  static constexpr int kM = Codec::kMantissaBits;
  static constexpr int kE = Codec::kBits - 1 - kM;

  static double Magnitude(uint32_t code) {
    const int exponent = static_cast<int>(code >> kM) & ((1 << kE) - 1);
    const int mantissa = static_cast<int>(code) & ((1 << kM) - 1);
    return exponent == 0 ? std::ldexp(mantissa, 1 - Codec::kBias - kM)
                         : std::ldexp((1 << kM) + mantissa, exponent - Codec::kBias - kM);
  }
  static bool IsNan(uint32_t code) {
    const uint32_t magnitude = code & Codec::kMagnitudeMask;
    switch (kKind) {
      case MinifloatKind::kFinite:
        return false;
      case MinifloatKind::kFn:
        return magnitude == Codec::kMagnitudeMask;
      case MinifloatKind::kIeee:
        return magnitude > Codec::kInfinityCode;
      case MinifloatKind::kFnuz:
        return code == Codec::kSignBit;
    }
    return false;
  }
  static bool IsInfinity(uint32_t code) {
    return kKind == MinifloatKind::kIeee && (code & Codec::kMagnitudeMask) == Codec::kInfinityCode;
  }
  /// Nearest magnitude code, ties to the even code, by search; beyond the largest: the largest.
  static uint32_t NearestMagnitude(double value) {
    uint32_t low = 0;
    while (low < Codec::kLargestCode && Magnitude(low + 1) <= value) {
      ++low;
    }
    if (low == Codec::kLargestCode) {
      return low;
    }
    const double below = value - Magnitude(low);
    const double above = Magnitude(low + 1) - value;
    return below < above ? low : above < below ? low + 1 : low % 2 == 0 ? low : low + 1;
  }
  /// The smallest value that a cast without saturation no longer rounds to the largest.
  static double OverflowEdge() {
    return Magnitude(Codec::kLargestCode) + std::ldexp(1.0, Codec::kMaxExponent - kM - 1);
  }
};

template <typename C, MinifloatKind kK>
struct Format {
  using Codec = C;
  static constexpr MinifloatKind kKind = kK;
  using Book = Textbook<C, kK>;
};

template <typename F>
class MinifloatTest : public testing::Test {};

using Formats = testing::Types<Format<E2m1, MinifloatKind::kFinite>, Format<E3m2, MinifloatKind::kFinite>,
                               Format<E2m3, MinifloatKind::kFinite>, Format<E4m3fn, MinifloatKind::kFn>,
                               Format<E5m2, MinifloatKind::kIeee>, Format<E4m3fnuz, MinifloatKind::kFnuz>,
                               Format<E5m2fnuz, MinifloatKind::kFnuz>, Format<Fp16, MinifloatKind::kIeee>>;
TYPED_TEST_SUITE(MinifloatTest, Formats);

/// -0 as its own pattern, NaN as one.
uint32_t Pattern(double value) {
  return std::isnan(value) ? 0x7fc00000U : FloatBits(static_cast<float>(value));
}

TYPED_TEST(MinifloatTest, EveryCode_DecodesToItsTextbookValue) {
  using Codec = typename TypeParam::Codec;
  using Book = typename TypeParam::Book;
  for (uint32_t code = 0; code < (1U << Codec::kBits); ++code) {
    double expected = Book::IsInfinity(code) ? std::numeric_limits<double>::infinity()
                                             : Book::Magnitude(code & Codec::kMagnitudeMask);
    expected = Book::IsNan(code) ? std::nan("") : (code & Codec::kSignBit) != 0 ? -expected : expected;
    ASSERT_EQ(Pattern(Codec::Decode(code)), Pattern(expected)) << "code " << code;
  }
}

TYPED_TEST(MinifloatTest, EveryValue_EncodesToItself) {
  using Codec = typename TypeParam::Codec;
  using Book = typename TypeParam::Book;
  for (uint32_t code = 0; code < (1U << Codec::kBits); ++code) {
    if (!Book::IsNan(code)) {
      ASSERT_EQ(Codec::Encode(Codec::Decode(code)), code);
      if (!Book::IsInfinity(code)) {
        ASSERT_EQ(Codec::EncodeSaturating(Codec::Decode(code)), code);
      }
    }
  }
}

template <typename F>
void ExpectEncodes(float value) {
  using Codec = typename F::Codec;
  using Book = typename F::Book;
  const double magnitude = std::fabs(static_cast<double>(value));
  uint32_t saturated = Book::NearestMagnitude(magnitude);
  uint32_t plain = saturated;
  // The tie at the edge goes to the even neighbour: up when the largest code is odd.
  const bool overflows =
      magnitude > Book::OverflowEdge() || (magnitude == Book::OverflowEdge() && Codec::kLargestCode % 2 == 1);
  if (overflows && F::kKind != MinifloatKind::kFinite) {
    plain = F::kKind == MinifloatKind::kIeee ? Codec::kInfinityCode : Codec::kNanCode;
  }
  if (std::signbit(value)) {
    const bool fnuz = F::kKind == MinifloatKind::kFnuz;
    saturated |= fnuz && saturated == 0 ? 0 : Codec::kSignBit;
    plain |= fnuz && plain == 0 ? 0 : Codec::kSignBit;
  }
  ASSERT_EQ(Codec::EncodeSaturating(value), saturated) << value;
  ASSERT_EQ(Codec::Encode(value), plain) << value;
}

TYPED_TEST(MinifloatTest, EveryMidpointAndItsNeighbours_RoundToNearestEven) {
  using Codec = typename TypeParam::Codec;
  using Book = typename TypeParam::Book;
  // For fp16 the textbook search is quadratic: every 37th code meets all exponents and parities.
  const uint32_t step = Codec::kBits == 16 ? 37 : 1;
  for (uint32_t code = 0; code <= Codec::kLargestCode; code += step) {
    const double edge = code == Codec::kLargestCode ? Book::OverflowEdge()
                                                    : (Book::Magnitude(code) + Book::Magnitude(code + 1)) / 2;
    const auto middle = static_cast<float>(edge);
    ASSERT_EQ(static_cast<double>(middle), edge);
    for (const float value : {static_cast<float>(Book::Magnitude(code)), middle,
                              std::nextafterf(middle, 0.0F), std::nextafterf(middle, INFINITY)}) {
      ExpectEncodes<TypeParam>(value);
      ExpectEncodes<TypeParam>(-value);
      if (this->HasFatalFailure()) {
        return;
      }
    }
  }
}

TYPED_TEST(MinifloatTest, PatternsAcrossAllOfFp32_RoundToNearestEven) {
  using Codec = typename TypeParam::Codec;
  const uint32_t step = Codec::kBits == 16 ? 9999991 : 262147;
  for (uint64_t bits = 1; bits < 0x7f800000U; bits += step) {
    ExpectEncodes<TypeParam>(FloatFromBits(static_cast<uint32_t>(bits)));
    ExpectEncodes<TypeParam>(FloatFromBits(static_cast<uint32_t>(bits) | 0x80000000U));
    if (this->HasFatalFailure()) {
      return;
    }
  }
}

TYPED_TEST(MinifloatTest, SpecialValues_FollowTheDocumentedRule) {
  using Codec = typename TypeParam::Codec;
  constexpr auto kKind = TypeParam::kKind;
  const uint32_t sign = Codec::kSignBit;
  EXPECT_EQ(Codec::EncodeSaturating(INFINITY), Codec::kLargestCode);
  EXPECT_EQ(Codec::EncodeSaturating(-INFINITY), Codec::kLargestCode | sign);
  EXPECT_EQ(Codec::Encode(INFINITY), kKind == MinifloatKind::kIeee     ? Codec::kInfinityCode
                                     : kKind == MinifloatKind::kFinite ? Codec::kLargestCode
                                                                       : Codec::kNanCode);
  const bool signed_nan = kKind == MinifloatKind::kFn || kKind == MinifloatKind::kIeee;
  const float nan = FloatFromBits(0x7fc00000U);
  for (const auto encode : {&Codec::Encode, &Codec::EncodeSaturating}) {
    EXPECT_EQ(encode(nan), Codec::kNanCode);
    EXPECT_EQ(encode(-nan), signed_nan ? Codec::kNanCode | sign : Codec::kNanCode);
    EXPECT_EQ(encode(FloatFromBits(0x7f800001U)), Codec::kNanCode) << "signalling NaN";
    EXPECT_EQ(encode(0.0F), 0U);
    EXPECT_EQ(encode(-0.0F), kKind == MinifloatKind::kFnuz ? 0U : sign);
    EXPECT_EQ(encode(1e-45F), 0U);
    EXPECT_EQ(encode(-1e-45F), kKind == MinifloatKind::kFnuz ? 0U : sign);
  }
  EXPECT_EQ(std::isnan(Codec::Decode(Codec::kNanCode)), kKind != MinifloatKind::kFinite);
}

TEST(MinifloatConstants, AreThoseOfTheFormats) {
  EXPECT_EQ(E2m1::Largest(), 6.0F);
  EXPECT_EQ(E3m2::Largest(), 28.0F);
  EXPECT_EQ(E2m3::Largest(), 7.5F);
  EXPECT_EQ(E4m3fn::Largest(), 448.0F);
  EXPECT_EQ(E5m2::Largest(), 57344.0F);
  EXPECT_EQ(E4m3fnuz::Largest(), 240.0F);
  EXPECT_EQ(E5m2fnuz::Largest(), 57344.0F);
  EXPECT_EQ(Fp16::Largest(), 65504.0F);
  EXPECT_EQ(E2m1::kMaxExponent, 2);
  EXPECT_EQ(E3m2::kMaxExponent, 4);
  EXPECT_EQ(E2m3::kMaxExponent, 2);
  EXPECT_EQ(E4m3fn::kMaxExponent, 8);
  EXPECT_EQ(E5m2::kMaxExponent, 15);
  EXPECT_EQ(E4m3fn::kNanCode, 0x7fU);
  EXPECT_EQ(E5m2::kNanCode, 0x7eU);
  EXPECT_EQ(Fp16::kNanCode, 0x7e00U);
  EXPECT_EQ(E4m3fnuz::kNanCode, 0x80U);
}

static_assert(DecodeE2m1(5) == 3.0F && EncodeE4m3RneSaturating(1e9F) == 0x7e, "codecs work at compile time");

}  // namespace
}  // namespace fusedmoe
