#include "parallel/nccl/nccl_communicator.hpp"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>
#include <thread>

#include <fmt/format.h>

#include "parallel/agreement.hpp"
#include "parallel/gather.hpp"
#include "parallel/pause.hpp"
#include "platform/cuda/card.hpp"

namespace fusedmoe {
namespace {

using Clock = std::chrono::steady_clock;

// A card takes longer to answer than a rank of the same machine.
constexpr Patience kCardPatience{1024, 8192};

double Since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Where a rank's rows come from: equal node and address are one card.
struct Place {
  int64_t node = 0;
  char address[32] = {};
};

}  // namespace

Result<std::shared_ptr<Communicator>> CardCommunicator::Create(std::shared_ptr<Communicator> host,
                                                               const NcclOptions& options,
                                                               const CardAccess& cards) {
  if (host == nullptr) {
    return Status::Usage("ranks on cards need a communicator of their hosts, which is null");
  }
  FMOE_RETURN_IF_ERROR(CheckDeadline(options.deadline_seconds));
  std::shared_ptr<CardCommunicator> made(new CardCommunicator(std::move(host), options, cards));
  Communicator& ranks = *made->host_;
  // Each step ends with a verdict of all ranks: what one of them lacks, all report, and none waits for it.
  const Status ready = made->Prepare();
  RowAgreement agreement;
  agreement.fingerprint = ready.ok() ? static_cast<uint64_t>(made->api_->version) : 0;
  agreement.other_fingerprint = "has loaded another version of NCCL";
  Status verdict;
  FMOE_RETURN_IF_ERROR(Vote(ranks, "nccl load", agreement, ready, verdict));
  FMOE_RETURN_IF_ERROR(verdict);
  FMOE_RETURN_IF_ERROR(made->RefuseSharedCards());
  if (!made->owns()) {
    FMOE_RETURN_IF_ERROR(Agree(ranks, "nccl adopt", made->Adopt()));
    return std::shared_ptr<Communicator>(std::move(made));
  }
  nccl::UniqueId id;
  FMOE_RETURN_IF_ERROR(made->ShareId(id));
  FMOE_RETURN_IF_ERROR(Agree(ranks, "nccl join", made->Join(id)));
  FMOE_RETURN_IF_ERROR(Agree(ranks, "nccl connect", made->ConnectAll()));
  return std::shared_ptr<Communicator>(std::move(made));
}

CardCommunicator::~CardCommunicator() {
  if (poison_.ok() && owns()) {  // after a failure both are aborted already
    for (const nccl::Comm comm : {rows_.load(), joined_.load()}) {
      if (comm != nullptr) {
        (void)api_->destroy(comm);
      }
    }
  }
}

std::string CardCommunicator::describe() const {
  return fmt::format("nccl {} ({}) over {}", api_->VersionText(), api_->file, host_->name());
}

// Library and card of this rank.
Status CardCommunicator::Prepare() {
  FMOE_ASSIGN_OR_RETURN(api_, nccl::Load(options_.library));
  FMOE_ASSIGN_OR_RETURN(const int64_t visible, cards_.count());
  card_ = options_.card;
  if (card_ < 0) {
    int64_t before = 0;
    for (int64_t peer = 0; peer < rank(); ++peer) {
      before += node_of(peer) == node_of(rank()) ? 1 : 0;
    }
    card_ = visible == 1 ? 0 : before;  // launchers often show each process its own card alone
    if (card_ >= visible) {
      return Status::Unsupported(
          fmt::format("rank {} is number {} of its machine, where {} cards are visible; "
                      "each rank needs a card of its own",
                      rank(), before, visible));
    }
  }
  FMOE_RETURN_IF_ERROR(cards_.select(card_));
  FMOE_ASSIGN_OR_RETURN(address_, cards_.address(card_));
  return Status::Ok();
}

// NCCL takes one rank a card, and says so in words that name neither.
Status CardCommunicator::RefuseSharedCards() {
  Place own;
  own.node = node_of(rank());
  std::memcpy(own.address, address_.data(), std::min(address_.size(), sizeof(own.address) - 1));
  FMOE_ASSIGN_OR_RETURN(const std::vector<Place> places, GatherFromRanks(*host_, "nccl cards", own));
  for (size_t first = 0; first < places.size(); ++first) {
    for (size_t second = first + 1; second < places.size(); ++second) {
      if (places[first].node == places[second].node &&
          std::memcmp(places[first].address, places[second].address, sizeof(own.address)) == 0) {
        return Status::Unsupported(
            fmt::format("ranks {} and {} both have card {} of one machine; each rank "
                        "needs a card of its own",
                        first, second, places[first].address));
      }
    }
  }
  return Status::Ok();
}

// NCCL's id is a secret of the job: it travels between its ranks only, never through a port of ours.
Status CardCommunicator::ShareId(nccl::UniqueId& id) {
  Status made;
  if (rank() == 0) {
    if (const int error = api_->get_unique_id(&id); error != nccl::kSuccess) {
      made = Status::System(api_->Describe(error, nullptr));
    }
  }
  FMOE_RETURN_IF_ERROR(Agree(*host_, "nccl id", made));
  FMOE_ASSIGN_OR_RETURN(const std::vector<nccl::UniqueId> ids, GatherFromRanks(*host_, "nccl id", id));
  id = ids.front();
  return Status::Ok();
}

Status CardCommunicator::Join(const nccl::UniqueId& id) {
  operation_ = "nccl join";
  nccl::Config config;
  config.blocking = 0;
  config.split_share = 1;
  nccl::Comm made = nullptr;
  const int joined = api_->init_rank(&made, static_cast<int>(size()), id, static_cast<int>(rank()), &config);
  joined_ = made;
  FMOE_RETURN_IF_ERROR(Check(joined));
  FMOE_RETURN_IF_ERROR(Await(joined_));
  nccl::Config blocking;
  blocking.blocking = 1;
  nccl::Comm split = nullptr;  // written when the split is done
  FMOE_RETURN_IF_ERROR(Check(api_->split(joined_, 0, static_cast<int>(rank()), &split, &blocking)));
  FMOE_RETURN_IF_ERROR(Await(joined_));
  rows_ = split;
  return rows_ == nullptr ? Poison("NCCL split off no communicator") : Status::Ok();
}

Status CardCommunicator::Adopt() {
  operation_ = "nccl adopt";
  rows_ = options_.adopt;
  int ranks = 0, own = 0, card = 0;
  FMOE_RETURN_IF_ERROR(Check(api_->count(rows_, &ranks)));
  FMOE_RETURN_IF_ERROR(Check(api_->user_rank(rows_, &own)));
  FMOE_RETURN_IF_ERROR(Check(api_->device(rows_, &card)));
  if (ranks != size() || own != rank() || card != card_) {
    return Status::Usage(
        fmt::format("the adopted communicator is that of rank {} of {} on card {}, the host's "
                    "is that of rank {} of {}, with card {} chosen",
                    own, ranks, card, rank(), size(), card_));
  }
  return Status::Ok();
}

// Every pair connects when it first meets, and NCCL waits for the other side without a deadline: done here,
// by a thread that is given up when it takes too long.
Status CardCommunicator::ConnectAll() {
  constexpr int64_t kBytes = 16;
  const auto ranks = static_cast<size_t>(size());
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> memory,
                        cards_.allocate(2 * size() * kBytes, "the first exchange"));
  const std::vector<int64_t> ones(ranks, 1);
  std::vector<int64_t> ascending(ranks);
  std::iota(ascending.begin(), ascending.end(), 0);
  RowExchange exchange;
  exchange.operation = "nccl connect";
  exchange.row_bytes = kBytes;
  exchange.send = memory.get();
  exchange.receive = memory.get() + size() * kBytes;
  exchange.send_rows = exchange.receive_rows = ones;
  exchange.send_offsets = exchange.receive_offsets = ascending;
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false, late = false;
  Status status;
  std::thread connecting([&] {
    Status own = cards_.select(card_);
    if (own.ok()) {
      own = Enqueue({&exchange, 1}, nullptr);
    }
    const std::lock_guard lock(mutex);
    status = std::move(own);
    done = true;
    changed.notify_all();
  });
  {
    std::unique_lock lock(mutex);
    late = !changed.wait_for(lock, std::chrono::duration<double>(options_.deadline_seconds),
                             [&] { return done; });
  }
  if (late) {
    AbortOwn();  // what the thread waits in returns with an error
  }
  connecting.join();
  if (late) {
    return Poison(fmt::format("not all ranks have connected within {} s", options_.deadline_seconds));
  }
  FMOE_RETURN_IF_ERROR(status);
  return Finish(nullptr);
}

