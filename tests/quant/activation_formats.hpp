#pragma once

#include <fusedmoe/quant.hpp>

#include <random>
#include <string>
#include <vector>

/// The activation formats that properties are tested on, and data for them.
namespace fusedmoe::quant_testing {

struct NamedFormat {
  std::string name;
  ActivationFormat format;
  float tensor_scale = 1.0F;    ///< where the format takes one
  double gaussian_error = 0.0;  ///< relative L2 on Gaussian rows of 256, computed apart from this code
};

inline std::vector<NamedFormat> AllFormats() {
  const auto mx = [](DType element, MxScaleRule rule) {
    return ActivationFormat{
        .element = element, .group = {1, 32}, .scale_dtype = DType::kF8E8M0, .rule = {.mx_scale = rule}};
  };
  const auto plain = [](DType element, GroupShape group, bool is_static = false) {
    return ActivationFormat{.element = element, .group = group, .static_tensor_scale = is_static};
  };
  ActivationFormat ue8m0 = plain(DType::kF8E4M3, {1, 128});
  ue8m0.rule.power_of_two_scale = true;
  const ActivationFormat nvfp4{.element = DType::kF4E2M1,
                               .group = {1, 16},
                               .scale_dtype = DType::kF8E4M3,
                               .static_tensor_scale = true};
  return {
      {"Fp8Tensor", plain(DType::kF8E4M3, kPerTensor, true), 0.01F, 0.0264},
      {"Fp8Token", plain(DType::kF8E4M3, kPerRow), 1.0F, 0.0262},
      {"Fp8Group128", plain(DType::kF8E4M3, {1, 128}), 1.0F, 0.0257},
      {"Fp8Group128Ue8m0", ue8m0, 1.0F, 0.0266},
      {"Int8Tensor", plain(DType::kI8, kPerTensor, true), 0.05F, 0.01444},
      {"Int8Token", plain(DType::kI8, kPerRow), 1.0F, 0.00698},
      {"Int8Group64", plain(DType::kI8, {1, 64}), 1.0F, 0.00597},
      {"Nvfp4", nvfp4, 0.002F, 0.095},
      {"Mxfp4Even", mx(DType::kF4E2M1, MxScaleRule::kEven), 1.0F, 0.1118},
      {"Mxfp4Floor", mx(DType::kF4E2M1, MxScaleRule::kFloor), 1.0F, 0.1147},
      {"Mxfp4Ceil", mx(DType::kF4E2M1, MxScaleRule::kCeil), 1.0F, 0.1158},
      {"Mxfp6E3m2", mx(DType::kF6E3M2, MxScaleRule::kEven), 1.0F, 0.053},
      {"Mxfp6E2m3", mx(DType::kF6E2M3, MxScaleRule::kEven), 1.0F, 0.0283},
      {"Mxfp8Floor", mx(DType::kF8E4M3, MxScaleRule::kFloor), 1.0F, 0.0293},
      {"Mxfp8Ceil", mx(DType::kF8E4M3, MxScaleRule::kCeil), 1.0F, 0.0266},
  };
}

inline std::vector<float> GaussianRow(int64_t count, uint32_t seed, float deviation = 1.0F) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, deviation);
  std::vector<float> row(static_cast<size_t>(count));
  for (float& value : row) {
    value = normal(random);
  }
  return row;
}

}  // namespace fusedmoe::quant_testing
