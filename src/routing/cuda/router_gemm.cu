// The router's product in the order of router_gemm.hpp: 16 lanes of fused multiply-adds, lane l takes the
// columns l, l + 16,
// ...; then lanes pairwise, 8 apart, 4, 2, 1. Two threads share a tile of tokens by experts: each holds eight
// lanes of every sum, so that it reads eight neighbouring columns at once, and the first addition is between
// the two.

#include <algorithm>

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

template <DType hidden_type, DType weight_type, int kTokens, int kExperts>
__global__ void __launch_bounds__(kThreads) ProductKernel(const RouterProduct product) {
  const int64_t pair = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 2;
  const int half = static_cast<int>(threadIdx.x & 1);
  const int64_t expert_tiles = (product.num_experts + kExperts - 1) / kExperts;
  const int64_t first_token = pair / expert_tiles * kTokens;
  const int64_t first_expert = pair % expert_tiles * kExperts;
  const bool active = first_token < product.num_tokens;
  const std::byte* hidden[kTokens];
  const std::byte* weight[kExperts];
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    const int64_t row = min(first_token + token, product.num_tokens - 1);
    hidden[token] = product.hidden.data + row * product.hidden.stride_bytes;
  }
#pragma unroll
  for (int expert = 0; expert < kExperts; ++expert) {
    const int64_t row = min(first_expert + expert, product.num_experts - 1);
    weight[expert] = product.weight.data + row * product.weight.stride_bytes;
  }
  float sums[kTokens][kExperts][kHalf] = {};
  const int64_t whole = product.width / 16 * 16;
#pragma unroll(kTokens* kExperts == 1 ? 8 : 1)
  for (int64_t base = 0; base < whole; base += 16) {
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
#pragma unroll
        for (int lane = 0; lane < kHalf; ++lane) {
          sums[token][expert][lane] = fmaf(values[lane], rows[expert][lane], sums[token][expert][lane]);
        }
      }
    }
  }
  if (whole < product.width) {
    const int64_t column = whole + half * kHalf;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      float values[kHalf];
      LoadTail<hidden_type>(hidden[token], column, product.width, values);
#pragma unroll
      for (int expert = 0; expert < kExperts; ++expert) {
        float row[kHalf];
        LoadTail<weight_type>(weight[expert], column, product.width, row);
#pragma unroll
        for (int lane = 0; lane < kHalf; ++lane) {
          sums[token][expert][lane] = fmaf(values[lane], row[lane], sums[token][expert][lane]);
        }
      }
    }
  }
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
#pragma unroll
    for (int expert = 0; expert < kExperts; ++expert) {
      float part[kHalf];
#pragma unroll
      for (int lane = 0; lane < kHalf; ++lane) {  // lanes 0..7 of the even thread plus 8..15 of the odd one
        part[lane] = sums[token][expert][lane] + __shfl_down_sync(0xffffffffU, sums[token][expert][lane], 1);
      }
#pragma unroll
      for (int distance = kHalf / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int lane = 0; lane < distance; ++lane) {
          part[lane] += part[lane + distance];
        }
      }
      const int64_t m = first_token + token, e = first_expert + expert;
      if (half == 0 && active && m < product.num_tokens && e < product.num_experts) {
        const float addend =
            product.bias.data == nullptr ? 0.0F : LoadFloat(product.bias.data, product.bias.dtype, e);
        product.logits[m * product.num_experts + e] = part[0] + addend;
      }
    }
  }
}

template <DType hidden_type, DType weight_type>
cudaError_t LaunchTyped(const RouterProduct& product, cudaStream_t stream) {
  const auto tiles = [&](int64_t tokens, int64_t experts) {
    return (product.num_tokens + tokens - 1) / tokens * ((product.num_experts + experts - 1) / experts);
  };
  const auto blocks = [](int64_t count) {
    return static_cast<unsigned>((count * 2 + kThreads - 1) / kThreads);
  };
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
