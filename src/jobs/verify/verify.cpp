#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include <fmt/format.h>

#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/routing.hpp>

#include "core/random_bits.hpp"
#include "jobs/prepare/prepared_file.hpp"
#include "jobs/verify/distance.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kMapRows = 64, kMapCols = 96;

// Twelve uniforms a normal number: enough for inputs, and the same on every machine.
class Normal {
 public:
  explicit Normal(uint64_t seed) : counter_(seed) {}
  float Next() {
    double sum = -6.0;
    for (int i = 0; i < 12; ++i) {
      sum += static_cast<double>(SplitMix64(counter_) >> 11) * 0x1p-53;
      counter_ += kSplitMix64Step;
    }
    return static_cast<float>(sum);
  }

 private:
  uint64_t counter_;
};

Result<Tensor> RandomHidden(int64_t tokens, int64_t hidden, uint64_t seed) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kBF16, {tokens, hidden}));
  Normal normal(seed);
  std::vector<float> row(static_cast<size_t>(hidden));
  for (int64_t token = 0; token < tokens; ++token) {
    std::generate(row.begin(), row.end(), [&normal] { return normal.Next(); });
    EncodeRow(DType::kBF16, row.data(), hidden,
              tensor.mutable_view().data() + token * tensor.view().stride_bytes(0));
  }
  return tensor;
}

// A loaded layer and memory to run it.
struct Runner {
  std::unique_ptr<MoeLayer> layer;
  Workspace workspace;
  Executor executor;

  static Result<Runner> Load(const LayerLoader& load, const LayerOptions& options) {
    Runner runner;
    runner.executor = options.executor;
    FMOE_ASSIGN_OR_RETURN(runner.layer, load(options));
    FMOE_ASSIGN_OR_RETURN(runner.workspace, runner.layer->CreateWorkspace());
    return runner;
  }

  // The output for these experts, in `dtype`.
  Result<Tensor> Run(TensorView hidden, TensorView ids, TensorView weights, DType dtype) const {
    FMOE_ASSIGN_OR_RETURN(Tensor output, Tensor::Allocate(dtype, hidden.shape()));
    MoeLayer::Inputs inputs;
    inputs.hidden = hidden;
    inputs.topk_ids = ids;
    inputs.topk_weights = weights;
    MoeLayer::Outputs outputs;
    outputs.output = output.mutable_view();
    FMOE_RETURN_IF_ERROR(layer->ForwardFromHost(inputs, outputs, workspace, executor));
    return output;
  }
};

struct Routed {
  Tensor ids, weights;  // [M, k]
};

// For layers whose caller routes.
Status DrawExperts(const MoeConfig& config, int64_t tokens, Routed& drawn) {
  RoutingConfig routing;
  routing.method = RoutingMethod::kSimulated;
  routing.simulation = "uniform_random";
  routing.top_k = config.top_k();
  const RoutingInputs inputs{.router_logits =
                                 TensorView(nullptr, DType::kF32, Shape{tokens, config.num_experts})};
  return fusedmoe::Route(routing, inputs, drawn.ids.mutable_view().as<int32_t>(),
                         drawn.weights.mutable_view().as<float>());
}

Result<Routed> Route(const Runner& runner, MoeLayer::Inputs inputs, Tensor* output,
                     std::vector<std::string>* notes) {
  const int64_t tokens = inputs.hidden.dim(0);
  const MoeConfig& config = runner.layer->config();
  const int64_t top_k = config.top_k();
  Routed routed;
  FMOE_ASSIGN_OR_RETURN(routed.ids, Tensor::Allocate(DType::kI32, {tokens, top_k}));
  FMOE_ASSIGN_OR_RETURN(routed.weights, Tensor::Allocate(DType::kF32, {tokens, top_k}));
  FMOE_ASSIGN_OR_RETURN(*output, Tensor::Allocate(inputs.hidden.dtype(), inputs.hidden.shape()));
  if (config.routing.method == RoutingMethod::kCustom && inputs.topk_ids.empty() &&
      inputs.router_logits.empty()) {
    FMOE_RETURN_IF_ERROR(DrawExperts(config, tokens, routed));
    notes->push_back("experts are drawn, all equally likely: the caller routes");
    inputs.topk_ids = routed.ids.view();
    inputs.topk_weights = routed.weights.view();
  }
  MoeLayer::Outputs outputs{output->mutable_view(), routed.ids.mutable_view(), routed.weights.mutable_view()};
  FMOE_RETURN_IF_ERROR(runner.layer->ForwardFromHost(inputs, outputs, runner.workspace, runner.executor));
  return routed;
}

