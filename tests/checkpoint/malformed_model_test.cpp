// Sound containers whose contents lie: configuration, quantization metadata, tensors and scales. Each is
// refused with the expected code, and the error names file and tensor.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

const std::string kGate = "model.layers.0.mlp.experts.0.gate_proj";

struct Expected {
  StatusCode code = StatusCode::kBadInput;
  std::string tensor;  // empty: any
};

void ExpectRefused(const std::string& what, const TinyModel& model, const Expected& expected = {}) {
  SCOPED_TRACE(what);
  CountMalformed();
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  const Status status = LoadEverything(folder.path());
  EXPECT_EQ(status.code(), expected.code) << status.ToString();
  EXPECT_FALSE(status.file().empty()) << status.ToString();
  if (!expected.tensor.empty()) {
    EXPECT_EQ(status.tensor(), expected.tensor) << status.ToString();
  }
}

const std::vector<std::string> kFormats = {
    "bf16",    "modelopt_nvfp4", "modelopt_fp8", "ct_nvfp4", "ct_mxfp4",    "ct_int4",
    "ct_int8", "fp8_block",      "gptq",         "awq",      "quark_mxfp4", "autoround"};

TEST(MalformedModel, SoundModels_Load) {
  for (const std::string& format : kFormats) {
    const TemporaryDirectory folder;
    TinyModel(format).WriteTo(folder);
    const Status status = LoadEverything(folder.path());
    EXPECT_TRUE(status.ok()) << format << ": " << status.ToString();
  }
}

// Odd, and no damage: every matrix keeps its values, in the one type that holds them all.
TEST(MalformedModel, UnquantizedMatricesOfSeveralTypes_AreWidened) {
  for (const std::string odd : {"0.up_proj", "1.down_proj"}) {
    for (const bool half : {true, false}) {
      TinyModel model("bf16");
      RawTensor& tensor = model.Find("model.layers.0.mlp.experts." + odd + ".weight");
      tensor =
          half ? Bytes(tensor.name, "F16", tensor.shape, 2, 0x31) : Floats(tensor.name, tensor.shape, 0.3F);
      const WrittenModel written(model);
      const auto& source = written.source;
      ASSERT_TRUE(source.ok()) << source.status().ToString();
      EXPECT_EQ(source->scheme.weight.element, DType::kF32);
      for (int64_t expert = 0; expert < kExperts; ++expert) {
        const auto loaded = source->load(expert);
        ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
        for (const CanonicalMatrix* matrix : {&loaded->gate, &loaded->up, &loaded->down}) {
          EXPECT_EQ(matrix->format.element, DType::kF32);
          ASSERT_EQ(matrix->codes.dtype(), DType::kF32);
        }
      }
      const CanonicalExpert expert = *source->load(odd[0] - '0');
      const CanonicalMatrix& matrix = odd[0] == '0' ? expert.up : expert.down;
      // 0x3131 as F16: 2^-3 (1 + 0x131 / 2^10)
      EXPECT_EQ(*matrix.codes.view().as<float>(), half ? 0.125F * (1 + 305 / 1024.0F) : 0.3F);
    }
  }
}

// Tensors of one projection that may be absent: what their absence means is another format, not damage.
bool IsOptional(const std::string& format, const std::string& suffix) {
  return suffix == ".g_idx" || suffix == ".qzeros" || (format == "ct_int4" && suffix == ".weight_zero_point");
}

std::vector<std::string> Roles(const std::string& format) {
  std::vector<std::string> names;
  for (const RawTensor& tensor : TinyModel(format).tensors) {
    if (tensor.name.starts_with(kGate))
      names.push_back(tensor.name.substr(kGate.size()));
  }
  return names;
}

TEST(MalformedModel, MissingPartner_IsNamed) {
  for (const std::string& format : kFormats) {
    for (const std::string& role : Roles(format)) {
      if (IsOptional(format, role))
        continue;
      TinyModel model(format);
      model.Drop(kGate + role);
      ExpectRefused(format + " without " + role, model, {StatusCode::kBadInput, kGate + role});
    }
  }
}

