#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <type_traits>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

inline constexpr int kMaxRank = 6;

/// The dimensions of a tensor, outermost first. Rank 0 is a scalar with one element.
class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  /// `dims` beyond kMaxRank are a programming error; readers refuse such tensors before they come here.
  explicit Shape(std::span<const int64_t> dims);

  int rank() const { return rank_; }
  int64_t operator[](int axis) const { return dims_[static_cast<size_t>(axis)]; }
  int64_t& operator[](int axis) { return dims_[static_cast<size_t>(axis)]; }
  std::span<const int64_t> dims() const { return {dims_.data(), static_cast<size_t>(rank_)}; }
  int64_t count() const;
  /// "[8, 2048, 768]"
  std::string ToString() const;
  bool operator==(const Shape& other) const;

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

/// A typed, non-owning window on memory: dtype, logical shape (in elements, also where elements are packed
/// several to a byte) and the byte stride of every axis but the last. Along the last axis elements are always
/// contiguous. Elements lie on multiples of their size (2 bytes of BF16), as in any array of theirs. CPUs
/// need no more alignment than that, and gain nothing by more; docs/cuda.md says what cards need. Trivially
/// copyable. `Byte` is `std::byte` or `const std::byte`.
template <typename Byte>
class BasicTensorView {
 public:
  BasicTensorView() = default;
  /// Dense, row-major. Each row of the last axis starts on a whole byte.
  BasicTensorView(Byte* data, DType dtype, const Shape& shape) : data_(data), dtype_(dtype), shape_(shape) {
    int64_t stride = shape.rank() == 0 ? 0 : PackedBytes(dtype, shape[shape.rank() - 1]);
    for (int axis = shape.rank() - 2; axis >= 0; --axis) {
      stride_bytes_[static_cast<size_t>(axis)] = stride;
      stride *= shape[axis];
    }
  }
  /// A mutable view reads as a constant one.
  template <typename Other>
  requires(std::is_same_v<Byte, const Other> && !std::is_const_v<Other>)
      BasicTensorView(const BasicTensorView<Other>& other)
      : data_(other.data()), dtype_(other.dtype()), shape_(other.shape()), stride_bytes_(other.strides()) {}

  bool empty() const { return data_ == nullptr; }
  Byte* data() const { return data_; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  int64_t dim(int axis) const { return shape_[axis]; }
  int64_t count() const { return shape_.count(); }
  /// Byte stride of `axis`, which must not be the last one.
  int64_t stride_bytes(int axis) const { return stride_bytes_[static_cast<size_t>(axis)]; }
  const std::array<int64_t, kMaxRank>& strides() const { return stride_bytes_; }
  void set_stride_bytes(int axis, int64_t stride) { stride_bytes_[static_cast<size_t>(axis)] = stride; }
  /// Bytes of one packed row of the last axis.
  int64_t row_bytes() const {
    return rank() == 0 ? PackedBytes(dtype_, 1) : PackedBytes(dtype_, dim(rank() - 1));
  }
  /// True when rows follow one another without gaps, so that [data, data + total_bytes) is the tensor.
  bool dense() const;
  /// Bytes of the tensor when dense.
  int64_t total_bytes() const;

  /// The sub-tensor at `index` of the first axis (rank >= 2).
  BasicTensorView operator[](int64_t index) const;
  /// Rows [begin, begin + row_count) of the first axis (rank >= 2).
  BasicTensorView Rows(int64_t begin, int64_t row_count) const;

  /// The elements as T; T must be as wide as the dtype. No check of the kind (bf16 reads as uint16_t).
  template <typename T>
  auto* as() const {
    using Out = std::conditional_t<std::is_const_v<Byte>, const T, T>;
    return reinterpret_cast<Out*>(data_);
  }

 private:
  Byte* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Shape shape_;
  std::array<int64_t, kMaxRank> stride_bytes_{};
};

using TensorView = BasicTensorView<const std::byte>;
using MutableTensorView = BasicTensorView<std::byte>;

/// Bytes of all tensors of this process that Tensor::Allocate made and that still live, and the most there
/// ever were since the last reset. Thread-safe; two measurements at the same time see each other.
int64_t TensorBytes();
int64_t PeakTensorBytes();
void ResetPeakTensorBytes();

/// A view together with what keeps its memory alive: own memory, or somebody else's (a mapped file).
/// Copies share the memory. Empty by default.
class Tensor {
 public:
  Tensor() = default;
  /// Dense, zero-filled, 64-byte aligned. Fails (kSystem) when the memory cannot be had.
  static Result<Tensor> Allocate(DType dtype, const Shape& shape);
  /// Memory that `owner` keeps alive (may be null when the caller guarantees the lifetime).
  static Tensor Borrow(TensorView view, std::shared_ptr<const void> owner);

  bool empty() const { return view_.empty(); }
  const TensorView& view() const { return view_; }
  /// Only for tensors from Allocate, and only before they are shared between threads.
  MutableTensorView mutable_view();
  const std::shared_ptr<const void>& owner() const { return owner_; }

  DType dtype() const { return view_.dtype(); }
  const Shape& shape() const { return view_.shape(); }
  int64_t dim(int axis) const { return view_.dim(axis); }

 private:
  TensorView view_;
  std::shared_ptr<const void> owner_;
  std::byte* mutable_data_ = nullptr;
};

}  // namespace fusedmoe
