// Prefill kernels against an fp64 reference on small layers: every format, activation and option, tails,
// skew, the masked form; operand rows against the CPU's quantizers bit by bit; every run twice, on poisoned
// scratch, with the same bits. Run: prefill_check [substring of a case]
#include <algorithm>
#include <cmath>
#include <cstring>

#include "experts/cuda/operands/operand_rows.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "prefill_case_run.hpp"
#include "stored_types.hpp"
#include "weights/quantize.hpp"

namespace fusedmoe::cuda {
namespace {

Tensor Gaussian(int64_t rows, int64_t cols, float sigma, std::mt19937& generator) {
  auto tensor = Tensor::Allocate(DType::kF32, Shape{rows, cols});
  std::normal_distribution<float> normal(0.0F, sigma);
  for (int64_t i = 0; i < rows * cols; ++i) {
    tensor->mutable_view().as<float>()[i] = normal(generator);
  }
  return *std::move(tensor);
}

template <typename T>
void Append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

Scheme SchemeOf(const PrefillCase& c) {
  const int64_t sizes[] = {c.hidden, c.intermediate};
  Scheme scheme;
  if (const auto type = StoredTypeOf(c.scheme)) {
    scheme = *ParseScheme(type->scheme);
    scheme.weight = type->format;
  } else if (c.scheme == "f16") {
    scheme = *ParseScheme("unquantized");
    scheme.weight.element = DType::kF16;
  } else {
    auto parsed = ParseScheme(c.scheme, sizes);
    Check(parsed.status());
    scheme = *parsed;
  }
  if (c.scheme.starts_with("int") && scheme.weight.has_block_scale() &&
      c.scheme.find(":g") != std::string::npos) {
    scheme.weight.block_scale_dtype = c.block_scale;
  }
  if (!c.rule.empty()) {
    scheme.activation.rule = *ActivationRuleByName(c.rule);
  }
  return scheme;
}

}  // namespace

PrefillCaseRun::PrefillCaseRun(const PrefillCase& c)
    : c_(c), generator_(static_cast<unsigned>(std::hash<std::string>{}(c.name))), scheme_(SchemeOf(c)) {}

void PrefillCaseRun::Fail(const std::string& what) {
  std::printf("FAIL %-40s %s\n", c_.name.c_str(), what.c_str());
  failed_ = true;
}

bool PrefillCaseRun::IsBuilt() const {
  const auto spec = ChooseFragmentSpec(scheme_.weight, false);
  return !spec.ok() || HasKernels(spec->format);  // Run says what is wrong with such a case
}

bool PrefillCaseRun::Run() {
  if (!ChooseLayout()) {
    return false;
  }
  MakeWeights();
  DrawRoutes();
  DrawTokens();
  if (!Plan() || !MakeOperand()) {
    return false;
  }
  RunTwice();
  DecodeInputs();
  if (!plain_ && activation_.quantized()) {
    CheckOperandRows();
  }
  DecodeWeights();
  CheckOutputs(ReferenceMids());
  return !failed_;
}

bool PrefillCaseRun::ChooseLayout() {
  const auto spec_result = ChooseFragmentSpec(scheme_.weight, false);
  if (!spec_result.ok()) {
    Fail(spec_result.status().message());
    return false;
  }
  spec_ = *spec_result;
  shape_.hidden = c_.hidden;
  shape_.intermediate = c_.intermediate;
  shape_.num_local_experts = c_.experts;
  shape_.num_experts = c_.map ? 2 * c_.experts : c_.experts;
  shape_.top_k = c_.top_k;
  shape_.activation = c_.activation;
  shape_.format = spec_.format;
  shape_.batched = c_.batched;
  shape_.code_tokens = IsCodeOperand(spec_.format, activation_);
  return true;
}

CanonicalExpert PrefillCaseRun::DrawExpert() {
  const auto type = StoredTypeOf(c_.scheme);
  const float sigma1 = 1.0F / std::sqrt(static_cast<float>(c_.hidden));
  const float sigma2 = 1.0F / std::sqrt(static_cast<float>(c_.intermediate));
  Tensor gate;
  if (gated_) {
    gate = Gaussian(c_.intermediate, c_.hidden, sigma1, generator_);
  }
  const Tensor up = Gaussian(c_.intermediate, c_.hidden, sigma1, generator_);
  const Tensor down_weights = Gaussian(c_.hidden, c_.intermediate, sigma2, generator_);
  auto expert = type ? Result<CanonicalExpert>(CanonicalExpert{})
                     : QuantizeExpert(gated_ ? gate.view() : TensorView{}, up.view(), down_weights.view(),
                                      scheme_.weight);
  Check(expert.status());
  if (type) {
    if (gated_) {
      expert->gate = RandomOfType(*type, c_.intermediate, c_.hidden, generator_);
    }
    expert->up = RandomOfType(*type, c_.intermediate, c_.hidden, generator_);
    expert->down = RandomOfType(*type, c_.hidden, c_.intermediate, generator_);
  }
  if (c_.bias) {
    const auto add_bias = [&](CanonicalMatrix& m) {
      if (!m.empty()) {
        Tensor bias = Gaussian(1, m.rows, 0.3F, generator_);
        auto flat = Tensor::Allocate(DType::kF32, Shape{m.rows});
        std::memcpy(flat->mutable_view().data(), bias.view().data(), static_cast<size_t>(m.rows * 4));
        m.bias = *std::move(flat);
      }
    };
    add_bias(expert->gate);
    add_bias(expert->up);
    add_bias(expert->down);
  }
  return *std::move(expert);
}

void PrefillCaseRun::MakeWeights() {
  std::vector<uint8_t> blocks[2];
  std::vector<float> scales[2], row_scales[2], biases[2];
  input_scale_.assign(static_cast<size_t>(c_.experts), 1.0F);
  mid_scale_ = input_scale_;
  const float divisor =
      static_scale_ ? LargestValue(*activation_.element) * (IsTwoLevel(activation_) ? 448.0F : 1.0F) : 1.0F;
  for (int64_t e = 0; e < c_.experts; ++e) {
    const auto i = static_cast<size_t>(e);
    if (static_scale_) {
      input_scale_[i] = 4.5F * (c_.per_expert_scale ? 1.0F + 0.1F * static_cast<float>(e) : 1.0F) / divisor;
      mid_scale_[i] = 3.0F * (1.0F + 0.1F * static_cast<float>(e)) / divisor;
    }
    CanonicalExpert expert = DrawExpert();
    const FragmentSizes bytes = FragmentSizesOf(spec_, c_.hidden, c_.intermediate, gated_);
    std::vector<uint8_t> w1(static_cast<size_t>(bytes.gate_up_bytes)),
        w2(static_cast<size_t>(bytes.down_bytes));
    std::vector<float> t1(static_cast<size_t>(bytes.parts)), t2(1);
    std::vector<float> r1(static_cast<size_t>(bytes.parts * bytes.gate_up_rows)),
        r2(static_cast<size_t>(bytes.down_rows));
    std::vector<float> b1 = r1, b2 = r2;
    FragmentOutput out{w1.data(),
                       w2.data(),
                       t1.data(),
                       t2.data(),
                       spec_.row_scale ? r1.data() : nullptr,
                       spec_.row_scale ? r2.data() : nullptr,
                       c_.bias ? b1.data() : nullptr,
                       c_.bias ? b2.data() : nullptr};
    Check(PackFragmentExpert(expert, spec_, out));
    for (float& t : t1) {
      t *= input_scale_[i];
    }
    t2[0] *= mid_scale_[i];
    Append(blocks[0], w1), Append(blocks[1], w2), Append(scales[0], t1), Append(scales[1], t2);
    Append(row_scales[0], r1), Append(row_scales[1], r2), Append(biases[0], b1), Append(biases[1], b2);
    experts_.push_back(std::move(expert));
  }
  DeviceProjection* projections[] = {&device_.gate_up, &device_.down};
  for (int g = 0; g < 2; ++g) {
    blocks_[g] = DeviceArray<uint8_t>(blocks[g]);
    tensor_scales_[g] = DeviceArray<float>(scales[g]);
    row_scales_[g] = DeviceArray<float>(row_scales[g]);
    biases_[g] = DeviceArray<float>(biases[g]);
    projections[g]->blocks = blocks_[g].get();
    projections[g]->tensor_scale = tensor_scales_[g].get();
    projections[g]->row_scale = spec_.row_scale ? row_scales_[g].get() : nullptr;
    projections[g]->bias = c_.bias ? biases_[g].get() : nullptr;
  }
  device_.half_scale_is_f16 = spec_.half_scale == DType::kF16;
}

void PrefillCaseRun::DrawRoutes() {
  counts_.resize(static_cast<size_t>(c_.experts));
  ids_.resize(static_cast<size_t>(num_tokens_ * top_k_));
  map_.resize(static_cast<size_t>(shape_.num_experts));
  for (int64_t e = 0; e < shape_.num_experts; ++e) {
    map_[static_cast<size_t>(e)] =
        c_.map ? (e % 2 == 0 ? static_cast<int32_t>(e / 2) : -1) : static_cast<int32_t>(e);
  }
  for (auto& count : counts_) {
    count = static_cast<int32_t>(generator_() % static_cast<unsigned>(c_.tokens + 1));
  }
  for (int64_t t = 0; t < num_tokens_; ++t) {
    std::vector<int32_t> order(static_cast<size_t>(shape_.num_experts));
    for (size_t e = 0; e < order.size(); ++e) {
      order[e] = static_cast<int32_t>(e);
    }
    std::shuffle(order.begin(), order.end(), generator_);
    if (c_.skew && generator_() % 10 != 0) {
      std::swap(order[0], *std::find(order.begin(), order.end(), 0));
    }
    for (int64_t j = 0; j < top_k_; ++j) {
      ids_[static_cast<size_t>(t * top_k_ + j)] =
          c_.map && generator_() % 7 == 0 ? -1 : order[static_cast<size_t>(j)];
    }
  }
}

void PrefillCaseRun::DrawTokens() {
  weights_.resize(static_cast<size_t>(num_tokens_ * top_k_));
  std::uniform_real_distribution<float> uniform(0.1F, 1.0F);
  std::generate(weights_.begin(), weights_.end(), [&] { return uniform(generator_); });
  Tensor x32 = Gaussian(num_tokens_, c_.hidden, 1.0F, generator_);
  x_.resize(static_cast<size_t>(num_tokens_ * c_.hidden * in_bytes_));
  for (int64_t t = 0; t < num_tokens_; ++t) {
    auto* row = reinterpret_cast<std::byte*>(x_.data() + t * c_.hidden * in_bytes_);
    EncodeRow(c_.in, x32.view().as<float>() + t * c_.hidden, c_.hidden, row);
    if (c_.batched && t % c_.tokens >= counts_[static_cast<size_t>(t / c_.tokens)]) {
      std::memset(row, 0xff, static_cast<size_t>(c_.hidden * in_bytes_));  // never read
    }
  }
  d_x_ = DeviceArray<uint8_t>(x_);
  d_ids_ = DeviceArray<int32_t>(ids_), d_counts_ = DeviceArray<int32_t>(counts_),
  d_map_ = DeviceArray<int32_t>(map_);
  d_weights_ = DeviceArray<float>(weights_);
  d_input_scale_ = DeviceArray<float>(input_scale_), d_mid_scale_ = DeviceArray<float>(mid_scale_);
}

bool PrefillCaseRun::Plan() {
  const MidKind mid_kind = MidKindOf(activation_);
  DeviceLimits limits;
  Check(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, 0), "SM count");
  plan_ = PlanPrefill(shape_, num_tokens_, mid_kind, limits);
  if (c_.chunk != 0) {
    plan_ = PlanPrefill(shape_, c_.chunk, mid_kind, limits);
  }
  if (!plan_.fits) {
    Fail(plan_.why_not);
    return false;
  }
  if (c_.tile != 0 && (plan_.codes || HasLargeTiles(spec_.format))) {
    plan_.tile_tokens[0] = plan_.tile_tokens[1] = c_.tile;
  }
  by_route_ = c_.per_expert_scale && !c_.batched;
  operand_rows_ = by_route_ ? num_tokens_ * top_k_ : num_tokens_;
  plain_ = !activation_.quantized() &&
           c_.in == (spec_.format == FragmentFormat::kF16 ? DType::kF16 : DType::kBF16) &&
           c_.hidden % 8 == 0 && !c_.weight_on_input;
  operand_cols_ = plan_.codes ? plan_.hidden_cols : shape_.hidden_cols();
  operand_ = DeviceArray<uint16_t>(operand_rows_ * operand_cols_);
  row_scale_ = DeviceArray<float>(operand_rows_);
  group_scale_ = DeviceArray<float>(operand_rows_ * (operand_cols_ / 128 + 1));
  amax_ = DeviceArray<uint32_t>(1);
  return true;
}

