#include <fusedmoe/jobs/verify.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "jobs/verify/distance.hpp"
#include "jobs/verify/measured.hpp"
#include "jobs/verify/runner.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe {
namespace {

using verify::Runner;

// Rows `tokens` of a dense matrix, copied.
Result<Tensor> Gather(TensorView source, const std::vector<int64_t>& tokens) {
  FMOE_ASSIGN_OR_RETURN(
      Tensor rows, Tensor::Allocate(source.dtype(), {static_cast<int64_t>(tokens.size()), source.dim(1)}));
  const auto bytes = static_cast<size_t>(source.row_bytes());
  std::byte* out = rows.mutable_view().data();
  for (const int64_t token : tokens) {
    std::memcpy(out, source.data() + token * source.stride_bytes(0), bytes);
    out += bytes;
  }
  return rows;
}

std::vector<int64_t> SampleTokens(int64_t num_tokens, int64_t wanted) {
  const int64_t count = std::min(num_tokens, wanted);
  std::vector<int64_t> tokens;
  for (int64_t index = 0; index < count; ++index) {
    tokens.push_back(index * num_tokens / count);
  }
  return tokens;
}

}  // namespace

Result<CheckReport> CheckAgainstReference(const std::shared_ptr<const Checkpoint>& checkpoint,
                                          int64_t layer_index, const MoeLayer& layer, TensorView hidden,
                                          TensorView topk_ids, TensorView topk_weights, TensorView output,
                                          const CheckOptions& options) {
  const LayerLoader load = [&](const LayerOptions& reference) {
    return MoeLayer::Load(checkpoint, layer_index, reference);
  };
  return CheckAgainstReference(load, layer, hidden, topk_ids, topk_weights, output, options);
}

Result<CheckReport> CheckAgainstReference(const LayerLoader& load, const MoeLayer& layer, TensorView hidden,
                                          TensorView topk_ids, TensorView topk_weights, TensorView output,
                                          const CheckOptions& options) {
  CheckReport report;
  const std::vector<int64_t> tokens = SampleTokens(
      hidden.dim(0), NeedsDynamicTensorScale(layer.scheme().activation) ? hidden.dim(0) : options.max_tokens);
  report.tokens = static_cast<int64_t>(tokens.size());
  report.against = "REFERENCE";
  LayerOptions reference_options;
  reference_options.backend = report.against;
  // The reference follows the rule of the backend that it judges; a8 is judged by what it costs.
  const ActivationMode rule = layer.plan().activation;
  reference_options.activation = rule == ActivationMode::kA8 ? ActivationMode::kAsCheckpoint : rule;
  reference_options.activation_rule = options.activation_rule;
  reference_options.shared_experts = options.shared_experts;
  reference_options.max_tokens = std::max<int64_t>(report.tokens, 1);
  reference_options.plan_tokens = reference_options.max_tokens;
  reference_options.executor = options.executor;
  FMOE_ASSIGN_OR_RETURN(const Runner reference, Runner::Load(load, reference_options));
  FMOE_ASSIGN_OR_RETURN(const Tensor some_hidden, Gather(hidden, tokens));
  FMOE_ASSIGN_OR_RETURN(const Tensor some_ids, Gather(topk_ids, tokens));
  FMOE_ASSIGN_OR_RETURN(const Tensor some_weights, Gather(topk_weights, tokens));
  FMOE_ASSIGN_OR_RETURN(const Tensor expected,
                        reference.Run(some_hidden.view(), some_ids.view(), some_weights.view(), DType::kF32));
  FMOE_ASSIGN_OR_RETURN(
      const ComparedValues values,
      verify::MeasureValues(layer, reference, load, reference_options,
                            {some_hidden.view(), some_ids.view(), some_weights.view(), expected.view()}));
  report.bound =
      BoundOfLayer(layer, output.dtype(), reference.layer->config().intermediate, report.tokens, values);

  RowsDistance distance(output.dtype());
  std::vector<float> row(static_cast<size_t>(hidden.dim(1)));
  for (size_t index = 0; index < tokens.size(); ++index) {
    DecodeRow(output.dtype(), output.data() + tokens[index] * output.stride_bytes(0), 0, output.dim(1),
              row.data());
    const float* wanted = expected.view().as<float>() + index * row.size();
    Distance one;
    for (size_t column = 0; column < row.size(); ++column) {
      one.Take(row[column], wanted[column], distance.range());
    }
    distance.AddRow(one);
  }
  report.rel_l2 = distance.relative();
  report.max_row_error = distance.largest();
  report.not_finite = distance.not_finite();
  report.overflowed = distance.overflowed();
  report.bound.output_rounding = std::hypot(report.bound.output_rounding, distance.step_rounding());
  report.ok = report.rel_l2 <= report.bound.value();  // false for NaN
  return report;
}

}  // namespace fusedmoe
