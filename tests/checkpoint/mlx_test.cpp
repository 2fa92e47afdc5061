// Matrices of MLX: which keep their codes, how others are listed and what they decode to, and files that lie
// about them. A layer that MLX wrote stands in golden/formats.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "checkpoint/raw_checkpoint.hpp"
#include "support/mlx_checkpoint.hpp"
#include "support/tensors.hpp"
#include "weights/dequantize.hpp"
#include "weights/narrow.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

const std::string kStack = "model.layers.0.mlp.switch_mlp.";

// The plain model with stacks of experts: down is affine, 4 bits in groups of 32, codes 1, 2, 1, 2, ... for
// code / 2 - 1; gate and up are as they were, or affine too.
struct MlxModel : TinyModel {
  explicit MlxModel(bool all_affine = false) : TinyModel("bf16") {
    config["quantization"] = {{"group_size", 32}, {"bits", 4}};
    std::erase_if(tensors, [](const RawTensor& tensor) {
      return tensor.name.find(".mlp.experts.") != std::string::npos;
    });
    for (const char* name : {"gate_proj", "up_proj"}) {
      if (all_affine) {
        AddAffine(kStack + name, {kExperts, kIntermediate, kHidden});
      } else {
        tensors.push_back(Bf16(kStack + name + ".weight", {kExperts, kIntermediate, kHidden}, 0.25F));
      }
    }
    AddAffine(kStack + "down_proj", {kExperts, kHidden, kIntermediate});
  }

  void AddAffine(const std::string& module, std::vector<int64_t> shape) {
    const int64_t cols = shape.back();
    shape.back() = cols / 8;
    tensors.push_back(Bytes(module + ".weight", "U32", shape, 4, 0x21));
    shape.back() = cols / 32;
    tensors.push_back(Bf16(module + ".scales", shape, 0.5F));
    tensors.push_back(Bf16(module + ".biases", shape, -1.0F));
  }
};

std::string SchemeOfMlx(const TinyModel& model) {
  const WrittenModel written(model);
  return written.source.ok() ? written.source->scheme.name : written.source.status().ToString();
}

// A weight is (code - zero) * scale with zero = -bias / scale: three roundings of at most 2^-24, of the bias,
// of the difference and of the weight itself, of which the second is no more than both together. A group of
// one value has steps of 2^-30 of it or less, and codes up to 255.
void ExpectMlxWeights(const CanonicalMatrix& matrix, const testing_support::MlxStack& stack, int64_t expert) {
  const auto decoded = DequantizeMatrix(matrix);
  ASSERT_TRUE(decoded.ok()) << decoded.status().ToString();
  ASSERT_EQ(decoded->shape(), (Shape{stack.rows, stack.cols}));
  for (int64_t i = 0; i < decoded->shape().count(); ++i) {
    const auto weight = stack.At(expert, i / stack.cols, i % stack.cols);
    const auto got = static_cast<double>(decoded->view().as<float>()[i]);
    const double bound = std::fabs(weight.bias) * 0x1p-21 + std::fabs(weight.value()) * 0x1p-23;
    ASSERT_NEAR(got, weight.value(), bound) << i;
  }
}

// What comes of layers whose gate, up and down are stored like this.
struct MlxCase {
  testing_support::MlxLayer layer;
  const char* scheme;
  StoredIntegers gate_up = {}, down = {};
};

StoredIntegers NeedsInMlx(int bits, int64_t group) {
  StoredIntegers stored;
  stored.bits = bits;
  stored.group = group;
  stored.zero_points = true;
  return stored;
}

void ExpectMlxCase(const MlxCase& drawn, uint32_t seed) {
  const testing_support::MlxCheckpoint written(drawn.layer, seed);
  const auto checkpoint = Checkpoint::Open(written.path());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const auto source = (*checkpoint)->Experts(0);
  ASSERT_TRUE(source.ok()) << source.status().ToString();
  EXPECT_EQ(source->scheme.name, drawn.scheme);
  for (int64_t e = 0; e < drawn.layer.experts; ++e) {
    const auto expert = source->load(e);
    ASSERT_TRUE(expert.ok()) << expert.status().ToString();
    EXPECT_EQ(expert->gate.stored, drawn.gate_up);
    EXPECT_EQ(expert->down.stored, drawn.down);
    ExpectMlxWeights(expert->gate, written.gate(), e);
    ExpectMlxWeights(expert->up, written.up(), e);
    ExpectMlxWeights(expert->down, written.down(), e);
  }
}

