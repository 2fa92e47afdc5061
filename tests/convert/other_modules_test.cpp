// Quantized matrices beside the experts (attention): their sizes follow from their codes.
#include <algorithm>
#include <cstring>
#include <functional>

#include <fusedmoe/jobs/quantize.hpp>

#include "convert/convert_files.hpp"

namespace fusedmoe::convert_test {
namespace {

class ConvertOtherModules : public ConvertTest {
 protected:
  // The checkpoint with a copy of an expert's matrix as one of attention, written to `name`.
  std::string WithAttention(const std::string& source, const std::string& name,
                            const std::function<void(NamedTensor&)>& change = {}) const {
    fs::create_directories(At(name));
    auto file = ReadSafetensors(source + "/model.safetensors");
    EXPECT_TRUE(file.ok()) << file.status().ToString();
    for (NamedTensor& tensor : file->tensors) {
      if (change) {
        change(tensor);
      }
    }
    const std::string from = "layers.0.mlp.experts.0.down_proj.", to = "layers.0.self_attn.o_proj.";
    std::vector<NamedTensor> copies;
    for (const NamedTensor& tensor : file->tensors) {
      if (const size_t at = tensor.name.find(from); at != std::string::npos) {
        copies.push_back(tensor);
        copies.back().name.replace(at, from.size(), to);
      }
    }
    EXPECT_FALSE(copies.empty());
    file->tensors.insert(file->tensors.end(), copies.begin(), copies.end());
    EXPECT_TRUE(WriteSafetensors(At(name) + "/model.safetensors", file->tensors, file->metadata).ok());
    Json config = ReadJson(source + "/config.json");
    config["quantization_config"]["ignore"] = Json::array();
    WriteJson(At(name) + "/config.json", config);
    return At(name);
  }

