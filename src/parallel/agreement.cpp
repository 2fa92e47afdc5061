#include "parallel/agreement.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace fusedmoe {
namespace {

constexpr uint32_t kMagic = 0x454f4d46;  // "FMOE"
constexpr uint32_t kVersion = 1;

template <typename T>
std::byte* Bytes(T* data) {
  return reinterpret_cast<std::byte*>(data);
}

void Object(const Status& status, int64_t rank, WireVerdict& verdict) {
  if (verdict.code != 0 || status.ok()) {
    return;
  }
  verdict.code = static_cast<int32_t>(status.code());
  verdict.rank = static_cast<int32_t>(rank);
  const std::string text = status.ToString();
  const size_t length = std::min(text.size(), sizeof(verdict.text) - 1);
  std::memcpy(verdict.text, text.data(), length);
  verdict.text[length] = '\0';
}

Status Wrong(int64_t peer, std::string_view what, int64_t actual, int64_t required) {
  return Status::System(
      fmt::format("the header of rank {} says {} {}, {} is required", peer, what, actual, required));
}

Status CheckHeader(const WireHeader& header, const WireHeader& own, const RowAgreement& agreement,
                   int64_t peer) {
  if (header.magic != kMagic || header.version != kVersion) {
    return Status::System(
        fmt::format("the header of rank {} is corrupt: magic {:#x}, version {}; {:#x}, {} "
                    "are required",
                    peer, header.magic, header.version, kMagic, kVersion));
  }
  if (header.failed != 0) {
    return Status::Ok();  // its verdict says why
  }
  if (header.sequence != own.sequence) {
    return Wrong(peer, "exchange", header.sequence, own.sequence);
  }
  if (header.fingerprint != own.fingerprint) {
    return Status::System(
        fmt::format("rank {} runs with another layer, checkpoint or options: fingerprint "
                    "{:016x}, {:016x} is required",
                    peer, header.fingerprint, own.fingerprint));
  }
  if (header.epoch != own.epoch) {
    return Wrong(peer, "placement epoch", header.epoch, own.epoch);
  }
  if (header.row_bytes != own.row_bytes) {
    return Wrong(peer, "bytes a row", header.row_bytes, own.row_bytes);
  }
  const int64_t limit = agreement.max_rows.empty() ? 0 : agreement.max_rows[static_cast<size_t>(peer)];
  if (header.rows < 0 || header.rows > limit || (agreement.exact_rows && header.rows != limit)) {
    return Status::System(fmt::format("the header of rank {} announces {} rows, {}{} {}", peer, header.rows,
                                      agreement.exact_rows ? "" : "at most ", limit,
                                      agreement.exact_rows ? "are due" : "fit"));
  }
  if (peer >= agreement.same_tokens_begin && peer < agreement.same_tokens_end &&
      header.tokens != own.tokens) {
    return Wrong(peer, "tokens", header.tokens, own.tokens);
  }
  return Status::Ok();
}

RowExchange FixedExchange(std::string_view operation, int64_t bytes, const std::byte* send,
                          std::byte* receive, const int64_t* send_offsets, const AgreementMemory& memory,
                          size_t ranks) {
  RowExchange exchange;
  exchange.operation = operation;
  exchange.row_bytes = bytes;
  exchange.send = send;
  exchange.receive = receive;
  exchange.send_rows = exchange.receive_rows = {memory.ones, ranks};
  exchange.send_offsets = {send_offsets, ranks};
  exchange.receive_offsets = {memory.ascending, ranks};
  return exchange;
}

Status StatusOf(const WireVerdict& verdict) {
  std::string text = fmt::format("rank {}: {}", verdict.rank,
                                 std::string_view(verdict.text, strnlen(verdict.text, sizeof(verdict.text))));
  switch (static_cast<StatusCode>(verdict.code)) {
    case StatusCode::kNo:
      return Status::No(std::move(text));
    case StatusCode::kUsage:
      return Status::Usage(std::move(text));
    case StatusCode::kBadInput:
      return Status::BadInput(std::move(text));
    case StatusCode::kUnsupported:
      return Status::Unsupported(std::move(text));
    default:
      return Status::System(std::move(text));
  }
}

}  // namespace

