// How tools pack codes where no golden checkpoint shows it.
#include <gtest/gtest.h>

#include <cstring>

#include "checkpoint/raw_checkpoint.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

// amd-quark 0.13 with pack_method "order": the eight outputs of a word from its low bits on, not in AWQ's
// order.
TEST(PackedCodes, FourBitsOfQuark_LieInTheOrderThatItNames) {
  for (const std::string method : {"reorder", "order"}) {
    SCOPED_TRACE(method);
    TinyModel model("awq");
    for (RawTensor& tensor : model.tensors) {
      const auto words = static_cast<size_t>(tensor.bytes.size() / 4);
      if (tensor.name.ends_with(".qweight")) {
        tensor = Ints(Replaced(tensor.name, ".qweight", ".weight"), tensor.shape,
                      std::vector<int32_t>(words, 0x76543210));
      } else if (tensor.name.ends_with(".qzeros")) {
        tensor = Ints(Replaced(tensor.name, ".qzeros", ".weight_zero_point"), tensor.shape,
                      std::vector<int32_t>(words, 0x11111110));
      }
      tensor.name = Replaced(tensor.name, ".scales", ".weight_scale");
    }
    nlohmann::ordered_json weight = {{"dtype", "uint4"}, {"qscheme", "per_group"}, {"group_size", 32}};
    weight["symmetric"] = false;
    model.config["quantization_config"] = {{"quant_method", "quark"}, {"export", {{"pack_method", method}}}};
    model.config["quantization_config"]["global_quant_config"] = {{"weight", weight}};
    const WrittenModel written(model);
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    const auto expert = written.source->load(0);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    // Output 1 is the second nibble of a word, or, in AWQ's order, the fifth.
    std::vector<float> row(static_cast<size_t>(kHidden));
    DequantizeRow(expert->gate, 1, row.data());
    EXPECT_EQ(row[0], method == "order" ? 0.0F : 1.5F) << "the code 1 or 4, less the zero point 1, times 0.5";
    model.config["quantization_config"]["export"]["pack_method"] = "sideways";
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kUnsupported);
  }
}

// amd-quark 0.13 stores INT4 by channel as [out, in / 8], in groups as [in, out / 8]: square matrices were
// read turned.
TEST(PackedCodes, FourBitsOfQuarkByChannel_AreRefused) {
  TinyModel model("awq");
  for (RawTensor& tensor : model.tensors) {
    tensor.name = Replaced(Replaced(tensor.name, ".qweight", ".weight"), ".scales", ".weight_scale");
    if (tensor.name.ends_with(".qzeros")) {
      tensor.name = Replaced(tensor.name, ".qzeros", ".weight_zero_point");
    }
  }
  nlohmann::ordered_json weight = {{"dtype", "uint4"}, {"qscheme", "per_group"}, {"group_size", 32}};
  weight["symmetric"] = false;
  auto& quantization = model.config["quantization_config"];
  quantization = {{"quant_method", "quark"}, {"export", {{"pack_method", "reorder"}}}};
  quantization["global_quant_config"] = {{"weight", weight}};
  EXPECT_EQ(LoadEverything(model).message(), "");
  quantization["global_quant_config"]["weight"]["qscheme"] = "per_channel";
  quantization["global_quant_config"]["weight"]["group_size"] = nullptr;
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".weight_scale")) {
      tensor = Floats(tensor.name, {tensor.shape[1]}, 0.5F);
    }
    if (tensor.name.ends_with(".weight_zero_point")) {
      tensor =
          Ints(tensor.name, {tensor.shape[1]}, std::vector<int32_t>(static_cast<size_t>(tensor.shape[1])));
    }
  }
  const Status status = LoadEverything(model);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported) << status.ToString();
  EXPECT_NE(status.message().find("uint4 per_channel"), std::string::npos) << status.ToString();
}

// What metadata call symmetric has no zero points: those in the file would have been passed over.
TEST(PackedCodes, ZeroPointsOfSymmetricWeights_AreRefused) {
  const std::string name = "model.layers.0.mlp.experts.1.up_proj.weight_zero_point";
  const auto load = [&](const std::string& format, const RawTensor& zeros) {
    TinyModel model(format);
    model.tensors.push_back(zeros);
    return LoadEverything(model);
  };
  const auto expect_refused = [&](const Status& status) {
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << status.ToString();
    EXPECT_EQ(status.tensor(), name);
    EXPECT_NE(status.message().find("symmetric"), std::string::npos) << status.ToString();
  };
  // Packed: 0 is a zero point of -8 there.
  const std::vector<int64_t> packed = {kIntermediate / 8, kHidden / 32};
  expect_refused(load("ct_int4", Bytes(name, "I32", packed, 4, 0x99)));
  expect_refused(load("ct_int4", Bytes(name, "I32", packed, 4, 0)));
  // One by one: some tools leave them, all 0.
  expect_refused(load("ct_int8", Bytes(name, "I8", {kIntermediate, 1}, 1, 1)));
  expect_refused(load("ct_int4", Bytes(name, "I8", {kIntermediate, kHidden / 32}, 1, 1)));
  for (const Status& zeros : {load("ct_int8", Bytes(name, "I8", {kIntermediate, 1}, 1, 0)),
                              load("ct_int4", Bytes(name, "I8", {kIntermediate, kHidden / 32}, 1, 0))}) {
    EXPECT_TRUE(zeros.ok()) << zeros.ToString();
  }
}

