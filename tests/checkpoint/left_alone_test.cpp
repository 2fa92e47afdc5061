// Matrices that a tool left as they were, without a word in its metadata.
#include <gtest/gtest.h>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

// llm-compressor 0.14 on JetMoE, Quark 0.13 on experts that it was not told to take apart, auto-round 0.16 on
// Llama-4: the linear modules are quantized, the one parameter of all experts is as it was.
TEST(LeftAlone, FusedExpertsWithoutScales_AreLeftAlone) {
  for (const std::string producer : {"ct_int4", "quark_mxfp4", "gptq", "awq", "autoround"}) {
    SCOPED_TRACE(producer);
    TinyModel model("bf16");
    model.config["quantization_config"] = TinyModel(producer).config["quantization_config"];
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput)
        << "matrices of single experts are linear modules";
    std::erase_if(model.tensors,
                  [](const RawTensor& tensor) { return tensor.name.find(".experts.") != std::string::npos; });
    const std::string experts = "model.layers.0.mlp.experts.";
    model.tensors.push_back(Bf16(experts + "gate_up_proj", {kExperts, 2 * kIntermediate, kHidden}, 0.5F));
    model.tensors.push_back(Bf16(experts + "down_proj", {kExperts, kHidden, kIntermediate}, 0.5F));
    EXPECT_EQ(LoadEverything(model).message(), "");
    const bool integers = producer == "gptq" || producer == "awq" || producer == "autoround";
    model.tensors.push_back(Bytes(experts + (integers ? "down_proj_scales" : "down_proj_weight_scale"), "U8",
                                  {kExperts, kHidden, 1}, 1, 127));
    EXPECT_NE(LoadEverything(model).code(), StatusCode::kOk) << "a scale without codes";
  }
}

// llm-compressor 0.14 on Longcat: the parameter of all experts stays as it was, is no module that 'ignore'
// could list, and comes apart when transformers saves the model.
TEST(LeftAlone, ExpertsThatLlmCompressorLeftAsTheyWere_AreRead) {
  const std::string dense = "model.layers.0.mlps.0.up_proj", first = "model.layers.0.mlp.experts.0.up_proj";
  for (const std::string format : {"ct_int4", "ct_int8", "ct_mxfp4", "ct_nvfp4"}) {
    SCOPED_TRACE(format);
    TinyModel model("bf16");
    model.config["quantization_config"] = TinyModel(format).config["quantization_config"];
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << "nothing is quantized";
    for (RawTensor& tensor : TinyModel(format).tensors) {
      if (tensor.name.starts_with(first + ".")) {
        tensor.name = Replaced(tensor.name, first, dense);
        model.tensors.push_back(std::move(tensor));
      }
    }
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    EXPECT_EQ(written.checkpoint->Describe(0)->scheme.name, "unquantized");
    EXPECT_EQ(LoadEverything(model).message(), "");
    model.tensors.push_back(Bf16(first + ".weight_scale", {kIntermediate, 1}, 0.5F));
    EXPECT_NE(LoadEverything(model).code(), StatusCode::kOk) << "a scale without codes";
  }
}

// AutoAWQ 0.2.9 leaves out modules whose names hold a part that modules_to_not_convert lists ("layers.0.",
// "shared_exp"), and other writers leave them out without a list.
TEST(LeftAlone, ModulesThatAwqAndGptqLeftOut_AreReadAsTheyAre) {
  for (const std::string format : {"gptq", "awq"}) {
    for (const char* part : {"layers.0.", "mlp.exp", ""}) {
      SCOPED_TRACE(format + " " + part);
      TinyModel model("bf16");
      auto& quantization = model.config["quantization_config"];
      quantization = TinyModel(format).config["quantization_config"];
      if (*part != '\0') {
        quantization["modules_to_not_convert"] = {part};
      }
      EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << "nothing is quantized";
      model.tensors.push_back(Bytes("model.layers.1.mlp.experts.0.up_proj.qweight", "I32", {1, 4}, 4, 7));
      EXPECT_EQ(LoadEverything(model).message(), "");
    }
    TinyModel halved(format);
    const std::string up = "model.layers.0.mlp.experts.0.up_proj";
    std::erase_if(halved.tensors, [&](const RawTensor& tensor) { return tensor.name == up + ".scales"; });
    halved.tensors.push_back(Bf16(up + ".weight", {kIntermediate, kHidden}, 0.5F));
    EXPECT_EQ(LoadEverything(halved).code(), StatusCode::kBadInput) << "codes without scales";
  }
}

}  // namespace
}  // namespace fusedmoe
