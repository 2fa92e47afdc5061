// The router's product in the order of router_gemm.hpp: 16 lanes of fused multiply-adds, lane l takes the
// columns l, l + 16, ...; then lanes pairwise, 8 apart, 4, 2, 1. Two threads share a tile of tokens by
// experts: each holds eight lanes of every sum, so that it reads eight neighbouring columns at once, and the
// first addition is between the two.

#include "platform/cuda/error.hpp"
#include "routing/cuda/router_kernels.cuh"

namespace fusedmoe::cuda {
namespace {

constexpr int kHalf = 8;  // lanes of a thread
constexpr int kThreads = 128;

template <DType dtype>
__device__ inline void LoadEight(const std::byte* row, int64_t column, float (&out)[kHalf]) {
  if constexpr (dtype == DType::kF32) {
    const auto* values = reinterpret_cast<const float*>(row) + column;
#pragma unroll
    for (int lane = 0; lane < kHalf; ++lane) {
      out[lane] = values[lane];
    }
  } else {
    uint16_t codes[kHalf];
    const std::byte* at = row + column * 2;
    if ((reinterpret_cast<uintptr_t>(at) & 15) == 0) {
      *reinterpret_cast<uint4*>(codes) = *reinterpret_cast<const uint4*>(at);
    } else {
#pragma unroll
      for (int lane = 0; lane < kHalf; ++lane) {
        codes[lane] = reinterpret_cast<const uint16_t*>(at)[lane];
      }
    }
#pragma unroll
    for (int lane = 0; lane < kHalf; ++lane) {
      out[lane] = dtype == DType::kF16 ? HalfToFloat(codes[lane]) : DecodeBf16(codes[lane]);
    }
  }
}

/// The last columns of a row, behind them zeros.
template <DType dtype>
__device__ inline void LoadTail(const std::byte* row, int64_t column, int64_t width, float (&out)[kHalf]) {
#pragma unroll
  for (int lane = 0; lane < kHalf; ++lane) {
    out[lane] = column + lane < width ? LoadFloat(row, dtype, column + lane) : 0.0F;
  }
}

__device__ inline void AddProducts(const float (&values)[kHalf], const float (&weights)[kHalf],
                                   float (&sums)[kHalf]) {
#pragma unroll
  for (int lane = 0; lane < kHalf; ++lane) {
    sums[lane] = fmaf(values[lane], weights[lane], sums[lane]);
  }
}

/// The sum of all 16 lanes, in the even thread of the pair.
__device__ inline float AddLanes(const float (&sums)[kHalf]) {
  float part[kHalf];
#pragma unroll
  for (int lane = 0; lane < kHalf; ++lane) {  // lanes 0..7 of the even thread plus 8..15 of the odd one
    part[lane] = sums[lane] + __shfl_down_sync(0xffffffffU, sums[lane], 1);
  }
#pragma unroll
  for (int distance = kHalf / 2; distance > 0; distance /= 2) {
#pragma unroll
    for (int lane = 0; lane < distance; ++lane) {
      part[lane] += part[lane + distance];
    }
  }
  return part[0];
}

/// The products of a tile, this thread's half of the lanes. Rows beyond the last token or expert repeat it.
template <DType hidden_type, DType weight_type, int kTokens, int kExperts>
struct ProductTile {
  int64_t first_token;
  int64_t first_expert;
  int half;  ///< 0: lanes 0..7, 1: lanes 8..15
  const std::byte* hidden[kTokens];
  const std::byte* weight[kExperts];
  float sums[kTokens][kExperts][kHalf] = {};

  __device__ ProductTile(const RouterProduct& product, int64_t token, int64_t expert, int of_pair)
      : first_token(token), first_expert(expert), half(of_pair) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int64_t row = min(first_token + t, product.num_tokens - 1);
      hidden[t] = product.hidden.data + row * product.hidden.stride_bytes;
    }
#pragma unroll
    for (int e = 0; e < kExperts; ++e) {
      const int64_t row = min(first_expert + e, product.num_experts - 1);
      weight[e] = product.weight.data + row * product.weight.stride_bytes;
    }
  }

