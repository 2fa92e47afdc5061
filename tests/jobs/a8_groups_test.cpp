// What a8 changes, by the groups in which a kernel rounds: those of the definition, in activation order too,
// or those of the slices of ranks, which are others. Held against the bound, with the factor of two that it
// has for the latter and without.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/jobs/verify.hpp>

#include "experts/cpu/kernels/kernels.hpp"
#include "numerics/rows.hpp"
#include "support/random_layer.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::RandomLayer;

// One token and one expert: the fewest values, so that groups differ most. The shares of two ranks are 96 and
// 64 columns of 160, and the groups of 64 that each makes are not those of the whole.
constexpr int64_t kHidden = 256, kIntermediate = 160, kSplit = 96;
constexpr const char* kScheme = "int8_w8a16:g32";

enum class Grouping : uint8_t { kAsTheyStand, kActivationOrder, kSlices, kSlicesInOrder };

Tensor CopyOf(const Tensor& tensor) {
  Tensor copy = *Tensor::Allocate(tensor.dtype(), tensor.shape());
  std::memcpy(copy.mutable_view().data(), tensor.view().data(),
              static_cast<size_t>(tensor.view().total_bytes()));
  return copy;
}

/// Codes of a column as small as they come, with either sign; 128 is zero.
void ReadSoftly(CanonicalMatrix& matrix, int64_t col) {
  matrix.codes = CopyOf(matrix.codes);
  for (int64_t row = 0; row < matrix.rows; ++row) {
    matrix.codes.mutable_view().data()[row * matrix.cols + col] = std::byte(row % 2 == 0 ? 127 : 129);
  }
}

/// Scales of a row, so many times as large.
void Enlarge(CanonicalMatrix& matrix, int64_t row, float times) {
  matrix.block_scale = CopyOf(matrix.block_scale);
  const int64_t groups = matrix.block_scale.dim(1);
  std::byte* const scales =
      matrix.block_scale.mutable_view().data() + row * matrix.block_scale.view().row_bytes();
  std::vector<float> values(static_cast<size_t>(groups));
  DecodeRow(matrix.block_scale.dtype(), scales, 0, groups, values.data());
  for (float& value : values) {
    value *= times;
  }
  EncodeRow(matrix.block_scale.dtype(), values.data(), groups, scales);
}

/// One expert. `outliers`: a channel of the input and one between the GEMMs is large, and weights that read
/// it are small, which is what models learn.
CanonicalExpert Expert(Grouping grouping, bool outliers, uint64_t seed, int64_t channel, int64_t middle) {
  MoeConfig config;
  config.num_experts = 1;
  config.hidden = kHidden;
  config.intermediate = kIntermediate;
  CanonicalExpert expert = *MakeRandomLayer(config, kScheme, seed).source.load(0);
  if (grouping == Grouping::kActivationOrder || grouping == Grouping::kSlicesInOrder) {
    std::mt19937_64 random(seed);
    testing_support::ShuffleGroups(expert.gate, random);
    expert.up.group_index = expert.gate.group_index;
    testing_support::ShuffleGroups(expert.down, random);
  }
  if (outliers) {
    ReadSoftly(expert.gate, channel);
    ReadSoftly(expert.up, channel);
    Enlarge(expert.up, middle, 200.0F);
    ReadSoftly(expert.down, middle);
  }
  return expert;
}

