#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/layer.hpp>
#include <fusedmoe/machine.hpp>

#include "layer/rank_plan.hpp"
#include "support/forwarding_communicator.hpp"
#include "support/random_layer.hpp"
#include "support/rank_cells.hpp"

namespace fusedmoe {
namespace {

using testing_support::RandomLayer;
using testing_support::RankCell;
using testing_support::RunRankCell;

/// Passes everything on and remembers how wide the rows were.
class Watching final : public test::ForwardingCommunicator {
 public:
  using ForwardingCommunicator::ForwardingCommunicator;
  Status Wait() override {
    results_travel = false;
    return ForwardingCommunicator::Wait();
  }
  Status Start(const RowExchange& exchange) override {
    row_bytes[std::string(exchange.operation)] = exchange.row_bytes;
    FMOE_RETURN_IF_ERROR(ForwardingCommunicator::Start(exchange));
    results_travel = exchange.operation == "combine rows";
    return Status::Ok();
  }
  std::map<std::string, int64_t> row_bytes;
  bool results_travel = false;  // from the moment they are sent until they are waited for
  int64_t tasks_meanwhile = 0;
  /// Runs tasks one after the other, and counts those that run while results travel.
  Executor Counting() {
    Executor executor;
    executor.self = this;
    executor.num_threads = 2;
    executor.parallel = [](void* self, int64_t count, void (*task)(void*, int64_t), void* context) {
      auto* own = static_cast<Watching*>(self);
      own->tasks_meanwhile += own->results_travel ? count : 0;
      for (int64_t index = 0; index < count; ++index) {
        task(context, index);
      }
    };
    return executor;
  }
};

/// Bytes of a dispatched row of 128 values when two ranks run the cell; -1 when a result is wrong.
int64_t DispatchedRowBytes(const RankCell& cell) {
  CommunicatorOptions options;
  options.deadline_seconds = 20;
  const auto communicators = *InProcessCommunicators(2, options);
  std::vector<std::shared_ptr<Watching>> watching;
  std::vector<std::string> wrong(2);
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 2; ++rank) {
    watching.push_back(std::make_shared<Watching>(communicators[rank]));
  }
  for (size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] { wrong[rank] = RunRankCell(watching[rank], cell); });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong[0] + wrong[1], "") << cell.Name();
  return wrong[0].empty() && wrong[1].empty() ? watching[0]->row_bytes["dispatch rows"] : -1;
}

RankCell CellOf(const char* all2all, const char* scheme) {
  RankCell cell;
  cell.sizes.dp = 2;
  cell.sizes.enable_expert_parallel = true;
  cell.sizes.all2all = all2all;
  cell.scheme = scheme;
  return cell;
}

constexpr const char* kProtocols[] = {"allgather_reducescatter", "deepep_high_throughput",
                                      "deepep_low_latency"};

int64_t Tail(const char* all2all) {  // ids and weights: of one slot, or of all three
  return std::string(all2all) == "deepep_low_latency" ? 16 : 32;
}

TEST(Wire, BlockFp8_TravelsAsCodesWithScales) {
  for (const char* name : kProtocols) {
    for (const char* backend : {"REFERENCE", "CPU_FUSED"}) {
      RankCell cell = CellOf(name, "fp8_w8a8:block128");
      cell.backend = backend;
      EXPECT_EQ(DispatchedRowBytes(cell), 128 + 16 + Tail(name)) << name << " " << backend;
    }
  }
}

TEST(Wire, TokenInt8AndMx_TravelAsCodes) {
  EXPECT_EQ(DispatchedRowBytes(CellOf("deepep_high_throughput", "int8_w8a8")), 128 + 16 + 32);
  EXPECT_EQ(DispatchedRowBytes(CellOf("deepep_low_latency", "mxfp8_w8a8")), 128 + 16 + 16);
  EXPECT_EQ(DispatchedRowBytes(CellOf("naive", "mxfp4_w4a4")), 64 + 16 + 32);
}

TEST(Wire, WeightOnlySchemes_TravelAsTheyAre) {
  EXPECT_EQ(DispatchedRowBytes(CellOf("deepep_low_latency", "int4_w4a16")), 256 + 16);
}

