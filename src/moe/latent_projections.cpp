#include "moe/latent_projections.hpp"

#include <utility>

#include <fmt/format.h>

#include "moe/cuda/row_ops.hpp"
#include "moe/rows.hpp"
#include "numerics/element_types.hpp"
#include "platform/cuda/card.hpp"
#include "routing/router_gemm.hpp"

namespace fusedmoe {
namespace {

Status CheckWeight(const char* name, const Tensor& weight, const Tensor& bias, int64_t rows, int64_t cols) {
  if (!(weight.shape() == Shape{rows, cols}) || !IsPlainFloat(weight.dtype())) {
    return Status::Usage(fmt::format("is {} {}; [{}, {}] of F32, BF16 or F16 is needed",
                                     DTypeName(weight.dtype()), weight.shape().ToString(), rows, cols))
        .WithTensor(name);
  }
  if (!bias.empty() && (bias.dtype() != DType::kF32 || !(bias.shape() == Shape{rows}))) {
    return Status::Usage(fmt::format("is {} {}; F32 [{}] is needed", DTypeName(bias.dtype()),
                                     bias.shape().ToString(), rows))
        .WithTensor(fmt::format("{}_bias", name));
  }
  return Status::Ok();
}

Status CheckNorm(const Tensor& norm, const MoeConfig& config) {
  const bool wanted = config.latent_norm_epsilon > 0.0F;
  if (wanted == !norm.empty() &&
      (!wanted || (norm.dtype() == DType::kF32 && norm.shape() == Shape{config.latent}))) {
    return Status::Ok();
  }
  return Status::Usage(fmt::format("is {}; with latent_norm_epsilon={} {} is needed",
                                   norm.empty() ? std::string("not given")
                                                : fmt::format("{} {}", DTypeName(norm.dtype()),
                                                              norm.shape().ToString()),
                                   config.latent_norm_epsilon,
                                   wanted ? fmt::format("F32 [{}]", config.latent) : std::string("none")))
      .WithTensor("norm");
}

int64_t BytesOf(const Tensor& tensor) {
  return tensor.empty() ? 0 : tensor.view().total_bytes();
}

}  // namespace

Result<std::shared_ptr<const LatentProjections>> LatentProjections::Create(LatentWeights weights,
                                                                           const MoeConfig& config,
                                                                           bool on_device) {
  const int64_t hidden = config.hidden, latent = config.latent;
  FMOE_RETURN_IF_ERROR(CheckWeight("to_latent", weights.to_latent, weights.to_latent_bias, latent, hidden));
  FMOE_RETURN_IF_ERROR(
      CheckWeight("from_latent", weights.from_latent, weights.from_latent_bias, hidden, latent));
  FMOE_RETURN_IF_ERROR(CheckNorm(weights.norm, config));
  auto made = std::make_shared<LatentProjections>();
  made->hidden_ = hidden;
  made->latent_ = latent;
  made->on_device_ = on_device;
  made->bytes_ = BytesOf(weights.to_latent) + BytesOf(weights.to_latent_bias) + BytesOf(weights.from_latent) +
                 BytesOf(weights.from_latent_bias) + BytesOf(weights.norm);
  made->norm_epsilon_ = config.latent_norm_epsilon;
  if (on_device) {
    FMOE_ASSIGN_OR_RETURN(made->to_latent_,
                          cuda::DeviceProduct::Create(weights.to_latent.view(), weights.to_latent_bias.view(),
                                                      "the projection to latent experts"));
    FMOE_ASSIGN_OR_RETURN(made->from_latent_, cuda::DeviceProduct::Create(
                                                  weights.from_latent.view(), weights.from_latent_bias.view(),
                                                  "the projection from latent experts"));
    if (!weights.norm.empty()) {
      const TensorView norm = weights.norm.view();
      FMOE_ASSIGN_OR_RETURN(made->device_norm_,
                            cuda::AllocateOnDevice(norm.total_bytes(), "the norm of latent experts"));
      FMOE_RETURN_IF_ERROR(
          cuda::CopyToDevice(made->device_norm_.get(), norm.data(), norm.total_bytes(), nullptr));
      FMOE_RETURN_IF_ERROR(cuda::Synchronize(nullptr));
    }
  } else {
    made->weights_ = std::move(weights);
  }
  return std::shared_ptr<const LatentProjections>(std::move(made));
}

LatentProjections::Slots LatentProjections::Book(int64_t max_tokens, WorkspaceBook& book) const {
  const int64_t bytes = max_tokens * latent_ * static_cast<int64_t>(sizeof(float));
  return {book.Book("latent_sums", bytes), book.Book("latent_rows", bytes)};
}

MutableTensorView LatentProjections::Sums(int64_t num_tokens, const Slots& slots,
                                          const Workspace& workspace) const {
  return {workspace.Get<std::byte>(slots.sums), DType::kF32, {num_tokens, latent_}};
}

Result<TensorView> LatentProjections::ToLatent(TensorView hidden, const Slots& slots,
                                               const Workspace& workspace, const Executor& executor) const {
  const int64_t num_tokens = hidden.dim(0);
  const MutableTensorView rows(workspace.Get<std::byte>(slots.rows), hidden.dtype(), {num_tokens, latent_});
  // Rows of fp32 are written where they are read.
  const bool rounds = hidden.dtype() != DType::kF32;
  auto* sums = workspace.Get<float>(rounds ? slots.sums : slots.rows);
  if (num_tokens == 0) {
    return TensorView(rows);
  }
  if (on_device_) {
    FMOE_RETURN_IF_ERROR(to_latent_.Run(hidden, sums, executor.stream));
    if (rounds) {
      cuda::RankRows alone;
      alone.own = sums;
      FMOE_RETURN_IF_ERROR(cuda::AddRankRows(alone, rows, executor.stream));
    }
    return TensorView(rows);
  }
  FMOE_RETURN_IF_ERROR(
      RouterGemm(hidden, weights_.to_latent.view(), weights_.to_latent_bias.view(), sums, executor));
  if (rounds) {
    ConvertRows(Sums(num_tokens, slots, workspace), rows, executor);
  }
  return TensorView(rows);
}

Status LatentProjections::FromLatent(MutableTensorView sums, MutableTensorView rows,
                                     const Executor& executor) const {
  if (sums.dim(0) == 0) {
    return Status::Ok();
  }
  if (norm_epsilon_ > 0.0F && on_device_) {
    FMOE_RETURN_IF_ERROR(cuda::NormalizeRows(sums, reinterpret_cast<const float*>(device_norm_.get()),
                                             norm_epsilon_, executor.stream));
  } else if (norm_epsilon_ > 0.0F) {
    NormalizeRows(sums, weights_.norm.view().as<float>(), norm_epsilon_, executor);
  }
  return on_device_ ? from_latent_.Run(sums, rows.as<float>(), executor.stream)
                    : RouterGemm(sums, weights_.from_latent.view(), weights_.from_latent_bias.view(),
                                 rows.as<float>(), executor);
}

int64_t ProjectionBytes(const MoeConfig& config, DType dtype) {
  return 2 * PackedBytes(dtype, config.hidden * config.latent);
}

void DescribeProjections(int64_t hidden, int64_t latent, int64_t bytes, Plan& plan) {
  plan.latent = latent;
  plan.latent_bytes = bytes;
  plan.latent_flops = 4 * plan.tokens * hidden * latent;
}

}  // namespace fusedmoe
