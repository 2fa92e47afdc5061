#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <fusedmoe/communicator.hpp>
#include <fusedmoe/layer.hpp>

#include "support/random_layer.hpp"

// What an engine may hand over by mistake: each is kUsage, with what was given and what is needed.
namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::RandomLayer;

constexpr int64_t kExperts = 4, kTopK = 2, kHidden = 64;

MoeConfig Sizes() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = kExperts;
  config.hidden = kHidden;
  config.intermediate = 32;
  config.routing.top_k = kTopK;
  return config;
}

void ExpectUsage(const Status& status, const std::string& words) {
  EXPECT_EQ(status.code(), StatusCode::kUsage) << status.ToString();
  EXPECT_NE(status.ToString().find(words), std::string::npos) << status.ToString();
}

Status Create(const LayerOptions& options, const RouterWeights& router = {},
              const MoeConfig& config = Sizes()) {
  const RandomLayer random = MakeRandomLayer(config, "unquantized", 3);
  return MoeLayer::Create(random.config, random.source, router, options).status();
}

TEST(RefusedLayer, WithoutCheckpointOrExperts) {
  ExpectUsage(MoeLayer::Load(nullptr, 0).status(), "the checkpoint is null");
  RandomLayer random = MakeRandomLayer(Sizes(), "unquantized", 3);
  random.source.load = nullptr;
  ExpectUsage(MoeLayer::Create(random.config, random.source, {}).status(), "experts.load is empty");
}

TEST(RefusedLayer, WeightsOfAnotherTypeThanTheScheme) {
  RandomLayer random = MakeRandomLayer(Sizes(), "unquantized", 3);
  random.source.scheme.weight.element = DType::kF32;
  const Status status = MoeLayer::Create(random.config, random.source, {}).status();
  EXPECT_EQ(status.code(), StatusCode::kBadInput);
  EXPECT_NE(status.ToString().find("'expert 0, gate': holds BF16, the scheme of the source F32"),
            std::string::npos)
      << status.ToString();
}

TEST(RefusedLayer, MoreTokensThanSlotsCanBeCounted) {
  LayerOptions options;
  options.max_tokens = int64_t{1} << 40;
  ExpectUsage(Create(options), "max_tokens=1099511627776 must be between 1 and 536870912");
  options.max_tokens = 0;
  ExpectUsage(Create(options), "max_tokens=0 must be between 1 and 536870912");
}

TEST(RefusedLayer, DeploymentsThatMakeNoSense) {
  LayerOptions options;
  options.parallel.tp_size = 0;
  ExpectUsage(Create(options), "tp rank is 0 of 0");
  options.parallel = {};
  options.parallel.dp_rank = 7;
  ExpectUsage(Create(options), "dp rank is 7 of 1");
  options.parallel = {};
  options.parallel.num_redundant_experts = -3;
  ExpectUsage(Create(options), "num_redundant_experts is -3");
}

TEST(RefusedLayer, RanksThatNothingJoins) {
  LayerOptions options;
  options.parallel.use_ep = true;
  options.parallel.ep_size = options.parallel.dp_size = 2;
  for (const bool balanced : {false, true}) {
    options.parallel.enable_eplb = balanced;
    options.communicator = nullptr;
    ExpectUsage(Create(options), "no communicator to join them");
    options.communicator = SingleCommunicator();
    ExpectUsage(Create(options), "rank 0 of 2, the communicator that of rank 0 of 1");
  }
}

// Row numbers of all batches are kept in 32 bits.
TEST(RefusedLayer, BatchesOfMoreRowsThanCanBeNumbered) {
  LayerOptions options;
  options.activation_format = ActivationFormatKind::kBatchedExperts;
  options.max_tokens = int64_t{1} << 29;
  options.backend = "REFERENCE";
  ExpectUsage(Create(options), "batches of 4 experts with 536870912 rows each");
}

