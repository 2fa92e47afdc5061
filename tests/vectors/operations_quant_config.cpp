#include <fmt/format.h>

#include <fusedmoe/quant_config.hpp>

#include "support/golden.hpp"

namespace fusedmoe::golden {
namespace {

using nlohmann::json;

// The configurations only ask whether a tensor is there.
const float kOne = 1.0F;
const TensorView kAnyTensor(reinterpret_cast<const std::byte*>(&kOne), DType::kF32, Shape{1});

json ShapeJson(std::optional<GroupShape> shape) {
  return shape ? json::array({shape->row, shape->col}) : json(nullptr);
}

json NameJson(std::string_view name) {
  return name.empty() ? json(nullptr) : json(name);
}

std::optional<GroupShape> ShapeOf(const json& value) {
  return value.is_null() ? std::nullopt
                         : std::optional(GroupShape{value[0].get<int64_t>(), value[1].get<int64_t>()});
}

QuantKind KindOf(const json& value) {
  const std::string name = value.is_null() ? "" : value.get<std::string>();
  const auto kind = ParseQuantKind(name);
  if (!kind) {
    throw std::runtime_error("unknown kind '" + name + "'");
  }
  return *kind;
}

QuantConfigArguments ArgumentsOf(const json& arguments) {
  QuantConfigArguments result;
  const std::pair<const char*, TensorView*> tensors[] = {
      {"a1_scale", &result.a1_scale},   {"a2_scale", &result.a2_scale},   {"w1_scale", &result.w1_scale},
      {"w2_scale", &result.w2_scale},   {"a1_gscale", &result.a1_gscale}, {"a2_gscale", &result.a2_gscale},
      {"g1_alphas", &result.g1_alphas}, {"g2_alphas", &result.g2_alphas}, {"w1_zp", &result.w1_zp},
      {"w2_zp", &result.w2_zp},         {"w1_bias", &result.w1_bias},     {"w2_bias", &result.w2_bias}};
  for (const auto& [name, value] : arguments.items()) {
    bool known = false;
    for (const auto& [tensor_name, tensor] : tensors) {
      if (name == tensor_name) {
        *tensor = value.is_null() ? TensorView() : kAnyTensor;
        known = true;
      }
    }
    if (known) {
      continue;
    }
    if (name == "per_act_token_quant") {
      result.per_act_token_quant = value.get<bool>();
    } else if (name == "per_out_ch_quant") {
      result.per_out_ch_quant = value.get<bool>();
    } else if (name == "block_shape") {
      result.block_shape = ShapeOf(value);
    } else if (name == "weight_bits") {
      result.weight_bits = value.get<int>();
    } else if (name == "group_size") {
      result.group_size = value.get<int64_t>();
    } else if (name == "quant_dtype") {
      result.quant_kind = KindOf(value);
    } else if (name == "weight_dtype") {
      result.weight_kind = KindOf(value);
    } else if (name == "gemm1_alpha") {
      result.gemm1_alpha = value.is_null() ? std::nullopt : std::optional(value.get<float>());
    } else if (name == "gemm1_beta") {
      result.gemm1_beta = value.is_null() ? std::nullopt : std::optional(value.get<float>());
    } else if (name == "gemm1_clamp_limit") {
      result.gemm1_clamp_limit = value.is_null() ? std::nullopt : std::optional(value.get<float>());
    } else if (name == "mx_alignment") {
      result.mx_alignment = value.get<int64_t>();
    } else if (name == "is_scale_swizzled") {
      result.is_scale_swizzled = value.get<bool>();
    } else {
      throw std::runtime_error("unknown argument '" + name + "'");
    }
  }
  return result;
}

json FloatJson(std::optional<float> value) {
  return value ? json(*value) : json(nullptr);
}

json Describe(const QuantConfig& config, const json& table) {
  const std::pair<const char*, bool> flags[] = {{"is_quantized", config.is_quantized()},
                                                {"is_per_act_token", config.is_per_act_token()},
                                                {"per_act_token_quant", config.per_act_token_quant()},
                                                {"per_out_ch_quant", config.per_out_ch_quant()},
                                                {"is_per_tensor", config.is_per_tensor()},
                                                {"is_block_quantized", config.is_block_quantized()},
                                                {"use_fp8_w8a8", config.use_fp8_w8a8()},
                                                {"use_int8_w8a8", config.use_int8_w8a8()},
                                                {"use_int8_w8a16", config.use_int8_w8a16()},
                                                {"use_fp8_w8a16", config.use_fp8_w8a16()},
                                                {"use_int4_w4a16", config.use_int4_w4a16()},
                                                {"use_nvfp4_w4a16", config.use_nvfp4_w4a16()},
                                                {"use_mxfp4_w4a16", config.use_mxfp4_w4a16()},
                                                {"use_mxfp4_w4a4", config.use_mxfp4_w4a4()},
                                                {"use_nvfp4_w4a4", config.use_nvfp4_w4a4()},
                                                {"use_mxfp4_w4a8", config.use_mxfp4_w4a8()},
                                                {"is_scale_swizzled", config.is_scale_swizzled}};
  const std::pair<const char*, const TensorView*> tensors[] = {
      {"a1_scale", &config.a1_scale()},   {"a2_scale", &config.a2_scale()},
      {"w1_scale", &config.w1_scale()},   {"w2_scale", &config.w2_scale()},
      {"a1_gscale", &config.a1_gscale()}, {"a2_gscale", &config.a2_gscale()},
      {"g1_alphas", &config.g1_alphas()}, {"g2_alphas", &config.g2_alphas()},
      {"w1_zp", &config.w1_zp()},         {"w2_zp", &config.w2_zp()},
      {"w1_bias", &config.w1_bias()},     {"w2_bias", &config.w2_bias()}};
  json said;
  said["quant_dtype"] = NameJson(QuantKindName(config.quant_kind()));
  said["weight_quant_dtype"] = NameJson(QuantKindName(config.weight_quant_kind()));
  said["block_shape"] = ShapeJson(config.block_shape());
  said["true"] = json::array();
  for (const auto& [name, holds] : flags) {
    if (holds) {
      said["true"].push_back(name);
    }
  }
  said["tensors"] = json::array();
  for (const auto& [name, tensor] : tensors) {
    if (!tensor->empty()) {
      said["tensors"].push_back(name);
    }
  }
  said["ocp_mx_scheme"] = NameJson(config.ocp_mx_scheme());
  said["config_name"] = {NameJson(config.ConfigName(DType::kBF16)), NameJson(config.ConfigName(DType::kF16)),
                         NameJson(config.ConfigName(DType::kF32))};
  said["shapes"] = {ShapeJson(config.a1.shape), ShapeJson(config.a2.shape), ShapeJson(config.w1.shape),
                    ShapeJson(config.w2.shape)};
  said["gemm1"] = {FloatJson(config.gemm1_alpha), FloatJson(config.gemm1_beta),
                   FloatJson(config.gemm1_clamp_limit)};
  said["mx_alignment"] = config.mx_alignment;
  said["scale_shape"] = json::array();
  said["batched_scale_shape"] = json::array();
  for (const json& problem : table["scale_problems"]) {
    const auto tokens = problem[0].get<int64_t>();
    const auto hidden = problem[1].get<int64_t>();
    const auto shape = config.ScaleShape(tokens, hidden);
    const auto batched = config.BatchedScaleShape(table["experts"].get<int64_t>(), tokens, hidden);
    said["scale_shape"].push_back(shape ? json(*shape) : json(nullptr));
    said["batched_scale_shape"].push_back(batched ? json(*batched) : json(nullptr));
  }
  return said;
}

bool SameJson(const json& a, const json& b) {
  if (a.is_number_float() || b.is_number_float()) {
    return a.is_number() && b.is_number() && a.get<float>() == b.get<float>();
  }
  if (a.is_array() && b.is_array()) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), SameJson);
  }
  return a == b;
}

