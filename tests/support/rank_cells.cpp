#include "support/rank_cells.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <random>

#include <fmt/format.h>

#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/problems.hpp>

#include "layer/rank_plan.hpp"
#include "numerics/rows.hpp"
#include "prepare_finalize/all_to_all/all_to_all.hpp"
#include "support/random_layer.hpp"
#include "weights/slice.hpp"

namespace fusedmoe::testing_support {
namespace {

constexpr int64_t kHidden = 128;
constexpr int64_t kIntermediate = 256;
constexpr int64_t kMaxTokens = 24;

/// Layers are drawn once a process: the cells differ in how they are spread.
const RandomLayer& LayerOf(const RankCell& cell) {
  static std::mutex mutex;  // ranks may be threads
  static std::map<std::string, RandomLayer> drawn;
  const std::lock_guard lock(mutex);
  const std::string key = fmt::format("{} {} {} {} {} {}", cell.scheme, cell.num_experts, cell.top_k,
                                      cell.same_input_scale, cell.latent, cell.bias);
  const auto found = drawn.find(key);
  if (found != drawn.end()) {
    return found->second;
  }
  MoeConfig config;
  config.num_experts = config.num_local_experts = cell.num_experts;
  config.hidden = cell.latent > 0 ? cell.latent : kHidden;
  config.intermediate = kIntermediate;
  config.routing.top_k = cell.top_k;
  config.dtype = DType::kBF16;
  config.max_tokens = kMaxTokens;
  config.has_bias = cell.bias;
  RandomLayer layer = MakeRandomLayer(config, cell.scheme, 5);
  layer.config.hidden = kHidden;
  layer.config.latent = cell.latent;
  layer.config.latent_norm_epsilon = cell.latent > 0 ? 1e-5F : 0.0F;
  if (cell.same_input_scale) {
    layer.source.load = [load = layer.source.load](int64_t expert) -> Result<CanonicalExpert> {
      FMOE_ASSIGN_OR_RETURN(CanonicalExpert loaded, load(expert));
      FMOE_ASSIGN_OR_RETURN(const CanonicalExpert first, load(0));
      loaded.gate.input_tensor_scale = loaded.up.input_tensor_scale = first.gate.input_tensor_scale;
      return loaded;
    };
  }
  return drawn.emplace(key, std::move(layer)).first->second;
}

/// What this rank holds of the layer.
Result<ExpertSource> SourceOfRank(const RandomLayer& layer, const ParallelConfig& parallel) {
  FMOE_ASSIGN_OR_RETURN(const RankPlan plan, PlanRank(layer.config, layer.source.scheme, parallel));
  ExpertSource part = layer.source;
  const auto whole = layer.source.load;
  if (parallel.use_ep) {
    part.num_local_experts = static_cast<int64_t>(plan.local_experts.size());
    part.load = [whole, plan](int64_t expert) {
      return whole(plan.local_experts[static_cast<size_t>(expert)]);
    };
    return part;
  }
  FMOE_ASSIGN_OR_RETURN(const IntermediateRange range,
                        IntermediateShare(layer.config.intermediate, parallel, layer.source.scheme));
  part.load = [whole, range](int64_t expert) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert loaded, whole(expert));
    const int64_t width = range.end - range.begin;
    FMOE_ASSIGN_OR_RETURN(loaded.gate, SliceMatrix(loaded.gate, range.begin, width, 0, loaded.gate.cols));
    FMOE_ASSIGN_OR_RETURN(loaded.up, SliceMatrix(loaded.up, range.begin, width, 0, loaded.up.cols));
    FMOE_ASSIGN_OR_RETURN(loaded.down, SliceMatrix(loaded.down, 0, loaded.down.rows, range.begin, width));
    return loaded;
  };
  return part;
}

int64_t NumTokens(const RankCell& cell, int64_t group) {
  switch (cell.tokens) {
    case TokenPattern::kEqual:
      return 6;
    case TokenPattern::kDescending:
      return std::max<int64_t>(0, 16 - 7 * group);
    case TokenPattern::kZeroOnOne:
      return group == 0 ? 0 : 4;
    case TokenPattern::kZeroOnAll:
      return 0;
    case TokenPattern::kOneToken:
      return group == 0 ? 1 : 0;
  }
  return 0;
}

