#pragma once

#include <cstdint>

/// The warpgroup matrix instruction of Hopper with the weights (64 rows) in registers and the tokens (N
/// columns) in shared memory, one wrapper for each N. The instruction names every accumulator, so that the
/// wrappers are written by macros: eight operands at a time.
namespace fusedmoe::cuda {

/// What stands in the 16-bit (or 8-bit) halves of an operand register.
enum class MmaType { kBf16, kF16, kInt8 };

/// Mma: d += a * tokens, 64 x N x 16 (x 32 for 8-bit elements). `descriptor`: SharedDescriptor of the tokens.
/// Sums of integers are int32.
template <MmaType Type, int N>
struct Wgmma;

#define FMOE_OUT8(C, i) \
  C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3]), C(d[i + 4]), C(d[i + 5]), C(d[i + 6]), C(d[i + 7])
#define FMOE_OUT16(C, i) FMOE_OUT8(C, i), FMOE_OUT8(C, i + 8)
#define FMOE_OUT32(C, i) FMOE_OUT16(C, i), FMOE_OUT16(C, i + 16)
#define FMOE_TEXT0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FMOE_TEXT1 FMOE_TEXT0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define FMOE_TEXT2 FMOE_TEXT1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define FMOE_TEXT3 FMOE_TEXT2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FMOE_TEXT4 FMOE_TEXT3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define FMOE_TEXT5 FMOE_TEXT4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define FMOE_TEXT6 FMOE_TEXT5 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define FMOE_TEXT7 FMOE_TEXT6 ", %56, %57, %58, %59, %60, %61, %62, %63"

#define FMOE_WGMMA_OF(NAME, SUM, SHAPE, ELEMENTS, FLAGS, N, TEXT, IN, ...)                                  \
  static __device__ __forceinline__ void NAME(SUM(&d)[N / 2], const uint32_t(&a)[4], uint64_t descriptor) { \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N SHAPE "." ELEMENTS " {" TEXT "}, {" IN ", " FLAGS   \
                 ";"                                                                                        \
                 : __VA_ARGS__                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor));                            \
  }
/// OUT: the operands by their constraint.
#define FMOE_WGMMA(N, TEXT, IN, OUT)                                                        \
  template <>                                                                               \
  struct Wgmma<MmaType::kBf16, N> {                                                         \
    FMOE_WGMMA_OF(Mma, float, "k16", "f32.bf16.bf16", "1, 1, 1, 0", N, TEXT, IN, OUT("+f")) \
  };                                                                                        \
  template <>                                                                               \
  struct Wgmma<MmaType::kF16, N> {                                                          \
    FMOE_WGMMA_OF(Mma, float, "k16", "f32.f16.f16", "1, 1, 1, 0", N, TEXT, IN, OUT("+f"))   \
  };                                                                                        \
  template <>                                                                               \
  struct Wgmma<MmaType::kInt8, N> {                                                         \
    FMOE_WGMMA_OF(Mma, int32_t, "k32", "s32.s8.s8", "1", N, TEXT, IN, OUT("+r"))            \
  };

#define FMOE_OUT_OF_16(C) FMOE_OUT8(C, 0)
#define FMOE_OUT_OF_32(C) FMOE_OUT16(C, 0)
#define FMOE_OUT_OF_48(C) FMOE_OUT16(C, 0), FMOE_OUT8(C, 16)
#define FMOE_OUT_OF_64(C) FMOE_OUT32(C, 0)
#define FMOE_OUT_OF_80(C) FMOE_OUT32(C, 0), FMOE_OUT8(C, 32)
#define FMOE_OUT_OF_96(C) FMOE_OUT32(C, 0), FMOE_OUT16(C, 32)
#define FMOE_OUT_OF_112(C) FMOE_OUT32(C, 0), FMOE_OUT16(C, 32), FMOE_OUT8(C, 48)
#define FMOE_OUT_OF_128(C) FMOE_OUT32(C, 0), FMOE_OUT32(C, 32)

