// What a caller relies on beside the values: graphs, workspaces, batches, rows that are not finite, refusals.

#include <cmath>
#include <cstring>
#include <string>

#include "cuda/card.hpp"
#include "cuda/layer_batch.hpp"
#include "platform/cuda/graph.hpp"
#include "support/allocations.hpp"
#include "support/relative_l2.hpp"
#include "support/tensors.hpp"

namespace fusedmoe {
namespace {

using test::RelativeL2;
using testing_support::MakeRandomLayer;
using testing_support::MakeRandomRouting;
using testing_support::RandomRouting;
using testing_support::RandomRows;

/// A layer with a router, everything on the card.
struct CardLayer {
  std::unique_ptr<MoeLayer> layer;
  RouterWeights router;
};

CardLayer MakeCardLayer(int64_t max_tokens) {
  MoeConfig config;
  config.num_experts = 16;
  config.routing.top_k = 4;
  config.hidden = 512;
  config.intermediate = 256;
  auto random = MakeRandomLayer(config, "nvfp4_w4a16", 3);
  CardLayer made;
  made.router.weight = RandomRows(16, 512, DType::kBF16, 4);
  LayerOptions options;
  options.device = "cuda";
  options.max_tokens = max_tokens;
  auto layer = MoeLayer::Create(random.config, random.source, made.router, options);
  EXPECT_TRUE(layer.ok()) << layer.status().message();
  made.layer = *std::move(layer);
  return made;
}

TEST(CudaLayer, Graph_CapturesForwardAndGivesTheSameBits) {
  FMOE_SKIP_WITHOUT_KERNELS("nvfp4_w4a16");
  for (const int64_t tokens : {3, 200}) {
    const CardLayer made = MakeCardLayer(tokens);
    const Workspace workspace = *made.layer->CreateWorkspace();
    const Tensor hidden = RandomRows(tokens, 512, DType::kBF16, 9);
    const auto* codes = hidden.view().as<uint16_t>();
    const OnCard<uint16_t> card_hidden(std::vector<uint16_t>(codes, codes + tokens * 512));
    const OnCard<uint16_t> direct(std::vector<uint16_t>(static_cast<size_t>(tokens * 512), 1));
    const OnCard<uint16_t> replayed(std::vector<uint16_t>(static_cast<size_t>(tokens * 512), 2));
    MoeLayer::Inputs inputs;
    inputs.hidden = card_hidden.View(DType::kBF16, {tokens, 512});
    MoeLayer::Outputs outputs;
    outputs.output = direct.MutableView(DType::kBF16, {tokens, 512});
    ASSERT_TRUE(made.layer->Forward(inputs, outputs, workspace).ok());
    const int64_t before = CountAllocations();
    ASSERT_TRUE(made.layer->Forward(inputs, outputs, workspace).ok());
    EXPECT_EQ(CountAllocations() - before, 0) << "Forward allocates on the host";
    ASSERT_TRUE(cuda::Synchronize(nullptr).ok());
    outputs.output = replayed.MutableView(DType::kBF16, {tokens, 512});
    auto graph = cuda::Graph::Capture([&](void* stream) {
      Executor executor;
      executor.stream = stream;
      return made.layer->Forward(inputs, outputs, workspace, executor);
    });
    ASSERT_TRUE(graph.ok()) << graph.status().message();
    for (int round = 0; round < 3; ++round) {
      ASSERT_TRUE((*graph)->Run().ok());
      EXPECT_TRUE(test::SameBits(replayed.Read(), direct.Read())) << tokens << " tokens, round " << round;
    }
  }
}

/// What CTAs hand to each other stays in the workspace from call to call, at rest: nothing of one call may be
/// taken for part of another, whatever their kernels, token counts and skipped slots.
TEST(CudaLayer, OneWorkspace_CallsOfAnySizeInAnyOrder_SameBitsAsAFreshOne) {
  FMOE_SKIP_WITHOUT_CARD();
  // 514: the last four columns of an output are not whole.
  for (const auto& [scheme, hidden] : {std::pair<const char*, int64_t>{"nvfp4_w4a16", 544},
                                       std::pair<const char*, int64_t>{"mxfp4_w4a8", 544},
                                       std::pair<const char*, int64_t>{"fp8_w8a8:tensor", 544},
                                       std::pair<const char*, int64_t>{"fp8_w8a8:channel", 544},
                                       std::pair<const char*, int64_t>{"unquantized", 514}}) {
    if (!KernelsAreBuilt(scheme)) {
      continue;
    }
    SCOPED_TRACE(scheme);
    MoeConfig config;
    config.num_experts = config.num_local_experts = 16;
    config.routing.top_k = 4;
    config.hidden = hidden;
    config.intermediate = 192;
    const auto random = MakeRandomLayer(config, scheme, 3);
    LayerOptions options;
    options.device = "cuda";
    options.max_tokens = 200;
    const auto layer = MoeLayer::Create(config, random.source, RouterWeights{}, options);
    ASSERT_TRUE(layer.ok()) << layer.status().message();
    const Workspace workspace = *(*layer)->CreateWorkspace();
    uint64_t seed = 1;
    for (const int64_t tokens : {1, 64, 2, 1, 200, 1, 8, 4, 5, 100, 3, 1, 1}) {
      ++seed;
      Batch batch{RandomRows(tokens, config.hidden, DType::kBF16, seed),
                  MakeRandomRouting(tokens, 4, config.num_experts, seed)};
      for (size_t slot = 0; slot < batch.routing.ids.size(); ++slot) {
        batch.routing.ids[slot] = (slot + seed) % 5 == 0 ? -1 : batch.routing.ids[slot];
      }
      EXPECT_TRUE(test::SameBits(RunLayer(**layer, batch, workspace), RunLayer(**layer, batch)))
          << tokens << " tokens";
    }
  }
}

/// Rows may lie backwards, or over one another, in host memory and on the card.
TEST(CudaLayer, RowsInAnyOrder_SameBits) {
  FMOE_SKIP_WITHOUT_KERNELS("mxfp4_w4a16");
  constexpr int64_t kHidden = 512, kTokens = 24, kRow = kHidden * 2;
  MoeConfig config;
  config.num_experts = config.num_local_experts = 16;
  config.routing.top_k = 4;
  config.hidden = kHidden;
  config.intermediate = 192;
  const auto random = MakeRandomLayer(config, "mxfp4_w4a16", 3);
  LayerOptions options;
  options.device = "cuda";
  options.max_tokens = kTokens;
  const auto layer = MoeLayer::Create(config, random.source, RouterWeights{}, options);
  ASSERT_TRUE(layer.ok()) << layer.status().message();
  const Workspace workspace = *(*layer)->CreateWorkspace();
  const Tensor memory = RandomRows(kTokens, kHidden, DType::kBF16, 5);
  for (const int64_t stride : {-kRow, kRow / 2}) {
    const int64_t tokens = stride < 0 ? kTokens : kTokens / 2;
    const auto begin = [&](const std::byte* rows) { return stride < 0 ? rows + (kTokens - 1) * kRow : rows; };
    Batch straight{*Tensor::Allocate(DType::kBF16, {tokens, kHidden}),
                   MakeRandomRouting(tokens, 4, config.num_experts, 6)};
    for (int64_t row = 0; row < tokens; ++row) {
      std::memcpy(straight.hidden.mutable_view().data() + row * kRow,
                  begin(memory.view().data()) + row * stride, kRow);
    }
    const std::vector<float> expected = RunLayer(**layer, straight, workspace);
    TensorView rows(begin(memory.view().data()), DType::kBF16, {tokens, kHidden});
    rows.set_stride_bytes(0, stride);
    const Batch strided{Tensor::Borrow(rows, memory.owner()), straight.routing};
    EXPECT_TRUE(test::SameBits(RunLayer(**layer, strided, workspace), expected))
        << "from the host, " << stride;

    const auto* words = memory.view().as<uint16_t>();
    const OnCard<uint16_t> hidden(std::vector<uint16_t>(words, words + kTokens * kHidden));
    const OnCard<int32_t> ids(straight.routing.ids);
    const OnCard<float> weights(straight.routing.weights);
    const OnCard<float> output(std::vector<float>(static_cast<size_t>(tokens * kHidden), 0.0F));
    MoeLayer::Inputs inputs;
    inputs.hidden =
        TensorView(begin(hidden.View(DType::kBF16, {1, 1}).data()), DType::kBF16, {tokens, kHidden});
    inputs.hidden.set_stride_bytes(0, stride);
    inputs.topk_ids = ids.View(DType::kI32, {tokens, 4});
    inputs.topk_weights = weights.View(DType::kF32, {tokens, 4});
    MoeLayer::Outputs outputs;
    outputs.output = output.MutableView(DType::kF32, {tokens, kHidden});
    const Status status = (*layer)->Forward(inputs, outputs, workspace);
    ASSERT_TRUE(status.ok()) << status.ToString();
    EXPECT_TRUE(test::SameBits(output.Read(), expected)) << "on the card, " << stride;
  }
}

/// A call of CUDA that failed, whosever it was, is no failure of the next launch.
TEST(CudaLayer, ErrorThatWasTold_IsNotToldAgain) {
  FMOE_SKIP_WITHOUT_KERNELS("mxfp4_w4a16");
  MoeConfig config;
  config.num_experts = config.num_local_experts = 8;
  config.routing.top_k = 2;
  config.hidden = config.intermediate = 256;
  const auto random = MakeRandomLayer(config, "mxfp4_w4a16", 3);
  RouterWeights router;
  router.weight = RandomRows(8, 256, DType::kBF16, 4);
  LayerOptions options;
  options.device = "cuda";
  options.max_tokens = 3;
  const auto layer = MoeLayer::Create(config, random.source, router, options);
  ASSERT_TRUE(layer.ok()) << layer.status().message();
  const Workspace workspace = *(*layer)->CreateWorkspace();
  const Tensor hidden = RandomRows(3, 256, DType::kBF16, 9);
  Tensor output = *Tensor::Allocate(DType::kF32, {3, 256});
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden.view();
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  EXPECT_FALSE(cuda::CopyOnDevice(nullptr, nullptr, 16, nullptr).ok());
  const Status status = (*layer)->ForwardFromHost(inputs, outputs, workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
}

/// Outputs are finite where the reference's are, and those as close as they must be.
void ExpectFiniteAsTheReference(const MoeConfig& config, const ExpertSource& source, const Batch& batch,
                                const char* mode) {
  LayerOptions options;
  options.device = "cuda";
  options.mode = mode;
  options.max_tokens = options.plan_tokens = batch.hidden.dim(0);
  const auto layer = MoeLayer::Create(config, source, RouterWeights{}, options);
  ASSERT_TRUE(layer.ok()) << layer.status().message();
  LayerOptions reference_options;
  reference_options.backend = "REFERENCE";
  reference_options.max_tokens = options.max_tokens;
  reference_options.activation = (*layer)->plan().activation;
  const auto reference = MoeLayer::Create(config, source, RouterWeights{}, reference_options);
  ASSERT_TRUE(reference.ok()) << reference.status().message();
  std::vector<float> expected = RunLayer(**reference, batch), produced = RunLayer(**layer, batch);
  int64_t differ = 0, not_finite = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    differ += std::isfinite(expected[i]) == std::isfinite(produced[i]) ? 0 : 1;
    not_finite += std::isfinite(expected[i]) ? 0 : 1;
    if (!std::isfinite(expected[i]) || !std::isfinite(produced[i])) {
      expected[i] = produced[i] = 0.0F;
    }
  }
  EXPECT_EQ(differ, 0) << "elements that are finite in one and not in the other";
  EXPECT_GT(not_finite, 0);
  EXPECT_LE(RelativeL2(produced, expected), AllowedError(**layer, DType::kBF16, options.max_tokens));
}

/// A token that is not finite leaves the others alone, and its own output is finite where the reference's is.
TEST(CudaLayer, TokensThatAreNotFinite_OutputsNotFiniteWhereTheReferenceHasThem) {
  FMOE_SKIP_WITHOUT_CARD();
  constexpr int64_t kTokens = 9, kHidden = 256;
  for (const std::string& scheme : BuiltSchemes({"nvfp4_w4a16", "nvfp4_w4a4", "mxfp4_w4a16", "mxfp4_w4a8",
                                                 "int4_w4a16:g32", "int4_w4a16:g128", "fp8_w8a8:channel",
                                                 "fp8_w8a8:block128", "int8_w8a8:channel", "unquantized"})) {
    for (const char* mode : {"latency", "throughput"}) {
      SCOPED_TRACE(testing::Message() << scheme << " " << mode);
      MoeConfig config;
      config.num_experts = config.num_local_experts = 8;
      config.routing.top_k = 2;
      config.hidden = kHidden;
      config.intermediate = 128;
      Batch batch{RandomRows(kTokens, kHidden, DType::kBF16, 5), MakeRandomRouting(kTokens, 2, 8, 6)};
      auto* const codes = batch.hidden.mutable_view().as<uint16_t>();
      codes[1 * kHidden + 17] = 0x7fc0;   // NaN
      codes[3 * kHidden + 200] = 0x7f80;  // infinity
      codes[3 * kHidden + 201] = 0xff80;
      codes[7 * kHidden] = 0xff80;
      ExpectFiniteAsTheReference(config, MakeRandomLayer(config, scheme, 7).source, batch, mode);
    }
  }
}

/// e4m3 weights whose codes are NaN: one expert has one in up, another in down. 200 tokens multiply codes.
TEST(CudaLayer, WeightCodesOfNaN_OutputsNotFiniteWhereTheReferenceHasThem) {
  FMOE_SKIP_WITHOUT_CARD();
  for (const std::string& scheme :
       BuiltSchemes({"fp8_w8a16:channel", "fp8_w8a16:tensor", "fp8_w8a8:channel", "fp8_w8a8:tensor_static",
                     "fp8_w8a8:block128", "mxfp8_w8a8"})) {
    for (const char* mode : {"latency", "throughput"}) {
      for (const int64_t tokens : {9, 200}) {
        SCOPED_TRACE(testing::Message() << scheme << " " << mode << " " << tokens);
        MoeConfig config;
        config.num_experts = config.num_local_experts = 8;
        config.routing.top_k = 2;
        config.hidden = 256;
        config.intermediate = 128;
        auto source = MakeRandomLayer(config, scheme, 7).source;
        source.load = [load = source.load](int64_t index) -> Result<CanonicalExpert> {
          FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
          CanonicalMatrix& matrix = index == 2 ? expert.up : expert.down;
          if (index == 2 || index == 5) {
            Tensor codes = *Tensor::Allocate(matrix.codes.dtype(), matrix.codes.shape());
            std::memcpy(codes.mutable_view().data(), matrix.codes.view().data(),
                        static_cast<size_t>(codes.view().total_bytes()));
            codes.mutable_view().data()[77 * codes.view().stride_bytes(0) + 31] = std::byte{0xff};
            matrix.codes = std::move(codes);
          }
          return expert;
        };
        const Batch batch{RandomRows(tokens, 256, DType::kBF16, 5), MakeRandomRouting(tokens, 2, 8, 6)};
        ExpectFiniteAsTheReference(config, source, batch, mode);
      }
    }
  }
}

/// `batch_invariant`: a token's bits are the same alone, among few and among many.
TEST(CudaLayer, BatchInvariant_TokensHaveTheSameBitsInEveryBatch) {
  FMOE_SKIP_WITHOUT_CARD();
  constexpr int64_t kMost = 600, kHidden = 512;
  for (const std::string& scheme :
       BuiltSchemes({"nvfp4_w4a16", "nvfp4_w4a4", "mxfp4_w4a16", "int4_w4a16:g128", "int4_w4a16:g32",
                     "fp8_w8a8:channel", "fp8_w8a8:block128", "int8_w8a8:channel", "unquantized"})) {
    SCOPED_TRACE(scheme);
    MoeConfig config;
    config.num_experts = config.num_local_experts = 8;
    config.routing.top_k = 2;
    config.hidden = kHidden;
    config.intermediate = 384;
    LayerOptions options;
    options.device = "cuda";
    options.max_tokens = kMost;
    options.determinism = Determinism::kBatchInvariant;
    const auto layer =
        MoeLayer::Create(config, MakeRandomLayer(config, scheme, 7).source, RouterWeights{}, options);
    ASSERT_TRUE(layer.ok()) << layer.status().message();
    const Workspace workspace = *(*layer)->CreateWorkspace();
    const Tensor hidden = RandomRows(kMost, kHidden, DType::kBF16, 5);
    const RandomRouting routing = MakeRandomRouting(kMost, 2, 8, 6);
    const auto run = [&](int64_t first, int64_t count) {
      const int64_t row_bytes = kHidden * 2;
      Batch batch{
          Tensor::Borrow(TensorView(hidden.view().data() + first * row_bytes, DType::kBF16, {count, kHidden}),
                         nullptr),
          {}};
      batch.routing.ids.assign(routing.ids.begin() + first * 2, routing.ids.begin() + (first + count) * 2);
      batch.routing.weights.assign(routing.weights.begin() + first * 2,
                                   routing.weights.begin() + (first + count) * 2);
      return RunLayer(**layer, batch, workspace);
    };
    const std::vector<float> all = run(0, kMost);
    for (const auto& [first, count] :
         {std::pair<int64_t, int64_t>{0, 1}, {37, 1}, {5, 9}, {64, 64}, {100, 300}}) {
      const std::vector<float> want(all.begin() + first * kHidden, all.begin() + (first + count) * kHidden);
      EXPECT_TRUE(test::SameBits(run(first, count), want)) << count << " tokens from " << first;
    }
  }
}

TEST(CudaLayer, Forward_HostWorkspace_Refused) {
  FMOE_SKIP_WITHOUT_KERNELS("nvfp4_w4a16");
  const CardLayer made = MakeCardLayer(4);
  const Workspace workspace = *Workspace::Allocate(made.layer->plan().workspace_bytes);
  const Tensor hidden = RandomRows(1, 512, DType::kBF16, 9);
  Tensor output = *Tensor::Allocate(DType::kBF16, {1, 512});
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden.view();
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  EXPECT_EQ(made.layer->ForwardFromHost(inputs, outputs, workspace).code(), StatusCode::kUsage);
}

TEST(CudaLayer, NoTokens_NothingHappens) {
  FMOE_SKIP_WITHOUT_KERNELS("nvfp4_w4a16");
  const CardLayer made = MakeCardLayer(4);
  const Workspace workspace = *made.layer->CreateWorkspace();
  MoeLayer::Inputs inputs;
  inputs.hidden = TensorView(nullptr, DType::kBF16, {0, 512});
  MoeLayer::Outputs outputs;
  outputs.output = MutableTensorView(nullptr, DType::kBF16, {0, 512});
  const Status status = made.layer->ForwardFromHost(inputs, outputs, workspace);
  EXPECT_TRUE(status.ok()) << status.message();
}

TEST(CudaLayer, WithoutACard_LoadListsEveryRefusal) {
  if (cuda::CheckCard(HostMachine()).ok()) {
    GTEST_SKIP() << "there is a card";
  }
  MoeConfig config;
  config.num_experts = 4;
  config.routing.top_k = 2;
  config.hidden = 64;
  config.intermediate = 32;
  auto random = MakeRandomLayer(config, "nvfp4_w4a16", 3);
  LayerOptions options;
  options.device = "cuda";
  const auto layer = MoeLayer::Create(random.config, random.source, RouterWeights{}, options);
  ASSERT_FALSE(layer.ok());
  EXPECT_EQ(layer.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(layer.status().message().find("CUDA_FUSED"), std::string::npos);
  EXPECT_NE(layer.status().message().find(HostMachine().cuda_missing), std::string::npos)
      << layer.status().message();
  EXPECT_NE(layer.status().message().find("CPU_FUSED: runs on cpu"), std::string::npos)
      << layer.status().message();
}

}  // namespace
}  // namespace fusedmoe
