#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/cpu/cpu_layer.hpp"
#include "experts/cpu/cpu_slots.hpp"
#include "experts/cpu/cpu_workspace.hpp"
#include "experts/cpu/matrix_unit/jobs.hpp"
#include "experts/cpu/vectors/tiles.hpp"
#include "moe/experts.hpp"

namespace fusedmoe::cpu {

/// Hidden states as a caller passes them.
struct InputRows {
  const std::byte* values = nullptr;
  int64_t row_bytes = 0;
  RowType type = kRowF32;
  /// They are codes of the scheme, with their scales.
  bool coded = false;
  const std::byte* scales = nullptr;  ///< null: none
  int64_t scale_bytes = 0;            ///< of a row
  const float* tensor_scale = nullptr;

  const std::byte* Row(int64_t row) const { return values + row * row_bytes; }
  const std::byte* ScalesOf(int64_t row) const {
    return scales == nullptr ? nullptr : scales + row * scale_bytes;
  }
};

struct OutputRows {
  std::byte* values = nullptr;
  int64_t row_bytes = 0, value_bytes = 0;
  RowType type = kRowF32;
};

/// One call of Apply: the piece of the batch that is being worked on, in memory of the workspace.
struct Run {
  const Executor* executor = nullptr;
  InputRows input;
  OutputRows output;
  PieceSlots slots;
  TokenNumbers numbers;
  PieceTiles tiles;          ///< of experts with few tokens
  PieceJobs jobs;            ///< of those with many, where there is a matrix unit
  float* mid = nullptr;      ///< a row of each slot, GemmShape::row_stride of gate and up apart
  float* sums = nullptr;     ///< a row of each output, that of down apart
  float batch_scale = 1.0F;  ///< of the rows that are packed, where the scheme has one scale for all
};

/// Where rows come from and go to, and where everything lies in the workspace.
void OpenRun(const CpuLayer& layer, const CpuWorkspace& space, const ExpertsInput& input,
             MutableTensorView output, const Workspace& workspace, Run& run);

/// Columns of a row of sums to the caller's dtype.
void StoreOutput(const CpuLayer& layer, const Run& run, int64_t row, int64_t first_col, int64_t end_col);

}  // namespace fusedmoe::cpu