TEST(Wire, StoredScales_TravelAsCodesOnlyWhereAllExpertsShareThem) {
  for (const char* name : kProtocols) {
    RankCell cell = CellOf(name, "nvfp4_w4a4");
    EXPECT_EQ(DispatchedRowBytes(cell), 256 + Tail(name)) << "each expert has a scale of its own";
    cell.same_input_scale = true;
    EXPECT_EQ(DispatchedRowBytes(cell), 64 + 16 + Tail(name));
    cell.backend = "CPU_FUSED";
    EXPECT_EQ(DispatchedRowBytes(cell), 64 + 16 + Tail(name));
  }
}

// A stored scale of the whole tensor stays at home, unlike one for each row: kernels that take codes back to
// fp32 multiply with it too.
TEST(Wire, StoredScalesOfATensor_ReachTheKernelsOfEveryLevel) {
  for (const char* scheme : {"fp8_w8a8:tensor_static", "int8_w8a8:tensor_static", "mxfp4_w4a8:static"}) {
    for (const Isa isa : {Isa::kAvx2, Isa::kAvx2Vnni, Isa::kAvx512, Isa::kAvx512Vnni, Isa::kAvx512Bf16,
                          Isa::kAvx512Fp16, Isa::kAmx}) {
      if (!HostMachine().Has(isa)) {
        continue;
      }
      RankCell cell = CellOf("allgather_reducescatter", scheme);
      cell.backend = "CPU_FUSED";
      cell.isa = IsaName(isa);
      cell.same_input_scale = true;
      EXPECT_EQ(DispatchedRowBytes(cell), 128 + Tail("allgather_reducescatter")) << "codes without scales";
    }
  }
}

/// Tasks that rank 0 runs while its results travel.
int64_t TasksWhileResultsTravel(bool shared_experts) {
  constexpr int64_t kHidden = 128, kTokens = 4;
  MoeConfig config;
  config.num_experts = config.num_local_experts = 4;
  config.hidden = config.intermediate = kHidden;
  config.routing.top_k = 2;
  config.max_tokens = kTokens;
  config.shared.intermediate = shared_experts ? kHidden : 0;
  const RandomLayer layer = testing_support::MakeRandomLayer(config, "unquantized", 3);
  SharedExpertWeights shared{layer.source, {}};
  shared.source.num_local_experts = 1;
  const Tensor hidden = testing_support::RandomRows(kTokens, kHidden, DType::kBF16, 1);
  const testing_support::RandomRouting routing = testing_support::MakeRandomRouting(kTokens, 2, 4, 2);
  CommunicatorOptions communicator_options;
  communicator_options.deadline_seconds = 20;
  const auto communicators = *InProcessCommunicators(2, communicator_options);
  std::vector<std::shared_ptr<Watching>> watching;
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < 2; ++rank) {
    watching.push_back(std::make_shared<Watching>(communicators[rank]));
  }
  for (int64_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      ParallelSizes sizes;
      sizes.dp = 2;
      sizes.enable_expert_parallel = true;
      sizes.all2all = "deepep_high_throughput";
      LayerOptions options;
      options.max_tokens = kTokens;
      options.parallel = *MakeParallelConfig(sizes, *RanksOf(sizes, rank));
      options.communicator = watching[static_cast<size_t>(rank)];
      ExpertSource source = layer.source;
      source.num_local_experts = 2;
      source.load = [load = layer.source.load, rank](int64_t expert) { return load(2 * rank + expert); };
      const auto made =
          MoeLayer::Create(config, source, RouterWeights{}, options, shared_experts ? &shared : nullptr);
      ASSERT_TRUE(made.ok()) << made.status().ToString();
      const auto workspace = (*made)->CreateWorkspace();
      Tensor output = *Tensor::Allocate(DType::kBF16, {kTokens, kHidden});
      const auto view = [&](const void* data, DType dtype) {
        return TensorView(static_cast<const std::byte*>(data), dtype, {kTokens, 2});
      };
      MoeLayer::Inputs inputs;
      inputs.hidden = hidden.view();
      inputs.topk_ids = view(routing.ids.data(), DType::kI32);
      inputs.topk_weights = view(routing.weights.data(), DType::kF32);
      MoeLayer::Outputs outputs;
      outputs.output = output.mutable_view();
      const Status status =
          (*made)->Forward(inputs, outputs, *workspace, watching[static_cast<size_t>(rank)]->Counting());
      EXPECT_TRUE(status.ok()) << status.ToString();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return watching[0]->tasks_meanwhile;
}

