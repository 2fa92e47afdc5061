#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <type_traits>
#include <vector>

#include <fusedmoe/communicator.hpp>

namespace fusedmoe {

/// One record of every rank, by rank: each sends its own to all. All ranks must call. Errors: those of the
/// exchange, which `operation` names.
template <typename T>
Result<std::vector<T>> GatherFromRanks(Communicator& communicator, std::string_view operation, const T& own) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto ranks = static_cast<size_t>(communicator.size());
  std::vector<T> all(ranks);
  std::vector<int64_t> ones(ranks, 1), zeros(ranks, 0), ascending(ranks);
  std::iota(ascending.begin(), ascending.end(), 0);
  RowExchange exchange;
  exchange.operation = operation;
  exchange.row_bytes = sizeof(T);
  exchange.send = reinterpret_cast<const std::byte*>(&own);
  exchange.receive = reinterpret_cast<std::byte*>(all.data());
  exchange.send_rows = exchange.receive_rows = ones;
  exchange.send_offsets = zeros;
  exchange.receive_offsets = ascending;
  FMOE_RETURN_IF_ERROR(communicator.Exchange(exchange));
  return all;
}

}  // namespace fusedmoe
