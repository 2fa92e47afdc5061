// auto-round: integers in the tensors of GPTQ and AWQ, FP8, NVFP4 and MX in those of compressed-tensors.
#include <memory>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/pattern.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

Result<LinearFormat> AutoRoundIntegerFormat(const JsonValue& spec, int64_t bits, int64_t group,
                                            const std::string& path) {
  const JsonValue* key = spec.Find("packing_format");
  // Early files name what was to multiply, which says how codes are packed: "auto_round:gptq:exllamav2".
  if (const JsonValue* early = spec.Find("backend");
      key == nullptr && early != nullptr && early->string().find(':') != std::string::npos) {
    key = early;
  }
  const std::string layout = key == nullptr ? "auto_round:auto_gptq" : key->string();
  if (bits < 2 || bits > 8 || group == 0) {
    return Status::Unsupported(
               fmt::format(
                   "auto-round with {} bits in groups of {} is not supported; 2 to 8 bits in groups of "
                   "-1 (a row) or at least 1 are",
                   bits, group))
        .WithFile(path);
  }
  FMOE_ASSIGN_OR_RETURN(const int64_t input_bits, Size(spec, "act_bits", 1, 32, 16, path));
  if (input_bits < 16) {
    return Status::Unsupported(
               fmt::format(
                   "auto-round's integer weights with inputs of {} bits are not supported; inputs of 16 "
                   "bits and more, which stay as they are, are",
                   input_bits))
        .WithFile(path);
  }
  LinearFormat format;
  format.bits = static_cast<int>(bits);
  format.weight = IntegerWeight(format.bits, group);
  format.codes = ".qweight";
  format.scale = ".scales";
  format.zero_point = ".qzeros";
  FMOE_ASSIGN_OR_RETURN(format.zero_point_optional, Flag(spec, "sym", true, path));
  format.scale_is_in_out = true;
  if (layout.find("gptq") != std::string::npos || layout == "auto_round") {
    format.packing = Packing::kGptq;
    format.group_index = ".g_idx";
    format.zero_plus_one = layout.find("gptq") != std::string::npos;
  } else if (layout.find("awq") != std::string::npos && bits == 4) {
    format.packing = Packing::kAwq;
    format.whole_groups = true;
  } else {
    return Status::Unsupported(
               fmt::format("auto-round's packing_format '{}' with {} bits is not supported; "
                           "auto_round:auto_gptq and auto_round are, and with 4 bits auto_round:auto_awq",
                           layout, bits))
        .WithFile(path);
  }
  format.negative_scales = true;
  return format;
}

// MXFP4 and MXFP8 in the tensors of compressed-tensors; "_rceil" names the exponent of activations too.
Result<LinearFormat> AutoRoundMxFormat(const JsonValue& spec, int64_t bits, int64_t group,
                                       const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const int64_t input_bits, Size(spec, "act_bits", 1, 32, 16, path));
  const JsonValue* type = spec.Find("act_data_type");
  const std::string input_type = type == nullptr ? "mx_fp" : type->string();
  FMOE_ASSIGN_OR_RETURN(const int64_t input_group,
                        Size(spec, "act_group_size", -1, kLargestGroup, group, path));
  const auto fits = [](int64_t count) { return count == 4 || count == 8; };
  const bool quantizes_inputs = input_bits < 16;
  if (!fits(bits) || group != 32 ||
      (quantizes_inputs && (!fits(input_bits) || input_group != 32 || !input_type.starts_with("mx_fp")))) {
    return Status::Unsupported(
               fmt::format("auto-round's MX weights of {} bits in groups of {} with inputs of {} bits "
                           "({}) in groups of {} are not supported; 4 and 8 bits in groups of 32 are",
                           bits, group, input_bits, input_type, input_group))
        .WithFile(path);
  }
  LinearFormat format;
  format.codes = bits == 4 ? ".weight_packed" : ".weight";
  format.scale = ".weight_scale";
  format.weight = Mx(bits == 4 ? DType::kF4E2M1 : DType::kF8E4M3);
  if (quantizes_inputs) {
    format.activation = MxInput(input_bits == 4 ? DType::kF4E2M1 : DType::kF8E4M3,
                                input_type.ends_with("_rceil") ? MxScaleRule::kCeil : MxScaleRule::kFloor);
  }
  return format;
}

