// Prefill kernels against an fp64 reference on small layers: every format, activation and option, tails,
// skew, the masked form; operand rows against the CPU's quantizers bit by bit; every run twice, on poisoned
// scratch, with the same bits. Run: prefill_check [substring of a case]
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "device_array.hpp"
#include "experts/cuda/operand_rows.hpp"
#include "experts/cuda/prefill.hpp"
#include "numerics/rows.hpp"
#include "prefill_cases.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/dequantize.hpp"
#include "weights/fragment_pack.hpp"
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

template <typename T>
void Append(std::vector<T>& to, const std::vector<T>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

int64_t g_failures = 0;
int64_t g_runs = 0;

void Fail(const PrefillCase& c, const std::string& what) {
  std::printf("FAIL %-40s %s\n", c.name.c_str(), what.c_str());
  ++g_failures;
}

Scheme SchemeOf(const PrefillCase& c) {
  const int64_t sizes[] = {c.hidden, c.intermediate};
  Scheme scheme;
  if (c.scheme == "f16") {
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

/// One case: the layer, its tokens, the kernels on them, and what the definition says.
class CaseRun {
 public:
  explicit CaseRun(const PrefillCase& c)
      : c_(c), generator_(static_cast<unsigned>(std::hash<std::string>{}(c.name))), scheme_(SchemeOf(c)) {}

  void Run() {
    if (!ChooseLayout()) {
      return;
    }
    MakeWeights();
    DrawRoutes();
    DrawTokens();
    if (!Plan() || !MakeOperand()) {
      return;
    }
    RunTwice();
    DecodeInputs();
    if (!plain_ && activation_.quantized()) {
      CheckOperandRows();
    }
    DecodeWeights();
    CheckOutputs(ReferenceMids());
  }

 private:
  bool ChooseLayout();
  CanonicalExpert DrawExpert();
  void MakeWeights();
  void DrawRoutes();
  void DrawTokens();
  bool Plan();
  bool MakeOperand();
  void RunTwice();
  void DecodeInputs();
  void CheckOperandRows();
  void DecodeWeights();
  std::vector<float> ReferenceMids() const;
  bool AddReference(const std::vector<float>& mids, float mid_batch_scale, int64_t token,
                    std::vector<double>& want) const;
  void CheckOutputs(const std::vector<float>& mids);
  /// The local expert of a route, -1: none.
  int ExpertOf(int64_t route) const;

  const PrefillCase& c_;
  std::mt19937 generator_;
  Scheme scheme_;
  const ActivationFormat& activation_ = scheme_.activation;
  const bool gated_ = c_.activation.gated();
  const bool static_scale_ = activation_.static_tensor_scale;
  const bool by_batch_ = activation_.quantized() && NeedsTensorScale(activation_) && !static_scale_;
  FragmentSpec spec_;
  LayerShape shape_;

  std::vector<CanonicalExpert> experts_;
  std::vector<std::vector<float>> dense_[3];  ///< of gate, up, down: [expert][row][col]
  std::vector<float> input_scale_, mid_scale_;
  DeviceArray<uint8_t> blocks_[2];
  DeviceArray<float> tensor_scales_[2], row_scales_[2], biases_[2];
  DeviceWeights device_;

  const int64_t num_tokens_ = c_.batched ? c_.experts * c_.tokens : c_.tokens;
  const int64_t top_k_ = c_.batched ? 1 : c_.top_k;
  const int64_t in_bytes_ = DTypeBits(c_.in) / 8, out_bytes_ = DTypeBits(c_.out) / 8;
  std::vector<int32_t> counts_, ids_, map_;
  std::vector<float> weights_;
  std::vector<uint8_t> x_;
  DeviceArray<uint8_t> d_x_;
  DeviceArray<int32_t> d_ids_, d_counts_, d_map_;
  DeviceArray<float> d_weights_, d_input_scale_, d_mid_scale_;

  PrefillPlan plan_;
  bool by_route_ = false;  ///< operand rows are of routes
  bool plain_ = false;     ///< tokens are operand rows as they stand
  int64_t operand_rows_ = 0, operand_cols_ = 0;
  DeviceArray<uint16_t> operand_;
  DeviceArray<float> row_scale_, group_scale_;
  DeviceArray<uint32_t> amax_;
  ExpertsCall call_;

  std::vector<uint8_t> y_;
  std::vector<float> inputs_;  ///< decoded
  float input_batch_scale_ = 1.0F;
};

bool CaseRun::ChooseLayout() {
  const auto spec_result = ChooseFragmentSpec(scheme_.weight, false);
  if (!spec_result.ok()) {
    Fail(c_, spec_result.status().message());
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

CanonicalExpert CaseRun::DrawExpert() {
  const float sigma1 = 1.0F / std::sqrt(static_cast<float>(c_.hidden));
  const float sigma2 = 1.0F / std::sqrt(static_cast<float>(c_.intermediate));
  Tensor gate;
  if (gated_) {
    gate = Gaussian(c_.intermediate, c_.hidden, sigma1, generator_);
  }
  const Tensor up = Gaussian(c_.intermediate, c_.hidden, sigma1, generator_);
  const Tensor down_weights = Gaussian(c_.hidden, c_.intermediate, sigma2, generator_);
  auto expert =
      QuantizeExpert(gated_ ? gate.view() : TensorView{}, up.view(), down_weights.view(), scheme_.weight);
  Check(expert.status());
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

void CaseRun::MakeWeights() {
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

void CaseRun::DrawRoutes() {
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

void CaseRun::DrawTokens() {
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

bool CaseRun::Plan() {
  const MidKind mid_kind = MidKindOf(activation_);
  DeviceLimits limits;
  Check(cudaDeviceGetAttribute(&limits.num_sms, cudaDevAttrMultiProcessorCount, 0), "SM count");
  plan_ = PlanPrefill(shape_, num_tokens_, mid_kind, limits);
  if (c_.chunk != 0) {
    plan_ = PlanPrefill(shape_, c_.chunk, mid_kind, limits);
  }
  if (!plan_.fits) {
    Fail(c_, plan_.why_not);
    return false;
  }
  if (c_.tile != 0 && (plan_.codes || HasLargeTiles(spec_.format))) {
    plan_.tile_tokens = c_.tile;
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

bool CaseRun::MakeOperand() {
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
    rows.values = operand_.get();
    rows.row_scale = row_scale_.get();
    rows.group_scale = group_scale_.get();
    rows.amax_bits = amax_.get();
    if (Status status = LaunchOperandRows(rows); !status.ok()) {
      Fail(c_, status.message());
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

/// On poisoned scratch and outputs; both runs must have the same bits.
void CaseRun::RunTwice() {
  call_.topk_ids = d_ids_.get();
  call_.topk_weights = d_weights_.get();
  call_.expert_map = c_.map ? d_map_.get() : nullptr;
  call_.router_weight_on_input = c_.weight_on_input;
  call_.expert_num_tokens = c_.batched ? d_counts_.get() : nullptr;
  call_.rows_per_expert = c_.batched ? c_.tokens : 0;
  DeviceArray<uint8_t> d_y(num_tokens_ * c_.hidden * out_bytes_);
  call_.output = d_y.get();
  call_.output_dtype = c_.out;
  DeviceArray<std::byte> scratch(plan_.scratch_bytes);
  call_.scratch = scratch.get();
  MidOperand mid{activation_, static_scale_ ? d_mid_scale_.get() : nullptr, nullptr};
  std::vector<uint8_t> again;
  for (std::vector<uint8_t>* result : {&y_, &again}) {
    scratch.Poison();
    d_y.Poison();
    Check(LaunchPrefill(shape_, device_, call_, plan_, activation_.quantized() ? &mid : nullptr));
    Check(cudaDeviceSynchronize(), "prefill");
    *result = d_y.Host();
  }
  if (y_ != again) {
    Fail(c_, "another run has other bits");
  }
}

int CaseRun::ExpertOf(int64_t route) const {
  if (c_.batched) {
    const int64_t expert = route / c_.tokens;
    return route % c_.tokens < counts_[static_cast<size_t>(expert)] ? static_cast<int>(expert) : -1;
  }
  const int32_t id = ids_[static_cast<size_t>(route)];
  return id < 0 || id >= shape_.num_experts ? -1 : map_[static_cast<size_t>(id)];
}

void CaseRun::DecodeInputs() {
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
void CaseRun::CheckOperandRows() {
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
    Fail(c_, std::to_string(wrong) + " operand values differ from the CPU's quantizer");
  }
}

void CaseRun::DecodeWeights() {
  for (const CanonicalExpert& expert : experts_) {
    dense_[0].push_back(gated_ ? Doubled(expert.gate) : std::vector<float>{});
    dense_[1].push_back(Doubled(expert.up));
    dense_[2].push_back(Doubled(expert.down));
  }
}

/// Activated rows of the intermediate, not quantized: [route][intermediate].
std::vector<float> CaseRun::ReferenceMids() const {
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
bool CaseRun::AddReference(const std::vector<float>& mids, float mid_batch_scale, int64_t token,
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

void CaseRun::CheckOutputs(const std::vector<float>& mids) {
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
      Fail(c_, "a row beyond the counts was written");
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
    Fail(c_, "error beyond " + std::to_string(limit));
  }
}

}  // namespace
}  // namespace fusedmoe::cuda

int main(int argc, char** argv) {
  using namespace fusedmoe::cuda;
  for (const PrefillCase& c : PrefillCases()) {
    if (argc < 2 || c.name.find(argv[1]) != std::string::npos) {
      ++g_runs;
      CaseRun(c).Run();
    }
  }
  std::printf("%lld cases, %lld failures\n", static_cast<long long>(g_runs),
              static_cast<long long>(g_failures));
  return g_failures == 0 ? 0 : 1;
}
