#include "jobs/convert/prove.hpp"

#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/matrices/matrix_tensors.hpp"

namespace fusedmoe::jobs {
namespace {

using checkpoint::Access;
using checkpoint::Projection;

// What of a layer reads differently; empty: nothing. The type of activations is the caller's choice, not the
// checkpoint's.
std::string DifferentRule(const MoeConfig& before, const MoeConfig& after) {
  const RoutingConfig &a = before.routing, &b = after.routing;
  const auto number = [](std::string_view what, double from, double to) {
    return from == to ? std::string() : fmt::format("{} {} reads as {}", what, from, to);
  };
  const auto routing = [](RoutingMethod from, RoutingMethod to) {
    return from == to ? std::string()
                      : fmt::format("routing {} reads as {}", RoutingMethodName(from), RoutingMethodName(to));
  };
  const auto activation = [](std::string_view what, const ActivationSpec& from, const ActivationSpec& to) {
    return from == to ? std::string()
                      : fmt::format("{} {} (alpha {}, beta {}, limit {}) reads as {} ({}, {}, {})", what,
                                    ActivationName(from.kind), from.alpha, from.beta, from.limit,
                                    ActivationName(to.kind), to.alpha, to.beta, to.limit);
  };
  const std::string differences[] = {
      number("the number of experts", static_cast<double>(before.num_experts),
             static_cast<double>(after.num_experts)),
      number("the hidden size", static_cast<double>(before.hidden), static_cast<double>(after.hidden)),
      number("the latent size", static_cast<double>(before.latent), static_cast<double>(after.latent)),
      number("the epsilon of the latent norm", before.latent_norm_epsilon, after.latent_norm_epsilon),
      number("the intermediate size", static_cast<double>(before.intermediate),
             static_cast<double>(after.intermediate)),
      number("bias", before.has_bias, after.has_bias),
      number("correction bias", before.has_correction_bias, after.has_correction_bias),
      number("router bias", before.has_router_bias, after.has_router_bias),
      number("router weight on input", before.apply_router_weight_on_input,
             after.apply_router_weight_on_input),
      number("top_k", static_cast<double>(a.top_k), static_cast<double>(b.top_k)),
      routing(a.method, b.method),
      number("the score function", static_cast<int>(a.score), static_cast<int>(b.score)),
      number("renormalization", a.renormalize, b.renormalize),
      number("the number of groups", static_cast<double>(a.num_groups), static_cast<double>(b.num_groups)),
      number("the groups kept", static_cast<double>(a.topk_groups), static_cast<double>(b.topk_groups)),
      number("the scaling factor", a.scaling_factor, b.scaling_factor),
      number("the epsilon of renormalization", a.norm_epsilon, b.norm_epsilon),
      number("the softcap of logits", a.logit_softcap, b.logit_softcap),
      number("the jitter", a.jitter, b.jitter),
      number("the number of zero experts", static_cast<double>(a.num_zero_experts),
             static_cast<double>(b.num_zero_experts)),
      activation("the activation", before.activation, after.activation),
      activation("the shared activation", before.shared.activation.value_or(before.activation),
                 after.shared.activation.value_or(after.activation)),
      number("the shared intermediate size", static_cast<double>(before.shared.intermediate),
             static_cast<double>(after.shared.intermediate)),
      number("a gate of the shared experts", before.shared.has_gate, after.shared.has_gate),
      number("biases of the shared experts", before.shared.has_bias, after.shared.has_bias),
      number("the weight of the shared experts", before.shared.weight, after.shared.weight)};
  for (const std::string& difference : differences) {
    if (!difference.empty()) {
      return difference;
    }
  }
  return "";
}

Result<bool> SameNumbers(const Tensor& before, const Tensor& after) {
  if (before.empty() || after.empty()) {
    return before.empty() == after.empty();
  }
  FMOE_ASSIGN_OR_RETURN(const Tensor left, checkpoint::ToF32(before));
  FMOE_ASSIGN_OR_RETURN(const Tensor right, checkpoint::ToF32(after));
  const auto bytes = static_cast<size_t>(left.view().total_bytes());
  return left.shape().count() == right.shape().count() &&
         std::memcmp(left.view().data(), right.view().data(), bytes) == 0;
}

// Projections may be of another type in the files, or quantized in one and not in the other.
Status CompareLatent(const Checkpoint& source, const Checkpoint& written, int64_t layer) {
  FMOE_ASSIGN_OR_RETURN(const auto before, source.Latent(layer));
  FMOE_ASSIGN_OR_RETURN(const auto after, written.Latent(layer));
  if (!before || !after) {
    return Status::Ok();  // the sizes are equal
  }
  for (Tensor LatentWeights::*part :
       {&LatentWeights::to_latent, &LatentWeights::to_latent_bias, &LatentWeights::from_latent,
        &LatentWeights::from_latent_bias, &LatentWeights::norm}) {
    FMOE_ASSIGN_OR_RETURN(const bool same, SameNumbers((*before).*part, (*after).*part));
    if (!same) {
      return Status::Unsupported(fmt::format(
          "a projection of the latent experts of layer {} reads differently in the files written", layer));
    }
  }
  return Status::Ok();
}

Status CompareLayer(const Checkpoint& source, const Checkpoint& written, int64_t layer) {
  FMOE_ASSIGN_OR_RETURN(const LayerDescription before, source.Describe(layer));
  FMOE_ASSIGN_OR_RETURN(const LayerDescription after, written.Describe(layer));
  if (const std::string difference = DifferentRule(before.config, after.config); !difference.empty()) {
    return Status::Unsupported(
        fmt::format("the format cannot say what layer {} is: in the files written, {}", layer, difference));
  }
  FMOE_ASSIGN_OR_RETURN(const RouterWeights left, source.LoadRouter(layer));
  FMOE_ASSIGN_OR_RETURN(const RouterWeights right, written.LoadRouter(layer));
  FMOE_ASSIGN_OR_RETURN(const bool weight, SameNumbers(left.weight, right.weight));
  FMOE_ASSIGN_OR_RETURN(const bool bias, SameNumbers(left.bias, right.bias));
  FMOE_ASSIGN_OR_RETURN(const bool correction, SameNumbers(left.correction_bias, right.correction_bias));
  if (!weight || !bias || !correction) {
    return Status::Unsupported(
        fmt::format("the router of layer {} reads differently in the files written", layer));
  }
  return CompareLatent(source, written, layer);
}

Difference CompareExperts(const SourceLayer& layer, const CanonicalExpert& before,
                          const CanonicalExpert& after, const std::string& shared, int64_t expert,
                          bool input_scales) {
  const auto pick = [](const CanonicalExpert& loaded, Projection projection) -> const CanonicalMatrix& {
    return projection == Projection::kGate ? loaded.gate
           : projection == Projection::kUp ? loaded.up
                                           : loaded.down;
  };
  Difference difference;
  for (const Projection projection : Projections(*layer.context)) {
    difference.Add(Compare(pick(before, projection), pick(after, projection),
                           shared.empty() ? TargetModule(layer, expert, projection) : shared, input_scales));
  }
  return difference;
}

Result<Difference> CompareRouted(const SourceLayer& layer, const Checkpoint& written, bool input_scales,
                                 const Executor& executor) {
  FMOE_ASSIGN_OR_RETURN(const ExpertSource after, written.Experts(layer.layer));
  const int64_t count = layer.context->spec.config.num_experts;
  if (after.num_local_experts != count) {
    return Status::Unsupported(fmt::format("layer {} of the files written reads as {} experts instead of {}",
                                           layer.layer, after.num_local_experts, count));
  }
  std::vector<Difference> differences(static_cast<size_t>(count));
  std::vector<Status> failures(differences.size());
  ParallelFor(executor, count, [&](int64_t expert) {
    const auto at = static_cast<size_t>(expert);
    const auto left = layer.experts.load(expert);
    const auto right = after.load(expert);
    if (!left.ok() || !right.ok()) {
      failures[at] = left.ok() ? right.status() : left.status();
      return;
    }
    differences[at] = CompareExperts(layer, *left, *right, "", expert, input_scales);
  });
  Difference all;
  for (size_t expert = 0; expert < differences.size(); ++expert) {
    FMOE_RETURN_IF_ERROR(failures[expert]);
    all.Add(differences[expert]);
  }
  return all;
}

Result<Difference> CompareShared(const SourceLayer& layer, const Checkpoint& source,
                                 const Checkpoint& written) {
  FMOE_ASSIGN_OR_RETURN(const auto before, source.SharedExperts(layer.layer));
  FMOE_ASSIGN_OR_RETURN(const auto after, written.SharedExperts(layer.layer));
  const std::string& name = layer.context->spec.names.shared_up;
  if (!before || !after) {
    return before.has_value() == after.has_value()
               ? Result<Difference>(Difference())
               : Status::Unsupported("the shared experts were lost").WithTensor(name);
  }
  FMOE_ASSIGN_OR_RETURN(const bool gate, SameNumbers(before->gate, after->gate));
  if (!gate) {
    return Status::Unsupported("the gate of the shared experts reads differently").WithTensor(name);
  }
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert left, before->source.load(0));
  FMOE_ASSIGN_OR_RETURN(const CanonicalExpert right, after->source.load(0));
  return CompareExperts(layer, left, right, name, 0, false);
}

}  // namespace

