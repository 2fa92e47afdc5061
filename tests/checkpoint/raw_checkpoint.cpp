#include "checkpoint/raw_checkpoint.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <utility>

#include "checkpoint/access.hpp"

namespace fusedmoe::testing_support {
namespace {

std::string Layer(const std::string& rest) {
  return "model.layers.0.mlp." + rest;
}

int64_t Count(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t dim : shape) {
    count *= dim;
  }
  return count;
}

nlohmann::ordered_json CtGroup(const nlohmann::ordered_json& weights, const nlohmann::ordered_json& inputs,
                               const std::string& format) {
  return {{"quant_method", "compressed-tensors"},
          {"version", "0.20.0"},
          {"format", format},
          {"config_groups",
           {{"group_0", {{"targets", {"Linear"}}, {"weights", weights}, {"input_activations", inputs}}}}},
          {"ignore", {"lm_head", "re:.*mlp.gate$"}}};
}

// The tensors of one projection [rows, cols].
std::vector<RawTensor> Projection(const std::string& format, const std::string& name, int64_t rows,
                                  int64_t cols) {
  const auto at = [&](const char* suffix) { return name + suffix; };
  if (format == "modelopt_nvfp4") {
    return {Bytes(at(".weight"), "U8", {rows, cols / 2}, 1, 0x21),
            Bytes(at(".weight_scale"), "F8_E4M3", {rows, cols / 16}, 1, 0x38),
            Floats(at(".weight_scale_2"), {}, 0.5F), Floats(at(".input_scale"), {}, 0.25F)};
  }
  if (format == "modelopt_fp8") {
    return {Bytes(at(".weight"), "F8_E4M3", {rows, cols}, 1, 0x38), Floats(at(".weight_scale"), {}, 0.5F),
            Floats(at(".input_scale"), {}, 0.25F)};
  }
  if (format == "ct_nvfp4") {
    return {Bytes(at(".weight_packed"), "U8", {rows, cols / 2}, 1, 0x21),
            Bytes(at(".weight_scale"), "F8_E4M3", {rows, cols / 16}, 1, 0x38),
            Floats(at(".weight_global_scale"), {1}, 2.0F), Floats(at(".input_global_scale"), {1}, 4.0F)};
  }
  if (format == "ct_mxfp4") {
    return {Bytes(at(".weight_packed"), "U8", {rows, cols / 2}, 1, 0x21),
            Bytes(at(".weight_scale"), "U8", {rows, cols / 32}, 1, 127)};
  }
  if (format == "ct_int4") {
    return {Bytes(at(".weight_packed"), "I32", {rows, cols / 8}, 4, 0x97),
            Bf16(at(".weight_scale"), {rows, cols / 32}, 0.5F), Longs(at(".weight_shape"), {rows, cols})};
  }
  if (format == "ct_int8") {
    return {Bytes(at(".weight"), "I8", {rows, cols}, 1, 3), Bf16(at(".weight_scale"), {rows, 1}, 0.5F)};
  }
  if (format == "fp8_block") {
    return {Bytes(at(".weight"), "F8_E4M3", {rows, cols}, 1, 0x38),
            Floats(at(".weight_scale_inv"), {(rows + 15) / 16, (cols + 15) / 16}, 0.5F)};
  }
  if (format == "gptq" || format == "autoround") {
    std::vector<RawTensor> tensors = {Bytes(at(".qweight"), "I32", {cols / 8, rows}, 4, 0x97),
                                      Bytes(at(".qzeros"), "I32", {cols / 32, rows / 8}, 4, 0x77),
                                      Bf16(at(".scales"), {cols / 32, rows}, 0.5F)};
    if (format == "gptq") {
      std::vector<int32_t> groups(static_cast<size_t>(cols));
      for (int64_t c = 0; c < cols; ++c) {
        groups[static_cast<size_t>(c)] = static_cast<int32_t>((cols - 1 - c) / 32);
      }
      tensors.push_back(Ints(at(".g_idx"), {cols}, groups));
    }
    return tensors;
  }
  if (format == "awq") {
    return {Bytes(at(".qweight"), "I32", {cols, rows / 8}, 4, 0x97),
            Bytes(at(".qzeros"), "I32", {cols / 32, rows / 8}, 4, 0x77),
            Bf16(at(".scales"), {cols / 32, rows}, 0.5F)};
  }
  if (format == "quark_mxfp4") {
    return {Bytes(at(".weight"), "U8", {rows, cols / 2}, 1, 0x21),
            Bytes(at(".weight_scale"), "U8", {rows, cols / 32}, 1, 127)};
  }
  return {Bf16(at(".weight"), {rows, cols}, 0.5F)};
}

nlohmann::ordered_json QuantizationConfig(const std::string& format) {
  const nlohmann::ordered_json none = nullptr;
  if (format == "modelopt_nvfp4") {
    return {{"quant_method", "modelopt"},
            {"quant_algo", "NVFP4"},
            {"group_size", 16},
            {"ignore", {"lm_head", "*mlp.gate"}}};
  }
  if (format == "modelopt_fp8") {
    return {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}, {"ignore", {"lm_head", "*mlp.gate"}}};
  }
  const nlohmann::ordered_json fp4 = {
      {"num_bits", 4}, {"type", "float"}, {"strategy", "tensor_group"}, {"group_size", 16}};
  if (format == "ct_nvfp4") {
    nlohmann::ordered_json local = fp4;
    local["dynamic"] = "local";
    return CtGroup(fp4, local, "nvfp4-pack-quantized");
  }
  if (format == "ct_mxfp4") {
    return CtGroup({{"num_bits", 4}, {"type", "float"}, {"strategy", "group"}, {"group_size", 32}}, none,
                   "mxfp4-pack-quantized");
  }
  if (format == "ct_int4") {
    return CtGroup({{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 32}}, none,
                   "pack-quantized");
  }
  if (format == "ct_int8") {
    return CtGroup({{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}},
                   {{"num_bits", 8}, {"type", "int"}, {"strategy", "token"}, {"dynamic", true}},
                   "int-quantized");
  }
  if (format == "fp8_block") {
    return {{"quant_method", "fp8"}, {"activation_scheme", "dynamic"}, {"weight_block_size", {16, 16}}};
  }
  if (format == "gptq") {
    return {{"quant_method", "gptq"},
            {"bits", 4},
            {"group_size", 32},
            {"desc_act", true},
            {"checkpoint_format", "gptq"}};
  }
  if (format == "autoround") {
    return {{"quant_method", "auto-round"},
            {"bits", 4},
            {"group_size", 32},
            {"sym", true},
            {"packing_format", "auto_round:auto_gptq"}};
  }
  if (format == "awq") {
    return {
        {"quant_method", "awq"}, {"bits", 4}, {"group_size", 32}, {"zero_point", true}, {"version", "gemm"}};
  }
  if (format == "quark_mxfp4") {
    return {{"quant_method", "quark"},
            {"global_quant_config",
             {{"weight",
               {{"dtype", "fp4"}, {"qscheme", "per_group"}, {"group_size", 32}, {"scale_format", "e8m0"}}}}},
            {"exclude", {"*.mlp.gate"}}};
  }
  return none;
}

}  // namespace

