#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// Rows from every rank to every rank. All arrays have one entry a rank; counts and offsets are in rows of
/// `row_bytes`. Regions of the send buffer may overlap (the same rows to several ranks), those of the receive
/// buffer must not. What a rank sends to itself is copied.
struct RowExchange {
  std::string_view operation;  ///< named in errors: "dispatch rows"
  int64_t row_bytes = 0;
  const std::byte* send = nullptr;
  std::span<const int64_t> send_rows;
  std::span<const int64_t> send_offsets;
  std::byte* receive = nullptr;
  std::span<const int64_t> receive_rows;
  std::span<const int64_t> receive_offsets;
};

/// The ranks that run one layer together. Every rank makes the same calls in the same order. Counts are not
/// negotiated here: both sides must have agreed on them, in exchanges of fixed size, before rows move.
///
/// A call that fails (a peer that does not answer within the deadline, an error of the transport) poisons the
/// communicator: it refuses everything afterwards with the first error, and the transport may still write to
/// the buffers of the call that failed, so they must stay where they are until Abort or the end of the
/// process.
///
/// Not thread-safe: one call at a time. Layers that share it lock it (TryLock): a second forward at the
/// same time is refused.
///
/// A communicator of cards (NcclCommunicator) does all of this through the host communicator that it was made
/// from, and has Enqueue and Finish beside it.
class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual std::string_view name() const = 0;  ///< "single", "in_process", "mpi", "nccl"
  /// As plans print it: the name, with version and file where a library of its own does the work.
  virtual std::string describe() const { return std::string(name()); }
  virtual int64_t rank() const = 0;  ///< of this process: 0 .. size() - 1
  virtual int64_t size() const = 0;  ///< ranks of the group
  /// Exchanges begun so far: equal on all ranks that are in step.
  virtual int64_t sequence() const = 0;
  /// Bytes sent to other ranks so far.
  virtual int64_t bytes_sent() const = 0;
  /// The machine that a rank runs on: equal numbers share memory.
  virtual int64_t node_of(int64_t /*rank*/) const { return 0; }
  /// Begins an exchange; at most one is under way. All memory must stay until Wait has returned.
  virtual Status Start(const RowExchange& exchange) = 0;
  /// Completes it. kSystem names the operation and the ranks that were waited for.
  virtual Status Wait() = 0;
  /// Ends the processes of all ranks with this exit code, where the transport can; returns otherwise.
  virtual void Abort(int exit_code) = 0;

  /// Start and Wait.
  Status Exchange(const RowExchange& exchange);

  /// Locks it for the calls that follow; false, without waiting, where it is locked. A forward of a layer on
  /// it holds the lock for as long as it runs. A communicator that exchanges through another locks the other.
  virtual bool TryLock() { return !locked_.exchange(true, std::memory_order_acquire); }
  virtual void Unlock() { locked_.store(false, std::memory_order_release); }

  /// Whether rows on cards can be exchanged: Enqueue and Finish.
  virtual bool on_cards() const { return false; }
  /// Enqueues exchanges of rows on cards, all as one, in the order of `stream` (cudaStream_t) of this rank's
  /// card: waits for nothing, allocates nothing, and can be captured into a CUDA graph. The counts are read
  /// before it returns. kUnsupported where on_cards() is false; kSystem, with rank and operation, where the
  /// transport refuses. Without exchanges: ok, or why this communicator refuses everything.
  virtual Status Enqueue(std::span<const RowExchange> exchanges, void* stream);
  /// Waits until everything enqueued in `stream` is done, under the deadline. kSystem, with rank and
  /// operation, when it passes or the transport reports an error; what is under way on the card is then given
  /// up, so that nothing waits for ever. Engines that wait for their streams themselves have no deadline.
  virtual Status Finish(void* stream);
  /// Gives up what is under way on this rank's card: it waits for rows that will not come, because a rank has
  /// failed behind an agreement. Everything afterwards is refused with `why`. Without cards nothing happens.
  virtual void GiveUp(const Status& why);

 private:
  std::atomic<bool> locked_{false};
};

struct CommunicatorOptions {
  double deadline_seconds = 60;  ///< of every exchange; above 0, else kUsage
  /// When it becomes true, a waiting exchange fails at once (a launcher that takes the job down). May be
  /// null.
  const std::atomic<bool>* interrupted = nullptr;
};

/// One rank: what it sends to itself is copied.
std::shared_ptr<Communicator> SingleCommunicator();

/// `size` ranks in one process, one thread each: element r serves rank r. For tests and simulations. kUsage
/// beyond 1 to 4096.
Result<std::vector<std::shared_ptr<Communicator>>> InProcessCommunicators(
    int64_t size, const CommunicatorOptions& options = {});

/// The ranks that mpirun started this process among. `plugin` is the shared module libfusedmoe_mpi.so: this
/// library itself does not need MPI. Initializes MPI unless somebody did, and finalizes it, when it did, with
/// the last communicator, if all were destroyed in good health; MPI starts once in a process, so that another
/// one is refused afterwards. All MPI communicators of a process are used by one thread at a time
/// (MPI_THREAD_SERIALIZED). Joining waits in MPI_Init without a deadline: a rank that never calls it holds
/// the others until mpirun ends the job. kUnsupported when the module or MPI cannot be loaded, kSystem when
/// MPI fails.
Result<std::shared_ptr<Communicator>> MpiCommunicator(const std::string& plugin,
                                                      const CommunicatorOptions& options = {});

/// How ranks on cards find NCCL and one another.
struct NcclOptions {
  /// File to load NCCL from; empty: libnccl.so.2 where the loader looks (LD_LIBRARY_PATH, ldconfig), or the
  /// one that the process has loaded already.
  std::string library;
  double deadline_seconds = 60;  ///< of joining, and of Finish
  /// As in CommunicatorOptions.
  const std::atomic<bool>* interrupted = nullptr;
  /// The card of this rank; it becomes current for the calling thread. -1: the one whose number is this
  /// rank's among the ranks of its machine, or the only one that is visible.
  int64_t card = -1;
  /// An ncclComm_t of the same ranks that the caller owns: used instead of a new one, and neither aborted nor
  /// destroyed. After a failure its owner must abort it. Null: a new one.
  void* adopt = nullptr;
};

/// Ranks of `host` that own a card each, of one machine or of several. NCCL is opened at run time; all ranks
/// must call. Layers on a card are given this as their communicator; calls of Forward and Enqueue need that
/// card to be current. Errors, the same on all ranks: kUnsupported when NCCL is missing or older than 2.18,
/// when ranks have different versions, when two share a card or one has none; kSystem when NCCL fails or not
/// all ranks have joined within the deadline.
Result<std::shared_ptr<Communicator>> NcclCommunicator(std::shared_ptr<Communicator> host,
                                                       const NcclOptions& options = {});

/// The NCCL that NcclCommunicator would load.
struct NcclLibrary {
  std::string file;
  std::string version;  ///< "2.28.9"
};
/// kUnsupported, with what was looked for and what is required, where there is none.
Result<NcclLibrary> FindNccl(const std::string& library = {});

/// Agrees on the outcome of something that every rank did for itself: ok when all report ok and the same
/// `fingerprint`; else the same error on all ranks, that of the lowest rank that failed. Every rank must
/// call, whatever its own status.
Status Agree(Communicator& communicator, std::string_view operation, const Status& status,
             uint64_t fingerprint = 0);

}  // namespace fusedmoe
