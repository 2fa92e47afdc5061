// What the definition says of a case of prefill_check: the layer in fp64, from the weights and tokens that
// the kernels were given, and the CPU's quantizers.
#include <algorithm>
#include <cmath>
#include <thread>

#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "prefill_case_run.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::cuda {
namespace {

std::vector<float> Doubled(const CanonicalMatrix& m) {
  std::vector<float> values(static_cast<size_t>(m.rows * m.cols));
  const RowDecoder decoder(m);
  for (int64_t r = 0; r < m.rows; ++r) {
    decoder.Decode(r, 0, m.cols, values.data() + r * m.cols);
  }
  return values;
}

/// n independent pieces on all threads of the host.
template <typename Work>
void Parallel(int64_t n, Work&& work) {
  std::vector<std::thread> threads;
  const int64_t workers = std::max(1U, std::thread::hardware_concurrency());
  for (int64_t t = 0; t < workers; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t i = t; i < n; i += workers) {
        work(i);
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
}

double Dot(const float* a, const float* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return sum;
}

double BiasOf(const CanonicalMatrix& m, int64_t row) {
  return m.bias.empty() ? 0.0 : static_cast<double>(m.bias.view().as<float>()[row]);
}

}  // namespace

int PrefillCaseRun::ExpertOf(int64_t route) const {
  if (c_.batched) {
    const int64_t expert = route / c_.tokens;
    return route % c_.tokens < counts_[static_cast<size_t>(expert)] ? static_cast<int>(expert) : -1;
  }
  const int32_t id = ids_[static_cast<size_t>(route)];
  return id < 0 || id >= shape_.num_experts ? -1 : map_[static_cast<size_t>(id)];
}

void PrefillCaseRun::DecodeInputs() {
  inputs_.resize(static_cast<size_t>(num_tokens_ * c_.hidden));
  float input_amax = 0;
  for (int64_t t = 0; t < num_tokens_; ++t) {
    float* row = inputs_.data() + t * c_.hidden;
    DecodeRow(c_.in, reinterpret_cast<const std::byte*>(x_.data() + t * c_.hidden * in_bytes_), 0, c_.hidden,
              row);
    bool counts_too = false;
    for (int64_t j = 0; j < top_k_; ++j) {
      counts_too |= ExpertOf(t * top_k_ + j) >= 0;
    }
    if (c_.weight_on_input) {
      for (int64_t h = 0; h < c_.hidden; ++h) {
        row[h] *= weights_[static_cast<size_t>(t)];
      }
    }
    if (counts_too) {
      input_amax = std::max(input_amax, RowFiniteAmax(row, c_.hidden));
    }
  }
  input_batch_scale_ = by_batch_ ? DynamicTensorScale(activation_, input_amax) : 1.0F;
}

/// Against the quantizers of the CPU, bit by bit.
void PrefillCaseRun::CheckOperandRows() {
  const std::vector<uint16_t> values = operand_.Host();
  const std::vector<float> left = row_scale_.Host(), groups = group_scale_.Host();
  int64_t wrong = 0;
  for (int64_t r = 0; r < operand_rows_; ++r) {
    const int64_t token = by_route_ ? r / top_k_ : r;
    int expert = -1;
    for (int64_t j = 0; j < (by_route_ ? 1 : top_k_) && expert < 0; ++j) {
      expert = ExpertOf(by_route_ ? r : token * top_k_ + j);
    }
    if (expert < 0) {
      continue;
    }
    const float scale = static_scale_ ? input_scale_[static_cast<size_t>(expert)] : input_batch_scale_;
    std::vector<float> want(inputs_.begin() + token * c_.hidden, inputs_.begin() + (token + 1) * c_.hidden);
    FakeQuantizeRow(activation_, scale, want.data(), c_.hidden);
    for (int64_t h = 0; h < c_.hidden; ++h) {
      float rest = HasRowScale(activation_) ? left[static_cast<size_t>(r)]
                   : HasGroupScale(activation_)
                       ? groups[static_cast<size_t>(r * (operand_cols_ / 128) + h / 128)]
                   : static_scale_ ? scale
                                   : 1.0F;
      const auto at = static_cast<size_t>(r * operand_cols_ + h);
      const auto byte = static_cast<uint8_t>(values[at / 2] >> (at % 2 * 8));
      const float value = !plan_.codes ? DecodeBf16(values[at])
                          : spec_.format == FragmentFormat::kInt8
                              ? static_cast<float>(static_cast<int8_t>(byte))
                              : DecodeE4m3(byte);
      // Two levels: the CPU forms code * (block * tensor) with one rounding more.
      const float got = value * rest;
      const bool same = IsTwoLevel(activation_)
                            ? std::fabs(got - want[static_cast<size_t>(h)]) <= 1.3e-7F * std::fabs(got)
                            : got == want[static_cast<size_t>(h)];
      wrong += same ? 0 : 1;
    }
  }
  if (wrong != 0) {
    Fail(std::to_string(wrong) + " operand values differ from the CPU's quantizer");
  }
}

void PrefillCaseRun::DecodeWeights() {
  for (const CanonicalExpert& expert : experts_) {
    dense_[0].push_back(gated_ ? Doubled(expert.gate) : std::vector<float>{});
    dense_[1].push_back(Doubled(expert.up));
    dense_[2].push_back(Doubled(expert.down));
  }
}

/// Activated rows of the intermediate, not quantized: [route][intermediate].
std::vector<float> PrefillCaseRun::ReferenceMids() const {
  const int64_t routes = num_tokens_ * top_k_;
  std::vector<float> mids(static_cast<size_t>(routes * c_.intermediate));
  Parallel(routes, [&](int64_t route) {
    const int e = ExpertOf(route);
    if (e < 0) {
      return;
    }
    const auto i = static_cast<size_t>(e);
    std::vector<float> row(inputs_.begin() + route / top_k_ * c_.hidden,
                           inputs_.begin() + (route / top_k_ + 1) * c_.hidden);
    FakeQuantizeRow(activation_, static_scale_ ? input_scale_[i] : input_batch_scale_, row.data(), c_.hidden);
    for (int64_t n = 0; n < c_.intermediate; ++n) {
      const double up =
          Dot(dense_[1][i].data() + n * c_.hidden, row.data(), c_.hidden) + BiasOf(experts_[i].up, n);
      const double gate = gated_ ? Dot(dense_[0][i].data() + n * c_.hidden, row.data(), c_.hidden) +
                                       BiasOf(experts_[i].gate, n)
                                 : up;
      mids[static_cast<size_t>(route * c_.intermediate + n)] =
          static_cast<float>(Activate(c_.activation, gate, up));
    }
  });
  return mids;
}

/// The outputs of a token into `want`; whether an expert is here for it.
bool PrefillCaseRun::AddReference(const std::vector<float>& mids, float mid_batch_scale, int64_t token,
                                  std::vector<double>& want) const {
  bool any = false;
  for (int64_t j = 0; j < top_k_; ++j) {
    const int e = ExpertOf(token * top_k_ + j);
    if (e < 0) {
      continue;
    }
    any = true;
    const auto i = static_cast<size_t>(e);
    std::vector<float> row(mids.begin() + (token * top_k_ + j) * c_.intermediate,
                           mids.begin() + (token * top_k_ + j + 1) * c_.intermediate);
    FakeQuantizeRow(activation_, static_scale_ ? mid_scale_[i] : mid_batch_scale, row.data(),
                    c_.intermediate);
    const double weight =
        c_.batched || c_.weight_on_input ? 1.0 : weights_[static_cast<size_t>(token * top_k_ + j)];
    for (int64_t n = 0; n < c_.hidden; ++n) {
      want[static_cast<size_t>(n)] +=
          weight * (Dot(dense_[2][i].data() + n * c_.intermediate, row.data(), c_.intermediate) +
                    BiasOf(experts_[i].down, n));
    }
  }
  return any;
}

void PrefillCaseRun::CheckOutputs(const std::vector<float>& mids) {
  const int64_t routes = num_tokens_ * top_k_;
  float mid_amax = 0;
  for (int64_t route = 0; route < routes; ++route) {
    if (ExpertOf(route) >= 0) {
      mid_amax = std::max(mid_amax, RowFiniteAmax(mids.data() + route * c_.intermediate, c_.intermediate));
    }
  }
  const float mid_batch_scale = by_batch_ ? DynamicTensorScale(activation_, mid_amax) : 1.0F;
  std::vector<double> errors(static_cast<size_t>(num_tokens_)), norms(static_cast<size_t>(num_tokens_));
  std::vector<int> touched(static_cast<size_t>(num_tokens_));
  Parallel(num_tokens_, [&](int64_t t) {
    std::vector<double> want(static_cast<size_t>(c_.hidden));
    const bool any = AddReference(mids, mid_batch_scale, t, want);
    std::vector<float> got(static_cast<size_t>(c_.hidden));
    DecodeRow(c_.out, reinterpret_cast<const std::byte*>(y_.data() + t * c_.hidden * out_bytes_), 0,
              c_.hidden, got.data());
    const auto* raw = y_.data() + t * c_.hidden * out_bytes_;
    if (!any && c_.batched) {
      touched[static_cast<size_t>(t)] =
          !std::all_of(raw, raw + c_.hidden * out_bytes_, [](uint8_t byte) { return byte == 0xff; });
      return;
    }
    for (int64_t n = 0; n < c_.hidden; ++n) {
      const double d = static_cast<double>(got[static_cast<size_t>(n)]) - want[static_cast<size_t>(n)];
      errors[static_cast<size_t>(t)] += d * d;
      norms[static_cast<size_t>(t)] += want[static_cast<size_t>(n)] * want[static_cast<size_t>(n)];
    }
  });
  double error = 0, norm = 0, worst = 0;
  for (size_t t = 0; t < errors.size(); ++t) {
    error += errors[t], norm += norms[t];
    const double row = norms[t] == 0 ? (errors[t] == 0 ? 0.0 : 1e9) : std::sqrt(errors[t] / norms[t]);
    worst = std::isnan(row) ? 1e9 : std::max(worst, row);
    if (touched[t] != 0) {
      Fail("a row beyond the counts was written");
      break;
    }
  }
  const double relative = norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
  // BF16 weights_ products, intermediate and rows: about 2^-9 / sqrt(3) each. A code that flips where fp32
  // sums differ in the last bits adds to that; e2m1 codes flip by the most.
  const double limit = !activation_.quantized() ? 6e-3 : DTypeBits(*activation_.element) <= 4 ? 3e-2 : 1.2e-2;
  std::printf("%s %-44s rel %.2e worst row %.2e\n", relative < limit && worst < 4 * limit ? "ok  " : "BAD ",
              c_.name.c_str(), relative, worst);
  if (!(relative < limit && worst < 4 * limit)) {
    Fail("error beyond " + std::to_string(limit));
  }
}

}  // namespace fusedmoe::cuda
