#include "checkpoint/rules/quant_rules.hpp"

#include <filesystem>

#include <fmt/format.h>

#include "checkpoint/files/config_files.hpp"
#include "checkpoint/files/tensor_index.hpp"
#include "checkpoint/rules/rules_support.hpp"
#include "core/text.hpp"
#include "platform/file.hpp"

namespace fusedmoe::checkpoint {
namespace {

struct Side {
  JsonValue document;
  std::string path;
};

// A configuration file beside config.json; nothing when there is none.
Result<std::optional<Side>> OpenSide(const std::string& directory, std::string_view name) {
  std::error_code error;
  if (!std::filesystem::exists(std::filesystem::path(directory) / std::string(name), error)) {
    return std::optional<Side>();
  }
  FMOE_ASSIGN_OR_RETURN(std::string path, ResolveInside(directory, name));
  FMOE_ASSIGN_OR_RETURN(const std::string text, platform::ReadTextFile(path, int64_t{64} << 20));
  Result<JsonValue> document = JsonValue::Parse(text);
  if (!document.ok()) {
    return std::move(document).status().WithFile(path);
  }
  return std::optional<Side>(Side{*std::move(document), std::move(path)});
}

Result<QuantRules> Dispatch(std::string_view method, const JsonValue& spec, const std::string& path,
                            const ModelConfig& config) {
  if (method.starts_with("modelopt")) {  // "modelopt_fp4" and others too
    return ReadModelOptRules(spec, path);
  }
  if (method == "compressed-tensors") {
    return ReadCompressedTensorsRules(spec, path);
  }
  if (method == "fp8" || method == "deepseek_v4_fp8" || method == "mxfp8") {
    return ReadBlockFp8Rules(spec, path, config);
  }
  if (method == "mxfp4") {
    return ReadMxfp4Rules(spec, path);
  }
  if (method == "blockwise_int8" || method == "w8a8_int8" || method == "w8a8_fp8") {
    return ReadSglangRules(method, spec, path);
  }
  if (method == "w4afp8") {
    return ReadW4AFp8Rules(spec, path);
  }
  if (method == "awq") {
    return ReadAwqRules(spec, path);
  }
  if (method == "gptq") {
    return ReadGptqRules(spec, path);
  }
  if (method == "auto-round" || method == "intel/auto-round") {  // the latter in early releases
    return ReadAutoRoundRules(spec, path);
  }
  if (method == "quark") {
    return ReadQuarkRules(spec, path);
  }
  if (method == "bitsandbytes") {
    return ReadBitsAndBytesRules(spec, path);
  }
  return Status::Unsupported(fmt::format("quant_method '{}' is not supported", method))
      .WithFile(path)
      .WithHint(
          "modelopt, compressed-tensors, fp8, mxfp8, mxfp4, awq, gptq, auto-round, quark, bitsandbytes, "
          "blockwise_int8, w8a8_int8, w8a8_fp8 and w4afp8 are; dequantize the model to BF16 with the tool "
          "that wrote it");
}

// GPTQModel names its methods by `method` too, and from 6 on reads `quant_method` as the older name of that;
// vLLM and transformers know the latter alone. They must agree where it may have written both.
Result<std::string> MethodOf(const JsonValue& spec, std::string_view fallback, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const std::string method, Word(spec, "quant_method", "", path));
  if (!method.empty() && method != "gptq" && method != "awq" && method != "fp8") {
    return method;  // of another tool
  }
  FMOE_ASSIGN_OR_RETURN(std::string other, Word(spec, "method", "", path));
  other = LowerCase(other);
  if (!method.empty() && !other.empty() && other != method) {
    return Wrong("method", spec.Find("method"), fmt::format("what 'quant_method' says, '{}',", method), path);
  }
  const std::string said = method.empty() ? other : method;
  return said.empty() ? std::string(fallback) : said;
}

}  // namespace

Result<Scheme> SchemeOf(const LinearFormat& format) {
  FMOE_ASSIGN_OR_RETURN(std::string name, SchemeNameFor(format.weight, format.activation));
  return Scheme{std::move(name), format.weight, format.activation};
}

bool MatchesWildcard(std::string_view pattern, std::string_view text) {
  // Greedy with one point of return: after a '*' that took too little, it takes one character more.
  size_t p = 0, t = 0, star = std::string_view::npos, mark = 0;
  while (t < text.size()) {
    if (p < pattern.size() && (pattern[p] == '?' || (pattern[p] == text[t] && pattern[p] != '*'))) {
      ++p;
      ++t;
    } else if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      mark = t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++mark;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') {
    ++p;
  }
  return p == pattern.size();
}

bool HasComponents(std::string_view name, std::string_view part) {
  for (size_t at = name.find(part); at != std::string_view::npos && !part.empty();
       at = name.find(part, at + 1)) {
    const size_t end = at + part.size();
    if ((at == 0 || name[at - 1] == '.') && (end == name.size() || name[end] == '.')) {
      return true;
    }
  }
  return false;
}

Result<std::vector<std::string>> StringList(const JsonValue* list, std::string_view key,
                                            const std::string& path) {
  std::vector<std::string> strings;
  if (list == nullptr) {
    return strings;
  }
  if (!list->is_array()) {
    return Status::BadInput(fmt::format("'{}' is {}; a list of strings is needed", key, list->ToString()))
        .WithFile(path);
  }
  for (const JsonValue& item : list->items()) {
    if (!item.is_string()) {
      return Status::BadInput(fmt::format("'{}' holds {}; strings are needed", key, item.ToString()))
          .WithFile(path);
    }
    strings.push_back(item.string());
  }
  return strings;
}

Result<QuantRules> ReadQuantRules(const std::string& directory, const ModelConfig& config) {
  if (const JsonValue* spec = config.Find("quantization_config compression_config"); spec != nullptr) {
    if (!spec->is_object()) {
      return Status::BadInput(
                 fmt::format("'quantization_config' is {}; an object is needed", spec->ToString()))
          .WithFile(config.path());
    }
    FMOE_ASSIGN_OR_RETURN(const std::string method,
                          MethodOf(*spec, IsModelOpts(*spec) ? "modelopt" : "", config.path()));
    // ModelOpt's list of modules may stand in its own file alone.
    if (method.starts_with("modelopt") && LacksQuantizedLayers(*spec)) {
      FMOE_ASSIGN_OR_RETURN(const std::optional<Side> side, OpenSide(directory, kModelOptConfigFile));
      if (side && !LacksQuantizedLayers(side->document)) {
        return ReadModelOptRules(side->document, side->path);
      }
    }
    if (method.empty()) {
      return Status::BadInput("'quantization_config' lacks 'quant_method'").WithFile(config.path());
    }
    return Dispatch(method, *spec, config.path(), config);
  }
  for (const ConfigFile& known : kConfigFiles) {
    if (known.method.empty()) {
      continue;  // the model's configuration
    }
    FMOE_ASSIGN_OR_RETURN(std::optional<Side> side, OpenSide(directory, known.name));
    if (!side) {
      continue;
    }
    FMOE_ASSIGN_OR_RETURN(const std::string method, MethodOf(side->document, known.method, side->path));
    if (method == "modelopt" && LacksQuantizedLayers(side->document)) {
      return ReadW4AFp8Rules(side->document, side->path);
    }
    return Dispatch(method, side->document, side->path, config);
  }
  QuantRules rules;
  rules.format_of = [](const std::string&) -> Result<LinearFormat> { return LinearFormat{}; };
  return rules;
}

}  // namespace fusedmoe::checkpoint