TEST(MalformedModel, WrongDtype_IsNamed) {
  for (const std::string& format : kFormats) {
    for (const std::string& role : Roles(format)) {
      // A type of the same width that the role never has.
      TinyModel model(format);
      RawTensor& tensor = model.Find(kGate + role);
      const size_t count = tensor.bytes.size();
      tensor.dtype = tensor.dtype == "I64"                            ? "F64"
                     : tensor.dtype == "I32" || tensor.dtype == "F32" ? "U32"
                     : tensor.dtype == "BF16"                         ? "I16"
                                                                      : "BOOL";
      ASSERT_EQ(count, tensor.bytes.size());
      ExpectRefused(format + " with a strange " + role, model, {StatusCode::kBadInput, kGate + role});
    }
  }
}

TEST(MalformedModel, WrongShape_IsNamed) {
  for (const std::string& format : kFormats) {
    for (const std::string& role : Roles(format)) {
      const TinyModel sound(format);
      const std::vector<int64_t> shape = TinyModel(format).Find(kGate + role).shape;
      for (size_t axis = 0; axis < std::max<size_t>(shape.size(), 1); ++axis) {
        for (const int64_t delta : {-1, 1}) {
          TinyModel model(format);
          RawTensor& tensor = model.Find(kGate + role);
          if (tensor.shape.empty())
            tensor.shape = {1};
          const auto rows = static_cast<size_t>(tensor.shape[axis]);
          if (static_cast<int64_t>(rows) + delta <= 0)
            continue;
          const size_t slice = tensor.bytes.size() / rows;
          tensor.shape[axis] += delta;
          tensor.bytes.resize(tensor.bytes.size() / rows * rows, '\0');
          if (delta > 0) {
            tensor.bytes += tensor.bytes.substr(0, slice);
          } else {
            tensor.bytes.resize(tensor.bytes.size() - slice);
          }
          ExpectRefused(
              format + " " + role + " axis " + std::to_string(axis) + " by " + std::to_string(delta), model,
              {StatusCode::kBadInput, kGate + role});
        }
      }
      TinyModel model(format);
      RawTensor& tensor = model.Find(kGate + role);
      tensor.shape.insert(tensor.shape.begin(), 2);
      tensor.bytes += tensor.bytes;
      ExpectRefused(format + " " + role + " with one dimension more", model,
                    {StatusCode::kBadInput, kGate + role});
    }
  }
}

void Poke(RawTensor& tensor, float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  const size_t width = tensor.dtype == "F32" ? 4 : 2;
  const uint32_t code = width == 4 ? bits : bits >> 16;
  std::memcpy(tensor.bytes.data() + tensor.bytes.size() - width, &code, width);
}

TEST(MalformedModel, BadFloatScales_AreNamed) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (const std::string& format : kFormats) {
    for (const std::string& role : Roles(format)) {
      const std::string dtype = TinyModel(format).Find(kGate + role).dtype;
      if ((dtype != "F32" && dtype != "BF16") || role == ".weight")
        continue;
      const bool single = TinyModel(format).Find(kGate + role).bytes.size() <= 4;
      for (const float value : {nan, infinity, -infinity, -1.0F, -0.0F, 0.0F}) {
        // A block may have the scale 0; a whole matrix may not. auto-round writes negative scales of groups.
        if (!single && value == 0.0F && !std::signbit(value))
          continue;
        if (format == "autoround" && std::isfinite(value))
          continue;
        if (format == "ct_int8" && value == 0.0F)
          continue;  // a row without weights
        TinyModel model(format);
        Poke(model.Find(kGate + role), value);
        ExpectRefused(format + " " + role + " = " + std::to_string(value), model,
                      {StatusCode::kBadInput, kGate + role});
      }
    }
  }
}

