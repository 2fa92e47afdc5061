// A library with NCCL's names that holds callers to its protocol: sends and receives in groups, as bytes, of
// equal length on both sides; joining and splitting that take a while; nothing after an abort.

#include "fake_nccl/fake_nccl.hpp"

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "parallel/nccl/nccl_api.hpp"

namespace {

using fusedmoe::nccl::Config;
using fusedmoe::nccl::UniqueId;

constexpr int kSuccess = 0, kInvalidUsage = 5, kRemoteError = 6, kInProgress = 7;

/// The ranks of one communicator, and the messages between them.
struct World {
  int joined = 0;
  std::map<std::pair<int, int>, std::deque<std::string>> mail;  // by (sender, receiver)
};

struct Rank {
  std::shared_ptr<World> world;
  std::string key;
  int rank = 0, size = 0, splits = 0;
  bool blocking = true, aborted = false;
  Rank* pending = nullptr;  // a split that is not done
  void** pending_result = nullptr;
};

struct Message {
  Rank* comm;
  bool is_send;
  void* data;
  size_t bytes;
  int peer;
};

FakeNccl controls;
std::mutex mutex;
std::condition_variable changed;
std::map<std::string, std::shared_ptr<World>> worlds;
int next_id = 0;
thread_local bool in_group = false;
thread_local std::vector<Message> group;

Rank* Join(const std::string& key, int rank, int size, const Config& config) {
  std::shared_ptr<World>& world = worlds[key];
  world = world == nullptr ? std::make_shared<World>() : world;
  ++world->joined;
  auto* made = new Rank{world, key, rank, size};
  made->blocking = config.blocking != 0;
  return made;
}

int Violation() {
  ++controls.violations;
  return kInvalidUsage;
}

int Add(Message message, int type) {
  const std::lock_guard lock(mutex);
  if (!in_group || type != fusedmoe::nccl::kUint8 || message.comm->aborted ||
      message.comm->pending != nullptr) {
    return Violation();
  }
  group.push_back(message);
  return kSuccess;
}

}  // namespace

extern "C" {

FakeNccl* fake_nccl() {
  return &controls;
}

int ncclGetVersion(int* version) {
  *version = controls.version;
  return kSuccess;
}

int ncclGetUniqueId(UniqueId* id) {
  const std::lock_guard lock(mutex);
  const std::string text = "id " + std::to_string(next_id++);
  std::memcpy(id->bytes, text.c_str(), text.size() + 1);
  return kSuccess;
}

int ncclCommInitRankConfig(void** comm, int size, UniqueId id, int rank, Config* config) {
  const std::lock_guard lock(mutex);
  if (config->size < sizeof(Config) || config->magic != 0xcafebeef) {
    return Violation();
  }
  *comm = Join(id.bytes, rank, size, *config);
  return config->blocking == 0 ? kInProgress : kSuccess;
}

int ncclCommSplit(void* comm, int /*color*/, int key, void** split, Config* config) {
  const std::lock_guard lock(mutex);
  auto* parent = static_cast<Rank*>(comm);
  parent->pending = Join(parent->key + "/" + std::to_string(parent->splits++), key, parent->size, *config);
  parent->pending_result = split;
  return kInProgress;
}

int ncclCommGetAsyncError(void* comm, int* state) {
  const std::lock_guard lock(mutex);
  auto* own = static_cast<Rank*>(comm);
  const World& awaited = own->pending != nullptr ? *own->pending->world : *own->world;
  *state = kInProgress;
  if (controls.join_hangs || awaited.joined < own->size) {
    return kSuccess;
  }
  if (own->pending != nullptr) {
    *own->pending_result = std::exchange(own->pending, nullptr);
  }
  *state = controls.async_error;
  return kSuccess;
}

int ncclCommAbort(void* comm) {
  const std::lock_guard lock(mutex);
  static_cast<Rank*>(comm)->aborted = true;  // kept: tests see whether it is used again
  ++controls.aborts;
  changed.notify_all();
  return kSuccess;
}

int ncclCommDestroy(void* comm) {
  const std::lock_guard lock(mutex);
  ++controls.destroys;
  delete static_cast<Rank*>(comm);
  return kSuccess;
}

int ncclCommCount(void* comm, int* count) {
  *count = static_cast<Rank*>(comm)->size;
  return kSuccess;
}

int ncclCommUserRank(void* comm, int* rank) {
  *rank = static_cast<Rank*>(comm)->rank;
  return kSuccess;
}

int ncclCommCuDevice(void* comm, int* device) {
  *device = static_cast<Rank*>(comm)->rank;
  return kSuccess;
}

int ncclSend(const void* data, size_t count, int type, int peer, void* comm, void* /*stream*/) {
  ++controls.sends;
  return controls.send_error != 0
             ? controls.send_error.load()
             : Add({static_cast<Rank*>(comm), true, const_cast<void*>(data), count, peer}, type);
}

int ncclRecv(void* data, size_t count, int type, int peer, void* comm, void* /*stream*/) {
  ++controls.receives;
  return Add({static_cast<Rank*>(comm), false, data, count, peer}, type);
}

int ncclGroupStart() {
  ++controls.groups;
  in_group = true;
  return kSuccess;
}

int ncclGroupEnd() {
  std::unique_lock lock(mutex);
  const std::vector<Message> messages = std::exchange(group, {});
  in_group = false;
  if (controls.rows_wait) {
    return kSuccess;
  }
  for (const Message& message : messages) {
    if (message.is_send) {
      message.comm->world->mail[{message.comm->rank, message.peer}].emplace_back(
          static_cast<const char*>(message.data), message.bytes);
    }
  }
  changed.notify_all();
  for (const Message& message : messages) {
    if (message.is_send) {
      continue;
    }
    std::deque<std::string>& box = message.comm->world->mail[{message.peer, message.comm->rank}];
    changed.wait(lock, [&] { return message.comm->aborted || (!controls.rows_hang && !box.empty()); });
    if (message.comm->aborted) {
      return kRemoteError;
    }
    if (box.front().size() != message.bytes) {
      return Violation();
    }
    std::memcpy(message.data, box.front().data(), message.bytes);
    box.pop_front();
  }
  return kSuccess;
}

const char* ncclGetErrorString(int error) {
  return error == kRemoteError ? "remote process exited or there was a network error" : "invalid usage";
}

const char* ncclGetLastError(void* /*comm*/) {
  return "";
}

}  // extern "C"