Status SameSizes(const MoeConfig& left, const MoeConfig& right) {
  const auto differs = [](std::string_view name, int64_t a, int64_t b) {
    return Status::Usage(fmt::format("{} is {} here and {} in the other checkpoint", name, a, b));
  };
  if (left.hidden != right.hidden) {
    return differs("hidden", left.hidden, right.hidden);
  }
  if (left.latent != right.latent) {
    return differs("latent", left.latent, right.latent);
  }
  if (left.intermediate != right.intermediate) {
    return differs("intermediate", left.intermediate, right.intermediate);
  }
  if (left.num_experts != right.num_experts) {
    return differs("num_experts", left.num_experts, right.num_experts);
  }
  if (left.top_k() != right.top_k()) {
    return differs("top_k", left.top_k(), right.top_k());
  }
  return Status::Ok();
}

std::vector<float> RowOf(const Tensor& tensor, int64_t row) {
  std::vector<float> values(static_cast<size_t>(tensor.dim(1)));
  DecodeRow(tensor.dtype(), tensor.view().data() + row * tensor.view().stride_bytes(0), 0, tensor.dim(1),
            values.data());
  return values;
}

// Row errors, the whole and the map, from both outputs.
void CompareRows(const Tensor& actual, const Tensor& expected, const Routed& routed, int64_t worst,
                 VerifyReport& report, RowsDistance& distance) {
  const int64_t rows = actual.dim(0), cols = actual.dim(1);
  report.rows = rows;
  report.map_rows = std::min(rows, kMapRows);
  report.map_cols = std::min(cols, kMapCols);
  std::vector<Distance> patches(static_cast<size_t>(report.map_rows * report.map_cols));
  std::vector<double> map_norm(static_cast<size_t>(report.map_rows));
  const int64_t top_k = routed.ids.dim(1);
  for (int64_t row = 0; row < rows; ++row) {
    const std::vector<float> left = RowOf(actual, row), right = RowOf(expected, row);
    Distance all;
    const int64_t map_row = row * report.map_rows / rows;
    for (int64_t col = 0; col < cols; ++col) {
      Distance one;
      one.Take(left[static_cast<size_t>(col)], right[static_cast<size_t>(col)], distance.range());
      all.Add(one);
      patches[static_cast<size_t>(map_row * report.map_cols + col * report.map_cols / cols)].Add(one);
    }
    map_norm[static_cast<size_t>(map_row)] += all.norm;
    RowError error{row, all.relative(), {}};
    const int32_t* ids = routed.ids.view().as<int32_t>() + row * top_k;
    error.experts.assign(ids, ids + top_k);
    report.worst_rows.push_back(std::move(error));
    distance.AddRow(all);
  }
  report.rel_l2 = distance.relative();
  report.max_row_error = distance.largest();
  report.not_finite = distance.not_finite();
  report.overflowed = distance.overflowed();
  for (size_t index = 0; index < patches.size(); ++index) {
    const double norm =
        map_norm[index / static_cast<size_t>(report.map_cols)] / static_cast<double>(report.map_cols);
    report.error_map.push_back(patches[index].difference == 0
                                   ? 0.0F
                                   : static_cast<float>(std::sqrt(patches[index].difference / norm)));
  }
  std::stable_sort(
      report.worst_rows.begin(), report.worst_rows.end(), [](const RowError& a, const RowError& b) {
        return std::isnan(a.rel_l2) != std::isnan(b.rel_l2) ? std::isnan(a.rel_l2) : a.rel_l2 > b.rel_l2;
      });
  report.worst_rows.resize(
      std::min(report.worst_rows.size(), static_cast<size_t>(std::max<int64_t>(worst, 0))));
}

