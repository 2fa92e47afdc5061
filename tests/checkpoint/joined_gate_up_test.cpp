// Experts whose gate and up rows lie in one matrix each (gpt-oss as AMD Quark 0.13 writes it): the same
// numbers as from two matrices, in every format and either order of rows.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "checkpoint/raw_checkpoint.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;
using Json = nlohmann::ordered_json;

const std::string kStem = "model.layers.0.mlp.experts.";

// Outputs are along the first axis, but for the packed tensors of GPTQ.
size_t OutputAxis(const std::string& name) {
  return name.ends_with(".qweight") || name.ends_with(".qzeros") || name.ends_with(".scales") ? 1 : 0;
}

/// Quark's FP8 with a scale for each matrix or output, on the tensors that TinyModel makes for ModelOpt's.
TinyModel QuarkFp8(bool per_channel) {
  TinyModel model("modelopt_fp8");
  Json weight = {{"dtype", "fp8_e4m3"}, {"qscheme", per_channel ? "per_channel" : "per_tensor"}};
  Json input = weight;
  input["is_dynamic"] = per_channel;
  model.config["quantization_config"] = {
      {"quant_method", "quark"},
      {"global_quant_config", {{"weight", weight}, {"input_tensors", input}}},
      {"exclude", {"*.mlp.gate"}}};
  if (!per_channel) {
    return model;
  }
  std::erase_if(model.tensors, [](const RawTensor& tensor) { return tensor.name.ends_with(".input_scale"); });
  for (RawTensor& tensor : model.tensors) {
    if (tensor.name.ends_with(".weight_scale")) {
      tensor =
          Floats(tensor.name, {tensor.name.find("down") == std::string::npos ? kIntermediate : kHidden}, 1);
    }
  }
  return model;
}

TinyModel Separate(const std::string& format, const std::string& family) {
  TinyModel model = format == "quark_fp8"           ? QuarkFp8(false)
                    : format == "quark_fp8_channel" ? QuarkFp8(true)
                                                    : TinyModel(format);
  model.config["model_type"] = family;
  if (family == "gpt_oss") {
    model.tensors.push_back(Floats("model.layers.0.mlp.gate.bias", {kExperts}, 0.0F));
  }
  std::mt19937 random(7);
  const auto draw = [&](uint32_t low, uint32_t high) {
    return std::uniform_int_distribution<uint32_t>(low, high)(random);
  };
  std::vector<RawTensor> biases;
  for (RawTensor& tensor : model.tensors) {
    const std::string& name = tensor.name;
    if (!name.starts_with(kStem) || name.ends_with(".g_idx") || name.ends_with(".weight_shape") ||
        name.ends_with(".qzeros")) {
      continue;
    }
    const bool scale = name.find("scale") != std::string::npos;
    const bool floats = tensor.dtype == "F32" || tensor.dtype == "BF16";
    // A number of the matrix is one of gate and up together; down has its own.
    const uint32_t shared = name.find("down") == std::string::npos ? 0x3f20 : 0x3e90;
    const size_t width = tensor.dtype == "F32" ? 4 : floats ? 2 : 1;
    for (size_t at = 0; at < tensor.bytes.size(); at += width) {
      // Floats by their upper half: 0.25 to 1 and a little.
      const uint32_t upper = tensor.shape.empty() ? shared : draw(0x3e80, 0x3f8f);
      const uint32_t byte = scale                       ? draw(120, 134)  // E8M0
                            : tensor.dtype == "F8_E4M3" ? draw(0, 0x7e)   // no NaN
                                                        : draw(0, 255);
      const uint32_t value = width == 4 ? upper << 16 : width == 2 ? upper : byte;
      std::memcpy(tensor.bytes.data() + at, &value, width);
    }
    if (name.ends_with(".weight") || name.ends_with(".qweight") || name.ends_with(".weight_packed")) {
      const std::string module = name.substr(0, name.rfind('.'));
      RawTensor bias = Floats(module + ".bias", {module.ends_with("down_proj") ? kHidden : kIntermediate}, 0);
      for (size_t at = 0; at < bias.bytes.size(); at += 4) {
        const float value = static_cast<float>(draw(0, 1000)) / 256.0F - 2.0F;
        std::memcpy(bias.bytes.data() + at, &value, 4);
      }
      biases.push_back(std::move(bias));
    }
  }
  model.tensors.insert(model.tensors.end(), biases.begin(), biases.end());
  return model;
}

