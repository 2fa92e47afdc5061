#include "layer/check.hpp"

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "core/names.hpp"
#include "layer/layer_impl.hpp"
#include "numerics/element_types.hpp"
#include "routing/methods.hpp"
#include "weights/dequantize.hpp"
#include "weights/features.hpp"

namespace fusedmoe {
namespace {

constexpr std::initializer_list<DType> kFloats = {DType::kF32, DType::kBF16, DType::kF16};

// A matrix of exactly this shape, in one of these dtypes.
Status CheckMatrix(std::string_view name, TensorView view, int64_t rows, int64_t cols,
                   std::initializer_list<DType> accepted) {
  if (view.empty() && view.rank() == 0) {
    return Status::Usage(fmt::format("{} is missing, the layer needs [{}, {}]", name, rows, cols));
  }
  if (view.rank() != 2 || view.dim(0) != rows || view.dim(1) != cols) {
    return Status::Usage(
        fmt::format("{} has shape {}, the layer needs [{}, {}]", name, view.shape().ToString(), rows, cols));
  }
  if (view.empty() && rows > 0) {
    return Status::Usage(
        fmt::format("{} has shape {} and no memory: its data is null", name, view.shape().ToString()));
  }
  std::string names;
  for (const DType dtype : accepted) {
    if (view.dtype() == dtype) {
      return Status::Ok();
    }
    if (names != DTypeName(dtype)) {  // F32 rows may give F32 or F32
      AppendName(names, DTypeName(dtype));
    }
  }
  return Status::Usage(fmt::format("{} is {}, the layer takes {}", name, DTypeName(view.dtype()), names));
}

Status CheckDense(std::string_view name, TensorView view) {
  return view.dim(0) < 2 || view.stride_bytes(0) == view.row_bytes()
             ? Status::Ok()
             : Status::Usage(fmt::format("rows of {} lie {} bytes apart; between cards they must follow each "
                                         "other, {} bytes apart",
                                         name, view.stride_bytes(0), view.row_bytes()));
}

// Rows that are written share no bytes.
Status CheckRowsApart(std::string_view name, TensorView view) {
  return view.dim(0) < 2 || std::abs(view.stride_bytes(0)) >= view.row_bytes()
             ? Status::Ok()
             : Status::Usage(fmt::format("rows of {} have {} bytes and lie {} bytes apart: each would be "
                                         "written over by the next",
                                         name, view.row_bytes(), view.stride_bytes(0)));
}

// Whether any bytes of two matrices are the same. Rows may lie side by side, as columns of one wider matrix.
bool Overlap(TensorView a, TensorView b) {
  const auto last = [](TensorView view) { return (view.dim(0) - 1) * view.stride_bytes(0); };
  const auto begin = [&last](TensorView view) {  // the lowest row; rows may lie backwards
    return reinterpret_cast<intptr_t>(view.data()) + std::min<int64_t>(0, last(view));
  };
  const auto end = [&last](TensorView view) {
    return reinterpret_cast<intptr_t>(view.data()) + std::max<int64_t>(0, last(view)) + view.row_bytes();
  };
  if (begin(a) >= end(b) || begin(b) >= end(a)) {
    return false;
  }
  const int64_t stride = std::abs(a.stride_bytes(0));
  if (stride != std::abs(b.stride_bytes(0)) || stride == 0) {
    return true;
  }
  const int64_t apart = ((begin(b) - begin(a)) % stride + stride) % stride;  // from a row of a to one of b
  return apart < a.row_bytes() || stride - apart < b.row_bytes();
}

// For the rows of `hidden`: the output, and ids and weights where they are given back.
Status CheckOutputs(const MoeLayer::Outputs& outputs, const MoeConfig& config, TensorView hidden) {
  const int64_t num_tokens = hidden.dim(0);
  FMOE_RETURN_IF_ERROR(
      CheckMatrix("output", outputs.output, num_tokens, config.hidden, {hidden.dtype(), DType::kF32}));
  FMOE_RETURN_IF_ERROR(CheckRowsApart("output", outputs.output));
  if (!outputs.topk_ids.empty()) {
    FMOE_RETURN_IF_ERROR(
        CheckMatrix("output topk_ids", outputs.topk_ids, num_tokens, config.top_k(), {DType::kI32}));
    FMOE_RETURN_IF_ERROR(CheckRowsApart("output topk_ids", outputs.topk_ids));
  }
  if (!outputs.topk_weights.empty()) {
    FMOE_RETURN_IF_ERROR(
        CheckMatrix("output topk_weights", outputs.topk_weights, num_tokens, config.top_k(), {DType::kF32}));
    FMOE_RETURN_IF_ERROR(CheckRowsApart("output topk_weights", outputs.topk_weights));
  }
  return Status::Ok();
}

// Ids and weights that are given back are written before hidden and output are done with; what the choice is
// made of has been read by then.
Status CheckChosenApart(const MoeLayer::Inputs& inputs, const MoeLayer::Outputs& outputs) {
  const std::tuple<std::string_view, TensorView, std::string_view, TensorView> pairs[] = {
      {"output topk_ids", outputs.topk_ids, "hidden", inputs.hidden},
      {"output topk_ids", outputs.topk_ids, "output", outputs.output},
      {"output topk_weights", outputs.topk_weights, "hidden", inputs.hidden},
      {"output topk_weights", outputs.topk_weights, "output", outputs.output},
      {"output topk_weights", outputs.topk_weights, "output topk_ids", outputs.topk_ids}};
  for (const auto& [name, one, other_name, other] : pairs) {
    if (!one.empty() && !other.empty() && Overlap(one, other)) {
      return Status::Usage(fmt::format("{} and {} overlap: each needs memory of its own", name, other_name));
    }
  }
  return Status::Ok();
}

}  // namespace

ExpertSource Validated(const ExpertSource& experts, std::string_view kind) {
  ExpertSource checked = experts;
  checked.load = [load = experts.load, scheme = experts.scheme,
                  kind = std::string(kind)](int64_t index) -> Result<CanonicalExpert> {
    Result<CanonicalExpert> expert = load(index);
    if (!expert.ok()) {
      return expert;
    }
    const std::pair<std::string_view, const CanonicalMatrix*> matrices[] = {
        {"gate", &expert->gate}, {"up", &expert->up}, {"down", &expert->down}};
    for (const auto& [name, matrix] : matrices) {
      if (Status status = matrix->empty() ? Status::Ok() : ValidateCanonical(*matrix); !status.ok()) {
        return std::move(status).WithTensor(fmt::format("{} {}, {}", kind, index, name));
      }
      if (!matrix->empty() && !scheme.weight.quantized() && matrix->format.element != scheme.weight.element) {
        return Status::BadInput(fmt::format("holds {}, the scheme of the source {}",
                                            DTypeName(matrix->format.element),
                                            DTypeName(scheme.weight.element)))
            .WithTensor(fmt::format("{} {}, {}", kind, index, name))
            .WithHint("all experts of a layer have one type: set scheme.weight.element to it");
      }
      if (!matrix->empty() && scheme.activation.static_tensor_scale && !matrix->input_tensor_scale) {
        return Status::BadInput(
                   fmt::format("has no input_tensor_scale; the activations of {} need a stored one",
                               scheme.name))
            .WithTensor(fmt::format("{} {}, {}", kind, index, name));
      }
    }
    return expert;
  };
  return checked;
}

ExpertSource WithoutDownBias(const ExpertSource& experts) {
  ExpertSource without = experts;
  without.load = [load = experts.load](int64_t index) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
    if (!expert.down.bias.empty()) {  // a bias of zeros, so that ranks plan alike
      FMOE_ASSIGN_OR_RETURN(expert.down.bias, Tensor::Allocate(DType::kF32, expert.down.bias.shape()));
    }
    return expert;
  };
  return without;
}

