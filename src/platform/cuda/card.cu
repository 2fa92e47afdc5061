#include "platform/cuda/card.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <string>
#include <utility>

#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {
namespace {

std::string Version(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

std::string Count(int64_t bytes) {
  return std::to_string(bytes) + " bytes";
}

bool HasDriver() {
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) {
    return false;
  }
  dlclose(driver);
  return true;
}

}  // namespace

std::string_view WhyNotBuilt() {
  return {};
}

void DetectCard(Machine& machine) {
  if (!HasDriver()) {
    machine.cuda_missing = "no NVIDIA driver is installed (libcuda.so.1 was not found)";
    return;
  }
  int driver = 0, runtime = 0, count = 0;
  (void)cudaDriverGetVersion(&driver);
  (void)cudaRuntimeGetVersion(&runtime);
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted == cudaErrorInsufficientDriver) {
    machine.cuda_missing = "the driver supports CUDA " + Version(driver) +
                           ", this build needs at least CUDA " + std::to_string(runtime / 1000) + ".0";
  } else if (counted == cudaErrorNoDevice || (counted == cudaSuccess && count == 0)) {
    machine.cuda_missing = "the driver is there, but no card is visible (0 devices)";
  } else if (counted != cudaSuccess) {
    machine.cuda_missing = ToStatus(counted, "counting the cards").message();
  }
  (void)cudaGetLastError();  // detection leaves no error behind
  if (!machine.cuda_missing.empty()) {
    return;
  }
  CudaDevice card;
  (void)cudaGetDevice(&card.index);
  cudaDeviceProp properties{};
  if (const cudaError_t error = cudaGetDeviceProperties(&properties, card.index); error != cudaSuccess) {
    machine.cuda_missing = ToStatus(error, "reading the properties of the card").message();
    (void)cudaGetLastError();
    return;
  }
  card.name = properties.name;
  char address[32] = {};
  (void)cudaDeviceGetPCIBusId(address, sizeof(address), card.index);
  card.bus_address = address;
  card.compute_major = properties.major;
  card.compute_minor = properties.minor;
  card.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
  card.l2_bytes = properties.l2CacheSize;
  card.num_multiprocessors = properties.multiProcessorCount;
  card.shared_bytes_per_block = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  card.driver_version = driver;
  machine.cuda = card;
}

Status CheckCard(const Machine& machine) {
  if (!machine.cuda) {
    return Status::Unsupported(machine.cuda_missing.empty() ? "no card was detected" : machine.cuda_missing);
  }
  const CudaDevice& card = *machine.cuda;
  if (card.compute_major != 9 || card.compute_minor != 0) {
    return Status::Unsupported(card.name + " has compute capability " + std::to_string(card.compute_major) +
                               "." + std::to_string(card.compute_minor) +
                               ", the kernels are for Hopper: 9.0");
  }
  return Status::Ok();
}

Result<int64_t> CountCards() {
  int count = 0;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGetDeviceCount(&count), "counting the cards"));
  return count;
}

Result<int64_t> CurrentCard() {
  int card = 0;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaGetDevice(&card), "asking for the card"));
  return card;
}

Status SelectCard(int64_t card) {
  FMOE_ASSIGN_OR_RETURN(const int64_t count, CountCards());
  if (card < 0 || card >= count) {
    return Status::Usage("card " + std::to_string(card) + " of " + std::to_string(count) +
                         " was asked for; they count from 0");
  }
  return ToStatus(cudaSetDevice(static_cast<int>(card)), "choosing the card");
}

Result<std::string> BusAddress(int64_t card) {
  char address[32] = {};
  FMOE_RETURN_IF_ERROR(ToStatus(cudaDeviceGetPCIBusId(address, sizeof(address), static_cast<int>(card)),
                                "asking for the address of a card"));
  return std::string(address);
}

Result<MemoryFigures> ReadMemory() {
  size_t free_bytes = 0, total_bytes = 0;
  FMOE_RETURN_IF_ERROR(ToStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "reading the card's free memory"));
  return MemoryFigures{static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
}

Result<std::shared_ptr<std::byte>> AllocateOnDevice(int64_t bytes, std::string_view what) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    const Result<MemoryFigures> figures = ReadMemory();
    return Status::System("the card has too little memory for " + std::string(what) + ": needed " +
                          Count(bytes) + ", free " + (figures.ok() ? Count(figures->free_bytes) : "unknown") +
                          (figures.ok() ? " of " + Count(figures->total_bytes) : ""));
  }
  FMOE_RETURN_IF_ERROR(ToStatus(error, "allocating " + std::string(what)));
  return std::shared_ptr<std::byte>(static_cast<std::byte*>(memory),
                                    [](std::byte* own) { (void)cudaFree(own); });
}