TEST(MalformedModel, BadBlockScaleCodes_AreNamed) {
  for (const auto& [format, code] : std::vector<std::pair<std::string, int>>{{"modelopt_nvfp4", 0x7f},
                                                                             {"modelopt_nvfp4", 0xff},
                                                                             {"modelopt_nvfp4", 0xb8},
                                                                             {"modelopt_nvfp4", 0x80},
                                                                             {"ct_nvfp4", 0x7f},
                                                                             {"ct_nvfp4", 0x81},
                                                                             {"ct_mxfp4", 0xff},
                                                                             {"quark_mxfp4", 0xff}}) {
    TinyModel model(format);
    model.Find(kGate + ".weight_scale").bytes.back() = static_cast<char>(code);
    ExpectRefused(format + " block scale " + std::to_string(code), model,
                  {StatusCode::kBadInput, kGate + ".weight_scale"});
  }
}

TEST(MalformedModel, IndexesAndShapesThatLie_AreNamed) {
  for (const int32_t index : {2, -1, 1000000, std::numeric_limits<int32_t>::min()}) {
    TinyModel model("gptq");
    std::memcpy(model.Find(kGate + ".g_idx").bytes.data(), &index, 4);
    ExpectRefused("g_idx " + std::to_string(index), model, {StatusCode::kBadInput, kGate + ".g_idx"});
  }
  for (const int64_t rows : {int64_t{31}, int64_t{-32}, int64_t{1} << 62}) {
    TinyModel model("ct_int4");
    model.Find(kGate + ".weight_shape") = Longs(kGate + ".weight_shape", {rows, kHidden});
    ExpectRefused("weight_shape " + std::to_string(rows), model,
                  {StatusCode::kBadInput, kGate + ".weight_shape"});
  }
}

TEST(MalformedModel, Router_IsChecked) {
  const std::string router = "model.layers.0.mlp.gate.weight";
  TinyModel missing("bf16");
  missing.Drop(router);
  ExpectRefused("no router", missing, {StatusCode::kBadInput, router});
  TinyModel packed("bf16");
  packed.Find(router) = Bytes(router, "U8", {kExperts, kHidden / 2}, 1, 1);
  ExpectRefused("packed router", packed, {StatusCode::kBadInput, router});
  TinyModel wide("bf16");
  wide.Find(router) = Bf16(router, {kExperts + 1, kHidden}, 1.0F);
  ExpectRefused("router of another size", wide, {StatusCode::kBadInput, router});
}

TEST(MalformedModel, ExpertCount_IsChecked) {
  TinyModel more("bf16");
  more.tensors.push_back(
      Bf16("model.layers.0.mlp.experts.2.down_proj.weight", {kHidden, kIntermediate}, 1.0F));
  ExpectRefused("an expert too many", more,
                {StatusCode::kBadInput, "model.layers.0.mlp.experts.2.down_proj.weight"});
  TinyModel fewer("bf16");
  fewer.config["num_experts"] = 3;
  fewer.Find("model.layers.0.mlp.gate.weight") = Bf16("model.layers.0.mlp.gate.weight", {3, kHidden}, 1.0F);
  ExpectRefused("an expert too few", fewer,
                {StatusCode::kBadInput, "model.layers.0.mlp.experts.2.gate_proj.weight"});
  TinyModel none("bf16");
  std::erase_if(none.tensors,
                [](const RawTensor& tensor) { return tensor.name.find("experts") != std::string::npos; });
  none.config["decoder_sparse_step"] = 1;
  ExpectRefused("no experts at all", none, {StatusCode::kBadInput, "model.layers.0.mlp.experts"});
}

TEST(MalformedModel, SizesOfTheConfiguration_AreChecked) {
  using Value = nlohmann::ordered_json;
  const std::vector<Value> values = {
      "8", 8.5, -1, 0, 1e9, 1e300, Value::array(), Value::object(), true, Value::array({"x"})};
  for (const std::string key :
       {"num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size"}) {
    for (const Value& value : values) {
      TinyModel model("bf16");
      model.config[key] = value;
      ExpectRefused(key + " = " + value.dump(), model);
    }
    TinyModel absent("bf16");
    absent.config.erase(key);
    ExpectRefused("no " + key, absent);
    TinyModel null("bf16");
    null.config[key] = nullptr;
    ExpectRefused(key + " null", null);
    // Python writes these words; they are no sizes.
    for (const std::string word : {"NaN", "Infinity", "-Infinity", "1e999", "99999999999999999999"}) {
      const TemporaryDirectory folder;
      TinyModel model("bf16");
      model.WriteTo(folder);
      std::string text = model.config.dump();
      const std::string quoted = "\"" + key + "\":";
      const size_t at = text.find(quoted) + quoted.size();
      text.replace(at, text.find_first_of(",}", at) - at, word);
      folder.Write("config.json", text);
      const Status status = LoadEverything(folder.path());
      EXPECT_EQ(status.code(), StatusCode::kBadInput) << key << " = " << word << ": " << status.ToString();
      EXPECT_NE(status.file().find("config.json"), std::string::npos);
    }
  }
}