Status CheckShared(const SharedExpertWeights* shared, const MoeConfig& config) {
  if (shared == nullptr) {
    return config.shared.intermediate == 0
               ? Status::Ok()
               : Status::Usage(fmt::format("shared.intermediate is {}, and there are no weights of a shared "
                                           "expert",
                                           config.shared.intermediate))
                     .WithHint("give them, or switch LayerOptions::shared_experts off");
  }
  if (config.shared.intermediate == 0) {
    return Status::Usage("weights of a shared expert are given, and shared.intermediate is 0");
  }
  if (shared->source.load == nullptr) {
    return Status::Usage("shared.source.load is empty: the layer asks it for the shared expert");
  }
  const Tensor& gate = shared->gate;
  if (config.shared.has_gate == gate.empty()) {
    return Status::Usage(gate.empty() ? "shared.has_gate is set, and the weights have no gate"
                                      : "the shared expert has a gate, and shared.has_gate is not set");
  }
  if (!gate.empty() && (gate.dtype() != DType::kF32 || !(gate.shape() == Shape{config.hidden}))) {
    return Status::Usage(fmt::format("the gate of the shared expert is {} {}, the layer needs F32 [{}]",
                                     DTypeName(gate.dtype()), gate.shape().ToString(), config.hidden));
  }
  return Status::Ok();
}

