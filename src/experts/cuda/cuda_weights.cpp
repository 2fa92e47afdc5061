#include "experts/cuda/cuda_weights.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/checked_math.hpp"
#include "platform/cuda/card.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr std::string_view kInputByExpert = "input_by_expert";

/// Pinned memory of one set of experts at most; one expert always goes.
constexpr int64_t kMostPinnedBytes = int64_t{512} << 20;

/// The small vectors of all experts, on the host until the last expert is packed.
struct HostVectors {
  std::vector<float> gate_up_tensor, down_tensor, gate_up_row, down_row, gate_up_bias, down_bias;
  std::vector<float> input_scale, mid_scale, input_smoothing, mid_smoothing;
  std::vector<uint8_t> input_scales_differ;  ///< by expert: gate's and up's
};

HostVectors MakeVectors(const CudaPlan& plan, const FragmentSizes& sizes) {
  const auto experts = static_cast<size_t>(plan.shape.num_local_experts);
  const auto gate_up_rows = experts * static_cast<size_t>(sizes.parts * sizes.gate_up_rows);
  const auto down_rows = experts * static_cast<size_t>(sizes.down_rows);
  HostVectors host;
  host.gate_up_tensor.assign(experts * static_cast<size_t>(sizes.parts), 0.0F);
  host.down_tensor.assign(experts, 0.0F);
  if (plan.spec.row_scale) {
    host.gate_up_row.assign(gate_up_rows, 0.0F);
    host.down_row.assign(down_rows, 0.0F);
  }
  if (plan.has_bias) {
    host.gate_up_bias.assign(gate_up_rows, 0.0F);
    host.down_bias.assign(down_rows, 0.0F);
  }
  if (plan.activation.static_tensor_scale) {
    host.input_scale.assign(experts, 1.0F);
    host.mid_scale.assign(experts, 1.0F);
    host.input_scales_differ.assign(experts, 0);
  }
  return host;
}

/// `base` of expert e, `count` values apart; null where there are none.
float* Of(std::vector<float>& values, int64_t expert, int64_t count) {
  return values.empty() ? nullptr : values.data() + expert * count;
}

/// Static input scales: kernels multiply by them together with the tensor scale. Gate and up share the input,
/// so that one scale quantizes it: the larger.
void TakeInputScales(const CanonicalExpert& expert, int64_t index, const FragmentSizes& sizes,
                     HostVectors& host) {
  if (host.input_scale.empty()) {
    return;
  }
  const auto at = static_cast<size_t>(index);
  const bool gated = !expert.gate.empty();
  const float up = expert.up.input_tensor_scale.value_or(1.0F);
  const float gate = gated ? expert.gate.input_tensor_scale.value_or(1.0F) : up;
  host.input_scales_differ[at] = gate != up ? 1 : 0;
  host.input_scale[at] = std::max(gate, up);
  host.mid_scale[at] = expert.down.input_tensor_scale.value_or(1.0F);
  for (int64_t part = 0; part < sizes.parts; ++part) {
    host.gate_up_tensor[static_cast<size_t>(index * sizes.parts + part)] *= host.input_scale[at];
  }
  host.down_tensor[at] *= host.mid_scale[at];
}

Status CheckSmoothing(const CanonicalExpert& expert) {
  const Tensor& gate = expert.gate.pre_quant_scale;
  const Tensor& up = expert.up.pre_quant_scale;
  if (expert.gate.empty()) {
    return Status::Ok();
  }
  const bool same = gate.empty() == up.empty() &&
                    (gate.empty() || std::memcmp(gate.view().data(), up.view().data(),
                                                 static_cast<size_t>(gate.view().total_bytes())) == 0);
  return same ? Status::Ok()
              : Status::Unsupported(
                    "gate and up smooth their common input by different factors (pre_quant_scale)");
}

void CopySmoothing(const Tensor& scale, int64_t index, int64_t cols, int64_t experts,
                   std::vector<float>& out) {
  if (scale.empty()) {
    return;
  }
  if (out.empty()) {
    out.assign(static_cast<size_t>(experts * cols), 1.0F);
  }
  std::memcpy(out.data() + index * cols, scale.view().data(), static_cast<size_t>(cols) * sizeof(float));
}

/// Copies named tensors to the card and keeps them.
class Shelf {
 public:
  explicit Shelf(PreparedWeights& prepared) : prepared_(prepared) {}