TEST(MalformedModel, InfinityElsewhere_IsHarmless) {
  const TemporaryDirectory folder;
  TinyModel model("bf16");
  model.WriteTo(folder);
  std::string text = model.config.dump();
  text.insert(1, "\"time_step_limit\":[0.0,Infinity],");
  folder.Write("config.json", text);
  EXPECT_TRUE(LoadEverything(folder.path()).ok()) << LoadEverything(folder.path()).ToString();
}

struct ConfigCase {
  std::string what;
  std::function<void(nlohmann::ordered_json&)> change;
  StatusCode code = StatusCode::kBadInput;
};

void RunConfigCases(const std::string& format, const std::vector<ConfigCase>& cases) {
  for (const ConfigCase& one : cases) {
    TinyModel model(format);
    one.change(model.config);
    ExpectRefused(format + ": " + one.what, model, {one.code, ""});
  }
}

TEST(MalformedModel, RulesOfTheConfiguration_AreChecked) {
  RunConfigCases(
      "bf16",
      {
          {"no model_type", [](auto& c) { c.erase("model_type"); }},
          {"model_type a number", [](auto& c) { c["model_type"] = 3; }},
          {"unknown model_type", [](auto& c) { c["model_type"] = "no_such_moe"; }, StatusCode::kUnsupported},
          {"refused model_type", [](auto& c) { c["model_type"] = "zaya"; }, StatusCode::kUnsupported},
          {"more experts a token than there are", [](auto& c) { c["num_experts_per_tok"] = 3; }},
          {"more experts than the library routes to", [](auto& c) { c["num_experts"] = 2049; }},
          {"renormalization a word", [](auto& c) { c["norm_topk_prob"] = "yes"; }},
          {"unknown activation", [](auto& c) { c["hidden_act"] = "sine"; }, StatusCode::kUnsupported},
          {"activation a number", [](auto& c) { c["hidden_act"] = 1; }},
          {"unknown scores", [](auto& c) { c["scoring_func"] = "tanh"; }, StatusCode::kUnsupported},
          {"scaling a word", [](auto& c) { c["routed_scaling_factor"] = "2"; }},
          {"layers a word", [](auto& c) { c["num_hidden_layers"] = "2"; }},
          {"layers 0", [](auto& c) { c["num_hidden_layers"] = 0; }},
          {"zero experts that are no identities", [](auto& c) { c["zero_expert_type"] = "drop"; },
           StatusCode::kUnsupported},
          {"another hidden size", [](auto& c) { c["hidden_size"] = 65; }},
          {"another intermediate size", [](auto& c) { c["moe_intermediate_size"] = 33; }},
          {"quantization a list", [](auto& c) { c["quantization_config"] = {1}; }},
          {"quantization without a method",
           [](auto& c) {
             c["quantization_config"] = {{"bits", 4}};
           }},
          {"unknown method",
           [](auto& c) {
             c["quantization_config"] = {{"quant_method", "hqq"}};
           },
           StatusCode::kUnsupported},
          {"method a number",
           [](auto& c) {
             c["quantization_config"] = {{"quant_method", 4}};
           }},
          {"method that the tensors belie",
           [](auto& c) {
             c["quantization_config"] = {{"quant_method", "gptq"}, {"bits", 4}};
           }},
      });
  RunConfigCases(
      "fp8_block",
      {
          {"block a number", [](auto& c) { c["quantization_config"]["weight_block_size"] = 128; }},
          {"block of 0",
           [](auto& c) {
             c["quantization_config"]["weight_block_size"] = {0, 128};
           }},
          {"block of three",
           [](auto& c) {
             c["quantization_config"]["weight_block_size"] = {1, 2, 3};
           }},
          {"another block",
           [](auto& c) {
             c["quantization_config"]["weight_block_size"] = {32, 32};
           }},
          {"e5m2", [](auto& c) { c["quantization_config"]["fmt"] = "e5m2"; }, StatusCode::kUnsupported},
          {"unknown activation scheme",
           [](auto& c) { c["quantization_config"]["activation_scheme"] = "none"; }},
          {"skip list a word",
           [](auto& c) { c["quantization_config"]["modules_to_not_convert"] = "lm_head"; }},
      });
  TinyModel groups("bf16");
  groups.config["model_type"] = "deepseek_v3";
  groups.config["n_group"] = 3;
  groups.config["topk_group"] = 1;
  ExpectRefused("groups that do not divide the experts", groups);
  groups.config["n_group"] = 2;
  groups.config["topk_group"] = 3;
  ExpectRefused("more groups kept than there are", groups);
}