// NVFP4 in the tensors of compressed-tensors, reciprocal scales of matrices and inputs included.
Result<LinearFormat> AutoRoundNvFormat(const JsonValue& spec, int64_t bits, int64_t group,
                                       const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const int64_t input_bits, Size(spec, "act_bits", 1, 32, 16, path));
  FMOE_ASSIGN_OR_RETURN(const int64_t input_group,
                        Size(spec, "act_group_size", -1, kLargestGroup, group, path));
  const bool quantizes_inputs = input_bits < 16;
  if (bits != 4 || group != 16 || (quantizes_inputs && (input_bits != 4 || input_group != 16))) {
    return Status::Unsupported(
               fmt::format("auto-round's NVFP weights of {} bits in groups of {} with inputs of {} bits in "
                           "groups of {} are not supported; 4 bits in groups of 16 are",
                           bits, group, input_bits, input_group))
        .WithFile(path);
  }
  LinearFormat format;
  format.codes = ".weight_packed";
  format.scale = ".weight_scale";
  format.weight = Nvfp4(16);
  format.second_scale = ".weight_global_scale";
  format.reciprocal = true;
  if (quantizes_inputs) {
    format.activation = Nvfp4Input();
    format.input_scale = ".input_global_scale";
  }
  return format;
}

// Group sizes of weights and inputs: 0 is the whole tensor, -1 a row; a pair of sizes is a block.
Result<LinearFormat> AutoRoundFp8Format(const JsonValue& spec, int64_t bits, const JsonValue* group,
                                        const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const int64_t input_bits, Size(spec, "act_bits", 1, 32, 16, path));
  FMOE_ASSIGN_OR_RETURN(const bool dynamic, Flag(spec, "act_dynamic", true, path));
  FMOE_ASSIGN_OR_RETURN(const int64_t input_group, Size(spec, "act_group_size", -1, kLargestGroup, -1, path));
  const JsonValue* kind = spec.Find("fmt");
  const auto refuse = [&](std::string_view what, const std::string& value) {
    return Status::Unsupported(fmt::format("auto-round's FP8 with {} {} is not supported", what, value))
        .WithFile(path);
  };
  if (!IsE4m3(kind)) {
    return refuse("fmt", kind->ToString());
  }
  if (bits != 8 || (input_bits != 8 && input_bits < 16)) {
    return refuse("weights and inputs of", fmt::format("{} and {} bits", bits, input_bits));
  }
  LinearFormat format;
  format.weight = Fp8();
  format.scale = ".weight_scale";
  const bool pair = group != nullptr && group->is_array() && group->items().size() == 2;
  const int64_t size = group == nullptr || pair ? -1 : group->integer().value_or(-2);
  if (pair) {
    FMOE_ASSIGN_OR_RETURN(format.weight.block, BlockSizes("group_size", *group, path));
    format.scale = ".weight_scale_inv";
  } else if (size == 0) {
    format.weight.has_tensor_scale = true;
  } else if (size == -1) {
    format.weight.has_channel_scale = true;
  } else {
    return refuse("group_size", group->ToString());
  }
  if (input_bits >= 16) {
    return format;
  }
  const bool blocks = input_group > 0 && input_group == format.weight.block.col;
  if (input_group > 0 && (!blocks || !dynamic)) {
    return refuse("act_group_size", fmt::format("{} ({})", input_group, dynamic ? "dynamic" : "static"));
  }
  format.activation = blocks ? BlockFp8(input_group) : input_group == 0 ? StaticFp8() : TokenFp8();
  if (input_group == 0) {
    format.activation.static_tensor_scale = !dynamic;
    format.input_scale = dynamic ? "" : ".input_scale";
  } else if (!dynamic) {
    return refuse("act_group_size", fmt::format("{} (static)", input_group));
  }
  return format;
}

