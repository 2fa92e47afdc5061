#include <fusedmoe/tensor.hpp>

#include <algorithm>
#include <atomic>
#include <cassert>

#include "core/checked_math.hpp"
#include "core/memory.hpp"

namespace fusedmoe {
namespace {

// What tensors take, for jobs that promise how much memory they need. Relaxed: a statistic, not a lock.
std::atomic<int64_t> g_bytes{0}, g_peak_bytes{0};

void Count(int64_t bytes) {
  const int64_t now = g_bytes.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  int64_t peak = g_peak_bytes.load(std::memory_order_relaxed);
  while (now > peak && !g_peak_bytes.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}

}  // namespace

Shape::Shape(std::initializer_list<int64_t> dims)
    : Shape(std::span<const int64_t>(dims.begin(), dims.size())) {}

Shape::Shape(std::span<const int64_t> dims) : rank_(static_cast<int>(dims.size())) {
  assert(dims.size() <= static_cast<size_t>(kMaxRank));
  std::copy(dims.begin(), dims.end(), dims_.begin());
}

int64_t Shape::count() const {
  int64_t product = 1;
  for (const int64_t dim : dims()) {
    product *= dim;
  }
  return product;
}

std::string Shape::ToString() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string((*this)[axis]);
  }
  return text + "]";
}

bool Shape::operator==(const Shape& other) const {
  return std::equal(dims().begin(), dims().end(), other.dims().begin(), other.dims().end());
}

template <typename Byte>
bool BasicTensorView<Byte>::dense() const {
  int64_t expected = row_bytes();
  for (int axis = rank() - 2; axis >= 0; --axis) {
    if (dim(axis) > 1 && stride_bytes(axis) != expected) {
      return false;
    }
    expected *= dim(axis);
  }
  return true;
}

template <typename Byte>
int64_t BasicTensorView<Byte>::total_bytes() const {
  int64_t bytes = row_bytes();
  for (int axis = 0; axis + 1 < rank(); ++axis) {
    bytes *= dim(axis);
  }
  return bytes;
}

template <typename Byte>
BasicTensorView<Byte> BasicTensorView<Byte>::operator[](int64_t index) const {
  assert(rank() >= 2 && index >= 0 && index < dim(0));
  BasicTensorView sub(data_ + index * stride_bytes(0), dtype_, Shape(shape_.dims().subspan(1)));
  for (int axis = 0; axis + 1 < sub.rank(); ++axis) {
    sub.set_stride_bytes(axis, stride_bytes(axis + 1));
  }
  return sub;
}

template <typename Byte>
BasicTensorView<Byte> BasicTensorView<Byte>::Rows(int64_t begin, int64_t row_count) const {
  assert(rank() >= 2 && begin >= 0 && row_count >= 0 && begin + row_count <= dim(0));
  BasicTensorView rows = *this;
  rows.data_ = data_ + begin * stride_bytes(0);
  rows.shape_[0] = row_count;
  return rows;
}

template class BasicTensorView<std::byte>;
template class BasicTensorView<const std::byte>;

Result<Tensor> Tensor::Allocate(DType dtype, const Shape& shape) {
  int64_t rows = 1;
  for (int axis = 0; axis + 1 < shape.rank(); ++axis) {
    const auto product = CheckedMultiply(rows, shape[axis]);
    if (!product) {
      return Status::System("a tensor of shape " + shape.ToString() + " does not fit the address space");
    }
    rows = *product;
  }
  const int64_t last = shape.rank() == 0 ? 1 : shape[shape.rank() - 1];
  const auto bits = CheckedMultiply(last, DTypeBits(dtype));
  const auto bytes = bits ? CheckedMultiply(rows, CeilDiv(*bits, 8)) : std::nullopt;
  if (!bytes || *bytes < 0 || *bytes > INT64_MAX / 2) {
    return Status::System("a tensor of shape " + shape.ToString() + " does not fit the address space");
  }
  std::shared_ptr<std::byte> memory = AllocateZeros(*bytes);
  if (memory == nullptr) {
    return Status::System("out of memory: " + std::to_string(*bytes) + " bytes for a tensor of shape " +
                          shape.ToString());
  }
  Tensor tensor;
  tensor.mutable_data_ = memory.get();
  tensor.view_ = TensorView(tensor.mutable_data_, dtype, shape);
  Count(*bytes);
  tensor.owner_ = std::shared_ptr<const void>(
      tensor.mutable_data_, [memory = std::move(memory), size = *bytes](const void* /*data*/) mutable {
        memory.reset();
        Count(-size);
      });
  return tensor;
}

int64_t TensorBytes() {
  return g_bytes.load(std::memory_order_relaxed);
}

int64_t PeakTensorBytes() {
  return g_peak_bytes.load(std::memory_order_relaxed);
}

void ResetPeakTensorBytes() {
  g_peak_bytes.store(TensorBytes(), std::memory_order_relaxed);
}

Tensor Tensor::Borrow(TensorView view, std::shared_ptr<const void> owner) {
  Tensor tensor;
  tensor.view_ = view;
  tensor.owner_ = std::move(owner);
  return tensor;
}

MutableTensorView Tensor::mutable_view() {
  assert(mutable_data_ != nullptr);
  MutableTensorView view(mutable_data_, view_.dtype(), view_.shape());
  for (int axis = 0; axis + 1 < view_.rank(); ++axis) {
    view.set_stride_bytes(axis, view_.stride_bytes(axis));
  }
  return view;
}

}  // namespace fusedmoe