testing_support::MlxLayer AlikeInMlx(int bits, int64_t group, DType dtype = DType::kBF16,
                                     bool numbered = false) {
  const testing_support::MlxBits stored{bits, group};
  return {.experts = 2,
          .hidden = 384,
          .intermediate = 128,
          .dtype = dtype,
          .gate = stored,
          .up = stored,
          .down = stored,
          .numbered = numbered};
}

TEST(Mlx, AffineExperts_KeepTheirCodes) {
  uint32_t seed = 0;
  for (const int bits : {2, 3, 4, 5, 6, 8}) {
    for (const int64_t group : {32, 64, 128}) {
      for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
        SCOPED_TRACE(testing::Message()
                     << bits << " bits in groups of " << group << ", " << DTypeName(dtype));
        const bool five = bits == 5;
        const std::string scheme =
            (bits <= 4 ? "int4_w4a16" : "int8_w8a16") +
            (bits <= 4 && group == 128 ? "" : ":g" + std::to_string(five ? 32 : group));
        const StoredIntegers stored = five ? NeedsInMlx(5, 32) : StoredIntegers();
        ExpectMlxCase({AlikeInMlx(bits, group, dtype, seed % 2 == 1), scheme.c_str(), stored, stored},
                      ++seed);
      }
    }
  }
}

// Of one layer, as the recipes of mlx-lm mix them; each matrix says what it needs.
TEST(Mlx, AffineExpertsOfDifferentBits_AreJoined) {
  const auto mixed = [](testing_support::MlxBits gate_up, testing_support::MlxBits down, bool numbered) {
    testing_support::MlxLayer layer = AlikeInMlx(4, 64, DType::kBF16, numbered);
    layer.gate = layer.up = gate_up;
    layer.down = down;
    return layer;
  };
  ExpectMlxCase({mixed({4, 64}, {8, 64}, false), "int8_w8a16:g64", NeedsInMlx(4, 64), {}}, 1);
  ExpectMlxCase({mixed({3, 64}, {6, 32}, true), "int8_w8a16:g32", NeedsInMlx(4, 64), {}}, 2);
  ExpectMlxCase({mixed({2, 128}, {4, 32}, false), "int4_w4a16:g32", NeedsInMlx(4, 128), {}}, 3);
  ExpectMlxCase({mixed({8, 32}, {8, 128}, false), "int8_w8a16:g32", {}, NeedsInMlx(8, 128)}, 4);
  ExpectMlxCase({mixed({4, 64}, {5, 64}, true), "int8_w8a16:g32", NeedsInMlx(4, 64), NeedsInMlx(5, 32)}, 5);
  testing_support::MlxLayer three = mixed({4, 64}, {6, 32}, false);
  three.up = {3, 64};
  ExpectMlxCase({three, "int8_w8a16:g32", NeedsInMlx(4, 64), {}}, 6);
}

