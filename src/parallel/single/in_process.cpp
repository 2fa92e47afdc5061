#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include <fmt/format.h>
#include <fusedmoe/communicator.hpp>

#include "parallel/mpi/engine_communicator.hpp"
#include "parallel/pause.hpp"

namespace fusedmoe {
namespace {

constexpr int kWrongLength = 1;

/// Messages between the ranks of one process, by sender, receiver and tag.
struct Mailbox {
  std::mutex mutex;
  std::map<std::tuple<int32_t, int32_t, int32_t>, std::deque<std::vector<std::byte>>> messages;
};

struct InProcessRank {
  struct Slot {
    std::byte* data = nullptr;  // null: a send, complete at once
    int64_t bytes = 0;
    int32_t peer = 0, tag = 0;
  };
  std::shared_ptr<Mailbox> mailbox;
  int32_t rank = 0;
  std::vector<Slot> slots;
};

int Send(void* self, int32_t slot, const void* data, int64_t rows, int64_t row_bytes, int32_t peer,
         int32_t tag) {
  auto* own = static_cast<InProcessRank*>(self);
  const auto* begin = static_cast<const std::byte*>(data);
  own->slots[static_cast<size_t>(slot)] = {};
  const std::lock_guard lock(own->mailbox->mutex);
  own->mailbox->messages[{own->rank, peer, tag}].emplace_back(begin, begin + rows * row_bytes);
  return 0;
}

int Receive(void* self, int32_t slot, void* data, int64_t rows, int64_t row_bytes, int32_t peer,
            int32_t tag) {
  static_cast<InProcessRank*>(self)->slots[static_cast<size_t>(slot)] = {static_cast<std::byte*>(data),
                                                                         rows * row_bytes, peer, tag};
  return 0;
}

int Test(void* self, int32_t slot, int32_t* done) {
  auto* own = static_cast<InProcessRank*>(self);
  const InProcessRank::Slot& wanted = own->slots[static_cast<size_t>(slot)];
  *done = 1;
  if (wanted.data == nullptr) {
    return 0;
  }
  const std::lock_guard lock(own->mailbox->mutex);
  const auto found = own->mailbox->messages.find({wanted.peer, own->rank, wanted.tag});
  if (found == own->mailbox->messages.end()) {
    *done = 0;
    return 0;
  }
  const std::vector<std::byte> message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) {
    own->mailbox->messages.erase(found);
  }
  if (static_cast<int64_t>(message.size()) != wanted.bytes) {
    return kWrongLength;
  }
  std::memcpy(wanted.data, message.data(), message.size());
  return 0;
}

void Describe(void* /*self*/, int /*error*/, char* text, int64_t capacity) {
  const fmt::format_to_n_result<char*> end =
      fmt::format_to_n(text, static_cast<size_t>(capacity - 1), "a message of another length was expected");
  *end.out = '\0';
}

void Close(void* self) {
  delete static_cast<InProcessRank*>(self);
}

class Single final : public Communicator {
 public:
  std::string_view name() const override { return "single"; }
  int64_t rank() const override { return 0; }
  int64_t size() const override { return 1; }
  int64_t sequence() const override { return sequence_; }
  int64_t bytes_sent() const override { return 0; }
  Status Start(const RowExchange& exchange) override {
    ++sequence_;
    if (exchange.send_rows.size() != 1 || exchange.receive_rows.size() != 1 ||
        exchange.send_rows[0] != exchange.receive_rows[0]) {
      return Status::Usage(fmt::format("{}: one rank sends and receives the same rows", exchange.operation));
    }
    if (exchange.send_rows[0] > 0) {
      std::memcpy(exchange.receive + exchange.receive_offsets[0] * exchange.row_bytes,
                  exchange.send + exchange.send_offsets[0] * exchange.row_bytes,
                  static_cast<size_t>(exchange.send_rows[0] * exchange.row_bytes));
    }
    return Status::Ok();
  }
  Status Wait() override { return Status::Ok(); }
  void Abort(int /*exit_code*/) override {}

 private:
  int64_t sequence_ = 0;
};

}  // namespace

std::shared_ptr<Communicator> SingleCommunicator() {
  return std::make_shared<Single>();
}

Result<std::vector<std::shared_ptr<Communicator>>> InProcessCommunicators(
    int64_t size, const CommunicatorOptions& options) {
  if (size < 1 || size > 4096) {
    return Status::Usage(fmt::format("{} ranks in one process; 1 to 4096 are possible", size));
  }
  FMOE_RETURN_IF_ERROR(CheckDeadline(options.deadline_seconds));
  auto mailbox = std::make_shared<Mailbox>();
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int64_t rank = 0; rank < size; ++rank) {
    auto* self = new InProcessRank{mailbox, static_cast<int32_t>(rank), {}};
    self->slots.resize(2 * static_cast<size_t>(size));
    const fmoe_rank_engine engine = {FMOE_RANK_ENGINE_ABI,
                                     static_cast<int32_t>(rank),
                                     static_cast<int32_t>(size),
                                     self,
                                     nullptr,
                                     &Send,
                                     &Receive,
                                     &Test,
                                     &Describe,
                                     nullptr,
                                     &Close};
    ranks.push_back(std::make_shared<EngineCommunicator>("in_process", engine, options));
  }
  return ranks;
}

}  // namespace fusedmoe
