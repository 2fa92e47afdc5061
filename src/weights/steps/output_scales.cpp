#include "weights/steps/output_scales.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include <fmt/format.h>

namespace fusedmoe {
namespace {

Status CheckScale(const char* name, float value) {
  if (std::isfinite(value) && value > 0.0F) {
    return Status::Ok();
  }
  return Status::BadInput(fmt::format("{} is {}; finite and > 0 is required", name, value));
}

}  // namespace

Result<Fp8GemmScales> MakeFp8GemmScales(std::span<const float> gate_up_tensor_scale, float input_tensor_scale,
                                        std::span<const float> down_tensor_scale, float mid_tensor_scale) {
  FMOE_RETURN_IF_ERROR(CheckScale("input_tensor_scale", input_tensor_scale));
  FMOE_RETURN_IF_ERROR(CheckScale("mid_tensor_scale", mid_tensor_scale));
  Fp8GemmScales products;
  for (const float scale : gate_up_tensor_scale) {
    FMOE_RETURN_IF_ERROR(CheckScale("gate_up_tensor_scale", scale));
    products.gate_up.push_back(scale * input_tensor_scale);
  }
  for (const float scale : down_tensor_scale) {
    FMOE_RETURN_IF_ERROR(CheckScale("down_tensor_scale", scale));
    products.down.push_back(scale * mid_tensor_scale);
  }
  return products;
}

Result<Fp8OutputScales> MakeFp8OutputScales(std::span<const float> gate_up_tensor_scale,
                                            float input_tensor_scale,
                                            std::span<const float> down_tensor_scale,
                                            float mid_tensor_scale) {
  FMOE_ASSIGN_OR_RETURN(Fp8GemmScales products, MakeFp8GemmScales(gate_up_tensor_scale, input_tensor_scale,
                                                                  down_tensor_scale, mid_tensor_scale));
  Fp8OutputScales scales;
  scales.mid_encode_multiplier = 1.0F / mid_tensor_scale;
  for (const float product : products.gate_up) {
    scales.requantized_output_scale.push_back(product * scales.mid_encode_multiplier);
  }
  scales.gate_output_scale = std::move(products.gate_up);
  scales.down_output_scale = std::move(products.down);
  return scales;
}

int64_t TileTokens(int64_t num_tokens, int64_t top_k, int64_t num_experts, int64_t largest) {
  if (num_experts < 1) {
    return 8;
  }
  const auto load = static_cast<int64_t>(static_cast<double>(num_tokens * top_k / num_experts) * 1.3);
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(load, 1))));
  return std::clamp<int64_t>(power, 8, largest);
}

}  // namespace fusedmoe
