// The router of a layer on a card: its tables there, and the calls of the kernels (route.cu, router_gemm.cu).

#include "routing/cuda/device_router.hpp"

#include <string>
#include <utility>

#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"
#include "routing/cuda/router_kernels.cuh"
#include "routing/methods.hpp"

namespace fusedmoe::cuda {
namespace {

/// A dense copy on the card; null for an empty view.
Result<std::shared_ptr<std::byte>> Upload(TensorView view, std::string_view what) {
  if (view.empty()) {
    return std::shared_ptr<std::byte>();
  }
  const int64_t rows = view.rank() == 2 ? view.dim(0) : 1;
  const int64_t row_bytes = view.row_bytes();
  FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, AllocateOnDevice(rows * row_bytes, what));
  FMOE_RETURN_IF_ERROR(CopyRowsToDevice(memory.get(), row_bytes, view.data(),
                                        view.rank() == 2 ? view.stride_bytes(0) : row_bytes, row_bytes, rows,
                                        nullptr));
  FMOE_RETURN_IF_ERROR(Synchronize(nullptr));
  return Result<std::shared_ptr<std::byte>>(std::move(memory));
}

}  // namespace

Result<DeviceProduct> DeviceProduct::Create(TensorView weight, TensorView bias, std::string_view what) {
  DeviceProduct product;
  FMOE_ASSIGN_OR_RETURN(product.weight_, Upload(weight, what));
  FMOE_ASSIGN_OR_RETURN(product.bias_, Upload(bias, what));
  const auto on_card = [](const std::shared_ptr<std::byte>& memory, TensorView host) {
    return memory == nullptr ? TensorView() : TensorView(memory.get(), host.dtype(), host.shape());
  };
  product.weight_view_ = on_card(product.weight_, weight);
  product.bias_view_ = on_card(product.bias_, bias);
  return product;
}

Status DeviceProduct::Run(TensorView rows, float* sums, void* stream) const {
  RouterProduct product;
  product.hidden = RowsOf(rows);
  product.weight = RowsOf(weight_view_);
  product.bias = RowsOf(bias_view_);
  product.num_tokens = rows.dim(0);
  product.num_experts = weight_view_.dim(0);
  product.width = rows.dim(1);
  product.logits = sums;
  return ToStatus(LaunchRouterProduct(product, ToStream(stream)), "launching the router's product");
}

struct DeviceRouter::Impl {
  Status UploadCorrectionBias(const TensorView& bias);
  Status UploadHashTable(const TensorView& of_checkpoint);
  Status DrawRouting();

  RoutingConfig config;
  RoutingRule rule;
  int64_t num_logits = 0, max_tokens = 0;
  DeviceProduct product;
  std::shared_ptr<std::byte> correction_bias, table, drawn_ids, drawn_weights;
  int64_t vocabulary = 0;
};

/// As fp32, whatever it is in the checkpoint.
Status DeviceRouter::Impl::UploadCorrectionBias(const TensorView& bias) {
  if (bias.count() != num_logits) {
    return Status::Usage("the correction bias has " + std::to_string(bias.count()) + " values for " +
                         std::to_string(num_logits) + " experts");
  }
  FMOE_ASSIGN_OR_RETURN(Tensor row, Tensor::Allocate(DType::kF32, {num_logits}));
  for (int64_t expert = 0; expert < num_logits; ++expert) {
    float value = 0.0F;
    if (bias.dtype() == DType::kF32) {
      value = bias.as<float>()[expert];
    } else {
      const uint16_t code = bias.as<uint16_t>()[expert];
      value = bias.dtype() == DType::kF16 ? DecodeFp16(code) : DecodeBf16(code);
    }
    row.mutable_view().as<float>()[expert] = value;
  }
  FMOE_ASSIGN_OR_RETURN(correction_bias, Upload(row.view(), "the correction bias"));
  return Status::Ok();
}

/// As dense 32-bit ids, each checked here: the kernel does not.
Status DeviceRouter::Impl::UploadHashTable(const TensorView& of_checkpoint) {
  vocabulary = of_checkpoint.dim(0);
  if (of_checkpoint.dim(1) != config.top_k) {
    return Status::Usage("the table of hash routing has rows of " + std::to_string(of_checkpoint.dim(1)) +
                         ", top_k is " + std::to_string(config.top_k));
  }
  FMOE_ASSIGN_OR_RETURN(Tensor dense, Tensor::Allocate(DType::kI32, {vocabulary, config.top_k}));
  auto* out = dense.mutable_view().as<int32_t>();
  for (int64_t token = 0; token < vocabulary; ++token) {
    const std::byte* row = of_checkpoint.data() + token * of_checkpoint.stride_bytes(0);
    for (int64_t slot = 0; slot < config.top_k; ++slot) {
      const int64_t id = of_checkpoint.dtype() == DType::kI64 ? reinterpret_cast<const int64_t*>(row)[slot]
                                                              : reinterpret_cast<const int32_t*>(row)[slot];
      if (id < 0 || id >= num_logits) {
        return Status::BadInput("the table of hash routing sends token id " + std::to_string(token) +
                                " to expert " + std::to_string(id) + " of " + std::to_string(num_logits));
      }
      *out++ = static_cast<int32_t>(id);
    }
  }
  FMOE_ASSIGN_OR_RETURN(table, Upload(dense.view(), "the table of hash routing"));
  return Status::Ok();
}

