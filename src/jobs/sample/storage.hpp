#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/safetensors.hpp>

#include "quant/weight_quantizer.hpp"

namespace fusedmoe::sample {

/// Where the bytes of a stored tensor come from.
enum class Source : uint8_t {
  kCodes,
  kBlockScale,
  kChannelScale,
  kTensorScale,
  kTensorScaleReciprocal,
  kInputScale,
  kInputScaleReciprocal,
  kMatrixShape  ///< I64 [2]: rows and columns before packing
};

/// One tensor of a quantized projection: "<projection>.<suffix>".
struct Part {
  std::string_view suffix;
  Source source;
  DType dtype;
  bool scalar = false;  ///< single values: shape [] instead of [1]
};

/// How a tool stores a scheme.
struct StorageRow {
  std::string_view scheme;    ///< name with granularity, as Scheme::name has it
  std::string_view producer;  ///< "modelopt", "compressed-tensors", "deepseek"
  std::span<const Part> parts;
  /// quantization_config of config.json, as a JSON object. `ignored`: modules that stay unquantized.
  std::string (*config)(const Scheme& scheme, const std::vector<std::string>& ignored);
  /// hf_quant_config.json; null: the tool writes none.
  std::string (*side_file)(const Scheme& scheme, const std::vector<std::string>& ignored);
};

/// The row for a scheme, by the tool that is preferred if it stores this scheme; null when nobody does.
const StorageRow* FindStorage(const Scheme& scheme, std::string_view preferred_producer);
/// Schemes that can be stored, for messages.
std::string StorableSchemes();

/// The tensors of a projection of rows x cols, as they will be written.
std::vector<TensorSpec> SpecsOf(const StorageRow& row, const Scheme& scheme, std::string_view projection,
                                int64_t rows, int64_t cols);
/// The same with their data, from a quantized matrix and the decode multiplier of its input.
Result<std::vector<NamedTensor>> Store(const StorageRow& row, const QuantizedMatrix& matrix,
                                       float input_scale, std::string_view projection);

}  // namespace fusedmoe::sample
