// Sound containers whose contents lie: tensors, scales, shapes and sizes. Each is refused with the expected
// code, and the error names file and tensor.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

const std::string kGate = "model.layers.0.mlp.experts.0.gate_proj";

const std::vector<std::string> kFormats = {
    "bf16",    "modelopt_nvfp4", "modelopt_fp8", "ct_nvfp4", "ct_mxfp4",    "ct_int4",
    "ct_int8", "fp8_block",      "gptq",         "awq",      "quark_mxfp4", "autoround"};

TEST(MalformedModel, SoundModels_Load) {
  for (const std::string& format : kFormats) {
    const Status status = LoadEverything(TinyModel(format));
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
    if (tensor.name.starts_with(kGate)) {
      names.push_back(tensor.name.substr(kGate.size()));
    }
  }
  return names;
}

TEST(MalformedModel, MissingPartner_IsNamed) {
  for (const std::string& format : kFormats) {
    for (const std::string& role : Roles(format)) {
      if (IsOptional(format, role)) {
        continue;
      }
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
          if (tensor.shape.empty()) {
            tensor.shape = {1};
          }
          const auto rows = static_cast<size_t>(tensor.shape[axis]);
          if (static_cast<int64_t>(rows) + delta <= 0) {
            continue;
          }
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
      if ((dtype != "F32" && dtype != "BF16") || role == ".weight") {
        continue;
      }
      const bool single = TinyModel(format).Find(kGate + role).bytes.size() <= 4;
      for (const float value : {nan, infinity, -infinity, -1.0F, -0.0F, 0.0F}) {
        // A block may have the scale 0; a whole matrix may not. auto-round writes negative scales of groups.
        if (!single && value == 0.0F && !std::signbit(value)) {
          continue;
        }
        if (format == "autoround" && std::isfinite(value)) {
          continue;
        }
        if (format == "ct_int8" && value == 0.0F) {
          continue;  // a row without weights
        }
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

}  // namespace
}  // namespace fusedmoe
