#include "support/mlx_checkpoint.hpp"

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>

#include <fmt/format.h>

#include <fusedmoe/safetensors.hpp>

#include "numerics/rows.hpp"

namespace fusedmoe::testing_support {
namespace {

constexpr std::array<std::string_view, 3> kProjections = {"gate_proj", "up_proj", "down_proj"};
constexpr int64_t kTokens = 5;

Tensor Encoded(DType dtype, const Shape& shape, const std::vector<float>& values) {
  Tensor tensor = *Tensor::Allocate(dtype, shape);
  EncodeRow(dtype, values.data(), shape.count(), tensor.mutable_view().data());
  return tensor;
}

std::vector<float> Normal(int64_t count, float deviation, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    value = normal(random);
  }
  return values;
}

// Weights are about as large as 1 / sqrt(cols).
MlxStack DrawStack(int64_t experts, int64_t rows, int64_t cols, MlxBits stored, DType dtype,
                   std::mt19937& random) {
  MlxStack stack{experts, rows, cols, stored, {}, {}, {}};
  stack.words = *Tensor::Allocate(DType::kU32, Shape{experts, rows, cols * stored.bits / 32});
  auto* words = reinterpret_cast<uint32_t*>(stack.words.mutable_view().data());
  for (int64_t i = 0; i < stack.words.shape().count(); ++i) {
    words[i] = random();
  }
  const Shape groups{experts, rows, cols / stored.group};
  const auto codes = static_cast<float>((1 << stored.bits) - 1);
  const float step = 3.0F / (std::sqrt(static_cast<float>(cols)) * codes);
  std::uniform_real_distribution<float> size(0.5F, 1.0F), zero(-0.25F, 1.25F);
  std::vector<float> scales, biases;
  for (int64_t i = 0; i < groups.count(); ++i) {
    const float scale = i % 7 == 3 ? 0.0F : (random() % 3 == 0 ? -step : step) * size(random);
    scales.push_back(scale);
    biases.push_back(random() % 8 == 0 ? 0.0F : -(scale == 0.0F ? step : scale) * codes * zero(random));
  }
  stack.scales = Encoded(dtype, groups, scales);
  stack.biases = Encoded(dtype, groups, biases);
  return stack;
}

// One expert of a tensor of all of them.
Tensor ItemOf(const Tensor& stack, int64_t item) {
  const Shape shape(stack.shape().dims().subspan(1));
  const int64_t bytes = stack.view().total_bytes() / stack.dim(0);
  return Tensor::Borrow(TensorView(stack.view().data() + item * bytes, stack.dtype(), shape), stack.owner());
}

std::string Settings(const MlxBits& stored) {
  return fmt::format("\"group_size\":{},\"bits\":{}", stored.group, stored.bits);
}

void WriteFile(const std::string& path, const std::vector<NamedTensor>& tensors) {
  if (const Status status = WriteSafetensors(path, tensors); !status.ok()) {
    throw std::runtime_error(status.ToString());
  }
}

}  // namespace

MlxStack::Weight MlxStack::At(int64_t expert, int64_t row, int64_t col) const {
  const int64_t line = expert * rows + row, group = line * (cols / stored.group) + col / stored.group;
  const std::byte* codes = words.view().data() + line * cols * stored.bits / 8;
  int code = 0;
  for (int64_t bit = 0; bit < stored.bits; ++bit) {
    const int64_t at = col * stored.bits + bit;
    code |= (std::to_integer<int>(codes[at / 8]) >> (at % 8) & 1) << bit;
  }
  float scale = 0.0F, bias = 0.0F;
  DecodeRow(scales.dtype(), scales.view().data(), group, 1, &scale);
  DecodeRow(biases.dtype(), biases.view().data(), group, 1, &bias);
  return {static_cast<double>(code) * static_cast<double>(scale), static_cast<double>(bias)};
}

MlxCheckpoint::MlxCheckpoint(const MlxLayer& layer, uint32_t seed) {
  std::mt19937 random(seed);
  const std::string block = "model.layers.0.mlp.";
  const MlxBits bits[] = {layer.gate, layer.up, layer.down};
  std::string own_bits;
  std::vector<NamedTensor> tensors = {
      {block + "gate.weight", Encoded(DType::kBF16, Shape{layer.experts, layer.hidden},
                                      Normal(layer.experts * layer.hidden, 0.1F, random))}};
  for (size_t i = 0; i < kProjections.size(); ++i) {
    const bool down = i == 2;
    stacks_[i] = DrawStack(layer.experts, down ? layer.hidden : layer.intermediate,
                           down ? layer.intermediate : layer.hidden, bits[i], layer.dtype, random);
    const auto add = [&](const std::string& module, const auto& part_of) {
      tensors.push_back({module + ".weight", part_of(stacks_[i].words)});
      tensors.push_back({module + ".scales", part_of(stacks_[i].scales)});
      tensors.push_back({module + ".biases", part_of(stacks_[i].biases)});
      own_bits += fmt::format(",\"{}\":{{{}}}", module, Settings(bits[i]));
    };
    if (!layer.numbered) {
      add(fmt::format("{}switch_mlp.{}", block, kProjections[i]), [](const Tensor& all) { return all; });
    }
    for (int64_t e = 0; layer.numbered && e < layer.experts; ++e) {
      add(fmt::format("{}experts.{}.{}", block, e, kProjections[i]),
          [e](const Tensor& all) { return ItemOf(all, e); });
    }
  }
  WriteFile(directory_ / "model.safetensors", tensors);
  directory_.Write(
      "config.json",
      fmt::format("{{\"model_type\":\"qwen3_moe\",\"hidden_size\":{},"
                  "\"moe_intermediate_size\":{},\"num_experts\":{},\"num_experts_per_tok\":2,"
                  "\"num_hidden_layers\":1,\"hidden_act\":\"silu\",\"norm_topk_prob\":true,"
                  "\"torch_dtype\":\"bfloat16\",\"quantization\":{{{}{}}}}}",
                  layer.hidden, layer.intermediate, layer.experts, Settings(layer.gate), own_bits));
  WriteFile(input(), {{"hidden_states", Encoded(DType::kBF16, Shape{kTokens, layer.hidden},
                                                Normal(kTokens * layer.hidden, 1.0F, random))}});
}

}  // namespace fusedmoe::testing_support
