#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "checkpoint/gguf/gguf_blocks.hpp"
#include "checkpoint/gguf/gguf_header.hpp"
#include "checkpoint/matrices/four_bit_blocks.hpp"
#include "checkpoint/mlx/affine_matrix.hpp"
#include "platform/file.hpp"

namespace fusedmoe::checkpoint {

struct MlxGroups;
struct MlxSettings;

/// Experts of a GGUF file whose matrices have different types, by what their names have in common: the
/// integers that hold all of them, or none.
using MixedExperts = std::unordered_map<std::string, IntegerBlocks>;

/// Tensors that came with others of the same blocks of a GGUF file, until they are asked for: where each is
/// asked for once, each block is read once.
struct BlockParts {
  struct Part {
    size_t tensor = 0;  ///< which of the store
    int64_t first_block = 0;
    Tensor data;
  };
  std::vector<Part> parts;
};

/// The tensors of a directory: one safetensors file, or shards with an index; or those of a GGUF file. Knows
/// names, shapes and places; says nothing about what the tensors mean. Immutable; safe from many threads.
class TensorStore {
 public:
  /// A 4-bit matrix of bitsandbytes is listed as the 16- or 32-bit one that it decodes to, without the
  /// tensors that go with it; `mlx`: affine matrices of MLX too, except those of routed experts that keep
  /// their codes (none with options.decode_blocks); other words of MLX are listed as the bytes that they
  /// hold.
  static Result<std::unique_ptr<const TensorStore>> Open(const std::string& directory,
                                                         const CheckpointOptions& options,
                                                         const MlxGroups* mlx = nullptr);

  /// A GGUF file, and those beside it that its metadata counts ("-00001-of-00003.gguf"). `header` becomes
  /// that of the first. A quantized tensor "X.weight" is listed as the tensors that it holds: "X.weight" with
  /// its codes, "X.weight_scale" with its scales.
  static Result<std::unique_ptr<const TensorStore>> OpenGguf(const std::string& path,
                                                             const CheckpointOptions& options,
                                                             GgufHeader* header);

  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  bool is_gguf() const { return gguf_; }
  /// Paths of the files with tensors, and of their index.
  std::vector<std::string> Paths() const;
  /// The block type of a matrix "X.weight" of a GGUF file; null when there is none.
  const BlockType* BlockTypeOf(std::string_view name) const;
  /// Null when there is no tensor of that name.
  const TensorInfo* Find(std::string_view name) const;
  bool Has(std::string_view name) const { return Find(name) != nullptr; }
  /// All names that begin with `prefix`, ascending.
  std::span<const std::string_view> Below(std::string_view prefix) const;

  /// kBadInput when the tensor is missing or cannot be used.
  Result<Tensor> Load(std::string_view name, BlockParts* beside = nullptr) const;
  /// Rows [first, first + count) of the first axis; only these bytes are read. The rank is kept.
  Result<Tensor> LoadRows(std::string_view name, int64_t first, int64_t count,
                          BlockParts* beside = nullptr) const;
  /// The sub-tensor at `index` of the first axis, one dimension less.
  Result<Tensor> LoadItem(std::string_view name, int64_t index, BlockParts* beside = nullptr) const;
  /// Bytes [offset, offset + count) of what Load gives; of the file no more than the blocks, or the row of an
  /// affine matrix, that they are in.
  Result<platform::FileBytes> LoadBytes(std::string_view name, int64_t offset, int64_t count) const;

  /// All that the data of tensors whose names begin with `prefix` depends on, without reading it: files with
  /// sizes and times, tensors with types and places.
  std::string Version(std::string_view prefix) const;

  /// Puts the file of a tensor, when it is known, and its name into a failure.
  Status Blame(Status status, std::string_view name) const;

 private:
  struct Place {
    int32_t file = 0;
    int64_t begin = 0;
    // The tensor is a part of the blocks of this type; null: bytes as they are.
    const BlockType* type = nullptr;
    const BlockPart* part = nullptr;
    int32_t four_bit = -1;  // index into four_bit_: the tensor decodes to what is listed
    int32_t affine = -1;    // the same of affine_
  };
  // A 4-bit matrix of bitsandbytes: where its tensors lie.
  struct FourBitTensor {
    FourBitMatrix matrix;
    Place codes;
    std::array<Place, kFourBitParts.size()> parts;
  };
  struct AffineTensor {
    AffineMatrix matrix;
    Place codes, scales, biases;
  };

  Status AddFile(const std::string& directory, const std::string& name, const CheckpointOptions& options);
  Status OpenGgufFile(const std::string& path, const CheckpointOptions& options,
                      std::vector<GgufHeader>* headers);
  /// Takes the tensors of a file into the list. `decode`: CheckpointOptions::decode_blocks.
  void ListGguf(const GgufHeader& header, int32_t number, const MixedExperts& mixed, bool decode);
  Status IndexNames();
  Status FoldFourBit();
  Status FoldFourBit(const TensorInfo& state, const Place& place, std::string_view weight,
                     std::vector<bool>* hidden);
  /// `decode`: CheckpointOptions::decode_blocks.
  Status FoldMlx(const MlxGroups& groups, bool decode);
  struct AffineParts;
  Result<MlxSettings> FindAffine(int64_t group, size_t codes, size_t scales,
                                 std::vector<AffineParts>* affine) const;
  void FoldAffine(const std::vector<AffineParts>& affine, bool decode, std::vector<bool>* hidden);
  /// Takes tensors out of the list.
  Status Hide(const std::vector<bool>& hidden);
  Result<Tensor> ReadBlocks(size_t index, int64_t offset, int64_t bytes, const Shape& shape,
                            BlockParts* beside) const;
  Result<platform::FileBytes> ReadFourBitAt(const Place& place, int64_t offset, int64_t bytes) const;
  Result<platform::FileBytes> ReadAffineAt(const Place& place, int64_t offset, int64_t bytes) const;
  Result<size_t> Require(std::string_view name) const;
  Result<Tensor> ReadAt(size_t index, int64_t offset, int64_t bytes, const Shape& shape,
                        BlockParts* beside) const;

  std::string source_;  // the index, or the directory: where a missing tensor should have been
  std::vector<TensorInfo> tensors_;
  std::vector<Place> places_;  // parallel to tensors_
  std::vector<FourBitTensor> four_bit_;
  std::vector<AffineTensor> affine_;
  std::vector<std::shared_ptr<const platform::InputFile>> files_;
  std::unordered_map<std::string_view, size_t> by_name_;
  std::vector<std::string_view> sorted_;  // the same names
  bool gguf_ = false;
};

}  // namespace fusedmoe::checkpoint
