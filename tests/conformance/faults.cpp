#include "conformance/faults.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numerics/rows.hpp"

namespace fusedmoe::conformance {
namespace {

Tensor Copy(const Tensor& tensor) {
  Tensor copy = *Tensor::Allocate(tensor.dtype(), tensor.shape());
  std::memcpy(copy.mutable_view().data(), tensor.view().data(),
              static_cast<size_t>(tensor.view().total_bytes()));
  return copy;
}

void ChangeOneCode(CanonicalMatrix& matrix) {
  const DType dtype = matrix.format.element;
  matrix.codes = Copy(matrix.codes);
  std::byte* row = matrix.codes.mutable_view().data();
  StoreCode(dtype, row, 0, LoadCode(dtype, row, 0) ^ (1U << (DTypeBits(dtype) - 2)));
}

void DoubleOneScale(CanonicalMatrix& matrix) {
  Tensor& scale = matrix.block_scale.empty() ? matrix.channel_scale : matrix.block_scale;
  if (scale.empty()) {
    return;
  }
  scale = Copy(scale);
  std::byte* first = scale.mutable_view().data();
  float value = 0;
  DecodeRow(scale.dtype(), first, 0, 1, &value);
  value = value > 200.0F ? value / 2 : value * 2;  // e4m3 ends at 448
  EncodeRow(scale.dtype(), &value, 1, first);
}

void ForgetBias(CanonicalMatrix& matrix) {
  if (!matrix.bias.empty()) {
    matrix.bias = Copy(matrix.bias);
    std::memset(matrix.bias.mutable_view().data(), 0, static_cast<size_t>(matrix.bias.view().total_bytes()));
  }
}

}  // namespace

const std::vector<Fault>& Faults() {
  static const std::vector<Fault> kFaults = {
      {"one code", &ChangeOneCode}, {"one scale", &DoubleOneScale}, {"no bias", &ForgetBias}};
  return kFaults;
}

DrawnCase Damaged(const DrawnCase& drawn, const Batch& batch, const Fault& fault) {
  DrawnCase damaged = drawn;
  damaged.source.load = [load = drawn.source.load, make = fault.make,
                         damage = batch.routing.ids[0]](int64_t index) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
    if (index == damage) {
      make(expert.down);
    }
    return expert;
  };
  return damaged;
}

std::vector<float> WithoutLargestToken(std::vector<float> output, int64_t hidden) {
  const auto by_size = [](float a, float b) { return std::abs(a) < std::abs(b); };
  const int64_t at = std::max_element(output.begin(), output.end(), by_size) - output.begin();
  std::fill_n(output.begin() + at / hidden * hidden, hidden, 0.0F);
  return output;
}

}  // namespace fusedmoe::conformance
