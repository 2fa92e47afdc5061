// What the definition says of a case of decode_check, and how far a kernel may be from it. Sums are those of
// fp64; a kernel's are fp32, so that an intermediate close to the middle between two numbers of its type may
// be rounded to either. Each such one may move the outputs by its step times its column of `down`; nothing
// else may.
#include <algorithm>
#include <cmath>
#include <utility>

#include "decode_case_run.hpp"
#include "numerics/rows.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::cuda {
namespace {

float Rounded(DType dtype, double value) {
  auto single = static_cast<float>(value);
  RoundRow(dtype, &single, 1);
  return single;
}

struct Sum {
  double value = 0, squares = 0;

  void Add(double term) { value += term, squares += term * term; }
  /// How far a sum of these terms in fp32 may be off. An MMA adds 16 products to a sum and cuts off less than
  /// a unit in its last place, 2^-23 of it; random terms keep a sum on its way below four times the root of
  /// their squares. Eight more for scales, bias, and a row block that warps share.
  double Error(int64_t terms) const {
    return (static_cast<double>(terms) / 16 + 8) * 0x1p-23 * 4 * std::sqrt(squares);
  }
};

/// A number that a kernel may have off by `slack`.
struct Near {
  double value = 0, slack = 0;
};

/// The intermediate of that gate (or only input) and up: the number of type `element`, and how far the other
/// one is where fp32 sums decide between two.
Near Intermediate(const ActivationSpec& spec, DType element, Near gate, Near up) {
  const auto of = [&](double g, double u) { return Activate<double>(spec, g, u); };
  const double value = of(gate.value, up.value);
  // The fast exponential and division are off by some units of 2^-23; where an activation cancels (tails of
  // gelu), of its factors.
  double low = value, high = value;
  for (const double g : {gate.value - gate.slack, gate.value + gate.slack}) {
    for (const double u : {up.value - up.slack, up.value + up.slack}) {
      low = std::min(low, of(g, u)), high = std::max(high, of(g, u));
    }
  }
  const double arithmetic = 0x1p-20 * (std::fabs(value) + std::fabs(gate.value) * (std::fabs(up.value) + 1));
  const double rounded = Rounded(element, value);
  return {rounded, std::max(rounded - Rounded(element, low - arithmetic),
                            Rounded(element, high + arithmetic) - rounded)};
}

}  // namespace

struct DecodeCaseRun::Row {
  std::vector<Sum> outputs;   ///< over routes
  std::vector<double> slack;  ///< of what each route adds
  explicit Row(int64_t hidden) : outputs(static_cast<size_t>(hidden)), slack(static_cast<size_t>(hidden)) {}
};

void DecodeCaseRun::DecodeWeights() {
  for (const CanonicalExpert& expert : experts_) {
    const CanonicalMatrix* matrices[3] = {&expert.gate, &expert.up, &expert.down};
    for (int m = 0; m < 3; ++m) {
      std::vector<float> all(static_cast<size_t>(matrices[m]->rows * matrices[m]->cols));
      for (int64_t r = 0; r < matrices[m]->rows; ++r) {
        DequantizeRow(*matrices[m], r, all.data() + r * matrices[m]->cols);
      }
      dense_[m].push_back(std::move(all));
    }
  }
}

double DecodeCaseRun::UpRms() const {
  double square = 0;
  for (const std::vector<float>& expert : dense_[1]) {
    for (const float v : expert) {
      square += static_cast<double>(v) * v;
    }
  }
  return std::sqrt(square / static_cast<double>(c_.experts * c_.intermediate * c_.hidden));
}

/// What a route adds to the outputs of its token.
void DecodeCaseRun::AddRoute(int64_t route, Row& row) {
  const int e = local_[static_cast<size_t>(route)];
  if (e < 0) {
    return;
  }
  const CanonicalExpert& expert = experts_[static_cast<size_t>(e)];
  const float* x = x_.data() + (c_.by_route ? route : route / top_k_) * c_.hidden;
  const auto bias = [](const CanonicalMatrix& matrix, int64_t i) {
    return matrix.bias.empty() ? 0.0 : static_cast<double>(matrix.bias.view().as<float>()[i]);
  };
  const auto first = [&](int m, const CanonicalMatrix& matrix, int64_t i) {
    const float* w = dense_[m][static_cast<size_t>(e)].data() + i * c_.hidden;
    Sum sum;
    for (int64_t k = 0; k < c_.hidden; ++k) {
      sum.Add(static_cast<double>(w[k]) * static_cast<double>(x[k]));
    }
    sum.Add(bias(matrix, i));
    return Near{sum.value, sum.Error(c_.hidden)};
  };
  std::vector<Near> mid;
  for (int64_t i = 0; i < c_.intermediate; ++i) {
    const Near up = first(1, expert.up, i);
    mid.push_back(c_.activation.gated() ? Intermediate(c_.activation, element_, first(0, expert.gate, i), up)
                                        : Intermediate(c_.activation, element_, up, {}));
    undecided_ += mid.back().slack > 0 ? 1 : 0;
  }
  const double weight = c_.batched || c_.weight_on_input ? 1.0 : weights_[static_cast<size_t>(route)];
  for (int64_t h = 0; h < c_.hidden; ++h) {
    const float* w = dense_[2][static_cast<size_t>(e)].data() + h * c_.intermediate;
    Sum sum;
    double slack = 0;
    for (int64_t i = 0; i < c_.intermediate; ++i) {
      sum.Add(static_cast<double>(w[i]) * mid[static_cast<size_t>(i)].value);
      slack += std::fabs(static_cast<double>(w[i])) * mid[static_cast<size_t>(i)].slack;
    }
    sum.Add(bias(expert.down, h));
    row.outputs[static_cast<size_t>(h)].Add(weight * sum.value);
    row.slack[static_cast<size_t>(h)] += weight * (slack + sum.Error(c_.intermediate));
  }
}

void DecodeCaseRun::CheckToken(int64_t token) {
  const int64_t bytes = c_.hidden * DTypeBits(c_.output) / 8;
  const std::byte* stored = outputs_.data() + token * bytes;
  if (!InCall(token)) {
    if (std::any_of(stored, stored + bytes, [](std::byte b) { return b != std::byte{0x5a}; })) {
      problem_ = " WROTE BEYOND COUNTS";
    }
    return;
  }
  Row row(c_.hidden);
  for (int64_t j = 0; j < top_k_; ++j) {
    AddRoute(token * top_k_ + j, row);
  }
  std::vector<float> got(static_cast<size_t>(c_.hidden));
  DecodeRow(c_.output, stored, 0, c_.hidden, got.data());
  for (size_t h = 0; h < got.size(); ++h) {
    const double want = row.outputs[h].value;
    const double slack = row.slack[h] + row.outputs[h].Error(16 * top_k_);
    const double allowed =
        std::max(Rounded(c_.output, want + slack) - want, want - Rounded(c_.output, want - slack));
    const double error = std::fabs(static_cast<double>(got[h]) - want);
    const double share = error == 0 ? 0 : std::isfinite(error) && allowed > 0 ? error / allowed : 1e9;
    worst_ = std::max(worst_, share);
  }
}

}  // namespace fusedmoe::cuda
