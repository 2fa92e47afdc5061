// The producers with one format for the whole model: block FP8 (DeepSeek and followers), gpt-oss MXFP4, AWQ,
// GPTQ, bitsandbytes.
#include <algorithm>
#include <memory>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/pattern.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

Result<std::vector<std::string>> Skipped(const JsonValue& spec, const std::string& path) {
  std::vector<std::string> all;
  for (const char* key : {"modules_to_not_convert", "ignored_layers", "ignore", "modules_to_skip"}) {
    FMOE_ASSIGN_OR_RETURN(const std::vector<std::string> some, StringList(spec.Find(key), key, path));
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

// auto-round writes other tools' formats too. Its symmetric integers use the code -8 for the largest weight
// of a group, whatever its sign: the scale takes the sign.
bool IsFromAutoRound(const JsonValue& spec) {
  return spec.Find("autoround_version") != nullptr;
}

// One entry of GPTQModel's 'dynamic': the modules that a pattern matches are left alone ("-:"), or have
// settings of their own ("+:" or no sign). The first entry that matches decides.
struct GptqOverride {
  Pattern pattern;
  LinearFormat format;  // of no quantization where they are left alone
};

LinearFormat GptqFormat(int64_t bits, int64_t group, bool symmetric, bool zero_plus_one) {
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
  format.zero_plus_one = zero_plus_one;
  return format;
}

Result<LinearFormat> ReadGptqFormat(const JsonValue& spec, std::optional<int64_t> default_bits,
                                    int64_t default_group, bool zero_plus_one, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const int64_t bits, Size(spec, "bits", 1, 16, default_bits, path));
  FMOE_ASSIGN_OR_RETURN(const int64_t group, Size(spec, "group_size", -1, 65536, default_group, path));
  if (bits < 2 || bits > 8) {
    return Status::Unsupported(fmt::format("GPTQ with {} bits is not supported; 2 to 8 are", bits))
        .WithFile(path);
  }
  if (group == 0)
    return Wrong("group_size", spec.Find("group_size"), "-1 or at least 1", path);
  FMOE_ASSIGN_OR_RETURN(const bool symmetric, Flag(spec, "sym", true, path));
  return GptqFormat(bits, group, symmetric, zero_plus_one);
}

Result<std::vector<GptqOverride>> ReadGptqOverrides(const JsonValue& spec, const LinearFormat& format,
                                                    const std::string& path) {
  std::vector<GptqOverride> overrides;
  const JsonValue* dynamic = spec.Find("dynamic");
  if (dynamic == nullptr)
    return overrides;
  if (!dynamic->is_object())
    return Wrong("dynamic", dynamic, "an object of patterns", path);
  for (const auto& [key, own] : dynamic->members()) {
    const bool left_alone = key.starts_with("-:");
    const bool is_signed = left_alone || key.starts_with("+:");
    Result<Pattern> pattern = Pattern::Compile(std::string_view(key).substr(is_signed ? 2 : 0));
    if (!pattern.ok())
      return std::move(pattern).status().WithFile(path);
    GptqOverride override{.pattern = *std::move(pattern)};
    if (!left_alone) {
      if (!own.is_object())
        return Wrong(key, &own, "an object", path);
      const int64_t group = format.weight.block.col > 0 ? format.weight.block.col : -1;
      FMOE_ASSIGN_OR_RETURN(override.format,
                            ReadGptqFormat(own, format.bits, group, format.zero_plus_one, path));
    }
    overrides.push_back(std::move(override));
  }
  return overrides;
}

}  // namespace

Result<QuantRules> ReadBlockFp8Rules(const JsonValue& spec, const std::string& path,
                                     const ModelConfig& config) {
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped, Skipped(spec, path));
  const JsonValue* kind = spec.Find("fmt");
  if (!IsE4m3(kind)) {
    return Status::Unsupported(fmt::format("fp8 with fmt {} is not supported; e4m3 is", kind->ToString()))
        .WithFile(path);
  }
  const JsonValue* scheme = spec.Find("activation_scheme");
  const std::string activation = scheme == nullptr ? "dynamic" : scheme->string();
  if (activation != "dynamic" && activation != "static")
    return Wrong("activation_scheme", scheme, "\"dynamic\" or \"static\"", path);
  LinearFormat format;
  format.weight = Fp8();
  if (const JsonValue* block = spec.Find("weight_block_size"); block != nullptr) {
    FMOE_ASSIGN_OR_RETURN(format.weight.block, BlockSizes("weight_block_size", *block, path));
    format.scale = ".weight_scale_inv";
    format.activation = BlockFp8(format.weight.block.col);
    // Rounded up to powers of two where the weights' scales are.
    const JsonValue* scale = spec.Find("scale_fmt");
    format.activation.rule.power_of_two_scale = scale != nullptr && scale->string() == "ue8m0";
    if (activation == "static")
      return Wrong("activation_scheme", scheme, "\"dynamic\", with blocks,", path);
  } else {
    format.weight.has_tensor_scale = true;
    format.scale = ".weight_scale";
    format.activation = StaticFp8();
    format.activation.static_tensor_scale = activation == "static";
    if (activation == "static")
      format.input_scale = ".input_scale";
  }
  auto routed = format;
  bool fp4_experts = false;
  // DeepSeek-V4: the routed experts are FP4 with a power of two for each 32, the rest blocks of FP8 under
  // shorter names.
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> expert_dtype, config.Text("expert_dtype"));
  if (expert_dtype == "fp4") {
    fp4_experts = true;
    routed.weight = Mx(DType::kF4E2M1);
    routed.activation = MxInput(DType::kF8E4M3, MxScaleRule::kCeil);
  }
  auto shared = std::make_shared<std::vector<std::string>>(std::move(skipped));
  QuantRules rules;
  rules.producer = "fp8";
  rules.format_of = [=](const std::string& module) -> Result<LinearFormat> {
    if (Listed(*shared, module))
      return LinearFormat{};
    return fp4_experts && module.find(".experts.") != std::string::npos ? routed : format;
  };
  return rules;
}