Result<ExpertSource> MadeAlike(const ExpertSource& experts, const Executor& executor) {
  if (experts.alike || experts.prepared != nullptr || experts.num_local_experts < 2) {
    return experts;
  }
  const auto count = static_cast<size_t>(experts.num_local_experts);
  std::vector<ExpertFeatures> features(count);
  std::vector<Status> statuses(count);
  ParallelFor(executor, experts.num_local_experts, [&](int64_t index) {
    const auto at = static_cast<size_t>(index);
    const Result<CanonicalExpert> expert = experts.load(index);
    statuses[at] = expert.status();
    features[at] = expert.ok() ? FeaturesOf(*expert) : ExpertFeatures{};
  });
  ExpertFeatures all;
  for (size_t index = 0; index < count; ++index) {
    FMOE_RETURN_IF_ERROR(std::move(statuses[index]));
    all.Join(features[index]);
  }
  ExpertSource alike = experts;
  alike.alike = true;
  if (std::all_of(features.begin(), features.end(), [&](const ExpertFeatures& one) { return one == all; })) {
    return alike;
  }
  alike.load = [load = experts.load, all](int64_t index) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
    FMOE_RETURN_IF_ERROR(AddFeatures(all, expert));
    return expert;
  };
  return alike;
}

Status CheckRouter(const RouterWeights& router, const MoeConfig& config, int64_t num_logits) {
  if (!router.weight.empty()) {
    FMOE_RETURN_IF_ERROR(
        CheckMatrix("router weight", router.weight.view(), num_logits, config.hidden, kFloats));
  }
  const std::tuple<std::string_view, const Tensor*, bool> vectors[] = {
      {"router bias", &router.bias, config.has_router_bias},
      {"correction bias", &router.correction_bias, config.has_correction_bias}};
  for (const auto& [name, vector, promised] : vectors) {
    if (vector->empty() && promised && !router.weight.empty()) {
      return Status::Usage(fmt::format("{} is missing, the config says that the router has one of {} values",
                                       name, num_logits));
    }
    if (!vector->empty() && (vector->view().count() != num_logits || !IsPlainFloat(vector->dtype()))) {
      return Status::Usage(fmt::format("{} is {} {}, the layer needs {} values of F32, BF16, F16", name,
                                       DTypeName(vector->dtype()), vector->shape().ToString(), num_logits));
    }
  }
  if (!router.correction_bias.empty() && !RuleOf(config.routing).takes_bias) {
    return Status::Usage(fmt::format("a correction bias is given, which routing method {} does not have",
                                     RoutingMethodName(config.routing.method)));
  }
  const Tensor& table = router.token_id_to_experts;
  if (!table.empty()) {
    if (!RuleOf(config.routing).takes_hash) {
      return Status::Usage(fmt::format("a token-id table is given, which routing method {} does not have",
                                       RoutingMethodName(config.routing.method)));
    }
    if (table.shape().rank() != 2 || table.dim(1) != config.top_k() ||
        (table.dtype() != DType::kI32 && table.dtype() != DType::kI64)) {
      return Status::Usage(
          fmt::format("token_id_to_experts is {} {}, the layer needs I32 or I64 of "
                      "[vocabulary, {}]",
                      DTypeName(table.dtype()), table.shape().ToString(), config.top_k()));
    }
  }
  return Status::Ok();
}

Status CheckOnCard(MutableTensorView output, int64_t hidden) {
  // Kernels of few tokens write four columns at a time, those of many eight, up to 16 bytes; where rows are
  // no multiple of that, one.
  const int64_t columns = hidden % 8 == 0 ? 8 : hidden % 4 == 0 ? 4 : 1;
  const auto address = reinterpret_cast<uintptr_t>(output.data());
  const auto piece = static_cast<uintptr_t>(std::min<int64_t>(16, PackedBytes(output.dtype(), columns)));
  return columns == 1 || address % piece == 0
             ? Status::Ok()
             : Status::Usage(fmt::format("output begins {} bytes behind a multiple of {}; on a card rows of "
                                         "{} columns are written {} bytes at a time",
                                         address % piece, piece, hidden, piece))
                   .WithHint("begin at a row of a tensor that is aligned");
}

