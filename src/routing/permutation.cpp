#include "routing/permutation.hpp"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "core/checked_math.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kRowsPerTask = 16;
constexpr int64_t kMaxBlock = 1 << 16;

size_t At(int64_t index) {
  return static_cast<size_t>(index);
}

int64_t Size(std::span<const int32_t> values) {
  return static_cast<int64_t>(values.size());
}

Status CheckRoom(const char* what, int64_t has, int64_t needed) {
  return has >= needed ? Status::Ok()
                       : Status::Usage(fmt::format("{} has room for {}, needed {}", what, has, needed));
}

Status CheckIds(std::span<const int32_t> topk_ids, int64_t num_experts, std::span<const int32_t> expert_map) {
  if (num_experts < 1 || (!expert_map.empty() && Size(expert_map) != num_experts)) {
    return Status::Usage(fmt::format("{} experts with an expert map of {}; they must agree and be at least 1",
                                     num_experts, expert_map.size()));
  }
  if (topk_ids.size() > size_t{1} << 30) {
    return Status::Unsupported(
        fmt::format("{} slots in one batch; at most 2^30 can be indexed", topk_ids.size()));
  }
  for (const int32_t id : topk_ids) {
    if (id < -1 || id >= num_experts) {
      return Status::BadInput(
          fmt::format("expert id {} is out of range; ids are -1 (none) or 0 to {}", id, num_experts - 1));
    }
  }
  return Status::Ok();
}

Status CheckBlock(int64_t block) {
  return block >= 1 && block <= kMaxBlock
             ? Status::Ok()
             : Status::Usage(fmt::format("block size is {}; it must be between 1 and {}", block, kMaxBlock));
}

/// The key by which a slot is sorted; -1: left out.
int32_t DroppingKey(int32_t id, std::span<const int32_t> expert_map) {
  return id < 0 || expert_map.empty() ? id : expert_map[At(id)];
}

}  // namespace

void CountExpertTokens(std::span<const int32_t> topk_ids, std::span<const int32_t> expert_map,
                       std::span<int32_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  for (const int32_t id : topk_ids) {
    const bool known = id >= 0 && (expert_map.empty() || id < Size(expert_map));
    const int32_t local = known ? DroppingKey(id, expert_map) : -1;
    if (local >= 0 && local < Size(counts)) {
      ++counts[At(local)];
    }
  }
}

int64_t MaxAlignedSlots(int64_t num_slots, int64_t num_experts, int64_t block, bool whole_blocks) {
  int64_t most = num_slots + num_experts * (block - 1);
  most = whole_blocks ? RoundUp(most, block) : most;
  return num_slots < num_experts ? std::min(num_slots * block, most) : most;
}

Result<int64_t> AlignBlockSize(std::span<const int32_t> topk_ids, int64_t num_experts, int64_t block,
                               std::span<const int32_t> expert_map, NonLocal non_local,
                               std::span<int32_t> sorted_slots, std::span<int32_t> block_experts,
                               std::span<int32_t> scratch) {
  FMOE_RETURN_IF_ERROR(CheckIds(topk_ids, num_experts, expert_map));
  FMOE_RETURN_IF_ERROR(CheckBlock(block));
  FMOE_RETURN_IF_ERROR(CheckRoom("scratch", Size(scratch), num_experts + 1));
  const bool drop = non_local == NonLocal::kDrop;
  const auto key_of = [&](int32_t id) { return drop ? DroppingKey(id, expert_map) : id; };

  // next[e]: where the next slot of expert e goes.
  int32_t* const next = scratch.data();
  std::fill_n(next, num_experts + 1, 0);
  for (const int32_t id : topk_ids) {
    const int32_t key = key_of(id);
    if (key >= num_experts) {
      return Status::BadInput(
          fmt::format("the expert map sends expert {} to {} of {}", id, key, num_experts));
    }
    if (key >= 0) {
      ++next[key];
    }
  }
  int64_t padded = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    padded += RoundUp(next[expert], block);
  }
  FMOE_RETURN_IF_ERROR(CheckRoom("sorted_slots", Size(sorted_slots), padded));
  FMOE_RETURN_IF_ERROR(CheckRoom("block_experts", Size(block_experts), padded / block));
  std::fill(sorted_slots.begin(), sorted_slots.end(), static_cast<int32_t>(topk_ids.size()));
  std::fill(block_experts.begin(), block_experts.end(), -1);
  int64_t first = 0;
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    const int64_t end = first + RoundUp(next[expert], block);
    const bool mapped = !drop && !expert_map.empty();
    for (int64_t index = first / block; index < end / block; ++index) {
      block_experts[At(index)] = mapped ? expert_map[At(expert)] : static_cast<int32_t>(expert);
    }
    next[expert] = static_cast<int32_t>(first);
    first = end;
  }
  for (size_t slot = 0; slot < topk_ids.size(); ++slot) {
    const int32_t key = key_of(topk_ids[slot]);
    if (key >= 0) {
      sorted_slots[At(next[key]++)] = static_cast<int32_t>(slot);
    }
  }
  return padded;
}