// Runs both layers with one slot at a time, so that each row is the work of one expert. What shared experts
// add is taken off again.
Status CompareExperts(const Runner& judged, const Runner& reference, TensorView hidden, const Routed& routed,
                      VerifyReport& report) {
  const int64_t tokens = hidden.dim(0), top_k = routed.ids.dim(1), cols = hidden.dim(1);
  FMOE_ASSIGN_OR_RETURN(Tensor ids, Tensor::Allocate(DType::kI32, routed.ids.shape()));
  auto* chosen = ids.mutable_view().as<int32_t>();
  const auto* all = routed.ids.view().as<int32_t>();
  std::map<int64_t, std::pair<int64_t, Distance>> experts;
  const bool shared = judged.layer->config().shared.intermediate > 0;
  std::array<Tensor, 2> base;
  for (int64_t slot = shared ? -1 : 0; slot < top_k; ++slot) {
    for (int64_t index = 0; index < tokens * top_k; ++index) {
      chosen[index] = index % top_k == slot ? all[index] : -1;
    }
    std::array<Tensor, 2> rows;
    for (size_t side = 0; side < 2; ++side) {
      const Runner& runner = side == 0 ? judged : reference;
      FMOE_ASSIGN_OR_RETURN(rows[side], runner.Run(hidden, ids.view(), routed.weights.view(), DType::kF32));
    }
    if (slot < 0) {
      base = rows;
      continue;
    }
    for (int64_t token = 0; token < tokens; ++token) {
      const int32_t expert = all[token * top_k + slot];
      if (expert < 0) {
        continue;
      }
      auto& [count, distance] = experts[expert];
      ++count;
      for (int64_t col = 0; col < cols; ++col) {
        const int64_t at = token * cols + col;
        std::array<float, 2> value{};
        for (size_t side = 0; side < 2; ++side) {
          value[side] =
              rows[side].view().as<float>()[at] - (shared ? base[side].view().as<float>()[at] : 0.0F);
        }
        distance.Take(value[0], value[1]);
      }
    }
  }
  for (const auto& [expert, sum] : experts) {
    report.experts.push_back({expert, sum.first, sum.second.relative()});
  }
  return Status::Ok();
}

// Relative root-mean-square error of rounding normal numbers to a format (docs/accuracy.md, "Two
// checkpoints").
double ExpectedError(DType element, bool small_groups) {
  switch (element) {
    case DType::kF4E2M1:
      return small_groups ? 0.095 : 0.12;
    case DType::kF6E2M3:
    case DType::kF6E3M2:
      return 0.06;
    case DType::kF8E4M3:
      return 0.0295;
    case DType::kF8E5M2:
      return 0.059;
    case DType::kI4:
    case DType::kU4:
      return 0.125;
    case DType::kI8:
    case DType::kU8:
      return 0.0125;
    case DType::kBF16:
      return 0x1p-9;
    case DType::kF16:
      return 0x1p-12;
    default:
      return 0x1p-25;
  }
}

double SchemeVariance(const Scheme& scheme) {
  const double weight = ExpectedError(scheme.weight.element, scheme.weight.block.col == 16);
  const double input = scheme.activation.quantized()
                           ? ExpectedError(*scheme.activation.element, scheme.activation.group.col == 16)
                           : 0.0;
  // Gate and up are multiplied, so the errors of the first GEMM count twice, those of the second once.
  return 3 * (weight * weight + input * input);
}

// What is judged and what it is compared with.
struct Sides {
  LayerLoader judged, reference;
  int64_t hidden = 0;
  bool same_weights = true;  // the reference follows the rule of the backend that it judges
  std::string against;       // how the report names the reference
};

Result<VerifyReport> Compare(const Sides& sides, const VerifyOptions& options) {
  MoeLayer::Inputs inputs = options.inputs;
  Tensor generated;
  if (inputs.hidden.empty()) {
    if (options.tokens < 1 || options.tokens > int64_t{1} << 20) {
      return Status::Usage(fmt::format("tokens={} is outside 1..{}", options.tokens, int64_t{1} << 20));
    }
    FMOE_ASSIGN_OR_RETURN(generated, RandomHidden(options.tokens, sides.hidden, options.seed));
    inputs = {};
    inputs.hidden = generated.view();
  }
  LayerOptions judged_options = options.layer;
  judged_options.max_tokens = judged_options.plan_tokens = inputs.hidden.dim(0);
  FMOE_ASSIGN_OR_RETURN(const Runner judged, Runner::Load(sides.judged, judged_options));

  LayerOptions reference_options;
  reference_options.backend = "REFERENCE";
  reference_options.shared_experts = judged_options.shared_experts;
  reference_options.max_tokens = reference_options.plan_tokens = judged_options.max_tokens;
  reference_options.executor = judged_options.executor;
  if (sides.same_weights) {
    reference_options.activation = judged.layer->plan().activation;
  }
  FMOE_ASSIGN_OR_RETURN(const Runner reference, Runner::Load(sides.reference, reference_options));
  FMOE_RETURN_IF_ERROR(SameSizes(judged.layer->config(), reference.layer->config()));

  VerifyReport report;
  report.backend = judged.layer->plan().backend;
  report.against = sides.against;
  report.scheme = judged.layer->scheme().name;
  report.costs = judged.layer->plan().costs;
  report.notes = judged.layer->selection().notes;
  report.against_scheme = reference.layer->scheme().name;
  Tensor output;
  FMOE_ASSIGN_OR_RETURN(const Routed routed, Route(judged, inputs, &output, &report.notes));
  FMOE_ASSIGN_OR_RETURN(const Tensor expected,
                        reference.Run(inputs.hidden, routed.ids.view(), routed.weights.view(), DType::kF32));
  RowsDistance distance(output.dtype());
  CompareRows(output, expected, routed, options.worst_rows, report, distance);
  FMOE_RETURN_IF_ERROR(CompareExperts(judged, reference, inputs.hidden, routed, report));
  ErrorBound bound = BoundOfLayer(*judged.layer, output.dtype(), judged.layer->config().intermediate);
  bound.output_rounding = std::hypot(bound.output_rounding, distance.step_rounding());
  const double backend_bound = bound.value();
  report.bound = backend_bound;
  if (!sides.same_weights) {
    const double formats = QuantizationBound(judged.layer->scheme(), reference.layer->scheme());
    report.bound = std::sqrt(backend_bound * backend_bound + formats * formats);
  }
  report.bound = options.bound.value_or(report.bound);
  report.ok = report.rel_l2 <= report.bound;  // false for NaN
  return report;
}

