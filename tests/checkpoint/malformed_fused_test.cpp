// Layers whose experts share tensors, and what else a layer has beside its experts, damaged in every way that
// a tensor can be; then every value of every configuration at its limits.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;
using Json = nlohmann::ordered_json;

Json Config(const std::string& type, Json own) {
  Json config = {
      {"model_type", type},      {"hidden_size", kHidden},   {"moe_intermediate_size", kIntermediate},
      {"num_experts", kExperts}, {"num_experts_per_tok", 1}, {"num_hidden_layers", 1},
      {"hidden_act", "silu"},    {"torch_dtype", "bfloat16"}};
  config.update(own);
  return config;
}

/// Layers with stacked experts and with everything that a router can have; `tensors` are all needed.
std::vector<std::pair<std::string, TinyModel>> Layers() {
  std::vector<std::pair<std::string, TinyModel>> layers;
  const int64_t e = kExperts, h = kHidden, i = kIntermediate;
  const auto add = [&](const std::string& name, Json config, std::vector<RawTensor> tensors) {
    TinyModel model("bf16");
    model.config = std::move(config);
    model.tensors = std::move(tensors);
    layers.emplace_back(name, std::move(model));
  };
  const std::string mlp = "model.layers.0.mlp.", feed = "model.layers.0.feed_forward.", ffn = "layers.0.ffn.",
                    sparse = "model.layers.0.block_sparse_moe.";
  add("gpt_oss_mxfp4", Config("gpt_oss", {{"quantization_config", {{"quant_method", "mxfp4"}}}}),
      {Bf16(mlp + "router.weight", {e, h}, 0.1F), Bf16(mlp + "router.bias", {e}, 0.1F),
       Bytes(mlp + "experts.gate_up_proj_blocks", "U8", {e, 2 * i, h / 32, 16}, 1, 0x21),
       Bytes(mlp + "experts.gate_up_proj_scales", "U8", {e, 2 * i, h / 32}, 1, 127),
       Bf16(mlp + "experts.gate_up_proj_bias", {e, 2 * i}, 0.5F),
       Bytes(mlp + "experts.down_proj_blocks", "U8", {e, h, i / 32, 16}, 1, 0x21),
       Bytes(mlp + "experts.down_proj_scales", "U8", {e, h, i / 32}, 1, 127),
       Bf16(mlp + "experts.down_proj_bias", {e, h}, 0.5F)});
  // Each expert has its gate and up rows in one matrix, as Quark writes gpt-oss.
  const auto quark = [](const Json& weight, const Json& input) -> Json {
    return {{"quant_method", "quark"},
            {"global_quant_config", {{"weight", weight}, {"input_tensors", input}}},
            {"exclude", {"*.mlp.router"}}};
  };
  const Json mxfp4 = {
      {"dtype", "fp4"}, {"qscheme", "per_group"}, {"group_size", 32}, {"scale_format", "e8m0"}};
  const Json fp8 = {{"dtype", "fp8_e4m3"}, {"qscheme", "per_tensor"}, {"is_dynamic", false}};
  for (const bool is_fp8 : {false, true}) {
    std::vector<RawTensor> tensors = {Bf16(mlp + "router.weight", {e, h}, 0.1F),
                                      Bf16(mlp + "router.bias", {e}, 0.1F)};
    for (const std::string expert : {"experts.0.", "experts.1."}) {
      for (const bool down : {false, true}) {
        const std::string module = mlp + expert + (down ? "down_proj" : "gate_up_proj");
        const int64_t rows = down ? h : 2 * i, cols = down ? i : h;
        tensors.push_back(Floats(module + ".bias", {rows}, 0.5F));
        if (is_fp8) {
          tensors.push_back(Bytes(module + ".weight", "F8_E4M3", {rows, cols}, 1, 0x38));
          tensors.push_back(Floats(module + ".weight_scale", {}, 0.5F));
          tensors.push_back(Floats(module + ".input_scale", {}, 0.5F));
        } else {
          tensors.push_back(Bytes(module + ".weight", "U8", {rows, cols / 2}, 1, 0x21));
          tensors.push_back(Bytes(module + ".weight_scale", "U8", {rows, cols / 32}, 1, 127));
        }
      }
    }
    add(is_fp8 ? "gpt_oss_quark_fp8" : "gpt_oss_quark_mxfp4",
        Config("gpt_oss", {{"quantization_config", is_fp8 ? quark(fp8, fp8) : quark(mxfp4, mxfp4)}}),
        std::move(tensors));
  }
  add("llama4_modelopt_nvfp4",
      Config("llama4_text",
             {{"intermediate_size", i},
              {"quantization_config",
               {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"ignore", {feed + "router"}}}}}),
      {Bf16(feed + "router.weight", {e, h}, 0.1F),
       Bytes(feed + "experts.gate_up_proj", "U8", {e, h / 2, 2 * i}, 1, 0x21),
       Bytes(feed + "experts.gate_up_proj_weight_scale", "F8_E4M3", {e, h / 16, 2 * i}, 1, 0x38),
       Floats(feed + "experts.gate_up_proj_weight_scale_2", {}, 0.5F),
       Floats(feed + "experts.gate_up_proj_input_scale", {}, 0.5F),
       Bytes(feed + "experts.down_proj", "U8", {e, i / 2, h}, 1, 0x21),
       Bytes(feed + "experts.down_proj_weight_scale", "F8_E4M3", {e, i / 16, h}, 1, 0x38),
       Floats(feed + "experts.down_proj_weight_scale_2", {}, 0.5F),
       Floats(feed + "experts.down_proj_input_scale", {}, 0.5F)});
  add("llama4_modelopt_mxfp8",
      Config("llama4_text",
             {{"quantization_config",
               {{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}, {"ignore", {feed + "router"}}}}}),
      {Bf16(feed + "router.weight", {e, h}, 0.1F),
       Bytes(feed + "experts.gate_up_proj", "F8_E4M3", {e, h, 2 * i}, 1, 0x38),
       Bytes(feed + "experts.gate_up_proj_weight_scale", "U8", {e, h, 2 * i / 32}, 1, 127),
       Bytes(feed + "experts.down_proj", "F8_E4M3", {e, i, h}, 1, 0x38),
       Bytes(feed + "experts.down_proj_weight_scale", "U8", {e, i, h / 32}, 1, 127)});
  add("fused_bf16", Config("qwen3_5_moe_text", {{"shared_expert_intermediate_size", i}}),
      {Bf16(mlp + "gate.weight", {e, h}, 0.1F), Bf16(mlp + "experts.gate_up_proj", {e, 2 * i, h}, 0.5F),
       Bf16(mlp + "experts.down_proj", {e, h, i}, 0.5F),
       Bf16(mlp + "shared_expert.gate_proj.weight", {i, h}, 0.5F),
       Bf16(mlp + "shared_expert.up_proj.weight", {i, h}, 0.5F),
       Bf16(mlp + "shared_expert.down_proj.weight", {h, i}, 0.5F),
       Bf16(mlp + "shared_expert_gate.weight", {1, h}, 0.5F)});
  add("granite_bf16", Config("granitemoe", {{"intermediate_size", i}}),
      {Bf16(sparse + "router.layer.weight", {e, h}, 0.1F),
       Bf16(sparse + "input_linear.weight", {e, 2 * i, h}, 0.5F),
       Bf16(sparse + "output_linear.weight", {e, h, i}, 0.5F)});
  add("deepseek_v4_hash", Config("deepseek_v4", {{"n_routed_experts", e}, {"scoring_func", "sqrtsoftplus"}}),
      {Bf16(ffn + "gate.weight", {e, h}, 0.1F), Floats(ffn + "gate.bias", {e}, 0.25F),
       Ints(ffn + "gate.tid2eid", {4, 1}, {0, 1, 1, 0}), Bf16(ffn + "experts.0.w1.weight", {i, h}, 0.5F),
       Bf16(ffn + "experts.0.w2.weight", {h, i}, 0.5F), Bf16(ffn + "experts.0.w3.weight", {i, h}, 0.5F),
       Bf16(ffn + "experts.1.w1.weight", {i, h}, 0.5F), Bf16(ffn + "experts.1.w2.weight", {h, i}, 0.5F),
       Bf16(ffn + "experts.1.w3.weight", {i, h}, 0.5F)});
  return layers;
}

