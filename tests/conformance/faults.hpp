#pragma once

#include <cstdint>
#include <vector>

#include "conformance/drawn_case.hpp"

namespace fusedmoe::conformance {

/// What a comparison is there to find: something wrong in the second GEMM of an expert.
struct Fault {
  const char* name;
  void (*make)(CanonicalMatrix& matrix);
};
const std::vector<Fault>& Faults();

/// The problem with that fault in the expert that the first slot goes to.
DrawnCase Damaged(const DrawnCase& drawn, const Batch& batch, const Fault& fault);

/// The rows of an output, the one with the largest value lost.
std::vector<float> WithoutLargestToken(std::vector<float> output, int64_t hidden);

}  // namespace fusedmoe::conformance
