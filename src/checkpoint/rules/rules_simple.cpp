// The producers with one format for the whole model: block FP8 (DeepSeek and followers), gpt-oss MXFP4,
// bitsandbytes.
#include <utility>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"
#include "core/text.hpp"

namespace fusedmoe::checkpoint {
namespace {

// Blocks, or one scale a matrix, as transformers and vLLM have them.
Result<LinearFormat> ReadFp8Format(const JsonValue& spec, const std::string& path) {
  const JsonValue* kind = spec.Find("fmt");
  if (!IsE4m3(kind)) {
    return Status::Unsupported(fmt::format("fp8 with fmt {} is not supported; e4m3 is", kind->ToString()))
        .WithFile(path);
  }
  const JsonValue* scheme = spec.Find("activation_scheme");
  const std::string activation = scheme == nullptr ? "dynamic" : scheme->string();
  if (activation != "dynamic" && activation != "static") {
    return Wrong("activation_scheme", scheme, "\"dynamic\" or \"static\"", path);
  }
  FMOE_ASSIGN_OR_RETURN(std::string scales, Word(spec, "scale_fmt", "", path));
  scales = LowerCase(scales);
  const bool powers_of_two = scales == "ue8m0" || scales == "e8m0";
  if (!powers_of_two && !scales.empty() && scales != "float" && scales != "float32" && scales != "fp32") {
    return NotSupported("scale_fmt", *spec.Find("scale_fmt"), "\"ue8m0\" and \"float\" are", path);
  }
  const JsonValue* method = spec.Find("quant_method");
  const bool mx = method != nullptr && method->string() == "mxfp8";  // powers of two for 32 numbers, always
  const JsonValue* block = spec.Find("weight_block_size");
  LinearFormat format;
  format.weight = Fp8();
  format.bytes_are_exponents = true;
  if (block == nullptr && !mx) {
    format.weight.has_tensor_scale = true;
    format.scale = ".weight_scale";
    format.activation = StaticFp8();
    format.activation.static_tensor_scale = activation == "static";
    if (activation == "static") {
      format.input_scale = ".input_scale";
    }
    return format;
  }
  if (activation == "static") {
    return Wrong("activation_scheme", scheme, "\"dynamic\", with blocks,", path);
  }
  format.weight.block = {1, 32};
  if (block != nullptr) {
    FMOE_ASSIGN_OR_RETURN(format.weight.block, BlockSizes("weight_block_size", *block, path));
  }
  format.scale = ".weight_scale_inv";
  format.activation = BlockFp8(format.weight.block.col);
  // Rounded up to powers of two where the weights' scales are.
  format.activation.rule.power_of_two_scale = mx || powers_of_two;
  return format;
}

// Which method the routed experts have beside FP8 for the rest, under any of its names: DeepSeek-V4's
// "fp4", MiMo's and Ling's "mxfp4".
Result<bool> HasFp4Experts(const JsonValue& spec, const std::string& path, const ModelConfig& config) {
  // transformers moves the key into its quantization configuration.
  FMOE_ASSIGN_OR_RETURN(const std::optional<std::string> of_model, config.Text("expert_dtype"));
  FMOE_ASSIGN_OR_RETURN(const std::string expert_dtype,
                        Word(spec, "expert_dtype", of_model.value_or("fp8"), path));
  if (expert_dtype != "fp4" && expert_dtype != "fp8") {
    return Status::Unsupported(
               fmt::format("'expert_dtype' is \"{}\", which is not supported; \"fp4\" and \"fp8\" are",
                           expert_dtype))
        .WithFile(path);
  }
  bool found = expert_dtype == "fp4";
  for (const char* key : {"store_dtype", "routed_experts_quant_method"}) {
    FMOE_ASSIGN_OR_RETURN(const std::string word, Word(spec, key, "fp8", path));
    const std::string method = LowerCase(word);
    if (method != "mxfp4" && method != "fp8") {
      return NotSupported(key, *spec.Find(key), "\"mxfp4\" and \"fp8\" are", path);
    }
    found = found || method == "mxfp4";
  }
  for (const char* key : {"mxfp4_block_size", "routed_experts_group_size"}) {
    FMOE_RETURN_IF_ERROR(Size(spec, key, 32, 32, 32, path).status());
  }
  return found;
}

// DeepSeek's inference code quantizes the input of FP4 weights as it does that of FP8 weights, in groups of
// 128 with scales rounded up to powers of two (docs/checkpoints.md).
ActivationFormat InputOfFp4Experts(const LinearFormat& fp8) {
  constexpr int64_t kReferenceGroup = 128;
  ActivationFormat input = MxInput(DType::kF8E4M3, MxScaleRule::kCeil);
  input.group.col = fp8.weight.has_block_scale() ? fp8.weight.block.col : kReferenceGroup;
  return input;
}

}  // namespace

Result<QuantRules> ReadBlockFp8Rules(const JsonValue& spec, const std::string& path,
                                     const ModelConfig& config) {
  if (spec.Find("weight_scale_semantics") != nullptr || spec.Find("weight_scale_method") != nullptr) {
    return ReadGptqModelFp8Rules(spec, path);
  }
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped, SkippedModules(spec, path));
  FMOE_ASSIGN_OR_RETURN(const LinearFormat format, ReadFp8Format(spec, path));
  LinearFormat routed = format;
  // The routed experts are FP4 with a power of two for each 32, the rest FP8.
  FMOE_ASSIGN_OR_RETURN(const bool fp4, HasFp4Experts(spec, path, config));
  if (fp4) {
    routed.weight = Mx(DType::kF4E2M1);
    routed.activation = InputOfFp4Experts(format);
  }
  // The same with the routed experts quantized anew by ModelOpt (NVFP4).
  if (const JsonValue* algorithm = spec.Find("moe_quant_algo"); algorithm != nullptr) {
    if (!algorithm->is_string()) {
      return Wrong("moe_quant_algo", algorithm, "a string", path);
    }
    FMOE_ASSIGN_OR_RETURN(routed, ModelOptFormat(algorithm->string(), path));
  }
  return ApartFromExperts("fp8", std::move(routed), format, std::move(skipped));
}

Result<QuantRules> ReadMxfp4Rules(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped, SkippedModules(spec, path));
  LinearFormat format;
  format.codes = "_blocks";
  format.scale = "_scales";
  format.weight = Mx(DType::kF4E2M1);
  return Uniform("mxfp4", format, std::move(skipped));
}

// 4-bit matrices are decoded where they are read (four_bit_blocks.hpp), so no module is quantized there.
// 8-bit rows are scaled by their largest magnitude; inputs, which bitsandbytes rounds to 8 bits except for
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
