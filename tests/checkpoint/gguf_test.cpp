// GGUF files made byte by byte: what sound ones decode to, and how damaged ones are refused.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "checkpoint/raw_checkpoint.hpp"
#include "checkpoint/raw_gguf.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

// Element `i` of a matrix of that type.
float Wanted(uint32_t type, int64_t i) {
  static constexpr float kE2m1[16] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0.0F, -.5, -1, -1.5, -2, -3, -4, -6};
  const auto j = static_cast<size_t>(i % 32);
  return type == kTypeF32    ? 0.25F
         : type == kTypeQ4_0 ? 0.5F * (static_cast<float>(j % 16) - 8)
         : type == kTypeQ8_0 ? 0.5F * (static_cast<float>(j) - 16)
                             : 0.5F * kE2m1[j % 16];
}

// Gate and up of one type, down of another.
void ExpectValues(const RawGguf& model, uint32_t type, uint32_t down, const std::string& scheme,
                  const std::string& family = "qwen3_moe") {
  SCOPED_TRACE(fmt::format("types {} and {}", type, down));
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string());
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  EXPECT_EQ((*checkpoint)->producer(), "gguf");
  EXPECT_EQ((*checkpoint)->family(), family);
  const auto description = (*checkpoint)->Describe(0);
  ASSERT_TRUE(description.ok()) << description.status().ToString();
  EXPECT_EQ(description->scheme.name, scheme);
  const auto experts = (*checkpoint)->Experts(0);
  ASSERT_TRUE(experts.ok()) << experts.status().ToString();
  const auto expert = experts->load(1);
  ASSERT_TRUE(expert.ok()) << expert.status().ToString();
  for (const CanonicalMatrix* matrix : {&expert->gate, &expert->down}) {
    const auto values = DequantizeMatrix(*matrix);
    ASSERT_TRUE(values.ok()) << values.status().ToString();
    for (int64_t i = 0; i < kMiddle * kHiddenSize; ++i) {
      const float wanted = Wanted(matrix == &expert->gate ? type : down, i);
      ASSERT_EQ(values->view().as<float>()[i], wanted) << "element " << i;
    }
  }
}

TEST(Gguf, Blocks_DecodeToTheirValues) {
  const std::pair<uint32_t, const char*> types[] = {{kTypeF32, "unquantized"},
                                                    {kTypeQ4_0, "int4_w4a16:g32"},
                                                    {kTypeQ8_0, "int8_w8a16:g32"},
                                                    {kTypeMxfp4, "mxfp4_w4a16"},
                                                    {kTypeNvfp4, "nvfp4_w4a16"}};
  for (const auto& [type, scheme] : types) {
    ExpectValues(Model(type), type, type, scheme);
  }
}

// Gate and up in one tensor, and tensors of a router that is the caller's: one of them scales every expert.
RawGguf Gemma4(uint32_t type, uint32_t down) {
  RawGguf model = Model(type, "gemma4");
  model.Find("blk.0.ffn_gate_exps.weight") =
      Stack("blk.0.ffn_gate_up_exps.weight", {kHiddenSize, 2 * kMiddle, 2}, type);
  std::erase_if(model.tensors, [](const auto& tensor) { return tensor.name == "blk.0.ffn_up_exps.weight"; });
  model.Find("blk.0.ffn_down_exps.weight") =
      Stack("blk.0.ffn_down_exps.weight", {kMiddle, kHiddenSize, 2}, down);
  model.tensors.push_back(Stack("blk.0.ffn_down_exps.scale", {2}, kTypeF32));
  model.tensors.push_back(Stack("blk.0.ffn_gate_inp.scale", {kHiddenSize}, kTypeF32));
  model.tensors.push_back(Stack("blk.0.ffn_up.weight", {kHiddenSize, kMiddle}, type));  // dense, beside them
  return model;
}

