#pragma once

#include <fusedmoe/fusedmoe.h>

#include <atomic>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <fusedmoe/layer.hpp>

#include "support/random_layer.hpp"

/// Layers as a caller of the C interface has them: of a checkpoint, or of experts in its own memory.
namespace fusedmoe {

/// As a caller in C fills it: strides left 0, which stands for rows without gaps.
inline fmoe_tensor ToC(TensorView view) {
  fmoe_tensor tensor{};
  tensor.data = const_cast<std::byte*>(view.data());
  tensor.dtype = static_cast<fmoe_dtype>(view.dtype());
  tensor.rank = view.rank();
  for (int axis = 0; axis < view.rank(); ++axis) {
    tensor.shape[axis] = view.dim(axis);
  }
  return tensor;
}

inline std::string LastText() {
  return fmoe_last_error()->text;
}

/// A layer with its workspace, run once.
struct Loaded {
  fmoe_layer* layer = nullptr;
  fmoe_workspace* workspace = nullptr;
  ~Loaded() {
    fmoe_workspace_release(workspace);
    fmoe_layer_release(layer);
  }
  /// F32 output of `hidden` under `logits`, or nothing after a failure.
  std::vector<float> Run(const Tensor& hidden, const Tensor& logits,
                         const fmoe_executor* executor = nullptr) {
    if (workspace == nullptr) {
      EXPECT_EQ(fmoe_workspace_create(layer, &workspace), FMOE_OK) << LastText();
    }
    return RunIn(workspace, hidden, logits, executor);
  }
  /// The same in any workspace that is large enough.
  std::vector<float> RunIn(const fmoe_workspace* memory, const Tensor& hidden, const Tensor& logits,
                           const fmoe_executor* executor = nullptr) const {
    std::vector<float> output(static_cast<size_t>(hidden.view().count()));
    fmoe_forward forward{};
    forward.hidden = ToC(hidden.view());
    forward.router_logits = ToC(logits.view());
    forward.output =
        ToC(TensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, hidden.shape()));
    EXPECT_EQ(fmoe_layer_forward(layer, &forward, memory, executor), FMOE_OK) << LastText();
    return output;
  }
};

inline std::vector<float> RunCpp(const MoeLayer& layer, const Tensor& hidden, const Tensor& logits) {
  std::vector<float> output(static_cast<size_t>(hidden.view().count()));
  const Workspace workspace = *layer.CreateWorkspace();
  const Status status = layer.Forward(
      hidden.view(), logits.view(),
      MutableTensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, hidden.shape()), workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return output;
}

inline MoeConfig SmallConfig() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 6;
  config.hidden = 128;
  config.intermediate = 64;
  config.routing.top_k = 3;
  return config;
}

inline fmoe_layer_config ToC(const MoeConfig& from, const char* scheme) {
  fmoe_layer_config config;
  fmoe_layer_config_init(&config);
  config.num_experts = from.num_experts;
  config.top_k = from.top_k();
  config.hidden = from.hidden;
  config.intermediate = from.intermediate;
  config.scheme = scheme;
  return config;
}

/// Experts as a caller of the C interface would hold them.
struct HeldExperts {
  explicit HeldExperts(const testing_support::RandomLayer& random) {
    for (int64_t expert = 0; expert < random.source.num_local_experts; ++expert) {
      experts.push_back(*random.source.load(expert));
    }
  }
  static fmoe_matrix ToMatrix(const CanonicalMatrix& from) {
    fmoe_matrix matrix{};
    matrix.codes = ToC(from.codes.view());
    matrix.block_scale = ToC(from.block_scale.view());
    matrix.zero_point = ToC(from.zero_point.view());
    matrix.channel_scale = ToC(from.channel_scale.view());
    matrix.bias = ToC(from.bias.view());
    matrix.tensor_scale = from.tensor_scale ? &*from.tensor_scale : nullptr;
    matrix.input_tensor_scale = from.input_tensor_scale ? &*from.input_tensor_scale : nullptr;
    return matrix;
  }
  fmoe_expert_source Source() {
    fmoe_expert_source source{};
    source.self = this;
    source.load = [](void* self, int64_t expert, fmoe_expert* out) -> int32_t {
      auto* held = static_cast<HeldExperts*>(self);
      ++held->loads;
      if (expert == held->refused) {
        return 7;
      }
      const CanonicalExpert& from = held->experts[static_cast<size_t>(expert)];
      *out = {ToMatrix(from.gate), ToMatrix(from.up), ToMatrix(from.down)};
      if (expert == held->cut_short) {
        out->up.codes.shape[0] -= 1;
      }
      return 0;
    };
    source.unload = [](void* self, int64_t /*expert*/) { ++static_cast<HeldExperts*>(self)->unloads; };
    return source;
  }
  std::vector<CanonicalExpert> experts;
  std::atomic<int> loads{0}, unloads{0};
  int64_t refused = -1, cut_short = -1;
};

/// A loaded layer of held experts, with its workspace.
struct HeldLayer {
  explicit HeldLayer(const char* scheme)
      : random(testing_support::MakeRandomLayer(SmallConfig(), scheme, 5)),
        held(random),
        config(ToC(random.config, scheme)) {
    const fmoe_expert_source source = held.Source();
    EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_OK) << LastText();
    EXPECT_EQ(fmoe_workspace_create(loaded.layer, &loaded.workspace), FMOE_OK) << LastText();
  }
  testing_support::RandomLayer random;
  HeldExperts held;
  fmoe_layer_config config;
  Loaded loaded;
};

}  // namespace fusedmoe
