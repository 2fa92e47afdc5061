#include "support/random_layer.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "numerics/rows.hpp"
#include "weights/quantize.hpp"

namespace fusedmoe::testing_support {
namespace {

/// Picked by random bits out of normal values: drawing each of them was half the time of the sweep.
Tensor Normal(int64_t rows, int64_t cols, float sigma, std::mt19937_64& random) {
  static const std::vector<float> kValues = [] {
    std::mt19937_64 own(1);
    std::normal_distribution<float> normal;
    std::vector<float> values(size_t{1} << 16);
    std::generate(values.begin(), values.end(), [&] { return normal(own); });
    return values;
  }();
  Tensor tensor = *Tensor::Allocate(DType::kF32, {rows, cols});
  auto* const values = tensor.mutable_view().as<float>();
  uint64_t bits = 0;
  for (int64_t i = 0; i < rows * cols; ++i) {
    bits = i % 4 == 0 ? random() : bits >> 16;
    values[i] = sigma * kValues[bits & 0xffff];
  }
  return tensor;
}

CanonicalMatrix RandomMatrix(int64_t rows, int64_t cols, const Scheme& scheme, bool symmetric, bool has_bias,
                             float gain, std::mt19937_64& random) {
  const Tensor weights = Normal(rows, cols, gain / std::sqrt(static_cast<float>(cols)), random);
  WeightQuantizerOptions options;
  options.symmetric = symmetric || !scheme.weight.may_have_zero_point;
  CanonicalMatrix matrix = *QuantizeMatrix(weights.view(), scheme.weight, options);
  if (scheme.activation.static_tensor_scale) {
    // Activations stay within about eight standard deviations; scales differ a little between experts.
    const float spread = 1.0F + 0.25F * std::uniform_real_distribution<float>()(random);
    const float codes = scheme.activation.element == DType::kF4E2M1 ? 6.0F * 448.0F
                        : scheme.activation.element == DType::kI8   ? 127.0F
                                                                    : 448.0F;
    matrix.input_tensor_scale = 8.0F * spread / codes;
  }
  if (has_bias) {
    Tensor bias = *Tensor::Allocate(DType::kF32, {rows});
    std::normal_distribution<float> normal(0.0F, 0.1F);
    std::generate_n(bias.mutable_view().as<float>(), rows, [&] { return normal(random); });
    matrix.bias = std::move(bias);
  }
  return matrix;
}

}  // namespace

RandomLayer MakeRandomLayer(MoeConfig config, const std::string& scheme_name, uint64_t seed, bool symmetric) {
  std::mt19937_64 random(seed);
  config.num_local_experts = config.num_local_experts == 0 ? config.num_experts : config.num_local_experts;
  const Scheme scheme = *ParseScheme(scheme_name);
  auto experts = std::make_shared<std::vector<CanonicalExpert>>();
  const auto draw = [&](int64_t rows, int64_t cols, float gain) {
    return RandomMatrix(rows, cols, scheme, symmetric, config.has_bias, gain, random);
  };
  for (int64_t expert = 0; expert < config.num_local_experts; ++expert) {
    CanonicalExpert drawn;
    if (config.activation.gated()) {
      drawn.gate = draw(config.intermediate, config.hidden, 1.0F);
    }
    drawn.up = draw(config.intermediate, config.hidden, 3.0F);
    drawn.down = draw(config.hidden, config.intermediate, 1.0F);
    experts->push_back(std::move(drawn));
  }
  RandomLayer layer;
  layer.config = config;
  layer.source.num_local_experts = config.num_local_experts;
  layer.source.scheme = scheme;
  layer.source.load = [experts](int64_t expert) -> Result<CanonicalExpert> {
    return (*experts)[static_cast<size_t>(expert)];
  };
  return layer;
}

void ShuffleGroups(CanonicalMatrix& matrix, std::mt19937_64& random) {
  Tensor index = *Tensor::Allocate(DType::kI32, {matrix.cols});
  auto* values = index.mutable_view().as<int32_t>();
  for (int64_t col = 0; col < matrix.cols; ++col) {
    values[col] = static_cast<int32_t>(col / matrix.format.block.col);
  }
  std::shuffle(values, values + matrix.cols, random);
  matrix.group_index = std::move(index);
}

Tensor RandomRows(int64_t rows, int64_t cols, DType dtype, uint64_t seed) {
  std::mt19937_64 random(seed);
  Tensor values = Normal(rows, cols, 1.0F, random);
  auto* data = values.mutable_view().as<float>();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 5; col < cols; col += 61) {
      data[row * cols + col] *= 6.0F;
    }
  }
  Tensor rounded = *Tensor::Allocate(dtype, {rows, cols});
  for (int64_t row = 0; row < rows; ++row) {
    EncodeRow(dtype, data + row * cols, cols, rounded.mutable_view().data() + row * PackedBytes(dtype, cols));
  }
  return rounded;
}

LatentWeights RandomLatent(int64_t hidden, int64_t latent, uint64_t seed, bool with_norm) {
  std::mt19937_64 random(seed);
  const auto weight = [&](int64_t rows, int64_t cols) {
    const Tensor drawn = Normal(rows, cols, 1.0F / std::sqrt(static_cast<float>(cols)), random);
    Tensor rounded = *Tensor::Allocate(DType::kBF16, {rows, cols});
    EncodeRow(DType::kBF16, drawn.view().as<float>(), rows * cols, rounded.mutable_view().data());
    return rounded;
  };
  const auto bias = [&](int64_t count) {
    const Tensor drawn = Normal(1, count, 0.1F, random);
    return Tensor::Borrow(TensorView(drawn.view().data(), DType::kF32, {count}), drawn.owner());
  };
  LatentWeights weights;
  weights.to_latent = weight(latent, hidden);
  weights.to_latent_bias = bias(latent);
  weights.from_latent = weight(hidden, latent);
  weights.from_latent_bias = bias(hidden);
  if (with_norm) {
    weights.norm = bias(latent);
  }
  return weights;
}

RandomRouting MakeRandomRouting(int64_t num_tokens, int64_t top_k, int64_t num_experts, uint64_t seed) {
  std::mt19937_64 random(seed);
  RandomRouting routing;
  std::vector<int32_t> all(static_cast<size_t>(num_experts));
  std::iota(all.begin(), all.end(), 0);
  std::uniform_real_distribution<float> weight(0.2F, 1.8F);
  for (int64_t token = 0; token < num_tokens; ++token) {
    std::shuffle(all.begin(), all.end(), random);
    for (int64_t slot = 0; slot < top_k; ++slot) {
      routing.ids.push_back(all[static_cast<size_t>(slot)]);
      routing.weights.push_back(weight(random) / static_cast<float>(top_k));
    }
  }
  return routing;
}

}  // namespace fusedmoe::testing_support