TEST(Gguf, Gemma4_IsRoutedByTheCallerWithTheScalesOfItsExperts) {
  ExpectValues(Gemma4(kTypeQ4_0, kTypeQ4_0), kTypeQ4_0, kTypeQ4_0, "int4_w4a16:g32", "gemma4");
  ExpectValues(Gemma4(kTypeQ4_0, kTypeQ8_0), kTypeQ4_0, kTypeQ8_0, "int8_w8a16:g32", "gemma4");
  ExpectValues(Gemma4(kTypeF32, kTypeF32), kTypeF32, kTypeF32, "unquantized", "gemma4");

  const TemporaryDirectory folder;
  const auto open = [&](const RawGguf& model) {
    folder.Write("a.gguf", model.Bytes());
    return *Checkpoint::Open((folder.path() / "a.gguf").string());
  };
  RawGguf routerless = Gemma4(kTypeQ8_0, kTypeQ8_0);
  std::erase_if(routerless.tensors,
                [](const auto& tensor) { return tensor.name.find("gate_inp") != std::string::npos; });
  for (const RawGguf& model : {Gemma4(kTypeQ8_0, kTypeQ8_0), routerless}) {
    const auto layer = open(model)->Describe(0);
    ASSERT_TRUE(layer.ok()) << layer.status().ToString();
    EXPECT_NE(layer->routed_by_caller, "");
    EXPECT_EQ(layer->config.routing.method, RoutingMethod::kCustom);
    EXPECT_EQ(layer->config.activation.kind, ActivationKind::kGeluTanh);
    EXPECT_FALSE(layer->shared_scheme);
  }
  // Beside NVFP4 such a scale would be that of the matrix as well.
  const Status doubtful = open(Gemma4(kTypeNvfp4, kTypeNvfp4))->Describe(0).status();
  EXPECT_EQ(doubtful.code(), StatusCode::kUnsupported);
  EXPECT_NE(doubtful.ToString().find("blk.0.ffn_down_exps.scale"), std::string::npos) << doubtful.ToString();
}

// llama.cpp chooses for each matrix: where rows are no whole blocks of 256, Q6_K becomes Q8_0, say.
TEST(Gguf, TypesOfOneLayer_MayDiffer) {
  for (const uint32_t type : {kTypeF32, kTypeQ4_0, kTypeQ8_0, kTypeMxfp4}) {
    for (const uint32_t down : {kTypeF32, kTypeQ4_0, kTypeQ8_0, kTypeMxfp4}) {
      if (type == down) {
        continue;
      }
      RawGguf model = Model(type);
      model.Find("blk.0.ffn_down_exps.weight") =
          Stack("blk.0.ffn_down_exps.weight", {kMiddle, kHiddenSize, 2}, down);
      const bool floats = type == kTypeF32 || down == kTypeF32;
      ExpectValues(model, type, down, floats ? "unquantized" : "int8_w8a16:g32");
    }
  }
}

// "blk.0.ffn_up_exps.weight" of two experts as files before April 2024 have it: "blk.0.ffn_up.0.weight", ...
RawGguf OldModel(uint32_t type, uint32_t down) {
  RawGguf model = Model(type, "llama");
  std::erase_if(model.tensors, [](const auto& tensor) { return tensor.name.ends_with("_exps.weight"); });
  for (const int64_t expert : {0, 1}) {
    for (const char* matrix : {"gate", "up", "down"}) {
      const bool is_down = std::string_view(matrix) == "down";
      model.tensors.push_back(Stack(fmt::format("blk.0.ffn_{}.{}.weight", matrix, expert),
                                    {static_cast<uint64_t>(is_down ? kMiddle : kHiddenSize),
                                     static_cast<uint64_t>(is_down ? kHiddenSize : kMiddle)},
                                    is_down ? down : type));
    }
  }
  return model;
}

TEST(Gguf, TensorForEachExpert_OfOldFiles) {
  for (const auto& [type, down, scheme] :
       {std::tuple(kTypeQ4_0, kTypeQ4_0, "int4_w4a16:g32"),
        std::tuple(kTypeQ4_0, kTypeQ8_0, "int8_w8a16:g32"), std::tuple(kTypeF32, kTypeQ4_0, "unquantized")}) {
    ExpectValues(OldModel(type, down), type, down, scheme, "mixtral");
  }
  RawGguf lost = OldModel(kTypeQ4_0, kTypeQ8_0);
  std::erase_if(lost.tensors, [](const auto& tensor) { return tensor.name == "blk.0.ffn_up.1.weight"; });
  const Status status = LoadEverything(lost);
  EXPECT_EQ(status.code(), StatusCode::kBadInput);
  EXPECT_EQ(status.tensor(), "blk.0.ffn_up.1.weight") << status.ToString();
}

