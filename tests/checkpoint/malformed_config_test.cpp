// Configurations and quantization metadata that contradict themselves or the tensors: each is refused with
// the expected code, and the error names the file.
#include <gtest/gtest.h>

#include <functional>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

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

TEST(MalformedConfig, RulesOfTheConfiguration_AreChecked) {
  RunConfigCases(
      "bf16",
      {
          {"no model_type", [](auto& c) { c.erase("model_type"); }},
          {"model_type a number", [](auto& c) { c["model_type"] = 3; }},
          {"unknown model_type", [](auto& c) { c["model_type"] = "no_such_moe"; }, StatusCode::kUnsupported},
          {"refused model_type", [](auto& c) { c["model_type"] = "doge"; }, StatusCode::kUnsupported},
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

TEST(MalformedConfig, QuantizationMetadata_IsChecked) {
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
          {"sparse, as a word",
           [](auto& c) { c["quantization_config"]["sparsity_config"] = "sparse-24-bitmask"; }},
          {"sparse, as a number",
           [](auto& c) {
             c["quantization_config"]["sparsity_config"] = {{"format", 24}};
           }},
          {"transforms a word", [](auto& c) { c["quantization_config"]["transform_config"] = "hadamard"; }},
          {"groups of transforms a list",
           [&](auto& c) {
             transform("input")(c);
             auto& groups = c["quantization_config"]["transform_config"]["config_groups"];
             groups = nlohmann::ordered_json::array({groups["u"]});
           }},
          {"a transform without a place",
           [&](auto& c) {
             transform("input")(c);
             auto& groups = c["quantization_config"]["transform_config"]["config_groups"];
             groups["u"]["apply"][1].erase("location");
           }},
          {"a group a list", [](auto& c) { c["quantization_config"]["config_groups"]["group_0"] = {1}; }},
          {"format a number", [](auto& c) { c["quantization_config"]["format"] = 4; }},
          {"outputs quantized",
           [](auto& c) {
             c["quantization_config"]["config_groups"]["group_0"]["output_activations"] = {
                 {"num_bits", 8}, {"type", "float"}, {"strategy", "tensor"}};
           },
           StatusCode::kUnsupported},
          {"activation order without an index", [&](auto& c) { weights(c)["actorder"] = "group"; }},
          {"the same by its newer name", [&](auto& c) { weights(c)["actorder"] = "dynamic"; }},
          {"the same as a flag", [&](auto& c) { weights(c)["actorder"] = true; }},
          {"activation order unknown", [&](auto& c) { weights(c)["actorder"] = "random"; }},
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
  const auto put = [](const char* key, const nlohmann::ordered_json& value) {
    return [=](auto& c) { c["quantization_config"][key] = value; };
  };
  for (const std::string format : {"gptq", "awq"}) {
    RunConfigCases(format, {{"for a kernel", put("is_marlin_format", true), StatusCode::kUnsupported},
                            {"words of 64 bits", put("pack_dtype", "int64"), StatusCode::kUnsupported},
                            {"rotated", put("rotation", "hadamard"), StatusCode::kUnsupported},
                            {"an adapter", put("adapter", {{"rank", 64}}), StatusCode::kUnsupported},
                            {"the two names of the method differ", put("method", "gguf")},
                            {"method a number", put("method", 4)},
                            {"layout a number", put("format", 2)}});
  }
  RunConfigCases("gptq", {{"for a kernel", put("checkpoint_format", "marlin"), StatusCode::kUnsupported},
                          {"the two names of the layout differ", put("format", "gptq_v2")},
                          {"for a kernel, by the other name",
                           [&](auto& c) {
                             c["quantization_config"].erase("checkpoint_format");
                             put("format", "marlin")(c);
                           },
                           StatusCode::kUnsupported}});
  RunConfigCases("awq", {{"gemv", put("version", "gemv"), StatusCode::kUnsupported},
                         {"the two names of the layout differ", put("checkpoint_format", "gemv_fast")},
                         {"llm-awq", put("backend", "llm-awq"), StatusCode::kUnsupported},
                         {"gemv by the other name",
                          [&](auto& c) {
                            c["quantization_config"].erase("version");
                            put("checkpoint_format", "gemv_fast")(c);
                          },
                          StatusCode::kUnsupported}});
  const auto of_all = [](const char* key, const nlohmann::ordered_json& value) {
    return [=](auto& c) { c["quantization_config"]["global_quant_config"][key] = value; };
  };
  const nlohmann::ordered_json fp8 = {{"dtype", "fp8_e4m3"}, {"qscheme", "per_tensor"}, {"is_dynamic", true}};
  RunConfigCases(
      "quark_mxfp4",
      {
          {"outputs quantized", of_all("output_tensors", fp8), StatusCode::kUnsupported},
          {"biases quantized", of_all("bias", fp8), StatusCode::kUnsupported},
          {"asymmetric floats",
           [](auto& c) { c["quantization_config"]["global_quant_config"]["weight"]["symmetric"] = false; },
           StatusCode::kUnsupported},
          {"symmetric a word",
           [](auto& c) { c["quantization_config"]["global_quant_config"]["weight"]["symmetric"] = "no"; }},
          {"dynamic a word",
           [](auto& c) { c["quantization_config"]["global_quant_config"]["weight"]["is_dynamic"] = "no"; }},
          {"a rule of scales that is not known",
           [](auto& c) {
             auto& all = c["quantization_config"]["global_quant_config"];
             all["input_tensors"] = all["weight"];
             all["input_tensors"]["scale_calculation_mode"] = "nearest";
           },
           StatusCode::kUnsupported},
          {"by class", put("layer_type_quant_config", {{"Linear", {{"weight", fp8}}}}),
           StatusCode::kUnsupported},
          {"by class, a list", put("layer_type_quant_config", {1})},
          {"by name, a list", put("layer_quant_config", {1})},
          {"rotated inputs", put("algo_config", {{{"name", "rotation"}, {"r1", true}}}),
           StatusCode::kUnsupported},
          {"rotated online",
           put("algo_config", {{"name", "rotation"}, {"r4", false}, {"online_r1_rotation", true}}),
           StatusCode::kUnsupported},
          {"an algorithm that is not known", put("algo_config", {{{"name", "svdquant"}}}),
           StatusCode::kUnsupported},
          {"algorithm a word", put("algo_config", "awq")},
          {"export a word", put("export", "real_quantized")},
          {"weights that were rounded and are floats", put("export", {{"weight_format", "fake_quantized"}}),
           StatusCode::kUnsupported},
      });
  RunConfigCases("fp8_block", {{"scales unknown", put("scale_fmt", "posit"), StatusCode::kUnsupported},
                               {"scales a number", put("scale_fmt", 8)},
                               {"experts of a type unknown", [](auto& c) { c["expert_dtype"] = "mxfp6"; },
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

// Beside what is refused: settings of the same keys that change nothing.
TEST(MalformedConfig, SettingsThatChangeNothing_AreAccepted) {
  const auto accept = [](const std::string& format, const nlohmann::ordered_json& settings) {
    TinyModel model(format);
    model.config["quantization_config"].update(settings);
    EXPECT_EQ(LoadEverything(model).message(), "") << settings;
  };
  accept("gptq", {{"format", "GPTQ"}, {"pack_dtype", "int32"}, {"is_marlin_format", false}});
  accept("gptq", {{"rotation", nullptr}, {"adapter", nullptr}});
  accept("awq", {{"version", "GEMM"}, {"checkpoint_format", "gemm"}, {"format", "gemm"}});
  accept("quark_mxfp4", {{"algo_config", {{{"name", "gptq"}}, {{"name", "rotation"}, {"r4", false}}}}});
  accept("quark_mxfp4", {{"layer_type_quant_config", {{"Embedding", nlohmann::ordered_json::object()}}}});
  accept("fp8_block", {{"scale_fmt", "float"}});
  accept("ct_int4",
         {{"sparsity_config", nlohmann::ordered_json::object()}, {"transform_config", {{"x", 1}}}});
  TinyModel model("ct_int4");
  auto& weights = model.config["quantization_config"]["config_groups"]["group_0"]["weights"];
  for (const nlohmann::ordered_json order : {"weight", "static"}) {
    weights["actorder"] = order;
    EXPECT_EQ(LoadEverything(model).message(), "") << order;
  }
}

// GPTQModel says the layout twice, older files in one place alone: zero points of v2 are not one too small.
TEST(MalformedConfig, LayoutOfGptq_IsReadUnderBothNames) {
  const auto first_zero = [](const char* key, const char* layout) {
    TinyModel model("gptq");
    model.config["quantization_config"].erase("checkpoint_format");
    model.config["quantization_config"][key] = layout;
    const WrittenModel written(model);
    const auto expert = written.source->load(0);
    return expert.ok() ? int{*expert->gate.zero_point.view().as<uint8_t>()} : -1;
  };
  EXPECT_EQ(first_zero("checkpoint_format", "gptq"), 8);
  EXPECT_EQ(first_zero("format", "gptq"), 8);
  EXPECT_EQ(first_zero("checkpoint_format", "gptq_v2"), 7);
  EXPECT_EQ(first_zero("format", "gptq_v2"), 7);
}

// So does it the method, and newer ones may leave the older name out.
TEST(MalformedConfig, MethodOfGptqModel_IsReadUnderBothNames) {
  for (const std::string format : {"gptq", "awq"}) {
    TinyModel model(format);
    auto& quantization = model.config["quantization_config"];
    std::string upper = format;
    std::transform(upper.begin(), upper.end(), upper.begin(), ::toupper);
    quantization["method"] = upper;
    EXPECT_EQ(LoadEverything(model).message(), "") << format;
    quantization.erase("quant_method");
    EXPECT_EQ(LoadEverything(model).message(), "") << format << " by the new name alone";
    quantization["method"] = "qqq";
    const Status alone = LoadEverything(model);
    EXPECT_EQ(alone.code(), StatusCode::kUnsupported);
    EXPECT_NE(alone.message().find("'qqq'"), std::string::npos) << alone.message();
    quantization["quant_method"] = format;
    const Status apart = LoadEverything(model);
    EXPECT_EQ(apart.code(), StatusCode::kBadInput);
    EXPECT_NE(apart.message().find("'method' is \"qqq\""), std::string::npos) << apart.message();
    EXPECT_NE(apart.message().find("'quant_method'"), std::string::npos) << apart.message();
    EXPECT_NE(apart.ToString().find("config.json"), std::string::npos) << apart.ToString();
  }
  TinyModel rounded("autoround");  // of other tools the word may mean anything
  rounded.config["quantization_config"]["method"] = "sign_sgd";
  EXPECT_EQ(LoadEverything(rounded).message(), "");
}

// Rounded up to powers of two, whatever the case of the word.
TEST(MalformedConfig, ScalesOfFp8_AreReadInAnyCase) {
  for (const char* word : {"ue8m0", "UE8M0"}) {
    TinyModel model("fp8_block");
    model.config["quantization_config"]["scale_fmt"] = word;
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    EXPECT_TRUE(written.source->scheme.activation.rule.power_of_two_scale) << word;
  }
}

TEST(MalformedConfig, ConfigurationFiles_AreRefused) {
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
