// Formats that SGLang has names for: INT8 in blocks and by row, FP8 by row, and experts of INT4 in a model of
// FP8. Their metadata leave open what SGLang takes for granted.
#include <utility>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kBlock = 128;

// As DeepSeek's FP8, in integers.
Result<LinearFormat> BlockInt8(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const std::string scheme, Word(spec, "activation_scheme", "dynamic", path));
  if (scheme != "dynamic") {
    return Wrong("activation_scheme", spec.Find("activation_scheme"), "\"dynamic\"", path);
  }
  const JsonValue* block = spec.Find("weight_block_size");
  if (block == nullptr) {
    return Wrong("weight_block_size", block, "two sizes", path);
  }
  LinearFormat format;
  format.weight = scheme_formats::Int8();
  FMOE_ASSIGN_OR_RETURN(format.weight.block, BlockSizes("weight_block_size", *block, path));
  format.bits = 8;
  format.scale = ".weight_scale_inv";
  format.activation = {.element = DType::kI8, .group = {1, format.weight.block.col}};
  return format;
}

// Weights by row, inputs by token.
LinearFormat Rows(DType element) {
  LinearFormat format;
  format.weight = {.element = element, .has_channel_scale = true};
  format.bits = element == DType::kI8 ? 8 : 0;
  format.scale = ".weight_scale";
  format.activation = {.element = element, .group = kPerRow};
  return format;
}

}  // namespace

Result<QuantRules> ReadSglangRules(std::string_view method, const JsonValue& spec, const std::string& path) {
  // What is to be left alone is named by parts of SGLang's own modules; it shows in the tensors (KeepsPlain).
  constexpr std::string_view kProducer = "sglang";
  if (method == "blockwise_int8") {
    FMOE_ASSIGN_OR_RETURN(LinearFormat format, BlockInt8(spec, path));
    return Uniform(std::string(kProducer), std::move(format), {});
  }
  return Uniform(std::string(kProducer), Rows(method == "w8a8_fp8" ? DType::kF8E4M3 : DType::kI8), {});
}

// TensorRT-LLM's quantize_mixed_precision_moe.py makes them of DeepSeek's FP8: two signed codes of a row in a
// byte, the first in its low half, scales called as those of the blocks were.
Result<QuantRules> ReadW4AFp8Rules(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const int64_t group, Size(spec, "group_size", 1, kLargestGroup, kBlock, path));
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> skipped, SkippedModules(spec, path));
  LinearFormat rest;
  rest.weight = Fp8();
  rest.weight.block = {kBlock, kBlock};
  rest.bytes_are_exponents = true;
  rest.scale = ".weight_scale_inv";
  rest.activation = BlockFp8(kBlock);
  LinearFormat routed;
  routed.weight = {.element = DType::kI4, .block = {1, group}, .block_scale_dtype = DType::kBF16};
  routed.scale = ".weight_scale_inv";
  routed.activation = StaticFp8();
  routed.input_scale = ".input_scale";
  return ApartFromExperts("fp8", std::move(routed), std::move(rest), std::move(skipped));
}

}  // namespace fusedmoe::checkpoint