// IQ4_K of ik_llama.cpp.
TEST(Gguf, TypeOfAFork_SaysWhatToDo) {
  RawGguf model = Model(kTypeQ4_0);
  model.Find("blk.0.ffn_up_exps.weight").type = 139;
  const Status status = LoadEverything(model);
  EXPECT_EQ(status.code(), StatusCode::kUnsupported);
  EXPECT_EQ(status.tensor(), "blk.0.ffn_up_exps.weight");
  EXPECT_NE(status.hint().find("ik_llama.cpp"), std::string::npos) << status.ToString();
}

// As repositories with many sizes of one model have them.
TEST(Gguf, FolderOfSeveralModels_NamesThem) {
  const TemporaryDirectory folder;
  folder.Write("m-Q4_0.gguf", Model(kTypeQ4_0).Bytes());
  EXPECT_TRUE(Checkpoint::Open(folder.path().string()).ok());
  folder.Write("m-Q8_0.gguf", Model(kTypeQ8_0).Bytes());
  const Status status = Checkpoint::Open(folder.path().string()).status();
  EXPECT_EQ(status.code(), StatusCode::kBadInput);
  EXPECT_NE(status.message().find("m-Q4_0.gguf and m-Q8_0.gguf"), std::string::npos) << status.ToString();
  EXPECT_FALSE(status.hint().empty());
}

TEST(Gguf, NegativeScalesOfQ4_0_AreItsNature) {
  RawGguf model = Model(kTypeQ4_0);
  RawGguf::Tensor& tensor = model.Find("blk.0.ffn_up_exps.weight");
  tensor.bytes.replace(0, 2, Raw<uint16_t>(0xb800));
  EXPECT_TRUE(LoadEverything(model).ok()) << LoadEverything(model).ToString();
  tensor.bytes.replace(0, 2, Raw<uint16_t>(0x7c00));
  const Status infinite = LoadEverything(model);
  EXPECT_EQ(infinite.code(), StatusCode::kBadInput);
  EXPECT_EQ(infinite.tensor(), "blk.0.ffn_up_exps.weight_scale");
}

TEST(Gguf, SideScale_MultipliesItsExpert) {
  RawGguf model = Model(kTypeNvfp4);
  RawGguf::Tensor side{"blk.0.ffn_up_exps.scale", {2}, kTypeF32, Raw(2.0F) + Raw(3.0F), 0};
  model.tensors.push_back(side);
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  const auto checkpoint = Checkpoint::Open((folder.path() / "a.gguf").string());
  ASSERT_TRUE(checkpoint.ok());
  for (const int64_t expert : {0, 1}) {
    const auto loaded = (*checkpoint)->Experts(0)->load(expert);
    ASSERT_TRUE(loaded.ok()) << loaded.status().ToString();
    EXPECT_EQ(loaded->up.tensor_scale, expert == 0 ? 2.0F : 3.0F);
    EXPECT_EQ(loaded->gate.tensor_scale, 1.0F);
  }
}

struct Damage {
  std::string what;
  std::function<void(RawGguf&)> apply;
  StatusCode code = StatusCode::kBadInput;
};