AgreementSlots BookAgreement(int64_t ranks, WorkspaceBook& book) {
  AgreementSlots slots;
  slots.headers = book.Book("ranks.headers", 2 * ranks * static_cast<int64_t>(sizeof(WireHeader)));
  slots.verdicts = book.Book("ranks.verdicts", (ranks + 1) * static_cast<int64_t>(sizeof(WireVerdict)));
  slots.numbers = book.Book("ranks.numbers", 3 * ranks * static_cast<int64_t>(sizeof(int64_t)));
  return slots;
}

AgreementMemory AgreementMemoryOf(const AgreementSlots& slots, int64_t ranks, const Workspace& workspace) {
  AgreementMemory memory;
  memory.sent = workspace.Get<WireHeader>(slots.headers);
  memory.received = memory.sent + ranks;
  memory.verdicts = workspace.Get<WireVerdict>(slots.verdicts);
  memory.ones = workspace.Get<int64_t>(slots.numbers);
  memory.ascending = memory.ones + ranks;
  memory.zeros = memory.ascending + ranks;
  return memory;
}

Status AgreeOnRows(Communicator& communicator, const RowAgreement& agreement, const Status& own,
                   const AgreementMemory& memory, std::span<int64_t> receive_rows) {
  const int64_t ranks = communicator.size();
  const auto count = static_cast<size_t>(ranks);
  WireHeader header;
  header.magic = kMagic;
  header.version = kVersion;
  header.sequence = communicator.sequence();
  header.fingerprint = agreement.fingerprint;
  header.epoch = agreement.epoch;
  header.row_bytes = agreement.row_bytes;
  header.tokens = static_cast<int32_t>(agreement.tokens);
  header.failed = own.ok() ? 0 : 1;
  header.amax = agreement.amax;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    memory.ones[rank] = 1;
    memory.ascending[rank] = rank;
    memory.zeros[rank] = 0;
    header.rows =
        agreement.send_rows.empty() || !own.ok() ? 0 : agreement.send_rows[static_cast<size_t>(rank)];
    memory.sent[rank] = header;
  }
  FMOE_RETURN_IF_ERROR(
      communicator.Exchange(FixedExchange(agreement.header_operation, sizeof(WireHeader), Bytes(memory.sent),
                                          Bytes(memory.received), memory.ascending, memory, count)));
  WireVerdict& verdict = memory.verdicts[ranks];
  verdict = WireVerdict{};
  Object(own, communicator.rank(), verdict);
  for (int64_t peer = 0; peer < ranks; ++peer) {
    if (verdict.code == 0) {
      Object(CheckHeader(memory.received[peer], header, agreement, peer), communicator.rank(), verdict);
    }
    if (!receive_rows.empty()) {
      receive_rows[static_cast<size_t>(peer)] = memory.received[peer].rows;
    }
  }
  FMOE_RETURN_IF_ERROR(
      communicator.Exchange(FixedExchange(agreement.verdict_operation, sizeof(WireVerdict), Bytes(&verdict),
                                          Bytes(memory.verdicts), memory.zeros, memory, count)));
  for (int64_t peer = 0; peer < ranks; ++peer) {
    if (memory.verdicts[peer].code != 0) {
      return StatusOf(memory.verdicts[peer]).WithContext(agreement.verdict_operation);
    }
  }
  return Status::Ok();
}

Status Agree(Communicator& communicator, std::string_view operation, const Status& status,
             uint64_t fingerprint) {
  const auto ranks = static_cast<size_t>(communicator.size());
  std::vector<WireHeader> headers(2 * ranks);
  std::vector<WireVerdict> verdicts(ranks + 1);
  std::vector<int64_t> numbers(3 * ranks);
  AgreementMemory memory;
  memory.sent = headers.data();
  memory.received = headers.data() + ranks;
  memory.verdicts = verdicts.data();
  memory.ones = numbers.data();
  memory.ascending = memory.ones + ranks;
  memory.zeros = memory.ascending + ranks;
  RowAgreement agreement;
  agreement.header_operation = agreement.verdict_operation = operation;
  agreement.fingerprint = fingerprint;
  return AgreeOnRows(communicator, agreement, status, memory, {});
}

uint64_t Fingerprint(const void* data, int64_t bytes, uint64_t seed) {
  const auto* byte = static_cast<const unsigned char*>(data);
  uint64_t hash = seed;
  for (int64_t index = 0; index < bytes; ++index) {
    hash = (hash ^ byte[index]) * 0x100000001b3ULL;
  }
  return hash;
}

Status Communicator::Exchange(const RowExchange& exchange) {
  FMOE_RETURN_IF_ERROR(Start(exchange));
  return Wait();
}

}  // namespace fusedmoe
