#include "experts/cuda/float32/float32_experts.hpp"

#include <fmt/format.h>

#include <utility>

#include "experts/cuda/device_call.hpp"
#include "experts/cuda/float32/float32.hpp"
#include "platform/cuda/card.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr std::string_view kLayoutKey = "cuda:float32";

class Float32Experts final : public Experts {
 public:
  Float32Experts(const CudaPlan& plan, std::shared_ptr<const PreparedWeights> prepared, WorkspaceSlot scratch,
                 ExpertsTraits traits)
      : plan_(plan), prepared_(std::move(prepared)), scratch_(scratch), traits_(traits) {
    const auto floats = [&](std::string_view name) {
      const Tensor* tensor = prepared_->Find(name);
      return tensor == nullptr ? nullptr : tensor->view().as<float>();
    };
    weights_ = {floats("gate_up"), floats("down"), floats("gate_up_bias"), floats("down_bias")};
  }

  const ExpertsTraits& traits() const override { return traits_; }

  Status Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
               const Executor& executor) const override {
    FMOE_ASSIGN_OR_RETURN(ExpertsCall call, MakeCall(plan_, input, output, executor));
    if (call.num_tokens == 0) {
      return Status::Ok();
    }
    call.scratch = Piece<std::byte>(workspace, scratch_);
    const TensorView& values = input.rows.values;
    Float32Rows rows;
    rows.values = values.data();
    rows.dtype = values.dtype();
    rows.stride = values.stride_bytes(values.rank() - 2) / (DTypeBits(values.dtype()) / 8);
    rows.weights = plan_.weights_input && !plan_.shape.batched ? call.topk_weights : nullptr;
    return LaunchFloat32(plan_.shape, weights_, rows, call);
  }

 private:
  CudaPlan plan_;
  std::shared_ptr<const PreparedWeights> prepared_;
  Float32Weights weights_;
  WorkspaceSlot scratch_;
  ExpertsTraits traits_;
};

/// All experts' matrices of one GEMM behind one another.
Result<Tensor> Reserve(std::string_view name, const Shape& shape) {
  const TensorView sizes(nullptr, DType::kF32, shape);
  FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, AllocateOnDevice(sizes.total_bytes(), name));
  const TensorView view(memory.get(), DType::kF32, shape);
  return Tensor::Borrow(view, std::shared_ptr<const void>(std::move(memory)));
}

}  // namespace

Result<PreparedWeights> PrepareFloat32Weights(const CudaPlan& plan, const ExpertSource& source,
                                              const Executor& /*executor*/) {
  FMOE_RETURN_IF_ERROR(CheckCard(HostMachine()));
  const LayerShape& shape = plan.shape;
  const int64_t experts = source.num_local_experts, parts = shape.parts();
  PreparedWeights prepared;
  prepared.layout_key = kLayoutKey;
  prepared.recipe = CudaRecipe(plan);
  const auto add = [&](std::string_view name, const Shape& sizes) -> Status {
    FMOE_ASSIGN_OR_RETURN(Tensor tensor, Reserve(name, sizes));
    prepared.tensors.push_back({std::string(name), std::move(tensor)});
    return Status::Ok();
  };
  FMOE_RETURN_IF_ERROR(add("gate_up", {experts, parts, shape.intermediate, shape.hidden}));
  FMOE_RETURN_IF_ERROR(add("down", {experts, 1, shape.hidden, shape.intermediate}));
  if (plan.has_bias) {
    FMOE_RETURN_IF_ERROR(add("gate_up_bias", {experts, parts, shape.intermediate}));
    FMOE_RETURN_IF_ERROR(add("down_bias", {experts, 1, shape.hidden}));
  }
  /// Rows of `from` to place `at` of a tensor.
  const auto put = [&](std::string_view name, int64_t at, const Tensor& from) -> Status {
    const Tensor* to = prepared.Find(name);
    if (to == nullptr || from.empty()) {
      return Status::Ok();
    }
    const TensorView view = from.view();
    auto* target = const_cast<std::byte*>(to->view().data()) + at * view.total_bytes();
    const int64_t rows = view.rank() == 1 ? 1 : view.dim(0);
    return CopyRowsToDevice(target, view.row_bytes(), view.data(),
                            rows == 1 ? view.row_bytes() : view.stride_bytes(0), view.row_bytes(), rows,
                            nullptr);
  };
  for (int64_t index = 0; index < experts; ++index) {
    Result<CanonicalExpert> loaded = source.load(index);
    if (!loaded.ok()) {
      return std::move(loaded).status().WithContext(fmt::format("expert {}", index));
    }
    for (CanonicalMatrix* matrix : {&loaded->gate, &loaded->up, &loaded->down}) {
      if (plan.decoded && !matrix->empty()) {
        FMOE_ASSIGN_OR_RETURN(matrix->codes, DequantizeMatrix(*matrix));
      }
    }
    for (const auto& [matrix, part] : {std::pair{&loaded->gate, int64_t{0}}, {&loaded->up, parts - 1}}) {
      if (!matrix->empty()) {
        FMOE_RETURN_IF_ERROR(put("gate_up", index * parts + part, matrix->codes));
        FMOE_RETURN_IF_ERROR(put("gate_up_bias", index * parts + part, matrix->bias));
      }
    }
    FMOE_RETURN_IF_ERROR(put("down", index, loaded->down.codes));
    FMOE_RETURN_IF_ERROR(put("down_bias", index, loaded->down.bias));
    FMOE_RETURN_IF_ERROR(Synchronize(nullptr));  // the expert's memory goes
  }
  return prepared;
}

Result<std::unique_ptr<Experts>> CreateFloat32Experts(const MoeProblem& problem, const CudaPlan& plan,
                                                      std::shared_ptr<const PreparedWeights> weights,
                                                      WorkspaceBook& book) {
  if (weights->layout_key != kLayoutKey) {
    return Status::Unsupported(fmt::format("CUDA_FUSED reads weights in layout '{}', these are in '{}'",
                                           kLayoutKey, weights->layout_key));
  }
  ExpertsTraits traits;
  traits.activation_format = problem.config.activation_format;
  traits.expects_unquantized_inputs = true;
  traits.weights_own_input = !plan.shape.batched;
  traits.weight_and_reduce = plan.shape.batched ? WeightAndReduceKind::kDelegate : WeightAndReduceKind::kNoOp;
  const WorkspaceSlot scratch = BookCudaSlots(plan, false, book).scratch;
  return std::unique_ptr<Experts>(
      std::make_unique<Float32Experts>(plan, std::move(weights), scratch, traits));
}

}  // namespace fusedmoe::cuda
