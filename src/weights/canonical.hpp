#pragma once

#include <string_view>

#include <fusedmoe/weights.hpp>

namespace fusedmoe {

/// The tensors of a canonical matrix, each once.
struct CanonicalTensor {
  std::string_view name;
  Tensor CanonicalMatrix::*member;
};
inline constexpr CanonicalTensor kCanonicalTensors[] = {
    {"codes", &CanonicalMatrix::codes},
    {"block_scale", &CanonicalMatrix::block_scale},
    {"zero_point", &CanonicalMatrix::zero_point},
    {"super_scale", &CanonicalMatrix::super_scale},
    {"super_minimum", &CanonicalMatrix::super_minimum},
    {"channel_scale", &CanonicalMatrix::channel_scale},
    {"bias", &CanonicalMatrix::bias},
    {"group_index", &CanonicalMatrix::group_index},
    {"pre_quant_scale", &CanonicalMatrix::pre_quant_scale},
};

}  // namespace fusedmoe
