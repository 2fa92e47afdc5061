#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <random>
#include <sstream>

#include "experts/reference/reference_backend.hpp"
#include "experts/reference/reference_experts.hpp"
#include "quant/scheme_formats.hpp"
#include "quant/scheme_table.hpp"
#include "weights/dequantize.hpp"
#include "weights/quantize.hpp"

// docs/adding_a_scheme.md, followed to the letter: its snippets are the two files included here.

namespace fusedmoe {

namespace scheme_formats {
#include "quant/walkthrough_formats.inc"
}  // namespace scheme_formats

namespace {

using namespace scheme_formats;  // NOLINT: as in scheme.cpp

constexpr SchemeRow kWalkthrough[] = {
#define FMOE_SCHEME(name, granularities, weight, activation, what) \
  {{name, granularities, what}, weight, activation},
#include "quant/walkthrough_schemes.inc"
#undef FMOE_SCHEME
};

const std::string kRoot = std::string(FMOE_GOLDEN_DIR) + "/../../";

std::string Contents(const std::string& path) {
  std::ifstream stream(kRoot + path);
  std::stringstream text;
  text << stream.rdbuf();
  EXPECT_FALSE(text.str().empty()) << path << " cannot be read";
  return text.str();
}

Tensor Normal(int64_t rows, int64_t cols, float sigma, uint32_t seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, sigma);
  Tensor tensor = *Tensor::Allocate(DType::kF32, Shape{rows, cols});
  for (int64_t i = 0; i < rows * cols; ++i) {
    tensor.mutable_view().as<float>()[i] = normal(generator);
  }
  return tensor;
}

TEST(Walkthrough_Page, ShowsTheSnippetsThatAreCompiledHere) {
  const std::string page = Contents("docs/adding_a_scheme.md");
  for (const char* file : {"tests/quant/walkthrough_formats.inc", "tests/quant/walkthrough_schemes.inc"}) {
    EXPECT_NE(page.find("```cpp\n" + Contents(file) + "```"), std::string::npos) << file;
  }
}

TEST(Walkthrough_Scheme, IsFoundByNameAndByFormats) {
  for (const char* name : {"fp8e5m2_w8a16", "fp8e5m2_w8a16:tensor", "fp8e5m2_w8a16:block128"}) {
    const auto scheme = ParseSchemeIn(kWalkthrough, name);
    ASSERT_TRUE(scheme.ok()) << scheme.status().ToString();
    EXPECT_EQ(*SchemeNameIn(kWalkthrough, scheme->weight, scheme->activation), name);
  }
  EXPECT_FALSE(ParseSchemeIn(kWalkthrough, "fp8e5m2_w8a16:g32").ok());
}

TEST(Walkthrough_Scheme, QuantizesWithTheErrorOfItsElement) {
  // Two mantissa bits: a relative rounding error uniform within 1/8 of the lower end of a binade.
  for (const char* name : {"fp8e5m2_w8a16", "fp8e5m2_w8a16:tensor", "fp8e5m2_w8a16:block128"}) {
    const auto scheme = ParseSchemeIn(kWalkthrough, name);
    const Tensor weights = Normal(150, 200, 0.02F, 3);
    const auto matrix = QuantizeMatrix(weights.view(), scheme->weight);
    ASSERT_TRUE(matrix.ok()) << matrix.status().ToString();
    const Tensor decoded = *DequantizeMatrix(*matrix);
    double error = 0;
    double norm = 0;
    for (int64_t i = 0; i < 150 * 200; ++i) {
      const double value = weights.view().as<float>()[i];
      error += std::pow(value - static_cast<double>(decoded.view().as<float>()[i]), 2);
      norm += value * value;
    }
    EXPECT_GT(std::sqrt(error / norm), 0.048) << name;
    EXPECT_LT(std::sqrt(error / norm), 0.058) << name;
  }
}

TEST(Walkthrough_Scheme, RunsOnTheReferenceExperts) {
  constexpr int64_t kHidden = 48;
  constexpr int64_t kIntermediate = 24;
  MoeProblem problem;
  problem.scheme = *ParseSchemeIn(kWalkthrough, "fp8e5m2_w8a16");
  problem.config.num_experts = problem.config.num_local_experts = 1;
  problem.config.hidden = kHidden;
  problem.config.intermediate = kIntermediate;
  problem.config.dtype = DType::kF32;
  problem.config.routing.top_k = 1;
  problem.config.max_tokens = 1;
  const CanonicalExpert expert = *QuantizeExpert(
      Normal(kIntermediate, kHidden, 0.1F, 4).view(), Normal(kIntermediate, kHidden, 0.1F, 5).view(),
      Normal(kHidden, kIntermediate, 0.1F, 6).view(), problem.scheme.weight);
  const ExpertSource source{1, problem.scheme, [&](int64_t) -> Result<CanonicalExpert> { return expert; }};
  auto prepared = kReferenceBackend.prepare(problem, Machine{}, source, Executor{});
  ASSERT_TRUE(prepared.ok()) << prepared.status().ToString();
  WorkspaceBook book;
  const ReferenceExperts experts(problem, std::make_shared<const PreparedWeights>(*std::move(prepared)),
                                 book);
  const Workspace workspace = *Workspace::Allocate(book.total_bytes());

  const Tensor hidden = Normal(1, kHidden, 1.0F, 7);
  const int32_t id = 0;
  const float weight = 0.5F;
  ExpertsInput input;
  input.num_tokens = 1;
  input.rows.values = hidden.view();
  input.topk_ids = &id;
  input.topk_weights = &weight;
  const bool weighted = experts.traits().weight_and_reduce == WeightAndReduceKind::kNoOp;
  Tensor output = *Tensor::Allocate(DType::kF32, weighted ? Shape{1, kHidden} : Shape{1, 1, kHidden});
  const Status status = experts.Apply(input, output.mutable_view(), workspace, Executor{});
  ASSERT_TRUE(status.ok()) << status.ToString();

  const Tensor gate = *DequantizeMatrix(expert.gate);
  const Tensor up = *DequantizeMatrix(expert.up);
  const Tensor down = *DequantizeMatrix(expert.down);
  const auto dot = [](const Tensor& matrix, int64_t row, const auto* x) {
    double sum = 0;
    for (int64_t col = 0; col < matrix.dim(1); ++col) {
      sum += static_cast<double>(matrix.view().as<float>()[row * matrix.dim(1) + col]) *
             static_cast<double>(x[col]);
    }
    return sum;
  };
  std::vector<double> mid;
  for (int64_t row = 0; row < kIntermediate; ++row) {
    const double g = dot(gate, row, hidden.view().as<float>());
    mid.push_back(g / (1 + std::exp(-g)) * dot(up, row, hidden.view().as<float>()));
  }
  double largest = 0;
  for (int64_t row = 0; row < kHidden; ++row) {
    const double expected = dot(down, row, mid.data()) * (weighted ? 0.5 : 1.0);
    largest = std::max(largest, std::fabs(expected));
    EXPECT_NEAR(output.view().as<float>()[row], expected, 1e-6) << "row " << row;
  }
  EXPECT_GT(largest, 1e-2) << "an output of zeros proves nothing";
}

}  // namespace
}  // namespace fusedmoe
