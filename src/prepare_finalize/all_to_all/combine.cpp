#include <algorithm>
#include <cstring>

#include "moe/rows.hpp"
#include "numerics/rows.hpp"
#include "prepare_finalize/all_to_all/operations.hpp"
#include "prepare_finalize/all_to_all/rank_exchange.hpp"

namespace fusedmoe {
namespace {

void PrefixSums(std::span<const int64_t> counts, std::span<int64_t> offsets) {
  int64_t begin = 0;
  for (size_t rank = 0; rank < counts.size(); ++rank) {
    offsets[rank] = begin;
    begin += counts[rank];
  }
}

}  // namespace

// The rows that this rank returns, by home rank and within it in the order in which their records came; a
// list entry is (record, slot), slot -1 for the sum over the slots of a record.
void AllToAllPrepareFinalize::ListResults(const FinalizeInput& input, RankCounts& back,
                                          const Workspace& workspace) const {
  const RankCounts counts = Counts(kDispatchCounts, workspace);
  auto* list = workspace.Get<int32_t>(result_list_);
  int64_t total = 0;
  const auto take = [&](int64_t record, int64_t slot) {
    list[2 * total] = static_cast<int32_t>(record);
    list[2 * total + 1] = static_cast<int32_t>(slot);
    ++total;
  };
  for (size_t home = 0; home < counts.receive.size(); ++home) {
    const int64_t before = total;
    const int64_t end = counts.receive_offset[home] + counts.receive[home];
    for (int64_t record = counts.receive_offset[home]; record < end; ++record) {
      if (batched()) {
        take(record, 0);
        continue;
      }
      const int32_t* ids = input.prepared->topk_ids + record * top_k();
      if (!by_slot()) {
        if (Contributes(ids, tokens_.rank)) {
          take(record, -1);
        }
        continue;
      }
      for (int64_t slot = 0; slot < top_k(); ++slot) {
        if (LocalExpert(ids[slot]) >= 0) {
          take(record, slot);
        }
      }
    }
    back.send[home] = total - before;
  }
  PrefixSums(back.send, back.send_offset);
}

void AllToAllPrepareFinalize::PackResults(const FinalizeInput& input, const Workspace& workspace,
                                          const Executor& executor) const {
  const RankCounts back = Counts(kCombineCounts, workspace);
  const auto* list = workspace.Get<int32_t>(result_list_);
  const auto* place = batched() ? workspace.Get<int32_t>(batch_place_) : nullptr;
  auto* results = workspace.Get<float>(results_);
  const int64_t hidden = parts_.config.hidden;
  const auto row_bytes = static_cast<size_t>(hidden) * sizeof(float);
  const bool sums_slots = !by_slot() && input.kind != WeightAndReduceKind::kNoOp;
  ParallelFor(executor, back.send_offset.back() + back.send.back(), [&](int64_t index) {
    const int32_t record = list[2 * index], slot = list[2 * index + 1];
    float* target = results + index * hidden;
    if (batched()) {
      const float* expert = input.expert_output[place[2 * record]].as<float>();
      std::memcpy(target, expert + place[2 * record + 1] * hidden, row_bytes);
    } else if (!sums_slots) {
      const float* row = slot < 0 ? input.expert_output.as<float>() + record * hidden
                                  : input.expert_output[record].as<float>() + slot * hidden;
      std::memcpy(target, row, row_bytes);
    } else {
      const int32_t* ids = input.prepared->topk_ids + record * top_k();
      const float* weights = input.prepared->topk_weights + record * top_k();
      std::fill(target, target + hidden, 0.0F);
      for (int64_t own = 0; own < top_k(); ++own) {
        if (LocalExpert(ids[own]) < 0) {
          continue;
        }
        const float* row = input.expert_output[record].as<float>() + own * hidden;
        const float weight = input.router_weight_on_input ? 1.0F : weights[own];
        for (int64_t col = 0; col < hidden; ++col) {
          target[col] += weight * row[col];
        }
      }
    }
  });
}

// What comes back, from the ids alone: counts by rank, and for each token the rows to add, in order.
void AllToAllPrepareFinalize::ExpectResults(const ExchangeState& state, const int32_t* ids, RankCounts& back,
                                            int32_t* table) const {
  std::fill(back.receive.begin(), back.receive.end(), 0);
  std::fill(table, table + state.share * table_width_, -1);
  // First which rank a row comes from, then, once the counts are known, where it will lie.
  const auto for_each_row = [&](auto&& take) {
    for (int64_t token = 0; token < state.share; ++token) {
      const int32_t* own = ids + token * top_k();
      int64_t position = 0;
      if (by_slot()) {
        for (int64_t slot = 0; slot < top_k(); ++slot) {
          if (own[slot] >= 0) {
            take(parts_.owners[static_cast<size_t>(own[slot])], token * table_width_ + slot);
          }
        }
        continue;
      }
      for (int64_t rank = 0; rank < ranks(); ++rank) {
        if (Contributes(own, rank)) {
          take(rank, token * table_width_ + position++);
        }
      }
    }
  };
  for_each_row([&](int64_t rank, int64_t) { ++back.receive[static_cast<size_t>(rank)]; });
  PrefixSums(back.receive, back.receive_offset);
  for_each_row([&](int64_t rank, int64_t entry) {
    table[entry] = static_cast<int32_t>(back.receive_offset[static_cast<size_t>(rank)]++);
  });
  PrefixSums(back.receive, back.receive_offset);
}

Status AllToAllPrepareFinalize::AgreeToCombine(const Status& own, const RankCounts& back,
                                               const Workspace& workspace) const {
  RankCounts announced = Counts(kOutputCounts, workspace);
  RowAgreement agreement;
  agreement.header_operation = kCombineHeader;
  agreement.verdict_operation = kCombineAgreement;
  agreement.fingerprint = parts_.fingerprint;
  agreement.epoch = parts_.epoch;
  agreement.row_bytes = parts_.config.hidden * static_cast<int64_t>(sizeof(float));
  agreement.send_rows = back.send;
  agreement.max_rows = back.receive;
  agreement.exact_rows = true;  // counts follow from the ids on both sides
  return AgreeOnRows(*parts_.communicator, agreement, own, Agreement(workspace), announced.receive);
}

Status AllToAllPrepareFinalize::FinalizeStart(const FinalizeInput& input, const Workspace& workspace,
                                              const Executor& executor) const {
  auto& state = *workspace.Get<ExchangeState>(state_);
  RankCounts back = Counts(kCombineCounts, workspace);
  ListResults(input, back, workspace);
  PackResults(input, workspace, executor);
  ExpectResults(state, workspace.Get<int32_t>(ids_), back, workspace.Get<int32_t>(table_));
  FMOE_RETURN_IF_ERROR(AgreeToCombine(Status::Ok(), back, workspace));
  RowExchange exchange;
  exchange.operation = kCombineRows;
  exchange.row_bytes = parts_.config.hidden * static_cast<int64_t>(sizeof(float));
  exchange.send = workspace.Get<std::byte>(results_);
  exchange.receive = workspace.Get<std::byte>(returned_);
  exchange.send_rows = back.send;
  exchange.send_offsets = back.send_offset;
  exchange.receive_rows = back.receive;
  exchange.receive_offsets = back.receive_offset;
  return parts_.communicator->Start(exchange);
}

Status AllToAllPrepareFinalize::FinalizeWait(const FinalizeInput& input, MutableTensorView output,
                                             const Workspace& workspace, const Executor& executor) const {
  FMOE_RETURN_IF_ERROR(parts_.communicator->Wait());
  const auto& state = *workspace.Get<ExchangeState>(state_);
  const auto* table = workspace.Get<int32_t>(table_);
  const auto* returned = workspace.Get<float>(returned_);
  const int64_t hidden = parts_.config.hidden;
  const float* weights = input.topk_weights + state.share_begin * top_k();
  const bool weighs = by_slot() && !input.router_weight_on_input;
  ParallelFor(executor, state.share, [&](int64_t token) {
    std::byte* target = output.data() + (state.share_begin + token) * output.stride_bytes(0);
    for (int64_t begin = 0; begin < hidden; begin += kRowChunk) {
      const int64_t count = std::min(kRowChunk, hidden - begin);
      float sum[kRowChunk] = {};
      for (int64_t entry = 0; entry < table_width_; ++entry) {
        const int32_t row = table[token * table_width_ + entry];
        if (row < 0) {
          continue;
        }
        const float weight = weighs ? weights[token * top_k() + entry] : 1.0F;
        const float* values = returned + row * hidden + begin;
        for (int64_t col = 0; col < count; ++col) {
          sum[col] += weight * values[col];
        }
      }
      EncodeRow(output.dtype(), sum, count, target + PackedBytes(output.dtype(), begin));
    }
  });
  return tokens_.shares_tokens ? GatherOutputs(output, workspace) : Status::Ok();
}

// Every rank of a tensor-parallel group has reduced its share of the same tokens; all want all of them. Their
// token counts were agreed on before the dispatch.
Status AllToAllPrepareFinalize::GatherOutputs(MutableTensorView output, const Workspace& workspace) const {
  const auto& state = *workspace.Get<ExchangeState>(state_);
  RankCounts counts = Counts(kOutputCounts, workspace);
  const int64_t group = tokens_.rank - tokens_.tp_rank;
  std::fill(counts.send.begin(), counts.send.end(), 0);
  std::fill(counts.receive.begin(), counts.receive.end(), 0);
  std::fill(counts.send_offset.begin(), counts.send_offset.end(), 0);
  std::fill(counts.receive_offset.begin(), counts.receive_offset.end(), 0);
  for (int64_t peer = 0; peer < tokens_.tp; ++peer) {
    const auto rank = static_cast<size_t>(group + peer);
    counts.send[rank] = state.share;
    counts.receive_offset[rank] = tokens_.ShareBegin(state.num_tokens, peer);
    counts.receive[rank] = tokens_.ShareBegin(state.num_tokens, peer + 1) - counts.receive_offset[rank];
  }
  auto* staging = workspace.Get<std::byte>(staging_);
  const int64_t row_bytes = output.row_bytes();
  for (int64_t token = 0; token < state.share; ++token) {
    std::memcpy(workspace.Get<std::byte>(results_) + token * row_bytes,
                output.data() + (state.share_begin + token) * output.stride_bytes(0),
                static_cast<size_t>(row_bytes));
  }
  RowExchange exchange;
  exchange.operation = kOutputRows;
  exchange.row_bytes = row_bytes;
  exchange.send = workspace.Get<std::byte>(results_);
  exchange.receive = staging;
  exchange.send_rows = counts.send;
  exchange.send_offsets = counts.send_offset;
  exchange.receive_rows = counts.receive;
  exchange.receive_offsets = counts.receive_offset;
  FMOE_RETURN_IF_ERROR(parts_.communicator->Exchange(exchange));
  for (int64_t token = 0; token < state.num_tokens; ++token) {
    std::memcpy(output.data() + token * output.stride_bytes(0), staging + token * row_bytes,
                static_cast<size_t>(row_bytes));
  }
  return Status::Ok();
}

Status AllToAllPrepareFinalize::Finalize(const FinalizeInput& input, MutableTensorView output,
                                         const Workspace& workspace, const Executor& executor) const {
  FMOE_RETURN_IF_ERROR(FinalizeStart(input, workspace, executor));
  return FinalizeWait(input, output, workspace, executor);
}

// A rank that fails alone takes part in the next agreement and says so: all ranks then fail alike.
Status AllToAllPrepareFinalize::Abandon(const Status& status, bool prepared,
                                        const Workspace& workspace) const {
  if (prepared) {
    RankCounts back = Counts(kCombineCounts, workspace);
    std::fill(back.send.begin(), back.send.end(), 0);
    std::fill(back.receive.begin(), back.receive.end(), max_results_);
    return AgreeToCombine(status, back, workspace);
  }
  RowAgreement agreement;
  agreement.header_operation = kDispatchHeader;
  agreement.verdict_operation = kDispatchAgreement;
  agreement.tokens = -1;
  return AgreeOnRows(*parts_.communicator, agreement, status, Agreement(workspace), {});
}

}  // namespace fusedmoe
