#include "checkpoint/gguf/gguf_blocks.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "checkpoint/gguf/gguf_grid_types.hpp"
#include "checkpoint/gguf/gguf_integers.hpp"
#include "weights/narrow.hpp"

namespace fusedmoe::checkpoint {
namespace {

using namespace gguf_integers;

template <int64_t kFrom, int64_t kCount>
void Copy(const std::byte* block, std::byte* out) {
  std::memcpy(out, block + kFrom, kCount);
}

// Nibbles of kGroup elements, the first half of them in the low ones, to pairs of neighbours.
template <int64_t kFrom, int64_t kGroup, int64_t kGroups>
void PairNibbles(const std::byte* block, std::byte* out) {
  constexpr int64_t kHalf = kGroup / 2;
  for (int64_t at = 0; at < kGroups * kHalf; at += kHalf) {
    for (int64_t eight = 0; eight < kHalf; eight += 8) {
      uint64_t codes = 0;
      std::memcpy(&codes, block + kFrom + at + eight, sizeof(codes));
      const uint32_t low = PairNibblesOf(codes), high = PairNibblesOf(codes >> 4);
      std::memcpy(out + at + eight / 2, &low, sizeof(low));
      std::memcpy(out + at + (eight + kHalf) / 2, &high, sizeof(high));
    }
  }
}

// The unsigned e4m3 of GGUF's NVFP4 reads 0x7f as zero.
void Nvfp4Scales(const std::byte* block, std::byte* out) {
  for (int64_t group = 0; group < 4; ++group) {
    out[group] = block[group] == std::byte{0x7f} ? std::byte{0} : block[group];
  }
}

void One(const std::byte* /*block*/, std::byte* out) {
  constexpr float kOne = 1.0F;
  std::memcpy(out, &kOne, sizeof(kOne));
}

/// kDecode of blocks of kBytes bytes each, which gives kOut bytes.
template <int64_t kBytes, int64_t kOut, void (*kDecode)(const std::byte*, std::byte*)>
void Each(const std::byte* blocks, int64_t count, std::byte* out) {
  for (; count > 0; --count, blocks += kBytes, out += kOut) {
    kDecode(blocks, out);
  }
}

// ---- parts ----

template <DType kDType, int64_t kBytes>
constexpr BlockPart kPlain[] = {{.dtype = kDType, .elements = 1, .bytes = kBytes}};

constexpr BlockPart kQ4_0[] = {{".weight", DType::kU4, 32, 16, Each<18, 16, PairNibbles<2, 32, 1>>},
                               {".weight_scale", DType::kF16, 1, 2, HalfScale<Old<false, false>>}};
constexpr BlockPart kMxfp4[] = {{".weight", DType::kF4E2M1, 32, 16, Each<17, 16, PairNibbles<1, 32, 1>>},
                                {".weight_scale", DType::kF8E8M0, 1, 1, Each<17, 1, Copy<0, 1>>}};
constexpr BlockPart kNvfp4[] = {{".weight", DType::kF4E2M1, 64, 32, Each<36, 32, PairNibbles<4, 16, 4>>},
                                {".weight_scale", DType::kF8E4M3, 4, 4, Each<36, 4, Nvfp4Scales>}};
constexpr BlockPart kUnitScale = {".scale", DType::kF32, 1, 4, Each<0, 4, One>};

template <typename Type, int kBits, bool kZeros>
constexpr BlockPart CodesOf() {
  if constexpr (kBits == 4) {
    return {".weight", DType::kU4, Type::kElements, Type::kElements / 2, NibbleCodes<Type, kZeros>};
  } else {
    return {".weight", DType::kU8, Type::kElements, Type::kElements, ByteCodes<Type, kZeros>};
  }
}

template <typename Type, int64_t kGroup>
constexpr BlockPart ScalesOf() {
  constexpr int64_t kGroups = Type::kElements / kGroup;
  return {".weight_scale", DType::kF32, kGroups, kGroups * 4, GroupScales<Type, kGroup>};
}

template <typename Type, int64_t kGroup>
constexpr BlockPart ZerosOf() {
  constexpr int64_t kGroups = Type::kElements / kGroup;
  return {".weight_zero", DType::kF32, kGroups, kGroups * 4, GroupZeros<Type, kGroup>};
}

/// Codes of kBits below the F16 scale that begins each block.
template <typename Type, int kBits>
constexpr BlockPart kWithHalf[] = {CodesOf<Type, kBits, false>(),
                                   {".weight_scale", DType::kF16, 1, 2, HalfScale<Type>}};

/// Below F32 scales of kGroup elements, with zero points (kZeros) and the units of both, where there are
/// some.
template <typename Type, int kBits, int64_t kGroup, bool kZeros>
constexpr auto PartsOf() {
  constexpr bool kOfMinima = kZeros && kIsSuper<Type>;
  constexpr size_t kCount = (kZeros ? 3 : 2) + (kHasUnits<Type> ? 1 : 0) + (kOfMinima ? 1 : 0);
  std::array<BlockPart, kCount> parts = {CodesOf<Type, kBits, kZeros>(), ScalesOf<Type, kGroup>()};
  size_t next = 2;
  if constexpr (kZeros) {
    parts[next++] = ZerosOf<Type, kGroup>();
  }
  if constexpr (kHasUnits<Type>) {
    parts[next++] = {".weight_super_scale", DType::kF16, 1, 2, SuperScale<Type>};
  }
  if constexpr (kOfMinima) {
    parts[next++] = {".weight_super_minimum", DType::kF16, 1, 2, SuperMinimum<Type>};
  }
  return parts;
}
template <typename Type, int kBits, int64_t kGroup, bool kZeros>
constexpr auto kGroupParts = PartsOf<Type, kBits, kGroup, kZeros>();

template <typename Type>
constexpr BlockPart kValues[] = {
    {".weight", DType::kF32, Type::kElements, Type::kElements * 4, DecodeValues<Type>}};

// ---- the tables ----

template <typename Type>
constexpr bool kIsHalf = requires {
  requires Type::kHalfScale;
};
template <typename Type>
constexpr bool kHasCodebook = requires {
  Type::kCodebook;
};

/// What its integers need.
template <typename Type>
constexpr StoredIntegers StoredAs() {
  StoredIntegers stored;
  stored.bits = Type::kBits;
  stored.group = Type::kGroup;
  stored.zero_points = Type::kMinima;
  stored.center = Type::kCenter;
  stored.scale_dtype = kIsHalf<Type> ? DType::kF16 : DType::kF32;
  stored.super_cols = kHasUnits<Type> ? Type::kElements : 0;
  if constexpr (kForLayouts<Type>) {
    stored.super_exponent = Type::kSuperExponent;
  }
  if constexpr (kHasCodebook<Type>) {
    stored.bits = IndexBits(Type::kCodebook);
    stored.zero_points = false;
    stored.codebook = Type::kCodebook;
  }
  return stored;
}

/// The same of a type that is listed as itself: nothing where panels hold it in as many bits.
template <typename Type>
constexpr StoredIntegers StoredAlone() {
  constexpr StoredIntegers kStored = StoredAs<Type>();
  constexpr bool kListed = PanelBits(kStored) == (Type::kBits <= 4 ? 4 : 8);
  return kHasCodebook<Type> || !kListed ? kStored : StoredIntegers{};
}

/// A type with a scale for each block, its codes in bytes.
template <typename Type>
constexpr BlockType InBlocks(uint32_t id, std::string_view name) {
  return {id,
          name,
          Type::kElements,
          Type::kBytes,
          kWithHalf<Type, 8>,
          {8, Type::kGroup, false},
          StoredAlone<Type>()};
}

/// A type with scales of its own for each group, its codes in kBits.
template <typename Type, int kBits, int64_t kGroup, bool kZeros>
constexpr BlockType Grouped(uint32_t id, std::string_view name) {
  return {id,
          name,
          Type::kElements,
          Type::kBytes,
          kGroupParts<Type, kBits, kGroup, kZeros>,
          {kBits, kGroup, kZeros, kIsSuper<Type> ? Type::kElements : 0},
          StoredAlone<Type>()};
}

/// In the fewest bits that hold its codes.
template <typename Type>
constexpr BlockType InGroups(uint32_t id, std::string_view name) {
  constexpr int kBits = Type::kBits <= 4 ? 4 : 8;
  return Grouped<Type, kBits, Type::kGroup, Type::kMinima>(id, name);
}

using Q4_0 = Old<false, false>;
using Q4_1 = Old<true, false>;
using Q5_0 = Old<false, true>;
using Q5_1 = Old<true, true>;
using Q4K = Q45K<false>;
using Q5K = Q45K<true>;

constexpr BlockType kTypes[] = {
    {0, "F32", 1, 4, kPlain<DType::kF32, 4>, {}},
    {1, "F16", 1, 2, kPlain<DType::kF16, 2>, {}},
    {kGgufQ4_0, "Q4_0", 32, 18, kQ4_0, {4, 32, false}},
    InGroups<Q4_1>(3, "Q4_1"),
    InBlocks<Q5_0>(6, "Q5_0"),
    InGroups<Q5_1>(7, "Q5_1"),
    InBlocks<Q8_0>(kGgufQ8_0, "Q8_0"),
    {9, "Q8_1", 32, 36, {}, {}},
    InGroups<Q2K>(10, "Q2_K"),
    InGroups<Q3K>(11, "Q3_K"),
    InGroups<Q4K>(12, "Q4_K"),
    InGroups<Q5K>(13, "Q5_K"),
    InGroups<Q6K>(14, "Q6_K"),
    {15, "Q8_K", kSuper, 292, {}, {}},
    InGroups<Iq2Xxs>(16, "IQ2_XXS"),
    InGroups<Iq2Xs>(17, "IQ2_XS"),
    InGroups<Iq3Xxs>(18, "IQ3_XXS"),
    InGroups<Iq1S>(19, "IQ1_S"),
    InBlocks<Iq4Nl>(20, "IQ4_NL"),
    InGroups<Iq3S>(21, "IQ3_S"),
    InGroups<Iq2S>(22, "IQ2_S"),
    InGroups<Iq4Xs>(23, "IQ4_XS"),
    {24, "I8", 1, 1, kPlain<DType::kI8, 1>, {}},
    {25, "I16", 1, 2, kPlain<DType::kI16, 2>, {}},
    {26, "I32", 1, 4, kPlain<DType::kI32, 4>, {}},
    {27, "I64", 1, 8, kPlain<DType::kI64, 8>, {}},
    {28, "F64", 1, 8, kPlain<DType::kF64, 8>, {}},
    InGroups<Iq1M>(29, "IQ1_M"),
    {30, "BF16", 1, 2, kPlain<DType::kBF16, 2>, {}},
    InGroups<Tq1_0>(34, "TQ1_0"),
    InGroups<Tq2_0>(35, "TQ2_0"),
    {kGgufMxfp4, "MXFP4", 32, 17, kMxfp4, {}},
    {kGgufNvfp4, "NVFP4", 64, 36, kNvfp4, {}},
    InGroups<Q1_0>(41, "Q1_0"),
    InGroups<Q2_0>(42, "Q2_0"),
};

/// Other forms of types of integers. Their ids are none of a file: those of the type and of the form.
struct Forms {
  uint32_t id;
  BlockType decoded;
  BlockType bytes[2][2][2];  ///< [groups of 16][zero points][two levels]
};

/// Empty where the type has no such form.
template <typename Type, bool kSixteen, bool kZeros, bool kSuper>
constexpr BlockType Bytes(uint32_t id, std::string_view name) {
  if constexpr ((!kSixteen && Type::kGroup < 32) || (kSuper && !kIsSuper<Type>)) {
    return {id, name, Type::kElements, Type::kBytes, {}, {}};
  } else {
    constexpr int64_t kGroup = kSixteen ? 16 : Type::kGroup;
    BlockType type = Grouped<Type, 8, kGroup, kZeros>(id, name);
    type.integers.super = kSuper ? Type::kElements : 0;
    type.stored = StoredAs<Type>();
    return type;
  }
}

template <typename Type>
constexpr Forms FormsOf(uint32_t id, std::string_view name) {
  const uint32_t own = kGgufDecoded + id;
  return {id,
          {own, name, Type::kElements, Type::kBytes, kValues<Type>, {}},
          {{{Bytes<Type, false, false, false>(own, name), Bytes<Type, false, false, true>(own, name)},
            {Bytes<Type, false, true, false>(own, name), Bytes<Type, false, true, true>(own, name)}},
           {{Bytes<Type, true, false, false>(own, name), Bytes<Type, true, false, true>(own, name)},
            {Bytes<Type, true, true, false>(own, name), Bytes<Type, true, true, true>(own, name)}}}};
}

constexpr Forms kForms[] = {
    FormsOf<Q4_0>(kGgufQ4_0, "Q4_0"), FormsOf<Q4_1>(3, "Q4_1"),         FormsOf<Q5_0>(6, "Q5_0"),
    FormsOf<Q5_1>(7, "Q5_1"),         FormsOf<Q8_0>(kGgufQ8_0, "Q8_0"), FormsOf<Q2K>(10, "Q2_K"),
    FormsOf<Q3K>(11, "Q3_K"),         FormsOf<Q4K>(12, "Q4_K"),         FormsOf<Q5K>(13, "Q5_K"),
    FormsOf<Q6K>(14, "Q6_K"),         FormsOf<Iq4Nl>(20, "IQ4_NL"),     FormsOf<Iq4Xs>(23, "IQ4_XS"),
    FormsOf<Iq2Xxs>(16, "IQ2_XXS"),   FormsOf<Iq2Xs>(17, "IQ2_XS"),     FormsOf<Iq3Xxs>(18, "IQ3_XXS"),
    FormsOf<Iq1S>(19, "IQ1_S"),       FormsOf<Iq3S>(21, "IQ3_S"),       FormsOf<Iq2S>(22, "IQ2_S"),
    FormsOf<Iq1M>(29, "IQ1_M"),       FormsOf<Tq1_0>(34, "TQ1_0"),      FormsOf<Tq2_0>(35, "TQ2_0"),
    FormsOf<Q1_0>(41, "Q1_0"),        FormsOf<Q2_0>(42, "Q2_0"),        FormsOf<Mxfp4>(kGgufMxfp4, "MXFP4")};

const Forms* FindForms(const BlockType& type) {
  const auto* found =
      std::find_if(std::begin(kForms), std::end(kForms), [&](const Forms& row) { return row.id == type.id; });
  return found == std::end(kForms) ? nullptr : found;
}

}  // namespace

const BlockType* FindBlockType(uint32_t id) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const BlockType& type) { return type.id == id; });
  return found == std::end(kTypes) ? nullptr : found;
}

const BlockType& DecodedType(const BlockType& type) {
  const Forms* forms = FindForms(type);
  return forms == nullptr ? type : forms->decoded;
}

const BlockType* BytesType(const BlockType& type, const IntegerBlocks& as) {
  const Forms* forms = FindForms(type);
  if (forms == nullptr) {
    return nullptr;
  }
  const BlockType& bytes = forms->bytes[as.group == 16 ? 1 : 0][as.zeros ? 1 : 0][as.super > 0 ? 1 : 0];
  return bytes.parts.empty() ? nullptr : &bytes;
}

const BlockPart& UnitScalePart() {
  return kUnitScale;
}

}  // namespace fusedmoe::checkpoint
