#pragma once

#include <fusedmoe/jobs/quantize.hpp>
#include <fusedmoe/weights.hpp>

/// How far quantized weights lie from what they were.
namespace fusedmoe::jobs {

/// Sums behind the numbers of a report.
struct Power {
  double noise = 0, signal = 0;
  void Add(const Power& other);
  double rel_l2() const;
  double sqnr_db() const;
};

/// `weights` [rows, cols] in F32, F16 or BF16; `matrix` quantized from them.
Power NoiseOf(TensorView weights, const CanonicalMatrix& matrix);

struct Measured {
  QuantizedTensor tensor;
  Power power;
};
/// All numbers of QuantizedTensor but the name and those of a search.
Measured Measure(TensorView weights, const CanonicalMatrix& matrix);

}  // namespace fusedmoe::jobs
