// The decode kernel against the definition in fp64 on small layers: every format, activation and option,
// tails, skew, the batched form; every run twice, on poisoned scratch, with the same bits.
// Run: decode_check [beginning of a scheme]
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>

#include "decode_case_run.hpp"
#include "numerics/rows.hpp"
#include "timing.cuh"

namespace fusedmoe::cuda {

DecodeCaseRun::DecodeCaseRun(const DecodeCase& c)
    : c_(c),
      generator_(static_cast<uint32_t>(c.hidden * 31 + c.tokens)),
      type_(StoredTypeOf(c.scheme)),
      format_(type_ ? type_->format : ParseScheme(c.scheme)->weight) {
  if (!type_ && format_.has_block_scale() &&
      (format_.element == DType::kU4 || format_.element == DType::kU8)) {
    format_.block_scale_dtype = c.scale;
  }
  if (c.scheme == "unquantized") {
    format_.element = c.scale;
  }
  spec_ = *ChooseFragmentSpec(format_, c.zero_points);
  element_ = spec_.format == FragmentFormat::kF16 ? DType::kF16 : DType::kBF16;
  shape_.hidden = c.hidden, shape_.intermediate = c.intermediate, shape_.num_local_experts = c.experts;
  shape_.num_experts = c.map ? 2 * c.experts : c.experts;
  shape_.top_k = top_k_, shape_.activation = c.activation, shape_.format = spec_.format;
  shape_.batched = c.batched;
}

void DecodeCaseRun::DrawExperts() {
  MatrixOptions options;
  options.zero_points = c_.zero_points;
  const auto random = [&](int64_t rows, int64_t cols) {
    return type_ ? RandomOfType(*type_, rows, cols, generator_)
                 : RandomMatrix(rows, cols, format_, generator_, options);
  };
  for (int64_t e = 0; e < c_.experts; ++e) {
    CanonicalExpert expert;
    if (c_.activation.gated()) {
      expert.gate = random(c_.intermediate, c_.hidden);
    }
    expert.up = random(c_.intermediate, c_.hidden);
    expert.down = random(c_.hidden, c_.intermediate);
    if (c_.bias) {
      for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
        if (!matrix->empty()) {
          matrix->bias = RandomFloats(DType::kF32, Shape{matrix->rows}, generator_, -1, 1);
        }
      }
    }
    experts_.push_back(std::move(expert));
  }
}

DecodeCaseRun::Packed DecodeCaseRun::PackAll() const {
  const FragmentSizes sizes = FragmentSizesOf(spec_, shape_.hidden, shape_.intermediate, shape_.gated());
  const size_t n = experts_.size(), parts = static_cast<size_t>(sizes.parts);
  const auto up_rows = static_cast<size_t>(sizes.gate_up_rows) * parts;
  const auto down_rows = static_cast<size_t>(sizes.down_rows);
  Packed p;
  p.gate_up.resize(n * static_cast<size_t>(sizes.gate_up_bytes));
  p.down.resize(n * static_cast<size_t>(sizes.down_bytes));
  p.tensor[0].resize(n * parts), p.tensor[1].resize(n);
  p.row[0].resize(n * up_rows), p.row[1].resize(n * down_rows);
  p.bias[0].resize(n * up_rows), p.bias[1].resize(n * down_rows);
  for (size_t e = 0; e < n; ++e) {
    FragmentOutput out;
    out.gate_up = p.gate_up.data() + e * static_cast<size_t>(sizes.gate_up_bytes);
    out.down = p.down.data() + e * static_cast<size_t>(sizes.down_bytes);
    out.gate_up_tensor_scale = p.tensor[0].data() + e * parts;
    out.down_tensor_scale = p.tensor[1].data() + e;
    out.gate_up_row_scale = p.row[0].data() + e * up_rows;
    out.down_row_scale = p.row[1].data() + e * down_rows;
    out.gate_up_bias = p.bias[0].data() + e * up_rows;
    out.down_bias = p.bias[1].data() + e * down_rows;
    Check(PackFragmentExpert(experts_[e], spec_, out));
  }
  return p;
}

/// Rows of a call are [tokens] or, batched, [experts][tokens]: those beyond the counts are NaN.
void DecodeCaseRun::DrawTokens(double weight_rms) {
  for (int64_t e = 0; e < c_.experts; ++e) {
    counts_.push_back(static_cast<int32_t>(generator_() % static_cast<uint32_t>(c_.tokens + 1)));
  }
  const int64_t rows = c_.by_route ? num_tokens_ * top_k_ : num_tokens_;
  x_.resize(static_cast<size_t>(rows * c_.hidden));
  x_codes_.resize(static_cast<size_t>(rows * x_cols_));
  for (int64_t r = 0; r < rows; ++r) {
    const bool beyond = c_.batched && r % c_.tokens >= counts_[static_cast<size_t>(r / c_.tokens)];
    for (int64_t k = 0; k < c_.hidden; ++k) {
      float v = beyond ? NAN
                       : static_cast<float>(normal_(generator_) /
                                            (weight_rms * std::sqrt(static_cast<double>(c_.hidden))));
      RoundRow(element_, &v, 1);
      x_codes_[static_cast<size_t>(r * x_cols_ + k)] = static_cast<uint16_t>(EncodeCode(element_, v));
      x_[static_cast<size_t>(r * c_.hidden + k)] = v;
    }
  }
}

