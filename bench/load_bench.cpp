// Layers of checkpoints to CPU_FUSED, from files that the system holds in memory, beside reading as many
// bytes of them into fresh memory, in turns.
//
//   load_bench THREADS CHECKPOINT...      the first MoE layer of each, the best of nine turns
//
// Bytes are those of all tensors over the number of MoE layers: give checkpoints that hold little else
// (fusedmoe sample).
#include <fmt/format.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/layer.hpp>

#include "ceilings.hpp"
#include "platform/file.hpp"

namespace fusedmoe::bench {
namespace {

constexpr int kTurns = 9;
constexpr int64_t kPiece = int64_t{2} << 20;

std::string FileOf(const std::string& path, const Checkpoint& checkpoint) {
  return std::filesystem::is_directory(path) ? path + "/" + checkpoint.tensors().front().file : path;
}

Result<double> ReadSeconds(const platform::InputFile& file, int64_t pieces, const Executor& executor) {
  const auto total = static_cast<size_t>(pieces * kPiece);
  void* const mapped =
      mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    return Status::System(fmt::format("no {} bytes to read into", total));
  }
  (void)madvise(mapped, total, MADV_HUGEPAGE);
  auto* const memory = static_cast<std::byte*>(mapped);
  std::vector<Status> statuses(static_cast<size_t>(pieces));
  const double begin = Seconds();
  ParallelFor(executor, pieces, [&](int64_t i) {
    statuses[static_cast<size_t>(i)] =
        file.ReadInto(i * kPiece, {memory + i * kPiece, static_cast<size_t>(kPiece)});
  });
  const double seconds = Seconds() - begin;
  munmap(mapped, total);
  for (const Status& status : statuses) {
    FMOE_RETURN_IF_ERROR(status);
  }
  return seconds;
}

Status Measure(const std::string& path, const Executor& executor) {
  FMOE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(path));
  if (checkpoint->moe_layers().empty()) {
    return Status::Usage("no layer with routed experts was found");
  }
  FMOE_ASSIGN_OR_RETURN(const auto file,
                        platform::InputFile::Open(FileOf(path, *checkpoint), platform::FileAccess::kRead));
  int64_t bytes = 0;
  for (const TensorInfo& tensor : checkpoint->tensors()) {
    bytes += tensor.bytes;
  }
  bytes /= static_cast<int64_t>(checkpoint->moe_layers().size());
  const int64_t pieces = std::min(bytes, file->size()) / kPiece;
  LayerOptions options;
  options.backend = "CPU_FUSED";
  options.executor = executor;
  double load = 1e9, read = 1e9;
  for (int turn = 0; turn < kTurns; ++turn) {
    FMOE_ASSIGN_OR_RETURN(const double seconds, ReadSeconds(*file, pieces, executor));
    read = std::min(read, seconds);
    const double begin = Seconds();
    FMOE_RETURN_IF_ERROR(MoeLayer::Load(checkpoint, checkpoint->moe_layers().front(), options).status());
    load = std::min(load, Seconds() - begin);
  }
  const double load_rate = static_cast<double>(bytes) / 1e9 / load;
  const double read_rate = static_cast<double>(pieces * kPiece) / 1e9 / read;
  fmt::print("{:32} {:7.1f} MB  {:7.1f} ms {:6.2f} GB/s  read {:6.2f} GB/s  of_read {:.3f}\n", path,
             static_cast<double>(bytes) / 1e6, load * 1e3, load_rate, read_rate, load_rate / read_rate);
  return Status::Ok();
}

int Main(int argc, char** argv) {
  if (argc < 3) {
    fmt::print("load_bench THREADS CHECKPOINT...\n");
    return 2;
  }
  const auto pool = *ThreadPool::Create(std::max(1, std::atoi(argv[1])));
  for (int i = 2; i < argc; ++i) {
    if (const Status status = Measure(argv[i], pool->executor()); !status.ok()) {
      fmt::print("{}: {}\n", argv[i], status.ToString());
      return 3;
    }
  }
  return 0;
}

}  // namespace
}  // namespace fusedmoe::bench

int main(int argc, char** argv) {
  return fusedmoe::bench::Main(argc, argv);
}
