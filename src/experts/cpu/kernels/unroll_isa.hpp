#pragma once

/// Compile-time loops. The body sees its index as a constant, so that arrays of vectors become registers.
/// Own types, because a template of the standard library would be a weak symbol of an instruction-set file.
#ifndef FMOE_INLINE  // portable code says its own (tiles_emulated.cpp)
#define FMOE_INLINE static inline __attribute__((always_inline))
/// always_inline for a lambda, behind its parameters: every one that touches arrays of vectors. One that is
/// called takes them by address, and registers become memory (measured: a tenth of the speed).
#define FMOE_FLAT __attribute__((always_inline))
/// FMOE_KERNEL: a function that stays one, into which GCC inlines the whole tree of calls below it (flatten).
/// FMOE_NESTED: a larger function of that tree, which only flatten inlines. Marked always_inline, it would be
/// inlined into each caller on the way up, and copied and optimized again at every level, which was two
/// thirds of the time that GCC 12 took. Nested functions pass what they share by reference: captures of a
/// closure would stay in memory. Clang's flatten inlines one level only: there nested ones are always_inline.
#ifdef __clang__
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
/// function, whose index is a constant in each inlined copy. One that takes `auto`, which it needs where the
/// index has to be a constant expression, is kCount instances with all that is inside them: with `auto`
/// everywhere GCC 12 took twice as long. The call is one level deep (Times, instead of a function that
/// expands an index sequence): with two a fifth of the time to compile went into copying bodies.
template <int kCount>
constexpr Times<kCount> Unroll = {};

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