// Ranks cut groups that are longer than those of the layer; what panels hold has the same weights.
TEST(Mlx, SharesOfRanks_HaveTheWeightsOfTheWhole) {
  using testing_support::MlxBits;
  for (const auto& [gate_up, down] :
       {std::pair(MlxBits{4, 64}, MlxBits{4, 64}), std::pair(MlxBits{4, 64}, MlxBits{6, 32}),
        std::pair(MlxBits{8, 32}, MlxBits{4, 128})}) {
    const testing_support::MlxCheckpoint written(
        {.hidden = 128, .intermediate = 384, .gate = gate_up, .up = gate_up, .down = down});
    const auto checkpoint = *Checkpoint::Open(written.path());
    const CanonicalExpert whole = *checkpoint->Experts(0)->load(1);
    for (const int ranks : {2, 5}) {
      int64_t begin = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        ParallelConfig parallel;
        parallel.tp_size = ranks;
        parallel.tp_rank = rank;
        const CanonicalExpert own = *checkpoint->Experts(0, parallel)->load(1);
        const int64_t count = own.down.cols;
        const auto expect = [](const CanonicalMatrix& part, const Result<CanonicalMatrix>& wanted) {
          ASSERT_TRUE(wanted.ok()) << wanted.status().ToString();
          const auto values = DequantizeMatrix(*wanted);
          ASSERT_TRUE(test::SameBytes(*DequantizeMatrix(part), *values));
          if (part.stored.bits == 0) {
            return;
          }
          const auto narrow = Narrow(part);
          ASSERT_TRUE(narrow.ok()) << narrow.status().ToString();
          EXPECT_TRUE(test::SameBytes(*DequantizeMatrix(*narrow), *values));
        };
        expect(own.gate, SliceMatrix(whole.gate, begin, count, 0, 128));
        expect(own.up, SliceMatrix(whole.up, begin, count, 0, 128));
        expect(own.down, SliceMatrix(whole.down, 0, 128, begin, count));
        begin += count;
      }
      EXPECT_EQ(begin, 384);
    }
  }
}

TEST(Mlx, AffineExpertsBesideOthers_AreDecoded) {
  EXPECT_EQ(SchemeOfMlx(MlxModel(true)), "int4_w4a16:g32");
  EXPECT_EQ(SchemeOfMlx(MlxModel()), "unquantized");
  // A group that no scheme has.
  MlxModel sixteen(true);
  const std::string down = kStack + "down_proj";
  sixteen.config["quantization"][down] = {{"group_size", 16}, {"bits", 4}};
  for (const char* part : {".scales", ".biases"}) {
    sixteen.Find(down + part) = Bf16(down + part, {kExperts, kHidden, kIntermediate / 16}, 0.5F);
  }
  EXPECT_EQ(SchemeOfMlx(sixteen), "unquantized");
  // Whoever writes weights anew.
  const WrittenModel written(MlxModel(true));
  CheckpointOptions options;
  options.decode_blocks = true;
  const auto checkpoint = Checkpoint::Open(written.folder.path().string(), options);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->Describe(0)->scheme.name, "unquantized");
}

// The smallest scale and a bias beyond all codes, one below every step, and none at all.
TEST(Mlx, ScalesAndBiasesOfAnySize_GiveFiniteWeights) {
  const std::string down = kStack + "down_proj";
  for (const float scale : {0.0F, -0.0F, 1e-40F, -1e-38F, 3e38F, -0.5F}) {
    for (const float bias : {0.0F, 1e-40F, -1e-30F, 1e30F, -3e38F}) {
      MlxModel model(true);
      model.Find(down + ".scales") = Bf16(down + ".scales", {kExperts, kHidden, 1}, scale);
      model.Find(down + ".biases") = Bf16(down + ".biases", {kExperts, kHidden, 1}, bias);
      const WrittenModel written(model);
      ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
      const auto expert = written.source->load(0);
      ASSERT_TRUE(expert.ok()) << scale << " " << bias << ": " << expert.status().ToString();
      const auto weights = DequantizeMatrix(expert->down);
      ASSERT_TRUE(weights.ok());
      const double want = static_cast<double>(scale) + static_cast<double>(bias);  // of code 1, the first
      const auto got = static_cast<double>(*weights->view().as<float>());
      // The file has the upper half of each float, less by 2^-7 at most; what counts as none is below 2^-96.
      const double size = std::fabs(static_cast<double>(scale)) + std::fabs(static_cast<double>(bias));
      EXPECT_TRUE(std::fabs(want) > 3.4e38 || std::fabs(got - want) <= size * 0x1.01p-7 + 0x1p-96)
          << scale << " " << bias << " " << got;
    }
  }
}

// Gemma 4.
TEST(Mlx, ExpertsBelowSwitchGlu_AreFound) {
  MlxModel model;
  for (RawTensor& tensor : model.tensors) {
    if (const size_t at = tensor.name.find("switch_mlp"); at != std::string::npos) {
      tensor.name.replace(at, std::string("switch_mlp").size(), "experts.switch_glu");
    }
  }
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  EXPECT_TRUE(written.source->load(1).ok());
}

