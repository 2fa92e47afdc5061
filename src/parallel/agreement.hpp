#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <fusedmoe/communicator.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/workspace.hpp>

/// Before rows move, every rank tells every other in a header of fixed size what it is about to send, and all
/// ranks exchange verdicts on what they were told. Nobody sends a row unless all are content: MPI libraries
/// write past a buffer when a peer sends more than was expected, and a rank that turns back alone leaves the
/// others waiting.
namespace fusedmoe {

/// kUsage unless each of the four spans of an exchange has an entry for each rank.
Status CheckEntries(const RowExchange& exchange, int64_t num_ranks);

/// The header of one rank to another.
struct WireHeader {
  uint32_t magic = 0;
  uint32_t version = 0;
  int64_t sequence = 0;      ///< Communicator::sequence() of this exchange
  uint64_t fingerprint = 0;  ///< of everything that must be equal on all ranks
  int64_t epoch = 0;         ///< of the expert placement
  int64_t rows = 0;          ///< that this rank is going to send to that one
  int64_t row_bytes = 0;
  int32_t tokens = 0;  ///< M of this rank
  int32_t failed = 0;  ///< this rank has an error to report: nothing else here counts
  float amax = 0;      ///< largest magnitude of its rows, where one scale serves all ranks
  uint32_t reserved = 0;
};
static_assert(sizeof(WireHeader) == 64);

/// What a rank thinks of all it knows; code 0 is content.
struct WireVerdict {
  int32_t code = 0;
  int32_t rank = 0;
  char text[248] = {};
};
static_assert(sizeof(WireVerdict) == 256);

/// Memory of one agreement among `ranks` ranks.
struct AgreementMemory {
  WireHeader* sent = nullptr;       ///< [ranks]
  WireHeader* received = nullptr;   ///< [ranks]
  WireVerdict* verdicts = nullptr;  ///< [ranks + 1], the last is our own
  int64_t* ones = nullptr;          ///< [ranks] of 1
  int64_t* ascending = nullptr;     ///< [ranks]: 0, 1, 2 ...
  int64_t* zeros = nullptr;         ///< [ranks]
};
/// That memory where there is no workspace of the host.
class AgreementStorage {
 public:
  explicit AgreementStorage(int64_t ranks);
  AgreementMemory memory();

 private:
  std::vector<WireHeader> headers_;
  std::vector<WireVerdict> verdicts_;
  std::vector<int64_t> numbers_;
};
struct AgreementSlots {
  WorkspaceSlot headers, verdicts, numbers;
};
AgreementSlots BookAgreement(int64_t ranks, WorkspaceBook& book);
AgreementMemory AgreementMemoryOf(const AgreementSlots& slots, int64_t ranks, const Workspace& workspace);

/// What this rank is about to do, and what it accepts.
struct RowAgreement {
  std::string_view header_operation = "header";  ///< names of the two exchanges, for errors
  std::string_view verdict_operation = "agreement";
  uint64_t fingerprint = 0;
  int64_t epoch = 0;
  int64_t row_bytes = 0;
  int64_t tokens = 0;
  float amax = 0;
  std::span<const int64_t> send_rows;  ///< to each rank
  std::span<const int64_t> max_rows;   ///< the most that each rank may send
  bool exact_rows = false;             ///< each rank must send just that
  int64_t same_tokens_begin = 0;       ///< ranks [begin, end) must have as many tokens as we have
  int64_t same_tokens_end = 0;
  bool same_amax = false;  ///< it is a stored scale that all ranks must share
  /// What a rank did whose fingerprint is another: "rank 1 ...".
  std::string_view other_fingerprint = "runs with another layer, checkpoint or options";
};

/// Tells the others what comes and hears what they will send: `receive_rows` [ranks]. `own` is what went
/// wrong on this rank so far: it must take part nevertheless. Allocates nothing when all goes well. On
/// failure every rank returns the same Status, that of the lowest rank that is not content.
Status AgreeOnRows(Communicator& communicator, const RowAgreement& agreement, const Status& own,
                   const AgreementMemory& memory, std::span<int64_t> receive_rows);

/// The same, but tells a failed communication (returned) from ranks that are not content (`verdict`, the same
/// on all of them): after the latter all may go on together.
Status ExchangeVerdicts(Communicator& communicator, const RowAgreement& agreement, const Status& own,
                        const AgreementMemory& memory, std::span<int64_t> receive_rows, Status& verdict);

/// Every rank says how something that all of them began has gone on it, in one exchange of verdicts: ok, or
/// on every rank the same Status, that of the lowest rank which failed. Allocates nothing when all goes well.
Status AgreeOnOutcome(Communicator& communicator, std::string_view operation, const Status& own,
                      const AgreementMemory& memory);

/// ExchangeVerdicts without rows, in memory of its own: every rank says whether it is content and brings a
/// value (`agreement.fingerprint`) that all must share. Both operations of `agreement` are `operation`.
Status Vote(Communicator& communicator, std::string_view operation, RowAgreement agreement, const Status& own,
            Status& verdict);

/// A digest of many bytes, 64 bits, about as fast as memory: for content, against accidents, not attackers.
uint64_t Digest(const void* data, int64_t bytes, uint64_t seed = 0);

/// FNV-1a, 64 bits, continued from `seed`.
uint64_t Fingerprint(const void* data, int64_t bytes, uint64_t seed = 0xcbf29ce484222325ULL);
inline uint64_t Fingerprint(std::string_view text, uint64_t seed) {
  return Fingerprint(text.data(), static_cast<int64_t>(text.size()), seed);
}

}  // namespace fusedmoe