/// The tokens of one rank, with their experts.
struct Batch {
  int64_t num_tokens = 0;
  Tensor hidden;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Batch DrawBatch(const RankCell& cell, int64_t group, int64_t step) {
  Batch batch;
  const uint64_t seed =
      cell.seed * 7919 + static_cast<uint64_t>(step) * 104729 + static_cast<uint64_t>(group);
  batch.num_tokens = NumTokens(cell, group);
  if (step > 0) {  // long runs: sizes of all kinds
    batch.num_tokens = static_cast<int64_t>(std::mt19937_64(seed)() % (kMaxTokens + 1));
  }
  batch.hidden = RandomRows(std::max<int64_t>(batch.num_tokens, 1), kHidden, DType::kBF16, seed);
  RandomRouting routing = MakeRandomRouting(batch.num_tokens, cell.top_k, cell.num_experts, seed + 1);
  batch.ids = std::move(routing.ids);
  batch.weights = std::move(routing.weights);
  for (size_t slot = 0; slot < batch.ids.size(); ++slot) {
    const auto position = static_cast<int32_t>(slot % static_cast<size_t>(cell.top_k));
    switch (cell.ids) {
      case IdPattern::kUniform:
        break;
      case IdPattern::kOneExpert:
        batch.ids[slot] = position == 0 ? static_cast<int32_t>(cell.num_experts - 1) : -1;
        break;
      case IdPattern::kOneRank:
        batch.ids[slot] = position == 0 ? 0 : -1;
        break;
      case IdPattern::kHoles:
        batch.ids[slot] = (slot * 7 + seed) % 3 == 0 ? -1 : batch.ids[slot];
        break;
      case IdPattern::kRepeated:  // in every slot
        batch.ids[slot] = static_cast<int32_t>(cell.num_experts - 1);
        break;
    }
  }
  return batch;
}

Result<std::vector<float>> Forward(const MoeLayer& layer, const Workspace& workspace, const Batch& batch,
                                   const std::vector<int32_t>& ids, DType dtype) {
  FMOE_ASSIGN_OR_RETURN(Tensor output,
                        Tensor::Allocate(dtype, {std::max<int64_t>(batch.num_tokens, 1), kHidden}));
  const int64_t top_k = layer.config().top_k();
  MoeLayer::Inputs inputs;
  inputs.hidden = batch.hidden.view().Rows(0, batch.num_tokens);
  if (batch.num_tokens > 0) {
    inputs.topk_ids =
        TensorView(reinterpret_cast<const std::byte*>(ids.data()), DType::kI32, {batch.num_tokens, top_k});
    inputs.topk_weights = TensorView(reinterpret_cast<const std::byte*>(batch.weights.data()), DType::kF32,
                                     {batch.num_tokens, top_k});
  }
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view().Rows(0, batch.num_tokens);
  FMOE_RETURN_IF_ERROR(layer.ForwardFromHost(inputs, outputs, workspace));
  std::vector<float> values(static_cast<size_t>(batch.num_tokens * kHidden));
  DecodeRow(dtype, output.view().data(), 0, batch.num_tokens * kHidden, values.data());
  return values;
}

/// The whole layer on this rank alone.
struct Alone {
  std::unique_ptr<MoeLayer> layer;
  Workspace workspace;
};

Result<Alone> MakeAlone(const RankCell& cell, const RandomLayer& random, const SharedExpertWeights* shared,
                        const LatentWeights* latent) {
  LayerOptions options;
  options.device = cell.device;
  options.backend = cell.backend;
  options.isa = cell.isa;
  options.max_tokens = kMaxTokens;
  options.determinism = cell.determinism;
  Alone alone;
  FMOE_ASSIGN_OR_RETURN(
      alone.layer, MoeLayer::Create(random.config, random.source, RouterWeights{}, options, shared, latent));
  FMOE_ASSIGN_OR_RETURN(alone.workspace, alone.layer->CreateWorkspace());
  return alone;
}

/// Partial sums of the experts of each rank, added in rank order, rounded once.
Result<std::vector<float>> SumInRankOrder(const RankCell& cell, const Alone& alone, const Batch& batch,
                                          const std::vector<int32_t>& owners, int64_t ranks) {
  std::vector<float> sum(static_cast<size_t>(batch.num_tokens * kHidden), 0.0F);
  for (int64_t rank = 0; rank < ranks; ++rank) {
    std::vector<int32_t> ids = batch.ids;
    for (int32_t& id : ids) {
      id = id >= 0 && owners[static_cast<size_t>(id)] == rank ? id : -1;
    }
    FMOE_ASSIGN_OR_RETURN(const std::vector<float> part,
                          Forward(*alone.layer, alone.workspace, batch, ids, DType::kF32));
    for (int64_t token = 0; token < batch.num_tokens; ++token) {
      const auto* own = ids.data() + token * cell.top_k;
      if (std::all_of(own, own + cell.top_k, [](int32_t id) { return id < 0; })) {
        continue;  // this rank sends nothing for the token
      }
      for (int64_t col = token * kHidden; col < (token + 1) * kHidden; ++col) {
        sum[static_cast<size_t>(col)] += part[static_cast<size_t>(col)];
      }
    }
  }
  RoundRow(cell.output, sum.data(), static_cast<int64_t>(sum.size()));
  return sum;
}

std::string CompareBits(const std::vector<float>& actual, const std::vector<float>& expected) {
  for (size_t index = 0; index < actual.size(); ++index) {
    if (std::memcmp(&actual[index], &expected[index], sizeof(float)) != 0) {
      return fmt::format("token {}, column {}: {} instead of {}", index / kHidden, index % kHidden,
                         actual[index], expected[index]);
    }
  }
  return "";
}

std::string CompareWithin(const std::vector<float>& actual, const std::vector<float>& expected,
                          double bound) {
  double difference = 0, norm = 0;
  for (size_t index = 0; index < actual.size(); ++index) {
    const double delta = static_cast<double>(actual[index]) - expected[index];
    difference += delta * delta;
    norm += static_cast<double>(expected[index]) * expected[index];
  }
  const double error = difference == 0 ? 0 : std::sqrt(difference / norm);
  return error <= bound ? "" : fmt::format("relative L2 {:.3e} beyond the bound {:.3e}", error, bound);
}

/// The bound of verify. On cards both sides may have run other kernels, whose sums differ in their last bits:
/// now and then a value between the GEMMs becomes the next code, which few tokens do not average out.
double AllowedError(const RankCell& cell, const MoeLayer& layer, int64_t num_tokens) {
  const bool apart = RanksScaleApart(kIntermediate, layer.config().parallel, layer.scheme());
  return BoundOf(layer.plan(), layer.scheme(), cell.output, kHidden, kIntermediate,
                 {.rows = cell.device == "cpu" ? 0 : num_tokens * cell.top_k, .scales_apart = apart})
      .value();
}

Result<std::string> RunSteps(const std::shared_ptr<Communicator>& communicator, const RankCell& cell,
                             int64_t steps, RankCellReport& report, const SourceHook& hook) {
  FMOE_ASSIGN_OR_RETURN(const ParallelRanks place, RanksOf(cell.sizes, communicator->rank()));
  FMOE_ASSIGN_OR_RETURN(const ParallelConfig parallel, MakeParallelConfig(cell.sizes, place));
  const RandomLayer& random = LayerOf(cell);
  RankCell of_shared = cell;  // which read the hidden states, whatever the routed experts do
  of_shared.latent = 0;
  SharedExpertWeights shared{LayerOf(of_shared).source, {}};
  shared.source.num_local_experts = 1;
  RandomLayer with_shared = random;
  if (cell.shared) {
    with_shared.config.shared.intermediate = kIntermediate;
  }
  const SharedExpertWeights* shared_weights = cell.shared ? &shared : nullptr;
  const LatentWeights latent = RandomLatent(kHidden, std::max<int64_t>(cell.latent, 1), 31, true);
  const LatentWeights* latent_weights = cell.latent > 0 ? &latent : nullptr;

  LayerOptions options;
  options.device = cell.device;
  options.backend = cell.backend;
  options.isa = cell.isa;
  options.max_tokens = kMaxTokens;
  options.determinism = cell.determinism;
  options.parallel = parallel;
  options.communicator = communicator;
  options.eplb = {4, std::max<int64_t>(cell.eplb_interval, 1)};
  FMOE_ASSIGN_OR_RETURN(ExpertSource source, SourceOfRank(random, parallel));
  if (hook) {
    hook(source);
  }
  FMOE_ASSIGN_OR_RETURN(
      const std::unique_ptr<MoeLayer> layer,
      MoeLayer::Create(with_shared.config, source, RouterWeights{}, options, shared_weights, latent_weights));
  FMOE_ASSIGN_OR_RETURN(const Workspace workspace, layer->CreateWorkspace());
  FMOE_ASSIGN_OR_RETURN(const Alone alone, MakeAlone(cell, with_shared, shared_weights, latent_weights));

  const TokenLayout tokens = TokenLayoutOf(parallel);
  const int64_t group = tokens.shares_tokens ? tokens.rank / tokens.tp : tokens.rank;
  const bool batched = ProtocolOf(parallel) == WireProtocol::kExpertRows;
  // A card cuts sums by what else a call computes, unless it is told not to.
  const bool sums_keep_bits = cell.device == "cpu" || cell.determinism >= Determinism::kBatchInvariant;
  for (int64_t step = 0; step < steps; ++step) {
    const Batch batch = DrawBatch(cell, group, step);
    FMOE_ASSIGN_OR_RETURN(const std::vector<float> actual,
                          Forward(*layer, workspace, batch, batch.ids, cell.output));
    FMOE_ASSIGN_OR_RETURN(std::vector<float> expected,
                          Forward(*alone.layer, alone.workspace, batch, batch.ids, cell.output));
    std::string wrong;
    const bool bits_of_one = cell.determinism == Determinism::kRankInvariant ||
                             (batched && cell.backend == "REFERENCE") || communicator->size() == 1;
    if (parallel.use_ep && bits_of_one) {
      wrong = CompareBits(actual, expected);
    } else if (parallel.use_ep && !batched && !parallel.enable_eplb && sums_keep_bits && cell.latent == 0) {
      FMOE_ASSIGN_OR_RETURN(const RankPlan plan, PlanRank(random.config, random.source.scheme, parallel));
      FMOE_ASSIGN_OR_RETURN(expected, SumInRankOrder(cell, alone, batch, plan.owners, communicator->size()));
      wrong = CompareBits(actual, expected);
    } else {
      wrong = CompareWithin(actual, expected, AllowedError(cell, *layer, batch.num_tokens));
    }
    if (!wrong.empty()) {
      return fmt::format("step {}, placement {}: {}", step, report.epoch, wrong);
    }
    if (cell.eplb_interval > 0) {
      FMOE_ASSIGN_OR_RETURN(const EplbStep end, layer->EndStep());
      report.epoch = end.epoch;
      report.switches += end.switched ? 1 : 0;
      report.received += end.experts_received;
      report.kept = end.kept.empty() ? report.kept : end.kept;
      report.kept_count += end.kept.empty() ? 0 : 1;
    }
  }
  return std::string();
}

}  // namespace