Outcome RunConfigs(const json& table) {
  for (const json& row : table["rows"]) {
    const std::string label = row["factory"].get<std::string>() + " " + row["arguments"].dump();
    const auto config = MakeQuantConfig(row["factory"].get<std::string>(), ArgumentsOf(row["arguments"]));
    if (row.contains("error")) {
      if (config.ok()) {
        return label + ": must be refused, was accepted";
      }
      continue;
    }
    if (!config.ok()) {
      return label + ": " + config.status().ToString();
    }
    const json said = Describe(*config, table);
    for (const auto& [name, expected] : row.items()) {
      if (name != "factory" && name != "arguments" &&
          (!said.contains(name) || !SameJson(said[name], expected))) {
        return fmt::format("{}: {} is {}, expected {}", label, name,
                           said.contains(name) ? said[name].dump() : "unknown", expected.dump());
      }
    }
  }
  return std::nullopt;
}

Outcome RunGroupShapes(const json& table) {
  for (const json& row : table["rows"]) {
    const auto shapes =
        GroupShapesFor(KindOf(row[0]), row[1].get<bool>(), row[2].get<bool>(), ShapeOf(row[3]));
    const json activation = shapes.ok() ? ShapeJson(shapes->first) : json("error");
    const json weight = shapes.ok() ? ShapeJson(shapes->second) : json("error");
    if (activation != row[4] || weight != row[5]) {
      return fmt::format("{}: got {} and {}", row.dump(), activation.dump(), weight.dump());
    }
  }
  return std::nullopt;
}

Outcome RunOcpMxSchemes(const json& table) {
  for (const json& row : table["rows"]) {
    const json name = NameJson(OcpMxSchemeName(KindOf(row[0]), KindOf(row[1])));
    if (name != row[2]) {
      return fmt::format("{}: got {}", row.dump(), name.dump());
    }
    if (!name.is_null() && !ParseScheme(name.get<std::string>()).ok()) {
      return fmt::format("the scheme table does not know {}", name.dump());
    }
  }
  return std::nullopt;
}

Outcome RunQuantKeys(const json& table) {
  for (const json& row : table["rows"]) {
    std::string printed = "unknown key";
    for (const NamedQuantKey& named : QuantKeyTable()) {
      printed = named.name == row[0].get<std::string>() ? named.key.ToString() : printed;
    }
    if (printed != row[1].get<std::string>()) {
      return fmt::format("{}: got {}", row.dump(), printed);
    }
  }
  return std::nullopt;
}

}  // namespace

Outcome RunQuantConfig(const GoldenCase& golden_case) {
  const json& table = golden_case.manifest();
  const std::string& name = golden_case.name();
  if (name == "configs") {
    return RunConfigs(table);
  }
  if (name == "group_shapes") {
    return RunGroupShapes(table);
  }
  if (name == "ocp_mx_scheme") {
    return RunOcpMxSchemes(table);
  }
  if (name == "quant_keys") {
    return RunQuantKeys(table);
  }
  return "unknown operation '" + name + "'";
}

}  // namespace fusedmoe::golden