std::vector<Damage> Damages() {
  using enum StatusCode;
  const std::string up = "blk.0.ffn_up_exps.weight";
  const auto dim = [up](size_t axis, uint64_t value) {
    return [=](RawGguf& m) { m.Find(up).dims[axis] = value; };
  };
  const auto replace = [](const std::string& key, uint32_t type, const std::string& bytes) {
    return [=](RawGguf& m) {
      std::erase_if(m.values, [&](const auto& value) { return value.first == key; });
      m.Value(key, type, bytes);
    };
  };
  const auto add = [](const std::string& key, uint32_t type, const std::string& bytes) {
    return [=](RawGguf& m) { m.Value(key, type, bytes); };
  };
  std::vector<Damage> damages = {
      {"version 1", [](RawGguf& m) { m.version = 1; }, kUnsupported},
      {"version 4", [](RawGguf& m) { m.version = 4; }, kUnsupported},
      {"big endian", [](RawGguf& m) { m.version = 0x03000000; }, kUnsupported},
      {"one tensor more than there is", [](RawGguf& m) { m.more_tensors = 1; }},
      {"2^63 tensors", [](RawGguf& m) { m.more_tensors = uint64_t{1} << 63; }},
      {"2^64 - 5 tensors", [](RawGguf& m) { m.more_tensors = ~uint64_t{8}; }},
      {"one value more than there is", [](RawGguf& m) { m.more_values = 1; }},
      {"2^62 values", [](RawGguf& m) { m.more_values = uint64_t{1} << 62; }},
      {"bytes behind the data", [](RawGguf& m) { m.tail = std::string(33, 'x'); }},
      {"a list of lists",
       add("a.b", kArray, Raw(kArray) + Raw<uint64_t>(1) + Raw(kUint8) + Raw<uint64_t>(0))},
      {"an unknown value type", add("a.b", 13, Raw<uint64_t>(0))},
      {"an unknown element type",
       add("a.b", kArray, Raw<uint32_t>(99) + Raw<uint64_t>(1) + Raw<uint64_t>(0))},
      {"a list of 2^60", add("a.b", kArray, Raw(kUint64) + Raw<uint64_t>(uint64_t{1} << 60))},
      {"2^61 strings", add("a.b", kArray, Raw(kText) + Raw<uint64_t>(uint64_t{1} << 61))},
      {"a string of 2^63", add("a.b", kText, Raw<uint64_t>(uint64_t{1} << 63))},
      {"a boolean of 2", add("a.b", kBoolean, Raw<uint8_t>(2))},
      {"a key twice", add("general.name", kText, Text("again"))},
      {"an empty key", add("", kUint8, Raw<uint8_t>(1))},
      {"a key with a zero byte", add(std::string("a\0b", 3), kUint8, Raw<uint8_t>(1))},
      {"a key of no UTF-8", add("a\xff", kUint8, Raw<uint8_t>(1))},
      {"a key of 5000 bytes", add(std::string(5000, 'k'), kUint8, Raw<uint8_t>(1))},
      {"alignment 0", add("general.alignment", kUint32, Raw<uint32_t>(0))},
      {"alignment 24", add("general.alignment", kUint32, Raw<uint32_t>(24))},
      {"alignment 2^31", add("general.alignment", kUint32, Raw<uint32_t>(1U << 31))},
      {"another alignment than the data have", add("general.alignment", kUint32, Raw<uint32_t>(4096))},
      {"alignment as text", add("general.alignment", kText, Text("32"))},
      {"no architecture", [](RawGguf& m) { m.values.erase(m.values.begin()); }},
      {"architecture as number", replace("general.architecture", kUint32, Raw<uint32_t>(1))},
      {"a dense architecture", replace("general.architecture", kText, Text("qwen3")), kUnsupported},
      {"no expert_count", [](RawGguf& m) { m.values.erase(m.values.begin() + 5); }},
      {"expert_count as text", replace("qwen3moe.expert_count", kText, Text("2"))},
      {"expert_count 0", replace("qwen3moe.expert_count", kUint32, Raw<uint32_t>(0))},
      {"expert_count 3", replace("qwen3moe.expert_count", kUint32, Raw<uint32_t>(3))},
      {"expert_count 2^63", replace("qwen3moe.expert_count", kUint64, Raw<uint64_t>(uint64_t{1} << 63))},
      {"expert_count 2.5", replace("qwen3moe.expert_count", kFloat32, Raw(2.5F))},
      {"expert_used_count 3", replace("qwen3moe.expert_used_count", kUint32, Raw<uint32_t>(3))},
      {"embedding_length 32", replace("qwen3moe.embedding_length", kUint32, Raw<uint32_t>(32))},
      {"embedding_length NaN", replace("qwen3moe.embedding_length", kFloat32, Raw(std::nanf("")))},
      {"scores of kind 9", add("qwen3moe.expert_gating_func", kUint32, Raw<uint32_t>(9)), kUnsupported},
      {"infinite weights scale", add("qwen3moe.expert_weights_scale", kFloat32, Raw(INFINITY))},
      {"negative weights scale", add("qwen3moe.expert_weights_scale", kFloat32, Raw(-1.0F))},
      {"3 files", add("split.count", kUint32, Raw<uint32_t>(3))},
      {"2^31 files", add("split.count", kUint32, Raw<uint32_t>(1U << 31))},
      {"type 200", [up](RawGguf& m) { m.Find(up).type = 200; }, kUnsupported},
      {"an unread type",
       [up](RawGguf& m) {
         m.tensors.pop_back();
         m.tensors.push_back(Stack("blk.0.ffn_down_exps.weight", {256, kHiddenSize, 2}, kTypeQ8K));
       },
       kUnsupported},
      {"no dimension", [up](RawGguf& m) { m.Find(up).dims.clear(); }},
      {"five dimensions", [up](RawGguf& m) { m.Find(up).dims = {32, 1, 1, 1, 1}; }},
      {"a dimension of 0", dim(2, 0)},
      {"rows of 33", dim(0, 33)},
      {"a dimension of 2^63", dim(1, uint64_t{1} << 63)},
      {"dimensions whose product overflows", dim(1, uint64_t{1} << 58)},
      {"more experts than bytes", dim(2, 4000)},
      {"an offset too large", [up](RawGguf& m) { m.Find(up).offset_error = 32; }},
      {"an offset too small", [up](RawGguf& m) { m.Find(up).offset_error = -32; }},
      {"an offset not aligned", [up](RawGguf& m) { m.Find(up).offset_error = 1; }},
      {"a tensor twice", [up](RawGguf& m) { m.tensors.push_back(m.Find(up)); }},
      {"a name of nothing", [up](RawGguf& m) { m.Find(up).name = ""; }},
      {"a name with a line feed", [up](RawGguf& m) { m.Find(up).name = "a\nb"; }},
      {"no router", [](RawGguf& m) { m.tensors.erase(m.tensors.begin()); }},
      {"no down projection", [](RawGguf& m) { m.tensors.pop_back(); }},
      {"no gate", [](RawGguf& m) { m.tensors.erase(m.tensors.begin() + 1); }},
      {"a scale of NaN", [up](RawGguf& m) { m.Find(up).bytes[0] = '\xff'; }},
  };
  return damages;
}