  // Both decode to the same numbers.
  void ExpectEqualTwins(const std::string& source) const {
    const std::string plain = Lossless(source, "f32", fs::path(source).filename().string() + "-f32");
    const auto file = ReadSafetensors(plain + "/model.safetensors");
    ASSERT_TRUE(file.ok()) << file.status().ToString();
    const Tensor* expert = file->Find("model.layers.0.mlp.experts.0.down_proj.weight");
    const Tensor* attention = file->Find("model.layers.0.self_attn.o_proj.weight");
    ASSERT_TRUE(expert != nullptr && attention != nullptr);
    ASSERT_EQ(attention->shape(), expert->shape());
    EXPECT_EQ(std::memcmp(attention->view().data(), expert->view().data(), expert->view().total_bytes()), 0);
  }
};

// Qwen3.5: the experts of its draft layer lie in stacks, as those of the model do.
TEST_F(ConvertOtherModules, StacksOfDraftLayers_AreAmongTheIgnored) {
  const std::string source = Sample("plain", "unquantized");
  auto file = ReadSafetensors(source + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  for (const char* projection : {"gate_up_proj", "down_proj"}) {
    auto stack = Tensor::Allocate(DType::kBF16, {4, 8, 8});
    ASSERT_TRUE(stack.ok());
    std::memset(stack->mutable_view().data(), 0, static_cast<size_t>(stack->view().total_bytes()));
    file->tensors.push_back({std::string("mtp.layers.0.mlp.experts.") + projection, *std::move(stack)});
  }
  ASSERT_TRUE(WriteSafetensors(source + "/model.safetensors", file->tensors, file->metadata).ok());
  const auto checkpoint = Checkpoint::Open(source);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const std::string ct = "re:mtp\\.layers\\.0\\.mlp\\.experts\\..*";
  const struct {
    const char *scheme, *tool, *list;
    std::string name;
  } cases[] = {{"int4_w4a16:g32", "compressed-tensors", "ignore", ct},
               {"nvfp4_w4a16", "modelopt", "ignore", "mtp.layers.0.mlp.experts.*"},
               {"fp8_w8a8:block128", "deepseek", "modules_to_not_convert", "mtp.layers.0.mlp.experts"}};
  for (const auto& one : cases) {
    SCOPED_TRACE(one.tool);
    QuantizeOptions options;
    options.scheme = one.scheme;
    options.format = one.tool;
    options.directory = At(one.tool);
    const auto report = Quantize(*checkpoint, options);
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    const Json list = ReadJson(options.directory + "/config.json")["quantization_config"][one.list];
    EXPECT_NE(std::find(list.begin(), list.end(), one.name), list.end()) << list;
  }
  // Layers that stay as they are beside such stacks, converted to another tool.
  ASSERT_TRUE(To(At("modelopt"), "compressed-tensors", "converted").ok());
  const Json list = ReadJson(At("converted") + "/config.json")["quantization_config"]["ignore"];
  EXPECT_NE(std::find(list.begin(), list.end(), ct), list.end()) << list;
}

// W4AFP8: scales of inputs whose names are not those of their matrices belong to the experts all the same.
TEST_F(ConvertOtherModules, ScalesOfInputsByOtherNames_AreNotCopied) {
  const std::string source = Sample("plain", "unquantized");
  auto file = ReadSafetensors(source + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  const auto filled = [](DType dtype, const Shape& shape, const auto& value) {
    Tensor tensor = *Tensor::Allocate(dtype, shape);
    auto* const bytes = reinterpret_cast<char*>(tensor.mutable_view().data());
    for (int64_t at = 0; at < tensor.view().total_bytes(); at += sizeof(value)) {
      std::memcpy(bytes + at, &value, sizeof(value));
    }
    return tensor;
  };
  std::vector<NamedTensor> tensors;
  for (const NamedTensor& tensor : file->tensors) {
    const size_t list = tensor.name.find(".experts."), projection = tensor.name.rfind("_proj.weight");
    if (list == std::string::npos || projection == std::string::npos) {
      tensors.push_back(tensor);
      continue;
    }
    const size_t dot = tensor.name.rfind('.', projection);
    const char kind = tensor.name[dot + 1];
    const std::string number = kind == 'g' ? "w1" : kind == 'd' ? "w2" : "w3";
    const int64_t rows = tensor.tensor.dim(0), cols = tensor.tensor.dim(1);
    tensors.push_back({tensor.name, filled(DType::kI8, {rows, cols / 2}, int8_t{0x21})});
    tensors.push_back({tensor.name + "_scale_inv", filled(DType::kF32, {rows, cols / 128}, 0.5F)});
    tensors.push_back(
        {tensor.name.substr(0, dot + 1) + number + ".input_scale", filled(DType::kF32, {1}, 0.25F)});
  }
  ASSERT_TRUE(WriteSafetensors(source + "/model.safetensors", tensors, file->metadata).ok());
  Json config = ReadJson(source + "/config.json");
  config["quantization_config"] = {{"quant_method", "w4afp8"}};
  WriteJson(source + "/config.json", config);
  const auto written = ReadSafetensors(Lossless(source, "f32", "out") + "/model.safetensors");
  ASSERT_TRUE(written.ok()) << written.status().ToString();
  for (const NamedTensor& tensor : written->tensors) {
    EXPECT_FALSE(tensor.name.ends_with(".input_scale")) << tensor.name;
  }
}

TEST_F(ConvertOtherModules, FourBitsInABytePerCode_AreReadAtTheirWidth) {
  const fs::path formats = fs::path(FMOE_GOLDEN_DIR) / "formats";
  ExpectEqualTwins(WithAttention((formats / "ct-w3a8").string(), "unpacked"));
}

TEST_F(ConvertOtherModules, SixBitFloats_AreFourInThreeBytes) {
  const std::string four = Lossless(Sample("four", "mxfp4_w4a16"), "compressed-tensors", "ct");
  Json config = ReadJson(four + "/config.json");
  Json& group = config["quantization_config"]["config_groups"]["group_0"];
  group["weights"]["num_bits"] = 6;
  group["format"] = config["quantization_config"]["format"] = "mxfp6-pack-quantized";
  const std::string six = WithAttention(four, "six", [](NamedTensor& tensor) {
    if (!tensor.name.ends_with("weight_packed")) {
      return;
    }
    auto codes = Tensor::Allocate(DType::kU8, {tensor.tensor.dim(0), tensor.tensor.dim(1) / 2 * 3});
    ASSERT_TRUE(codes.ok());
    for (int64_t i = 0; i < codes->view().count(); ++i) {
      codes->mutable_view().as<uint8_t>()[i] = static_cast<uint8_t>(i * 37 + 11);
    }
    tensor.tensor = *std::move(codes);
  });
  WriteJson(six + "/config.json", config);
  ExpectEqualTwins(six);
}

// Where a module of a scheme with stored scales of inputs has none, ModelOpt left its inputs alone.
TEST_F(ConvertOtherModules, MissingInputScale_MeansThatInputsAreNotQuantized) {
  const std::string both = WithAttention(Sample("static", "fp8_w8a8:tensor_static"), "both");
  auto file = ReadSafetensors(both + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  const size_t before = file->tensors.size();
  std::erase_if(file->tensors, [](const NamedTensor& tensor) {
    return tensor.name == "model.layers.0.self_attn.o_proj.input_scale";
  });
  ASSERT_EQ(file->tensors.size(), before - 1);
  fs::create_directories(At("one"));
  fs::copy_file(both + "/config.json", At("one") + "/config.json");
  ASSERT_TRUE(WriteSafetensors(At("one") + "/model.safetensors", file->tensors, file->metadata).ok());
  ExpectEqualTwins(At("one"));
  Lossless(At("one"), "compressed-tensors", "one-ct");
}

// 4 bits, 36 columns: the last of five words is half empty, and only weight_shape says so.
TEST_F(ConvertOtherModules, ColumnsThatFillNoWord_AreThoseOfWeightShape) {
  fs::create_directories(At("odd"));
  const std::string ct = Lossless(Sample("groups", "int4_w4a16:channel"), "compressed-tensors", "ct");
  auto file = ReadSafetensors(ct + "/model.safetensors");
  ASSERT_TRUE(file.ok());
  const std::string stem = "model.layers.0.self_attn.o_proj.";
  auto codes = Tensor::Allocate(DType::kI32, {8, 5}), scale = Tensor::Allocate(DType::kF32, {8, 1});
  auto shape = Tensor::Allocate(DType::kI64, {2});
  ASSERT_TRUE(codes.ok() && scale.ok() && shape.ok());
  std::memset(codes->mutable_view().data(), 0x99, codes->view().total_bytes());  // 9 - 8 = 1
  std::fill_n(scale->mutable_view().as<float>(), 8, 0.5F);
  shape->mutable_view().as<int64_t>()[0] = 8;
  shape->mutable_view().as<int64_t>()[1] = 36;
  file->tensors.push_back({stem + "weight_packed", *codes});
  file->tensors.push_back({stem + "weight_scale", *scale});
  file->tensors.push_back({stem + "weight_shape", *shape});
  ASSERT_TRUE(WriteSafetensors(At("odd") + "/model.safetensors", file->tensors, file->metadata).ok());
  Json config = ReadJson(ct + "/config.json");
  config["quantization_config"]["ignore"] = Json::array();
  WriteJson(At("odd") + "/config.json", config);
  const auto plain = ReadSafetensors(Lossless(At("odd"), "f32", "odd-f32") + "/model.safetensors");
  ASSERT_TRUE(plain.ok());
  const Tensor* found = plain->Find(stem + "weight");
  ASSERT_NE(found, nullptr);
  ASSERT_EQ(found->shape(), (Shape{8, 36}));
  EXPECT_EQ(*found->view().as<float>(), 0.5F);
}

}  // namespace
}  // namespace fusedmoe::convert_test
