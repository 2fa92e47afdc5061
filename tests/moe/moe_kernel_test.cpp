#include "moe/moe_kernel.hpp"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "moe/weight_and_reduce.hpp"

namespace fusedmoe {
namespace {

// Writes one constant into every element and notes that it ran.
class ConstantExperts final : public Experts {
 public:
  ConstantExperts(ExpertsTraits traits, float value, std::string* journal, std::string word)
      : traits_(traits), value_(value), journal_(journal), word_(std::move(word)) {}
  const ExpertsTraits& traits() const override { return traits_; }
  Status Apply(const ExpertsInput& /*input*/, MutableTensorView output, const Workspace& /*workspace*/,
               const Executor& /*executor*/) const override {
    *journal_ += word_ + " ";
    for (int64_t index = 0; index < output.count(); ++index) {
      output.as<float>()[index] = value_;
    }
    return Status::Ok();
  }

 private:
  ExpertsTraits traits_;
  float value_;
  std::string* journal_;
  std::string word_;
};

// Passes rows through; asynchronous or not.
class JournalOuter final : public PrepareFinalize {
 public:
  JournalOuter(std::string* journal, bool asynchronous,
               ActivationFormatKind format = ActivationFormatKind::kStandard)
      : journal_(journal), asynchronous_(asynchronous), format_(format) {}
  std::string_view name() const override { return "journal"; }
  ActivationFormatKind activation_format() const override { return format_; }
  int64_t max_rows() const override { return 4; }
  bool supports_async() const override { return asynchronous_; }
  Status Prepare(const PrepareInput& input, PrepareOutput& prepared, const Workspace& /*workspace*/,
                 const Executor& /*executor*/) const override {
    *journal_ += input.defer_quantization ? "prepare(deferred) " : "prepare ";
    prepared.rows.values = input.hidden;
    prepared.num_tokens = input.hidden.dim(0);
    prepared.topk_ids = input.topk_ids;
    prepared.topk_weights = input.topk_weights;
    return Status::Ok();
  }
  Status FinalizeStart(const FinalizeInput& /*input*/, const Workspace& /*workspace*/,
                       const Executor& /*executor*/) const override {
    *journal_ += "start ";
    return Status::Ok();
  }
  Status FinalizeWait(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                      const Executor& executor) const override {
    *journal_ += "wait ";
    return Copy(input, output, workspace, executor);
  }
  Status Finalize(const FinalizeInput& input, MutableTensorView output, const Workspace& workspace,
                  const Executor& executor) const override {
    *journal_ += "finalize ";
    return Copy(input, output, workspace, executor);
  }