// What a shared expert lacks, or has too much, was found by crashes and by wrong sums.
TEST(RefusedLayer, SharedExpertsThatDoNotFit) {
  MoeConfig config = Sizes();
  config.shared.intermediate = 16;
  const RandomLayer random = MakeRandomLayer(Sizes(), "unquantized", 3);
  MoeConfig of_shared = Sizes();
  of_shared.num_experts = of_shared.num_local_experts = of_shared.routing.top_k = 1;
  of_shared.intermediate = 16;
  of_shared.has_bias = true;
  const ExpertSource source = MakeRandomLayer(of_shared, "unquantized", 4).source;
  const auto create = [&](const MoeConfig& sizes, const SharedExpertWeights* shared) {
    return MoeLayer::Create(sizes, random.source, {}, {}, shared).status();
  };
  SharedExpertWeights shared{source, {}};
  EXPECT_TRUE(create(config, &shared).ok()) << create(config, &shared).ToString();
  ExpectUsage(create(config, nullptr), "shared.intermediate is 16, and there are no weights");
  ExpectUsage(create(Sizes(), &shared), "shared.intermediate is 0");
  shared.source.load = nullptr;
  ExpectUsage(create(config, &shared), "shared.source.load is empty");

  // Of its matrices: what is refused of routed experts.
  const auto spoiled = [&](const std::function<void(CanonicalExpert&)>& spoil) {
    SharedExpertWeights wrong{source, {}};
    wrong.source.load = [&](int64_t index) -> Result<CanonicalExpert> {
      CanonicalExpert expert = *source.load(index);
      spoil(expert);
      return expert;
    };
    const Status status = create(config, &wrong);
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << status.ToString();
    EXPECT_NE(status.ToString().find("'shared expert 0, "), std::string::npos) << status.ToString();
  };
  spoiled([](CanonicalExpert& expert) { expert.up.codes = {}; });
  spoiled([](CanonicalExpert& expert) { expert.up.codes = *Tensor::Allocate(DType::kBF16, {2, 2}); });
  spoiled([](CanonicalExpert& expert) { expert.down.bias = *Tensor::Allocate(DType::kF32, {3}); });
  spoiled([](CanonicalExpert& expert) {
    expert.down.bias = *Tensor::Allocate(DType::kF32, {kHidden});  // the source's own stays as it is
    expert.down.bias.mutable_view().as<float>()[0] = std::numeric_limits<float>::quiet_NaN();
  });

  shared = {source, *Tensor::Allocate(DType::kF32, {kHidden})};
  ExpectUsage(create(config, &shared), "shared.has_gate is not set");
  config.shared.has_gate = true;
  EXPECT_TRUE(create(config, &shared).ok()) << create(config, &shared).ToString();
  shared.gate = {};
  ExpectUsage(create(config, &shared), "shared.has_gate is set, and the weights have no gate");
  for (const auto& [dtype, width] : {std::pair{DType::kBF16, kHidden}, std::pair{DType::kF32, int64_t{7}}}) {
    shared.gate = *Tensor::Allocate(dtype, {width});
    ExpectUsage(create(config, &shared), "the layer needs F32 [64]");
  }
}

TEST(RefusedLayer, CorrectionBiasOfAMethodWithoutOne) {
  RouterWeights router;
  router.weight = *Tensor::Allocate(DType::kF32, {kExperts, kHidden});
  router.correction_bias = *Tensor::Allocate(DType::kF32, {kExperts});
  ExpectUsage(Create({}, router), "a correction bias is given, which routing method");
}

// Biases that the config promises change the choice: a router without them would route differently.
TEST(RefusedLayer, RouterWithoutItsBiases) {
  MoeConfig config = Sizes();
  config.routing.method = RoutingMethod::kDeepSeekV3;
  config.has_correction_bias = true;
  RouterWeights router;
  router.weight = *Tensor::Allocate(DType::kF32, {kExperts, kHidden});
  ExpectUsage(Create({}, router, config), "correction bias is missing");
  router.correction_bias = *Tensor::Allocate(DType::kF32, {kExperts});
  EXPECT_TRUE(Create({}, router, config).ok());
  config.has_router_bias = true;
  ExpectUsage(Create({}, router, config), "router bias is missing");
  EXPECT_TRUE(Create({}, {}, config).ok()) << "the caller routes";
}

