#include "jobs/bench/rank_traffic.hpp"

#include <algorithm>

#include "prepare_finalize/all_to_all/operations.hpp"

namespace fusedmoe::bench {
namespace {

/// Whether tokens travel by it; on cards also their ids and weights.
bool CarriesTokens(std::string_view operation) {
  return operation == kDispatchRows || operation == kDispatchIds || operation == kDispatchWeights;
}

}  // namespace

void CountingCommunicator::Count(const RowExchange& exchange) {
  const std::string_view operation = exchange.operation;
  double& part = CarriesTokens(operation)                                ? sent_.dispatch
                 : operation == kCombineRows || operation == kOutputRows ? sent_.combine
                                                                         : sent_.control;
  for (int64_t peer = 0; peer < size(); ++peer) {
    if (peer != rank()) {
      const auto bytes =
          static_cast<double>(exchange.send_rows[static_cast<size_t>(peer)] * exchange.row_bytes);
      part += bytes;
      (node_of(peer) == node_of(rank()) ? sent_.local : sent_.remote) += bytes;
    }
  }
  if (operation == kCombineRows) {
    combine_row_bytes_ = exchange.row_bytes;
  }
}

Status CountingCommunicator::Start(const RowExchange& exchange) {
  Count(exchange);
  if (exchange.operation == kDispatchRows) {
    dispatch_row_bytes_ = exchange.row_bytes;
  }
  return inner_->Start(exchange);
}

Status CountingCommunicator::Enqueue(std::span<const RowExchange> exchanges, void* stream) {
  if (exchanges.empty()) {  // a question, nothing moves
    return inner_->Enqueue(exchanges, stream);
  }
  std::vector<Kept>& kept = enqueued_.emplace_back();
  int64_t dispatched = 0;  // rows, ids and weights are one record
  for (const RowExchange& exchange : exchanges) {
    Count(exchange);
    kept.emplace_back(exchange);
    dispatched += CarriesTokens(exchange.operation) ? exchange.row_bytes : 0;
  }
  dispatch_row_bytes_ = dispatched > 0 ? dispatched : dispatch_row_bytes_;
  return inner_->Enqueue(exchanges, stream);
}

Status CountingCommunicator::EnqueueAgain(void* stream) const {
  for (const std::vector<Kept>& group : enqueued_) {
    std::vector<RowExchange> exchanges;
    for (const Kept& kept : group) {
      exchanges.push_back(kept.View());
    }
    FMOE_RETURN_IF_ERROR(inner_->Enqueue(exchanges, stream));
  }
  return Status::Ok();
}

CountingCommunicator::Kept::Kept(const RowExchange& of)
    : exchange(of),
      send(of.send_rows.begin(), of.send_rows.end()),
      send_at(of.send_offsets.begin(), of.send_offsets.end()),
      receive(of.receive_rows.begin(), of.receive_rows.end()),
      receive_at(of.receive_offsets.begin(), of.receive_offsets.end()) {}

RowExchange CountingCommunicator::Kept::View() const {
  RowExchange view = exchange;
  view.operation = "bench exchange";
  view.send_rows = send;
  view.send_offsets = send_at;
  view.receive_rows = receive;
  view.receive_offsets = receive_at;
  return view;
}

double MinimumTraffic(const TokenLayout& layout, WireProtocol protocol, std::span<const int32_t> owners,
                      bool slots_apart, int64_t top_k, const std::vector<std::vector<int32_t>>& ids,
                      const RowSizes& sizes) {
  // Slots of a token that rank `rank` computes; with slices, one partial sum stands for all of them.
  const auto slots_on = [&](const int32_t* token, int64_t rank) {
    return owners.empty() ? int64_t{1} : std::count_if(token, token + top_k, [&](int32_t id) {
      return id >= 0 && owners[static_cast<size_t>(id)] == rank;
    });
  };
  const auto ids_of = [&](int64_t rank) -> const std::vector<int32_t>& {
    return ids[static_cast<size_t>(layout.shares_tokens ? rank / layout.tp : rank)];
  };
  const auto share_of = [&](int64_t rank) {
    TokenLayout other = layout;
    other.tp_rank = rank % layout.tp;
    const auto tokens = static_cast<int64_t>(ids_of(rank).size()) / top_k;
    return std::pair(other.ShareBegin(tokens, other.tp_rank), other.ShareBegin(tokens, other.tp_rank + 1));
  };
  const bool by_slot = slots_apart || protocol == WireProtocol::kExpertRows;
  int64_t bytes = 0;
  for (int64_t peer = 0; peer < layout.ranks; ++peer) {
    if (peer == layout.rank) {
      continue;
    }
    const auto [begin, end] = share_of(layout.rank);
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slots = slots_on(ids_of(layout.rank).data() + token * top_k, peer);
      if (protocol == WireProtocol::kExpertRows) {
        bytes += slots * (sizes.values + sizes.slot);
      } else if (protocol == WireProtocol::kGather || slots > 0) {
        bytes += sizes.values + top_k * sizes.slot;
      }
    }
    const auto [first, last] = share_of(peer);
    for (int64_t token = first; token < last; ++token) {
      const int64_t slots = slots_on(ids_of(peer).data() + token * top_k, layout.rank);
      bytes += (by_slot ? slots : std::min<int64_t>(slots, 1)) * sizes.back;
    }
    if (layout.shares_tokens && peer / layout.tp == layout.rank / layout.tp) {
      bytes += (end - begin) * sizes.output;
    }
  }
  return static_cast<double>(bytes);
}

}  // namespace fusedmoe::bench
