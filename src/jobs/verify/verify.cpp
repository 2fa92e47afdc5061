#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include <fusedmoe/jobs/verify.hpp>

#include "jobs/prepare/prepared_file.hpp"
#include "jobs/verify/distance.hpp"
#include "jobs/verify/measured.hpp"
#include "jobs/verify/output_distance.hpp"
#include "jobs/verify/runner.hpp"

namespace fusedmoe {
namespace {

using verify::Routed;
using verify::Runner;

Status SameSizes(const MoeConfig& left, const MoeConfig& right) {
  const auto differs = [](std::string_view name, int64_t a, int64_t b) {
    return Status::Usage(
        fmt::format("{} is {} here and {} in the other checkpoint; both must be equal", name, a, b));
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
    FMOE_ASSIGN_OR_RETURN(generated, verify::RandomHidden(options.tokens, sides.hidden, options.seed));
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
    const ActivationMode mode = judged.layer->plan().activation;
    // a8 is judged by what it costs.
    reference_options.activation = mode == ActivationMode::kA8 ? ActivationMode::kAsCheckpoint : mode;
    reference_options.activation_rule = judged_options.activation_rule;
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
  FMOE_ASSIGN_OR_RETURN(const Routed routed, verify::RouteAndRun(judged, inputs, &output, &report.notes));
  FMOE_ASSIGN_OR_RETURN(const Tensor expected,
                        reference.Run(inputs.hidden, routed.ids.view(), routed.weights.view(), DType::kF32));
  FMOE_ASSIGN_OR_RETURN(
      const ComparedValues values,
      verify::MeasureValues(*judged.layer, reference, sides.reference, reference_options,
                            {inputs.hidden, routed.ids.view(), routed.weights.view(), expected.view()}));
  RowsDistance distance(output.dtype());
  verify::CompareRows(output, expected, routed, options.worst_rows, report, distance);
  FMOE_RETURN_IF_ERROR(verify::CompareExperts(judged, reference, inputs.hidden, routed, report));
  ErrorBound bound = BoundOfLayer(*judged.layer, output.dtype(), judged.layer->config().intermediate,
                                  inputs.hidden.dim(0), values);
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
