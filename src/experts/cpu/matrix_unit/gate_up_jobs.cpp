#include <algorithm>

#include "experts/cpu/matrix_unit/job_gemm.hpp"

namespace fusedmoe::cpu {
namespace {

/// Where a job's intermediate values are rounded as soon as they are known (MatrixUnit::direct_mid): the
/// tokens of its second GEMM.
class DirectMid {
 public:
  DirectMid(const JobContext& context, const TileJob& down) : context_(context), down_(down) {}

  /// Before the first columns come: scales of the tokens, which no whole row decides.
  void Begin() const {
    if (context_.plan().codes) {
      std::fill_n(const_cast<float*>(down_.scale), down_.num_tokens, tensor_scale());
    }
  }

  /// Sixteen columns of up to 16 tokens of a tile.
  void Store(int64_t stripe, int64_t first_token, int64_t tokens, const float* values) const {
    const int64_t k = stripe * kPanelRows;
    if (context_.plan().codes) {
      kernels().pack_nvfp4(values, tensor_scale(), tokens, TileAt(first_token, k), k);
    } else {
      kernels().pack_block(values, tokens, TileAt(first_token, k), k, format().shift, format().permuted);
    }
  }

  /// Zeros in the columns that no stripe of gate and up computes.
  void ClearPadding() const {
    static constexpr float kZeros[16 * kPanelRows] = {};
    const CpuPlan& plan = context_.layer.plan;
    const int64_t tokens = TileTokens(down_.num_tokens);
    for (int64_t k = plan.gate_up.padded_rows(); k < plan.down.padded_cols; k += kPanelRows) {
      for (int64_t token = 0; token < down_.num_tokens; token += tokens) {
        kernels().pack_block(kZeros, std::min(tokens, down_.num_tokens - token), TileAt(token, k), k,
                             format().shift, format().permuted);
      }
    }
  }

  float tensor_scale() const {
    return context_.layer.activation.static_tensor_scale
               ? context_.layer.expert(down_.expert).input[kMid].tensor_scale
               : 1.0F;
  }

 private:
  const TileKernels& kernels() const { return *context_.unit.kernels; }
  const TileFormat& format() const { return context_.unit.gemms[kDown].format; }
  uint8_t* TileAt(int64_t token, int64_t k) const {
    return const_cast<uint8_t*>(down_.tokens) +
           TileTokenOffset(context_.gemm(kDown).row_bytes, down_.num_tokens, token) +
           k / 32 * TileStepBytes(down_.num_tokens);
  }

  const JobContext& context_;
  const TileJob& down_;
};

/// Sums of gate and up of 16 columns, or of 32 columns of up, on their way to the second GEMM. Finished a few
/// tokens at a time between tile instructions: what does not change with the token is ready.
struct GateUpFinish {
  const JobContext& context;
  TileJob job{}, down{};
  TileParams params{};
  int64_t stripe = 0, count = 0;     // of columns of the intermediate
  ActivateArguments arguments[2]{};  // of each
  TileSilu silu{};

  static void Begin(void* self, const TileJob* job, int64_t first_stripe) {
    auto& to = *static_cast<GateUpFinish*>(self);
    const JobContext& context = to.context;
    const GemmShape& shape = context.layer.plan.gate_up;
    to.job = *job;
    to.down = context.run.jobs.list[kDown][job->index];
    to.params = {job->scale, reinterpret_cast<const int32_t*>(job->sum)};
    to.stripe = first_stripe / shape.parts;
    to.count = shape.parts == 2 ? 1 : std::min<int64_t>(2, shape.stripes - first_stripe);
    if (context.unit.direct_mid) {
      const DirectMid mid(context, to.down);
      if (to.stripe == 0) {
        mid.Begin();
      }
      if (to.stripe + to.count == shape.stripes) {
        mid.ClearPadding();
      }
    }
    const MatrixPanels& matrix = context.layer.expert(job->expert).gate_up;
    const float* row_scale =
        context.unit.RowScales(context.layer, job->expert, kGateUp) + first_stripe * kPanelRows;
    const float* bias = matrix.bias == nullptr ? nullptr : matrix.bias + first_stripe * kPanelRows;
    context.unit.silu != nullptr ? to.BeginSilu(row_scale, bias) : to.BeginOther(row_scale, bias);
  }