Result<int64_t> AlignBatchedBlockSize(std::span<const int32_t> expert_counts, int64_t max_tokens,
                                      int64_t block, std::span<int32_t> sorted_rows,
                                      std::span<int32_t> block_experts) {
  FMOE_RETURN_IF_ERROR(CheckBlock(block));
  int64_t padded = 0;
  for (const int32_t count : expert_counts) {
    if (count < 0 || count > max_tokens) {
      return Status::BadInput(
          fmt::format("an expert has {} tokens; between 0 and {} fit", count, max_tokens));
    }
    padded += RoundUp(count, block);
  }
  FMOE_RETURN_IF_ERROR(CheckRoom("sorted_rows", Size(sorted_rows), padded));
  FMOE_RETURN_IF_ERROR(CheckRoom("block_experts", Size(block_experts), padded / block));
  std::fill(sorted_rows.begin(), sorted_rows.end(), static_cast<int32_t>(Size(expert_counts) * max_tokens));
  std::fill(block_experts.begin(), block_experts.end(), -1);
  int64_t first = 0;
  for (int64_t expert = 0; expert < Size(expert_counts); ++expert) {
    const int64_t count = expert_counts[At(expert)];
    for (int64_t row = 0; row < count; ++row) {
      sorted_rows[At(first + row)] = static_cast<int32_t>(expert * max_tokens + row);
    }
    const int64_t end = first + RoundUp(count, block);
    std::fill(block_experts.begin() + first / block, block_experts.begin() + end / block,
              static_cast<int32_t>(expert));
    first = end;
  }
  return padded;
}

Result<int64_t> MakePermutation(std::span<const int32_t> topk_ids, int64_t num_experts,
                                std::span<const int32_t> expert_map, const Permutation& permutation,
                                std::span<int32_t> scratch) {
  FMOE_RETURN_IF_ERROR(CheckIds(topk_ids, num_experts, expert_map));
  const int64_t num_slots = Size(topk_ids);
  const int64_t num_local = static_cast<int64_t>(permutation.expert_first_row.size()) - 1;
  FMOE_RETURN_IF_ERROR(CheckRoom("scratch", Size(scratch), 2 * num_experts + 1));
  FMOE_RETURN_IF_ERROR(CheckRoom("slot_to_row", Size(permutation.slot_to_row), num_slots));
  FMOE_RETURN_IF_ERROR(CheckRoom("row_to_slot", Size(permutation.row_to_slot), num_slots));
  if (num_local < 0 || num_local > num_experts) {
    return Status::Usage(fmt::format(
        "expert_first_row has {} entries; one more than local experts needed, which are at most {}",
        num_local + 1, num_experts));
  }
  // Keys: local experts, then non-local ones by global id, then none.
  int32_t* const next = scratch.data();
  std::fill_n(next, 2 * num_experts + 1, 0);
  const auto key_of = [&](int32_t id) -> int64_t {
    if (id < 0) {
      return 2 * num_experts;
    }
    const int64_t local = DroppingKey(id, expert_map);
    return local >= 0 && local < num_local ? local : num_experts + id;
  };
  for (const int32_t id : topk_ids) {
    ++next[key_of(id)];
  }
  int32_t row = 0;
  int64_t num_local_rows = 0;
  for (int64_t key = 0; key <= 2 * num_experts; ++key) {
    if (key <= num_local) {
      permutation.expert_first_row[At(key)] = row;
      num_local_rows = row;
    }
    const int32_t count = next[key];
    next[key] = row;
    row += count;
  }
  std::fill_n(permutation.row_to_slot.begin(), num_slots, static_cast<int32_t>(num_slots));
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int32_t target = next[key_of(topk_ids[At(slot)])]++;
    permutation.slot_to_row[At(slot)] = target;
    if (target < num_local_rows) {
      permutation.row_to_slot[At(target)] = static_cast<int32_t>(slot);
    }
  }
  return num_local_rows;
}