bool PrefillCaseRun::MakeOperand() {
  call_.num_tokens = num_tokens_;
  call_.hidden = {d_x_.get(), c_.hidden, c_.hidden};
  if (!plain_) {
    OperandRowsCall rows;
    rows.source.values = d_x_.get();
    rows.source.dtype = c_.in;
    rows.source.row_stride = rows.source.cols = c_.hidden;
    rows.padded_cols = operand_cols_;
    rows.num_rows = operand_rows_;
    rows.rows_per_token = by_route_ ? top_k_ : 1;
    rows.element = OperandElement(spec_.format, plan_.codes);
    rows.activation = activation_;
    rows.topk_ids = c_.batched ? nullptr : d_ids_.get();
    rows.ids_per_row = by_route_ ? 1 : top_k_;
    rows.expert_map = c_.map ? d_map_.get() : nullptr;
    rows.num_experts = shape_.num_experts;
    rows.num_local_experts = c_.experts;
    rows.expert_num_tokens = c_.batched ? d_counts_.get() : nullptr;
    rows.rows_per_expert = c_.batched ? c_.tokens : 0;
    rows.source.tensor_scale = static_scale_ ? d_input_scale_.get() : nullptr;
    rows.source.row_weight = c_.weight_on_input ? d_weights_.get() : nullptr;
    source_ = rows.source;
    rows.values = operand_.get();
    rows.row_scale = row_scale_.get();
    rows.group_scale = group_scale_.get();
    rows.amax_bits = amax_.get();
    if (Status status = LaunchOperandRows(rows); !status.ok()) {
      Fail(status.message());
      return false;
    }
    call_.hidden = {operand_.get(),
                    operand_cols_,
                    operand_cols_,
                    by_route_,
                    HasRowScale(activation_) ? row_scale_.get() : nullptr,
                    HasGroupScale(activation_) ? group_scale_.get() : nullptr};
  }
  return true;
}