/// What may be absent, or of another length: its absence means another layer, not a damaged one.
bool IsOptional(const std::string& name) {
  return name.ends_with("router.bias") || name.ends_with("gate.bias") || name.ends_with("tid2eid");
}

void ExpectRefused(const std::string& what, const TinyModel& model, const std::string& tensor) {
  SCOPED_TRACE(what);
  CountMalformed();
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  for (const IoMode io : {IoMode::kPread, IoMode::kMmap}) {
    const Status status = LoadEverything(folder.path(), {.io = io});
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << status.ToString();
    EXPECT_NE(status.file().find(folder.path().string()), std::string::npos) << status.ToString();
    EXPECT_EQ(status.tensor(), tensor) << status.ToString();
  }
}

TEST(MalformedFused, SoundLayers_Load) {
  for (const auto& [name, model] : Layers()) {
    const Status status = LoadEverything(model);
    EXPECT_TRUE(status.ok()) << name << ": " << status.ToString();
  }
}

TEST(MalformedFused, MissingTensor_IsNamed) {
  for (const auto& [name, sound] : Layers()) {
    for (const RawTensor& tensor : sound.tensors) {
      // Without its first tensor a stack of experts is no stack, and the layer has none; of fused shared
      // experts likewise.
      const bool telling = tensor.name.ends_with("gate_up_proj_blocks") ||
                           tensor.name.ends_with("gate_up_proj") ||
                           tensor.name.ends_with("input_linear.weight") ||
                           tensor.name.ends_with("shared_expert.up_proj.weight");
      if (IsOptional(tensor.name) || telling) {
        continue;
      }
      TinyModel model = sound;
      model.Drop(tensor.name);
      ExpectRefused(name + " without " + tensor.name, model, tensor.name);
    }
  }
}

