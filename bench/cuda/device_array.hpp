#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include <fusedmoe/status.hpp>

/// Arrays on the device, for the programs of this folder. Failures end the program.
namespace fusedmoe::cuda {

inline void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    std::exit(1);
  }
}
inline void Check(const Status& status) {
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    std::exit(1);
  }
}

/// Device memory that goes with its owner, filled with 0xff (NaN in every float type).
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(int64_t count) : count_(count) {
    void* memory = nullptr;
    Check(cudaMalloc(&memory, bytes() + 256), "cudaMalloc");
    Check(cudaMemset(memory, 0xff, bytes() + 256), "cudaMemset");
    data_ = static_cast<T*>(memory);
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(static_cast<int64_t>(values.size())) {
    Check(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "copy to device");
  }
  DeviceArray(DeviceArray&& other) noexcept : data_(other.data_), count_(other.count_) {
    other.data_ = nullptr;
  }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }
  void Poison() { Check(cudaMemset(data_, 0xff, bytes()), "cudaMemset"); }
  std::vector<T> Host() const {
    std::vector<T> values(static_cast<size_t>(count_));
    Check(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), "copy to host");
    return values;
  }

 private:
  T* data_ = nullptr;
  int64_t count_ = 0;
};

}  // namespace fusedmoe::cuda