FMOE_WGMMA(16, FMOE_TEXT0, "%8, %9, %10, %11}, %12", FMOE_OUT_OF_16)
FMOE_WGMMA(32, FMOE_TEXT1, "%16, %17, %18, %19}, %20", FMOE_OUT_OF_32)
FMOE_WGMMA(48, FMOE_TEXT2, "%24, %25, %26, %27}, %28", FMOE_OUT_OF_48)
FMOE_WGMMA(64, FMOE_TEXT3, "%32, %33, %34, %35}, %36", FMOE_OUT_OF_64)
FMOE_WGMMA(80, FMOE_TEXT4, "%40, %41, %42, %43}, %44", FMOE_OUT_OF_80)
FMOE_WGMMA(96, FMOE_TEXT5, "%48, %49, %50, %51}, %52", FMOE_OUT_OF_96)
FMOE_WGMMA(112, FMOE_TEXT6, "%56, %57, %58, %59}, %60", FMOE_OUT_OF_112)
FMOE_WGMMA(128, FMOE_TEXT7, "%64, %65, %66, %67}, %68", FMOE_OUT_OF_128)

/// Mma: d += tokens * weights, 64 x N x 32 codes of e4m3, both in shared memory and the tokens as rows.
/// MmaFirst: d = tokens * weights. `tokens`: SharedDescriptor, `weights`: ByteDescriptor.
template <int N>
struct WgmmaBytes;

#define FMOE_WGMMA_BYTES_OF(NAME, FLAGS, N, TEXT, IN, ...)                                                 \
  static __device__ __forceinline__ void NAME(float(&d)[N / 2], uint64_t tokens, uint64_t weights) {       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" TEXT "}, " IN ", " FLAGS ";" \
                 : __VA_ARGS__                                                                             \
                 : "l"(tokens), "l"(weights));                                                             \
  }
#define FMOE_WGMMA_BYTES(N, TEXT, IN, OUT)                           \
  template <>                                                        \
  struct WgmmaBytes<N> {                                             \
    FMOE_WGMMA_BYTES_OF(Mma, "1, 1, 1", N, TEXT, IN, OUT("+f"))      \
    FMOE_WGMMA_BYTES_OF(MmaFirst, "0, 1, 1", N, TEXT, IN, OUT("+f")) \
  };

FMOE_WGMMA_BYTES(64, FMOE_TEXT3, "%32, %33", FMOE_OUT_OF_64)
FMOE_WGMMA_BYTES(128, FMOE_TEXT7, "%64, %65", FMOE_OUT_OF_128)

#undef FMOE_WGMMA_BYTES
#undef FMOE_WGMMA_BYTES_OF
#undef FMOE_OUT_OF_128
#undef FMOE_OUT_OF_112
#undef FMOE_OUT_OF_96
#undef FMOE_OUT_OF_80
#undef FMOE_OUT_OF_64
#undef FMOE_OUT_OF_48
#undef FMOE_OUT_OF_32
#undef FMOE_OUT_OF_16
#undef FMOE_WGMMA
#undef FMOE_WGMMA_OF
#undef FMOE_TEXT7
#undef FMOE_TEXT6
#undef FMOE_TEXT5
#undef FMOE_TEXT4
#undef FMOE_TEXT3
#undef FMOE_TEXT2
#undef FMOE_TEXT1
#undef FMOE_TEXT0
#undef FMOE_OUT32
#undef FMOE_OUT16
#undef FMOE_OUT8

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most `Pending` committed groups are under way.
template <int Pending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// The low word of a shared memory descriptor: K contiguous, rows of 128 bytes in groups of 8, 128-byte
/// swizzle. Only this word changes with the address.
__device__ __forceinline__ uint32_t SharedDescriptorLow(uint32_t address) {
  return address >> 4 | 1U << 16;
}
__device__ __forceinline__ uint64_t SharedDescriptor(uint32_t low) {
  constexpr uint32_t kSwizzle128 = 1U << 30;
  constexpr uint32_t kBytesOfRowGroup = 1024;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(kSwizzle128 | kBytesOfRowGroup >> 4));
  return descriptor;
}
/// The same for a row block of e4m3 codes (fragment.hpp): rows of 64 bytes in groups of 8, 64-byte
/// swizzle, a group every 2 KB: the rows of one half of neighbouring blocks.
__device__ __forceinline__ uint64_t ByteDescriptor(uint32_t low) {
  constexpr uint32_t kSwizzle64 = 2U << 30;
  constexpr uint32_t kBytesOfBlock = 2048;
  uint64_t descriptor;
  asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low), "r"(kSwizzle64 | kBytesOfBlock >> 4));
  return descriptor;
}

}  // namespace fusedmoe::cuda
