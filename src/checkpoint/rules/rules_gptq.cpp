// GPTQ and AWQ, and what GPTQModel writes: its patterns for single modules, and FP8 of its own.
#include <functional>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/pattern.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"
#include "core/text.hpp"

namespace fusedmoe::checkpoint {
namespace {

// auto-round writes other tools' formats too. Its symmetric integers use the code -8 for the largest weight
// of a group, whatever its sign: the scale takes the sign.
bool IsFromAutoRound(const JsonValue& spec) {
  return spec.Find("autoround_version") != nullptr;
}

// One entry of GPTQModel's 'dynamic': the modules that a pattern matches are left alone ("-:"), or have
// settings of their own ("+:" or no sign). The first entry that matches decides.
struct Override {
  Pattern pattern;
  LinearFormat format;  // of no quantization where they are left alone
};

// The format of an entry that has settings of its own.
using ReadOwn = std::function<Result<LinearFormat>(const JsonValue& own)>;

Result<std::vector<Override>> ReadOverrides(const JsonValue& spec, const ReadOwn& read,
                                            const std::string& path) {
  std::vector<Override> overrides;
  const JsonValue* dynamic = spec.Find("dynamic");
  if (dynamic == nullptr) {
    return overrides;
  }
  if (!dynamic->is_object()) {
    return Wrong("dynamic", dynamic, "an object of patterns", path);
  }
  for (const auto& [key, own] : dynamic->members()) {
    const bool left_alone = key.starts_with("-:");
    const bool is_signed = left_alone || key.starts_with("+:");
    Result<Pattern> pattern = Pattern::Compile(std::string_view(key).substr(is_signed ? 2 : 0));
    if (!pattern.ok()) {
      return std::move(pattern).status().WithFile(path);
    }
    Override override{.pattern = *std::move(pattern)};
    if (!left_alone) {
      if (!own.is_object()) {
        return Wrong(key, &own, "an object", path);
      }
      FMOE_ASSIGN_OR_RETURN(override.format, read(own));
    }
    overrides.push_back(std::move(override));
  }
  return overrides;
}

// `format` for all modules but those of `dynamic` and the skipped ones.
Result<QuantRules> WithOverrides(std::string producer, const LinearFormat& format, const JsonValue& spec,
                                 const ReadOwn& read, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped, SkippedModules(spec, path));
  FMOE_ASSIGN_OR_RETURN(std::vector<Override> own, ReadOverrides(spec, read, path));
  if (own.empty()) {
    return Uniform(std::move(producer), format, std::move(skipped));
  }
  QuantRules rules;
  rules.producer = std::move(producer);
  const auto overrides = std::make_shared<std::vector<Override>>(std::move(own));
  rules.format_of = [format, overrides, skipped](const std::string& module) -> Result<LinearFormat> {
    if (Listed(skipped, module)) {
      return LinearFormat{};
    }
    for (const Override& override : *overrides) {
      if (override.pattern.MatchesPrefix(module)) {
        return override.format;
      }
    }
    return format;
  };
  return rules;
}

LinearFormat GptqFormat(int64_t bits, int64_t group, bool symmetric, std::string_view layout) {
  LinearFormat format;
  format.packing = Packing::kGptq;
  format.bits = static_cast<int>(bits);
  format.weight = IntegerWeight(format.bits, group);
  format.codes = ".qweight";
  format.scale = ".scales";
  format.zero_point = ".qzeros";
  format.zero_point_optional = symmetric;
  format.group_index = ".g_idx";
  format.scale_is_in_out = true;
  format.zero_plus_one = layout == "gptq";
  format.planes = layout == "gptq_p";
  return format;
}

Result<LinearFormat> ReadGptqFormat(const JsonValue& spec, std::string_view layout, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const int64_t bits, Size(spec, "bits", 1, 16, std::nullopt, path));
  FMOE_ASSIGN_OR_RETURN(const int64_t group, Size(spec, "group_size", -1, kLargestGroup, 128, path));
  if (bits < 2 || bits > 8) {
    return Status::Unsupported(fmt::format("GPTQ with {} bits is not supported; 2 to 8 are", bits))
        .WithFile(path);
  }
  if (group == 0) {
    return Wrong("group_size", spec.Find("group_size"), "-1 or at least 1", path);
  }
  FMOE_ASSIGN_OR_RETURN(const bool symmetric, Flag(spec, "sym", true, path));
  FMOE_ASSIGN_OR_RETURN(const bool reordered, Flag(spec, "desc_act", false, path));
  LinearFormat format = GptqFormat(bits, group, symmetric, layout);
  format.group_index_required = reordered && group > 0;
  return format;
}

