#pragma once

#include "experts/cuda/launch.hpp"

namespace fusedmoe::cuda {

/// A layer that one rank holds whole.
inline LayerShape Shape(FragmentFormat format, int64_t hidden, int64_t intermediate, int64_t experts,
                        int64_t top_k) {
  LayerShape shape;
  shape.format = format;
  shape.hidden = hidden;
  shape.intermediate = intermediate;
  shape.num_local_experts = shape.num_experts = experts;
  shape.top_k = top_k;
  return shape;
}

}  // namespace fusedmoe::cuda
