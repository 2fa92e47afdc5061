#pragma once

#include <cstdint>
#include <string>

#include <fusedmoe/weights.hpp>

namespace fusedmoe::jobs {

/// What differs between two matrices as they decode.
struct Difference {
  int64_t values = 0, different = 0;
  double max_relative = 0;  ///< infinite where a value became zero, or the other way round
  double noise = 0, signal = 0;
  std::string first;   ///< where, and both values; empty: nothing differs
  bool sides = false;  ///< biases or input scales differ by more than one rounding of fp32
  void Add(const Difference& other);
  double rel_l2() const;
};

/// Weights of two valid matrices, their biases and their input scales. `module` stands in messages.
/// `input_scales`: whether these count.
Difference Compare(const CanonicalMatrix& before, const CanonicalMatrix& after, const std::string& module,
                   bool input_scales);

}  // namespace fusedmoe::jobs
