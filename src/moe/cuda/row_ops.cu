#include "moe/cuda/row_ops.hpp"

#include "numerics/cuda_rows.cuh"
#include "platform/cuda/card.hpp"
#include "platform/cuda/error.hpp"

namespace fusedmoe::cuda {
namespace {

constexpr int kThreads = 256;

struct Rows {
  const std::byte* data;
  int64_t stride_bytes;
  DType dtype;
};

__device__ inline float Load(const Rows& rows, int64_t row, int64_t col) {
  return LoadElement(rows.dtype, rows.data + row * rows.stride_bytes, col);
}

__global__ void AddRowsKernel(Rows first, Rows second, const float* gates, std::byte* output,
                              int64_t output_stride, DType output_dtype, int64_t num_rows, int64_t cols) {
  for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
    const float gate = gates == nullptr ? 1.0F : gates[row];
    for (int64_t col = int64_t{blockIdx.x} * kThreads + threadIdx.x; col < cols;
         col += int64_t{gridDim.x} * kThreads) {
      const float sum = Load(first, row, col) + gate * Load(second, row, col);
      StoreElement(output_dtype, output + row * output_stride, col, sum);
    }
  }
}

/// The sum of what the threads of a block bring, for all of them; `sums`: shared memory.
__device__ inline double BlockSum(double own, double (&sums)[kThreads]) {
  sums[threadIdx.x] = own;
  __syncthreads();
  for (unsigned distance = kThreads / 2; distance > 0; distance /= 2) {
    if (threadIdx.x < distance) {
      sums[threadIdx.x] += sums[threadIdx.x + distance];
    }
    __syncthreads();
  }
  return sums[0];
}

__global__ void SharedGatesKernel(Rows hidden, int64_t cols, const float* gate, float* gates) {
  __shared__ double sums[kThreads];
  double sum = 0.0;
  for (int64_t col = threadIdx.x; col < cols; col += kThreads) {
    sum += static_cast<double>(Load(hidden, blockIdx.x, col)) * gate[col];
  }
  sum = BlockSum(sum, sums);
  if (threadIdx.x == 0) {
    gates[blockIdx.x] = static_cast<float>(1.0 / (1.0 + exp(-sum)));
  }
}

/// A block for each row.
__global__ void NormalizeRowsKernel(std::byte* rows, int64_t stride_bytes, int64_t cols, const float* weight,
                                    float epsilon) {
  __shared__ double sums[kThreads];
  auto* row = reinterpret_cast<float*>(rows + blockIdx.x * stride_bytes);
  double squares = 0.0;
  for (int64_t col = threadIdx.x; col < cols; col += kThreads) {
    squares += static_cast<double>(row[col]) * row[col];
  }
  squares = BlockSum(squares, sums);
  const auto factor = static_cast<float>(1.0 / sqrt(squares / static_cast<double>(cols) + epsilon));
  for (int64_t col = threadIdx.x; col < cols; col += kThreads) {
    row[col] = row[col] * factor * weight[col];
  }
}

/// BF16 in one store of 8 bytes where the place allows it.
__device__ inline void StoreUpToFour(DType dtype, std::byte* row, int64_t col, int count,
                                     const float (&values)[4]) {
  if (dtype == DType::kBF16 && count == 4 && reinterpret_cast<uintptr_t>(row + 2 * col) % 8 == 0) {
    alignas(8) const __nv_bfloat162 four[2] = {__floats2bfloat162_rn(values[0], values[1]),
                                               __floats2bfloat162_rn(values[2], values[3])};
    *reinterpret_cast<uint2*>(row + 2 * col) = *reinterpret_cast<const uint2*>(four);
    return;
  }
  for (int index = 0; index < count; ++index) {
    StoreElement(dtype, row, col + index, values[index]);
  }
}

/// Four columns a thread: rows of ranks are read once, as fast as memory gives them.
__global__ void AddRankRowsKernel(RankRows parts, std::byte* output, int64_t output_stride,
                                  DType output_dtype, int64_t num_rows, int64_t cols) {
  for (int64_t row = blockIdx.y; row < num_rows; row += gridDim.y) {
    for (int64_t col = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x); col < cols;
         col += 4 * int64_t{gridDim.x} * kThreads) {
      const int64_t at = row * cols + col;
      const int count = static_cast<int>(cols - col < 4 ? cols - col : 4);
      float sum[4] = {};
      for (int rank = 0; rank < parts.ranks; ++rank) {
        const float* part = (rank == parts.rank ? parts.own : parts.received + rank * parts.rank_stride) + at;
        if (cols % 4 == 0) {  // rows begin on 16 bytes
          const float4 four = *reinterpret_cast<const float4*>(part);
          sum[0] += four.x;
          sum[1] += four.y;
          sum[2] += four.z;
          sum[3] += four.w;
        } else {
          for (int index = 0; index < count; ++index) {
            sum[index] += part[index];
          }
        }
      }
      StoreUpToFour(output_dtype, output + row * output_stride, col, count, sum);
    }
  }
}

Rows RowsOf(TensorView view) {
  return {view.data(), view.stride_bytes(0), view.dtype()};
}

dim3 GridOf(int64_t rows, int64_t threads_per_row) {
  constexpr int64_t kMostRows = 65535;  // of a grid's second axis
  return dim3(static_cast<unsigned>((threads_per_row + kThreads - 1) / kThreads),
              static_cast<unsigned>(rows < kMostRows ? rows : kMostRows));
}

}  // namespace

Status AddRows(TensorView first, TensorView second, const float* gates, MutableTensorView output,
               void* stream) {
  const int64_t rows = output.dim(0), cols = output.dim(1);
  if (rows == 0 || cols == 0) {
    return Status::Ok();
  }
  const dim3 grid = GridOf(rows, cols);
  ForgetErrors();
  AddRowsKernel<<<grid, kThreads, 0, ToStream(stream)>>>(RowsOf(first), RowsOf(second), gates, output.data(),
                                                         output.stride_bytes(0), output.dtype(), rows, cols);
  return CheckLaunch("AddRowsKernel");
}

Status SharedGates(TensorView hidden, const float* gate, float* gates, void* stream) {
  if (hidden.dim(0) == 0) {
    return Status::Ok();
  }
  ForgetErrors();
  SharedGatesKernel<<<static_cast<unsigned>(hidden.dim(0)), kThreads, 0, ToStream(stream)>>>(
      RowsOf(hidden), hidden.dim(1), gate, gates);
  return CheckLaunch("SharedGatesKernel");
}

Status NormalizeRows(MutableTensorView rows, const float* weight, float epsilon, void* stream) {
  if (rows.dim(0) == 0) {
    return Status::Ok();
  }
  ForgetErrors();
  NormalizeRowsKernel<<<static_cast<unsigned>(rows.dim(0)), kThreads, 0, ToStream(stream)>>>(
      rows.data(), rows.stride_bytes(0), rows.dim(1), weight, epsilon);
  return CheckLaunch("NormalizeRowsKernel");
}

Status AddRankRows(const RankRows& parts, MutableTensorView output, void* stream) {
  const int64_t rows = output.dim(0), cols = output.dim(1);
  if (rows == 0 || cols == 0) {
    return Status::Ok();
  }
  ForgetErrors();
  AddRankRowsKernel<<<GridOf(rows, (cols + 3) / 4), kThreads, 0, ToStream(stream)>>>(
      parts, output.data(), output.stride_bytes(0), output.dtype(), rows, cols);
  return CheckLaunch("AddRankRowsKernel");
}

}  // namespace fusedmoe::cuda