TEST(MalformedFused, WrongDtype_IsNamed) {
  for (const auto& [name, sound] : Layers()) {
    for (const RawTensor& tensor : sound.tensors) {
      TinyModel model = sound;
      std::string& dtype = model.Find(tensor.name).dtype;
      dtype = dtype == "F32" || dtype == "I32" ? "U32" : dtype == "BF16" ? "I16" : "BOOL";
      ExpectRefused(name + " with a strange " + tensor.name, model, tensor.name);
    }
  }
}

TEST(MalformedFused, WrongShape_IsNamed) {
  for (const auto& [name, sound] : Layers()) {
    for (const RawTensor& tensor : sound.tensors) {
      for (size_t axis = 0; axis < tensor.shape.size(); ++axis) {
        // The vocabulary may be of any size; the rows of a shared expert are what the tensor says.
        if ((tensor.name.ends_with("tid2eid") && axis == 0) ||
            tensor.name.find("shared_expert") != std::string::npos) {
          continue;
        }
        for (const int64_t delta : {-1, 1}) {
          if (tensor.shape[axis] + delta < 1) {
            continue;
          }
          TinyModel model = sound;
          RawTensor& damaged = model.Find(tensor.name);
          const size_t each = damaged.bytes.size() / static_cast<size_t>(damaged.shape[axis]);
          damaged.shape[axis] += delta;
          damaged.bytes.resize(each * static_cast<size_t>(damaged.shape[axis]), damaged.bytes[0]);
          ExpectRefused(
              name + " " + tensor.name + " axis " + std::to_string(axis) + " by " + std::to_string(delta),
              model, tensor.name);
        }
      }
    }
  }
}

// The bytes of gpt-oss' groups lie in an axis of their own, the last.
TEST(MalformedFused, AxesOfBlocksExchanged_AreNamed) {
  const auto layers = Layers();
  for (const std::string name :
       {"model.layers.0.mlp.experts.gate_up_proj_blocks", "model.layers.0.mlp.experts.down_proj_blocks"}) {
    TinyModel model = layers.front().second;
    std::vector<int64_t>& shape = model.Find(name).shape;
    std::swap(shape[2], shape[3]);
    ExpectRefused(name + " with its last axes exchanged", model, name);
    shape = {shape[0], shape[1], shape[2] / 2, shape[3] * 2};
    ExpectRefused(name + " in bytes of half groups", model, name);
  }
}