TEST(Mlx, AffineMatrices_AreListedAndReadAsWhatTheyDecodeTo) {
  const WrittenModel written((MlxModel()));
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  EXPECT_EQ(written.source->scheme.name, "unquantized");
  EXPECT_EQ(written.checkpoint->producer(), "mlx");
  bool listed = false;
  for (const TensorInfo& info : written.checkpoint->tensors()) {
    EXPECT_FALSE(info.name.ends_with("scales") || info.name.ends_with("biases")) << info.name;
    if (info.name == kStack + "down_proj.weight") {
      listed = true;
      EXPECT_EQ(info.dtype, DType::kBF16);
      EXPECT_EQ(info.shape, (Shape{kExperts, kHidden, kIntermediate}));
      ExpectBytesAlone(*written.checkpoint, info.name);
    }
  }
  EXPECT_TRUE(listed);
  const auto expert = written.source->load(1);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  const Tensor& codes = expert->down.codes;
  ASSERT_EQ(codes.shape(), (Shape{kHidden, kIntermediate}));
  for (int64_t i = 0; i < codes.shape().count(); ++i) {
    const auto bits = static_cast<uint32_t>(codes.view().as<uint16_t>()[i]) << 16;
    float value = 0.0F;
    std::memcpy(&value, &bits, sizeof(value));
    ASSERT_EQ(value, i % 2 == 0 ? -0.5F : 0.0F) << i;
  }
}

// mlx-lm has a module for the router of some families: Bailing, Laguna, Step-3.5 with its bias.
TEST(Mlx, RoutersOfModulesOfTheirOwn_AreFound) {
  const std::string gate = "model.layers.0.mlp.gate.";
  for (const char* word : {"gate_proj.weight", "proj.weight", "gate.weight"}) {
    MlxModel model;
    model.Find(gate + "weight").name = gate + word;
    EXPECT_TRUE(LoadEverything(model).ok()) << LoadEverything(model).ToString();
  }
  MlxModel model;
  model.config["model_type"] = "step3p5";
  model.Find(gate + "weight").name = gate + "gate.weight";
  EXPECT_EQ(LoadEverything(model).code(), StatusCode::kBadInput) << "its routers have a bias";
  model.tensors.push_back(Bf16(gate + "router_bias", {kExperts}, 0.5F));
  const WrittenModel written(model);
  ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
  const auto router = written.checkpoint->LoadRouter(0);
  ASSERT_TRUE(router.ok()) << router.status().ToString();
  EXPECT_FALSE(router->correction_bias.empty());
}

