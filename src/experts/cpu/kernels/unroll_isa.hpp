#pragma once

/// Compile-time loops. The body sees its index as a constant, so that arrays of vectors become registers.
/// Own types, because a template of the standard library would be a weak symbol of an instruction-set file.
#ifndef FMOE_INLINE  // portable code says its own (tiles_emulated.cpp)
#define FMOE_INLINE static inline __attribute__((always_inline))
/// Behind the parameters of every lambda that touches arrays of vectors: one that is called instead of
/// inlined takes them by address, and registers become memory (measured: a tenth of the speed).
#define FMOE_FLAT __attribute__((always_inline))
#endif

namespace fusedmoe::cpu::FMOE_ISA_NS {
namespace {

template <int kValue>
struct Index {
  constexpr operator int() const { return kValue; }
};

template <int... kIndices>
struct Sequence {};

template <int kCount, int... kIndices>
struct SequenceOf : SequenceOf<kCount - 1, kCount - 1, kIndices...> {};
template <int... kIndices>
struct SequenceOf<0, kIndices...> {
  using Type = Sequence<kIndices...>;
};

template <typename Body, int... kIndices>
FMOE_INLINE void UnrollOver(Body& body, Sequence<kIndices...>) {
  (body(Index<kIndices>{}), ...);
}

/// body(Index<0>{}), ..., body(Index<kCount - 1>{})
template <int kCount, typename Body>
FMOE_INLINE void Unroll(Body body) {
  UnrollOver(body, typename SequenceOf<kCount>::Type{});
}

}  // namespace
}  // namespace fusedmoe::cpu::FMOE_ISA_NS
