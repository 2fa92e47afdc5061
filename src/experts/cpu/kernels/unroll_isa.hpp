#pragma once

/// Compile-time loops. The body sees its index as a constant, so that arrays of vectors become registers.
/// Own types, because a template of the standard library would be a weak symbol of an instruction-set file.
#ifndef FMOE_INLINE  // portable code says its own (tiles_emulated.cpp)
#define FMOE_INLINE static inline __attribute__((always_inline))
/// Behind the parameters of every lambda that touches arrays of vectors: one that is called instead of
/// inlined takes them by address, and registers become memory (measured: a tenth of the speed).
#define FMOE_FLAT __attribute__((always_inline))
/// A function that everything below it is inlined into at once, and the larger pieces of it: inlined one into
/// the other, each of them is copied and optimized once for every level above it, which was two thirds of the
/// time that GCC 12 took. What they share goes by reference: closures between them would stay in memory.
#ifdef __clang__  // flattens one level
#define FMOE_KERNEL __attribute__((noinline))
#define FMOE_NESTED FMOE_INLINE
#else
#define FMOE_KERNEL __attribute__((flatten, noclone, noinline))
#define FMOE_NESTED static inline __attribute__((noclone))
#endif
#endif

namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <int kValue>
struct Index {
  constexpr operator int() const { return kValue; }
};

template <int kCount, int... kIndices>
struct Times : Times<kCount - 1, kCount - 1, kIndices...> {};
template <int... kIndices>
struct Times<0, kIndices...> {
  template <typename Body>
  FMOE_FLAT void operator()(const Body& body) const {
    (body(Index<kIndices>{}), ...);
  }
};

/// Unroll<kCount>(body): body(Index<0>{}), ..., body(Index<kCount - 1>{}). A body that takes an `int` is one
/// function, whose copies see their index as a constant when they are inlined; one that takes `auto`, because
/// it needs it where only constants may stand, is kCount functions, each with its own of all that is inside:
/// with `auto` everywhere GCC 12 took twice as long. One call deep: with a function that makes the indices
/// and one that takes them, a fifth of the time to compile went into copying bodies.
template <int kCount>
constexpr Times<kCount> Unroll = {};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
