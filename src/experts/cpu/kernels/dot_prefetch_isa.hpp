#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/simd_isa.hpp"

/// How the micro-kernels ask for the weights that come next.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// Where a task will read what stands `ahead` of where it is:
///
///     expert 5 | .. [ my stripes ] ..        expert 9 | .. [ my stripes ] ..
///                      block --near-->  end --jump--> ^ asked for here
///
/// A thread's piece of an expert of a small layer is short (110 to 900 KB in Qwen3-30B-A3B). Lines asked for
/// beyond its end were read in vain, and the first ones of the next piece were waited for: 3 % of decode with
/// two threads, 1 % with one.
FMOE_INLINE const uint8_t* InStretch(const uint8_t* ahead, const TileView* tile) {
  return ahead + (ahead >= tile->stretch_end ? tile->stretch_jump : 0);
}

/// An address in a register of its own, from which the lines of a unit are constants away. GCC 12 gave each
/// of eight lines an address that it counted up, some of them in memory: INT4 g128 read at 88 % of the rate
/// instead of 97.
FMOE_INLINE const uint8_t* InRegister(const uint8_t* p) {
  asm("" : "+r"(p));
  return p;
}

/// From what a kernel reads to the lines that it asks for.
struct Distances {
  int64_t near;  ///< into L1
  int64_t far;   ///< into L2, by those that ask twice
};

/// Prefetches, beside a block, the lines that lie the tile's distance ahead (CpuPlan says how far, and why):
/// into L1, and by kernels that ask twice (KernelTable::asks_twice) into L2 too. Blocks have kLeastBytes, or
/// more by the type of their scales. Lines below kFirst (L1) and kFirstFar (L2) are skipped: the kernel asks
/// for them between its multiplications, at the distances that are returned.
template <bool kTwice, int64_t kLeastBytes, int64_t kFirst, int64_t kFirstFar = kFirst>
FMOE_INLINE Distances PrefetchBlock(const uint8_t* block, int64_t bytes, const TileView* tile) {
  constexpr int64_t kLines = (kLeastBytes + 63) / 64;
  const uint8_t* near = InStretch(block + tile->prefetch, tile);
  for (int64_t line = kFirst / 64; line < kLines; ++line) {
    Prefetch(near + 64 * line);
  }
  for (int64_t line = kLines; line * 64 < bytes; ++line) {
    Prefetch(near + 64 * line);
  }
  if constexpr (!kTwice) {
    return {near - block, 0};
  }
  const uint8_t* far = InStretch(block + tile->prefetch_far, tile);
  for (int64_t at = kFirstFar; at < bytes; at += 64) {
    PrefetchFar(far + at);
  }
  return {near - block, far - block};
}

/// The lines that a kernel asks for next, where it asks twice.
struct TwoRequests {
  const uint8_t* near;
  const uint8_t* far;
};

FMOE_INLINE TwoRequests RequestsFrom(const uint8_t* read, Distances ahead) {
  return {InRegister(read + ahead.near), InRegister(read + ahead.far)};
}

/// One line of each, in its place beside a vector.
template <typename Vector>
FMOE_INLINE void AskTwice(TwoRequests& asked, Vector& beside) {
  PrefetchFarBeside(asked.far, beside);
  PrefetchBeside(asked.near, beside);
  asked.far += 64;
  asked.near += 64;
}

/// Lines of the stripes that come next, asked for while a tall tile is multiplied: a few at each of its
/// steps. With one tile after the other asking some KB ahead of itself, the first waited for memory and the
/// others had nothing to wait for.
///
/// Cores of AMD are asked into L1, from where lines go to L2: there some of the requests into L2 are dropped,
/// at some times more than half. NVFP4 in 15 bits, weights from memory, three tokens 14 to 30 GB/s by the run
/// and 30 always, four 22 to 25 and 26 (Zen 5).
struct NextLines {
  const uint8_t* at;
  const uint8_t* end;
  int64_t at_once;
  bool into_l2;
};

FMOE_INLINE NextLines LinesOf(const TileView& tile, int64_t steps) {
  const int64_t lines = (tile.next_bytes + 63) / 64;
  return {tile.next, tile.next + tile.next_bytes, (lines + steps - 1) / steps, tile.next_into_l2};
}

FMOE_INLINE void PrefetchLines(NextLines& lines) {
  for (int64_t i = 0; i < lines.at_once && lines.at < lines.end; ++i, lines.at += 64) {
    if (lines.into_l2) {
      PrefetchFar(lines.at);
    } else {
      Prefetch(lines.at);
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
