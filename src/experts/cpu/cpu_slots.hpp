#pragma once

#include <cstdint>

#include "experts/cpu/cpu_layer.hpp"
#include "moe/experts.hpp"

namespace fusedmoe::cpu {

/// The slots of a piece of the batch: one for each expert that a token visits. They stand by expert, those of
/// an expert in the order of tokens.
struct PieceSlots {
  int32_t* offsets = nullptr;  ///< [experts + 1]: where those of an expert begin
  int32_t* cursors = nullptr;  ///< [experts]: while they are sorted
  int32_t* rows = nullptr;     ///< input row of each
  int32_t* outputs = nullptr;  ///< output row of each, counted from first_output; batched: the slot itself
  float* weights = nullptr;
  int64_t count = 0;
  int64_t first_token = 0, num_tokens = 0;  ///< 0 for batched rows
  int64_t first_output = 0, num_outputs = 0;
};

/// Counting sort of the slots of tokens [first_token, first_token + count).
Status SortSlots(const CpuLayer& layer, const ExpertsInput& input, int64_t first_token, int64_t count,
                 PieceSlots& slots);

/// Batched rows, which stand by expert already: as many as fit a piece, and `at` moves behind them.
struct BatchedPosition {
  int64_t expert = 0, row = 0;
};
void TakeBatchedRows(const CpuLayer& layer, const ExpertsInput& input, BatchedPosition& at,
                     PieceSlots& slots);

/// Tokens that are packed once, whichever experts they visit: numbers for those that some slots have. Clear,
/// Note for all of these slots, Assign.
struct TokenNumbers {
  int32_t* numbers = nullptr;  ///< [tokens of the piece]; -1: not noted
  int32_t* slot_of = nullptr;  ///< a slot of the token of each number

  void Clear(const PieceSlots& slots);
  void Note(const PieceSlots& slots, int64_t first_slot, int64_t count);
  /// In ascending order of tokens. How many there are.
  int64_t Assign(const PieceSlots& slots);
  int64_t Of(const PieceSlots& slots, int64_t slot) const {
    return numbers[slots.rows[slot] - slots.first_token];
  }
};

}  // namespace fusedmoe::cpu
