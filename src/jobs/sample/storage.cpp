#include "jobs/sample/storage.hpp"

#include <cstring>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/checked_math.hpp"

namespace fusedmoe::sample {
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

Json ModelOptNvfp4(const Scheme& scheme, const std::vector<std::string>& ignored) {
  const bool quantizes = scheme.activation.quantized();
  return ModelOptConfig(quantizes ? "NVFP4" : "W4A16_NVFP4", ModelOptFloat(4, 16),
                        quantizes ? ModelOptFloat(4, 16) : Json(nullptr), ignored);
}

Json ModelOptNvfp4SideFile(const Scheme& scheme, const std::vector<std::string>& ignored) {
  return ModelOptSideFile(scheme.activation.quantized() ? "NVFP4" : "W4A16_NVFP4", 16, ignored);
}

Json ModelOptFp8(const Scheme&, const std::vector<std::string>& ignored) {
  return ModelOptConfig("FP8", ModelOptFloat(8, std::nullopt), ModelOptFloat(8, std::nullopt), ignored);
}

Json ModelOptFp8SideFile(const Scheme&, const std::vector<std::string>& ignored) {
  return ModelOptSideFile("FP8", std::nullopt, ignored);
}

Json CompressedArguments(std::string_view type, int64_t bits, std::string_view strategy, Json group,
                         Json dynamic) {
  return {{"num_bits", bits},
          {"type", type},
          {"symmetric", true},
          {"strategy", strategy},
          {"group_size", std::move(group)},
          {"dynamic", std::move(dynamic)}};
}

Json CompressedConfig(std::string_view format, Json weights, Json inputs,
                      const std::vector<std::string>& ignored) {
  Json group = {{"format", format}, {"targets", {"Linear"}}};
  group["weights"] = std::move(weights);
  group["input_activations"] = std::move(inputs);
  group["output_activations"] = nullptr;
  return {{"config_groups", {{"group_0", group}}},
          {"format", format},
          {"ignore", ignored},
          {"kv_cache_scheme", nullptr},
          {"quant_method", "compressed-tensors"},
          {"quantization_status", "compressed"}};
}

Json CompressedNvfp4(const Scheme& scheme, const std::vector<std::string>& ignored) {
  return CompressedConfig("nvfp4-pack-quantized", CompressedArguments("float", 4, "tensor_group", 16, false),
                          scheme.activation.quantized()
                              ? CompressedArguments("float", 4, "tensor_group", 16, "local")
                              : Json(nullptr),
                          ignored);
}

Json CompressedMxfp4(const Scheme& scheme, const std::vector<std::string>& ignored) {
  Json weights = CompressedArguments("float", 4, "group", 32, false);
  weights["scale_dtype"] = "torch.uint8";
  Json inputs = nullptr;
  if (scheme.activation.quantized()) {
    inputs = CompressedArguments("float", 4, "group", 32, true);
    inputs["scale_dtype"] = "torch.uint8";
  }
  return CompressedConfig("mxfp4-pack-quantized", weights, inputs, ignored);
}

Json CompressedFp8(const Scheme&, const std::vector<std::string>& ignored) {
  return CompressedConfig("float-quantized", CompressedArguments("float", 8, "channel", nullptr, false),
                          CompressedArguments("float", 8, "token", nullptr, true), ignored);
}

Json CompressedInt8(const Scheme&, const std::vector<std::string>& ignored) {
  return CompressedConfig("int-quantized", CompressedArguments("int", 8, "channel", nullptr, false),
                          CompressedArguments("int", 8, "token", nullptr, true), ignored);
}

Json CompressedInt4(const Scheme& scheme, const std::vector<std::string>& ignored) {
  return CompressedConfig("pack-quantized",
                          CompressedArguments("int", 4, "group", scheme.weight.block.col, false), nullptr,
                          ignored);
}

Json DeepSeekFp8(const Scheme&, const std::vector<std::string>& ignored) {
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", {128, 128}},
          {"modules_to_not_convert", ignored}};
}

