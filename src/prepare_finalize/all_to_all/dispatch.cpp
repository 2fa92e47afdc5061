#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "moe/rows.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "prepare_finalize/all_to_all/operations.hpp"
#include "prepare_finalize/all_to_all/rank_exchange.hpp"
#include "quant/activation_quantizer.hpp"

namespace fusedmoe {
namespace {

const std::byte* HiddenRow(const PrepareInput& input, int64_t token) {
  return input.hidden.data() + token * input.hidden.stride_bytes(0);
}

/// dtype of rows before they are quantized: router weights multiply them in F32.
DType RowType(const PrepareInput& input) {
  return input.router_weight_on_input ? DType::kF32 : input.hidden.dtype();
}

}  // namespace

RecordLayout AllToAllPrepareFinalize::Record(DType dtype, bool quantized) const {
  const int64_t hidden = parts_.config.hidden;
  const int64_t ids = batched() ? 1 : top_k();
  return quantized ? MakeRecordLayout(CodeRowBytes(parts_.activation, hidden),
                                      ScaleRowBytes(parts_.activation, hidden), ids)
                   : MakeRecordLayout(PackedBytes(dtype, hidden), 0, ids);
}

Status AllToAllPrepareFinalize::CheckTokens(const PrepareInput& input) const {
  const int64_t num_tokens = input.hidden.dim(0);
  if (num_tokens > parts_.config.max_tokens) {
    return Status::Usage(fmt::format("{} tokens, the exchange was planned for {} a rank", num_tokens,
                                     parts_.config.max_tokens));
  }
  const int64_t limit = parts_.replica_begin.empty() ? parts_.config.num_experts
                                                     : static_cast<int64_t>(parts_.replica_begin.size()) - 1;
  for (int64_t token = 0; token < num_tokens; ++token) {
    const int32_t* ids = input.topk_ids + token * top_k();
    for (int64_t slot = 0; slot < top_k(); ++slot) {
      if (ids[slot] < -1 || ids[slot] >= limit) {
        return Status::Usage(
            fmt::format("expert id {} of token {} is outside -1..{}", ids[slot], token, limit - 1));
      }
      // The batch of an expert has room for each token once.
      if (batched() && ids[slot] >= 0 && std::find(ids, ids + slot, ids[slot]) != ids + slot) {
        return Status::Usage(fmt::format("token {} chooses expert {} twice", token, ids[slot]));
      }
    }
  }
  return Status::Ok();
}

// Ids of the share as physical experts. A replica is chosen by token and slot alone, so that the way back
// finds the same one; the index of the rank spreads tokens that many ranks send to one expert.
void AllToAllPrepareFinalize::TranslateIds(const PrepareInput& input, const ExchangeState& state,
                                           int32_t* ids) const {
  const int32_t* source = input.topk_ids + state.share_begin * top_k();
  for (int64_t slot = 0; slot < state.share * top_k(); ++slot) {
    ids[slot] = source[slot];
    if (ids[slot] >= 0 && !parts_.replica_begin.empty()) {
      const int32_t begin = parts_.replica_begin[static_cast<size_t>(source[slot])];
      const int32_t count = parts_.replica_begin[static_cast<size_t>(source[slot]) + 1] - begin;
      ids[slot] = parts_.replicas[static_cast<size_t>(begin + (slot + tokens_.rank) % count)];
    }
    if (ids[slot] >= 0 && parts_.load != nullptr) {
      parts_.load[static_cast<size_t>(ids[slot])].fetch_add(1, std::memory_order_relaxed);
    }
  }
}

// The largest finite magnitude of the rows of the share that some expert computes.
float AllToAllPrepareFinalize::ShareAmax(const PrepareInput& input, const ExchangeState& state) const {
  float largest = 0.0F;
  float values[kRowChunk];
  for (int64_t token = state.share_begin; token < state.share_begin + state.share; ++token) {
    const int32_t* ids = input.topk_ids + token * top_k();
    if (std::all_of(ids, ids + top_k(), [](int32_t id) { return id < 0; })) {
      continue;
    }
    const float weight = input.router_weight_on_input ? input.topk_weights[token] : 1.0F;
    for (int64_t begin = 0; begin < parts_.config.hidden; begin += kRowChunk) {
      const int64_t count = std::min(kRowChunk, parts_.config.hidden - begin);
      DecodeRow(input.hidden.dtype(), HiddenRow(input, token), begin, count, values);
      for (int64_t col = 0; col < count; ++col) {
        values[col] *= weight;
      }
      largest = std::max(largest, RowFiniteAmax(values, count));
    }
  }
  return largest;
}

// Codes and scales of the share, one record's worth a token.
void AllToAllPrepareFinalize::QuantizeShare(const PrepareInput& input, const ExchangeState& state,
                                            const RecordLayout& record, const Workspace& workspace,
                                            const Executor& executor) const {
  const int64_t hidden = parts_.config.hidden;
  auto* rows = workspace.Get<float>(returned_);  // free until results return
  auto* codes = workspace.Get<std::byte>(codes_);
  ParallelFor(executor, state.share, [&](int64_t index) {
    const int64_t token = state.share_begin + index;
    float* row = rows + index * hidden;
    if (input.router_weight_on_input) {
      ScaleRow(input.hidden.dtype(), HiddenRow(input, token), input.topk_weights[token], hidden, row);
    } else {
      DecodeRow(input.hidden.dtype(), HiddenRow(input, token), 0, hidden, row);
    }
    std::byte* target = codes + index * record.ids_offset;
    QuantizeRow(parts_.activation, state.tensor_scale, row, hidden, target,
                record.scale_bytes == 0 ? nullptr : target + record.scale_offset);
  });
}

// Which records go where. `list` holds tokens of the share (gather, rank rows) or slots (expert rows), by
// rank, ascending.
void AllToAllPrepareFinalize::ListRecords(const ExchangeState& state, const int32_t* ids, RankCounts& counts,
                                          int32_t* list) const {
  if (protocol_ == WireProtocol::kGather) {
    for (int64_t token = 0; token < state.share; ++token) {
      list[token] = static_cast<int32_t>(token);
    }
    std::fill(counts.send.begin(), counts.send.end(), state.share);
    std::fill(counts.send_offset.begin(), counts.send_offset.end(), 0);
    return;
  }
  const bool by_expert = protocol_ == WireProtocol::kExpertRows;
  const auto for_each_record = [&](auto&& take) {
    for (int64_t slot = 0; slot < state.share * top_k(); ++slot) {
      if (ids[slot] < 0) {
        continue;
      }
      const int32_t owner = parts_.owners[static_cast<size_t>(ids[slot])];
      const int64_t token = slot / top_k();
      const bool again = !by_expert && std::any_of(ids + token * top_k(), ids + slot, [&](int32_t id) {
        return id >= 0 && parts_.owners[static_cast<size_t>(id)] == owner;
      });
      if (!again) {
        take(owner, static_cast<int32_t>(by_expert ? slot : token));
      }
    }
  };
  std::fill(counts.send.begin(), counts.send.end(), 0);
  for_each_record([&](int32_t owner, int32_t) { ++counts.send[static_cast<size_t>(owner)]; });
  int64_t begin = 0;
  for (size_t rank = 0; rank < counts.send.size(); ++rank) {
    counts.send_offset[rank] = begin;
    begin += counts.send[rank];
  }
  for_each_record(
      [&](int32_t owner, int32_t entry) { list[counts.send_offset[static_cast<size_t>(owner)]++] = entry; });
  for (size_t rank = 0; rank < counts.send.size(); ++rank) {
    counts.send_offset[rank] -= counts.send[rank];
  }
}

void AllToAllPrepareFinalize::PackRecord(const PrepareInput& input, const ExchangeState& state,
                                         const RecordLayout& record, const std::byte* codes, int32_t entry,
                                         const int32_t* ids, std::byte* target) const {
  const int64_t first_slot = batched() ? entry : entry * top_k();
  const int64_t index = first_slot / top_k();
  const int64_t token = state.share_begin + index;
  const float* weights = input.topk_weights + state.share_begin * top_k() + first_slot;
  if (codes != nullptr) {
    std::memcpy(target, codes + index * record.ids_offset, static_cast<size_t>(record.ids_offset));
  } else if (input.router_weight_on_input) {
    ScaleRow(input.hidden.dtype(), HiddenRow(input, token), weights[0], parts_.config.hidden,
             reinterpret_cast<float*>(target));
  } else {
    std::memcpy(target, HiddenRow(input, token), static_cast<size_t>(record.value_bytes));
  }
  std::memcpy(target + record.ids_offset, ids + first_slot,
              static_cast<size_t>(record.ids) * sizeof(int32_t));
  std::memcpy(target + record.weights_offset, weights, static_cast<size_t>(record.ids) * sizeof(float));
}

/// What all ranks must agree on before rows move; counts.receive and the scale of the batch come of it.
Status AllToAllPrepareFinalize::AgreeToDispatch(const PrepareInput& input, const Status& own,
                                                const RecordLayout& record, bool quantize,
                                                ExchangeState& state, RankCounts& counts,
                                                const Workspace& workspace) const {
  RankCounts limits = Counts(kCombineCounts, workspace);  // not needed before the way back
  const int64_t per_token = batched() ? std::min(top_k(), parts_.config.num_local_experts) : 1;
  std::fill(limits.receive.begin(), limits.receive.end(), max_share_ * per_token);
  RowAgreement agreement;
  agreement.header_operation = kDispatchHeader;
  agreement.verdict_operation = kDispatchAgreement;
  agreement.fingerprint =
      parts_.fingerprint * 31 + static_cast<uint64_t>(RowType(input)) * 2 + (quantize ? 1 : 0);
  if (tokens_.shares_tokens) {  // outputs travel as they are
    agreement.fingerprint = agreement.fingerprint * 31 + static_cast<uint64_t>(input.output);
  }
  agreement.epoch = parts_.epoch;
  agreement.row_bytes = record.bytes;
  agreement.tokens = own.ok() ? state.num_tokens : -1;
  agreement.send_rows = counts.send;
  agreement.max_rows = limits.receive;
  // A dynamic scale of the whole batch belongs to the rows of all ranks: it is compared before they go.
  const bool shares_scale = quantize && NeedsDynamicTensorScale(parts_.activation);
  agreement.amax = shares_scale ? ShareAmax(input, state) : quantize ? state.tensor_scale : 0.0F;
  agreement.same_amax = quantize && !shares_scale;  // a stored scale, or the 1 of formats without one
  if (tokens_.shares_tokens && own.ok()) {
    agreement.same_tokens_begin = tokens_.rank - tokens_.tp_rank;
    agreement.same_tokens_end = agreement.same_tokens_begin + tokens_.tp;
  }
  FMOE_RETURN_IF_ERROR(
      AgreeOnRows(*parts_.communicator, agreement, own, Agreement(workspace), counts.receive));
  if (shares_scale) {
    float amax = 0.0F;
    for (int64_t rank = 0; rank < ranks(); ++rank) {
      amax = std::max(amax, Agreement(workspace).received[rank].amax);
    }
    state.tensor_scale = DynamicTensorScale(parts_.activation, amax);
  }
  return Status::Ok();
}

Status AllToAllPrepareFinalize::Prepare(const PrepareInput& input, PrepareOutput& prepared,
                                        const Workspace& workspace, const Executor& executor) const {
  Communicator& communicator = *parts_.communicator;
  auto& state = *workspace.Get<ExchangeState>(state_);
  state = ExchangeState{};
  auto* ids = workspace.Get<int32_t>(ids_);
  auto* list = workspace.Get<int32_t>(list_);
  auto* send = workspace.Get<std::byte>(send_);
  RankCounts counts = Counts(kDispatchCounts, workspace);
  const bool send_codes = parts_.wire != nullptr && parts_.wire->codes;
  const bool quantize = parts_.activation.quantized() && (send_codes || !input.defer_quantization);
  const DType dtype = RowType(input);
  const RecordLayout record = Record(dtype, quantize);

  const Status own = CheckTokens(input);
  state.weight_on_input = input.router_weight_on_input;
  state.num_tokens = own.ok() ? input.hidden.dim(0) : 0;
  state.share_begin = tokens_.ShareBegin(state.num_tokens, tokens_.tp_rank);
  state.share = tokens_.ShareBegin(state.num_tokens, tokens_.tp_rank + 1) - state.share_begin;
  state.tensor_scale = send_codes && parts_.activation.static_tensor_scale
                           ? parts_.wire->scale
                           : parts_.traits.input_tensor_scale.value_or(1.0F);
  TranslateIds(input, state, ids);
  ListRecords(state, ids, counts, list);
  FMOE_RETURN_IF_ERROR(AgreeToDispatch(input, own, record, quantize, state, counts, workspace));
  if (quantize) {
    QuantizeShare(input, state, record, workspace, executor);
  }
  const int64_t sent =
      protocol_ == WireProtocol::kGather ? state.share : counts.send_offset.back() + counts.send.back();
  const std::byte* codes = quantize ? workspace.Get<std::byte>(codes_) : nullptr;
  ParallelFor(executor, sent, [&](int64_t index) {
    PackRecord(input, state, record, codes, list[index], ids, send + index * record.bytes);
  });
  for (size_t rank = 0; rank < counts.receive.size(); ++rank) {
    counts.receive_offset[rank] = state.received;
    state.received += counts.receive[rank];
  }
  RowExchange exchange;
  exchange.operation = kDispatchRows;
  exchange.row_bytes = record.bytes;
  exchange.send = send;
  exchange.receive = workspace.Get<std::byte>(receive_);
  exchange.send_rows = counts.send;
  exchange.send_offsets = counts.send_offset;
  exchange.receive_rows = counts.receive;
  exchange.receive_offsets = counts.receive_offset;
  FMOE_RETURN_IF_ERROR(communicator.Exchange(exchange));
  const Status unpacked = batched() ? UnpackBatched(record, dtype, quantize, prepared, workspace)
                                    : Unpack(record, dtype, quantize, prepared, workspace, executor);
  return unpacked.ok() ? unpacked : Abandon(unpacked, true, workspace);
}

Status AllToAllPrepareFinalize::Unpack(const RecordLayout& record, DType dtype, bool quantized,
                                       PrepareOutput& prepared, const Workspace& workspace,
                                       const Executor& executor) const {
  auto& state = *workspace.Get<ExchangeState>(state_);
  auto* receive = workspace.Get<std::byte>(receive_);
  auto* ids = workspace.Get<int32_t>(received_ids_);
  auto* weights = workspace.Get<float>(received_weights_);
  const auto row_ids = static_cast<size_t>(top_k());
  ParallelFor(executor, state.received, [&](int64_t index) {
    const std::byte* row = receive + index * record.bytes;
    std::memcpy(ids + index * top_k(), row + record.ids_offset, row_ids * sizeof(int32_t));
    std::memcpy(weights + index * top_k(), row + record.weights_offset, row_ids * sizeof(float));
  });
  for (int64_t slot = 0; slot < state.received * top_k(); ++slot) {
    if (ids[slot] < -1 || ids[slot] >= parts_.config.num_experts) {
      return Status::System(fmt::format("dispatch rows: row {} came with expert id {}, ids are -1..{}",
                                        slot / top_k(), ids[slot], parts_.config.num_experts - 1));
    }
  }
  const int64_t hidden = parts_.config.hidden;
  TensorView values(receive, quantized ? *parts_.activation.element : dtype, {state.received, hidden});
  values.set_stride_bytes(0, record.bytes);
  prepared.rows.values = values;
  prepared.rows.quantized = quantized;
  if (quantized) {
    if (record.scale_bytes > 0) {
      prepared.rows.block_scale = TensorView(receive + record.scale_offset, parts_.activation.scale_dtype,
                                             {state.received, ScalesPerRow(parts_.activation, hidden)});
      prepared.rows.block_scale.set_stride_bytes(0, record.bytes);
    }
    prepared.rows.tensor_scale = NeedsTensorScale(parts_.activation) ? &state.tensor_scale : nullptr;
  }
  prepared.num_tokens = state.received;
  prepared.topk_ids = ids;
  prepared.topk_weights = weights;
  return Status::Ok();
}

Status AllToAllPrepareFinalize::UnpackBatched(const RecordLayout& record, DType dtype, bool quantized,
                                              PrepareOutput& prepared, const Workspace& workspace) const {
  auto& state = *workspace.Get<ExchangeState>(state_);
  const auto* receive = workspace.Get<std::byte>(receive_);
  const int64_t experts = parts_.config.num_local_experts, hidden = parts_.config.hidden;
  auto* counts = workspace.Get<int32_t>(batch_counts_);
  auto* place = workspace.Get<int32_t>(batch_place_);
  const DType element = quantized ? *parts_.activation.element : dtype;
  const MutableTensorView rows(workspace.Get<std::byte>(batch_rows_), element, {experts, max_rows_, hidden});
  MutableTensorView scales;
  if (quantized && record.scale_bytes > 0) {
    scales = MutableTensorView(workspace.Get<std::byte>(batch_scales_), parts_.activation.scale_dtype,
                               {experts, max_rows_, ScalesPerRow(parts_.activation, hidden)});
  }
  std::fill(counts, counts + experts, 0);
  for (int64_t index = 0; index < state.received; ++index) {
    const std::byte* row = receive + index * record.bytes;
    int32_t id = 0;
    std::memcpy(&id, row + record.ids_offset, sizeof(id));
    const int32_t expert = id >= 0 && id < parts_.config.num_experts ? LocalExpert(id) : -1;
    if (expert < 0 || counts[expert] >= max_rows_) {
      return Status::System(fmt::format("dispatch rows: row {} came for expert {}, which {}", index, id,
                                        expert < 0 ? "is not on this rank" : "has no room left"));
    }
    place[2 * index] = expert;
    place[2 * index + 1] = counts[expert]++;
    std::memcpy(rows[expert].Rows(place[2 * index + 1], 1).data(), row,
                static_cast<size_t>(record.value_bytes));
    if (!scales.empty()) {
      std::memcpy(scales[expert].Rows(place[2 * index + 1], 1).data(), row + record.scale_offset,
                  static_cast<size_t>(record.scale_bytes));
    }
  }
  prepared.rows.values = rows;
  prepared.rows.block_scale = scales;
  prepared.rows.quantized = quantized;
  prepared.rows.tensor_scale =
      quantized && NeedsTensorScale(parts_.activation) ? &state.tensor_scale : nullptr;
  prepared.num_tokens = state.received;
  prepared.expert_num_tokens = counts;
  return Status::Ok();
}

}  // namespace fusedmoe
