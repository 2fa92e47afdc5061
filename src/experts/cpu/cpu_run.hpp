#pragma once

#include <atomic>

#include "experts/cpu/cpu_experts.hpp"

namespace fusedmoe::cpu {

/// One call of Apply: pointers into the workspace, and the piece of the batch that is being worked on.
struct CpuExperts::Run {
  const ExpertsInput* input;
  MutableTensorView output;
  const Executor* executor;
  // Where rows come from and go to.
  const std::byte* rows;
  int64_t row_bytes;
  RowType row_type;
  bool coded = false;  // rows are codes with their scales
  const std::byte* row_scales = nullptr;
  int64_t row_scale_bytes = 0;
  int64_t output_row_bytes;
  RowType output_type;
  int64_t first_output = 0, num_outputs = 0;  // output rows of this piece
  bool batched = false;
  // Workspace.
  int32_t* offsets;
  int32_t* cursors;
  int32_t* slot_rows;     // input row of each slot
  int32_t* slot_outputs;  // output row, counted from first_output; batched: the slot itself
  float* slot_weights;
  Tile* tiles;
  float* row_buffers;      // of the packing tasks
  std::byte* tile_rows;    // the same, tiles of one token
  int32_t* token_places;   // number of each token among those that are packed once (NumberTokens), or -1
  int32_t* place_slots;    // a slot of each of them
  std::byte* token_tiles;  // and its tile; where up sees another input, those of up follow
  int64_t first_token = 0, num_tokens = 0;
  std::byte* input_tiles;  // of gate; where up sees another input, its tiles follow
  void** slot_tiles;       // of each slot its tile of one token, where kernels read that; for every part
  float* mid;
  std::byte* mid_tiles;
  /// Tiles of one token for gate (0) and up (1), which kernels read until both are multiplied.
  std::byte* TokenTiles(const CpuPlan& plan, int part) const {
    return token_tiles + part * plan.max_tokens * plan.gate_up.tile_row_bytes;
  }
  /// Tiles of gate (0), up (1) and down (2).
  std::byte* Tiles(const CpuPlan& plan, int part) const {
    return part == 2 ? mid_tiles : input_tiles + part * plan.max_tile_rows * plan.gate_up.tile_row_bytes;
  }
  void** SlotTiles(const CpuPlan& plan, int part) const {
    return slot_tiles + (part == 2 ? plan.input_sets : part) * plan.max_slots;
  }
  float* sums;
  // Experts with many tokens, where the machine has a matrix unit (cpu_tiles.cpp, cpu_jobs.cpp).
  TileJob* jobs;      // of gate and up; those of down follow
  JobGroup* groups;   // of them
  std::byte* tokens;  // tiles of both
  float* sides;
  std::byte* token_rows;  // packed, by their numbers
  float* token_sides;
  uint8_t* scratch;
  float* scratch_rows;
  std::atomic<uint8_t> scratch_taken[kMaxTileScratch] = {};
  int64_t num_jobs = 0, num_groups = 0;
  SlotEnds* slot_ends;      // where one thread adds them up
  float* slot_sums;         // of waiting_slots from first_slot on, where several threads work on jobs
  int32_t* output_offsets;  // where the slots of an output begin in output_slots; one thread: its last slot
  int32_t* output_slots;
  int64_t first_slot = 0, waiting_slots = 0;
  int64_t num_slots = 0, num_tiles = 0;
  int64_t tiled_experts = 0, tiled_slots = 0;  // what the tiles hold
  float batch_scale = 1.0F;  // of the rows that are packed, where the scheme has one scale for all
};

/// Memory of a task on tiles, while it runs. Tasks that run at the same time are at most as many as threads;
/// where these outnumber the pieces, some wait.
class CpuExperts::TaskScratch {
 public:
  TaskScratch(Run& run, const CpuPlan& plan);
  ~TaskScratch() { taken_->store(0, std::memory_order_release); }
  TaskScratch(const TaskScratch&) = delete;
  TaskScratch& operator=(const TaskScratch&) = delete;

  int64_t index() const { return index_; }
  uint8_t* tiles() const { return tiles_; }  ///< kTileScratchBytes
  float* rows() const { return rows_; }      ///< three, of the wider GEMM

 private:
  std::atomic<uint8_t>* taken_ = nullptr;
  int64_t index_ = 0;
  uint8_t* tiles_ = nullptr;
  float* rows_ = nullptr;
};

/// Who works on some jobs: the threads of a forward, where each task has a scratch of its own, or one of them
/// with the scratch that it holds.
struct CpuExperts::Crew {
  const Executor& executor;
  TaskScratch* own = nullptr;

  int64_t threads() const { return own != nullptr ? 1 : executor.num_threads; }
  template <typename Task>
  void ForEach(Run& run, const CpuPlan& plan, int64_t count, const Task& task) const {
    if (own != nullptr) {
      for (int64_t i = 0; i < count; ++i) {
        task(i, *own);
      }
      return;
    }
    ParallelFor(executor, count, [&](int64_t i) {
      TaskScratch scratch(run, plan);
      task(i, scratch);
    });
  }
};

}  // namespace fusedmoe::cpu