TEST(Wire, SharedExperts_RunWhileResultsTravel) {
  EXPECT_GT(TasksWhileResultsTravel(true), 0);
  EXPECT_EQ(TasksWhileResultsTravel(false), 0);
}

// Two tokens of very different size, both for expert 0: one scale over both is what one rank would take.
TEST(Wire, DynamicTensorScale_IsThatOfTheRowsOfAllRanks) {
  constexpr int64_t kHidden = 128;
  MoeConfig config;
  config.num_experts = config.num_local_experts = 4;
  config.hidden = kHidden;
  config.intermediate = 128;
  config.routing.top_k = 1;
  config.max_tokens = 2;
  const RandomLayer layer = testing_support::MakeRandomLayer(config, "fp8_w8a8:tensor", 3);
  ASSERT_FALSE(layer.source.scheme.activation.static_tensor_scale);
  std::vector<float> hidden(2 * kHidden);
  for (size_t col = 0; col < hidden.size(); ++col) {
    hidden[col] = (col < kHidden ? 1.0F : 400.0F) * static_cast<float>(static_cast<int>(col * 37 % 101) - 50);
  }
  const std::vector<int32_t> ids = {0, 0};
  const std::vector<float> weights = {1.0F, 1.0F};
  const auto run = [&](const LayerOptions& options, const ExpertSource& source, int64_t first,
                       int64_t count) {
    std::vector<float> output(static_cast<size_t>(count * kHidden), -1.0F);
    const auto made = MoeLayer::Create(config, source, RouterWeights{}, options);
    EXPECT_TRUE(made.ok()) << made.status().ToString();
    if (!made.ok()) {
      return output;
    }
    const auto workspace = (*made)->CreateWorkspace();
    const auto view = [&](const void* data, DType dtype, int64_t cols) {
      return TensorView(static_cast<const std::byte*>(data), dtype, {count, cols});
    };
    MoeLayer::Inputs inputs;
    inputs.hidden = view(hidden.data() + first * kHidden, DType::kF32, kHidden);
    inputs.topk_ids = view(ids.data() + first, DType::kI32, 1);
    inputs.topk_weights = view(weights.data() + first, DType::kF32, 1);
    MoeLayer::Outputs outputs;
    outputs.output =
        MutableTensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, {count, kHidden});
    const Status status = (*made)->Forward(inputs, outputs, *workspace);
    EXPECT_TRUE(status.ok()) << status.ToString();
    return output;
  };
  LayerOptions options;
  options.backend = "REFERENCE";
  options.max_tokens = 2;
  const std::vector<float> expected = run(options, layer.source, 0, 2);
  for (const char* name : kProtocols) {
    CommunicatorOptions communicator_options;
    communicator_options.deadline_seconds = 20;
    const auto communicators = *InProcessCommunicators(2, communicator_options);
    std::vector<std::thread> threads;
    std::vector<std::vector<float>> parts(2);
    for (int64_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        ParallelSizes sizes;
        sizes.dp = 2;
        sizes.enable_expert_parallel = true;
        sizes.all2all = name;
        LayerOptions own = options;
        own.parallel = *MakeParallelConfig(sizes, *RanksOf(sizes, rank));
        own.communicator = communicators[static_cast<size_t>(rank)];
        ExpertSource source = layer.source;
        source.num_local_experts = 2;
        source.load = [load = layer.source.load, rank](int64_t expert) { return load(2 * rank + expert); };
        parts[static_cast<size_t>(rank)] = run(own, source, rank, 1);
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
    parts[0].insert(parts[0].end(), parts[1].begin(), parts[1].end());
    EXPECT_EQ(parts[0], expected) << name;
  }
}

}  // namespace
}  // namespace fusedmoe
