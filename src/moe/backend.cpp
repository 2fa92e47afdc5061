#include "moe/backend.hpp"

#include "weights/canonical.hpp"
#include "weights/features.hpp"
#include "weights/panel.hpp"

namespace fusedmoe {
namespace {

int64_t Bytes(const Tensor& tensor) {
  return tensor.empty() ? 0 : tensor.view().total_bytes();
}

int64_t Bytes(const CanonicalMatrix& matrix) {
  int64_t bytes = 0;
  for (const auto& [name, tensor] : kCanonicalTensors) {
    bytes += Bytes(matrix.*tensor);
  }
  return bytes;
}

}  // namespace

ActivationFormat ActivationOf(const MoeProblem& problem) {
  const bool as_scheme =
      problem.activation == ActivationMode::kAsCheckpoint || problem.activation == ActivationMode::kA8;
  return as_scheme ? problem.scheme.activation : ActivationFormat{};
}

ActivationFormat A8Format() {
  return {.element = DType::kI8, .group = {1, 64}};
}

WeightFormat WeightsOf(const MoeProblem& problem) {
  WeightFormat format = problem.scheme.weight;
  format.block_scale_dtype = problem.weights_scale_dtype.value_or(format.block_scale_dtype);
  return format;
}

void TakeFeatures(const CanonicalExpert& expert, MoeProblem& problem) {
  const ExpertFeatures features = FeaturesOf(expert);
  problem.weights.gate_up_stored = features.gate_up.stored.value_or(StoredIntegers());
  problem.weights.down_stored = expert.down.stored;
  MatrixFeatures any = features.gate_up;
  any.Join(features.down);
  problem.config.has_bias = problem.config.has_bias || any.bias;
  problem.weights.has_zero_points = any.zero_point;
  if (any.zero_point_dtype == DType::kF32) {
    problem.scheme.weight.zero_point_dtype = DType::kF32;
  }
  problem.weights_scale_dtype = any.scale_dtype;
  problem.weights.has_group_index = any.group_index;
  problem.weights.has_pre_quant_scale = any.pre_quant_scale;
  problem.weights.cuts_stripes =
      CutsStripes(expert.gate) || CutsStripes(expert.up) || CutsStripes(expert.down);
}

const Tensor* PreparedWeights::Find(std::string_view name) const {
  for (const Named& named : tensors) {
    if (named.name == name) {
      return &named.tensor;
    }
  }
  return nullptr;
}

int64_t PreparedWeights::total_bytes() const {
  int64_t bytes = 0;
  for (const Named& named : tensors) {
    bytes += Bytes(named.tensor);
  }
  for (const CanonicalExpert& expert : canonical) {
    bytes += Bytes(expert.gate) + Bytes(expert.up) + Bytes(expert.down);
  }
  return bytes;
}

}  // namespace fusedmoe
