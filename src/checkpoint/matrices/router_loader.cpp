#include "checkpoint/matrices/router_loader.hpp"

#include <cstring>
#include <string>

#include <fmt/format.h>

#include "checkpoint/matrices/matrix_reader.hpp"
#include "numerics/element_types.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::checkpoint {
namespace {

/// The tensor as it is stored, or what its codes mean where a tool quantized it too.
Result<Tensor> LoadDecoded(const LayerContext& context, const std::string& name, const Shape& shape) {
  constexpr std::string_view kWeight = ".weight";
  const TensorInfo* info = context.store->Find(name);
  if (info == nullptr ? !name.ends_with(kWeight) : IsPlainFloat(info->dtype) || !name.ends_with(kWeight)) {
    return context.store->Load(name);
  }
  const MatrixPlace place{.base = name.substr(0, name.size() - kWeight.size())};
  const auto format = FormatAt(*context.store, *context.rules, place.base, std::string(kWeight));
  if (!format.ok() || !format->quantized() || (info != nullptr && format->codes != kWeight)) {
    return context.store->Load(name);
  }
  FMOE_ASSIGN_OR_RETURN(const CanonicalMatrix matrix,
                        ReadMatrix(*context.store, *format, place, shape[0], shape[1]));
  return DequantizeMatrix(matrix);
}

/// F32 [count], also of one with dimensions of 1 around it.
Result<Tensor> LoadVector(const LayerContext& context, const std::string& name, int64_t count) {
  FMOE_ASSIGN_OR_RETURN(const Tensor stored, LoadDecoded(context, name, Shape{1, count}));
  Result<Tensor> values = ToF32(stored);
  if (!values.ok()) {
    return context.store->Blame(std::move(values).status(), name);
  }
  if (stored.shape().count() != count) {
    return context.store->Blame(
        Status::BadInput(fmt::format("{}; [{}] is needed", stored.shape().ToString(), count)), name);
  }
  FMOE_RETURN_IF_ERROR(CheckFinite(*context.store, *values, name));
  return Tensor::Borrow(TensorView(values->view().data(), DType::kF32, Shape{count}), values->owner());
}

/// In a type that its product is computed in: BF16, F16 or F32.
Result<Tensor> LoadMatrix(const LayerContext& context, std::string_view what, const std::string& name,
                          const Shape& shape) {
  FMOE_ASSIGN_OR_RETURN(Tensor matrix, LoadDecoded(context, name, shape));
  if (!IsPlainFloat(matrix.dtype())) {
    return context.store->Blame(Status::BadInput(fmt::format("{} is {}; BF16, F16 or F32 is needed", what,
                                                             DTypeName(matrix.dtype()))),
                                name);
  }
  if (!(matrix.shape() == shape)) {
    return context.store->Blame(Status::BadInput(fmt::format("{} is {}; {} is needed", what,
                                                             matrix.shape().ToString(), shape.ToString())),
                                name);
  }
  FMOE_RETURN_IF_ERROR(CheckFinite(*context.store, matrix, name));
  return matrix;
}

int64_t IntegerAt(const TensorView& table, int64_t index) {
  if (table.dtype() == DType::kI64) {
    int64_t value = 0;
    std::memcpy(&value, table.data() + index * 8, sizeof(value));
    return value;
  }
  int32_t value = 0;
  std::memcpy(&value, table.data() + index * 4, sizeof(value));
  return value;
}

/// The experts of each token id, [vocabulary, top_k].
Result<Tensor> LoadHashTable(const LayerContext& context, const std::string& name) {
  const MoeConfig& config = context.spec.config;
  FMOE_ASSIGN_OR_RETURN(Tensor table, context.store->Load(name));
  if ((table.dtype() != DType::kI32 && table.dtype() != DType::kI64) || table.shape().rank() != 2 ||
      table.dim(1) != config.top_k()) {
    return context.store->Blame(
        Status::BadInput(fmt::format("{} {}; I32 or I64 [vocabulary, {}] is needed", DTypeName(table.dtype()),
                                     table.shape().ToString(), config.top_k())),
        name);
  }
  for (int64_t i = 0; i < table.shape().count(); ++i) {
    const int64_t id = IntegerAt(table.view(), i);
    if (id < 0 || id >= config.num_experts) {
      return context.store->Blame(Status::BadInput(fmt::format("entry {} is expert {}; 0 to {} exist", i, id,
                                                               config.num_experts - 1)),
                                  name);
    }
  }
  return table;
}

}  // namespace

Result<RouterWeights> LoadRouter(const LayerContext& context) {
  const LayerNames& names = context.spec.names;
  const MoeConfig& config = context.spec.config;
  const int64_t outputs = config.num_experts + config.routing.num_zero_experts;
  RouterWeights router;
  if (!context.spec.family->routed_by_caller.empty()) {
    return router;
  }
  FMOE_ASSIGN_OR_RETURN(router.weight,
                        LoadMatrix(context, "the router", names.router, Shape{outputs, config.hidden}));
  if (!names.router_bias.empty()) {
    FMOE_ASSIGN_OR_RETURN(router.bias, LoadVector(context, names.router_bias, outputs));
  }
  if (!names.correction_bias.empty()) {
    FMOE_ASSIGN_OR_RETURN(router.correction_bias, LoadVector(context, names.correction_bias, outputs));
  } else if (config.has_correction_bias) {
    FMOE_ASSIGN_OR_RETURN(router.correction_bias, Tensor::Allocate(DType::kF32, Shape{outputs}));
  }
  if (!names.hash_table.empty()) {
    FMOE_ASSIGN_OR_RETURN(router.token_id_to_experts, LoadHashTable(context, names.hash_table));
  }
  return router;
}

Result<std::optional<LatentWeights>> LoadLatent(const LayerContext& context) {
  const MoeConfig& config = context.spec.config;
  if (config.latent == 0) {
    return std::optional<LatentWeights>();
  }
  const LayerNames& names = context.spec.names;
  LatentWeights latent;
  const auto load = [&](const std::string& name, int64_t rows, int64_t cols, Tensor& weight,
                        Tensor& bias) -> Status {
    FMOE_ASSIGN_OR_RETURN(weight, LoadMatrix(context, "the projection", name, Shape{rows, cols}));
    const std::string of_bias = name.substr(0, name.rfind('.')) + ".bias";
    if (context.store->Has(of_bias)) {
      FMOE_ASSIGN_OR_RETURN(bias, LoadVector(context, of_bias, rows));
    }
    return Status::Ok();
  };
  FMOE_RETURN_IF_ERROR(
      load(names.to_latent, config.latent, config.hidden, latent.to_latent, latent.to_latent_bias));
  FMOE_RETURN_IF_ERROR(
      load(names.from_latent, config.hidden, config.latent, latent.from_latent, latent.from_latent_bias));
  if (!names.latent_norm.empty()) {
    FMOE_ASSIGN_OR_RETURN(latent.norm, LoadVector(context, names.latent_norm, config.latent));
  }
  return std::optional<LatentWeights>(std::move(latent));
}

Result<Tensor> LoadSharedGate(const LayerContext& context) {
  const std::string& name = context.spec.names.shared_gate;
  return name.empty() ? Result<Tensor>(Tensor()) : LoadVector(context, name, context.spec.config.hidden);
}

}  // namespace fusedmoe::checkpoint