RawTensor Join(const RawTensor& gate, const RawTensor& up, std::string name, bool interleaved) {
  RawTensor joined = gate;
  joined.name = std::move(name);
  if (joined.name.ends_with(".weight_shape")) {
    return Longs(joined.name, {2 * kIntermediate, kHidden});
  }
  if (gate.shape.empty() || joined.name.ends_with(".g_idx")) {
    return joined;
  }
  const size_t axis = OutputAxis(joined.name), slabs = axis == 0 ? 1 : static_cast<size_t>(gate.shape[0]);
  const size_t rows = static_cast<size_t>(gate.shape[axis]), width = gate.bytes.size() / slabs / rows;
  joined.shape[axis] *= 2;
  joined.bytes.clear();
  for (size_t slab = 0; slab < slabs; ++slab) {
    for (size_t i = 0; i < 2 * rows; ++i) {
      const bool from_up = interleaved ? i % 2 == 1 : i >= rows;
      const size_t row = interleaved ? i / 2 : i % rows;
      joined.bytes += (from_up ? up : gate).bytes.substr((slab * rows + row) * width, width);
    }
  }
  return joined;
}

TinyModel Joined(const TinyModel& separate, bool interleaved) {
  TinyModel joined = separate;
  joined.tensors.clear();
  for (const RawTensor& tensor : separate.tensors) {
    const size_t at = tensor.name.find(".gate_proj.");
    if (at == std::string::npos) {
      if (tensor.name.find(".up_proj.") == std::string::npos) {
        joined.tensors.push_back(tensor);
      }
      continue;
    }
    const std::string module = tensor.name.substr(0, at), suffix = tensor.name.substr(at + 10);
    TinyModel copy = separate;
    joined.tensors.push_back(Join(tensor, copy.Find(module + ".up_proj" + suffix),
                                  module + ".gate_up_proj" + suffix, interleaved));
  }
  return joined;
}

struct Loaded {
  Status status;
  std::string scheme;
  std::vector<CanonicalExpert> experts;
};

Loaded Load(const TinyModel& model, const std::string& layout = "") {
  const TemporaryDirectory folder;
  model.WriteTo(folder);
  Loaded loaded;
  const auto checkpoint =
      Checkpoint::Open(folder.path().string(), {.io = IoMode::kPread, .expert_layout = layout});
  loaded.status = checkpoint.status();
  if (!loaded.status.ok()) {
    return loaded;
  }
  const auto source = (*checkpoint)->Experts(0);
  loaded.status = source.status();
  for (int64_t e = 0; loaded.status.ok() && e < kExperts; ++e) {
    auto expert = source->load(e);
    loaded.status = expert.status();
    if (expert.ok()) {
      loaded.experts.push_back(*std::move(expert));
    }
  }
  if (loaded.status.ok()) {
    loaded.scheme = source->scheme.name;
  }
  return loaded;
}

void ExpectSameNumbers(const CanonicalMatrix& found, const CanonicalMatrix& expected) {
  const auto a = DequantizeMatrix(found), b = DequantizeMatrix(expected);
  ASSERT_TRUE(a.ok() && b.ok()) << a.status().ToString() << b.status().ToString();
  ASSERT_EQ(a->shape(), b->shape());
  const int64_t cols = expected.cols;
  for (int64_t i = 0; i < a->shape().count(); ++i) {
    ASSERT_EQ(a->view().as<float>()[i], b->view().as<float>()[i])
        << "row " << i / cols << " column " << i % cols;
  }
  ASSERT_EQ(found.bias.shape(), expected.bias.shape());
  for (int64_t i = 0; i < expected.rows; ++i) {
    ASSERT_EQ(found.bias.view().as<float>()[i], expected.bias.view().as<float>()[i]) << "bias of row " << i;
  }
  EXPECT_EQ(found.input_tensor_scale, expected.input_tensor_scale);
  EXPECT_EQ(found.tensor_scale, expected.tensor_scale);
}

void ExpectSame(const Loaded& found, const Loaded& expected) {
  ASSERT_TRUE(expected.status.ok()) << expected.status.ToString();
  ASSERT_TRUE(found.status.ok()) << found.status.ToString();
  EXPECT_EQ(found.scheme, expected.scheme);
  for (size_t e = 0; e < expected.experts.size(); ++e) {
    const CanonicalExpert &one = found.experts[e], &other = expected.experts[e];
    SCOPED_TRACE("expert " + std::to_string(e));
    ExpectSameNumbers(one.gate, other.gate);
    ExpectSameNumbers(one.up, other.up);
    ExpectSameNumbers(one.down, other.down);
  }
}

TEST(JoinedGateUp, EveryFormatAndOrder_GivesTheNumbersOfTwoMatrices) {
  for (const std::string format :
       {"quark_mxfp4", "quark_fp8", "quark_fp8_channel", "bf16", "ct_mxfp4", "ct_int4", "ct_int8", "gptq"}) {
    SCOPED_TRACE(format);
    // The family tells how rows lie; --expert-layout overrides it.
    const TinyModel alternating = Separate(format, "gpt_oss"), halves = Separate(format, "qwen3_moe");
    ExpectSame(Load(Joined(alternating, true)), Load(alternating));
    ExpectSame(Load(Joined(halves, false)), Load(halves));
    ExpectSame(Load(Joined(alternating, false), "out_in,chunked"), Load(alternating));
    ExpectSame(Load(Joined(halves, true), "out_in,interleaved"), Load(halves));
  }
}