Result<QuantRules> ReadMxfp4Rules(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped, Skipped(spec, path));
  LinearFormat format;
  format.codes = "_blocks";
  format.scale = "_scales";
  format.weight = Mx(DType::kF4E2M1);
  return Uniform("mxfp4", format, std::move(skipped));
}

Result<QuantRules> ReadAwqRules(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped, Skipped(spec, path));
  FMOE_ASSIGN_OR_RETURN(const int64_t bits, Size(spec, spec.Find("bits") != nullptr ? "bits" : "w_bit", 1, 16,
                                                 std::nullopt, path));
  const char* group_key = spec.Find("group_size") != nullptr ? "group_size" : "q_group_size";
  FMOE_ASSIGN_OR_RETURN(const int64_t group, Size(spec, group_key, -1, 65536, 128, path));
  FMOE_ASSIGN_OR_RETURN(const bool zero_point, Flag(spec, "zero_point", true, path));
  const JsonValue* version = spec.Find("version");
  std::string layout = version == nullptr ? "gemm" : version->string();
  std::transform(layout.begin(), layout.end(), layout.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  if (layout != "gemm") {
    return Status::Unsupported(fmt::format("AWQ of version '{}' is not supported; gemm is", layout))
        .WithFile(path);
  }
  if (bits != 4)
    return Status::Unsupported(fmt::format("AWQ with {} bits is not supported; 4 are", bits)).WithFile(path);
  if (group == 0)
    return Wrong(group_key, spec.Find(group_key), "-1 or at least 1", path);
  LinearFormat format;
  format.packing = Packing::kAwq;
  format.bits = 4;
  format.weight = IntegerWeight(4, group);
  format.codes = ".qweight";
  format.scale = ".scales";
  format.scale_is_in_out = true;
  format.zero_point = ".qzeros";  // its kernels use them whenever they are there
  format.zero_point_optional = !zero_point;
  format.negative_scales = IsFromAutoRound(spec);
  return Uniform("awq", format, std::move(skipped));
}

Result<QuantRules> ReadGptqRules(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped, Skipped(spec, path));
  FMOE_ASSIGN_OR_RETURN(const bool reordered, Flag(spec, "desc_act", false, path));
  (void)reordered;  // g_idx says it, and is read whenever it is there
  const JsonValue* key = spec.Find("checkpoint_format");
  const std::string layout = key == nullptr ? "gptq" : key->string();
  if (layout != "gptq" && layout != "gptq_v2") {
    return Status::Unsupported(
               fmt::format("GPTQ's checkpoint_format '{}' is not supported; gptq and gptq_v2 are", layout))
        .WithFile(path);
  }
  FMOE_ASSIGN_OR_RETURN(LinearFormat format, ReadGptqFormat(spec, std::nullopt, 128, layout == "gptq", path));
  format.negative_scales = IsFromAutoRound(spec);
  FMOE_ASSIGN_OR_RETURN(std::vector<GptqOverride> read, ReadGptqOverrides(spec, format, path));
  if (read.empty())
    return Uniform("gptq", format, std::move(skipped));
  for (GptqOverride& override : read)
    override.format.negative_scales = override.format.quantized() && format.negative_scales;
  QuantRules rules;
  rules.producer = "gptq";
  const auto overrides = std::make_shared<std::vector<GptqOverride>>(std::move(read));
  rules.format_of = [format, overrides, skipped](const std::string& module) -> Result<LinearFormat> {
    if (Listed(skipped, module))
      return LinearFormat{};
    for (const GptqOverride& override : *overrides) {
      if (override.pattern.MatchesPrefix(module))
        return override.format;
    }
    return format;
  };
  return rules;
}

// 4-bit matrices are decoded where they are read (four_bit_blocks.hpp), so no module is quantized there.
// 8-bit rows are scaled by their largest magnitude; inputs, which bitsandbytes rounds to 8 bits but for
// outliers, stay as they are.
Result<QuantRules> ReadBitsAndBytesRules(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const bool eight_bits, Flag(spec, "load_in_8bit", false, path));
  FMOE_ASSIGN_OR_RETURN(const bool four_bits, Flag(spec, "load_in_4bit", false, path));
  if (eight_bits == four_bits) {
    return Status::BadInput("bitsandbytes needs one of 'load_in_4bit' and 'load_in_8bit' to be true")
        .WithFile(path);
  }
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped,
                        StringList(spec.Find("llm_int8_skip_modules"), "llm_int8_skip_modules", path));
  LinearFormat format;
  if (eight_bits) {
    format.bits = 8;
    format.weight = IntegerWeight(8, -1);
    format.scale = ".SCB";
    format.scale_divisor = 127.0F;
    format.row_major = ".weight_format";
  }
  return Uniform("bitsandbytes", format, std::move(skipped));
}

}  // namespace fusedmoe::checkpoint