std::string RankCell::Name() const {
  static const char* const kTokenNames[] = {"equal", "descending", "zero_on_one", "zero_on_all", "one_token"};
  static const char* const kIdNames[] = {"uniform", "one_expert", "one_rank", "holes", "repeated"};
  return fmt::format(
             "tp{} pcp{} dp{} sp{}{}{} {} {} {} {} {} E{} k{} {}{}", sizes.tp, sizes.pcp, sizes.dp, sizes.sp,
             sizes.enable_expert_parallel ? " ep" : "",
             sizes.enable_eplb ? fmt::format(" eplb+{}/{}", sizes.num_redundant_experts, eplb_interval) : "",
             sizes.all2all, kTokenNames[static_cast<int>(tokens)], kIdNames[static_cast<int>(ids)], scheme,
             backend, num_experts, top_k, DeterminismName(determinism), shared ? " shared" : "") +
         (latent > 0 ? fmt::format(" latent {}", latent) : "") + (same_input_scale ? " same_scale" : "") +
         (bias ? " bias" : "") + (isa.empty() ? "" : " " + isa);
}

std::string RunRankCell(const std::shared_ptr<Communicator>& communicator, const RankCell& cell,
                        int64_t steps) {
  RankCellReport report;
  return RunRankCell(communicator, cell, steps, report);
}

std::string RunRankCell(const std::shared_ptr<Communicator>& communicator, const RankCell& cell,
                        int64_t steps, RankCellReport& report, const SourceHook& hook) {
  const Result<std::string> wrong = RunSteps(communicator, cell, steps, report, hook);
  return wrong.ok() ? *wrong : wrong.status().ToString();
}

}  // namespace fusedmoe::testing_support