  /// 16 columns from `base` on.
  __device__ void Add(int64_t base) {
    const int64_t column = base + half * kHalf;
    float rows[kExperts][kHalf];
#pragma unroll
    for (int expert = 0; expert < kExperts; ++expert) {
      LoadEight<weight_type>(weight[expert], column, rows[expert]);
    }
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      float values[kHalf];
      LoadEight<hidden_type>(hidden[token], column, values);
#pragma unroll
      for (int expert = 0; expert < kExperts; ++expert) {
        AddProducts(values, rows[expert], sums[token][expert]);
      }
    }
  }

  /// The columns from `base` to `width`, fewer than 16.
  __device__ void AddTail(int64_t base, int64_t width) {
    const int64_t column = base + half * kHalf;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      float values[kHalf];
      LoadTail<hidden_type>(hidden[token], column, width, values);
#pragma unroll
      for (int expert = 0; expert < kExperts; ++expert) {
        float row[kHalf];
        LoadTail<weight_type>(weight[expert], column, width, row);
        AddProducts(values, row, sums[token][expert]);
      }
    }
  }

  /// Both threads of the pair; the even one writes.
  __device__ void Store(const RouterProduct& product) const {
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
#pragma unroll
      for (int expert = 0; expert < kExperts; ++expert) {
        const float sum = AddLanes(sums[token][expert]);
        const int64_t m = first_token + token, e = first_expert + expert;
        if (half == 0 && m < product.num_tokens && e < product.num_experts) {
          const float addend =
              product.bias.data == nullptr ? 0.0F : LoadFloat(product.bias.data, product.bias.dtype, e);
          product.logits[m * product.num_experts + e] = sum + addend;
        }
      }
    }
  }
};

template <DType hidden_type, DType weight_type, int kTokens, int kExperts>
__global__ void __launch_bounds__(kThreads) ProductKernel(const RouterProduct product) {
  const int64_t pair = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 2;
  const int64_t expert_tiles = (product.num_experts + kExperts - 1) / kExperts;
  ProductTile<hidden_type, weight_type, kTokens, kExperts> tile(product, pair / expert_tiles * kTokens,
                                                                pair % expert_tiles * kExperts,
                                                                static_cast<int>(threadIdx.x & 1));
  const int64_t whole = product.width / 16 * 16;
#pragma unroll(kTokens* kExperts == 1 ? 8 : 1)
  for (int64_t base = 0; base < whole; base += 16) {
    tile.Add(base);
  }
  if (whole < product.width) {
    tile.AddTail(whole, product.width);
  }
  tile.Store(product);
}

template <DType hidden_type, DType weight_type>
cudaError_t LaunchTyped(const RouterProduct& product, cudaStream_t stream) {
  const auto tiles = [&](int64_t tokens, int64_t experts) {
    return (product.num_tokens + tokens - 1) / tokens * ((product.num_experts + experts - 1) / experts);
  };
  const auto blocks = [](int64_t count) {
    return static_cast<unsigned>((count * 2 + kThreads - 1) / kThreads);
  };
  ForgetErrors();
  // Few sums: one a pair of threads, and the loop unrolled, since only loads in flight hide the memory. Many:
  // tiles, which read each row for several sums.
  if (product.num_tokens <= 8) {
    ProductKernel<hidden_type, weight_type, 1, 1><<<blocks(tiles(1, 1)), kThreads, 0, stream>>>(product);
  } else {
    ProductKernel<hidden_type, weight_type, 4, 2><<<blocks(tiles(4, 2)), kThreads, 0, stream>>>(product);
  }
  return cudaGetLastError();
}

template <DType hidden_type>
cudaError_t LaunchWeight(const RouterProduct& product, cudaStream_t stream) {
  switch (product.weight.dtype) {
    case DType::kF16:
      return LaunchTyped<hidden_type, DType::kF16>(product, stream);
    case DType::kBF16:
      return LaunchTyped<hidden_type, DType::kBF16>(product, stream);
    default:
      return LaunchTyped<hidden_type, DType::kF32>(product, stream);
  }
}

}  // namespace

cudaError_t LaunchRouterProduct(const RouterProduct& product, cudaStream_t stream) {
  if (product.num_tokens == 0) {
    return cudaSuccess;
  }
  switch (product.hidden.dtype) {
    case DType::kF16:
      return LaunchWeight<DType::kF16>(product, stream);
    case DType::kBF16:
      return LaunchWeight<DType::kBF16>(product, stream);
    default:
      return LaunchWeight<DType::kF32>(product, stream);
  }
}

}  // namespace fusedmoe::cuda
