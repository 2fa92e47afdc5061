#pragma once

#include <cstddef>
#include <cstdint>

#include "experts/cpu/cpu_plan.hpp"
#include "experts/cpu/matrix_unit/workers.hpp"

namespace fusedmoe::cpu {

struct JobContext;

/// Jobs [begin, end) that one thread takes from hidden states to results, or that all threads share.
struct JobGroup {
  int64_t begin = 0, end = 0;
  int64_t rows = 0;       ///< of their packed tokens
  int64_t first_row = 0;  ///< where these begin, if every group has a place of its own

  int64_t count() const { return end - begin; }
};

/// Memory for the results of slots on their way to outputs (slot_sums.hpp).
struct SlotSumRows {
  // One thread: what each slot is for its output.
  SlotEnds* ends = nullptr;
  // Several threads: results of `num_slots` slots from first_slot on.
  float* rows = nullptr;
  int64_t first_slot = 0, num_slots = 0;
  int32_t* output_slots = nullptr;    ///< these slots by output
  int32_t* output_offsets = nullptr;  ///< where those of an output are; one thread: its last slot
};

/// The jobs of a piece, and the memory of what is packed for them.
struct PieceJobs {
  TileJob* list[kNumGemms] = {};  ///< a job has the same index in both
  int64_t count = 0;
  JobGroup* groups = nullptr;
  int64_t num_groups = 0;
  std::byte* tokens[kNumGemms] = {};  ///< as the tiles of the unit hold them
  float* params[kNumGemms] = {};      ///< their scales and sums
  // Tokens of several experts that are packed once, by their numbers (TokenNumbers).
  std::byte* token_rows = nullptr;
  float* token_params = nullptr;
  SlotSumRows sums;
  ScratchPool scratch;
};

/// Cuts the tokens of the experts that the unit takes into jobs, and these into groups.
void CutJobs(const JobContext& context);

/// Gives the jobs of a group their memory, from row `row` on.
void PlaceJobs(const JobContext& context, const JobGroup& group, int64_t row);

/// Intermediate rows of a job in fp32: 16 columns of a token, and floats to the next token and columns.
struct MidRows {
  float* first;
  int64_t token_stride, block_stride;
};
MidRows MidRowsOf(const JobContext& context, const TileJob& job);

}  // namespace fusedmoe::cpu