std::string Container(const std::string& header, const std::string& data) {
  const auto length = static_cast<uint64_t>(header.size());
  std::string file(8, '\0');
  std::memcpy(file.data(), &length, 8);
  return file + header + data;
}

nlohmann::ordered_json Header(const std::vector<RawTensor>& tensors) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  int64_t offset = 0;
  for (const RawTensor& tensor : tensors) {
    const int64_t end = offset + static_cast<int64_t>(tensor.bytes.size());
    header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  return header;
}

std::string Safetensors(const std::vector<RawTensor>& tensors) {
  std::string data;
  for (const RawTensor& tensor : tensors) {
    data += tensor.bytes;
  }
  return Container(Header(tensors).dump(), data);
}

RawTensor Floats(std::string name, std::vector<int64_t> shape, float value) {
  RawTensor tensor{std::move(name), "F32", std::move(shape), ""};
  for (int64_t i = 0; i < Count(tensor.shape); ++i) {
    tensor.bytes.append(reinterpret_cast<const char*>(&value), 4);
  }
  return tensor;
}

RawTensor Bf16(std::string name, std::vector<int64_t> shape, float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  const auto code = static_cast<uint16_t>(bits >> 16);
  RawTensor tensor{std::move(name), "BF16", std::move(shape), ""};
  for (int64_t i = 0; i < Count(tensor.shape); ++i) {
    tensor.bytes.append(reinterpret_cast<const char*>(&code), 2);
  }
  return tensor;
}

RawTensor Bytes(std::string name, std::string dtype, std::vector<int64_t> shape, int64_t element_bytes,
                unsigned char byte) {
  RawTensor tensor{std::move(name), std::move(dtype), std::move(shape), ""};
  tensor.bytes.assign(static_cast<size_t>(Count(tensor.shape) * element_bytes), static_cast<char>(byte));
  return tensor;
}

RawTensor Ints(std::string name, std::vector<int64_t> shape, const std::vector<int32_t>& values) {
  return {std::move(name), "I32", std::move(shape),
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * 4)};
}

RawTensor Longs(std::string name, const std::vector<int64_t>& values) {
  return {std::move(name),
          "I64",
          {static_cast<int64_t>(values.size())},
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * 8)};
}

