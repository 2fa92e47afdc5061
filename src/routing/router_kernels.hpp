#pragma once

#include <cstddef>
#include <cstdint>

namespace fusedmoe {

/// Element types of the router's operands, as kernels number them.
enum class RouterElement : uint8_t { kF32, kF16, kBF16 };

inline constexpr int kMostRouterTokens = 6;

/// A tile of the router GEMM: up to RouterKernels::tokens tokens by up to 4 experts.
struct RouterTile {
  const std::byte* hidden[kMostRouterTokens];  ///< rows; where there are fewer tokens, the last one again
  const std::byte* weight[4];
  RouterElement hidden_element;
  RouterElement weight_element;
  int64_t width;  ///< columns
  int64_t ahead;  ///< from a row of weights to the one that is asked for beside it, in bytes
  int num_tokens;
  float* sums;  ///< [kMostRouterTokens][4], tokens by experts; rows that a tile does not have are left alone
};

/// The kernels of one instruction set. All sets give the same bits.
struct RouterKernels {
  void (*tile)(const RouterTile& tile);
  int tokens;  ///< of a tile, at most
};

extern const RouterKernels kRouterKernelsPortable;
#if defined(__x86_64__)
extern const RouterKernels kRouterKernelsAvx2;
extern const RouterKernels kRouterKernelsAvx512;
#elif defined(__aarch64__)
extern const RouterKernels kRouterKernelsNeon;
#endif

}  // namespace fusedmoe
