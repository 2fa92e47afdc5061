#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include <fusedmoe/machine.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/workspace.hpp>

/// The card, for code without CUDA headers. Streams are cudaStream_t as void*, null is the default stream. A
/// build without CUDA has all of it, and refuses: "this build has no CUDA: nvcc was not found".
namespace fusedmoe::cuda {

/// Why this build has no code for cards; empty where it has.
std::string_view WhyNotBuilt();

/// Fills machine.cuda, or machine.cuda_missing.
void DetectCard(Machine& machine);

/// Everything that forbids kernels of this build on the machine's card; Ok when they can run. kUnsupported,
/// with actual and required values.
Status CheckCard(const Machine& machine);

/// The cards that the process may use. Which of them is current is a matter of each thread.
Result<int64_t> CountCards();
Result<int64_t> CurrentCard();
/// Makes a card current for the calling thread. kUsage where there is no such card.
Status SelectCard(int64_t card);
/// Its address on the PCI bus of this machine.
Result<std::string> BusAddress(int64_t card);

struct MemoryFigures {
  int64_t free_bytes = 0, total_bytes = 0;
};
Result<MemoryFigures> ReadMemory();

/// Memory of the card, 256-byte aligned, released with the last owner. kSystem, with the bytes needed and
/// free, where there is too little. `what` names it in the message.
Result<std::shared_ptr<std::byte>> AllocateOnDevice(int64_t bytes, std::string_view what);

/// A workspace on the card, filled with zeros: kernels find their counters at rest.
Result<Workspace> AllocateWorkspace(int64_t bytes);

/// Copies in the order of `stream`. From pageable host memory it returns when the host memory may be reused.
Status CopyToDevice(void* device, const void* host, int64_t bytes, void* stream);
/// Returns when the bytes are on the host.
Status CopyToHost(void* host, const void* device, int64_t bytes, void* stream);
/// `rows` rows of `row_bytes`, with their own distances on both sides. Neither returns before the host memory
/// may be read or reused.
Status CopyRowsToDevice(void* device, int64_t device_stride, const void* host, int64_t host_stride,
                        int64_t row_bytes, int64_t rows, void* stream);
Status CopyRowsToHost(void* host, int64_t host_stride, const void* device, int64_t device_stride,
                      int64_t row_bytes, int64_t rows, void* stream);
/// In the order of the stream, without waiting.
Status CopyOnDevice(void* target, const void* source, int64_t bytes, void* stream);
Status CopyRowsOnDevice(void* target, int64_t target_stride, const void* source, int64_t source_stride,
                        int64_t row_bytes, int64_t rows, void* stream);
Status FillZero(void* device, int64_t bytes, void* stream);
Status Synchronize(void* stream);
/// Whether everything in the stream is done, without waiting.
Result<bool> IsIdle(void* stream);

/// What the launch of `kernel` just said, without waiting for it. kSystem.
Status CheckLaunch(std::string_view kernel);

}  // namespace fusedmoe::cuda