// Unsloth's gpt-oss, and GPTQModel's before 7: lists of matrices, each with the number of the expert behind.
TEST(JoinedGateUp, ListsOfMatrices_AreThoseOfTheExperts) {
  for (const std::string format : {"bf16", "gptq"}) {
    for (const std::string ending : {"_projs.", "."}) {
      SCOPED_TRACE(format + ending);
      const TinyModel alternating = Separate(format, "gpt_oss");
      TinyModel lists = Joined(alternating, true);
      for (RawTensor& tensor : lists.tensors) {
        for (int64_t expert = 0; expert < kExperts; ++expert) {
          const std::string number = std::to_string(expert);
          for (const std::string word : {"gate_up", "down"}) {
            const std::string from = "experts." + number + "." + word + "_proj.";
            if (const size_t at = tensor.name.find(from); at != std::string::npos) {
              tensor.name.replace(at, from.size(), "experts." + word + ending + number + ".");
            }
          }
        }
        if (const size_t at = tensor.name.find(".router."); at != std::string::npos) {
          tensor.name.replace(at, 8, ".router.linear.");
        }
      }
      ExpectSame(Load(lists), Load(alternating));
    }
  }
}

// A scale of 16 alternating rows is one of 8 rows of the gate and 8 of up, and the layer has one size of
// block.
TEST(JoinedGateUp, BlocksOfAlternatingRows_AreBlocksOfHalfAsManyRows) {
  TinyModel model = Separate("fp8_block", "gpt_oss");
  model = Joined(model, true);
  for (const std::string expert : {"0", "1"}) {
    const std::string module = kStem + expert + ".gate_up_proj";
    model.Find(module + ".weight") =
        Bytes(module + ".weight", "F8_E4M3", {2 * kIntermediate, kHidden}, 1, 0x38);
    RawTensor& scale = model.Find(module + ".weight_scale_inv");
    scale = Floats(scale.name, {2 * kIntermediate / 16, kHidden / 16}, 0);
    for (int i = 0; i < 2 * kIntermediate / 16 * kHidden / 16; ++i) {
      const auto value = static_cast<float>(i + 1);
      std::memcpy(scale.bytes.data() + static_cast<size_t>(i) * 4, &value, 4);
    }
  }
  const Loaded loaded = Load(model);
  ASSERT_TRUE(loaded.status.ok()) << loaded.status.ToString();
  for (const CanonicalMatrix* matrix : {&loaded.experts[1].gate, &loaded.experts[1].up}) {
    const auto decoded = DequantizeMatrix(*matrix);
    ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
    for (int64_t row = 0; row < kIntermediate; ++row) {
      for (int64_t col = 0; col < kHidden; ++col) {
        const auto expected = static_cast<float>(2 * row / 16 * (kHidden / 16) + col / 16 + 1);
        ASSERT_EQ(decoded->view().as<float>()[row * kHidden + col], expected) << row << " " << col;
      }
    }
  }
}

TEST(JoinedGateUp, Damage_IsNamed) {
  const TinyModel sound = Joined(Separate("quark_mxfp4", "gpt_oss"), true);
  const auto expect = [](const TinyModel& model, const std::string& tensor) {
    const Loaded loaded = Load(model);
    EXPECT_EQ(loaded.status.code(), StatusCode::kBadInput) << tensor;
    EXPECT_EQ(loaded.status.tensor(), tensor) << loaded.status.ToString();
  };
  for (const std::string expert : {"0", "1"}) {
    for (const std::string lost : {".gate_up_proj.weight", ".gate_up_proj.weight_scale", ".gate_up_proj.bias",
                                   ".down_proj.weight", ".down_proj.bias"}) {
      TinyModel model = sound;
      model.Drop(kStem + expert + lost);
      expect(model, kStem + expert + lost);
    }
  }
  TinyModel model = sound;
  RawTensor& half = model.Find(kStem + "1.gate_up_proj.weight");
  half = Bytes(half.name, "U8", {kIntermediate, kHidden / 2}, 1, 0x21);
  expect(model, half.name);

  model = sound;
  model.tensors.push_back(Bytes(kStem + "2.down_proj.weight", "U8", {kHidden, kIntermediate / 2}, 1, 0x21));
  expect(model, kStem + "2.down_proj.weight");
}

}  // namespace
}  // namespace fusedmoe