// Quark 0.13 (Pack_fp6) and compressed-tensors 0.20 (pack_fp6_to_uint8) put code i of four at bit 6i of three
// bytes.
TEST(PackedCodes, Fp6_IsPackedFourInThreeBytes) {
  struct Case {
    std::string producer, dtype;
    std::vector<float> values;  // of the codes 1, 2, 0x23, 0x3f
  };
  for (const Case& one : {Case{"quark_mxfp4", "fp6_e2m3", {0.125F, 0.25F, -0.375F, -7.5F}},
                          Case{"quark_mxfp4", "fp6_e3m2", {0.0625F, 0.125F, -0.1875F, -28.0F}},
                          Case{"ct_mxfp4", "fp6_e2m3", {0.125F, 0.25F, -0.375F, -7.5F}}}) {
    SCOPED_TRACE(one.producer + " " + one.dtype);
    TinyModel model(one.producer);
    auto& quantization = model.config["quantization_config"];
    if (one.producer == "ct_mxfp4") {
      quantization["format"] = "mxfp6-pack-quantized";
      quantization["config_groups"]["group_0"]["weights"]["num_bits"] = 6;
    } else {
      quantization["global_quant_config"]["weight"]["dtype"] = one.dtype;
    }
    for (RawTensor& tensor : model.tensors) {
      const bool codes = tensor.dtype == "U8" && !tensor.name.ends_with("_scale");
      if (!codes) {
        continue;
      }
      tensor.shape[1] = tensor.shape[1] / 2 * 3;  // from 4 to 6 bits
      tensor.bytes.clear();
      for (int64_t i = 0; i < tensor.shape[0] * tensor.shape[1]; i += 3) {
        tensor.bytes += {static_cast<char>(0x81), static_cast<char>(0x30), static_cast<char>(0xfe)};
      }
    }
    const WrittenModel written(model);
    const auto& source = written.source;
    ASSERT_TRUE(source.ok()) << source.status().ToString();
    const auto expert = source->load(1);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    for (const CanonicalMatrix* matrix : {&expert->gate, &expert->up, &expert->down}) {
      const auto decoded = DequantizeMatrix(*matrix);
      ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
      for (int64_t i = 0; i < decoded->shape().count(); ++i) {
        ASSERT_EQ(decoded->view().as<float>()[i], one.values[static_cast<size_t>(i % 4)]) << i;
      }
    }
  }
}

// Kimi-K2.5 in INT4 stores the shapes of packed matrices in 32 bits.
TEST(PackedCodes, ShapesOfPackedMatrices_MayHave32Bits) {
  TinyModel model("ct_int4");
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".weight_shape")) {
      int64_t shape[2];
      std::memcpy(shape, tensor.bytes.data(), sizeof shape);
      tensor = Ints(tensor.name, {2}, {static_cast<int32_t>(shape[0]), static_cast<int32_t>(shape[1])});
    }
  }
  EXPECT_EQ(LoadEverything(model).message(), "");
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".up_proj.weight_shape")) {
      tensor = Ints(tensor.name, {2}, {kIntermediate, kHidden + 1});
    }
  }
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
}

// compressed-tensors 0.20 keeps integers that it does not pack one a byte, of 4 bits too.
TEST(PackedCodes, BytesBeyondTheirBits_AreBlamedOnTheirTensor) {
  TinyModel model("ct_int8");
  model.config["quantization_config"]["config_groups"]["group_0"]["weights"]["num_bits"] = 4;
  EXPECT_EQ(LoadEverything(model).message(), "");
  const std::string name = "model.layers.0.mlp.experts.1.up_proj.weight";
  model.Find(name).bytes[5] = 9;
  const Status status = LoadEverything(model);
  EXPECT_EQ(status.code(), StatusCode::kBadInput);
  EXPECT_EQ(status.message(), "the code at [0, 5] is 9; 4 bits hold -8 to 7");
  EXPECT_EQ(status.tensor(), name);
  EXPECT_TRUE(status.file().ends_with("model.safetensors")) << status.file();
}

