#pragma once

#include <memory>
#include <vector>

#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/cpu_weights.hpp"
#include "moe/experts.hpp"

namespace fusedmoe::cpu {

/// The experts of a layer on panels:
///
///   slots sorted by expert ─► tiles of 1-16 tokens ─► pack ─► gate/up + activation ─► pack ─► down ─►
///   weighted sum
///
/// Both GEMMs are split by output columns: a task computes its columns for all experts, so that tasks are
/// equal however tokens are distributed, and every output is added up by one task in ascending order of
/// experts.
class CpuExperts final : public Experts {
 public:
  static Result<std::unique_ptr<Experts>> Create(const MoeProblem& problem, const Machine& machine,
                                                 std::shared_ptr<const PreparedWeights> weights,
                                                 WorkspaceBook& book);

  const ExpertsTraits& traits() const override { return traits_; }
  Status Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
               const Executor& executor) const override;

  /// The kernel table that runs, for tests: forcing an instruction set must show here.
  const KernelTable& table() const { return *table_; }

 private:
  struct Run;  // one Apply

  CpuExperts() = default;
  Status CheckInput(const ExpertsInput& input, const MutableTensorView& output) const;
  void RunPiece(Run& run) const;
  Status SortTokens(const ExpertsInput& input, int64_t first_token, int64_t count, Run& run) const;
  void TakeBatchedRows(const ExpertsInput& input, int64_t& expert, int64_t& row, Run& run) const;
  void MakeTiles(Run& run) const;
  void PackTiles(Run& run, const GemmShape& shape, int part) const;
  void PackTokens(Run& run, const GemmShape& shape, int part) const;
  void PackTile(Run& run, const GemmShape& shape, int part, const Tile& tile, int64_t task) const;
  void PackRow(const Run& run, const GemmShape& shape, const InputTransform& transform, int64_t slot,
               float* row_buffer, std::byte* out) const;
  float BatchScale(Run& run, const GemmShape& shape) const;
  void LoadRow(const Run& run, const GemmShape& shape, int64_t slot, float* row) const;
  const float* FinishRow(const Run& run, const GemmShape& shape, const InputTransform& transform,
                         float* row) const;
  void QuantizeToCodes(const Run& run, const GemmShape& shape, const InputTransform& transform, int64_t slot,
                       float* row, std::byte* buffer, PackCodesArguments& arguments) const;
  TileView View(const GemmShape& shape, std::byte* memory, int height) const;
  void PrefetchStripes(const uint8_t* stripes) const;
  int64_t EndOfBatch(const Run& run, const GemmShape& shape, int64_t begin) const;
  void GateUp(Run& run) const;
  void GateUpStripe(Run& run, int64_t expert_tile_begin, int64_t expert_tile_end, int64_t stripe,
                    int pass) const;
  void Down(Run& run) const;
  void DownColumns(Run& run, int64_t first_stripe, int64_t end_stripe) const;

  MoeProblem problem_;
  CpuPlan plan_;
  CpuSlots slots_;
  const KernelTable* table_ = nullptr;
  std::shared_ptr<const PreparedWeights> weights_;
  std::vector<ExpertPanels> experts_;
  ActivationFormat activation_;  ///< what rows are rounded to; not quantized: they stay
  /// Gate and up see different inputs in some expert: they are multiplied one after the other.
  bool separate_inputs_ = false;
  /// All experts see the same input of gate, and of up: a token is packed once, not once an expert.
  bool shared_inputs_[2] = {true, true};
  ExpertsTraits traits_;
};

}  // namespace fusedmoe::cpu
