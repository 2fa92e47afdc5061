#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <fusedmoe/status.hpp>

#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "checkpoint/linear_format.hpp"

namespace fusedmoe::checkpoint {

/// What the quantization metadata says of every module. Thread-safe once built.
struct QuantRules {
  std::string producer = "none";  ///< "modelopt", "compressed-tensors", "fp8", "mxfp4", "awq", "gptq",
                                  ///< "quark", "auto-round", "bitsandbytes", "sglang"
  /// The format of the linear module of that name ("model.layers.0.mlp.experts.3.up_proj").
  std::function<Result<LinearFormat>(const std::string& module)> format_of;
};

/// Reads config.json's quantization_config, or the first of the other files of `kConfigFiles` that is there;
/// without any, nothing is quantized. An unknown quant_method is kUnsupported, by name.
Result<QuantRules> ReadQuantRules(const std::string& directory, const ModelConfig& config);

/// The parsers of the producers: `spec` is the object that holds quant_method, `path` its file.
Result<QuantRules> ReadModelOptRules(const JsonValue& spec, const std::string& path);
/// Whether metadata without a quant_method are ModelOpt's, and whether they are MIXED_PRECISION without the
/// list of modules that it needs.
bool IsModelOpts(const JsonValue& spec);
bool LacksQuantizedLayers(const JsonValue& spec);
/// What one of ModelOpt's quant_algo means, with the group that it always has.
Result<LinearFormat> ModelOptFormat(const std::string& algorithm, const std::string& path);
Result<QuantRules> ReadCompressedTensorsRules(const JsonValue& spec, const std::string& path);
Result<QuantRules> ReadBlockFp8Rules(const JsonValue& spec, const std::string& path,
                                     const ModelConfig& config);
/// GPTQModel's, which has that name too.
Result<QuantRules> ReadGptqModelFp8Rules(const JsonValue& spec, const std::string& path);
/// "blockwise_int8", "w8a8_int8" and "w8a8_fp8".
Result<QuantRules> ReadSglangRules(std::string_view method, const JsonValue& spec, const std::string& path);
/// SGLang's "w4afp8", which TensorRT-LLM calls MIXED_PRECISION and nothing more.
Result<QuantRules> ReadW4AFp8Rules(const JsonValue& spec, const std::string& path);
Result<QuantRules> ReadMxfp4Rules(const JsonValue& spec, const std::string& path);
Result<QuantRules> ReadAwqRules(const JsonValue& spec, const std::string& path);
Result<QuantRules> ReadGptqRules(const JsonValue& spec, const std::string& path);
Result<QuantRules> ReadAutoRoundRules(const JsonValue& spec, const std::string& path);
Result<QuantRules> ReadQuarkRules(const JsonValue& spec, const std::string& path);
Result<QuantRules> ReadBitsAndBytesRules(const JsonValue& spec, const std::string& path);

/// Shell wildcards: '*' any characters, '?' one.
bool MatchesWildcard(std::string_view pattern, std::string_view text);
/// True when `part` is `name`, or a run of whole components of it ("mlp.gate" of "model.layers.0.mlp.gate").
bool HasComponents(std::string_view name, std::string_view part);
/// The strings of a list; other entries are errors.
Result<std::vector<std::string>> StringList(const JsonValue* list, std::string_view key,
                                            const std::string& path);

}  // namespace fusedmoe::checkpoint