// AWQ puts eight outputs into a word, whether or not there are so many; the inputs of down are counted in
// whole.
TEST(PackedCodes, SharedExpertsThatFillNoWords_AreCountedByTheirInputs) {
  constexpr int64_t kShared = 20;
  TinyModel model("awq");
  model.config["model_type"] = "qwen2_moe";
  model.config["shared_expert_intermediate_size"] = kShared;
  model.config["quantization_config"]["dynamic"] = {{"+:.*shared_expert.*", {{"group_size", -1}}}};
  const std::string stem = "model.layers.0.mlp.shared_expert";
  const auto add = [&](const std::string& name, int64_t rows, int64_t cols) {
    const int64_t words = (rows + 7) / 8;
    const std::string base = stem + "." + name;
    model.tensors.push_back(Bytes(base + ".qweight", "I32", {cols, words}, 4, 0x97));
    model.tensors.push_back(Bytes(base + ".qzeros", "I32", {1, words}, 4, 0x77));
    model.tensors.push_back(Bf16(base + ".scales", {1, rows}, 0.5F));
  };
  add("gate_proj", kShared, kHidden);
  add("up_proj", kShared, kHidden);
  add("down_proj", kHidden, kShared);
  model.tensors.push_back(Bf16(stem + "_gate.weight", {1, kHidden}, 0.5F));
  const WrittenModel written(model);
  ASSERT_TRUE(written.checkpoint != nullptr);
  const auto described = written.checkpoint->Describe(0);
  ASSERT_TRUE(described.ok()) << described.status().ToString();
  EXPECT_EQ(described->config.shared.intermediate, kShared);
  EXPECT_EQ(LoadEverything(model).message(), "");
}

// A symmetric GPTQ file says nothing by its zero points; where the metadata promise some, they must be there.
TEST(PackedCodes, ZeroPointsThatArePromised_AreNeeded) {
  for (const std::string format : {"gptq", "awq", "ct_int4"}) {
    SCOPED_TRACE(format);
    TinyModel model(format);
    auto& quantization = model.config["quantization_config"];
    if (format == "gptq") {
      quantization["sym"] = false;
    }
    if (format == "ct_int4") {
      quantization["config_groups"]["group_0"]["weights"]["symmetric"] = false;
    }
    std::erase_if(model.tensors, [](const RawTensor& tensor) { return tensor.name.ends_with(".qzeros"); });
    EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput);
    if (format == "gptq") {
      quantization["sym"] = true;
      EXPECT_EQ(LoadEverything(model).message(), "");
    }
  }
}

// Recipes that give down projections more bits.
TinyModel WithEightBitsDown(const std::string& format) {
  TinyModel mixed(format);
  nlohmann::ordered_json& config = mixed.config["quantization_config"];
  if (format == "gptq") {
    config["dynamic"] = {{"+:.*down_proj", {{"bits", 8}}}};
  } else {
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"];
    config["config_groups"]["group_1"]["targets"] = {"re:.*down_proj"};
    config["config_groups"]["group_1"]["weights"]["num_bits"] = 8;
  }
  for (RawTensor& tensor : mixed.tensors) {
    if (tensor.name.ends_with("down_proj.weight_packed")) {
      tensor = Bytes(tensor.name, "I32", {kHidden, kIntermediate / 4}, 4, 0x97);
    } else if (tensor.name.ends_with("down_proj.qweight")) {
      tensor = Bytes(tensor.name, "I32", {kIntermediate / 4, kHidden}, 4, 0x97);
    } else if (tensor.name.ends_with("down_proj.qzeros")) {
      tensor = Bytes(tensor.name, "I32", {kIntermediate / 32, kHidden / 4}, 4, 0x77);
    }
  }
  return mixed;
}

TEST(MixedBits, FourBesideEight_KeepTheirValues) {
  for (const std::string format : {"ct_int4", "gptq"}) {
    SCOPED_TRACE(format);
    const WrittenModel plain((TinyModel(format))), written(WithEightBitsDown(format));
    ASSERT_TRUE(plain.source.ok() && written.source.ok()) << written.source.status().ToString();
    EXPECT_EQ(written.source->scheme.name, "int8_w8a16:g32");
    const auto before = plain.source->load(1), after = written.source->load(1);
    ASSERT_TRUE(before.ok() && after.ok()) << after.status().ToString();
    EXPECT_EQ(after->gate.codes.dtype(), DType::kU8);
    for (const auto member : {&CanonicalExpert::gate, &CanonicalExpert::up}) {
      const auto narrow = DequantizeMatrix((*before).*member), wide = DequantizeMatrix((*after).*member);
      ASSERT_TRUE(narrow.ok() && wide.ok());
      const auto bytes = static_cast<size_t>(narrow->view().total_bytes());
      EXPECT_EQ(std::memcmp(narrow->view().data(), wide->view().data(), bytes), 0);
    }
    const auto down = DequantizeMatrix(after->down);
    ASSERT_TRUE(down.ok());
    const int zero = format == "gptq" ? 0x77 + 1 : 128;
    EXPECT_EQ(down->view().as<float>()[0], static_cast<float>(0x97 - zero) * 0.5F);
  }
}

}  // namespace
}  // namespace fusedmoe