TinyModel::TinyModel(const std::string& format) {
  config = {{"model_type", "qwen3_moe"}, {"hidden_size", kHidden},   {"moe_intermediate_size", kIntermediate},
            {"num_experts", kExperts},   {"num_experts_per_tok", 1}, {"num_hidden_layers", 1},
            {"hidden_act", "silu"},      {"norm_topk_prob", true},   {"torch_dtype", "bfloat16"}};
  if (const auto quantization = QuantizationConfig(format); !quantization.is_null()) {
    config["quantization_config"] = quantization;
  }
  tensors.push_back(Bf16(Layer("gate.weight"), {kExperts, kHidden}, 0.1F));
  for (int64_t e = 0; e < kExperts; ++e) {
    for (const std::string projection : {"gate_proj", "up_proj", "down_proj"}) {
      const bool down = projection == "down_proj";
      const std::string name = Layer("experts." + std::to_string(e) + "." + projection);
      for (RawTensor& tensor :
           Projection(format, name, down ? kHidden : kIntermediate, down ? kIntermediate : kHidden)) {
        tensors.push_back(std::move(tensor));
      }
    }
  }
}

RawTensor& TinyModel::Find(const std::string& name) {
  const auto it = std::find_if(tensors.begin(), tensors.end(),
                               [&](const RawTensor& tensor) { return tensor.name == name; });
  if (it == tensors.end()) {
    throw std::runtime_error("the test asks for a tensor that it did not make: " + name);
  }
  return *it;
}

void TinyModel::Drop(const std::string& name) {
  std::erase_if(tensors, [&](const RawTensor& tensor) { return tensor.name == name; });
}

void TinyModel::WriteTo(const TemporaryDirectory& folder) const {
  folder.Write("config.json", config.dump());
  folder.Write("model.safetensors", Safetensors(tensors));
}

namespace {

std::atomic<int64_t> malformed{0};

class MalformedCorpus : public testing::Environment {
 public:
  void TearDown() override {
    if (testing::GTEST_FLAG(filter) != "*") {
      return;  // a part of the tests makes a part of the corpus
    }
    std::printf("[   INFO   ] %lld malformed checkpoints\n", static_cast<long long>(malformed.load()));
    EXPECT_GE(malformed.load(), kLeastMalformed);
  }
};

[[maybe_unused]] const testing::Environment* const kCorpus =
    testing::AddGlobalTestEnvironment(new MalformedCorpus);

}  // namespace

void CountMalformed() {
  ++malformed;
}

WrittenModel::WrittenModel(const TinyModel& model) : source(Status::Usage("the checkpoint was not opened")) {
  model.WriteTo(folder);
  auto opened = Checkpoint::Open(folder.path());
  if (opened.ok()) {
    checkpoint = *std::move(opened);
    source = checkpoint->Experts(0);
  } else {
    source = std::move(opened).status();
  }
}

Status LoadEverything(const std::filesystem::path& folder, const CheckpointOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(folder.string(), options));
  FMOE_RETURN_IF_ERROR(checkpoint->Describe(0).status());
  FMOE_RETURN_IF_ERROR(checkpoint->LoadRouter(0).status());
  FMOE_ASSIGN_OR_RETURN(const ExpertSource source, checkpoint->Experts(0));
  for (int64_t e = 0; e < source.num_local_experts; ++e) {
    FMOE_RETURN_IF_ERROR(source.load(e).status());
  }
  FMOE_ASSIGN_OR_RETURN(const auto shared, checkpoint->SharedExperts(0));
  if (shared) {
    FMOE_RETURN_IF_ERROR(shared->source.load(0).status());
  }
  return Status::Ok();
}

void ExpectBytesAlone(const Checkpoint& checkpoint, const std::string& name) {
  const checkpoint::TensorStore& store = checkpoint::Access::Store(checkpoint);
  const auto whole = store.Load(name);
  ASSERT_TRUE(whole.ok()) << whole.status().ToString();
  const int64_t bytes = whole->view().total_bytes();
  const std::pair<int64_t, int64_t> parts[] = {{0, bytes}, {0, 1}, {5, 70}, {bytes - 3, 3}, {bytes, 0}};
  for (const auto& [offset, count] : parts) {
    const auto read = store.LoadBytes(name, offset, count);
    ASSERT_TRUE(read.ok()) << read.status().ToString();
    ASSERT_EQ(read->size, count);
    EXPECT_EQ(std::memcmp(read->data, whole->view().data() + offset, static_cast<size_t>(count)), 0)
        << offset << " " << count;
  }
  EXPECT_EQ(store.LoadBytes(name, bytes - 3, 4).status().code(), StatusCode::kBadInput);
}

Status LoadEverything(const TinyModel& model) {
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  return LoadEverything(folder.path());
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
  return text;
}

void ExpectRefused(const std::string& what, const TinyModel& model, const Expected& expected) {
  SCOPED_TRACE(what);
  CountMalformed();
  const Status status = LoadEverything(model);
  EXPECT_EQ(status.code(), expected.code) << status.ToString();
  EXPECT_FALSE(status.file().empty()) << status.ToString();
  if (!expected.tensor.empty()) {
    EXPECT_EQ(status.tensor(), expected.tensor) << status.ToString();
  }
}

}  // namespace fusedmoe::testing_support