/// On poisoned scratch and outputs.
void PrefillCaseRun::Forward(std::vector<uint8_t>& result) {
  DeviceArray<uint8_t> d_y(num_tokens_ * c_.hidden * out_bytes_);
  DeviceArray<std::byte> scratch(plan_.scratch_bytes);
  scratch.Poison();
  d_y.Poison();
  call_.output = d_y.get();
  call_.scratch = scratch.get();
  MidOperand mid{activation_, static_scale_ ? d_mid_scale_.get() : nullptr, nullptr};
  Check(LaunchPrefill(shape_, device_, call_, plan_, activation_.quantized() ? &mid : nullptr));
  Check(cudaDeviceSynchronize(), "prefill");
  result = d_y.Host();
}

/// All runs must have the same bits, also one that quantizes tokens on their way.
void PrefillCaseRun::RunTwice() {
  call_.topk_ids = d_ids_.get();
  call_.topk_weights = d_weights_.get();
  call_.expert_map = c_.map ? d_map_.get() : nullptr;
  call_.router_weight_on_input = c_.weight_on_input;
  call_.expert_num_tokens = c_.batched ? d_counts_.get() : nullptr;
  call_.rows_per_expert = c_.batched ? c_.tokens : 0;
  call_.output_dtype = c_.out;
  std::vector<uint8_t> again;
  Forward(y_);
  Forward(again);
  if (y_ != again) {
    Fail("another run has other bits");
  }
  if (!by_route_ && !plain_ && MayQuantizeTokens(shape_, plan_, activation_, source_)) {
    call_.hidden = {};
    call_.tokens = source_;
    Forward(again);
    if (y_ != again) {
      Fail("tokens quantized on their way give other bits");
    }
  }
}

}  // namespace fusedmoe::cuda

int main(int argc, char** argv) {
  using namespace fusedmoe::cuda;
  int runs = 0, failures = 0, left_out = 0;
  for (const PrefillCase& c : PrefillCases()) {
    if (argc < 2 || c.name.find(argv[1]) != std::string::npos) {
      PrefillCaseRun run(c);
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