// Both lists, each tensor of each expert once.
void AddDamage(const std::vector<DamagedTensor>& found, std::vector<DamagedTensor>& damaged) {
  for (const DamagedTensor& one : found) {
    const bool known = std::any_of(damaged.begin(), damaged.end(), [&](const DamagedTensor& other) {
      return other.expert == one.expert && other.tensor == one.tensor;
    });
    if (!known) {
      damaged.push_back(one);
    }
  }
  std::stable_sort(damaged.begin(), damaged.end(),
                   [](const DamagedTensor& a, const DamagedTensor& b) { return a.expert < b.expert; });
}

}  // namespace

double QuantizationBound(const Scheme& scheme, const Scheme& against) {
  constexpr double kFactor = 2;
  return kFactor * std::sqrt(SchemeVariance(scheme) + SchemeVariance(against));
}

Result<VerifyReport> VerifyLayer(const std::shared_ptr<const Checkpoint>& checkpoint, int64_t layer,
                                 const VerifyOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const LayerDescription description, checkpoint->Describe(layer));
  const bool other = options.against != nullptr;
  const int64_t other_layer = options.against_layer < 0 ? layer : options.against_layer;
  Sides sides;
  sides.judged = [&](const LayerOptions& own) { return MoeLayer::Load(checkpoint, layer, own); };
  sides.reference = [&](const LayerOptions& own) {
    return MoeLayer::Load(other ? options.against : checkpoint, other ? other_layer : layer, own);
  };
  sides.hidden = description.config.hidden;
  sides.same_weights = !other;
  sides.against = other ? options.against->directory() : "REFERENCE";
  return Compare(sides, options);
}

Result<VerifyReport> VerifyPrepared(const std::shared_ptr<const PreparedLayer>& prepared,
                                    const VerifyOptions& options) {
  const LayerDescription& own = prepared->description();
  const Executor& executor = options.layer.executor;
  const bool other = options.against != nullptr;
  const int64_t layer = options.against_layer < 0 ? own.layer : options.against_layer;
  Sides sides;
  if (other) {
    FMOE_ASSIGN_OR_RETURN(const LayerDescription original, options.against->Describe(layer));
    FMOE_RETURN_IF_ERROR(SameSizes(own.config, original.config));
    sides.same_weights = prepared::SameKind(original.scheme.weight, own.scheme.weight);
  }
  sides.judged = [&](const LayerOptions& asked) {
    return prepared->layout_key() == "canonical" ? prepared->LoadCanonical(asked) : prepared->Load(asked);
  };
  sides.reference = [&](const LayerOptions& asked) {
    return other ? MoeLayer::Load(options.against, layer, asked) : prepared->LoadCanonical(asked);
  };
  sides.hidden = own.config.hidden;
  sides.against = other ? options.against->directory() : "REFERENCE";

  std::vector<DamagedTensor> damaged = prepared->FindDamage(executor);
  // Against itself a damaged file proves nothing more; against its original every byte can be told.
  if (sides.same_weights && (other || damaged.empty())) {
    FMOE_ASSIGN_OR_RETURN(const std::vector<DamagedTensor> different,
                          prepared->CompareWith(options.against.get(), layer, executor));
    AddDamage(different, damaged);
  }
  Result<VerifyReport> compared = Compare(sides, options);
  if (!compared.ok() && (damaged.empty() || compared.status().code() == StatusCode::kUsage ||
                         compared.status().code() == StatusCode::kUnsupported)) {
    return compared;
  }
  VerifyReport report;
  if (compared.ok()) {
    report = *std::move(compared);
  } else {
    report.backend = prepared->backend();
    report.scheme = own.scheme.name;
    report.against = sides.against;
  }
  report.damaged = std::move(damaged);
  report.ok = report.ok && report.damaged.empty();
  return report;
}

}  // namespace fusedmoe