Result<Workspace> AllocateWorkspace(int64_t bytes) {
  if (bytes < 0) {
    return Status::Usage("a workspace of " + Count(bytes) + " was asked for; sizes are >= 0");
  }
  void* memory = nullptr;
  const auto size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
  if (cudaMalloc(&memory, size) != cudaSuccess) {
    (void)cudaGetLastError();
    // Says it with figures, and again where something else was wrong.
    const auto again = AllocateOnDevice(bytes, "the workspace");
    return again.ok() ? Status::System("allocating the workspace failed once; try again") : again.status();
  }
  Workspace workspace = Workspace::Adopt(static_cast<std::byte*>(memory), bytes, true,
                                         [](std::byte* own) { (void)cudaFree(own); });
  FMOE_RETURN_IF_ERROR(ToStatus(cudaMemset(memory, 0, size), "clearing the workspace"));
  FMOE_RETURN_IF_ERROR(ToStatus(cudaDeviceSynchronize(), "clearing the workspace"));
  return Result<Workspace>(std::move(workspace));
}

Status CopyToDevice(void* device, const void* host, int64_t bytes, void* stream) {
  return ToStatus(
      cudaMemcpyAsync(device, host, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, ToStream(stream)),
      "copying to the card");
}

Status CopyToHost(void* host, const void* device, int64_t bytes, void* stream) {
  FMOE_RETURN_IF_ERROR(ToStatus(
      cudaMemcpyAsync(host, device, static_cast<size_t>(bytes), cudaMemcpyDeviceToHost, ToStream(stream)),
      "copying from the card"));
  return Synchronize(stream);
}

namespace {

/// Rows that lie forwards and apart in one call, others one by one: the driver knows no other pitch.
cudaError_t CopyRows(void* target, int64_t target_stride, const void* source, int64_t source_stride,
                     int64_t row_bytes, int64_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
  const auto bytes = static_cast<size_t>(row_bytes);
  if (target_stride >= row_bytes && source_stride >= row_bytes) {
    return cudaMemcpy2DAsync(target, static_cast<size_t>(target_stride), source,
                             static_cast<size_t>(source_stride), bytes, static_cast<size_t>(rows), kind,
                             stream);
  }
  cudaError_t error = cudaSuccess;
  for (int64_t row = 0; row < rows && error == cudaSuccess; ++row) {
    error = cudaMemcpyAsync(static_cast<std::byte*>(target) + row * target_stride,
                            static_cast<const std::byte*>(source) + row * source_stride, bytes, kind, stream);
  }
  return error;
}

}  // namespace

Status CopyRowsToDevice(void* device, int64_t device_stride, const void* host, int64_t host_stride,
                        int64_t row_bytes, int64_t rows, void* stream) {
  if (rows == 0 || row_bytes == 0) {
    return Status::Ok();
  }
  return ToStatus(CopyRows(device, device_stride, host, host_stride, row_bytes, rows, cudaMemcpyHostToDevice,
                           ToStream(stream)),
                  "copying rows to the card");
}

Status CopyRowsToHost(void* host, int64_t host_stride, const void* device, int64_t device_stride,
                      int64_t row_bytes, int64_t rows, void* stream) {
  if (rows == 0 || row_bytes == 0) {
    return Status::Ok();
  }
  FMOE_RETURN_IF_ERROR(ToStatus(CopyRows(host, host_stride, device, device_stride, row_bytes, rows,
                                         cudaMemcpyDeviceToHost, ToStream(stream)),
                                "copying rows from the card"));
  return Synchronize(stream);
}

Status CopyOnDevice(void* target, const void* source, int64_t bytes, void* stream) {
  return ToStatus(
      cudaMemcpyAsync(target, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, ToStream(stream)),
      "copying on the card");
}

Status CopyRowsOnDevice(void* target, int64_t target_stride, const void* source, int64_t source_stride,
                        int64_t row_bytes, int64_t rows, void* stream) {
  return ToStatus(CopyRows(target, target_stride, source, source_stride, row_bytes, rows,
                           cudaMemcpyDeviceToDevice, ToStream(stream)),
                  "copying rows on the card");
}

Status FillZero(void* device, int64_t bytes, void* stream) {
  return ToStatus(cudaMemsetAsync(device, 0, static_cast<size_t>(bytes), ToStream(stream)),
                  "clearing memory of the card");
}

Status Synchronize(void* stream) {
  return ToStatus(cudaStreamSynchronize(ToStream(stream)), "waiting for the card");
}

Result<bool> IsIdle(void* stream) {
  const cudaError_t error = cudaStreamQuery(ToStream(stream));
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return false;
  }
  FMOE_RETURN_IF_ERROR(ToStatus(error, "waiting for the card"));
  return true;
}

Status CheckLaunch(std::string_view kernel) {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? Status::Ok() : ToStatus(error, "launching " + std::string(kernel));
}

}  // namespace fusedmoe::cuda
