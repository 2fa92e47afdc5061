#pragma once

#include <memory>
#include <vector>

#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/cpu_weights.hpp"
#include "moe/experts.hpp"

namespace fusedmoe::cpu {

/// True when both make the same of a row.
bool SameInput(const GemmShape& shape, const InputTransform& a, const InputTransform& b);

/// The experts of a layer on panels:
///
///   slots sorted by expert ─► tiles of 1-8 tokens ─► pack ─► gate/up + activation ─► pack ─► down ─►
///   weighted sum
///
/// Tasks of gate and up are some columns of some tokens of an expert. Those of down are columns for all
/// experts, so that they are equal however tokens are distributed, and every output is added up by one task
/// in ascending order of experts.
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
  const TileKernels* tiles() const { return tiles_; }

 private:
  struct Run;  // one Apply

  CpuExperts() = default;
  Status CheckInput(const ExpertsInput& input, const MutableTensorView& output) const;
  void OpenRun(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
               const Executor& executor, Run& run) const;
  Status ApplyBatched(const ExpertsInput& input, Run& run) const;
  void RunPiece(Run& run) const;
  Status SortTokens(const ExpertsInput& input, int64_t first_token, int64_t count, Run& run) const;
  void TakeBatchedRows(const ExpertsInput& input, int64_t& expert, int64_t& row, Run& run) const;
  void MakeTiles(Run& run) const;
  void PackTiles(Run& run, const GemmShape& shape, int part) const;
  static void NoteTokens(Run& run, int64_t first_slot, int64_t count);
  static int64_t NumberTokens(Run& run);
  void PackTokens(Run& run, const GemmShape& shape, int part) const;
  void PackTile(Run& run, const GemmShape& shape, int part, bool shared, const Tile& tile,
                int64_t task) const;
  void PackRow(const Run& run, const GemmShape& shape, const InputTransform& transform, int64_t slot,
               float* row_buffer, std::byte* out) const;
  const float* RowInPlace(const Run& run, const GemmShape& shape, const InputTransform& transform,
                          int64_t slot) const;
  float BatchScale(Run& run, const GemmShape& shape) const;
  float TensorScale(const Run& run, const InputTransform& transform) const;
  void LoadRow(const Run& run, const GemmShape& shape, const InputTransform& transform, int64_t slot,
               float* row) const;
  const float* FinishRow(const Run& run, const GemmShape& shape, const InputTransform& transform,
                         float* row) const;
  void PackBlocks(const Run& run, const GemmShape& shape, const InputTransform& transform, int64_t slot,
                  float* row, const TileView& view) const;
  const float* PackedOrder(const GemmShape& shape, const InputTransform& transform, float* row) const;
  int64_t ScaleIndex(const GemmShape& shape, int64_t g) const;
  void DecodeScales(const GemmShape& shape, float tensor_scale, const std::byte* stored, float* scales) const;
  void QuantizeToCodes(const Run& run, const GemmShape& shape, const InputTransform& transform, int64_t slot,
                       float* row, std::byte* buffer, PackCodesArguments& arguments) const;
  /// Where the weights end that a task reads in one piece, and where it reads on; null: nowhere.
  struct Stretch {
    const uint8_t* end;
    const uint8_t* next;
  };
  /// Stripes of one expert, `stride` bytes apart.
  struct Stripes {
    const uint8_t* first;
    int64_t count;
    int64_t stride;
  };
  struct Views;
  void View(const Run& run, const GemmShape& shape, int part, const Tile& tile, const Stretch& stretch,
            TileView& view) const;
  void ViewTiles(const Run& run, const GemmShape& shape, int first_part, int parts, int64_t tile_begin,
                 int64_t tile_end, int64_t ahead_bytes, const Stretch& stretch, Views& views) const;
  struct Division {
    int64_t batches, ranges;
  };
  Division GateUpDivision(const Run& run) const;
  int64_t DownRanges(const Run& run) const;
  void PrefetchSides(const float* scales, const float* biases, int64_t stripe, int64_t count) const;
  int64_t EndOfBatch(const Run& run, const GemmShape& shape, int64_t begin) const;
  void GateUp(Run& run) const;
  int64_t ColumnsAtOnce(const Run& run, const GemmShape& shape, int64_t tile_begin, int64_t tile_end) const;
  bool IsTall(const GemmShape& shape, const Tile& tile) const;
  int64_t TilesAtOnce(const Run& run, const GemmShape& shape, int64_t begin, int64_t end) const;
  void Multiply(const GemmShape& shape, const Tile& first, const TileView* views, int64_t count,
                const Stripes& stripes, float* sums) const;
  void GateUpStripes(Run& run, Views& views, int64_t stripe, int64_t num_stripes) const;
  void Down(Run& run) const;
  // The matrix unit: cpu_tiles.cpp.
  class TaskScratch;
  struct Crew;
  Status ChooseTiles();
  void PackJobTokens(Run& run, const Crew& crew) const;
  void PackJobs(Run& run, const Crew& crew, const JobGroup& group, int part) const;
  void GatherJobTile(const Run& run, const TileJob& job, int64_t first, int64_t end) const;
  struct PackTarget {
    uint8_t* token;
    int64_t step_bytes;
    float *scales, *sums;
    int64_t stride;
    const std::byte *codes, *code_scales;  ///< of a row that comes quantized
  };
  void QuantizeToValues(const GemmShape& shape, const PackTarget& target, float tensor_scale,
                        const float* row, float* values) const;
  void PackForJob(const Run& run, const GemmShape& shape, const InputTransform& transform,
                  const PackTarget& target, float* buffer) const;
  /// Intermediate rows of a job in fp32: 16 columns of a token, and floats to the next token and columns.
  struct MidRows {
    float* first;
    int64_t token_stride, block_stride;
  };
  MidRows MidRowsOf(const Run& run, const TileJob& job) const;
  void PackJobRow(const Run& run, const GemmShape& shape, int part, const TileJob& job, int64_t token,
                  float* buffer) const;
  // Its jobs: cpu_jobs.cpp.
  void MakeJobs(Run& run) const;
  void PlaceJobs(Run& run, const JobGroup& group, int64_t row) const;
  void RunJobs(Run& run) const;
  void RunGroupsApart(Run& run, JobGroup* groups, int64_t count) const;
  void RunGroup(Run& run, const Crew& crew, const JobGroup& group, int64_t row) const;
  void BeginOutputs(Run& run) const;
  void StoreOutputsOf(Run& run, const JobGroup& group) const;
  bool SlotsWait(const Run& run) const;
  void AddSlotSums(Run& run, const JobGroup& jobs, bool first, bool last) const;
  const float* TileScales(int64_t expert, int gemm) const;
  const TileFormat& TileFormatOf(const GemmShape& shape) const {
    return tile_formats_[&shape == &plan_.down ? 1 : 0];
  }
  template <typename Gemm>
  void ForStripes(Run& run, const Crew& crew, const JobGroup& group, const TileJob* jobs, int64_t stripes,
                  const Gemm& gemm) const;
  void RunGemm(const GemmShape& shape, const TileJob* jobs, int64_t num_jobs, int64_t first_pair,
               int64_t end_pair, const TaskScratch& scratch, TileGemm gemm) const;
  void GateUpJobs(Run& run, const Crew& crew, const JobGroup& group) const;
  void DownJobs(Run& run, const Crew& crew, const JobGroup& group) const;
  struct GateUpFinish;
  struct DownFinish;
  void StoreMid(const TileJob& down, int64_t stripe, int64_t first_token, int64_t tokens,
                const float* values) const;
  float MidTensorScale(const TileJob& down) const;
  void ClearMidPadding(const TileJob& down) const;
  void DownColumns(Run& run, int64_t first_stripe, int64_t end_stripe) const;
  void StoreOutput(const Run& run, int64_t row, int64_t first_col, int64_t end_col) const;