Status TakeIds(TensorView source, int64_t num_experts, int32_t* ids) {
  const int64_t top_k = source.dim(1);
  for (int64_t token = 0; token < source.dim(0); ++token) {
    const std::byte* row = source.data() + token * source.stride_bytes(0);
    for (int64_t slot = 0; slot < top_k; ++slot) {
      int64_t id = 0;
      if (source.dtype() == DType::kI32) {
        id = reinterpret_cast<const int32_t*>(row)[slot];
      } else {
        id = reinterpret_cast<const int64_t*>(row)[slot];
      }
      if (id < -1 || id >= num_experts) {
        return Status::Usage(fmt::format("topk_ids[{}, {}] is {}, experts are 0..{} (-1 skips a slot)", token,
                                         slot, id, num_experts - 1))
            .WithTensor("topk_ids");
      }
      if (ids != nullptr) {
        ids[token * top_k + slot] = static_cast<int32_t>(id);
      }
    }
  }
  return Status::Ok();
}

// Who routes: the caller by ids or by logits, or the layer.
Status MoeLayer::Impl::CheckChoice(const Inputs& inputs) const {
  const int64_t num_tokens = inputs.hidden.dim(0);
  const bool has_ids = !inputs.topk_ids.empty();
  if (has_ids != !inputs.topk_weights.empty()) {
    return Status::Usage("topk_ids and topk_weights come together; one of them is missing");
  }
  if (has_ids && !inputs.router_logits.empty()) {
    return Status::Usage("both router_logits and topk_ids are given; give one of them");
  }
  if (has_ids) {
    FMOE_RETURN_IF_ERROR(
        CheckMatrix("topk_ids", inputs.topk_ids, num_tokens, config.top_k(), {DType::kI32, DType::kI64}));
    return CheckMatrix("topk_weights", inputs.topk_weights, num_tokens, config.top_k(), kFloats);
  }
  if (config.routing.method == RoutingMethod::kCustom && !config.routing.custom) {
    return Status::Usage(
        "the layer has no router of its own, the caller routes: topk_ids and topk_weights are needed");
  }
  if (!inputs.router_logits.empty()) {
    return CheckMatrix("router_logits", inputs.router_logits, num_tokens, num_logits(), kFloats);
  }
  if (router.weight.empty()) {
    return Status::Usage("the layer has no router: give router_logits, or topk_ids with topk_weights");
  }
  return Status::Ok();
}

Status MoeLayer::Impl::CheckInputs(const Inputs& inputs, const Outputs& outputs) const {
  if (inputs.hidden.rank() != 2 || inputs.hidden.dim(0) < 0) {
    const std::string actual = inputs.hidden.empty() && inputs.hidden.rank() == 0
                                   ? "is missing"
                                   : "has shape " + inputs.hidden.shape().ToString();
    return Status::Usage(fmt::format("hidden {}, the layer needs [tokens, {}]", actual, config.hidden));
  }
  const int64_t num_tokens = inputs.hidden.dim(0);
  FMOE_RETURN_IF_ERROR(CheckMatrix("hidden", inputs.hidden, num_tokens, config.hidden, kFloats));
  FMOE_RETURN_IF_ERROR(CheckOutputs(outputs, config, inputs.hidden));
  if (communicator != nullptr) {  // rows go to other cards as they lie
    FMOE_RETURN_IF_ERROR(CheckDense("hidden", inputs.hidden));
    FMOE_RETURN_IF_ERROR(CheckDense("output", outputs.output));
  }
  if (device_router != nullptr) {
    FMOE_RETURN_IF_ERROR(CheckOnCard(outputs.output, config.hidden));
  }
  if (num_tokens > config.max_tokens) {
    return Status::Usage(
        fmt::format("{} tokens, but the layer was loaded with max_tokens={}", num_tokens, config.max_tokens));
  }
  if (num_tokens == 0) {
    return Status::Ok();  // a rank without tokens still takes part; its views may be null
  }
  if (Overlap(inputs.hidden, outputs.output)) {
    return Status::Usage(
        "output and hidden overlap: rows of hidden are read after the first rows of output are written");
  }
  FMOE_RETURN_IF_ERROR(CheckChosenApart(inputs, outputs));
  return CheckChoice(inputs);
}

}  // namespace fusedmoe