// ---- the tensors ----

constexpr Part kModelOptNvfp4A4[] = {{"weight", Source::kCodes, DType::kU8},
                                     {"weight_scale", Source::kBlockScale, DType::kF8E4M3},
                                     {"weight_scale_2", Source::kTensorScale, DType::kF32, true},
                                     {"input_scale", Source::kInputScale, DType::kF32, true}};
constexpr std::span<const Part> kModelOptNvfp4A16 = std::span(kModelOptNvfp4A4).first(3);
constexpr Part kCompressedNvfp4A4[] = {{"weight_packed", Source::kCodes, DType::kU8},
                                       {"weight_scale", Source::kBlockScale, DType::kF8E4M3},
                                       {"weight_global_scale", Source::kTensorScaleReciprocal, DType::kF32},
                                       {"input_global_scale", Source::kInputScaleReciprocal, DType::kF32}};
constexpr std::span<const Part> kCompressedNvfp4A16 = std::span(kCompressedNvfp4A4).first(3);
constexpr Part kCompressedMx4[] = {{"weight_packed", Source::kCodes, DType::kU8},
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
constexpr Part kCompressedInt4Group[] = {{"weight_packed", Source::kCodes, DType::kI32},
                                         {"weight_scale", Source::kBlockScale, DType::kBF16},
                                         {"weight_shape", Source::kMatrixShape, DType::kI64}};

template <Json (*kMake)(const Scheme& scheme, const std::vector<std::string>& ignored)>
std::string Text(const Scheme& scheme, const std::vector<std::string>& ignored) {
  return kMake(scheme, ignored).dump();
}

constexpr StorageRow kStorage[] = {
    {"nvfp4_w4a4", "modelopt", kModelOptNvfp4A4, Text<ModelOptNvfp4>, Text<ModelOptNvfp4SideFile>},
    {"nvfp4_w4a4", "compressed-tensors", kCompressedNvfp4A4, Text<CompressedNvfp4>, nullptr},
    {"nvfp4_w4a16", "modelopt", kModelOptNvfp4A16, Text<ModelOptNvfp4>, Text<ModelOptNvfp4SideFile>},
    {"nvfp4_w4a16", "compressed-tensors", kCompressedNvfp4A16, Text<CompressedNvfp4>, nullptr},
    {"mxfp4_w4a4", "compressed-tensors", kCompressedMx4, Text<CompressedMxfp4>, nullptr},
    {"mxfp4_w4a16", "compressed-tensors", kCompressedMx4, Text<CompressedMxfp4>, nullptr},
    {"fp8_w8a8:channel", "compressed-tensors", kCompressedFp8Channel, Text<CompressedFp8>, nullptr},
    {"fp8_w8a8:tensor_static", "modelopt", kModelOptFp8Tensor, Text<ModelOptFp8>, Text<ModelOptFp8SideFile>},
    {"fp8_w8a8:block128", "deepseek", kDeepSeekBlock, Text<DeepSeekFp8>, nullptr},
    {"int8_w8a8:channel", "compressed-tensors", kCompressedInt8Channel, Text<CompressedInt8>, nullptr},
    {"int4_w4a16:g128", "compressed-tensors", kCompressedInt4Group, Text<CompressedInt4>, nullptr},
    {"int4_w4a16:g64", "compressed-tensors", kCompressedInt4Group, Text<CompressedInt4>, nullptr},
    {"int4_w4a16:g32", "compressed-tensors", kCompressedInt4Group, Text<CompressedInt4>, nullptr},
};

Shape ShapeOf(const Part& part, const WeightFormat& format, int64_t rows, int64_t cols) {
  switch (part.source) {
    case Source::kCodes:
      return {rows, cols * DTypeBits(format.element) / DTypeBits(part.dtype)};
    case Source::kBlockScale:
      return {CeilDiv(rows, format.block.row < 0 ? rows : format.block.row),
              CeilDiv(cols, format.block.col < 0 ? cols : format.block.col)};
    case Source::kChannelScale:
      return {rows, 1};
    case Source::kMatrixShape:
      return {2};
    default:
      return part.scalar ? Shape{} : Shape{1};
  }
}

std::string NameOf(std::string_view projection, const Part& part) {
  return fmt::format("{}.{}", projection, part.suffix);
}

Result<Tensor> SingleValue(float value, const Shape& shape) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kF32, shape));
  std::memcpy(tensor.mutable_view().data(), &value, sizeof value);
  return tensor;
}