LinearFormat AwqFormat(int64_t group, bool zero_point) {
  LinearFormat format;
  format.packing = Packing::kAwq;
  format.bits = 4;
  format.weight = IntegerWeight(4, group);
  format.codes = ".qweight";
  format.scale = ".scales";
  format.scale_is_in_out = true;
  format.zero_point = ".qzeros";  // its kernels use them whenever they are there
  format.zero_point_optional = !zero_point;
  format.whole_groups = true;  // AutoAWQ and GPTQModel write no other; GPTQ's last group may be shorter
  return format;
}

Result<LinearFormat> ReadAwqFormat(const JsonValue& spec, const std::string& path) {
  const char* bits_key = spec.Find("bits") != nullptr ? "bits" : "w_bit";
  FMOE_ASSIGN_OR_RETURN(const int64_t bits, Size(spec, bits_key, 1, 16, std::nullopt, path));
  const char* group_key = spec.Find("group_size") != nullptr ? "group_size" : "q_group_size";
  FMOE_ASSIGN_OR_RETURN(const int64_t group, Size(spec, group_key, -1, kLargestGroup, 128, path));
  if (bits != 4) {
    return Status::Unsupported(fmt::format("AWQ with {} bits is not supported; 4 are", bits)).WithFile(path);
  }
  if (group == 0) {
    return Wrong(group_key, spec.Find(group_key), "-1 or at least 1", path);
  }
  FMOE_ASSIGN_OR_RETURN(const bool zero_point, Flag(spec, "zero_point", true, path));
  return AwqFormat(group, zero_point);
}

// GPTQModel's FP8: weights alone, and what it calls the inverse of a scale is what it multiplied by.
Result<LinearFormat> ReadGptqModelFp8Format(const JsonValue& spec, const std::string& path) {
  const auto unsupported = [&](std::string_view key, const JsonValue* value, std::string_view known) {
    return Status::Unsupported(
               fmt::format("fp8 with {} {} is not supported; {}", key, value->ToString(), known))
        .WithFile(path);
  };
  if (const JsonValue* kind = spec.Find("format"); !IsE4m3(kind)) {
    return unsupported("format", kind, "float8_e4m3fn is");
  }
  if (const JsonValue* how = spec.Find("weight_scale_semantics");
      how != nullptr && how->string() != "inverse") {
    return unsupported("weight_scale_semantics", how, "\"inverse\" is");
  }
  LinearFormat format;
  format.weight = Fp8();
  format.scale = ".weight_scale_inv";
  format.reciprocal_scale = true;
  const JsonValue* method = spec.Find("weight_scale_method");
  const JsonValue* block = spec.Find("weight_block_size");
  const std::string word = method != nullptr ? method->string() : block != nullptr ? "block" : "row";
  if (word == "block") {
    if (block == nullptr) {
      return Wrong("weight_block_size", block, "a list of two sizes", path);
    }
    FMOE_ASSIGN_OR_RETURN(format.weight.block, BlockSizes("weight_block_size", *block, path));
  } else if (word == "row" || word == "tensor") {
    (word == "row" ? format.weight.has_channel_scale : format.weight.has_tensor_scale) = true;
  } else {
    return Wrong("weight_scale_method", method, "\"row\", \"tensor\" or \"block\"", path);
  }
  return format;
}

// How codes are packed: GPTQModel says it as `checkpoint_format` and once more as `format`, AutoAWQ as
// `version`. Lower case; `fallback` where nothing is said.
Result<std::string> LayoutOf(const JsonValue& spec, std::initializer_list<const char*> keys,
                             std::string_view fallback, const std::string& path) {
  std::string layout, said_by;
  for (const char* key : keys) {
    FMOE_ASSIGN_OR_RETURN(std::string word, Word(spec, key, "", path));
    word = LowerCase(word);
    if (word.empty()) {
      continue;
    }
    if (!layout.empty() && word != layout) {
      return Wrong(key, spec.Find(key), fmt::format("what '{}' says, '{}',", said_by, layout), path);
    }
    layout = std::move(word);
    said_by = key;
  }
  return layout.empty() ? std::string(fallback) : layout;
}

