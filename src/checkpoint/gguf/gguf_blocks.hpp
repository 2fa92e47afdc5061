#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/quant.hpp>

/// The tensor types of GGUF: blocks that hold codes and scales side by side. A reader sees each such tensor
/// as the tensors that other formats store apart (codes, scales); the blocks are taken to pieces when they
/// are read.
namespace fusedmoe::checkpoint {

/// What one block of a tensor gives to one of these tensors.
struct BlockPart {
  std::string_view suffix;  ///< in place of ".weight"
  DType dtype = DType::kU8;
  int64_t elements = 0;  ///< from one block
  int64_t bytes = 0;     ///< of these elements
  /// Writes `bytes` bytes from each of `count` blocks. Null: the bytes of the file as they are.
  void (*decode)(const std::byte* blocks, int64_t count, std::byte* out) = nullptr;
};

/// Codes around the middle of 4 or 8 bits, or below zero points, as a block type is listed; 0 bits: it is
/// none of integers.
struct IntegerBlocks {
  int bits = 0;
  int64_t group = 0;   ///< elements of a scale
  bool zeros = false;  ///< F32 zero points, where the type has minima
  int64_t super = 0;   ///< elements that share the units of their scales (WeightFormat::super_cols)
};

struct BlockType {
  uint32_t id = 0;
  std::string_view name;
  int64_t elements = 1;  ///< of a row, in one block
  int64_t bytes = 1;     ///< of a block
  /// Empty: a type that is known and not read.
  std::span<const BlockPart> parts;
  IntegerBlocks integers;
  StoredIntegers stored;  ///< what a form of BytesType was, and a type that has a codebook is
};

/// Null for a number that no type has.
const BlockType* FindBlockType(uint32_t id);

/// The same blocks decoded to F32, where a scheme has the type as it is and a decoder has not; else the type.
const BlockType& DecodedType(const BlockType& type);

/// The same blocks as bytes with F32 scales, in groups (of 16 or 32, no more than the type has), with zero
/// points and units of scales as `as` says: what a type may be listed as beside others of integers, with
/// what it was. Null for floats, and where the type has no such units. Units are listed wherever there are
/// some.
const BlockType* BytesType(const BlockType& type, const IntegerBlocks& as);

/// The number one, for scales that a file leaves out: a part that reads nothing.
const BlockPart& UnitScalePart();

/// Numbers that the formats are told by.
inline constexpr uint32_t kGgufF32 = 0, kGgufF16 = 1, kGgufQ4_0 = 2, kGgufQ8_0 = 8, kGgufBf16 = 30,
                          kGgufMxfp4 = 39, kGgufNvfp4 = 40, kGgufDecoded = 0x10000;

}  // namespace fusedmoe::checkpoint
