#include "checkpoint/storage/storage.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

namespace fusedmoe::checkpoint {
namespace {

using Json = nlohmann::ordered_json;

// ---- what stands in config.json (field lists: docs/checkpoints.md) ----

Json ModelOptFloat(int64_t bits, std::optional<int64_t> group) {
  Json json = {{"dynamic", false}, {"num_bits", bits}, {"type", "float"}};
  if (group) {
    json["group_size"] = *group;
  }
  return json;
}

Json ModelOptConfig(std::string_view algorithm, Json weights, Json inputs,
                    const std::vector<std::string>& ignored) {
  Json group = {{"weights", std::move(weights)}, {"targets", {"Linear"}}};
  group["input_activations"] = std::move(inputs);
  return {{"config_groups", {{"group_0", group}}},
          {"ignore", ignored},
          {"quant_algo", algorithm},
          {"producer", {{"name", "modelopt"}, {"version", "0.47.0"}}},
          {"quant_method", "modelopt"}};
}

Json ModelOptSideFile(std::string_view algorithm, std::optional<int64_t> group,
                      const std::vector<std::string>& ignored) {
  Json quantization = {{"quant_algo", algorithm}, {"kv_cache_quant_algo", nullptr}};
  if (group) {
    quantization["group_size"] = *group;
  }
  quantization["exclude_modules"] = ignored;
  return {{"producer", {{"name", "modelopt"}, {"version", "0.47.0"}}}, {"quantization", quantization}};
}

std::string_view Nvfp4Algorithm(const Scheme& scheme, const StorageOptions& options) {
  return !scheme.activation.quantized() ? "W4A16_NVFP4" : options.smoothing ? "NVFP4_AWQ" : "NVFP4";
}

Json ModelOptNvfp4(const Scheme& scheme, const StorageOptions& options) {
  const bool quantizes = scheme.activation.quantized();
  return ModelOptConfig(Nvfp4Algorithm(scheme, options), ModelOptFloat(4, 16),
                        quantizes ? ModelOptFloat(4, 16) : Json(nullptr), options.ignored);
}

Json ModelOptNvfp4SideFile(const Scheme& scheme, const StorageOptions& options) {
  return ModelOptSideFile(Nvfp4Algorithm(scheme, options), 16, options.ignored);
}

Json ModelOptFp8(const Scheme&, const StorageOptions& options) {
  return ModelOptConfig("FP8", ModelOptFloat(8, std::nullopt), ModelOptFloat(8, std::nullopt),
                        options.ignored);
}

Json ModelOptFp8SideFile(const Scheme&, const StorageOptions& options) {
  return ModelOptSideFile("FP8", std::nullopt, options.ignored);
}

Json ModelOptAlgorithm(std::string_view algorithm, std::optional<int64_t> group,
                       const StorageOptions& options) {
  return ModelOptConfig(algorithm, ModelOptFloat(8, group), ModelOptFloat(8, group), options.ignored);
}

Json ModelOptMxfp8(const Scheme&, const StorageOptions& options) {
  return ModelOptAlgorithm("MXFP8", 32, options);
}
Json ModelOptMxfp8SideFile(const Scheme&, const StorageOptions& options) {
  return ModelOptSideFile("MXFP8", 32, options.ignored);
}
Json ModelOptFp8Channel(const Scheme&, const StorageOptions& options) {
  return ModelOptAlgorithm("FP8_PER_CHANNEL_PER_TOKEN", std::nullopt, options);
}
Json ModelOptFp8ChannelSideFile(const Scheme&, const StorageOptions& options) {
  return ModelOptSideFile("FP8_PER_CHANNEL_PER_TOKEN", std::nullopt, options.ignored);
}

// compressed-tensors describes any pair of formats in the same words.
Json Arguments(bool is_float, int bits) {
  return {{"num_bits", bits}, {"type", is_float ? "float" : "int"}, {"symmetric", true}};
}

void Group(Json& json, GroupShape group, bool two_level) {
  if (group == kPerTensor) {
    json["strategy"] = "tensor";
  } else if (group == kPerRow) {
    json["strategy"] = "channel";
  } else if (group.row > 1) {
    json["strategy"] = "block";
    json["block_structure"] = {group.row, group.col};
  } else {
    json["strategy"] = two_level ? "tensor_group" : "group";
    json["group_size"] = group.col;
  }
}

bool IsFloatElement(DType element) {
  return element == DType::kF4E2M1 || element == DType::kF6E2M3 || element == DType::kF8E4M3;
}

Json CompressedTensors(const Scheme& scheme, const StorageOptions& options) {
  const WeightFormat& weight = scheme.weight;
  const ActivationFormat& input = scheme.activation;
  const bool mx = weight.block_scale_dtype == DType::kF8E8M0;
  const bool e2m1 = weight.element == DType::kF4E2M1, e2m3 = weight.element == DType::kF6E2M3;
  const bool is_float = IsFloatElement(weight.element);
  const bool packed = weight.element == DType::kU4 || weight.element == DType::kU8;
  const std::string_view format = e2m1       ? mx ? "mxfp4-pack-quantized" : "nvfp4-pack-quantized"
                                  : e2m3     ? "mxfp6-pack-quantized"
                                  : packed   ? "pack-quantized"
                                  : mx       ? "mxfp8-quantized"
                                  : is_float ? "float-quantized"
                                             : "int-quantized";
  Json weights = Arguments(is_float, DTypeBits(weight.element));
  weights["symmetric"] = !options.zero_points;
  weights["dynamic"] = false;
  // Integers without groups of their own have one scale a row, as U8 and U4 keep it in blocks of whole rows.
  const bool whole_rows = weight.has_channel_scale || (weight.block.row == 1 && weight.block.col < 0);
  Group(weights, whole_rows ? kPerRow : weight.block, weight.has_tensor_scale);
  if (mx) {
    weights["scale_dtype"] = "torch.uint8";
  }
  if (options.group_index) {
    weights["actorder"] = "group";
  }
  Json inputs = nullptr;
  if (input.quantized()) {
    inputs = Arguments(IsFloatElement(*input.element), DTypeBits(*input.element));
    const bool two_level = input.scale_dtype == DType::kF8E4M3;
    inputs["dynamic"] = two_level ? Json("local") : Json(!input.static_tensor_scale);
    if (input.group == kPerRow) {
      inputs["strategy"] = "token";
    } else {
      Group(inputs, input.group, two_level);
    }
    if (input.scale_dtype == DType::kF8E8M0) {
      inputs["scale_dtype"] = "torch.uint8";
    }
  }
  Json group = {{"format", format}, {"targets", {"Linear"}}};
  group["weights"] = std::move(weights);
  group["input_activations"] = std::move(inputs);
  group["output_activations"] = nullptr;
  return {
      {"config_groups", {{"group_0", group}}},
      {"format", format},
      {"ignore", options.ignored},
      {"kv_cache_scheme", nullptr},
      {"quant_method", "compressed-tensors"},
      {"quantization_status", "compressed"},
      // Without one, scales of integers may be negative (auto-round's export). 0.19 refuses orders by group.
      {"version", options.group_index ? "0.18.0" : "0.20.0"}};
}

Json DeepSeekFp8(const Scheme&, const StorageOptions& options) {
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", {128, 128}},
          {"modules_to_not_convert", options.ignored}};
}

// ---- the tensors ----

constexpr Part kModelOptNvfp4A4[] = {{"weight", Source::kCodes, DType::kU8},
                                     {"weight_scale", Source::kBlockScale, DType::kF8E4M3},
                                     {"weight_scale_2", Source::kTensorScale, DType::kF32, true},
                                     {"pre_quant_scale", Source::kPreQuantScale, DType::kF32},
                                     {"input_scale", Source::kInputScale, DType::kF32, true}};
constexpr std::span<const Part> kModelOptNvfp4A16 = std::span(kModelOptNvfp4A4).first(4);
constexpr Part kCompressedNvfp4A4[] = {{"weight_packed", Source::kCodes, DType::kU8},
                                       {"weight_scale", Source::kBlockScale, DType::kF8E4M3},
                                       {"weight_global_scale", Source::kTensorScaleReciprocal, DType::kF32},
                                       {"input_global_scale", Source::kInputScaleReciprocal, DType::kF32}};
constexpr std::span<const Part> kCompressedNvfp4A16 = std::span(kCompressedNvfp4A4).first(3);
constexpr Part kCompressedMxPacked[] = {{"weight_packed", Source::kCodes, DType::kU8},
                                        {"weight_scale", Source::kBlockScale, DType::kU8}};
constexpr Part kModelOptFp8Tensor[] = {{"weight", Source::kCodes, DType::kF8E4M3},
                                       {"weight_scale", Source::kTensorScale, DType::kF32, true},
                                       {"input_scale", Source::kInputScale, DType::kF32, true}};
constexpr Part kCompressedFp8Channel[] = {{"weight", Source::kCodes, DType::kF8E4M3},
                                          {"weight_scale", Source::kChannelScale, DType::kF32}};
constexpr Part kCompressedInt8Channel[] = {{"weight", Source::kCodes, DType::kI8},
                                           {"weight_scale", Source::kChannelScale, DType::kF32}};
constexpr Part kDeepSeekBlock[] = {{"weight", Source::kCodes, DType::kF8E4M3},
                                   {"weight_scale_inv", Source::kBlockScale, DType::kF32}};
constexpr Part kCompressedInteger[] = {{"weight_packed", Source::kCodes, DType::kI32},
                                       {"weight_scale", Source::kBlockScale, DType::kBF16},
                                       {"weight_shape", Source::kMatrixShape, DType::kI64},
                                       {"weight_zero_point", Source::kZeroPoint, DType::kI32},
                                       {"weight_g_idx", Source::kGroupIndex, DType::kI32}};
constexpr Part kCompressedFp8Tensor[] = {{"weight", Source::kCodes, DType::kF8E4M3},
                                         {"weight_scale", Source::kTensorScale, DType::kF32},
                                         {"input_scale", Source::kInputScale, DType::kF32}};
constexpr std::span<const Part> kCompressedFp8Dynamic = std::span(kCompressedFp8Tensor).first(2);
constexpr Part kCompressedFp8Block[] = {{"weight", Source::kCodes, DType::kF8E4M3},
                                        {"weight_scale", Source::kBlockScale, DType::kF32}};
constexpr Part kMx8[] = {{"weight", Source::kCodes, DType::kF8E4M3},
                         {"weight_scale", Source::kBlockScale, DType::kU8}};
constexpr Part kModelOptFp8Rows[] = {{"weight", Source::kCodes, DType::kF8E4M3},
                                     {"weight_scale", Source::kChannelScale, DType::kF32, false, false}};

template <Json (*kMake)(const Scheme& scheme, const StorageOptions& options)>
std::string Text(const Scheme& scheme, const StorageOptions& options) {
  return kMake(scheme, options).dump();
}

constexpr auto kCt = Text<CompressedTensors>;

constexpr StorageRow kStorage[] = {
    {"nvfp4_w4a4", "modelopt", kModelOptNvfp4A4, Text<ModelOptNvfp4>, Text<ModelOptNvfp4SideFile>},
    {"nvfp4_w4a4", "compressed-tensors", kCompressedNvfp4A4, kCt, nullptr},
    {"nvfp4_w4a16", "modelopt", kModelOptNvfp4A16, Text<ModelOptNvfp4>, Text<ModelOptNvfp4SideFile>},
    {"nvfp4_w4a16", "compressed-tensors", kCompressedNvfp4A16, kCt, nullptr},
    {"mxfp4_w4a4", "compressed-tensors", kCompressedMxPacked, kCt, nullptr},
    {"mxfp4_w4a16", "compressed-tensors", kCompressedMxPacked, kCt, nullptr},
    {"mxfp4_mxfp8", "compressed-tensors", kCompressedMxPacked, kCt, nullptr},
    {"mxfp4_w4a8:group128", "compressed-tensors", kCompressedMxPacked, kCt, nullptr},
    {"w_mxfp6_e2m3", "compressed-tensors", kCompressedMxPacked, kCt, nullptr},
    {"w_mxfp6_e2m3_a_mxfp6_e2m3", "compressed-tensors", kCompressedMxPacked, kCt, nullptr},
    {"mxfp8_w8a8", "compressed-tensors", kMx8, kCt, nullptr},
    {"mxfp8_w8a8", "modelopt", kMx8, Text<ModelOptMxfp8>, Text<ModelOptMxfp8SideFile>},
    {"mxfp8_w8a16", "compressed-tensors", kMx8, kCt, nullptr},
    {"fp8_w8a8:channel", "compressed-tensors", kCompressedFp8Channel, kCt, nullptr},
    {"fp8_w8a8:channel", "modelopt", kModelOptFp8Rows, Text<ModelOptFp8Channel>,
     Text<ModelOptFp8ChannelSideFile>},
    {"fp8_w8a8:tensor_static", "modelopt", kModelOptFp8Tensor, Text<ModelOptFp8>, Text<ModelOptFp8SideFile>},
    {"fp8_w8a8:tensor_static", "compressed-tensors", kCompressedFp8Tensor, kCt, nullptr},
    {"fp8_w8a8:tensor", "compressed-tensors", kCompressedFp8Dynamic, kCt, nullptr},
    {"fp8_w8a8:tensor_token", "compressed-tensors", kCompressedFp8Dynamic, kCt, nullptr},
    {"fp8_w8a8:block128", "deepseek", kDeepSeekBlock, Text<DeepSeekFp8>, nullptr},
    {"fp8_w8a8:block128", "compressed-tensors", kCompressedFp8Block, kCt, nullptr},
    {"fp8_w8a16:channel", "compressed-tensors", kCompressedFp8Channel, kCt, nullptr},
    {"fp8_w8a16:tensor", "compressed-tensors", kCompressedFp8Dynamic, kCt, nullptr},
    {"fp8_w8a16:block128", "compressed-tensors", kCompressedFp8Block, kCt, nullptr},
    {"int8_w8a8:channel", "compressed-tensors", kCompressedInt8Channel, kCt, nullptr},
    {"int8_w8a16:channel", "compressed-tensors", kCompressedInteger, kCt, nullptr},
    {"int8_w8a16:g128", "compressed-tensors", kCompressedInteger, kCt, nullptr},
    {"int8_w8a16:g64", "compressed-tensors", kCompressedInteger, kCt, nullptr},
    {"int8_w8a16:g32", "compressed-tensors", kCompressedInteger, kCt, nullptr},
    {"int4_w4a16:g128", "compressed-tensors", kCompressedInteger, kCt, nullptr},
    {"int4_w4a16:g64", "compressed-tensors", kCompressedInteger, kCt, nullptr},
    {"int4_w4a16:g32", "compressed-tensors", kCompressedInteger, kCt, nullptr},
    {"int4_w4a16:channel", "compressed-tensors", kCompressedInteger, kCt, nullptr},
};

}  // namespace