  void BeginSilu(const float* row_scale, const float* bias) {
    static constexpr float kZeros[2 * kPanelRows] = {};
    const float* biases = bias == nullptr ? kZeros : bias;
    const MidRows mid = MidRowsOf(context, job);
    silu.params = params;
    silu.gate_scale = row_scale;
    silu.up_scale = row_scale + kPanelRows;
    silu.gate_bias = biases;
    silu.up_bias = biases + kPanelRows;
    silu.k = stripe * kPanelRows;
    silu.mid = const_cast<uint8_t*>(down.tokens);
    silu.num_tokens = down.num_tokens;
    silu.row_bytes = context.gemm(kDown).row_bytes;
    silu.shift = context.unit.gemms[kDown].format.shift;
    silu.permuted = context.unit.gemms[kDown].format.permuted;
    silu.tensor_scale = DirectMid(context, down).tensor_scale();
    silu.rows = mid.first + stripe * mid.block_stride;
    silu.row_stride = mid.token_stride;
  }

  void BeginOther(const float* row_scale, const float* bias) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t up = (gated() ? 1 : i) * kPanelRows;
      ActivateArguments& to = arguments[i];
      SetActivation(context.layer, to);
      to.gate_row_scale = row_scale;
      to.gate_bias = bias;
      to.up_row_scale = row_scale + up;
      to.up_bias = bias == nullptr ? nullptr : bias + up;
      to.mid_stride = context.unit.direct_mid ? kPanelRows : MidRowsOf(context, job).token_stride;
    }
  }

  /// Of BeginOther.
  static void Finish(void* self, int64_t first_token, int64_t tokens, float* first, float* second) {
    auto& to = *static_cast<GateUpFinish*>(self);
    const MatrixUnit& unit = to.context.unit;
    const MidRows mid = MidRowsOf(to.context, to.job);
    unit.kernels->scale[unit.gemms[kGateUp].sums](&to.params, first_token, tokens, first, second);
    alignas(64) float values[16 * kPanelRows];
    for (int64_t i = 0; i < to.count; ++i) {
      ActivateArguments& arguments = to.arguments[i];
      arguments.gate = to.gated() ? first : nullptr;
      arguments.up = to.gated() || i == 1 ? second : first;
      arguments.tokens = static_cast<int>(tokens);
      arguments.mid = unit.direct_mid
                          ? values
                          : mid.first + first_token * mid.token_stride + (to.stripe + i) * mid.block_stride;
      to.context.layer.kernels->activate(&arguments);
      if (unit.direct_mid) {
        DirectMid(to.context, to.down).Store(to.stripe + i, first_token, tokens, values);
      }
    }
  }

  bool gated() const { return context.layer.plan.gate_up.parts == 2; }
};

}  // namespace

void GateUpJobs(const JobContext& context, const Workers& workers, const JobGroup& group) {
  const MatrixUnit& unit = context.unit;
  const bool silu = unit.silu != nullptr;
  const int64_t tokens = silu || (context.plan().codes && unit.direct_mid) ? kTickTokens : 1;
  ForJobStripes(context, workers, group, kGateUp, [&](const JobStripes& stripes, const JobScratch& scratch) {
    GateUpFinish of{context};
    MultiplyJobs(context, kGateUp, stripes, scratch,
                 {&GateUpFinish::Begin, &of, silu ? unit.silu : &GateUpFinish::Finish,
                  silu ? static_cast<void*>(&of.silu) : &of, tokens});
  });
}

}  // namespace fusedmoe::cpu
