#include "parallel/fake_cards.hpp"

#include <dlfcn.h>

#include <thread>

namespace fusedmoe::testing_support {

FakeNccl& Fake() {
  static auto* const kControls = [] {
    void* module = dlopen(FMOE_FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<FakeNccl* (*)()>(dlsym(module, "fake_nccl"))();
  }();
  return *kControls;
}

std::vector<Status> OnRanks(int64_t ranks, NcclOptions options,
                            const std::function<Status(Communicator&)>& body) {
  if (options.library.empty()) {
    options.library = FMOE_FAKE_NCCL;
  }
  CommunicatorOptions host;
  host.deadline_seconds = 20;
  const auto hosts = *InProcessCommunicators(ranks, host);
  std::vector<Status> statuses(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    threads.emplace_back([&, rank] {
      const Joined joined = CardCommunicator::Create(hosts[rank], options, kFakeCards);
      statuses[rank] = joined.ok() ? body(**joined) : joined.status();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  return statuses;
}

}  // namespace fusedmoe::testing_support
