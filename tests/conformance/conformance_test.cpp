// Every scheme of the table through every backend that this build runs, against the reference backend.
//
// Problems are drawn from a seed; FMOE_CONFORMANCE_ROUNDS says how many per scheme and backend (default 1;
// `make test-slow` runs 25), FMOE_CONFORMANCE_SEED where they begin.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/layer.hpp>

#include "conformance/drawn_case.hpp"
#include "oracle/host_table.hpp"
#include "support/allocations.hpp"
#include "support/random_layer.hpp"
#include "support/relative_l2.hpp"
#include "support/tensors.hpp"
#include "support/test_name.hpp"

namespace fusedmoe::conformance {
namespace {

using test::RelativeL2;
using testing_support::MakeRandomRouting;
using testing_support::RandomRouting;
using testing_support::RandomRows;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

struct Batch {
  Tensor hidden;
  RandomRouting routing;
};

Batch MakeBatch(const DrawnCase& drawn) {
  Batch batch{
      RandomRows(drawn.tokens, drawn.config.hidden, drawn.dtype, drawn.seed + 1),
      MakeRandomRouting(drawn.tokens, drawn.config.top_k(), drawn.config.num_experts, drawn.seed + 2)};
  for (size_t slot = 0; slot < batch.routing.ids.size(); ++slot) {
    if (drawn.seed % 3 == 0 && slot % 7 == 3) {
      batch.routing.ids[slot] = -1;  // a slot that the caller leaves out
    }
  }
  return batch;
}

// Rows [begin, begin + count) of the batch through the layer, in fp32. The workspace is full of NaN before:
// nothing that a forward has not written may reach the output.
std::vector<float> Run(const MoeLayer& layer, const Batch& batch, int64_t begin, int64_t count, int threads) {
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

// BoundOf speaks of expectations over many values. One event that a small batch cannot average out is added:
// the largest value of a group of the intermediate, some four times their root mean square, that two kernels
// see on either side of a threshold. It moves by a step, at most 1/2 of the value in four bits and 1/8
// beyond; where it decides an MX exponent, so do the others of its group.
double AllowedError(const DrawnCase& drawn, const MoeLayer& layer) {
  const MoeConfig& config = layer.config();
  const double bound =
      BoundOf(layer.plan(), layer.scheme(), drawn.dtype, config.hidden, config.intermediate).value();
  const ActivationFormat& activation = layer.scheme().activation;
  const ActivationMode mode = layer.plan().activation;
  if (!activation.quantized() || mode == ActivationMode::kWeightOnly || mode == ActivationMode::kA8) {
    return bound;
  }
  const double step = *activation.element == DType::kF4E2M1 ? 0.5 : 0.125;
  const auto values = static_cast<double>(drawn.tokens * config.top_k() * config.intermediate);
  const auto group = static_cast<double>(std::max<int64_t>(activation.group.col, 1));
  return std::hypot(bound, step * std::sqrt((group + 15.0) / values));
}

// The layer, or null where the backend refuses the problem (with a reason).
std::unique_ptr<MoeLayer> Make(const DrawnCase& drawn, const LayerOptions& options) {
  auto layer = MoeLayer::Create(drawn.config, drawn.source, RouterWeights{}, options);
  if (!layer.ok()) {
    EXPECT_EQ(layer.status().code(), StatusCode::kUnsupported) << layer.status().ToString();
    EXPECT_FALSE(layer.status().message().empty());
    return nullptr;
  }
  return *std::move(layer);
}

struct Tally {
  int64_t ran = 0;
};

void Check(const DrawnCase& drawn, const std::string& backend, Tally& tally) {
  SCOPED_TRACE(testing::Message() << drawn);
  const Batch batch = MakeBatch(drawn);
  LayerOptions options;
  options.max_tokens = drawn.tokens;
  options.plan_tokens = drawn.tokens;
  for (const ActivationMode mode : {ActivationMode::kAsCheckpoint, ActivationMode::kA8}) {
    for (const auto format : {ActivationFormatKind::kStandard, ActivationFormatKind::kBatchedExperts}) {
      SCOPED_TRACE(testing::Message() << (format == ActivationFormatKind::kStandard ? "Standard" : "Batched")
                                      << " " << ActivationModeName(mode));
      options.backend = backend;
      options.activation = mode;
      options.activation_format = format;
      const auto layer = Make(drawn, options);
      if (layer == nullptr) {
        continue;
      }
      ++tally.ran;
      ASSERT_EQ(layer->plan().backend, backend);
      LayerOptions reference_options;
      reference_options.backend = "REFERENCE";
      reference_options.max_tokens = drawn.tokens;
      const ActivationMode rule = layer->plan().activation;
      reference_options.activation = rule == ActivationMode::kA8 ? ActivationMode::kAsCheckpoint : rule;
      const auto reference = Make(drawn, reference_options);
      ASSERT_NE(reference, nullptr);
      const auto expected = Run(*reference, batch, 0, drawn.tokens, 1);
      const auto produced = Run(*layer, batch, 0, drawn.tokens, 1);
      // The norm of fewer than eight values often nearly cancels (of two: below a quarter of its expectation
      // in 6 % of all draws); a relative error says nothing there.
      if (drawn.tokens * std::min(drawn.config.hidden, drawn.config.top_k() * drawn.config.intermediate) >=
          8) {
        EXPECT_LE(RelativeL2(produced, expected), AllowedError(drawn, *layer));
      }
      EXPECT_TRUE(test::SameBits(produced, Run(*layer, batch, 0, drawn.tokens, 3)))
          << "3 threads, other bits";

      options.determinism = Determinism::kBatchInvariant;
      const auto invariant = Make(drawn, options);
      options.determinism = Determinism::kThreadInvariant;
      if (invariant == nullptr) {
        continue;
      }
      const auto whole = Run(*invariant, batch, 0, drawn.tokens, 2);
      const int64_t token = drawn.tokens / 2;
      const auto alone = Run(*invariant, batch, token, 1, 1);
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

TEST_P(EveryBackend, AgreesWithTheReferenceWithinItsBound) {
  const auto& [backend, scheme] = GetParam();
  const uint64_t rounds = FromEnvironment("FMOE_CONFORMANCE_ROUNDS", 1);
  const uint64_t first = FromEnvironment("FMOE_CONFORMANCE_SEED", 1);
  Tally tally;
  for (uint64_t seed = first; seed < first + rounds; ++seed) {
    Check(Draw(scheme, seed), backend, tally);
    if (HasFatalFailure()) {
      return;
    }
  }
  RecordProperty("ran", static_cast<int>(tally.ran));
  // REFERENCE and CPU_FUSED promise every scheme: they must have run some problem of it; others may refuse
  // the drawn ones.
  if (backend == "REFERENCE" || (backend == "CPU_FUSED" && rounds > 4)) {
    EXPECT_GT(tally.ran, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Table, EveryBackend,
                         testing::Combine(testing::ValuesIn(BackendNames()),
                                          testing::ValuesIn(SchemeNames())),
                         [](const auto& instance) {
                           return test::TestName(std::get<0>(instance.param) + "_" +
                                                 std::get<1>(instance.param));
                         });

}  // namespace
}  // namespace fusedmoe::conformance
