// To GGUF and from it: what it holds exactly, what it cannot say, and that both ways give the same layers.
#include <algorithm>
#include <set>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/layer.hpp>

#include "checkpoint/gguf/gguf_architectures.hpp"
#include "checkpoint/gguf/gguf_header.hpp"
#include "checkpoint/gguf/gguf_writer.hpp"
#include "checkpoint/layers/families.hpp"
#include "checkpoint/layers/model_config.hpp"
#include "convert/convert_files.hpp"
#include "support/test_name.hpp"

namespace fusedmoe::convert_test {
namespace {

std::string Golden(const std::string& name) {
  return (fs::path(FMOE_GOLDEN_DIR) / name).string();
}

class ConvertGguf : public ConvertTest {};

struct GoldenCase {
  std::string name;
  std::string scheme;  ///< of the GGUF file; "": refused
  std::string back;    ///< a tool that stores it again; "": none does
  std::string why = "";
};

TEST_F(ConvertGguf, GoldenCheckpoints_KeepEveryValueThereAndBack) {
  const GoldenCase cases[] = {
      {"mixtral-modelopt-nvfp4", "nvfp4_w4a16", "modelopt"},
      {"qwen3_moe-ct-nvfp4", "nvfp4_w4a16", "compressed-tensors"},
      {"gpt_oss-mxfp4", "mxfp4_w4a16", "gpt-oss"},
      {"qwen3_moe-ct-mxfp4", "mxfp4_w4a16", "compressed-tensors"},
      {"qwen3_moe-quark-mxfp4", "mxfp4_w4a16", "compressed-tensors"},
      {"mixtral-ct-w4a16-g128", "int4_w4a16:g32", "compressed-tensors"},
      {"qwen3_moe-gptq-g32", "int4_w4a16:g32", "compressed-tensors"},
      {"qwen3_moe-autoround-w4a16", "int4_w4a16:g32", "", "negative"},
      {"qwen3_moe-ct-w8a16", "int8_w8a16:g32", "compressed-tensors"},
      {"qwen3_moe-ct-int8-w8a8", "int8_w8a16:g32", "compressed-tensors"},
      {"deepseek_v3-bf16", "unquantized", ""},
      {"llama4-f32", "unquantized", ""},
      {"deepseek_v3-ct-nvfp4", "", "", "model.layers.1.mlp.experts.0.down_proj.weight"},
      {"mixtral-awq-g32", "", "", "zero points"},
      {"qwen3_moe-gptq-g32-desc_act", "", "", "activation order"},
      {"qwen3_moe-ct-fp8-block", "", "", "no type"},
  };
  for (const GoldenCase& golden : cases) {
    SCOPED_TRACE(golden.name);
    const std::string source = Golden("checkpoints/" + golden.name);
    const std::string file = golden.name + ".gguf";
    const auto report = To(source, "gguf", file);
    if (golden.scheme.empty()) {
      ASSERT_FALSE(report.ok());
      EXPECT_EQ(report.status().code(), StatusCode::kUnsupported);
      EXPECT_NE(report.status().ToString().find(golden.why), std::string::npos) << report.status().ToString();
      EXPECT_FALSE(fs::exists(At(file)));
      continue;
    }
    ASSERT_TRUE(report.ok()) << report.status().ToString();
    EXPECT_TRUE(report->lossless);
    EXPECT_EQ(report->different, 0);
    EXPECT_EQ(report->to_scheme, golden.scheme);
    const std::vector<float> values = Values(source);
    EXPECT_EQ(Values(At(file)), values);
    if (!golden.back.empty()) {
      const auto back = To(At(file), golden.back, golden.name);
      ASSERT_TRUE(back.ok()) << back.status().ToString();
      EXPECT_TRUE(back->lossless);
    } else if (!golden.why.empty()) {
      const auto back = To(At(file), "compressed-tensors", golden.name);
      ASSERT_FALSE(back.ok());
      EXPECT_NE(back.status().ToString().find(golden.why), std::string::npos) << back.status().ToString();
    }
  }
}

TEST_F(ConvertGguf, Rounding_NeedsLeaveAndStatesTheError) {
  const std::string source = Golden("checkpoints/mixtral-awq-g32");
  const auto report = To(source, "gguf", "lossy.gguf", "", true);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_FALSE(report->lossless);
  EXPECT_GT(report->rel_l2, 0.01);
  EXPECT_LT(report->rel_l2, 0.15);
  const auto bytes =
      To(Golden("checkpoints/qwen3_moe-ct-fp8-block"), "gguf", "q8.gguf", "int8_w8a16:g32", true);
  ASSERT_TRUE(bytes.ok()) << bytes.status().ToString();
  EXPECT_GT(bytes->rel_l2, 1e-4);
  EXPECT_LT(bytes->rel_l2, 0.01);
}

// What the reference backend computes from a checkpoint; rows of hidden states from the golden layer.
std::vector<float> Output(const std::string& path, int64_t layer, const SafetensorsFile& io) {
  const auto checkpoint = Checkpoint::Open(path);
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  if (!checkpoint.ok()) {
    return {};
  }
  LayerOptions options;
  options.backend = "REFERENCE";
  options.max_tokens = 5;
  const auto loaded = MoeLayer::Load(*checkpoint, layer, options);
  EXPECT_TRUE(loaded.ok()) << loaded.status().ToString();
  if (!loaded.ok()) {
    return {};
  }
  auto output = Tensor::Allocate(DType::kF32, io.Find("expected_output")->shape());
  auto workspace = (*loaded)->CreateWorkspace();
  EXPECT_TRUE(output.ok() && workspace.ok());
  const MoeLayer::Inputs inputs{.hidden = io.Find("hidden_states")->view()};
  const Status status = (*loaded)->Forward(inputs, {.output = output->mutable_view()}, *workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  const auto* values = output->view().as<float>();
  return {values, values + output->shape().count()};
}

double Distance(const std::vector<float>& a, const float* b) {
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(error / norm);
}

std::vector<std::string> Families() {
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(Golden("families"))) {
    if (entry.is_directory()) {
      names.push_back(entry.path().filename().string());
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

const checkpoint::Family* FamilyOf(const std::string& directory) {
  const auto config = checkpoint::ModelConfig::Open(directory);
  return config.ok() ? checkpoint::FindFamily(config->model_types().front()) : nullptr;
}

class ConvertGgufFamilies : public ConvertTest, public testing::WithParamInterface<std::string> {};
INSTANTIATE_TEST_SUITE_P(All, ConvertGgufFamilies, testing::ValuesIn(Families()), test::NamedAfterText);

// Metadata must say the routing of each family, so that the layer computes what transformers does.
TEST_P(ConvertGgufFamilies, Layer_ComputesTheSameFromTheFileOrIsRefusedByName) {
  const std::string source = Golden("families/" + GetParam());
  const checkpoint::Family* family = FamilyOf(source);
  ASSERT_NE(family, nullptr);
  const auto report = To(source, "gguf", "a.gguf");
  // Refused are families without an architecture, tables of token ids, and what the architecture does not do
  // (Cohere 2 averages).
  const std::string reason = checkpoint::GgufArchitectureOf(*family).empty() ? std::string(family->name)
                             : GetParam() == "deepseek_v4-orig"              ? "hashes token ids"
                             : GetParam() == "nemotron_h_latent_bias-orig"
                                 ? "no place for a bias of the projections"
                             : GetParam() == "cohere2_moe_sum-orig" ? "the scaling factor 1 reads as 0.5"
                                                                    : "";
  if (!reason.empty()) {
    ASSERT_FALSE(report.ok());
    EXPECT_EQ(report.status().code(), StatusCode::kUnsupported);
    EXPECT_NE(report.status().ToString().find(reason), std::string::npos) << report.status().ToString();
    EXPECT_TRUE(fs::is_empty(root_));
    return;
  }
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  const int64_t layer = ReadJson(source + "/case.json")["layer"].get<int64_t>();
  const auto io = ReadSafetensors(source + "/io/m5.safetensors");
  ASSERT_TRUE(io.ok());
  const auto* expected = io->Find("expected_output")->view().as<float>();
  // The bound of the golden families: one rounding of fp32 each for a few products.
  EXPECT_LT(Distance(Output(At("a.gguf"), layer, *io), expected), 5e-6);
  const auto back = To(At("a.gguf"), "f32", "back");
  ASSERT_TRUE(back.ok()) << back.status().ToString();
  EXPECT_LT(Distance(Output(At("back"), layer, *io), expected), 5e-6);
}

TEST(GgufArchitectures, HoldMostFamilies) {
  std::set<std::string_view> held;
  for (const checkpoint::Family& family : checkpoint::FamilyTable()) {
    if (!checkpoint::GgufArchitectureOf(family).empty()) {
      held.insert(family.name);
    }
  }
  EXPECT_GE(held.size(), 30U);
}

TEST_F(ConvertGguf, Bytes_DoNotDependOnThreadsAndNothingElseIsLeft) {
  const std::string source = Sample("source", "nvfp4_w4a4", "deepseek_v3", 2);
  const auto pool = ThreadPool::Create(3);
  ASSERT_TRUE(pool.ok());
  const auto checkpoint = Checkpoint::Open(source);
  ASSERT_TRUE(checkpoint.ok());
  ConvertOptions options;
  options.to = "gguf";
  options.directory = At("serial.gguf");
  ASSERT_TRUE(Convert(*checkpoint, options).ok());
  options.directory = At("threads.gguf");
  options.executor = (*pool)->executor();
  const auto report = Convert(*checkpoint, options);
  ASSERT_TRUE(report.ok()) << report.status().ToString();
  EXPECT_EQ(report->files, std::vector<std::string>{"threads.gguf"});
  EXPECT_EQ(test::ReadFile(At("serial.gguf")), test::ReadFile(At("threads.gguf")));
  EXPECT_EQ(Convert(*checkpoint, options).status().code(), StatusCode::kUsage) << "the file exists";
  options.overwrite = true;
  EXPECT_TRUE(Convert(*checkpoint, options).ok());
  // A directory holds the same file and the report, and opens by its own name.
  options.directory = At("folder");
  options.overwrite = false;
  ASSERT_TRUE(Convert(*checkpoint, options).ok());
  EXPECT_EQ(test::ReadFile(At("serial.gguf")), test::ReadFile(At("folder/model.gguf")));
  EXPECT_TRUE(fs::exists(At("folder/conversion_report.json")));
  const auto folder = Checkpoint::Open(At("folder"));
  ASSERT_TRUE(folder.ok()) << folder.status().ToString();
  EXPECT_EQ((*folder)->producer(), "gguf");
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(root_)) {
    names.insert(entry.path().filename().string());
  }
  EXPECT_EQ(names, (std::set<std::string>{"source", "serial.gguf", "threads.gguf", "folder"}));
}

TEST_F(ConvertGguf, Header_HasTheNamesAndPlacesOfTheFormat) {
  Lossless(Sample("source", "nvfp4_w4a4"), "gguf", "a.gguf");
  const auto file = platform::InputFile::Open(At("a.gguf"), platform::FileAccess::kRead);
  ASSERT_TRUE(file.ok());
  const auto header = checkpoint::ReadGgufHeader(**file);
  ASSERT_TRUE(header.ok()) << header.status().ToString();
  EXPECT_EQ(header->Find("general.architecture")->text, "qwen3moe");
  EXPECT_EQ(header->Integer("qwen3moe.expert_count"), 4);
  EXPECT_EQ(header->Integer("qwen3moe.expert_used_count"), 2);
  EXPECT_EQ(header->Integer("qwen3moe.expert_gating_func"), 1);
  std::set<std::string> names;
  for (const checkpoint::GgufTensor& tensor : header->tensors) {
    names.insert(tensor.name);
    EXPECT_EQ(tensor.begin % 32, 0) << tensor.name;
    if (tensor.name == "blk.0.ffn_down_exps.weight") {
      EXPECT_EQ(tensor.dims, (std::vector<int64_t>{4, 128, 128}));
      EXPECT_EQ(tensor.type, checkpoint::kGgufNvfp4);
    }
  }
  std::set<std::string> wanted = {"blk.0.ffn_gate_inp.weight"};
  for (const char* projection : {"gate", "up", "down"}) {
    for (const char* part : {"weight", "scale", "input_scale"}) {
      wanted.insert("blk.0.ffn_" + std::string(projection) + "_exps." + part);
    }
  }
  EXPECT_EQ(names, wanted);
}

TEST_F(ConvertGguf, Writer_RefusesWhatItCannotHold) {
  using checkpoint::GgufSpec;
  using checkpoint::GgufWriter;
  const auto refused = [&](std::vector<GgufSpec> specs, const std::string& what) {
    const auto writer = GgufWriter::Create(At("w.gguf"), {}, std::move(specs));
    ASSERT_FALSE(writer.ok());
    EXPECT_NE(writer.status().ToString().find(what), std::string::npos) << writer.status().ToString();
  };
  refused({{std::string(64, 'x'), {4}, checkpoint::kGgufF32, 1}}, "63");
  refused({{"a", {4}, checkpoint::kGgufF32, 1}, {"a", {4}, checkpoint::kGgufF32, 1}}, "twice");
  refused({{"a", {33}, checkpoint::kGgufMxfp4, 1}}, "whole blocks");
  refused({{"a", {4}, 12345, 1}}, "unknown");
  refused({{"a", {5}, checkpoint::kGgufF32, 3}}, "equal parts");
  EXPECT_FALSE(GgufWriter::Create(At("w.gguf"), {{"k", true}, {"k", false}}, {}).ok());
  const auto writer = GgufWriter::Create(At("w.gguf"), {}, {{"a", {2, 4}, checkpoint::kGgufF32, 2}});
  ASSERT_TRUE(writer.ok());
  const std::vector<std::byte> part(16);
  EXPECT_FALSE((*writer)->Write("b", 0, part).ok());
  EXPECT_FALSE((*writer)->Write("a", 2, part).ok());
  EXPECT_TRUE((*writer)->Write("a", 1, part).ok());
  EXPECT_FALSE((*writer)->Write("a", 1, part).ok()) << "each part once";
  EXPECT_FALSE((*writer)->Finish().ok()) << "part 0 is missing";
  EXPECT_FALSE(fs::exists(At("w.gguf")));
}

}  // namespace
}  // namespace fusedmoe::convert_test