  Result<std::byte*> Reserve(std::string_view name, DType dtype, const Shape& shape) {
    const TensorView sizes(nullptr, dtype, shape);
    FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, AllocateOnDevice(sizes.total_bytes(), name));
    std::byte* data = memory.get();
    prepared_.tensors.push_back({std::string(name), Tensor::Borrow(TensorView(data, dtype, shape),
                                                                   std::shared_ptr<const void>(memory))});
    return data;
  }

  Status Put(std::string_view name, const std::vector<float>& values) {
    if (values.empty()) {
      return Status::Ok();
    }
    const auto count = static_cast<int64_t>(values.size());
    FMOE_ASSIGN_OR_RETURN(std::byte * data, Reserve(name, DType::kF32, {count}));
    FMOE_RETURN_IF_ERROR(CopyToDevice(data, values.data(), count * 4, nullptr));
    return Synchronize(nullptr);
  }

 private:
  PreparedWeights& prepared_;
};

Status CheckMemory(const CudaPlan& plan) {
  FMOE_ASSIGN_OR_RETURN(const MemoryFigures figures, ReadMemory());
  const int64_t needed = DeviceWeightBytes(plan);
  if (needed > figures.free_bytes) {
    return Status::System(
        fmt::format("the card has too little memory for the weights: needed {} bytes, free {} of {}", needed,
                    figures.free_bytes, figures.total_bytes));
  }
  return Status::Ok();
}

bool AllEqual(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [&](float value) { return value == values.front(); });
}

const float* Floats(const PreparedWeights& weights, std::string_view name) {
  const Tensor* tensor = weights.Find(name);
  return tensor == nullptr ? nullptr : tensor->view().as<float>();
}

}  // namespace

Result<PreparedWeights> PrepareCudaWeights(const CudaPlan& plan, const ExpertSource& source,
                                           const Executor& executor) {
  FMOE_RETURN_IF_ERROR(CheckCard(HostMachine()));
  FMOE_RETURN_IF_ERROR(CheckMemory(plan));
  const int64_t experts = source.num_local_experts;
  const FragmentSizes sizes =
      FragmentSizesOf(plan.spec, plan.shape.hidden, plan.shape.intermediate, plan.shape.gated());
  PreparedWeights prepared;
  prepared.layout_key = "cuda:" + plan.spec.ToString();
  prepared.recipe = CudaRecipe(plan);
  Shelf shelf(prepared);
  FMOE_ASSIGN_OR_RETURN(std::byte * gate_up,
                        shelf.Reserve("gate_up", DType::kU8, {experts, sizes.gate_up_bytes}));
  FMOE_ASSIGN_OR_RETURN(std::byte * down, shelf.Reserve("down", DType::kU8, {experts, sizes.down_bytes}));
  HostVectors host = MakeVectors(plan, sizes);

  const int64_t expert_bytes = RoundUp(sizes.gate_up_bytes + sizes.down_bytes, 256);
  const int64_t set =
      std::clamp<int64_t>(std::min<int64_t>(std::max(executor.num_threads, 1),
                                            kMostPinnedBytes / std::max<int64_t>(expert_bytes, 1)),
                          1, std::max<int64_t>(experts, 1));
  FMOE_ASSIGN_OR_RETURN(const std::unique_ptr<Uploader> uploader, Uploader::Create(set * expert_bytes));
  std::vector<CanonicalExpert> loaded(static_cast<size_t>(set));
  for (int64_t first = 0; first < experts; first += set) {
    const int64_t count = std::min(set, experts - first);
    FMOE_ASSIGN_OR_RETURN(std::byte * buffer, uploader->NextBuffer());
    std::vector<Status> statuses(static_cast<size_t>(count));
    ParallelFor(executor, count, [&](int64_t place) {
      const auto at = static_cast<size_t>(place);
      const int64_t index = first + place;
      Result<CanonicalExpert> expert = source.load(index);
      if (!expert.ok()) {
        statuses[at] = expert.status();
        return;
      }
      loaded[at] = *std::move(expert);
      statuses[at] = CheckSmoothing(loaded[at]);
      if (!statuses[at].ok()) {
        return;
      }
      FragmentOutput out;
      out.gate_up = reinterpret_cast<uint8_t*>(buffer + place * expert_bytes);
      out.down = out.gate_up + sizes.gate_up_bytes;
      out.gate_up_tensor_scale = Of(host.gate_up_tensor, index, sizes.parts);
      out.down_tensor_scale = Of(host.down_tensor, index, 1);
      out.gate_up_row_scale = Of(host.gate_up_row, index, sizes.parts * sizes.gate_up_rows);
      out.down_row_scale = Of(host.down_row, index, sizes.down_rows);
      out.gate_up_bias = Of(host.gate_up_bias, index, sizes.parts * sizes.gate_up_rows);
      out.down_bias = Of(host.down_bias, index, sizes.down_rows);
      statuses[at] = PackFragmentExpert(loaded[at], plan.spec, out);
      TakeInputScales(loaded[at], index, sizes, host);
    });
    for (int64_t place = 0; place < count; ++place) {
      const auto at = static_cast<size_t>(place);
      const int64_t index = first + place;
      if (!statuses[at].ok()) {
        return std::move(statuses[at]).WithContext(fmt::format("expert {}", index));
      }
      CopySmoothing(loaded[at].up.pre_quant_scale, index, plan.shape.hidden, experts, host.input_smoothing);
      CopySmoothing(loaded[at].down.pre_quant_scale, index, plan.shape.intermediate, experts,
                    host.mid_smoothing);
      loaded[at] = CanonicalExpert{};
      const int64_t offset = place * expert_bytes;
      FMOE_RETURN_IF_ERROR(
          uploader->Send(gate_up + index * sizes.gate_up_bytes, offset, sizes.gate_up_bytes));
      FMOE_RETURN_IF_ERROR(
          uploader->Send(down + index * sizes.down_bytes, offset + sizes.gate_up_bytes, sizes.down_bytes));
    }
  }
  FMOE_RETURN_IF_ERROR(uploader->Finish());
  const auto put = [&](std::string_view name, const std::vector<float>& values) {
    return shelf.Put(name, values);
  };
  FMOE_RETURN_IF_ERROR(put("gate_up_tensor_scale", host.gate_up_tensor));
  FMOE_RETURN_IF_ERROR(put("down_tensor_scale", host.down_tensor));
  FMOE_RETURN_IF_ERROR(put("gate_up_row_scale", host.gate_up_row));
  FMOE_RETURN_IF_ERROR(put("down_row_scale", host.down_row));
  FMOE_RETURN_IF_ERROR(put("gate_up_bias", host.gate_up_bias));
  FMOE_RETURN_IF_ERROR(put("down_bias", host.down_bias));
  FMOE_RETURN_IF_ERROR(put("input_tensor_scale", host.input_scale));
  FMOE_RETURN_IF_ERROR(put("mid_tensor_scale", host.mid_scale));
  FMOE_RETURN_IF_ERROR(put("input_smoothing", host.input_smoothing));
  FMOE_RETURN_IF_ERROR(put("mid_smoothing", host.mid_smoothing));
  if (std::any_of(host.input_scales_differ.begin(), host.input_scales_differ.end(),
                  [](uint8_t one) { return one != 0; })) {
    prepared.recipe.push_back("max_input_scale()");
  }
  if (!host.input_smoothing.empty() || (!host.input_scale.empty() && !AllEqual(host.input_scale))) {
    FMOE_RETURN_IF_ERROR(shelf.Put(kInputByExpert, {1.0F}));
  }
  // Scales beside zero points keep 15 bits of their mantissa: exact for 16-bit scales.
  const bool short_scales = FragmentTraitsOf(plan.spec.format).scale == FragmentScale::kF32Zero &&
                            source.scheme.weight.block_scale_dtype == DType::kF32;
  prepared.layout_error = short_scales ? 0x1p-17 : 0.0;
  return prepared;
}