/// The sum over parts of the intermediate size, each of which a layer of its own computes, as ranks do.
std::vector<float> Output(const CanonicalExpert& whole, const Tensor& hidden, ActivationMode mode,
                          const char* backend, const std::vector<int64_t>& ends, Plan* plan = nullptr) {
  std::vector<float> sum(kHidden);
  int64_t begin = 0;
  for (const int64_t end : ends) {
    CanonicalExpert part;
    part.gate = *SliceMatrix(whole.gate, begin, end - begin, 0, kHidden);
    part.up = *SliceMatrix(whole.up, begin, end - begin, 0, kHidden);
    part.down = *SliceMatrix(whole.down, 0, kHidden, begin, end - begin);
    MoeConfig config;
    config.num_experts = config.num_local_experts = 1;
    config.hidden = kHidden;
    config.intermediate = end - begin;
    config.routing.top_k = 1;
    ExpertSource source;
    source.num_local_experts = 1;
    source.scheme = *ParseScheme(kScheme);
    source.load = [&part](int64_t) -> Result<CanonicalExpert> { return part; };
    LayerOptions options;
    options.backend = backend;
    options.activation = mode;
    if (std::string_view(backend) == "CPU_FUSED") {  // what tiles of AMX may round besides hides the factor
      options.isa = IsaName(cpu::BuiltIsas().front());
    }
    options.max_tokens = 1;
    const auto layer = MoeLayer::Create(config, source, RouterWeights{}, options);
    if (!layer.ok()) {
      ADD_FAILURE() << layer.status().ToString();
      return sum;
    }
    if (plan != nullptr) {
      *plan = (*layer)->plan();
    }
    const Workspace workspace = *(*layer)->CreateWorkspace();
    Tensor output = *Tensor::Allocate(DType::kF32, {1, kHidden});
    const int32_t id = 0;
    const float weight = 1.0F;
    MoeLayer::Inputs inputs;
    inputs.hidden = hidden.view();
    inputs.topk_ids = TensorView(reinterpret_cast<const std::byte*>(&id), DType::kI32, {1, 1});
    inputs.topk_weights = TensorView(reinterpret_cast<const std::byte*>(&weight), DType::kF32, {1, 1});
    EXPECT_TRUE((*layer)->Forward(inputs, {output.mutable_view(), {}, {}}, workspace).ok());
    for (int64_t i = 0; i < kHidden; ++i) {
      sum[static_cast<size_t>(i)] += output.view().as<float>()[i];
    }
    begin = end;
  }
  return sum;
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

struct Outcome {
  double price = 0;                         ///< what a8 as it is defined changes
  double error = 0;                         ///< what the kernel changes
  double bound = 0, once = 0, without = 0;  ///< with twice the price, with the price, with nothing for it
};

Outcome Measure(Grouping grouping, bool outliers, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto channel = static_cast<int64_t>(random() % kHidden);
  const auto middle = static_cast<int64_t>(random() % kIntermediate);
  const CanonicalExpert expert = Expert(grouping, outliers, seed, channel, middle);
  Tensor hidden = testing_support::RandomRows(1, kHidden, DType::kF32, seed);
  for (int64_t col = 0; col < kHidden; ++col) {
    float& value = hidden.mutable_view().as<float>()[col];
    value = outliers && col == channel ? 200.0F : std::remainder(value, 3.0F);
  }
  const std::vector<int64_t> whole = {kIntermediate};
  const bool slices = grouping == Grouping::kSlices || grouping == Grouping::kSlicesInOrder;
  const std::vector<int64_t> parts = slices ? std::vector<int64_t>{kSplit, kIntermediate} : whole;
  const auto expected = Output(expert, hidden, ActivationMode::kAsCheckpoint, "REFERENCE", whole);
  const auto rounded = Output(expert, hidden, ActivationMode::kA8, "REFERENCE", whole);
  Plan plan;
  const auto fused = Output(expert, hidden, ActivationMode::kA8, "CPU_FUSED", parts, &plan);
  Outcome outcome;
  outcome.price = Distance(rounded, expected);
  outcome.error = Distance(fused, expected);
  ErrorBound bound = BoundOf(plan, *ParseScheme(kScheme), DType::kF32, kHidden, kIntermediate,
                             {.rows = 1, .a8 = outcome.price});
  outcome.bound = bound.value();
  bound.activation_rounding = std::hypot(outcome.price / bound.factor, 0x1p-9, 0x1p-9);
  outcome.once = bound.value();
  bound.activation_rounding = 0;
  outcome.without = bound.value();
  return outcome;
}

constexpr uint64_t kSeeds = 40;

// Not an error of the same kind but the same error: beside it, a kernel has what it has without a8.
TEST(A8Groups, OfTheDefinition_HaveTheErrorThatTheReferenceMeasures) {
  for (const Grouping grouping : {Grouping::kAsTheyStand, Grouping::kActivationOrder}) {
    for (const bool outliers : {false, true}) {
      for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
        SCOPED_TRACE(testing::Message() << "seed " << seed << (outliers ? ", outliers" : ""));
        const Outcome outcome = Measure(grouping, outliers, seed);
        EXPECT_GT(outcome.price, 0);
        EXPECT_NEAR(outcome.error, outcome.price, outcome.without);
        EXPECT_LE(outcome.error, outcome.bound);
      }
    }
  }
}

// Where one value is large, it takes the small ones of its group along, and which these are is another matter
// in each slice: the price alone is too little for a good part of such layers, twice the price enough for
// all.
TEST(A8Groups, OfSlices_StayWithinTwiceThePrice) {
  for (const Grouping grouping : {Grouping::kSlices, Grouping::kSlicesInOrder}) {
    int beyond_once = 0;
    for (const bool outliers : {false, true}) {
      for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
        const Outcome outcome = Measure(grouping, outliers, seed);
        EXPECT_LE(outcome.error, outcome.bound) << "seed " << seed;
        beyond_once += outcome.error > outcome.once ? 1 : 0;
      }
    }
    EXPECT_GT(beyond_once, 0) << "the factor is needed no longer";
  }
}

}  // namespace
}  // namespace fusedmoe