Status CardCommunicator::Await(nccl::Comm comm) {
  const Clock::time_point begin = Clock::now();
  for (int64_t polls = 0;; ++polls) {
    int state = nccl::kSuccess;
    FMOE_RETURN_IF_ERROR(Check(api_->async_error(comm, &state)));
    if (state != nccl::kInProgress) {
      return Check(state);
    }
    if (options_.interrupted != nullptr && options_.interrupted->load(std::memory_order_relaxed)) {
      return Poison("was stopped while it waited for NCCL");
    }
    if (Since(begin) > options_.deadline_seconds) {
      return Poison(fmt::format("has waited {:.1f} s for the other ranks, the deadline is {} s", Since(begin),
                                options_.deadline_seconds));
    }
    Pause(kCardPatience, polls);
  }
}

Status CardCommunicator::Check(int error) {
  return error == nccl::kSuccess || error == nccl::kInProgress
             ? Status::Ok()
             : Poison(api_->Describe(error, rows_ != nullptr ? rows_.load() : joined_.load()));
}

// What waits on the card for other ranks ends with the abort; the buffers are then free again.
Status CardCommunicator::Poison(std::string what) {
  poison_ = Status::System(
      fmt::format("{} (exchange {} of cards): rank {} {}", operation_, exchanges_, rank(), what));
  AbortOwn();
  return poison_;
}