Status PermuteRows(TensorView hidden, int64_t top_k, std::span<const int32_t> row_to_slot,
                   int64_t num_local_rows, MutableTensorView rows, const Executor& executor) {
  if (hidden.rank() < 2 || rows.rank() < 2 || top_k < 1 || hidden.dtype() != rows.dtype() ||
      hidden.row_bytes() != rows.row_bytes() || rows.dim(0) < num_local_rows ||
      Size(row_to_slot) < num_local_rows || hidden.rank() != rows.rank()) {
    return Status::Usage(fmt::format("cannot permute {} {} into {} rows of {} {} with top_k {}",
                                     DTypeName(hidden.dtype()), hidden.shape().ToString(), num_local_rows,
                                     DTypeName(rows.dtype()), rows.shape().ToString(), top_k));
  }
  if (hidden.rank() > 2) {
    return Status::Usage(fmt::format("rows of {} are not flat; rank 2 needed", hidden.shape().ToString()));
  }
  for (int64_t row = 0; row < num_local_rows; ++row) {
    const int64_t token = row_to_slot[At(row)] / top_k;
    if (token < 0 || token >= hidden.dim(0)) {
      return Status::BadInput(fmt::format("row {} comes from token {} of {}", row, token, hidden.dim(0)));
    }
  }
  const auto bytes = At(hidden.row_bytes());
  ParallelFor(executor, CeilDiv(num_local_rows, kRowsPerTask), [&](int64_t task) {
    const int64_t end = std::min(num_local_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) {
      const int64_t token = row_to_slot[At(row)] / top_k;
      std::memcpy(rows.data() + row * rows.stride_bytes(0), hidden.data() + token * hidden.stride_bytes(0),
                  bytes);
    }
  });
  return Status::Ok();
}

Status UnpermuteRows(TensorView expert_rows, int64_t top_k, std::span<const int32_t> slot_to_row,
                     int64_t num_local_rows, const float* topk_weights, MutableTensorView output,
                     const Executor& executor) {
  if (expert_rows.rank() != 2 || output.rank() != 2 || expert_rows.dtype() != DType::kF32 ||
      output.dtype() != DType::kF32 || expert_rows.dim(1) != output.dim(1) || top_k < 1 ||
      expert_rows.dim(0) < num_local_rows || Size(slot_to_row) < output.dim(0) * top_k) {
    return Status::Usage(
        fmt::format("cannot unpermute {} {} with {} local rows and {} slots into {} {}; F32 of equal width, "
                    "one slot a token and "
                    "top_k {} needed",
                    DTypeName(expert_rows.dtype()), expert_rows.shape().ToString(), num_local_rows,
                    slot_to_row.size(), DTypeName(output.dtype()), output.shape().ToString(), top_k));
  }
  const int64_t hidden = output.dim(1);
  ParallelFor(executor, CeilDiv(output.dim(0), kRowsPerTask), [&](int64_t task) {
    const int64_t end = std::min(output.dim(0), (task + 1) * kRowsPerTask);
    for (int64_t token = task * kRowsPerTask; token < end; ++token) {
      auto* const sum = reinterpret_cast<float*>(output.data() + token * output.stride_bytes(0));
      std::fill_n(sum, hidden, 0.0F);
      for (int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
        const int64_t row = slot_to_row[At(slot)];
        if (row < 0 || row >= num_local_rows) {
          continue;
        }
        const float weight = topk_weights == nullptr ? 1.0F : topk_weights[slot];
        const auto* const source =
            reinterpret_cast<const float*>(expert_rows.data() + row * expert_rows.stride_bytes(0));
        for (int64_t column = 0; column < hidden; ++column) {
          sum[column] += source[column] * weight;
        }
      }
    }
  });
  return Status::Ok();
}

}  // namespace fusedmoe