TEST(Gguf, DamagedFiles_AreRefused) {
  ASSERT_TRUE(LoadEverything(Model(kTypeMxfp4)).ok()) << LoadEverything(Model(kTypeMxfp4)).ToString();
  for (const Damage& damage : Damages()) {
    SCOPED_TRACE(damage.what);
    RawGguf model = Model(kTypeMxfp4);
    damage.apply(model);
    const Status status = LoadEverything(model);
    EXPECT_EQ(status.code(), damage.code) << status.ToString();
    EXPECT_FALSE(status.file().empty()) << status.ToString();
  }
}

TEST(Gguf, TruncatedFiles_AreRefused) {
  const std::string whole = Model(kTypeQ4_0).Bytes();
  const TemporaryDirectory folder;
  for (size_t size = 0; size < whole.size(); size += size < 1100 ? 1 : 509) {
    folder.Write("a.gguf", whole.substr(0, size));
    const Status status = LoadEverything(folder.path() / "a.gguf");
    ASSERT_EQ(status.code(), StatusCode::kBadInput) << size << ": " << status.ToString();
  }
}

TEST(Gguf, FlippedBytesOfTheHeader_NeverCrash) {
  const std::string whole = Model(kTypeNvfp4).Bytes();
  const TemporaryDirectory folder;
  for (size_t at = 4; at < 1000; ++at) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ 0x80);
    folder.Write("a.gguf", bytes);
    // Some bytes are padding, or letters of a name that nobody asks for.
    const Status status = LoadEverything(folder.path() / "a.gguf");
    ASSERT_TRUE(status.ok() || status.code() == StatusCode::kBadInput ||
                status.code() == StatusCode::kUnsupported || status.code() == StatusCode::kUsage)
        << at << ": " << status.ToString();
  }
}

TEST(Gguf, SplitFiles_AreReadTogether) {
  RawGguf first = Model(kTypeMxfp4), second;
  const auto count = [](RawGguf& file, uint32_t number) {
    file.Value("split.count", kUint32, Raw<uint32_t>(2));
    file.Value("split.no", kUint32, Raw(number));
  };
  second.tensors = {first.tensors.back()};
  first.tensors.pop_back();
  count(first, 0);
  count(second, 1);
  const TemporaryDirectory folder;
  folder.Write("m-00001-of-00002.gguf", first.Bytes());
  const auto path = folder.path() / "m-00001-of-00002.gguf";
  EXPECT_EQ(LoadEverything(path).code(), StatusCode::kBadInput) << "the second file is missing";
  folder.Write("m-00002-of-00002.gguf", second.Bytes());
  EXPECT_TRUE(LoadEverything(path).ok()) << LoadEverything(path).ToString();
  const auto both = (*Checkpoint::Open(path.string()))->Files();
  EXPECT_EQ(both, (std::vector<std::string>{path.string(), folder.path() / "m-00002-of-00002.gguf"}));
  second.values.pop_back();
  count(second, 0);
  folder.Write("m-00002-of-00002.gguf", second.Bytes());
  EXPECT_EQ(LoadEverything(path).code(), StatusCode::kBadInput) << "the same file twice";
}

}  // namespace
}  // namespace fusedmoe