const StorageRow* FindStorage(const Scheme& scheme, std::string_view preferred_producer) {
  // "fp8_w8a8" and "fp8_w8a8:channel" are one scheme: SchemeNameFor has one name for both.
  const Result<std::string> name = SchemeNameFor(scheme.weight, scheme.activation);
  const StorageRow* found = nullptr;
  for (const StorageRow& row : kStorage) {
    const Result<Scheme> stored = ParseScheme(row.scheme);
    const Result<std::string> own = stored.ok() ? SchemeNameFor(stored->weight, stored->activation)
                                                : Result<std::string>(stored.status());
    if (name.ok() && own.ok() && *name == *own && (found == nullptr || row.producer == preferred_producer)) {
      found = &row;
    }
  }
  return found;
}

const StorageRow* FindStorageOf(const Scheme& scheme, std::string_view producer) {
  const StorageRow* row = FindStorage(scheme, producer);
  return row != nullptr && row->producer == producer ? row : nullptr;
}

std::string InWordsOf(std::string_view producer, std::string module) {
  if (!module.ends_with('.')) {
    return module;
  }
  if (producer == "modelopt") {
    return module + "*";
  }
  if (producer != "compressed-tensors") {
    module.pop_back();
    return module;
  }
  std::string pattern = "re:";
  for (const char c : module) {
    if (c == '.') {
      pattern += '\\';
    }
    pattern += c;
  }
  return pattern + ".*";
}

bool StoresSmoothing(const StorageRow& row) {
  return std::any_of(row.parts.begin(), row.parts.end(),
                     [](const Part& part) { return part.source == Source::kPreQuantScale; });
}

std::string StorableSchemes(std::string_view producer) {
  std::string names;
  std::string_view last;
  for (const StorageRow& row : kStorage) {
    if (row.scheme != last && (producer.empty() || producer == row.producer)) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", row.scheme);
      last = row.scheme;
    }
  }
  return names;
}

}  // namespace fusedmoe::checkpoint