Result<LinearFormat> AutoRoundFormat(const JsonValue& spec, int64_t bits, const JsonValue* group_key,
                                     const std::string& path) {
  const JsonValue* type = spec.Find("data_type");
  const std::string name = type == nullptr ? "int" : type->string();
  if (name == "fp" || name == "fp8" || name == "fp8_e4m3" || name == "fp8_e4m3fn") {
    return AutoRoundFp8Format(spec, bits, group_key, path);
  }
  const std::optional<int64_t> group = group_key == nullptr ? 128 : group_key->integer();
  if (!group || *group < -1 || *group > kLargestGroup) {
    return Wrong("group_size", group_key, "an integer from -1 to 65536", path);
  }
  if (name.starts_with("mx_fp")) {
    return AutoRoundMxFormat(spec, bits, *group, path);
  }
  if (name == "nv_fp" || name == "nv_fp4") {
    return AutoRoundNvFormat(spec, bits, *group, path);
  }
  if (name == "int") {
    return AutoRoundIntegerFormat(spec, bits, *group, path);
  }
  return Status::Unsupported(fmt::format("auto-round with data_type {} is not supported; \"int\", \"fp\", "
                                         "\"nv_fp\" and \"mx_fp\" are",
                                         type->ToString()))
      .WithFile(path);
}

// Modules with settings of their own: a name, or a pattern.
struct AutoRoundOverride {
  std::string key;
  std::optional<Pattern> pattern;
  Result<LinearFormat> format = LinearFormat{};
};

}  // namespace

Result<QuantRules> ReadAutoRoundRules(const JsonValue& spec, const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(const int64_t bits, Size(spec, "bits", 1, 32, std::nullopt, path));
  for (const char* key : {"rotation_config", "spinquant_config"}) {
    if (spec.Find(key) != nullptr) {
      return Status::Unsupported(
                 fmt::format("auto-round with '{}' is not supported: inputs are rotated while the model runs",
                             key))
          .WithFile(path);
    }
  }
  const JsonValue* group = spec.Find("group_size");
  LinearFormat format;
  if (bits < 16) {  // 16 bits and more mean untouched
    FMOE_ASSIGN_OR_RETURN(format, AutoRoundFormat(spec, bits, group, path));
  }
  auto overrides = std::make_shared<std::vector<AutoRoundOverride>>();
  if (const JsonValue* extra = spec.Find("extra_config"); extra != nullptr) {
    for (const auto& [key, own] : extra->members()) {
      AutoRoundOverride override{.key = key};
      if (key.find_first_of("*+?^$()[]{}|\\") != std::string::npos) {
        Result<Pattern> pattern = Pattern::Compile(".*(?:" + key + ")");  // found anywhere there (re.search)
        if (pattern.ok()) {
          override.pattern = *std::move(pattern);
        } else if (IsRegexLike(key)) {
          return std::move(pattern).status().WithFile(path);
        }
      }
      const JsonValue merged = spec.With(own);
      FMOE_ASSIGN_OR_RETURN(const int64_t own_bits, Size(merged, "bits", 1, 32, std::nullopt, path));
      if (own_bits < 16) {
        override.format = AutoRoundFormat(merged, own_bits, merged.Find("group_size"), path);
      }
      overrides->push_back(std::move(override));
    }
  }
  QuantRules rules;
  rules.producer = "auto-round";
  rules.format_of = [format, overrides](const std::string& module) -> Result<LinearFormat> {
    // What is said of a module by its name comes before what patterns say, wherever it stands.
    for (const AutoRoundOverride& override : *overrides) {
      if (!override.pattern && Listed({override.key}, module)) {
        return override.format;
      }
    }
    for (const AutoRoundOverride& override : *overrides) {
      if (override.pattern && override.pattern->MatchesPrefix(module)) {
        return override.format;
      }
    }
    return format;
  };
  return rules;
}

}  // namespace fusedmoe::checkpoint
