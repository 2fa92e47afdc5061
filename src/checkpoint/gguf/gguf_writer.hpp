#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/gguf/gguf_blocks.hpp"

namespace fusedmoe::checkpoint {

/// An entry of the metadata of a file under construction.
struct GgufEntry {
  std::string key;
  std::variant<uint32_t, float, bool, std::string, std::vector<float>> value;
};

/// What a tensor of a file under construction will be.
struct GgufSpec {
  std::string name;
  std::vector<int64_t> dims;  ///< slowest first; rows are whole blocks
  uint32_t type = 0;
  int64_t parts = 1;  ///< equal pieces that are written one by one: the experts of a stack
};

/// Writes a GGUF file of version 3 piece by piece, in bounded memory and any order: the header goes first,
/// tensors lie in the order of the specs, each at a multiple of 32. The bytes depend on entries, specs and
/// data only. Nothing stands under the final name until Finish. Not thread-safe.
class GgufWriter {
 public:
  /// Refuses (kUsage) repeated or empty keys and names, names of more than 63 bytes, unknown types and rows
  /// that are no whole blocks.
  static Result<std::unique_ptr<GgufWriter>> Create(const std::string& path,
                                                    const std::vector<GgufEntry>& entries,
                                                    std::vector<GgufSpec> specs);
  ~GgufWriter();

  /// Piece `part` of a tensor; its bytes must be those of the spec, and each is written once (kUsage
  /// otherwise).
  Status Write(std::string_view name, int64_t part, std::span<const std::byte> bytes);
  /// Fails (kUsage) when a piece is missing. Moves the file to its final name.
  Status Finish();
  int64_t file_bytes() const;

 private:
  struct Impl;
  explicit GgufWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

/// The format of matrices in which a block type holds them; not quantized for plain types, and for those
/// that are only read.
WeightFormat FormatOfBlocks(const BlockType& type);

/// A matrix of exactly that format as the bytes of its blocks, U8 [rows, bytes]. Tensor scales and biases are
/// tensors of their own there. kUnsupported when columns are no whole blocks, or the type is only read.
Result<Tensor> EncodeBlocks(const BlockType& type, const CanonicalMatrix& matrix);

}  // namespace fusedmoe::checkpoint