TEST(Mlx, FilesThatContradictThemselves_AreNamed) {
  ASSERT_EQ(LoadEverything(MlxModel()).message(), "");
  const auto expect = [](const TinyModel& model, const std::string& word) {
    CountMalformed();
    const Status status = LoadEverything(model);
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << word;
    EXPECT_EQ(status.tensor(), kStack + "down_proj.weight") << status.ToString();
    EXPECT_NE(status.message().find(word), std::string::npos) << status.ToString();
  };
  const std::string scales = kStack + "down_proj.scales", biases = kStack + "down_proj.biases";
  MlxModel lost;
  lost.Drop(biases);
  expect(lost, "biases' is missing; biases like the scales are required");
  MlxModel wide;
  wide.Find(biases) = Floats(biases, {kExperts, kHidden, 1}, -1.0F);
  expect(wide, "biases' is F32 [");
  MlxModel few;
  few.Find(scales) = Bf16(scales, {kExperts, kHidden - 1, 1}, 0.5F);
  expect(few, "do not fit scales");
  MlxModel none;
  none.Find(scales) = Bf16(scales, {kExperts, kHidden, 0}, 0.5F);
  expect(none, "do not fit scales");
  MlxModel bytes;
  bytes.Find(scales) = Bytes(scales, "U8", {kExperts, kHidden, 4}, 1, 0x70);
  expect(bytes, "groups of 32 bits");
  MlxModel group;
  group.config["quantization"]["group_size"] = 48;
  expect(group, "128 bits in groups of 48 are 2.67 bits a code; 2 to 6 or 8 are required");
  MlxModel narrow;
  narrow.config["quantization"]["model.layers.0.mlp.switch_mlp.down_proj"] = {{"group_size", 16},
                                                                              {"bits", 8}};
  expect(narrow, "[64, 32] is needed");
  MlxModel bits;
  bits.config["quantization"]["bits"] = 8;
  expect(bits, "the tensors are affine of 4 bits in groups of 32, and 'quantization' says: affine of 8 bits");
  MlxModel mode;
  mode.config["quantization"]["mode"] = "mxfp4";
  expect(mode, "says: mxfp4 of 4 bits in groups of 32");
  MlxModel plain;
  plain.config["quantization"]["model.layers.0.mlp.switch_mlp.down_proj"] = false;
  expect(plain, "says: not quantized");
  MlxModel unknown;
  unknown.config["quantization"]["mode"] = "nf4";
  ExpectRefused("an unknown mode", unknown, {StatusCode::kUnsupported, ""});
  for (const auto& [name, what] : {std::pair(scales, "the scale of"), std::pair(biases, "the bias of")}) {
    MlxModel infinite;
    infinite.Find(name) = Bf16(name, {kExperts, kHidden, 1}, INFINITY);
    expect(infinite, what);
  }
  for (const char* where : {"group_size", "model.layers.0.mlp.switch_mlp.down_proj"}) {
    MlxModel wrong;
    wrong.config["quantization"][where] = nlohmann::ordered_json{{"group_size", "x"}};
    CountMalformed();
    const Status status = LoadEverything(wrong);
    EXPECT_EQ(status.code(), StatusCode::kBadInput);
    EXPECT_NE(status.message().find("'group_size'"), std::string::npos) << status.ToString();
  }
}

TEST(Mlx, FilesOfCodesThatContradictThemselves_AreNamed) {
  ASSERT_EQ(LoadEverything(MlxModel(true)).message(), "");
  const std::string down = kStack + "down_proj";
  const auto expect = [](const TinyModel& model, const std::string& tensor, const std::string& word) {
    CountMalformed();
    const Status status = LoadEverything(model);
    EXPECT_EQ(status.code(), StatusCode::kBadInput) << word;
    EXPECT_EQ(status.tensor(), tensor) << status.ToString();
    EXPECT_FALSE(status.file().empty()) << status.ToString();
    EXPECT_NE(status.message().find(word), std::string::npos) << status.ToString();
  };
  for (const char* part : {".scales", ".biases"}) {
    for (const float value : {INFINITY, -INFINITY, NAN}) {
      MlxModel infinite(true);
      infinite.Find(down + part) = Bf16(down + part, {kExperts, kHidden, 1}, value);
      expect(infinite, down + part, "finite is required");
    }
  }
  MlxModel lost(true);
  lost.Drop(down + ".biases");
  expect(lost, down + ".weight", "biases like the scales are required");
  MlxModel bits(true);
  bits.config["quantization"][down] = {{"group_size", 32}, {"bits", 6}};
  expect(bits, down + ".weight", "the tensors are affine of 4 bits in groups of 32");
  const auto resized = [&](std::vector<int64_t> shape, std::vector<int64_t> groups) {
    MlxModel model(true);
    model.Find(down + ".weight") = Bytes(down + ".weight", "U32", std::move(shape), 4, 0x21);
    for (const char* part : {".scales", ".biases"}) {
      model.Find(down + part) = Bf16(down + part, groups, 0.5F);
    }
    return model;
  };
  expect(resized({kExperts, kHidden, 8}, {kExperts, kHidden, 2}), down + ".weight", "is needed");
  expect(resized({kExperts, kHidden - 2, 4}, {kExperts, kHidden - 2, 1}), down + ".weight", "is needed");
  expect(resized({kExperts + 1, kHidden, 4}, {kExperts + 1, kHidden, 1}), down + ".weight",
         "the first dimension must be the 2 experts");
}

}  // namespace
}  // namespace fusedmoe
