#include "routing/router_gemm.hpp"

#include <cmath>
#include <cstring>
#include <random>

#include <gtest/gtest.h>
#include <fusedmoe/machine.hpp>

#include "numerics/codecs.hpp"

namespace fusedmoe {
namespace {

/// A matrix of random values in a type, and the values as doubles.
struct Matrix {
  std::vector<std::byte> bytes;
  std::vector<double> values;
  TensorView view;
};

Matrix RandomMatrix(DType dtype, int64_t rows, int64_t columns, uint32_t seed) {
  Matrix matrix;
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  const int64_t bytes = DTypeBits(dtype) / 8;
  matrix.bytes.resize(static_cast<size_t>(rows * columns * bytes));
  for (int64_t index = 0; index < rows * columns; ++index) {
    float value = normal(generator);
    std::byte* const to = matrix.bytes.data() + index * bytes;
    if (dtype == DType::kF32) {
      std::memcpy(to, &value, 4);
    } else {
      const uint16_t code = dtype == DType::kBF16 ? EncodeBf16Rne(value) : EncodeFp16Rne(value);
      std::memcpy(to, &code, 2);
      value = dtype == DType::kBF16 ? DecodeBf16(code) : DecodeFp16(code);
    }
    matrix.values.push_back(value);
  }
  matrix.view = {matrix.bytes.data(), dtype, {rows, columns}};
  return matrix;
}

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

TEST(RouterGemm, EveryTypeAndTailIsWithinTheBoundOfTheExactProduct) {
  for (const DType hidden_type : kTypes) {
    for (const DType weight_type : kTypes) {
      for (const int64_t width : {1, 15, 16, 17, 100}) {
        for (const int64_t tokens : {1, 2, 5}) {
          const int64_t experts = 7;
          const Matrix hidden = RandomMatrix(hidden_type, tokens, width, 1);
          const Matrix weight = RandomMatrix(weight_type, experts, width, 2);
          const Matrix bias = RandomMatrix(DType::kF32, 1, experts, 3);
          std::vector<float> logits(static_cast<size_t>(tokens * experts), NAN);
          ASSERT_TRUE(RouterGemm(hidden.view, weight.view,
                                 TensorView(bias.bytes.data(), DType::kF32, {experts}), logits.data())
                          .ok());
          for (int64_t token = 0; token < tokens; ++token) {
            for (int64_t expert = 0; expert < experts; ++expert) {
              double exact = bias.values[static_cast<size_t>(expert)];
              double magnitude = std::fabs(exact);
              for (int64_t column = 0; column < width; ++column) {
                const double product = hidden.values[static_cast<size_t>(token * width + column)] *
                                       weight.values[static_cast<size_t>(expert * width + column)];
                exact += product;
                magnitude += std::fabs(product);
              }
              // One rounding for each of a lane's columns, four in the tree, one for the bias.
              const double roundings = static_cast<double>(width / 16 + 1 + 4 + 1);
              EXPECT_NEAR(logits[static_cast<size_t>(token * experts + expert)], exact,
                          roundings * 0x1p-24 * magnitude);
            }
          }
        }
      }
    }
  }
}

TEST(RouterGemm, InstructionSetsThreadsAndBatchesGiveTheSameBits) {
  const Matrix weight = RandomMatrix(DType::kBF16, 37, 203, 4);
  const Matrix hidden = RandomMatrix(DType::kBF16, 45, 203, 5);
  std::vector<float> expected(45 * 37);
  ASSERT_TRUE(RouterGemmWith(kRouterKernelsPortable, hidden.view, weight.view, {}, expected.data(), {}).ok());
  const auto same = [&](const std::vector<float>& logits, size_t count) {
    return std::memcmp(logits.data(), expected.data(), count * sizeof(float)) == 0;
  };
  std::vector<float> logits(45 * 37);
#if defined(__x86_64__)
  if (HostMachine().Has(Isa::kAvx2)) {
    ASSERT_TRUE(RouterGemmWith(kRouterKernelsAvx2, hidden.view, weight.view, {}, logits.data(), {}).ok());
    EXPECT_TRUE(same(logits, logits.size())) << "avx2";
  }
  if (HostMachine().Has(Isa::kAvx512)) {
    ASSERT_TRUE(RouterGemmWith(kRouterKernelsAvx512, hidden.view, weight.view, {}, logits.data(), {}).ok());
    EXPECT_TRUE(same(logits, logits.size())) << "avx512";
  }
#elif defined(__aarch64__)
  if (HostMachine().Has(Isa::kNeon)) {
    ASSERT_TRUE(RouterGemmWith(kRouterKernelsNeon, hidden.view, weight.view, {}, logits.data(), {}).ok());
    EXPECT_TRUE(same(logits, logits.size())) << "neon";
  }
#endif
  for (const int threads : {2, 3, 7}) {
    auto pool = ThreadPool::Create(threads);
    ASSERT_TRUE(pool.ok());
    std::fill(logits.begin(), logits.end(), 0.0F);
    ASSERT_TRUE(RouterGemm(hidden.view, weight.view, {}, logits.data(), (*pool)->executor()).ok());
    EXPECT_TRUE(same(logits, logits.size())) << threads << " threads";
  }
  for (const int64_t tokens : {1, 2, 3, 4, 5, 6, 7}) {
    std::fill(logits.begin(), logits.end(), 0.0F);
    ASSERT_TRUE(RouterGemm(hidden.view.Rows(0, tokens), weight.view, {}, logits.data()).ok());
    EXPECT_TRUE(same(logits, static_cast<size_t>(tokens) * 37)) << tokens << " tokens";
  }
}

TEST(RouterGemm, NanStaysInItsToken) {
  Matrix hidden = RandomMatrix(DType::kF32, 4, 32, 6);
  const Matrix weight = RandomMatrix(DType::kBF16, 8, 32, 7);
  const float nan = NAN;
  std::memcpy(hidden.bytes.data() + 32 * 4 + 12, &nan, 4);
  std::vector<float> logits(32);
  ASSERT_TRUE(RouterGemm(hidden.view, weight.view, {}, logits.data()).ok());
  for (size_t index = 0; index < logits.size(); ++index) {
    EXPECT_EQ(std::isnan(logits[index]), index / 8 == 1);
  }
}

TEST(RouterGemm, DisagreeingShapesAndTypesAreRefused) {
  const Matrix hidden = RandomMatrix(DType::kF32, 4, 32, 8);
  const Matrix narrow = RandomMatrix(DType::kF32, 8, 31, 9);
  const Matrix weight = RandomMatrix(DType::kF32, 8, 32, 9);
  std::vector<float> logits(32);
  EXPECT_EQ(RouterGemm(hidden.view, narrow.view, {}, logits.data()).code(), StatusCode::kUsage);
  EXPECT_EQ(RouterGemm(hidden.view, weight.view, hidden.view, logits.data()).code(), StatusCode::kUsage);
  const TensorView integers(weight.bytes.data(), DType::kI32, {8, 32});
  EXPECT_EQ(RouterGemm(hidden.view, integers, {}, logits.data()).code(), StatusCode::kUsage);
  EXPECT_TRUE(
      RouterGemm(TensorView(hidden.bytes.data(), DType::kF32, {0, 32}), weight.view, {}, nullptr).ok());
}

}  // namespace
}  // namespace fusedmoe