void CardCommunicator::GiveUp(const Status& why) {
  if (poison_.ok()) {  // else all is given up, and the first reason stands
    poison_ = why;
    AbortOwn();
  }
}

void CardCommunicator::AbortOwn() {
  if (owns()) {
    for (std::atomic<nccl::Comm>* comm : {&rows_, &joined_}) {
      if (const nccl::Comm own = comm->exchange(nullptr); own != nullptr) {
        (void)api_->abort(own);
      }
    }
  }
}

Status CardCommunicator::Post(const RowExchange& exchange, void* stream) {
  const int64_t row_bytes = exchange.row_bytes;
  // Each rank begins with itself and its successors, so that not all of them write to rank 0 first.
  for (int64_t step = 0; step < size(); ++step) {
    const int64_t peer = (rank() + step) % size();
    const auto index = static_cast<size_t>(peer);
    if (exchange.send_rows[index] > 0) {
      const int64_t bytes = exchange.send_rows[index] * row_bytes;
      FMOE_RETURN_IF_ERROR(
          Check(api_->send(exchange.send + exchange.send_offsets[index] * row_bytes,
                           static_cast<size_t>(bytes), nccl::kUint8, static_cast<int>(peer), rows_, stream)));
      bytes_sent_ += peer == rank() ? 0 : bytes;
    }
    if (exchange.receive_rows[index] > 0) {
      FMOE_RETURN_IF_ERROR(Check(api_->receive(exchange.receive + exchange.receive_offsets[index] * row_bytes,
                                               static_cast<size_t>(exchange.receive_rows[index] * row_bytes),
                                               nccl::kUint8, static_cast<int>(peer), rows_, stream)));
    }
  }
  return Status::Ok();
}

Status CardCommunicator::Enqueue(std::span<const RowExchange> exchanges, void* stream) {
  FMOE_RETURN_IF_ERROR(poison_);
  if (exchanges.empty()) {
    return Status::Ok();
  }
  for (const RowExchange& exchange : exchanges) {
    FMOE_RETURN_IF_ERROR(CheckEntries(exchange, size()));
  }
  FMOE_ASSIGN_OR_RETURN(const int64_t current, cards_.current());
  if (current != card_) {
    return Status::Usage(fmt::format("{}: rank {} has card {}, but card {} is current for this thread",
                                     exchanges.front().operation, rank(), card_, current));
  }
  operation_ = exchanges.front().operation;
  ++exchanges_;
  FMOE_RETURN_IF_ERROR(Check(api_->group_start()));
  for (const RowExchange& exchange : exchanges) {
    if (Status posted = Post(exchange, stream); !posted.ok()) {
      (void)api_->group_end();
      return posted;
    }
  }
  const int ended = api_->group_end();
  FMOE_RETURN_IF_ERROR(Check(ended));
  return ended == nccl::kInProgress ? Await(rows_) : Status::Ok();  // an adopted one may be non-blocking
}

Status CardCommunicator::Finish(void* stream) {
  constexpr int64_t kPollsPerCheck = 64;
  FMOE_RETURN_IF_ERROR(poison_);
  const Clock::time_point begin = Clock::now();
  for (int64_t polls = 0;; ++polls) {
    Result<bool> idle = cards_.idle(stream);
    if (!idle.ok()) {
      return Poison(idle.status().message());
    }
    if (*idle) {
      return Status::Ok();
    }
    if (polls % kPollsPerCheck == kPollsPerCheck - 1) {
      int state = nccl::kSuccess;
      FMOE_RETURN_IF_ERROR(Check(api_->async_error(rows_, &state)));
      FMOE_RETURN_IF_ERROR(Check(state));
      if (options_.interrupted != nullptr && options_.interrupted->load(std::memory_order_relaxed)) {
        return Poison("was stopped while it waited for its card");
      }
      if (Since(begin) > options_.deadline_seconds) {
        return Poison(
            fmt::format("has waited {:.1f} s for its card and the ranks that it exchanges with, the "
                        "deadline is {} s",
                        Since(begin), options_.deadline_seconds));
      }
    }
    Pause(kCardPatience, polls);
  }
}

Result<std::shared_ptr<Communicator>> NcclCommunicator(std::shared_ptr<Communicator> host,
                                                       const NcclOptions& options) {
  static constexpr CardAccess kCards = {&cuda::CountCards, &cuda::CurrentCard, &cuda::SelectCard,
                                        &cuda::BusAddress, &cuda::IsIdle,      &cuda::AllocateOnDevice};
  return CardCommunicator::Create(std::move(host), options, kCards);
}

}  // namespace fusedmoe
