#include "jobs/convert/compare.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "jobs/convert/transform.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::jobs {
namespace {

double Relative(double before, double after) {
  if (before == after) {
    return 0.0;
  }
  const double scale = std::max(std::fabs(before), std::fabs(after));
  return before == 0 || after == 0 ? INFINITY : std::fabs(before - after) / scale;
}

}  // namespace

void Difference::Add(const Difference& other) {
  values += other.values;
  different += other.different;
  max_relative = std::max(max_relative, other.max_relative);
  noise += other.noise;
  signal += other.signal;
  sides |= other.sides;
  if (first.empty()) {
    first = other.first;
  }
}

double Difference::rel_l2() const {
  return noise == 0 ? 0.0 : std::sqrt(noise / signal);
}

Difference Compare(const CanonicalMatrix& before, const CanonicalMatrix& after, const std::string& module,
                   bool input_scales) {
  Difference difference;
  const auto note = [&](std::string text) {
    if (difference.first.empty()) {
      difference.first = fmt::format("{}: {}", module, text);
    }
  };
  if (before.rows != after.rows || before.cols != after.cols) {
    difference.sides = true;
    note(fmt::format("[{}, {}] became [{}, {}]", before.rows, before.cols, after.rows, after.cols));
    return difference;
  }
  const RowDecoder left(before), right(after);
  std::vector<float> a(static_cast<size_t>(before.cols)), b(a.size());
  for (int64_t row = 0; row < before.rows; ++row) {
    left.Decode(row, 0, before.cols, a.data());
    right.Decode(row, 0, before.cols, b.data());
    Smooth(before, a.data());
    Smooth(after, b.data());
    for (size_t col = 0; col < a.size(); ++col) {
      ++difference.values;
      difference.signal += static_cast<double>(a[col]) * a[col];
      if (a[col] == b[col]) {
        continue;  // zeros of either sign are one value
      }
      ++difference.different;
      const double delta = static_cast<double>(a[col]) - b[col];
      difference.noise += delta * delta;
      difference.max_relative = std::max(difference.max_relative, Relative(a[col], b[col]));
      note(fmt::format("row {} column {}: {:.9g} became {:.9g}", row, col, a[col], b[col]));
    }
  }
  const auto value_of = [](const Tensor& bias, int64_t row) {
    return bias.empty() ? 0.0F : bias.view().as<float>()[row];
  };
  for (int64_t row = 0; row < before.rows; ++row) {
    if (value_of(before.bias, row) != value_of(after.bias, row)) {
      difference.sides = true;
      note(fmt::format("bias {}: {:.9g} became {:.9g}", row, value_of(before.bias, row),
                       value_of(after.bias, row)));
      break;
    }
  }
  if (input_scales) {
    // Compared as scales of inputs that are not smoothed yet, where one factor smooths all columns.
    const float in = before.input_tensor_scale.value_or(0.0F) / UniformSmoothing(before).value_or(1.0F);
    const float out = after.input_tensor_scale.value_or(0.0F) / UniformSmoothing(after).value_or(1.0F);
    if (Relative(in, out) > 0x1p-22) {
      difference.sides = true;
      note(fmt::format("input scale {:.9g} became {:.9g}", in, out));
    }
  }
  return difference;
}

}  // namespace fusedmoe::jobs