void DecodeCaseRun::DrawRoutes() {
  map_.assign(static_cast<size_t>(shape_.num_experts), -1);
  for (int64_t e = 0; e < c_.experts; ++e) {
    map_[static_cast<size_t>(2 * e + 1) % map_.size()] = static_cast<int32_t>(e);
  }
  for (int64_t r = 0; r < num_tokens_ * top_k_; ++r) {
    weights_.push_back(0.1F + std::fabs(normal_(generator_)));
    const auto e = static_cast<int32_t>(generator_() % static_cast<uint32_t>(shape_.num_experts));
    int32_t id = c_.skew && generator_() % 10 != 0 ? 1 : e;
    if (generator_() % 7 == 0) {
      id = -1;
    }
    if (generator_() % 31 == 0) {
      id = 100000;  // out of range: skipped, like -1
    }
    ids_.push_back(id);
    if (c_.batched) {
      const int64_t expert = r / c_.tokens;
      local_.push_back(r % c_.tokens < counts_[static_cast<size_t>(expert)] ? static_cast<int32_t>(expert)
                                                                            : -1);
    } else if (id < 0 || id >= shape_.num_experts) {
      local_.push_back(-1);
    } else {
      local_.push_back(c_.map ? map_[static_cast<size_t>(id)] : id);
    }
  }
}

bool DecodeCaseRun::RunTwice() {
  plan_ = PlanDecode(shape_, num_tokens_, MidKind::kRounded, CurrentLimits());
  if (!plan_.fits) {
    problem_ = " " + plan_.why_not;
    return false;
  }
  const Packed packed = PackAll();
  const DeviceArray<uint8_t> gate_up(packed.gate_up), down(packed.down);
  const DeviceArray<float> t0(packed.tensor[0]), t1(packed.tensor[1]), r0(packed.row[0]), r1(packed.row[1]),
      b0(packed.bias[0]), b1(packed.bias[1]), topk_weights(weights_);
  const DeviceArray<int32_t> ids(ids_), map(map_), counts(counts_);
  const DeviceArray<uint16_t> x(x_codes_);
  outputs_.resize(static_cast<size_t>(num_tokens_ * c_.hidden * DTypeBits(c_.output) / 8));
  DeviceArray<std::byte> output(static_cast<int64_t>(outputs_.size())), scratch(plan_.scratch_bytes);
  DeviceArray<uint32_t> counters(plan_.counter_bytes / 4);
  Check(cudaMemset(counters.get(), 0, counters.bytes()), "counters");
  DeviceWeights device;
  device.gate_up = {gate_up.get(), t0.get(), spec_.row_scale ? r0.get() : nullptr,
                    c_.bias ? b0.get() : nullptr};
  device.down = {down.get(), t1.get(), spec_.row_scale ? r1.get() : nullptr, c_.bias ? b1.get() : nullptr};
  device.half_scale_is_f16 = spec_.half_scale == DType::kF16;
  ExpertsCall call;
  call.num_tokens = num_tokens_;
  call.hidden = {x.get(), x_cols_, x_cols_, c_.by_route};
  call.topk_ids = ids.get(), call.topk_weights = topk_weights.get();
  call.expert_map = c_.map ? map.get() : nullptr;
  call.router_weight_on_input = c_.weight_on_input;
  call.expert_num_tokens = c_.batched ? counts.get() : nullptr;
  call.rows_per_expert = c_.batched ? c_.tokens : 0;
  call.output = output.get(), call.output_dtype = c_.output, call.scratch = scratch.get();
  call.counters = counters.get();
  std::vector<std::byte> first;
  for (int run = 0; run < 2; ++run) {
    first = outputs_;
    Check(cudaMemset(output.get(), 0x5a, outputs_.size()), "output");
    plan_.many_bytes = run == 1;  // both ways to expand integers, for the same bits
    Check(LaunchDecode(shape_, device, call, plan_));
    Check(cudaDeviceSynchronize(), NameOf(c_).c_str());
    outputs_ = output.Host();
  }
  if (first != outputs_) {
    problem_ = " NOT REPEATABLE";
  }
  return true;
}

bool DecodeCaseRun::Run() {
  DrawExperts();
  DecodeWeights();
  DrawTokens(UpRms());
  DrawRoutes();
  if (RunTwice()) {
    for (int64_t token = 0; token < num_tokens_; ++token) {
      CheckToken(token);
    }
  }
  const bool ok = problem_.empty() && worst_ <= 1;
  std::printf("%s %s: %.3f of what is allowed, %ld undecided%s (nt%d slabs%d splits%d lists%d by_token%d)\n",
              ok ? "ok  " : "FAIL", NameOf(c_).c_str(), worst_, undecided_, problem_.c_str(),
              plan_.token_tile, plan_.slabs[0], plan_.splits, plan_.list_tokens, plan_.by_token ? 1 : 0);
  return ok;
}

}  // namespace fusedmoe::cuda

int main(int argc, char** argv) {
  using namespace fusedmoe::cuda;
  int runs = 0, failures = 0, left_out = 0;
  for (const DecodeCase& c : DecodeCases()) {
    if (argc < 2 || c.scheme.starts_with(argv[1])) {
      DecodeCaseRun run(c);
      if (!run.IsBuilt()) {
        ++left_out;
        continue;
      }
      ++runs;
      failures += run.Run() ? 0 : 1;
    }
  }
  std::printf("%d cases, %d failures, %d of formats that were left out\n", runs, failures, left_out);
  return failures == 0 ? 0 : 1;
}
