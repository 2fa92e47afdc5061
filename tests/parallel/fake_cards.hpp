#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fusedmoe/communicator.hpp>

#include "fake_nccl/fake_nccl.hpp"
#include "parallel/nccl/nccl_communicator.hpp"

/// Ranks as threads whose cards are numbers: rows go through a library that stands for NCCL.
namespace fusedmoe::testing_support {

inline constexpr int64_t kCards = 4;
inline thread_local int64_t current_card = 0;
inline std::atomic<bool> stream_idle{true};
inline std::atomic<bool> same_card{false};

inline constexpr CardAccess kFakeCards = {
    [] { return Result<int64_t>(kCards); },
    [] { return Result<int64_t>(current_card); },
    [](int64_t card) {
      current_card = card;
      return Status::Ok();
    },
    [](int64_t card) { return Result<std::string>("0000:0" + std::to_string(same_card ? 0 : card)); },
    [](void* /*stream*/) { return Result<bool>(stream_idle.load()); },
    [](int64_t bytes, std::string_view /*what*/) {
      return Result<std::shared_ptr<std::byte>>(std::shared_ptr<std::byte>(
          new std::byte[static_cast<size_t>(bytes)](), std::default_delete<std::byte[]>()));
    }};

/// The controls of the library that stands for NCCL.
FakeNccl& Fake();

using Joined = Result<std::shared_ptr<Communicator>>;

/// Joins `ranks` threads and runs `body` in each of them; their outcomes.
std::vector<Status> OnRanks(int64_t ranks, NcclOptions options,
                            const std::function<Status(Communicator&)>& body);

inline void ResetFakeCards() {
  Fake().Reset();
  stream_idle = true;
  same_card = false;
}

}  // namespace fusedmoe::testing_support
