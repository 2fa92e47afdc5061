#pragma once

#include <memory>
#include <vector>

#include "experts/contracts/common/contract.hpp"
#include "experts/contracts/common/weight_rows.hpp"
#include "moe/experts.hpp"

namespace fusedmoe {

/// A named backend's experts: weights from its own prepared bytes, activations quantized where its contract
/// does, sums in fp64, the values between the GEMMs in fp32 (or 16 bits). Standard: weighted and reduced in
/// the order of experts (kNoOp). BatchedExperts: [E_local, rows, H] unweighted (kDelegate).
class ContractExperts final : public Experts {
 public:
  struct Slots {
    WorkspaceSlot lists, ids, weights, input, codes, mid, sums;
  };
  static void BookWorkspace(const Contract& contract, const MoeProblem& problem, WorkspaceBook& book,
                            Slots& slots);
  static Result<std::unique_ptr<Experts>> Create(const Contract& contract, const MoeProblem& problem,
                                                 std::shared_ptr<const PreparedWeights> weights,
                                                 WorkspaceBook& book);

  const ExpertsTraits& traits() const override { return traits_; }
  Status Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
               const Executor& executor) const override;

 private:
  // Rows of the batch by local expert.
  struct Batch {
    int32_t* offsets = nullptr;  // [E_local + 1]
    int32_t* rows = nullptr;     // slots (Standard) or rows of the batched format, by expert
    const ExpertRows* source = nullptr;
    const float* weights = nullptr;  // by slot; null: 1
    const int32_t* ids = nullptr;
    int64_t rows_per_token = 1;
    int64_t num_tokens = 0;
    bool weight_input = false;
    float input_scale = 1.0F, mid_scale = 1.0F;  // of the batch, where the scheme has one
  };

  ContractExperts(const Contract& contract, const MoeProblem& problem,
                  std::shared_ptr<const PreparedWeights> weights);
  Status TakeScales(const LayoutRecipe& recipe);
  Status Route(const ExpertsInput& input, Batch& batch, const Workspace& workspace,
               const Executor& executor) const;
  Status FillBatch(const ExpertsInput& input, int64_t rows_per_expert, Batch& batch,
                   const Workspace& workspace) const;
  void LoadRow(const Batch& batch, int32_t row, float* out) const;
  /// What GEMM `projection` (0 gate, 1 up, 2 down) of an expert reads, from plain values, in place.
  void Quantize(int64_t expert, int projection, float batch_scale, int64_t count, std::byte* codes,
                float* values) const;
  double Factor(int64_t expert, int projection, float batch_scale) const;
  void MultiplyRow(const WeightRows& weights, int64_t expert, int64_t row, float tensor_scale,
                   const float* inputs, int64_t count, double factor, double* sums) const;
  float BatchScale(const Batch& batch, int64_t width, const float* mid, float* scratch) const;
  void GateUp(int64_t expert, const Batch& batch, const Workspace& workspace, const Executor& executor) const;
  void Down(int64_t expert, const Batch& batch, MutableTensorView output, const Workspace& workspace,
            const Executor& executor) const;
  float Rounded(double value) const;

  const Contract& contract_;
  MoeConfig config_;
  ActivationFormat activation_;
  DType sixteen_bit_ = DType::kF32;  ///< kF32: nothing is rounded
  std::shared_ptr<const PreparedWeights> weights_;
  ExpertsTraits traits_;
  Slots slots_;
  WeightRows gate_up_, down_;
  std::vector<float> tensor_scale_[3], input_scale_[3], output_scale_[2];  // by expert; empty: 1
  bool one_input_ = true;  ///< gate and up read the same quantized rows
  int64_t code_bytes_ = 0;
};

}  // namespace fusedmoe
