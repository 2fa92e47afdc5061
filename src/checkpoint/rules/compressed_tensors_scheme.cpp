#include "checkpoint/rules/compressed_tensors_scheme.hpp"

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "checkpoint/rules/rules_support.hpp"

namespace fusedmoe::checkpoint {
namespace {

// What a scheme object ("weights", "input_activations") says.
struct Args {
  std::string type;  // "float", "int"
  int64_t bits = 0;
  std::string strategy;
  int64_t group = 0;
  GroupShape block{0, 0};
  bool symmetric = true;
  bool dynamic = false;
  bool static_global = false;  // dynamic: "local": dynamic groups below a stored scale
  bool e8m0 = false;
  bool reordered = false;  // columns lie in another order than their groups
};

// "group_size" and "strategy"; each says what the other is where that is missing.
Status ReadGroups(const JsonValue& spec, const std::string& path, Args& args) {
  FMOE_ASSIGN_OR_RETURN(args.group, Size(spec, "group_size", -1, kLargestGroup, 0, path));
  if (const JsonValue* group = spec.Find("group_size"); group != nullptr && args.group == 0) {
    return Wrong("group_size", group, "-1 or 1 to 65536", path);
  }
  const JsonValue* strategy = spec.Find("strategy");
  if (strategy != nullptr && !strategy->is_string()) {
    return Wrong("strategy", strategy, "a string", path);
  }
  args.strategy = strategy != nullptr ? strategy->string()
                  : args.group > 0    ? "group"
                  : args.group == -1  ? "channel"
                                      : "tensor";
  if (const JsonValue* block = spec.Find("block_structure"); block != nullptr) {
    FMOE_ASSIGN_OR_RETURN(args.block, BlockSizes("block_structure", *block, path));
  }
  return Status::Ok();
}

Result<Args> ReadArgs(std::string_view key, const JsonValue& spec, const std::string& path) {
  if (!spec.is_object()) {
    return Wrong(key, &spec, "an object", path);
  }
  Args args;
  FMOE_ASSIGN_OR_RETURN(args.bits, Size(spec, "num_bits", 1, 16, std::nullopt, path));
  const JsonValue* type = spec.Find("type");
  args.type = type == nullptr ? "int" : type->string();
  if (args.type != "int" && args.type != "float") {
    return Wrong("type", type, "\"int\" or \"float\"", path);
  }
  FMOE_ASSIGN_OR_RETURN(args.symmetric, Flag(spec, "symmetric", true, path));
  FMOE_RETURN_IF_ERROR(ReadGroups(spec, path, args));
  if (const JsonValue* dynamic = spec.Find("dynamic"); dynamic != nullptr) {
    args.static_global = dynamic->is_string() && dynamic->string() == "local";
    if (!dynamic->is_bool() && !args.static_global) {
      return Wrong("dynamic", dynamic, "true, false or \"local\"", path);
    }
    args.dynamic = args.static_global || dynamic->boolean();
  }
  // "weight", or "static": the order served while quantizing. "group", or "dynamic" and true: it stays.
  if (const JsonValue* order = spec.Find("actorder"); order != nullptr) {
    const std::string& word = order->string();
    args.reordered = order->boolean() || word == "group" || word == "dynamic";
    if (!args.reordered && !order->is_bool() && word != "weight" && word != "static") {
      return Wrong("actorder", order, "\"group\", \"weight\", \"dynamic\" or \"static\"", path);
    }
  }
  if (const JsonValue* scale = spec.Find("scale_dtype"); scale != nullptr) {
    args.e8m0 = scale->string() == "torch.uint8";
  }
  return args;
}

std::string Words(const Args& args) {
  return fmt::format("{} of {} bits, strategy {}{}", args.type, args.bits, args.strategy,
                     args.group > 0 ? fmt::format(" {}", args.group) : "");
}

Result<ActivationFormat> InputFormat(const Args& args, const LinearFormat& weights, const std::string& path) {
  const bool is_float = args.type == "float";
  const auto refuse = [&] {
    return Status::Unsupported(fmt::format("input activations as {} are not supported", Words(args)))
        .WithFile(path);
  };
  if (!args.symmetric) {
    return refuse();
  }
  if (is_float && args.bits == 4 && args.strategy == "tensor_group" && args.group == 16) {
    // A zero scale becomes 0.125 there: an all-zero group, whose codes are zero either way.
    return Nvfp4Input();
  }
  if (is_float && args.strategy == "group" && args.group == 32 && (args.bits == 4 || args.bits == 6)) {
    return MxInput(args.bits == 4 ? DType::kF4E2M1 : DType::kF6E2M3, MxScaleRule::kEven);
  }
  if (is_float && args.strategy == "group" && args.group > 0 && args.bits == 8 && args.e8m0) {
    ActivationFormat input = MxInput(DType::kF8E4M3, MxScaleRule::kEvenE2m1);
    input.group.col = args.group;
    return input;
  }
  if (args.bits != 8) {
    return refuse();
  }
  ActivationFormat format;
  format.element = is_float ? DType::kF8E4M3 : DType::kI8;
  // The range is taken as 255 steps wide there, so that 8-bit integers divide by 127.5.
  if (!is_float) {
    format.rule.amax_divisor = 127.5F;
  }
  if (!args.dynamic) {
    if (args.strategy != "tensor") {
      return refuse();
    }
    format.static_tensor_scale = true;
  } else if (args.strategy == "token") {
    format.group = kPerRow;
  } else if (args.strategy == "group" && args.group > 0) {
    format.group = {1, args.group};
  } else if (args.strategy == "block") {
    format.group = {1, weights.weight.block.col};
  } else if (args.strategy != "tensor") {
    return refuse();
  }
  return format;
}

// SetPacked, SetPlain, SetMxfp8: what a format says of weights; false where it and its arguments do not
// agree.

// Codes in words of their own ("*-pack-quantized").
bool SetPacked(std::string_view name, const Args& args, LinearFormat& format) {
  const auto floats_of = [&](int64_t bits) { return args.type == "float" && args.bits == bits; };
  const bool groups = args.strategy == "group";
  format.codes = ".weight_packed";
  if (name == "nvfp4-pack-quantized" && floats_of(4) && (args.group == 16 || args.group == 0)) {
    format.weight = Nvfp4(16);
    format.second_scale = ".weight_global_scale";
    format.input_scale = ".input_global_scale";
    format.reciprocal = true;
  } else if (name == "mxfp4-pack-quantized" && floats_of(4) && args.group == 32) {
    format.weight = Mx(DType::kF4E2M1);
  } else if (name == "mxfp6-pack-quantized" && floats_of(6) && args.group == 32) {
    format.weight = Mx(DType::kF6E2M3);
  } else if (name == "pack-quantized" && args.type == "int" && args.bits >= 2 && args.bits <= 8 &&
             (groups || args.strategy == "channel")) {
    format.packing = Packing::kBits;
    format.bits = static_cast<int>(args.bits);
    format.weight = IntegerWeight(format.bits, groups ? args.group : -1);
    format.shape = ".weight_shape";
    format.group_index = ".weight_g_idx";
    format.group_index_required = args.reordered && groups;
    (args.symmetric ? format.no_zero_point : format.zero_point) = ".weight_zero_point";
  } else {
    return false;
  }
  return true;
}

// One code an element, in a type that safetensors has.
bool SetPlain(const Args& args, LinearFormat& format) {
  const bool is_float = args.type == "float";
  if (!args.symmetric || (is_float ? args.bits != 8 : args.bits > 8)) {
    return false;
  }
  format.weight.element = is_float ? DType::kF8E4M3 : args.bits > 4 ? DType::kI8 : DType::kI4;
  if (!is_float) {
    format.bits = static_cast<int>(args.bits);
  }
  format.input_scale = ".input_scale";
  format.no_zero_point = ".weight_zero_point";
  if (args.strategy == "tensor") {
    format.weight.has_tensor_scale = true;
  } else if (args.strategy == "channel") {
    format.weight.has_channel_scale = true;
  } else if (args.strategy == "block" && args.block.row > 0) {
    format.weight.block = args.block;
  } else if (args.strategy == "group" && args.group > 0) {
    format.weight.block = {1, args.group};
    format.weight.block_scale_dtype = DType::kBF16;
  } else {
    return false;
  }
  return true;
}

bool SetMxfp8(const Args& args, LinearFormat& format) {
  if (args.type != "float" || args.bits != 8 || args.group != 32) {
    return false;
  }
  format.weight = Mx(DType::kF8E4M3);
  return true;
}

bool SetWeights(std::string_view name, const Args& args, LinearFormat& format) {
  if (name.ends_with("pack-quantized")) {
    return SetPacked(name, args, format);
  }
  if (name == "mxfp8-quantized" || (name == "float-quantized" && args.e8m0)) {
    return SetMxfp8(args, format);
  }
  if (name == "float-quantized" || name == "naive-quantized" || name == "int-quantized") {
    return SetPlain(args, format);
  }
  return false;
}

}  // namespace

Result<LinearFormat> CompressedTensorsFormat(const JsonValue& group, std::string_view outer_format,
                                             const std::string& path) {
  const JsonValue* weights_spec = group.Find("weights");
  if (weights_spec == nullptr) {
    return LinearFormat{};
  }
  FMOE_ASSIGN_OR_RETURN(const Args weights, ReadArgs("weights", *weights_spec, path));
  FMOE_ASSIGN_OR_RETURN(const std::string name, Word(group, "format", outer_format, path));
  if (name == "dense") {
    return LinearFormat{};
  }
  LinearFormat format;
  if (!SetWeights(name, weights, format)) {
    return Status::Unsupported(
               fmt::format("weights as {} in format '{}' are not supported", Words(weights), name))
        .WithFile(path);
  }
  if (weights.reordered && weights.strategy == "group" && !format.group_index_required) {
    return NotSupported("actorder", *weights_spec->Find("actorder"),
                        fmt::format("codes in format '{}' have no order of their own", name), path);
  }
  if (const JsonValue* outputs = group.Find("output_activations"); outputs != nullptr) {
    return NotSupported("output_activations", *outputs, "inputs and weights alone are quantized here", path);
  }
  format.scale = ".weight_scale";
  format.whole_groups = weights.strategy == "group" || weights.strategy == "tensor_group";
  if (const JsonValue* input_spec = group.Find("input_activations"); input_spec != nullptr) {
    FMOE_ASSIGN_OR_RETURN(const Args input, ReadArgs("input_activations", *input_spec, path));
    FMOE_ASSIGN_OR_RETURN(format.activation, InputFormat(input, format, path));
  }
  if (!format.activation.static_tensor_scale) {
    format.input_scale = "";
  }
  return format;
}

}  // namespace fusedmoe::checkpoint
