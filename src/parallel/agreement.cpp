#include "parallel/agreement.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

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
    return Status::System(fmt::format("rank {} {}: fingerprint {:016x}, {:016x} is required", peer,
                                      agreement.other_fingerprint, header.fingerprint, own.fingerprint));
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
  if (agreement.same_amax && header.amax != own.amax) {
    return Status::System(
        fmt::format("rank {} has the stored input scale {}, {} is required", peer, header.amax, own.amax));
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

// The communication failed while this rank had an error of its own to tell, which came first and may be why
// the others are gone.
Status Untold(const Status& own, Status communication) {
  return own.ok() || communication.ok()
             ? communication
             : std::move(communication)
                   .WithContext(fmt::format("{}; the other ranks could not be told", own.ToString()));
}

// The verdict of this rank, the last of `memory.verdicts`, goes to all; `agreed` is that of the lowest rank
// which is not content.
Status TellVerdicts(Communicator& communicator, std::string_view operation, const AgreementMemory& memory,
                    Status& agreed) {
  const int64_t ranks = communicator.size();
  FMOE_RETURN_IF_ERROR(communicator.Exchange(
      FixedExchange(operation, sizeof(WireVerdict), Bytes(memory.verdicts + ranks), Bytes(memory.verdicts),
                    memory.zeros, memory, static_cast<size_t>(ranks))));
  agreed = Status::Ok();
  for (int64_t peer = 0; peer < ranks; ++peer) {
    if (memory.verdicts[peer].code != 0) {
      agreed = StatusOf(memory.verdicts[peer]).WithContext(operation);
      break;
    }
  }
  return Status::Ok();
}

}  // namespace

Status CheckEntries(const RowExchange& exchange, int64_t num_ranks) {
  const auto ranks = static_cast<size_t>(num_ranks);
  if (exchange.send_rows.size() == ranks && exchange.send_offsets.size() == ranks &&
      exchange.receive_rows.size() == ranks && exchange.receive_offsets.size() == ranks) {
    return Status::Ok();
  }
  return Status::Usage(
      fmt::format("{}: send_rows has {}, send_offsets {}, receive_rows {}, receive_offsets {} entries; each "
                  "must have {} (one a rank)",
                  exchange.operation, exchange.send_rows.size(), exchange.send_offsets.size(),
                  exchange.receive_rows.size(), exchange.receive_offsets.size(), ranks));
}

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

AgreementStorage::AgreementStorage(int64_t ranks)
    : headers_(2 * static_cast<size_t>(ranks)),
      verdicts_(static_cast<size_t>(ranks) + 1),
      numbers_(3 * static_cast<size_t>(ranks)) {}

AgreementMemory AgreementStorage::memory() {
  const size_t ranks = verdicts_.size() - 1;
  AgreementMemory memory;
  memory.sent = headers_.data();
  memory.received = headers_.data() + ranks;
  memory.verdicts = verdicts_.data();
  memory.ones = numbers_.data();
  memory.ascending = memory.ones + ranks;
  memory.zeros = memory.ascending + ranks;
  return memory;
}

Status AgreeOnRows(Communicator& communicator, const RowAgreement& agreement, const Status& own,
                   const AgreementMemory& memory, std::span<int64_t> receive_rows) {
  Status verdict;
  FMOE_RETURN_IF_ERROR(ExchangeVerdicts(communicator, agreement, own, memory, receive_rows, verdict));
  return verdict;
}

Status ExchangeVerdicts(Communicator& communicator, const RowAgreement& agreement, const Status& own,
                        const AgreementMemory& memory, std::span<int64_t> receive_rows, Status& agreed) {
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
  FMOE_RETURN_IF_ERROR(Untold(own, communicator.Exchange(FixedExchange(
                                       agreement.header_operation, sizeof(WireHeader), Bytes(memory.sent),
                                       Bytes(memory.received), memory.ascending, memory, count))));
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
  return Untold(own, TellVerdicts(communicator, agreement.verdict_operation, memory, agreed));
}

Status AgreeOnOutcome(Communicator& communicator, std::string_view operation, const Status& own,
                      const AgreementMemory& memory) {
  const int64_t ranks = communicator.size();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    memory.ones[rank] = 1;
    memory.ascending[rank] = rank;
    memory.zeros[rank] = 0;
  }
  memory.verdicts[ranks] = WireVerdict{};
  Object(own, communicator.rank(), memory.verdicts[ranks]);
  Status agreed;
  FMOE_RETURN_IF_ERROR(Untold(own, TellVerdicts(communicator, operation, memory, agreed)));
  return agreed;
}

Status Vote(Communicator& communicator, std::string_view operation, RowAgreement agreement, const Status& own,
            Status& verdict) {
  AgreementStorage storage(communicator.size());
  agreement.header_operation = agreement.verdict_operation = operation;
  return ExchangeVerdicts(communicator, agreement, own, storage.memory(), {}, verdict);
}

Status Agree(Communicator& communicator, std::string_view operation, const Status& status,
             uint64_t fingerprint) {
  RowAgreement agreement;
  agreement.fingerprint = fingerprint;
  Status verdict;
  FMOE_RETURN_IF_ERROR(Vote(communicator, operation, agreement, status, verdict));
  return verdict;
}

// Four lanes of 64 bits, each a multiply and a rotation a word: the multiplications overlap.
uint64_t Digest(const void* data, int64_t bytes, uint64_t seed) {
  constexpr uint64_t kFactor = 0x9e3779b185ebca87ULL;
  const auto mix = [](uint64_t hash, uint64_t word) {
    return std::rotl(hash ^ (word * kFactor), 29) * 5 + 1;
  };
  uint64_t lanes[4] = {seed, seed + kFactor, seed ^ kFactor, ~seed};
  const auto* byte = static_cast<const unsigned char*>(data);
  int64_t done = 0;
  for (; done + 32 <= bytes; done += 32) {
    for (size_t lane = 0; lane < 4; ++lane) {
      uint64_t word = 0;
      std::memcpy(&word, byte + done + 8 * lane, 8);
      lanes[lane] = mix(lanes[lane], word);
    }
  }
  uint64_t hash = static_cast<uint64_t>(bytes);
  for (const uint64_t lane : lanes) {
    hash = mix(hash, lane) * kFactor;
    hash ^= hash >> 32;
  }
  return done == bytes ? hash : Fingerprint(byte + done, bytes - done, hash);
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

Status Communicator::Enqueue(std::span<const RowExchange> /*exchanges*/, void* /*stream*/) {
  return Status::Unsupported(fmt::format("'{}' moves rows in host memory, not on cards", name()));
}

Status Communicator::Finish(void* /*stream*/) {
  return Status::Unsupported(fmt::format("'{}' moves rows in host memory, not on cards", name()));
}

void Communicator::GiveUp(const Status& /*why*/) {}

}  // namespace fusedmoe