Result<CudaWeights> FindCudaWeights(const CudaPlan& plan, const PreparedWeights& weights) {
  if (weights.layout_key != "cuda:" + plan.spec.ToString()) {
    return Status::Unsupported(fmt::format("CUDA_FUSED reads weights in layout 'cuda:{}', these are in '{}'",
                                           plan.spec.ToString(), weights.layout_key));
  }
  CudaWeights found;
  found.kernels.gate_up.blocks = weights.Find("gate_up")->view().as<uint8_t>();
  found.kernels.down.blocks = weights.Find("down")->view().as<uint8_t>();
  found.kernels.gate_up.tensor_scale = Floats(weights, "gate_up_tensor_scale");
  found.kernels.down.tensor_scale = Floats(weights, "down_tensor_scale");
  found.kernels.gate_up.row_scale = Floats(weights, "gate_up_row_scale");
  found.kernels.down.row_scale = Floats(weights, "down_row_scale");
  found.kernels.gate_up.bias = Floats(weights, "gate_up_bias");
  found.kernels.down.bias = Floats(weights, "down_bias");
  found.kernels.half_scale_is_f16 = plan.spec.half_scale == DType::kF16;
  found.input_scale = Floats(weights, "input_tensor_scale");
  found.mid_scale = Floats(weights, "mid_tensor_scale");
  found.input_smoothing = Floats(weights, "input_smoothing");
  found.mid_smoothing = Floats(weights, "mid_smoothing");
  found.input_by_expert = weights.Find(kInputByExpert) != nullptr;
  return found;
}

}  // namespace fusedmoe::cuda