// What other settings would make of the same tensors.
Status CheckSettings(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const bool marlin, Flag(spec, "is_marlin_format", false, path));
  if (marlin) {
    return NotSupported("is_marlin_format", *spec.Find("is_marlin_format"),
                        "codes are packed for a kernel; GPTQ's and AWQ's own order is read", path);
  }
  FMOE_ASSIGN_OR_RETURN(const std::string words, Word(spec, "pack_dtype", "int32", path));
  if (words != "int32") {
    return NotSupported("pack_dtype", *spec.Find("pack_dtype"), "\"int32\" is", path);
  }
  for (const char* key : {"rotation", "adapter"}) {
    if (const JsonValue* value = spec.Find(key); value != nullptr) {
      return NotSupported(key, *value, "what it adds to the computation is not in the weights", path);
    }
  }
  // Weights with quantized inputs (GPTQModel's W4A streams) would be a different computation.
  if (const JsonValue* inputs = spec.Find("activation"); inputs != nullptr) {
    return NotSupported("activation", *inputs, "weights alone are quantized here", path);
  }
  return Status::Ok();
}

}  // namespace

Result<QuantRules> ReadGptqModelFp8Rules(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const LinearFormat format, ReadGptqModelFp8Format(spec, path));
  const ReadOwn read = [&](const JsonValue& own) { return ReadGptqModelFp8Format(spec.With(own), path); };
  return WithOverrides("fp8", format, spec, read, path);
}

Result<QuantRules> ReadAwqRules(const JsonValue& spec, const std::string& path) {
  FMOE_RETURN_IF_ERROR(CheckSettings(spec, path));
  FMOE_ASSIGN_OR_RETURN(const std::string layout,
                        LayoutOf(spec, {"version", "checkpoint_format", "format"}, "gemm", path));
  FMOE_ASSIGN_OR_RETURN(const std::string backend, Word(spec, "backend", "", path));
  if (backend == "llm-awq") {
    return NotSupported("backend", *spec.Find("backend"), "its order of codes is not AutoAWQ's", path);
  }
  if (layout != "gemm") {
    return Status::Unsupported(fmt::format("AWQ of version '{}' is not supported; gemm is", layout))
        .WithFile(path);
  }
  FMOE_ASSIGN_OR_RETURN(LinearFormat format, ReadAwqFormat(spec, path));
  format.negative_scales = IsFromAutoRound(spec);
  const ReadOwn read = [&](const JsonValue& own) -> Result<LinearFormat> {
    FMOE_ASSIGN_OR_RETURN(LinearFormat other, ReadAwqFormat(spec.With(own), path));
    other.negative_scales = format.negative_scales;
    return other;
  };
  return WithOverrides("awq", format, spec, read, path);
}

Result<QuantRules> ReadGptqRules(const JsonValue& spec, const std::string& path) {
  FMOE_RETURN_IF_ERROR(CheckSettings(spec, path));
  FMOE_ASSIGN_OR_RETURN(const std::string layout,
                        LayoutOf(spec, {"checkpoint_format", "format"}, "gptq", path));
  if (layout != "gptq" && layout != "gptq_v2" && layout != "gptq_p") {
    return Status::Unsupported(
               fmt::format("GPTQ's checkpoint_format '{}' is not supported; gptq, gptq_v2 and gptq_p are",
                           layout))
        .WithFile(path);
  }
  FMOE_ASSIGN_OR_RETURN(LinearFormat format, ReadGptqFormat(spec, layout, path));
  format.negative_scales = IsFromAutoRound(spec);
  const ReadOwn read = [&](const JsonValue& own) -> Result<LinearFormat> {
    FMOE_ASSIGN_OR_RETURN(LinearFormat other, ReadGptqFormat(spec.With(own), layout, path));
    other.negative_scales = format.negative_scales;
    return other;
  };
  return WithOverrides("gptq", format, spec, read, path);
}

}  // namespace fusedmoe::checkpoint
