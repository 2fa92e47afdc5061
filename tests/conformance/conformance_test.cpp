// Every scheme of the table through every backend that this build runs, against an evaluation of the problem
// in fp64 that says how far each value may lie away (expected_output.hpp). REFERENCE is one of the backends.
//
// Problems are drawn from a seed; FMOE_CONFORMANCE_ROUNDS says how many per scheme and backend (default 1;
// `make test-slow` runs 25), FMOE_CONFORMANCE_SEED where they begin, FMOE_CONFORMANCE_ISA at which level
// CPU_FUSED runs (default: the best of the machine).
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/layer.hpp>

#include "conformance/drawn_case.hpp"
#include "conformance/expected_output.hpp"
#include "conformance/faults.hpp"
#include "numerics/rows.hpp"
#include "oracle/host_table.hpp"
#include "support/allocations.hpp"
#include "support/tensors.hpp"
#include "support/test_name.hpp"

namespace fusedmoe::conformance {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Rows [begin, begin + count) of the batch through the layer, in fp32. The workspace is full of NaN before:
// nothing that a forward has not written may reach the output.
std::vector<float> RunRows(const MoeLayer& layer, const Batch& batch, int64_t begin, int64_t count,
                           int threads) {
  const int64_t k = layer.config().top_k();
  const Workspace workspace = *layer.CreateWorkspace();
  std::memset(workspace.Get<std::byte>({}), 0xFF, static_cast<size_t>(workspace.bytes()));
  const auto pool = *ThreadPool::Create(threads);
  Tensor output = *Tensor::Allocate(DType::kF32, {count, layer.config().hidden});
  MoeLayer::Inputs inputs;
  inputs.hidden = batch.hidden.view().Rows(begin, count);
  inputs.topk_ids = TensorView(reinterpret_cast<const std::byte*>(batch.routing.ids.data() + begin * k),
                               DType::kI32, {count, k});
  inputs.topk_weights = TensorView(
      reinterpret_cast<const std::byte*>(batch.routing.weights.data() + begin * k), DType::kF32, {count, k});
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  const int64_t before = CountAllocations();
  const Status status = layer.Forward(inputs, outputs, workspace, pool->executor());
  EXPECT_EQ(CountAllocations() - before, 0) << "Forward allocates";
  EXPECT_TRUE(status.ok()) << status.ToString();
  const auto* values = output.view().as<float>();
  return {values, values + output.view().count()};
}

// The layer, or null where the backend refuses the problem (with a reason, the first of which is kept).
std::unique_ptr<MoeLayer> Make(const DrawnCase& drawn, const LayerOptions& options,
                               std::string* refusal = nullptr) {
  auto layer = MoeLayer::Create(drawn.config, drawn.source, RouterWeights{}, options);
  if (!layer.ok()) {
    if (refusal != nullptr && refusal->empty()) {
      *refusal = layer.status().ToString();
    }
    EXPECT_EQ(layer.status().code(), StatusCode::kUnsupported) << layer.status().ToString();
    EXPECT_FALSE(layer.status().message().empty());
    return nullptr;
  }
  return *std::move(layer);
}

struct Tally {
  int64_t ran = 0;
  std::string refusal;  // the first one
};

void Check(const DrawnCase& drawn, const std::string& backend, Tally& tally) {
  SCOPED_TRACE(testing::Message() << drawn);
  const Batch batch = MakeBatch(drawn);
  LayerOptions options;
  options.max_tokens = drawn.tokens;
  options.plan_tokens = drawn.tokens;
  if (const char* isa = std::getenv("FMOE_CONFORMANCE_ISA"); isa != nullptr && backend == "CPU_FUSED") {
    options.isa = isa;
  }
  for (const ActivationMode mode : {ActivationMode::kAsCheckpoint, ActivationMode::kA8}) {
    std::optional<ExpectedOutput> expected;  // of both formats
    std::string arithmetic;
    for (const auto format : {ActivationFormatKind::kStandard, ActivationFormatKind::kBatchedExperts}) {
      SCOPED_TRACE(testing::Message() << (format == ActivationFormatKind::kStandard ? "Standard" : "Batched")
                                      << " " << ActivationModeName(mode));
      options.backend = backend;
      options.activation = mode;
      options.activation_format = format;
      const auto layer = Make(drawn, options, &tally.refusal);
      if (layer == nullptr) {
        continue;
      }
      ++tally.ran;
      ASSERT_EQ(layer->plan().backend, backend);
      const auto produced = RunRows(*layer, batch, 0, drawn.tokens, 1);
      if (!expected || layer->plan().arithmetic != arithmetic) {
        expected = Evaluate(drawn, batch, layer->plan());
        arithmetic = layer->plan().arithmetic;
      }
      EXPECT_LE(expected->Excess(produced), 1.0) << "of what is allowed";
      EXPECT_TRUE(test::SameBits(produced, RunRows(*layer, batch, 0, drawn.tokens, 3)))
          << "3 threads, other bits";

      options.determinism = Determinism::kBatchInvariant;
      const auto invariant = Make(drawn, options);
      options.determinism = Determinism::kThreadInvariant;
      if (invariant == nullptr) {
        continue;
      }
      const auto whole = RunRows(*invariant, batch, 0, drawn.tokens, 2);
      const int64_t token = drawn.tokens / 2;
      const auto alone = RunRows(*invariant, batch, token, 1, 1);
      const auto row = whole.begin() + token * drawn.config.hidden;
      EXPECT_TRUE(test::SameBits(alone, {row, row + drawn.config.hidden}))
          << "batch_invariant, but token " << token << " alone gives other bits than in the batch";
    }
  }
}

std::vector<std::string> BackendNames() {
  std::vector<std::string> names;
  for (const HostBackend& row : HostTable()) {
    if (row.backend != nullptr) {
      names.emplace_back(row.name);
    }
  }
  return names;
}

class EveryBackend : public testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(EveryBackend, AgreesWithTheDefinitionWithinItsErrors) {
  const auto& [backend, scheme] = GetParam();
  const uint64_t rounds = FromEnvironment("FMOE_CONFORMANCE_ROUNDS", 1);
  const uint64_t first = FromEnvironment("FMOE_CONFORMANCE_SEED", 1);
  // These promise every scheme: problems are drawn until one of it has run. Others may refuse all.
  const bool promised = backend == "REFERENCE" || backend == "CPU_FUSED";
  constexpr uint64_t kMostRounds = 100;
  Tally tally;
  for (uint64_t seed = first;
       seed < first + rounds || (promised && tally.ran == 0 && seed < first + kMostRounds); ++seed) {
    Check(Draw(scheme, seed), backend, tally);
    if (HasFatalFailure()) {
      return;
    }
  }
  RecordProperty("ran", static_cast<int>(tally.ran));
  if (promised) {
    EXPECT_GT(tally.ran, 0) << tally.refusal;
  } else if (tally.ran == 0) {
    GTEST_SKIP() << tally.refusal;
  }
}

INSTANTIATE_TEST_SUITE_P(Table, EveryBackend,
                         testing::Combine(testing::ValuesIn(BackendNames()),
                                          testing::ValuesIn(SchemeNames())),
                         [](const auto& instance) {
                           return test::TestName(std::get<0>(instance.param) + "_" +
                                                 std::get<1>(instance.param));
                         });

// What it is there to find.
class Sweep : public testing::TestWithParam<std::string> {};

TEST_P(Sweep, FindsEveryFaultThatChangesTheOutput) {
  int found = 0;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    const DrawnCase drawn = Draw(GetParam(), seed);
    SCOPED_TRACE(testing::Message() << drawn);
    const Batch batch = MakeBatch(drawn);
    LayerOptions options;
    options.backend = "REFERENCE";
    options.max_tokens = options.plan_tokens = drawn.tokens;
    const auto layer = Make(drawn, options);
    ASSERT_NE(layer, nullptr);
    const ExpectedOutput expected = Evaluate(drawn, batch, layer->plan());
    const auto right = RunRows(*layer, batch, 0, drawn.tokens, 1);
    for (const Fault& fault : Faults()) {
      const auto wrong = RunRows(*Make(Damaged(drawn, batch, fault), options), batch, 0, drawn.tokens, 1);
      if (!test::SameBits(wrong, right)) {
        EXPECT_GT(expected.Excess(wrong), 1.0) << fault.name;
        ++found;
      }
    }
    const auto lost = WithoutLargestToken(right, drawn.config.hidden);
    EXPECT_GT(expected.Excess(lost), 1.0) << "a lost token";
  }
  EXPECT_GT(found, 0);
}

INSTANTIATE_TEST_SUITE_P(Table, Sweep, testing::ValuesIn(SchemeNames()),
                         [](const auto& instance) { return test::TestName(instance.param); });

}  // namespace
}  // namespace fusedmoe::conformance
