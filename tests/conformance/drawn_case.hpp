#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

#include <fusedmoe/config.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/weights.hpp>

#include "support/random_layer.hpp"

namespace fusedmoe::conformance {

/// One drawn problem: a layer of experts of some scheme, and a batch for it.
struct DrawnCase {
  std::string scheme;
  uint64_t seed = 0;
  MoeConfig config;
  ExpertSource source;
  int64_t tokens = 0;
  DType dtype = DType::kBF16;  ///< of hidden states
  bool group_index = false, pre_quant_scale = false;
};

std::ostream& operator<<(std::ostream& stream, const DrawnCase& drawn);

/// The problem of that seed: sizes that the scheme's groups divide (and odd ones where it has none), an
/// activation with its parameters, biases, zero points, activation order, smoothing, several batch sizes.
DrawnCase Draw(const std::string& scheme, uint64_t seed);

using testing_support::Batch;

/// Hidden states and routing from the seed of the problem; in one of three, slots that the caller leaves out.
Batch MakeBatch(const DrawnCase& drawn);

}  // namespace fusedmoe::conformance
