#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/tensor.hpp>

#include "platform/cuda/card.hpp"

namespace fusedmoe {

/// Values on the card, there and back.
template <typename T>
class OnCard {
 public:
  explicit OnCard(const std::vector<T>& values) : count_(values.size()) {
    auto memory = cuda::AllocateOnDevice(Bytes(), "a test");
    EXPECT_TRUE(memory.ok()) << memory.status().message();
    memory_ = *memory;
    EXPECT_TRUE(cuda::CopyToDevice(memory_.get(), values.data(), Bytes(), nullptr).ok());
    EXPECT_TRUE(cuda::Synchronize(nullptr).ok());
  }
  T* data() const { return reinterpret_cast<T*>(memory_.get()); }
  TensorView View(DType dtype, const Shape& shape) const { return {memory_.get(), dtype, shape}; }
  MutableTensorView MutableView(DType dtype, const Shape& shape) const {
    return {memory_.get(), dtype, shape};
  }
  std::vector<T> Read() const {
    std::vector<T> values(count_);
    const Status status = cuda::CopyToHost(values.data(), memory_.get(), Bytes(), nullptr);
    EXPECT_TRUE(status.ok()) << status.message();
    return values;
  }

 private:
  int64_t Bytes() const { return static_cast<int64_t>(count_ * sizeof(T)); }
  size_t count_;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace fusedmoe