  MoeProblem problem_;
  CpuPlan plan_;
  CpuSlots slots_;
  const KernelTable* table_ = nullptr;
  const TileKernels* tiles_ = nullptr;     ///< null: no matrix unit, or not for this problem
  TileFormat tile_formats_[2] = {};        ///< of gate_up and down
  const TileKernels* gemm_tiles_[2] = {};  ///< which these are of
  std::vector<float> tile_scales_;  ///< of each expert's gate and up, and down; empty: as in the panels
  bool shared_rows_ = false;        ///< every expert sees the same rows
  bool direct_mid_ = false;         ///< the activation writes the tiles of the second GEMM
  TileSums sums_[2] = {};           ///< what the tiles leave
  TileFinish silu_ = nullptr;       ///< the activation, where the tile kernels have it themselves
  std::shared_ptr<const PreparedWeights> weights_;
  std::vector<ExpertPanels> experts_;
  ActivationFormat activation_;  ///< what rows are rounded to; not quantized: they stay
  /// Gate and up see different inputs in some expert: each has tiles of its own.
  bool separate_inputs_ = false;
  /// All experts see the same input of gate, and of up: a token is packed once, not once an expert.
  bool shared_inputs_[2] = {true, true};
  ExpertsTraits traits_;
};

}  // namespace fusedmoe::cpu