TEST(MalformedFused, BadValues_AreNamed) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (const auto& [name, sound] : Layers()) {
    for (const RawTensor& tensor : sound.tensors) {
      const bool codes = tensor.name.ends_with("blocks") || tensor.dtype == "U8" || tensor.dtype == "F8_E4M3";
      const bool scale = tensor.name.find("scale") != std::string::npos;
      if (codes && scale) {
        for (const int code :
             tensor.dtype == "U8" ? std::vector<int>{0xff} : std::vector<int>{0x7f, 0xff, 0xb8}) {
          TinyModel model = sound;
          model.Find(tensor.name).bytes.back() = static_cast<char>(code);
          ExpectRefused(name + " " + tensor.name + " code " + std::to_string(code), model, tensor.name);
        }
      }
      const bool vector = tensor.name.ends_with("bias");
      if (!vector && !(scale && tensor.dtype == "F32")) {
        continue;
      }
      for (const float value : {nan, infinity, -infinity}) {
        TinyModel model = sound;
        RawTensor& damaged = model.Find(tensor.name);
        uint32_t bits = 0;
        std::memcpy(&bits, &value, 4);
        const size_t width = damaged.dtype == "F32" ? 4 : 2;
        const uint32_t stored = width == 4 ? bits : bits >> 16;
        std::memcpy(damaged.bytes.data() + damaged.bytes.size() - width, &stored, width);
        ExpectRefused(name + " " + tensor.name + " " + std::to_string(value), model, tensor.name);
      }
    }
  }
  for (const int32_t expert :
       {-1, 2, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()}) {
    for (auto& [name, model] : Layers()) {
      if (name != "deepseek_v4_hash") {
        continue;
      }
      const std::string table = "layers.0.ffn.gate.tid2eid";
      std::memcpy(model.Find(table).bytes.data() + 4, &expert, 4);
      ExpectRefused("token table with expert " + std::to_string(expert), model, table);
    }
  }
}

void Leaves(Json& json, const std::string& path, std::vector<std::pair<std::string, Json*>>& out) {
  if (json.is_object()) {
    for (auto& [key, child] : json.items()) {
      Leaves(child, path + "/" + key, out);
    }
  } else if (json.is_array()) {
    for (Json& child : json) {
      Leaves(child, path + "/*", out);
    }
  }
  out.emplace_back(path, &json);
}

const std::vector<Json> kLimits = {nullptr,
                                   0,
                                   1,
                                   -1,
                                   2147483647,
                                   2147483648,
                                   4294967296,
                                   std::numeric_limits<int64_t>::max(),
                                   std::numeric_limits<int64_t>::min(),
                                   1e300,
                                   -0.5,
                                   true,
                                   "",
                                   "re:(((a*)*)*)*b",
                                   Json::array(),
                                   Json::object()};

std::vector<std::pair<std::string, TinyModel>> Configured() {
  std::vector<std::pair<std::string, TinyModel>> models = Layers();
  for (const std::string format :
       {"bf16", "modelopt_nvfp4", "modelopt_fp8", "ct_nvfp4", "ct_mxfp4", "ct_int4", "ct_int8", "fp8_block",
        "gptq", "awq", "quark_mxfp4", "autoround"}) {
    models.emplace_back(format, TinyModel(format));
  }
  return models;
}

class MalformedConfiguration : public testing::TestWithParam<size_t> {};

// Whatever stands there, the answer is a layer or a refusal that names the file. A third of all pairs of
// value and limit.
TEST_P(MalformedConfiguration, ValuesAtTheirLimits) {
  const std::vector<std::pair<std::string, TinyModel>> all = Configured();
  const auto& [name, sound] = all[GetParam()];
  const TemporaryDirectory folder;
  sound.WriteTo(folder);
  Json config = sound.config;
  std::vector<std::pair<std::string, Json*>> leaves;
  Leaves(config, "", leaves);
  for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
    Json& value = *leaves[leaf].second;
    const Json before = value;
    for (size_t limit = (leaf + GetParam()) % 3; limit < kLimits.size(); limit += 3) {
      value = kLimits[limit];
      folder.Write("config.json", config.dump());
      const Status status = LoadEverything(folder.path());
      SCOPED_TRACE(name + " " + leaves[leaf].first + " = " + value.dump() + ": " + status.ToString());
      if (!status.ok()) {
        CountMalformed();
        EXPECT_TRUE(status.code() == StatusCode::kBadInput || status.code() == StatusCode::kUnsupported);
        EXPECT_NE(status.file().find(folder.path().string()), std::string::npos);
      }
      value = before;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MalformedConfiguration, testing::Range<size_t>(0, Configured().size()),
                         [](const auto& parameter) { return Configured()[parameter.param].first; });

}  // namespace
}  // namespace fusedmoe
