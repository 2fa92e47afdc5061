#include <random>

#include <nlohmann/json.hpp>

#include "jobs/prepare/description.hpp"
#include "prepared/prepared_layer.hpp"
#include "support/tensors.hpp"

namespace fusedmoe::prepared_test {
namespace {

using Json = nlohmann::ordered_json;

class PreparedFiles : public testing::TestWithParam<PreparedCase> {};

Tensor Output(const MoeLayer& layer, const Tensor& hidden) {
  Tensor output = *Tensor::Allocate(DType::kBF16, hidden.shape());
  const Workspace workspace = *layer.CreateWorkspace();
  MoeLayer::Inputs inputs;
  inputs.hidden = hidden.view();
  MoeLayer::Outputs outputs;
  outputs.output = output.mutable_view();
  const Status status = layer.Forward(inputs, outputs, workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return output;
}

// Router, routing method, shared expert, biases, activation and its constants all come out of the file.
TEST_P(PreparedFiles, Run_GivesTheBytesOfTheCheckpoint) {
  const Files files;
  const auto checkpoint = files.Sample(GetParam().family, GetParam().scheme);
  const LayerOptions options = Files::OptionsOf(GetParam());
  const Tensor hidden = *ReadSafetensors(files / "checkpoint/io/input.safetensors")->Find("hidden_states");
  const auto from_checkpoint = MoeLayer::Load(checkpoint, checkpoint->moe_layers().front(), options);
  ASSERT_TRUE(from_checkpoint.ok()) << from_checkpoint.status().ToString();
  const auto prepared = PreparedLayer::Open(files.Prepare(*checkpoint, GetParam()));
  ASSERT_TRUE(prepared.ok()) << prepared.status().ToString();
  LayerOptions unnamed = options;
  unnamed.backend.clear();
  const auto from_file = (*prepared)->Load(unnamed);
  ASSERT_TRUE(from_file.ok()) << from_file.status().ToString();
  EXPECT_TRUE(test::SameBytes(Output(**from_file, hidden), Output(**from_checkpoint, hidden)));
  EXPECT_EQ((*from_file)->plan().backend, GetParam().backend);
  EXPECT_EQ((*from_file)->plan().recipe, (*from_checkpoint)->plan().recipe);
  EXPECT_EQ((*from_file)->plan().layout_error, (*from_checkpoint)->plan().layout_error);
  EXPECT_EQ((*from_file)->plan().shared == nullptr, (*from_checkpoint)->plan().shared == nullptr);
  EXPECT_TRUE((*prepared)->FindDamage().empty());
}

TEST_P(PreparedFiles, AnotherBackend_IsRefusedByBothKeys) {
  const Files files;
  const auto checkpoint = files.Sample(GetParam().family, GetParam().scheme);
  const auto prepared = PreparedLayer::Open(files.Prepare(*checkpoint, GetParam()));
  ASSERT_TRUE(prepared.ok()) << prepared.status().ToString();
  for (const auto& [other, key] :
       {std::pair("MARLIN", "marlin/2"), std::pair("VLLM_CUTLASS", "vllm_cutlass/1"),
        std::pair("REFERENCE", "canonical"), std::pair("CPU_FUSED", "cpu_panels")}) {
    if (other == GetParam().backend) {
      continue;
    }
    LayerOptions options = Files::OptionsOf(GetParam());
    options.backend = other;
    const auto refused = (*prepared)->Load(options);
    ASSERT_FALSE(refused.ok()) << other;
    EXPECT_EQ(refused.status().code(), StatusCode::kUnsupported);
    EXPECT_NE(refused.status().message().find(key), std::string::npos) << refused.status().ToString();
    EXPECT_NE(refused.status().message().find((*prepared)->layout_key()), std::string::npos);
    EXPECT_FALSE(InvertPrepared((*prepared)->path(), files / "inverted.safetensors", other).ok());
    EXPECT_FALSE(std::filesystem::exists(files / "inverted.safetensors"));
  }
}

TEST_P(PreparedFiles, Inverted_RunsAsTheReferenceOfTheCheckpoint) {
  const Files files;
  const auto checkpoint = files.Sample(GetParam().family, GetParam().scheme);
  const std::string path = files.Prepare(*checkpoint, GetParam());
  const std::string canonical = files / "canonical.safetensors";
  const auto report = InvertPrepared(path, canonical, GetParam().backend);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const auto inverted = PreparedLayer::Open(canonical);
  ASSERT_TRUE(inverted.ok()) << inverted.status().ToString();
  EXPECT_EQ((*inverted)->layout_key(), "canonical");
  const auto same = (*inverted)->CompareWith(checkpoint.get(), checkpoint->moe_layers().front());
  ASSERT_TRUE(same.ok()) << same.status().ToString();
  EXPECT_TRUE(same->empty()) << same->front().tensor;
  LayerOptions options;
  options.backend = "REFERENCE";
  options.max_tokens = 16;
  const Tensor hidden = *ReadSafetensors(files / "checkpoint/io/input.safetensors")->Find("hidden_states");
  const auto ours = (*inverted)->LoadCanonical(options);
  const auto theirs = MoeLayer::Load(checkpoint, checkpoint->moe_layers().front(), options);
  ASSERT_TRUE(ours.ok() && theirs.ok());
  EXPECT_TRUE(test::SameBytes(Output(**ours, hidden), Output(**theirs, hidden)));
}

// Tensors that live at a time beyond the result: at most one expert, scalars and the list of names aside.
TEST_P(PreparedFiles, PeakMemory_IsTheResultAndOneExpert) {
  const Files files;
  for (const int64_t experts : {4, 16}) {
    const auto checkpoint = files.Sample(GetParam().family, GetParam().scheme, experts);
    const auto report = WritePrepared(*checkpoint, checkpoint->moe_layers().front(),
                                      Files::OptionsOf(GetParam()), files / "prepared.safetensors");
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_EQ(report->experts_at_a_time, 1);
    EXPECT_EQ(report->expert_bytes * experts, report->prepared_bytes);
    EXPECT_GE(report->peak_bytes, report->prepared_bytes) << experts;
    EXPECT_LE(report->peak_bytes, report->prepared_bytes + report->expert_bytes) << experts;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, PreparedFiles, testing::ValuesIn(AllCases()));

/// Opens and, if that goes well, loads and runs: never a crash, and a refusal is that of a bad file.
void ExpectNoCrash(const std::string& path, const std::string& what) {
  const auto prepared = PreparedLayer::Open(path);
  if (!prepared.ok()) {
    EXPECT_EQ(prepared.status().code(), StatusCode::kBadInput)
        << what << ": " << prepared.status().ToString();
    EXPECT_EQ(prepared.status().file(), path) << what;
    return;
  }
  LayerOptions options;
  options.max_tokens = 4;
  const auto layer = (*prepared)->Load(options);
  if (!layer.ok()) {
    EXPECT_TRUE(layer.status().code() == StatusCode::kBadInput ||
                layer.status().code() == StatusCode::kUnsupported)
        << what << ": " << layer.status().ToString();
    return;
  }
  if ((*layer)->config().hidden == 128) {
    const Tensor hidden = *Tensor::Allocate(DType::kBF16, {2, 128});
    Output(**layer, hidden);
  }
}

// Gemma 4: the caller routes.
TEST(PreparedMetadata, CustomRoutingWithoutACallback_IsRead) {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 4;
  config.hidden = config.intermediate = 32;
  config.routing.method = RoutingMethod::kCustom;
  config.routing.top_k = 2;
  const auto parsed = prepared::ParseConfig(prepared::ConfigText(config));
  ASSERT_TRUE(parsed.ok()) << parsed.status().ToString();
  EXPECT_EQ(parsed->routing.method, RoutingMethod::kCustom);
}

TEST(PreparedMetadata, ChangedWithoutItsDigest_IsRefused) {
  const Files files;
  const auto checkpoint = files.Sample("qwen2_moe", "nvfp4_w4a4");
  const std::string path = files.Prepare(*checkpoint, {"VLLM_CUTLASS", "nvfp4_w4a4"});
  const SafetensorsFile good = *ReadSafetensors(path);
  std::mt19937 random(5);
  for (const auto& [key, value] : good.metadata) {
    for (int round = 0; round < 3; ++round) {
      SafetensorsFile bad = good;
      std::string& text = bad.metadata[key];
      const size_t at = random() % text.size();
      if (round == 0) {
        text.resize(at);
      } else if (round == 1) {
        text[at] = text[at] == '7' ? '8' : '7';
      } else {
        bad.metadata.erase(key);
      }
      ASSERT_TRUE(WriteSafetensors(files / "bad.safetensors", bad.tensors, bad.metadata).ok());
      const auto opened = PreparedLayer::Open(files / "bad.safetensors");
      ASSERT_FALSE(opened.ok()) << key << " round " << round;
      EXPECT_EQ(opened.status().code(), StatusCode::kBadInput);
      EXPECT_EQ(opened.status().file(), files / "bad.safetensors");
    }
  }
}

void Leaves(Json& json, std::vector<Json*>& out) {
  if (json.is_structured() && !json.empty()) {
    for (Json& child : json) {
      Leaves(child, out);
    }
  }
  out.push_back(&json);
}

// A digest proves no good will: every value of every field is replaced by what nobody expects, and sealed.
TEST(PreparedMetadata, SealedNonsense_IsRefusedOrHarmless) {
  const std::vector<Json> nonsense = {
      nullptr, -1, 0, int64_t{1} << 62, 1e300, "", "F8_E4M3", Json::array(), Json::object(), true};
  for (const PreparedCase& c :
       {PreparedCase{"VLLM_CUTLASS", "nvfp4_w4a4", "qwen2_moe"}, PreparedCase{"MARLIN", "int4_w4a16:g32"}}) {
    const Files files;
    const auto checkpoint = files.Sample(c.family, c.scheme, 2);
    const SafetensorsFile good = *ReadSafetensors(files.Prepare(*checkpoint, c));
    for (const auto& [key, value] : good.metadata) {
      Json parsed = Json::parse(value, nullptr, false);
      std::vector<Json*> leaves;
      if (!parsed.is_discarded()) {
        Leaves(parsed, leaves);
      }
      for (size_t leaf = 0; leaf < leaves.size(); ++leaf) {
        const Json before = *leaves[leaf];
        for (size_t round = 0; round < nonsense.size(); ++round) {
          if ((leaf + round) % (leaves.size() > 20 ? 5 : 1) != 0) {
            continue;  // a sample of the long fields
          }
          *leaves[leaf] = nonsense[round];
          SafetensorsFile bad = good;
          bad.metadata[key] = parsed.dump();
          prepared::Seal(bad.metadata);
          ASSERT_TRUE(WriteSafetensors(files / "bad.safetensors", bad.tensors, bad.metadata).ok());
          ExpectNoCrash(files / "bad.safetensors", key + " " + parsed.dump().substr(0, 400));
          *leaves[leaf] = before;
        }
      }
    }
  }
}

// No layout of routed experts takes zero points that are numbers; shared experts lie in the canonical form.
TEST(PreparedFile, SharedExpertWithZeroPointsOfF32_ComesBackAsItWasWritten) {
  const Files files;
  const auto checkpoint = files.Sample("qwen2_moe", "int4_w4a16:g32");
  auto file = prepared::ReadPreparedFile(files.Prepare(*checkpoint, {"MARLIN", "int4_w4a16:g32"}));
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  CanonicalExpert expert = *file->shared->source.load(0);
  for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
    matrix->format.zero_point_dtype = DType::kF32;
    matrix->format.may_have_zero_point = true;
    matrix->zero_point = *Tensor::Allocate(DType::kF32, matrix->block_scale.shape());
    for (int64_t i = 0; i < matrix->zero_point.view().count(); ++i) {
      matrix->zero_point.mutable_view().as<float>()[i] = 8.0F - static_cast<float>(i % 23) / 7;
    }
  }
  file->shared->source.scheme.weight = expert.up.format;
  file->shared->source.load = [expert](int64_t) -> Result<CanonicalExpert> { return expert; };
  const std::string path = files / "zeros.safetensors";
  const Status written = prepared::WritePreparedFile(*file, path, {});
  ASSERT_TRUE(written.ok()) << written.ToString();
  auto again = prepared::ReadPreparedFile(path);
  ASSERT_TRUE(again.ok()) << again.status().ToString();
  const CanonicalExpert read = *again->shared->source.load(0);
  for (const auto& [mine, theirs] : {std::pair(&read.gate, &expert.gate), std::pair(&read.up, &expert.up),
                                     std::pair(&read.down, &expert.down)}) {
    EXPECT_EQ(mine->format, theirs->format);
    EXPECT_TRUE(test::SameBytes(mine->zero_point, theirs->zero_point));
    EXPECT_TRUE(test::SameBytes(mine->codes, theirs->codes));
  }
  const auto prepared = PreparedLayer::Open(path);
  ASSERT_TRUE(prepared.ok()) << prepared.status().ToString();
  EXPECT_TRUE((*prepared)->FindDamage().empty());
  LayerOptions options = Files::OptionsOf({"MARLIN", "int4_w4a16:g32"});
  const auto layer = (*prepared)->Load(options);
  ASSERT_TRUE(layer.ok()) << layer.status().ToString();
  const auto plain = (*PreparedLayer::Open(files / "prepared.safetensors"))->Load(options);
  ASSERT_TRUE(plain.ok()) << plain.status().ToString();
  const Tensor hidden = *ReadSafetensors(files / "checkpoint/io/input.safetensors")->Find("hidden_states");
  EXPECT_FALSE(test::SameBytes(Output(**layer, hidden), Output(**plain, hidden)))
      << "zero points were not used";
  EXPECT_TRUE(InvertPrepared(path, files / "inverted.safetensors", "MARLIN").ok());

  Rewrite(path, path, [](SafetensorsFile& stored) {
    ASSERT_TRUE(ChangeExpert(stored, "shared.down.zero_point", 0,
                             [](std::byte* data, int64_t) { data[0] ^= std::byte{1}; }));
  });
  const auto damaged = (*PreparedLayer::Open(path))->FindDamage();
  ASSERT_EQ(damaged.size(), 1U);
  EXPECT_EQ(damaged[0].tensor, "shared.down.zero_point");
}

TEST(PreparedMetadata, SealedRecipes_ThatDoNotFitAreRefusedWithTheirTensor) {
  const Files files;
  const auto checkpoint = files.Sample("qwen3_moe", "nvfp4_w4a4", 2);
  const SafetensorsFile good = *ReadSafetensors(files.Prepare(*checkpoint, {"MARLIN", "nvfp4_w4a4"}));
  for (const std::string step :
       {"pad_rows(gate_up, parts=2, from=128, to=9223372036854775807)",
        "pad_rows(gate_up, parts=0, from=1, to=2)", "pad_columns(gate_up, from=128, to=1099511627776)",
        "swizzle_scales(down_block_scale, tile_rows=0, rows=1, columns=1)",
        "repeat_rows(down, parts=1, times=4611686018427387904, from=4, to=8)",
        "interleave_rows(gate_up, group=0)", "shuffle_rows(gate_up, tile=0)",
        "block_major_k(gate_up, block=0)", "sort_inputs(gate_up)",
        "marlin_nvfp4_scales(down_block_scale, factor=100000, half=0)", "fold_tensor_scale(nothing)"}) {
    SafetensorsFile bad = good;
    Json recipe = Json::parse(bad.metadata["recipe"]);
    recipe.push_back(step);
    bad.metadata["recipe"] = recipe.dump();
    prepared::Seal(bad.metadata);
    ASSERT_TRUE(WriteSafetensors(files / "bad.safetensors", bad.tensors, bad.metadata).ok());
    const auto opened = PreparedLayer::Open(files / "bad.safetensors");
    ASSERT_FALSE(opened.ok()) << step;
    EXPECT_EQ(opened.status().code(), StatusCode::kBadInput) << step;
    EXPECT_FALSE(opened.status().tensor().empty()) << step << ": " << opened.status().ToString();
  }
}

}  // namespace
}  // namespace fusedmoe::prepared_test
