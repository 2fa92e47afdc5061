// Compiled where nvcc is not there: the same interface, which refuses.

#include <string>

#include "platform/cuda/card.hpp"
#include "platform/cuda/graph.hpp"
#include "platform/cuda/probe.hpp"
#include "platform/cuda/upload.hpp"

#ifndef FMOE_CUDA_MISSING
#define FMOE_CUDA_MISSING "nvcc was not found"
#endif

namespace fusedmoe::cuda {
namespace {

Status NotBuilt() {
  return Status::Unsupported(std::string(WhyNotBuilt()));
}

}  // namespace

std::string_view WhyNotBuilt() {
  return "this build has no CUDA: " FMOE_CUDA_MISSING;
}

void DetectCard(Machine& machine) {
  machine.cuda_missing = WhyNotBuilt();
}

Status CheckCard(const Machine& /*machine*/) {
  return NotBuilt();
}

Result<int64_t> CountCards() {
  return NotBuilt();
}

Result<int64_t> CurrentCard() {
  return NotBuilt();
}

Status SelectCard(int64_t /*card*/) {
  return NotBuilt();
}

Result<std::string> BusAddress(int64_t /*card*/) {
  return NotBuilt();
}

Result<MemoryFigures> ReadMemory() {
  return NotBuilt();
}

Result<std::shared_ptr<std::byte>> AllocateOnDevice(int64_t /*bytes*/, std::string_view /*what*/) {
  return NotBuilt();
}

Result<Workspace> AllocateWorkspace(int64_t /*bytes*/) {
  return NotBuilt();
}

Status CopyToDevice(void* /*device*/, const void* /*host*/, int64_t /*bytes*/, void* /*stream*/) {
  return NotBuilt();
}

Status CopyToHost(void* /*host*/, const void* /*device*/, int64_t /*bytes*/, void* /*stream*/) {
  return NotBuilt();
}

Status CopyRowsToDevice(void* /*device*/, int64_t /*device_stride*/, const void* /*host*/,
                        int64_t /*host_stride*/, int64_t /*row_bytes*/, int64_t /*rows*/, void* /*stream*/) {
  return NotBuilt();
}

Status CopyRowsToHost(void* /*host*/, int64_t /*host_stride*/, const void* /*device*/,
                      int64_t /*device_stride*/, int64_t /*row_bytes*/, int64_t /*rows*/, void* /*stream*/) {
  return NotBuilt();
}

Status CopyOnDevice(void* /*target*/, const void* /*source*/, int64_t /*bytes*/, void* /*stream*/) {
  return NotBuilt();
}

Status CopyRowsOnDevice(void* /*target*/, int64_t /*target_stride*/, const void* /*source*/,
                        int64_t /*source_stride*/, int64_t /*row_bytes*/, int64_t /*rows*/,
                        void* /*stream*/) {
  return NotBuilt();
}

Status FillZero(void* /*device*/, int64_t /*bytes*/, void* /*stream*/) {
  return NotBuilt();
}

Status Synchronize(void* /*stream*/) {
  return NotBuilt();
}

Result<bool> IsIdle(void* /*stream*/) {
  return NotBuilt();
}

Status CheckLaunch(std::string_view /*kernel*/) {
  return NotBuilt();
}

struct Uploader::Impl {};
Uploader::Uploader() = default;
Uploader::~Uploader() = default;

Result<std::unique_ptr<Uploader>> Uploader::Create(int /*threads*/, int64_t /*piece_bytes*/) {
  return NotBuilt();
}

Result<std::unique_ptr<Uploader>> Uploader::Take(int /*threads*/, int64_t /*piece_bytes*/) {
  return NotBuilt();
}

void Uploader::Keep(std::unique_ptr<Uploader> /*uploader*/) {}

Status Uploader::Send(int64_t /*bytes*/, const Write& /*write*/) {
  return NotBuilt();
}

Status Uploader::Flush() {
  return NotBuilt();
}

Status Uploader::Finish() {
  return NotBuilt();
}

struct Graph::Impl {};
Graph::Graph() = default;
Graph::~Graph() = default;

Result<std::unique_ptr<Graph>> Graph::Capture(const std::function<Status(void* stream)>& /*body*/) {
  return NotBuilt();
}

Result<double> Graph::Run() {
  return NotBuilt();
}

Result<double> MeasureReadBandwidth() {
  return NotBuilt();
}

Result<double> MeasureBf16Peak() {
  return NotBuilt();
}

Result<double> MeasureUploadBandwidth() {
  return NotBuilt();
}

}  // namespace fusedmoe::cuda