TEST(RefusedCommunicator, DeadlinesThatNeverOrAlwaysPass) {
  for (const double seconds :
       {0.0, -1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    CommunicatorOptions options;
    options.deadline_seconds = seconds;
    ExpectUsage(InProcessCommunicators(2, options).status(), "above 0");
    ExpectUsage(MpiCommunicator("libfusedmoe_mpi.so", options).status(), "above 0");
  }
}

// Who could not tell the others still tells its caller.
TEST(RefusedCommunicator, ErrorOfThisRank_OutlivesTheSilenceOfTheOthers) {
  CommunicatorOptions options;
  options.deadline_seconds = 0.05;
  const auto ranks = *InProcessCommunicators(2, options);
  const Status status = Agree(*ranks[0], "load", Status::BadInput("expert 3 is damaged"));
  EXPECT_EQ(status.code(), StatusCode::kSystem);
  EXPECT_NE(
      status.message().find("expert 3 is damaged; the other ranks could not be told: load (exchange 1): "
                            "rank 0 has waited"),
      std::string::npos)
      << status.ToString();
}

/// Forwards of two tokens by the caller's logits.
class RefusedForward : public testing::Test {
 public:
  void SetUp() override {
    const RandomLayer random = MakeRandomLayer(Sizes(), "unquantized", 3);
    LayerOptions options;
    options.max_tokens = 4;
    layer_ = *MoeLayer::Create(random.config, random.source, {}, options);
    workspace_ = *layer_->CreateWorkspace();
    inputs_.hidden = View(hidden_, 2, kHidden);
    inputs_.router_logits = View(logits_, 2, kExperts);
    outputs_.output = View(output_, 2, kHidden);
  }
  static MutableTensorView View(std::vector<float>& values, int64_t rows, int64_t cols) {
    return {reinterpret_cast<std::byte*>(values.data()), DType::kF32, {rows, cols}};
  }
  Status Run() const { return layer_->Forward(inputs_, outputs_, workspace_); }

  std::unique_ptr<MoeLayer> layer_;
  Workspace workspace_;
  std::vector<float> hidden_ = std::vector<float>(4 * kHidden, 1.0F), output_ = hidden_,
                     logits_ = std::vector<float>(4 * kExperts);
  MoeLayer::Inputs inputs_;
  MoeLayer::Outputs outputs_;
};

TEST_F(RefusedForward, MatricesThatAreMissingOrHaveNoMemory) {
  ASSERT_TRUE(Run().ok());
  inputs_.hidden = {};
  ExpectUsage(Run(), "hidden is missing, the layer needs [tokens, 64]");
  inputs_.hidden = TensorView(nullptr, DType::kF32, {2, kHidden});
  ExpectUsage(Run(), "hidden has shape [2, 64] and no memory");
  inputs_.hidden = View(hidden_, -2, kHidden);
  ExpectUsage(Run(), "hidden has shape [-2, 64]");
  inputs_.hidden = View(hidden_, 2, kHidden);
  outputs_.output = {};
  ExpectUsage(Run(), "output is missing, the layer needs [2, 64]");
  outputs_.output = MutableTensorView(nullptr, DType::kF32, {2, kHidden});
  ExpectUsage(Run(), "output has shape [2, 64] and no memory");
}

TEST_F(RefusedForward, ResultsThatWouldWriteOverEachOther) {
  std::vector<float> chosen(2 * kTopK);
  const auto ids_in = [](std::vector<float>& values) {
    return MutableTensorView(reinterpret_cast<std::byte*>(values.data()), DType::kI32, {2, kTopK});
  };
  outputs_.topk_ids = ids_in(hidden_);
  ExpectUsage(Run(), "output topk_ids and hidden overlap");
  outputs_.topk_ids = ids_in(output_);
  ExpectUsage(Run(), "output topk_ids and output overlap");
  outputs_.topk_ids = ids_in(chosen);
  outputs_.topk_weights = View(chosen, 2, kTopK);
  ExpectUsage(Run(), "output topk_weights and output topk_ids overlap");
  // Inputs of the choice have been read by then.
  outputs_.topk_ids = ids_in(logits_);
  EXPECT_TRUE(Run().ok()) << Run().ToString();
}

}  // namespace
}  // namespace fusedmoe
