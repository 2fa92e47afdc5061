#include "jobs/quantize/scale_search.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "numerics/codecs.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::jobs {
namespace {

// Candidates for a scale of that type, nearest first. The largest code may stand for anything between the
// largest value and about three quarters of it (clipping rarely pays beyond), or the scale may grow so that
// the largest value falls on a lower code (4 instead of 6 in e2m1): a factor of 0.7 to 1.5.
std::vector<uint32_t> Candidates(DType dtype, uint32_t code) {
  std::vector<uint32_t> codes;
  const float current = DecodeCode(dtype, code);
  const auto add = [&](int64_t candidate, int64_t last) {
    if (candidate > 0 && candidate <= last) {
      const float value = DecodeCode(dtype, static_cast<uint32_t>(candidate));
      if (std::isfinite(value) && value > 0 && value >= 0.66F * current && value <= 1.55F * current) {
        codes.push_back(static_cast<uint32_t>(candidate));
      }
    }
  };
  if (dtype == DType::kF8E4M3) {
    for (int64_t step = -8; step <= 8; ++step) {
      add(static_cast<int64_t>(code) + step, 0x7e);
    }
  } else if (dtype == DType::kF8E8M0) {
    for (const int64_t step : {-1, 1}) {
      const int64_t candidate = static_cast<int64_t>(code) + step;
      if (candidate >= 0 && candidate < 255) {
        codes.push_back(static_cast<uint32_t>(candidate));
      }
    }
  } else {  // 16-bit scales of integers: 24 shrunk ones
    for (int step = 1; step <= 24; ++step) {
      codes.push_back(EncodeCode(dtype, current * (1.0F - 0.0125F * static_cast<float>(step))));
    }
  }
  return codes;
}

struct Trial {
  double error = 0;
  std::vector<uint8_t> codes;
};

// The codes of a block under one scale, and their squared error.
void Encode(const CanonicalMatrix& matrix, const float* weights, int64_t count, float scale, Trial& trial) {
  const DType element = matrix.format.element;
  trial.error = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float quotient = weights[i] / scale;
    float decoded = 0;
    uint8_t code = 0;
    if (element == DType::kF4E2M1) {
      code = EncodeE2m1RneSaturating(quotient);
      decoded = DecodeE2m1(code);
    } else {
      decoded = std::clamp(std::nearbyint(quotient), -8.0F, 7.0F);
      const int zero = matrix.format.implied_zero();
      code = static_cast<uint8_t>((static_cast<int>(decoded) + zero) & 15);
    }
    const double delta = static_cast<double>(weights[i]) - static_cast<double>(decoded) * scale;
    trial.error += delta * delta;
    trial.codes[static_cast<size_t>(i)] = code;
  }
}

}  // namespace

bool CanSearchScales(const WeightFormat& format) {
  const bool element =
      format.element == DType::kF4E2M1 || format.element == DType::kU4 || format.element == DType::kI4;
  const bool scale = format.block_scale_dtype == DType::kF8E4M3 ||
                     format.block_scale_dtype == DType::kF8E8M0 || format.block_scale_dtype == DType::kBF16 ||
                     format.block_scale_dtype == DType::kF16;
  return element && scale && format.block.row == 1 && !format.has_channel_scale;
}

void SearchScales(TensorView weights, CanonicalMatrix& matrix) {
  const int64_t group = matrix.format.block.col < 0 ? matrix.cols : matrix.format.block.col;
  const DType scale_dtype = matrix.format.block_scale_dtype, element = matrix.format.element;
  const float above = matrix.tensor_scale.value_or(1.0F);
  MutableTensorView codes = matrix.codes.mutable_view(), scales = matrix.block_scale.mutable_view();
  std::vector<float> row(static_cast<size_t>(matrix.cols));
  Trial best, trial;
  best.codes.resize(static_cast<size_t>(group));
  trial.codes.resize(static_cast<size_t>(group));
  for (int64_t r = 0; r < matrix.rows; ++r) {
    DecodeRow(weights.dtype(), weights.data() + r * weights.stride_bytes(0), 0, matrix.cols, row.data());
    std::byte* code_row = codes.data() + r * codes.stride_bytes(0);
    std::byte* scale_row = scales.data() + r * scales.stride_bytes(0);
    for (int64_t block = 0; block * group < matrix.cols; ++block) {
      const float* values = row.data() + block * group;
      const uint32_t current = LoadCode(scale_dtype, scale_row, block);
      Encode(matrix, values, group, DecodeCode(scale_dtype, current) * above, best);
      bool changed = false;
      uint32_t chosen = current;
      for (const uint32_t candidate : Candidates(scale_dtype, current)) {
        const float scale = DecodeCode(scale_dtype, candidate) * above;
        if (!(scale > 0) || !std::isfinite(scale)) {
          continue;
        }
        Encode(matrix, values, group, scale, trial);
        if (trial.error < best.error) {
          std::swap(best, trial);
          chosen = candidate;
          changed = true;
        }
      }
      if (!changed) {
        continue;
      }
      StoreCode(scale_dtype, scale_row, block, chosen);
      for (int64_t i = 0; i < group; ++i) {
        StoreCode(element, code_row, block * group + i, best.codes[static_cast<size_t>(i)]);
      }
    }
  }
}

}  // namespace fusedmoe::jobs
