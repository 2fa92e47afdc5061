// Forms that tools write and no golden checkpoint shows: found by running the tools over all families.
#include <gtest/gtest.h>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size()))
    text.replace(at, from.size(), to);
  return text;
}

// llm-compressor 0.14 with transformers 5.23 on DeepSeek-V4: "gate_proj" becomes "wgate" on saving.
TEST(UpstreamQuirks, GatesCalledWgate_AreFound) {
  TinyModel model("ct_int4");
  for (RawTensor& tensor : model.tensors)
    tensor.name = Replaced(tensor.name, ".gate_proj.", ".wgate.");
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  const Status status = LoadEverything(folder.path());
  EXPECT_TRUE(status.ok()) << status.ToString();
}

// The MXFP8 preset of compressed-tensors 0.20.
TEST(UpstreamQuirks, Mxfp8OfCompressedTensors_BumpsExponentsLikeE2m1) {
  TinyModel model("ct_mxfp4");
  auto& quantization = model.config["quantization_config"];
  quantization["format"] = "mxfp8-quantized";
  auto& group = quantization["config_groups"]["group_0"];
  group["weights"]["num_bits"] = 8;
  group["weights"]["scale_dtype"] = "torch.uint8";
  group["input_activations"] = group["weights"];
  group["input_activations"]["dynamic"] = true;
  for (RawTensor& tensor : model.tensors) {
    if (!tensor.name.ends_with(".weight_packed"))
      continue;
    const std::string name = Replaced(tensor.name, ".weight_packed", ".weight");
    tensor = Bytes(name, "F8_E4M3", {tensor.shape[0], 2 * tensor.shape[1]}, 1, 0x38);
  }
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  const auto checkpoint = Checkpoint::Open(folder.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const auto source = (*checkpoint)->Experts(0);
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  EXPECT_EQ(source->scheme.activation.element, DType::kF8E4M3);
  EXPECT_EQ(source->scheme.activation.rule.mx_scale, MxScaleRule::kEvenE2m1);
}

}  // namespace
}  // namespace fusedmoe