TEST(MalformedModel, QuantizationMetadata_IsChecked) {
  RunConfigCases(
      "modelopt_nvfp4",
      {
          {"no algorithm", [](auto& c) { c["quantization_config"].erase("quant_algo"); }},
          {"algorithm null", [](auto& c) { c["quantization_config"]["quant_algo"] = nullptr; }},
          {"unknown algorithm", [](auto& c) { c["quantization_config"]["quant_algo"] = "NF4"; },
           StatusCode::kUnsupported},
          {"another group", [](auto& c) { c["quantization_config"]["group_size"] = 32; }},
          {"group a word", [](auto& c) { c["quantization_config"]["group_size"] = "16"; }},
          {"group -1", [](auto& c) { c["quantization_config"]["group_size"] = -1; }},
          {"ignore a word", [](auto& c) { c["quantization_config"]["ignore"] = "lm_head"; }},
          {"ignore of numbers", [](auto& c) { c["quantization_config"]["ignore"] = {1}; }},
          {"FP8 that the tensors belie", [](auto& c) { c["quantization_config"]["quant_algo"] = "FP8"; }},
          {"mixed without a list",
           [](auto& c) { c["quantization_config"]["quant_algo"] = "MIXED_PRECISION"; }},
          {"experts excluded that are quantized",
           [](auto& c) { c["quantization_config"]["ignore"] = {"*experts*"}; }},
      });
  const auto weights = [](auto& c) -> nlohmann::ordered_json& {
    return c["quantization_config"]["config_groups"]["group_0"]["weights"];
  };
  // As llm-compressor's QuIPModifier writes it. Rotations of weights alone change nothing that is computed.
  const auto transform = [](const std::string& location) {
    return [location](auto& c) {
      c["quantization_config"]["transform_config"]["config_groups"]["u"]["apply"] = {
          {{"location", "weight_output"}, {"targets", {"Linear"}}},
          {{"location", location}, {"targets", {"re:.*experts.*proj$"}}, {"ignore", {"lm_head"}}}};
    };
  };
  RunConfigCases(
      "ct_int4",
      {
          {"no groups", [](auto& c) { c["quantization_config"].erase("config_groups"); }},
          {"groups a list", [](auto& c) { c["quantization_config"]["config_groups"] = {1}; }},
          {"no bits", [&](auto& c) { weights(c).erase("num_bits"); }},
          {"9 bits", [&](auto& c) { weights(c)["num_bits"] = 9; }, StatusCode::kUnsupported},
          {"99 bits", [&](auto& c) { weights(c)["num_bits"] = 99; }},
          {"8 bits that the tensors belie", [&](auto& c) { weights(c)["num_bits"] = 8; }},
          {"type unknown", [&](auto& c) { weights(c)["type"] = "posit"; }},
          {"symmetric a word", [&](auto& c) { weights(c)["symmetric"] = "yes"; }},
          {"group of 0", [&](auto& c) { weights(c)["group_size"] = 0; }},
          {"another group", [&](auto& c) { weights(c)["group_size"] = 16; }},
          {"strategy unknown", [&](auto& c) { weights(c)["strategy"] = "row"; }, StatusCode::kUnsupported},
          {"format unknown", [](auto& c) { c["quantization_config"]["format"] = "marlin-24"; },
           StatusCode::kUnsupported},
          {"a broken pattern", [](auto& c) { c["quantization_config"]["ignore"] = {"re:(["}; }},
          {"a pattern beyond reason",
           [](auto& c) { c["quantization_config"]["ignore"] = {"re:" + std::string(5000, 'a')}; }},
          {"targets a word",
           [](auto& c) { c["quantization_config"]["config_groups"]["group_0"]["targets"] = "Linear"; }},
          {"sparse",
           [](auto& c) {
             c["quantization_config"]["sparsity_config"] = {{"format", "sparse-24-bitmask"}};
           },
           StatusCode::kUnsupported},
          {"rotated outputs", transform("output"), StatusCode::kUnsupported},
          {"rotated inputs", transform("input"), StatusCode::kUnsupported},
      });
  for (const std::string format : {"gptq", "awq", "autoround"}) {
    RunConfigCases(
        format,
        {
            {"no bits", [](auto& c) { c["quantization_config"].erase("bits"); }},
            {"9 bits", [](auto& c) { c["quantization_config"]["bits"] = 9; }, StatusCode::kUnsupported},
            {"bits a word", [](auto& c) { c["quantization_config"]["bits"] = "4"; }},
            {"group a word", [](auto& c) { c["quantization_config"]["group_size"] = "32"; }},
            {"another group", [](auto& c) { c["quantization_config"]["group_size"] = 16; }},
        });
  }
  RunConfigCases("gptq",
                 {{"planar", [](auto& c) { c["quantization_config"]["checkpoint_format"] = "gptq_p"; },
                   StatusCode::kUnsupported}});
  RunConfigCases("awq", {{"gemv", [](auto& c) { c["quantization_config"]["version"] = "gemv"; },
                          StatusCode::kUnsupported}});
  RunConfigCases(
      "quark_mxfp4",
      {
          {"no description", [](auto& c) { c["quantization_config"].erase("global_quant_config"); }},
          {"no dtype",
           [](auto& c) { c["quantization_config"]["global_quant_config"]["weight"].erase("dtype"); }},
          {"fp6 that the tensors belie",
           [](auto& c) { c["quantization_config"]["global_quant_config"]["weight"]["dtype"] = "fp6_e3m2"; }},
          {"fp5",
           [](auto& c) { c["quantization_config"]["global_quant_config"]["weight"]["dtype"] = "fp5_e2m2"; },
           StatusCode::kUnsupported},
          {"group a word",
           [](auto& c) { c["quantization_config"]["global_quant_config"]["weight"]["group_size"] = "32"; }},
      });
}

TEST(MalformedModel, ConfigurationFiles_AreRefused) {
  for (const std::string text : {"", "{", "[]", "null", "{\"model_type\":\"mixtral\",}",
                                 "{\"model_type\":\"mixtral\",\"model_type\":\"olmoe\"}", "\xff\xfe{}"}) {
    const TemporaryDirectory folder;
    TinyModel("bf16").WriteTo(folder);
    folder.Write("config.json", text);
    const Status status = LoadEverything(folder.path());
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << text << ": " << status.ToString();
    EXPECT_NE(status.file().find("config.json"), std::string::npos) << status.ToString();
  }
  const TemporaryDirectory empty;
  EXPECT_EQ(LoadEverything(empty.path()).code(), StatusCode::kBadInput);
  EXPECT_EQ(LoadEverything(empty.path() / "absent").code(), StatusCode::kBadInput);
  const TemporaryDirectory no_weights;
  no_weights.Write("config.json", TinyModel("bf16").config.dump());
  EXPECT_EQ(LoadEverything(no_weights.path()).code(), StatusCode::kBadInput);
}

}  // namespace
}  // namespace fusedmoe
