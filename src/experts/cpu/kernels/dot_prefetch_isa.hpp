#pragma once

#include <stdint.h>

#include "experts/cpu/kernels/kernel_table_isa.hpp"
#include "experts/cpu/kernels/simd_isa.hpp"

/// How the micro-kernels prefetch the weights that come next.
namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

/// The address to prefetch for what stands `ahead` of where a task reads. Beyond the end of the task's range
/// of weights it is in the next one:
///
///     expert 5 | .. [ my stripes ] ..        expert 9 | .. [ my stripes ] ..
///                      block --near-->  end --jump--> ^ prefetched here
///
/// A thread's range of an expert of a small layer is short (110 to 900 KB in Qwen3-30B-A3B). Lines prefetched
/// beyond its end were read in vain, and the first ones of the next range were waited for: 3 % of decode with
/// two threads, 1 % with one.
FMOE_INLINE const uint8_t* InRange(const uint8_t* ahead, const TileView* tile) {
  return ahead + (ahead >= tile->short_tile.range_end ? tile->short_tile.range_jump : 0);
}

/// An address in a register of its own, so that the lines of a unit are at constant displacements from it.
/// GCC 12 gave each of eight lines an induction variable, some of them spilled: INT4 g128 read at 88 % of the
/// rate instead of 97.
FMOE_INLINE const uint8_t* InRegister(const uint8_t* p) {
  asm("" : "+r"(p));
  return p;
}

/// From the address that a kernel reads to the one that it prefetches.
struct Distances {
  int64_t near;  ///< into L1
  int64_t far;   ///< into L2, by kernels that prefetch twice
};

/// Prefetches, beside a block, the lines that lie the tile's distance ahead (CpuPlan says how far, and why):
/// into L1, and by kernels that prefetch twice (KernelTable::prefetches_twice) into L2 too. Blocks have
/// kLeastBytes, or more by the type of their scales. Lines below kFirst (L1) and kFirstFar (L2) are skipped:
/// the kernel prefetches them between its multiplications, at the distances that are returned.
template <bool kTwice, int64_t kLeastBytes, int64_t kFirst, int64_t kFirstFar = kFirst>
FMOE_INLINE Distances PrefetchBlock(const uint8_t* block, int64_t bytes, const TileView* tile) {
  constexpr int64_t kLines = (kLeastBytes + 63) / 64;
  const uint8_t* near = InRange(block + tile->short_tile.prefetch, tile);
  for (int64_t line = kFirst / 64; line < kLines; ++line) {
    Prefetch(near + 64 * line);
  }
  for (int64_t line = kLines; line * 64 < bytes; ++line) {
    Prefetch(near + 64 * line);
  }
  if constexpr (!kTwice) {
    return {near - block, 0};
  }
  const uint8_t* far = InRange(block + tile->short_tile.prefetch_far, tile);
  for (int64_t at = kFirstFar; at < bytes; at += 64) {
    PrefetchFar(far + at);
  }
  return {near - block, far - block};
}

/// The next lines to prefetch into L1 and into L2, of a kernel that prefetches twice.
struct PrefetchPair {
  const uint8_t* near;
  const uint8_t* far;
};

FMOE_INLINE PrefetchPair PrefetchPairFrom(const uint8_t* read, Distances ahead) {
  return {InRegister(read + ahead.near), InRegister(read + ahead.far)};
}

/// One line of each, kept at this place among the operations on `beside` (PrefetchBeside).
template <typename Vector>
FMOE_INLINE void PrefetchTwice(PrefetchPair& next, Vector& beside) {
  PrefetchFarBeside(next.far, beside);
  PrefetchBeside(next.near, beside);
  next.far += 64;
  next.near += 64;
}

/// Lines of the stripes that come next, prefetched while a tall tile is multiplied: a few at each of its
/// steps. When each tile prefetched some KB ahead of itself, the first one waited for memory and the others,
/// which read the same weights again, for nothing.
///
/// On AMD they go into L1 (and from there to L2): Zen 5 drops some of the prefetches into L2, at some times
/// more than half. NVFP4 in 15 bits, weights from memory, into L2 and into L1: three tokens 14 to 30 GB/s by
/// the run and 30 always, four 22 to 25 and 26.
struct NextLines {
  const uint8_t* at;
  const uint8_t* end;
  int64_t at_once;
  bool into_l2;
};

FMOE_INLINE NextLines LinesOf(const TileView& tile, int64_t steps) {
  const int64_t lines = (tile.tall_tile.next_bytes + 63) / 64;
  return {tile.tall_tile.next, tile.tall_tile.next + tile.tall_tile.next_bytes, (lines + steps - 1) / steps,
          tile.tall_tile.next_into_l2};
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