Result<Difference> CompareWritten(const ExpertsRewriter& rewriter, const ConvertPlan& plan,
                                  const std::string& path, const Executor& executor) {
  FMOE_ASSIGN_OR_RETURN(const auto written, Checkpoint::Open(path));
  Difference all;
  for (size_t index = 0; index < rewriter.layers().size(); ++index) {
    const SourceLayer& layer = rewriter.layers()[index];
    FMOE_RETURN_IF_ERROR(CompareLayer(rewriter.checkpoint(), *written, layer.layer));
    const bool input_scales = plan.RuleOf(index).to.activation.static_tensor_scale;
    FMOE_ASSIGN_OR_RETURN(const Difference routed, CompareRouted(layer, *written, input_scales, executor));
    all.Add(routed);
    if (plan.form == Form::kGguf) {
      FMOE_ASSIGN_OR_RETURN(const Difference shared, CompareShared(layer, rewriter.checkpoint(), *written));
      all.Add(shared);
    }
  }
  FMOE_ASSIGN_OR_RETURN(const auto context, Access::Context(*written, rewriter.layers().front().layer));
  for (size_t index = 0; index < plan.others.size(); ++index) {
    const OtherModule& module = plan.others[index];
    FMOE_ASSIGN_OR_RETURN(const CanonicalMatrix left, ReadOther(*rewriter.layers().front().context, module));
    OtherModule after = module;
    after.module = module.target;
    FMOE_ASSIGN_OR_RETURN(after.format, FormatAt(*context->store, *context->rules, after.module, ".weight"));
    FMOE_ASSIGN_OR_RETURN(const CanonicalMatrix right, ReadOther(*context, after));
    all.Add(Compare(left, right, module.target,
                    plan.rules[plan.other_rules[index]].to.activation.static_tensor_scale));
  }
  return all;
}

}  // namespace fusedmoe::jobs
