#include "platform/ceilings.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include <fmt/format.h>
#include <fusedmoe/machine.hpp>

#include "platform/topology.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;

/// How far ahead a thread prefetches, where it does: a page, since hardware prefetchers stop at its end.
constexpr int64_t kAhead = 4096;

/// A register of that many bytes, not more than the target has: GCC 12 keeps wider vectors in memory, and
/// such a loop waits for its own stores (Zen 3, AVX2: 14 GB/s with vectors of 64 bytes, 22 with 32).
template <int kBytes>
using Register __attribute__((vector_size(kBytes), may_alias)) = uint64_t;

/// Reads `bytes` bytes, a multiple of four lines. The sum keeps the loads alive; four accumulators hide the
/// latency of the additions. One stream a thread: four side by side read 3 % less (Zen 5, 46 against 45 GB/s
/// on one core).
template <int kBytes, bool kPrefetches>
__attribute__((always_inline)) inline uint64_t SumLines(const std::byte* data, int64_t bytes) {
  constexpr int64_t kStep = 256, kLine = 64;
  Register<kBytes> sums[4] = {};
  for (int64_t i = 0; i < bytes; i += kStep) {
    for (int64_t ahead = kAhead; kPrefetches && ahead < kAhead + kStep; ahead += kLine) {
      __builtin_prefetch(reinterpret_cast<const char*>(data + i) + ahead, 0, 3);
    }
    const auto* registers = reinterpret_cast<const Register<kBytes>*>(data + i);
#pragma GCC unroll 16
    for (int64_t j = 0; j < kStep / kBytes; ++j) {
      sums[j % 4] += registers[j];
    }
  }
  const Register<kBytes> total = sums[0] + sums[1] + sums[2] + sums[3];
  uint64_t sum = 0;
  for (int i = 0; i < kBytes / 8; ++i) {
    sum += total[i];
  }
  return sum;
}

using Sum = uint64_t (*)(const std::byte* data, int64_t bytes);

template <bool kPrefetches>
uint64_t SumBaseline(const std::byte* data, int64_t bytes) {
  return SumLines<16, kPrefetches>(data, bytes);
}

#if defined(__x86_64__)
// Not target_clones: its resolver runs before the runtime of a sanitizer is up.
template <bool kPrefetches>
__attribute__((target("avx2"))) uint64_t SumAvx2(const std::byte* data, int64_t bytes) {
  return SumLines<32, kPrefetches>(data, bytes);
}
template <bool kPrefetches>
__attribute__((target("avx512f"))) uint64_t SumAvx512(const std::byte* data, int64_t bytes) {
  return SumLines<64, kPrefetches>(data, bytes);
}
#endif

template <bool kPrefetches>
Sum BestSum() {
#if defined(__x86_64__)
  if (HostMachine().Has(Isa::kAvx512)) {
    return &SumAvx512<kPrefetches>;
  }
  if (HostMachine().Has(Isa::kAvx2)) {
    return &SumAvx2<kPrefetches>;
  }
#endif
  return &SumBaseline<kPrefetches>;
}

/// Four times all last-level caches, so that less than a quarter of a pass can come from them; at most an
/// eighth of the memory.
int64_t BufferBytes() {
  constexpr int64_t kLeast = int64_t{256} << 20, kMost = int64_t{2} << 30, kSmallest = int64_t{16} << 20;
  const int64_t wanted = std::clamp(4 * HostTopology().l3_total_bytes, kLeast, kMost);
  const int64_t memory = HostMachine().memory_bytes;
  return memory > 0 ? std::clamp(wanted, kSmallest, std::max(kSmallest, memory / 8)) : wanted;
}

}  // namespace

Result<ReadProbe> ReadProbe::Create(const Executor& executor) {
  const int64_t num_chunks = BufferBytes() / kChunk;
  const int64_t bytes = num_chunks * kChunk;
  void* memory =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status::System(fmt::format("no memory for the bandwidth probe: {} bytes", bytes));
  }
  ReadProbe probe;
  probe.memory_ =
      std::shared_ptr<void>(memory, [bytes](void* mapped) { munmap(mapped, static_cast<size_t>(bytes)); });
#if defined(MADV_HUGEPAGE)
  madvise(memory, static_cast<size_t>(bytes), MADV_HUGEPAGE);
#endif
  auto* data = static_cast<std::byte*>(memory);
  // Written by the threads that will read, and page by page: pages never written all map to one page of
  // zeros.
  ParallelFor(executor, num_chunks,
              [&](int64_t chunk) { std::fill_n(data + chunk * kChunk, kChunk, std::byte{1}); });
  probe.sums_.resize(static_cast<size_t>(num_chunks));
  // Whether prefetches help depends on the machine (one thread: Zen 3 22 GB/s without, 20 with; Sapphire
  // Rapids 13 and 15.5), and a ceiling is the most that it can do. Alternately, since other programs slow
  // whole seconds.
  double best[2] = {};
  for (int round = 0; round < 6; ++round) {
    probe.prefetches_ = round % 2 == 1;
    best[round % 2] = std::max(best[round % 2], probe.Sample(executor, bytes / 8));
  }
  probe.prefetches_ = best[1] > best[0];
  return probe;
}

int64_t ReadProbe::bytes() const {
  return static_cast<int64_t>(sums_.size()) * kChunk;
}

double ReadProbe::Sample(const Executor& executor, int64_t bytes) {
  const auto total = static_cast<int64_t>(sums_.size());
  const int64_t count = bytes <= 0 ? total : std::clamp<int64_t>(bytes / kChunk, 1, total);
  const Sum sum = prefetches_ ? BestSum<true>() : BestSum<false>();
  const auto* data = static_cast<const std::byte*>(memory_.get());
  const int64_t first = next_chunk_;
  const auto begin = std::chrono::steady_clock::now();
  ParallelFor(executor, count, [&](int64_t index) {
    const int64_t chunk = (first + index) % total;
    sums_[static_cast<size_t>(index)] = sum(data + chunk * kChunk, kChunk);
  });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  next_chunk_ = (first + count) % total;
  // Every chunk holds bytes of one, so that every sum is known: a pass that skipped its loads would show.
  constexpr uint64_t kExpected = static_cast<uint64_t>(kChunk / 8) * 0x0101010101010101U;
  const bool read =
      std::all_of(sums_.begin(), sums_.begin() + count, [](uint64_t value) { return value == kExpected; });
  return read ? static_cast<double>(count * kChunk) / std::max(seconds.count(), 1e-9) : 0.0;
}

double MeasureReadBandwidth(const Executor& executor) {
  constexpr std::chrono::milliseconds kBudget{400};
  constexpr int kFewestPasses = 3, kMostPasses = 200;
  Result<ReadProbe> probe = ReadProbe::Create(executor);
  if (!probe.ok()) {
    return 0;
  }
  double best = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int pass = 0; pass < kMostPasses; ++pass) {
    if (pass >= kFewestPasses && std::chrono::steady_clock::now() - start > kBudget) {
      break;
    }
    const double rate = probe->Sample(executor);
    if (rate == 0) {
      return 0;
    }
    best = std::max(best, rate);
  }
  return best;
}

}  // namespace fusedmoe