 private:
  static Status Copy(const FinalizeInput& input, MutableTensorView output, const Workspace& /*workspace*/,
                     const Executor& executor) {
    WeightAndReduceInput reduce;
    reduce.expert_output = input.expert_output;
    reduce.num_tokens = input.num_tokens;
    return WeightAndReduce(WeightAndReduceKind::kNoOp, reduce, output, executor);
  }
  std::string* journal_;
  bool asynchronous_;
  ActivationFormatKind format_;
};

MoeConfig SmallConfig() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 2;
  config.hidden = 3;
  config.intermediate = 4;
  config.max_tokens = 4;
  return config;
}

std::unique_ptr<MoeKernel> MakeShared(std::string* journal, WorkspaceBook& book) {
  MoeKernel::Parts parts;
  parts.config = SmallConfig();
  static std::string quiet;  // the inner prepare and finalize are not what the journal is about
  parts.prepare_finalize = std::make_unique<JournalOuter>(&quiet, false);
  parts.experts = std::make_unique<ConstantExperts>(ExpertsTraits{}, 2.0F, journal, "shared");
  return *MoeKernel::Create(std::move(parts), book);
}

struct Outcome {
  std::string journal;
  std::vector<float> output = std::vector<float>(6, -1.0F);
};

Outcome RunWithShared(bool asynchronous, Tensor gate) {
  Outcome run;
  WorkspaceBook book;
  MoeKernel::Parts parts;
  parts.config = SmallConfig();
  parts.prepare_finalize = std::make_unique<JournalOuter>(&run.journal, asynchronous);
  parts.experts = std::make_unique<ConstantExperts>(ExpertsTraits{}, 10.0F, &run.journal, "experts");
  parts.shared = MakeShared(&run.journal, book);
  parts.shared_gate = std::move(gate);
  const auto kernel = *MoeKernel::Create(std::move(parts), book);
  const Workspace workspace = *Workspace::Allocate(book.total_bytes());
  const std::vector<float> hidden(6, 1.0F);
  const int32_t ids[] = {0, 1};
  const float weights[] = {1.0F, 1.0F};
  KernelInput input;
  input.hidden = TensorView(reinterpret_cast<const std::byte*>(hidden.data()), DType::kF32, {2, 3});
  input.topk_ids = ids;
  input.topk_weights = weights;
  const MutableTensorView output(reinterpret_cast<std::byte*>(run.output.data()), DType::kF32, {2, 3});
  EXPECT_TRUE(kernel->Forward(input, output, workspace, Executor{}).ok());
  return run;
}

TEST(MoeKernelOrder, SharedExpertsRunWhileAnAsynchronousFinalizeIsInFlight) {
  const Outcome run = RunWithShared(true, Tensor());
  EXPECT_EQ(run.journal, "prepare experts start shared wait ");
  EXPECT_EQ(run.output, std::vector<float>(6, 12.0F));
}

TEST(MoeKernelOrder, WithoutAsynchronyEverythingStillRunsOnce) {
  const Outcome run = RunWithShared(false, Tensor());
  EXPECT_EQ(run.journal, "prepare experts shared finalize ");
  EXPECT_EQ(run.output, std::vector<float>(6, 12.0F));
}

TEST(MoeKernelOrder, SharedGateScalesTheSharedOutput) {
  Tensor gate = *Tensor::Allocate(DType::kF32, {3});  // zero gate: sigmoid(0) = 1/2
  const Outcome run = RunWithShared(false, std::move(gate));
  EXPECT_EQ(run.output, std::vector<float>(6, 11.0F));
}

TEST(MoeKernelCreate, RefusesPartsWhoseActivationFormatsDiffer) {
  std::string journal;
  WorkspaceBook book;
  MoeKernel::Parts parts;
  parts.config = SmallConfig();
  parts.prepare_finalize =
      std::make_unique<JournalOuter>(&journal, false, ActivationFormatKind::kBatchedExperts);
  parts.experts = std::make_unique<ConstantExperts>(ExpertsTraits{}, 1.0F, &journal, "experts");
  const auto kernel = MoeKernel::Create(std::move(parts), book);
  ASSERT_FALSE(kernel.ok());
  EXPECT_EQ(kernel.status().code(), StatusCode::kUnsupported);
  EXPECT_NE(kernel.status().message().find("BatchedExperts"), std::string::npos);
}

TEST(MoeKernelCreate, RefusesMonolithicExpertsBehindADispatch) {
  std::string journal;
  WorkspaceBook book;
  MoeKernel::Parts parts;
  parts.config = SmallConfig();
  parts.prepare_finalize = std::make_unique<JournalOuter>(&journal, false);
  ExpertsTraits traits;
  traits.monolithic = true;
  parts.experts = std::make_unique<ConstantExperts>(traits, 1.0F, &journal, "experts");
  EXPECT_EQ(MoeKernel::Create(std::move(parts), book).status().code(), StatusCode::kUnsupported);
}

TEST(WeightAndReduceKinds, ContiguousSkipsForeignSlotsAndAddsInSlotOrder) {
  // Token 0: slots (1, -1 id) and weights; one slot of token 1 belongs to another rank.
  const std::vector<float> rows = {1, 2, 100, 100, 3, 4, 5, 6};  // [2 tokens, 2 slots, H = 2]
  const int32_t ids[] = {0, -1, 1, 0};
  const float weights[] = {0.5F, 9.0F, 7.0F, 0.25F};
  const int32_t map[] = {0, -1};
  WeightAndReduceInput input;
  input.expert_output = TensorView(reinterpret_cast<const std::byte*>(rows.data()), DType::kF32, {2, 2, 2});
  input.topk_ids = ids;
  input.topk_weights = weights;
  input.expert_map = map;
  input.num_tokens = 2;
  input.top_k = 2;
  std::vector<float> output(4, -1.0F);
  const MutableTensorView view(reinterpret_cast<std::byte*>(output.data()), DType::kF32, {2, 2});
  ASSERT_TRUE(WeightAndReduce(WeightAndReduceKind::kContiguous, input, view, Executor{}).ok());
  EXPECT_EQ(output, (std::vector<float>{0.5F, 1.0F, 1.25F, 1.5F}));
  input.router_weight_on_input = true;
  ASSERT_TRUE(WeightAndReduce(WeightAndReduceKind::kContiguous, input, view, Executor{}).ok());
  EXPECT_EQ(output, (std::vector<float>{1.0F, 2.0F, 5.0F, 6.0F}));
  EXPECT_EQ(WeightAndReduce(WeightAndReduceKind::kDelegate, input, view, Executor{}).code(),
            StatusCode::kUnsupported);
}

}  // namespace
}  // namespace fusedmoe