Result<Tensor> DataOf(const Part& part, const QuantizedMatrix& matrix, float input_scale,
                      const Shape& shape) {
  // The same bytes under the dtype and shape that the file gives them.
  const auto as_stored = [&part, &shape](const Tensor& tensor) {
    return Tensor::Borrow(TensorView(tensor.view().data(), part.dtype, shape), tensor.owner());
  };
  switch (part.source) {
    case Source::kCodes:
      return as_stored(matrix.codes);
    case Source::kBlockScale:
      return as_stored(matrix.block_scale);
    case Source::kChannelScale:
      return as_stored(matrix.channel_scale);
    case Source::kTensorScale:
      return SingleValue(*matrix.tensor_scale, shape);
    case Source::kTensorScaleReciprocal:
      return SingleValue(1.0F / *matrix.tensor_scale, shape);
    case Source::kInputScale:
      return SingleValue(input_scale, shape);
    case Source::kInputScaleReciprocal:
      return SingleValue(1.0F / input_scale, shape);
    case Source::kMatrixShape: {
      FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kI64, shape));
      tensor.mutable_view().as<int64_t>()[0] = matrix.rows;
      tensor.mutable_view().as<int64_t>()[1] = matrix.cols;
      return tensor;
    }
  }
  return Tensor();
}

}  // namespace

const StorageRow* FindStorage(const Scheme& scheme, std::string_view preferred_producer) {
  const StorageRow* found = nullptr;
  for (const StorageRow& row : kStorage) {
    // By formats, not by name: "fp8_w8a8" and "fp8_w8a8:channel" are one scheme.
    const Result<Scheme> stored = ParseScheme(row.scheme);
    if (stored.ok() && stored->weight == scheme.weight && stored->activation == scheme.activation &&
        (found == nullptr || row.producer == preferred_producer)) {
      found = &row;
    }
  }
  return found;
}

std::string StorableSchemes() {
  std::string names = "unquantized";
  std::string_view last;
  for (const StorageRow& row : kStorage) {
    if (row.scheme != last) {
      names += fmt::format(", {}", row.scheme);
    }
    last = row.scheme;
  }
  return names;
}

std::vector<TensorSpec> SpecsOf(const StorageRow& row, const Scheme& scheme, std::string_view projection,
                                int64_t rows, int64_t cols) {
  std::vector<TensorSpec> specs;
  for (const Part& part : row.parts) {
    specs.push_back({NameOf(projection, part), part.dtype, ShapeOf(part, scheme.weight, rows, cols)});
  }
  return specs;
}

Result<std::vector<NamedTensor>> Store(const StorageRow& row, const QuantizedMatrix& matrix,
                                       float input_scale, std::string_view projection) {
  std::vector<NamedTensor> tensors;
  for (const Part& part : row.parts) {
    const Shape shape = ShapeOf(part, matrix.format, matrix.rows, matrix.cols);
    FMOE_ASSIGN_OR_RETURN(Tensor tensor, DataOf(part, matrix, input_scale, shape));
    if (tensor.empty() || tensor.view().total_bytes() != PackedBytes(part.dtype, shape.count())) {
      return Status::Unsupported("the quantizer made no tensor for this part")
          .WithTensor(NameOf(projection, part));
    }
    tensors.push_back({NameOf(projection, part), std::move(tensor)});
  }
  return tensors;
}

}  // namespace fusedmoe::sample
