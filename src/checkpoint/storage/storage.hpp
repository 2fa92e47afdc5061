#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/safetensors.hpp>
#include <fusedmoe/weights.hpp>

/// The way out: how canonical matrices lie in the files of the tools that write quantized checkpoints.
namespace fusedmoe::checkpoint {

/// Where the bytes of a stored tensor come from.
enum class Source : uint8_t {
  kCodes,
  kBlockScale,
  kChannelScale,
  kTensorScale,
  kTensorScaleReciprocal,
  kInputScale,
  kInputScaleReciprocal,
  kMatrixShape,    ///< I64 [2]: rows and columns before packing
  kPreQuantScale,  ///< F32 [cols]; only where the matrices have smoothing factors
  kZeroPoint,      ///< I32, packed along the rows; only where the matrices have zero points
  kGroupIndex      ///< I32 [cols]; only where the matrices have one
};

/// One tensor of a quantized projection: "<projection>.<suffix>".
struct Part {
  std::string_view suffix;
  Source source;
  DType dtype;          ///< kBlockScale of 16-bit integer groups: the dtype that the matrix has
  bool scalar = false;  ///< single values: shape [] instead of [1]
  bool column = true;   ///< kChannelScale: [rows, 1] instead of [rows]
};

/// What differs between checkpoints of one scheme.
struct StorageOptions {
  bool zero_points = false;
  bool group_index = false;
  bool smoothing = false;  ///< factors of the input (AWQ)
  /// Modules that stay unquantized, in the tool's words.
  std::vector<std::string> ignored;
};

/// A module as the lists of a tool name it. A name that ends in a dot stands for all modules below it:
/// "model.layers.3.mlp.experts." is a pattern for compressed-tensors ("re:..."), a wildcard for modelopt, and
/// for others the name of what is around them.
std::string InWordsOf(std::string_view producer, std::string module);

/// How a tool stores a scheme.
struct StorageRow {
  std::string_view scheme;    ///< name with granularity, as Scheme::name has it
  std::string_view producer;  ///< "modelopt", "compressed-tensors", "deepseek"
  std::span<const Part> parts;
  /// quantization_config of config.json, as a JSON object.
  std::string (*config)(const Scheme& scheme, const StorageOptions& options);
  /// hf_quant_config.json; null: the tool writes none.
  std::string (*side_file)(const Scheme& scheme, const StorageOptions& options);
};

/// True when the tool has a place for smoothing factors beside this scheme.
bool StoresSmoothing(const StorageRow& row);

/// Modules that are stored alike, where a checkpoint mixes schemes.
struct StorageGroup {
  const StorageRow* row = nullptr;
  Scheme scheme;
  StorageOptions options;  ///< `ignored` is not looked at
  /// Modules by name and, for compressed-tensors, patterns ("re:...").
  std::vector<std::string> modules;
};
/// quantization_config of config.json for several groups of one producer; empty where that producer knows
/// one scheme a checkpoint (deepseek).
std::string MixedConfig(std::span<const StorageGroup> groups, const std::vector<std::string>& ignored);
/// hf_quant_config.json; empty: that producer writes none.
std::string MixedSideFile(std::span<const StorageGroup> groups, const std::vector<std::string>& ignored);

/// The row for a scheme (by its formats: types of scales and activation rules do not matter), by the tool
/// that is preferred if it stores this scheme; null when nobody does.
const StorageRow* FindStorage(const Scheme& scheme, std::string_view preferred_producer);
/// The row of exactly that tool; null when it does not store the scheme.
const StorageRow* FindStorageOf(const Scheme& scheme, std::string_view producer);
/// Schemes that can be stored (by that tool, unless it is empty), for messages.
std::string StorableSchemes(std::string_view producer = "");

/// The tensors of a projection of rows x cols, as they will be written.
std::vector<TensorSpec> SpecsOf(const StorageRow& row, const Scheme& scheme, const StorageOptions& options,
                                std::string_view projection, int64_t rows, int64_t cols);
/// The same with their data. The decode multiplier of the input is that of the matrix, where the scheme needs
/// one (kUnsupported when it is not set). Reciprocals are those that read back as the very scale, where there
/// is one.
Result<std::vector<NamedTensor>> Store(const StorageRow& row, const CanonicalMatrix& matrix,
                                       const StorageOptions& options, std::string_view projection);

}  // namespace fusedmoe::checkpoint