/// Simulated ids and weights depend on nothing but the token's place: drawn once, by the code that the CPU
/// draws by.
Status DeviceRouter::Impl::DrawRouting() {
  FMOE_ASSIGN_OR_RETURN(Tensor logits, Tensor::Allocate(DType::kF32, {max_tokens, num_logits}));
  FMOE_ASSIGN_OR_RETURN(Tensor ids, Tensor::Allocate(DType::kI32, {max_tokens, config.top_k}));
  FMOE_ASSIGN_OR_RETURN(Tensor weights, Tensor::Allocate(DType::kF32, {max_tokens, config.top_k}));
  RoutingInputs inputs;
  inputs.router_logits = logits.view();
  FMOE_RETURN_IF_ERROR(
      Route(config, inputs, ids.mutable_view().as<int32_t>(), weights.mutable_view().as<float>()));
  FMOE_ASSIGN_OR_RETURN(drawn_ids, Upload(ids.view(), "the simulated routing"));
  FMOE_ASSIGN_OR_RETURN(drawn_weights, Upload(weights.view(), "the simulated routing"));
  return Status::Ok();
}

DeviceRouter::DeviceRouter() = default;
DeviceRouter::~DeviceRouter() = default;

Result<std::unique_ptr<DeviceRouter>> DeviceRouter::Create(const RoutingConfig& config, int64_t num_logits,
                                                           int64_t max_tokens, const RouterTables& tables) {
  if (config.method != RoutingMethod::kCustom) {
    FMOE_RETURN_IF_ERROR(ValidateRouting(config, num_logits));
  }
  std::unique_ptr<DeviceRouter> router(new DeviceRouter());
  router->impl_ = std::make_unique<Impl>();
  Impl& impl = *router->impl_;
  impl.config = config;
  impl.rule = RuleOf(config);
  impl.num_logits = num_logits;
  impl.max_tokens = max_tokens;
  FMOE_ASSIGN_OR_RETURN(impl.product, DeviceProduct::Create(tables.weight, tables.bias, "the router"));
  if (!tables.correction_bias.empty()) {
    FMOE_RETURN_IF_ERROR(impl.UploadCorrectionBias(tables.correction_bias));
  }
  if (!tables.token_id_to_experts.empty()) {
    FMOE_RETURN_IF_ERROR(impl.UploadHashTable(tables.token_id_to_experts));
  }
  if (config.method == RoutingMethod::kSimulated) {
    FMOE_RETURN_IF_ERROR(impl.DrawRouting());
  }
  return Result<std::unique_ptr<DeviceRouter>>(std::move(router));
}

Status DeviceRouter::Logits(TensorView hidden, float* logits, void* stream) const {
  if (impl_->product.empty()) {
    return Status::Usage("the layer has no router: give router_logits, or topk_ids with topk_weights");
  }
  return impl_->product.Run(hidden, logits, stream);
}

Status DeviceRouter::Choose(int64_t num_tokens, TensorView router_logits, TensorView token_ids,
                            int32_t* topk_ids, float* topk_weights, void* stream) const {
  const RoutingConfig& config = impl_->config;
  if (config.method == RoutingMethod::kCustom) {
    return Status::Unsupported(
        "routing method Custom calls back on the host; on a card give topk_ids and topk_weights");
  }
  if (num_tokens == 0) {
    return Status::Ok();
  }
  if (config.method == RoutingMethod::kSimulated) {
    const int64_t bytes = num_tokens * config.top_k * 4;
    FMOE_RETURN_IF_ERROR(CopyOnDevice(topk_ids, impl_->drawn_ids.get(), bytes, stream));
    return CopyOnDevice(topk_weights, impl_->drawn_weights.get(), bytes, stream);
  }
  RouteArguments call;
  call.hashed = impl_->table != nullptr;
  if (call.hashed && (token_ids.empty() || token_ids.rank() != 1 || token_ids.dim(0) != num_tokens)) {
    return Status::Usage("hash routing of " + std::to_string(num_tokens) + " tokens needs as many token ids");
  }
  if (call.hashed && token_ids.dtype() != DType::kI32 && token_ids.dtype() != DType::kI64) {
    return Status::Usage("token_ids are " + std::string(DTypeName(token_ids.dtype())) +
                         ", hash routing reads I32 or I64");
  }
  call.logits = RowsOf(router_logits);
  call.bias = reinterpret_cast<const float*>(impl_->correction_bias.get());
  call.score = impl_->rule.score;
  call.weighting = impl_->rule.weighting;
  call.groups_by_two = impl_->rule.groups_by_two || call.bias != nullptr;
  call.sparse_mixer = config.method == RoutingMethod::kSparseMixer;
  call.num_experts = static_cast<int>(impl_->num_logits);
  call.top_k = static_cast<int>(config.top_k);
  call.num_groups = static_cast<int>(config.num_groups);
  call.topk_groups = static_cast<int>(config.topk_groups);
  call.scaling_factor = config.scaling_factor;
  call.epsilon = config.norm_epsilon;
  call.softcap = config.logit_softcap;
  call.jitter = config.jitter;
  call.num_tokens = num_tokens;
  call.token_ids = token_ids.data();
  call.token_id_dtype = token_ids.dtype();
  call.table = reinterpret_cast<const int32_t*>(impl_->table.get());
  call.vocabulary = impl_->vocabulary;
  call.ids = topk_ids;
  call.weights = topk_weights;
  return LaunchRoute(call, ToStream(stream));
}

}  // namespace fusedmoe::cuda
