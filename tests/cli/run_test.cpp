#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/jobs/sample.hpp>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"
#include "numerics/rows.hpp"
#include "support/temporary_directory.hpp"

namespace fusedmoe::test {
namespace {

struct Case {
  std::string family;
  std::string scheme;
};

void PrintTo(const Case& value, std::ostream* stream) {
  *stream << value.family << " " << value.scheme;
}

std::vector<Case> AllCases() {
  std::vector<Case> cases;
  for (const SampleFamily& family : SampleFamilies()) {
    for (const char* scheme : {"unquantized", "nvfp4_w4a4", "nvfp4_w4a16"}) {
      cases.push_back({std::string(family.name), scheme});
    }
  }
  return cases;
}

class SampleRun : public testing::TestWithParam<Case> {};

INSTANTIATE_TEST_SUITE_P(Families, SampleRun, testing::ValuesIn(AllCases()),
                         [](const auto& drawn) { return drawn.param.family + "_" + drawn.param.scheme; });

TEST_P(SampleRun, PassesItsCheckAndWritesWhatItSays) {
  const bool one_expert = GetParam().family == "llama4_text";  // its router chooses one
  const SampleCheckpoint checkpoint(
      GetParam().family, GetParam().scheme,
      one_expert ? std::vector<std::string>{"--top-k", "1"} : std::vector<std::string>{});
  const ProcessResult result = checkpoint.Run({"--check", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json json = result.Json();
  EXPECT_EQ(json.at("schema_version"), 1);
  EXPECT_EQ(json.at("layer"), 0);
  EXPECT_EQ(json.at("scheme"), GetParam().scheme);
  EXPECT_EQ(json.at("tokens"), 5);
  EXPECT_GT(json.at("seconds").get<double>(), 0.0);
  EXPECT_GT(json.at("tokens_per_second").get<double>(), 0.0);
  EXPECT_TRUE(json.at("plan").at("backend").is_string());
  EXPECT_TRUE(json.at("plan").at("recipe").is_array());
  EXPECT_TRUE(json.at("check").at("ok").get<bool>());
  EXPECT_LE(json.at("check").at("rel_l2").get<double>(), json.at("check").at("bound").get<double>());
  const Result<SafetensorsFile> file = ReadSafetensors(checkpoint.output());
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  ASSERT_NE(file->Find("output"), nullptr);
  EXPECT_EQ(file->Find("output")->dtype(), DType::kBF16);
  EXPECT_EQ(file->Find("output")->shape(), (Shape{5, 128}));
  const int64_t top_k = one_expert ? 1 : 2;
  EXPECT_EQ(file->Find("topk_ids")->shape(), (Shape{5, top_k}));
  EXPECT_EQ(file->Find("topk_weights")->dtype(), DType::kF32);
}

// Kernels on bf16 units take such rows in one plane: the bound of the check has to know.
TEST(Run, RowsOfMoreBitsThanTheLayer_PassTheCheck) {
  for (const char* scheme : {"unquantized", "fp8_w8a16:channel", "int4_w4a16:g32", "nvfp4_w4a4"}) {
    const SampleCheckpoint checkpoint("qwen2_moe", scheme);
    for (const DType dtype : {DType::kF32, DType::kF16}) {
      checkpoint.Rewrite("io/input.safetensors", [&](std::vector<NamedTensor>& tensors) {
        for (NamedTensor& tensor : tensors) {
          if (tensor.name != "hidden_states") {
            continue;
          }
          auto rows = Tensor::Allocate(dtype, tensor.tensor.shape());
          ASSERT_TRUE(rows.ok());
          std::vector<float> values(static_cast<size_t>(rows->view().count()));
          for (size_t i = 0; i < values.size(); ++i) {
            values[i] = std::sin(static_cast<float>(i) * 0.7F);
          }
          EncodeRow(dtype, values.data(), static_cast<int64_t>(values.size()), rows->mutable_view().data());
          tensor.tensor = *std::move(rows);
        }
      });
      for (const char* mode : {"latency", "throughput"}) {
        const ProcessResult result = checkpoint.Run({"--check", "--mode", mode});
        EXPECT_EQ(result.exit_code, 0)
            << scheme << " " << DTypeName(dtype) << " " << mode << ": " << result.err;
      }
    }
  }
}

TEST(Run, OptionsWithoutEffect_AreNamedInNotes) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const auto notes = [&checkpoint](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = more;
    arguments.emplace_back("--json");
    const ProcessResult result = checkpoint.Run(arguments);
    EXPECT_EQ(result.exit_code, 0) << result.err;
    return result.Json().contains("notes") ? result.Json().at("notes").dump() : "";
  };
  EXPECT_EQ(notes({}), "");
  EXPECT_NE(notes({"--ep"}).find("--ep has no effect on one rank"), std::string::npos);
  EXPECT_NE(notes({"--sp"}).find("--sp has no effect on one rank"), std::string::npos);
  EXPECT_NE(notes({"--deadline", "5"}).find("--deadline has no effect"), std::string::npos);
  EXPECT_NE(notes({"--all2all", "naive"}).find("--all2all has no effect"), std::string::npos);
  const std::string figures = checkpoint.path() + "/tune.json";
  const ProcessResult tuned = RunCommand({"tune", "--scheme", "int8_w8a8", "--isa", kFirstIsa, "--seconds",
                                          "0", "--threads", "1", "--out", figures});
  ASSERT_EQ(tuned.exit_code, 0) << tuned.err;
  EXPECT_NE(notes({"--tune", figures}).find("--tune has no effect: the file lacks these kernels"),
            std::string::npos);
  EXPECT_NE(notes({"--tune", figures, "--backend", "reference"}).find("REFERENCE chooses by no figures"),
            std::string::npos);
}

TEST(Run, Reference_IsChosenByName) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  const ProcessResult result = checkpoint.Run({"--backend", "reference", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.Json().at("plan").at("backend"), "REFERENCE");
}

TEST(Run, BackendAuto_IsTheChoiceWithoutAName) {
  const SampleCheckpoint checkpoint("qwen2_moe", "int4_w4a16:g32");  // with a shared expert
  const ProcessResult result = checkpoint.Run({"--backend", "auto", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.Json()["plan"]["backend"], "CPU_FUSED");
  EXPECT_EQ(result.Json().value("notes", nlohmann::json::array()),
            checkpoint.Run({"--json"}).Json().value("notes", nlohmann::json::array()));
}

TEST(Run, UnknownNames_ExitTwoAndListWhatExists) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const auto refused = [&checkpoint](const std::vector<std::string>& more, const std::string& listed) {
    const ProcessResult result = checkpoint.Run(more);
    EXPECT_EQ(result.exit_code, 2) << more[0] << ": " << result.err;
    EXPECT_NE(result.err.find(listed), std::string::npos) << result.err;
    EXPECT_FALSE(std::filesystem::exists(checkpoint.output()));
  };
  refused({"--backend", "FASTEST"}, "REFERENCE");
  refused({"--isa", "avx3"}, "avx512");
  refused({"--device", "tpu"}, "cuda");
  refused({"--mode", "fast"}, "latency");
  refused({"--determinism", "sometimes"}, "batch_invariant");
  refused({"--activation", "a2"}, "a8");
  refused({"--activation-format", "striped"}, "batched");
  refused({"--io", "floppy"}, "pread");
}

TEST(Run, LayerWithoutExperts_ExitsTwo) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const ProcessResult result = RunCommand({"run", checkpoint.path(), "--layer", "7", "--input",
                                           checkpoint.input(), "--output", checkpoint.output()});
  EXPECT_EQ(result.exit_code, 2);
  EXPECT_NE(result.err.find("layers with experts: 0"), std::string::npos) << result.err;
}

TEST(Run, KnownBackendThatCannot_ExitsFour) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const ProcessResult result = checkpoint.Run({"--backend", "FLASHINFER_CUTEDSL", "--json"});
  EXPECT_EQ(result.exit_code, 4) << result.err;
  EXPECT_EQ(result.Json().at("error").at("code"), "unsupported");
  EXPECT_FALSE(std::filesystem::exists(checkpoint.output()));
  // What speaks against the others was not asked.
  EXPECT_NE(result.err.find("FLASHINFER_CUTEDSL: "), std::string::npos) << result.err;
  EXPECT_EQ(result.err.find("MARLIN"), std::string::npos) << result.err;
}

TEST(Run, PackCache_IsAFolderOfCheckpoints) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  const std::string file = checkpoint.path() + "/config.json";
  const ProcessResult on_a_file = checkpoint.Run({"--pack-cache", file});
  EXPECT_EQ(on_a_file.exit_code, 2);
  EXPECT_NE(on_a_file.err.find(file), std::string::npos) << on_a_file.err;
  const std::string prepared = checkpoint.path() + "/prepared.safetensors";
  ASSERT_EQ(RunCommand({"prepare", checkpoint.path(), "--backend", "MARLIN", "--output", prepared}).exit_code,
            0);
  const ProcessResult of_prepared = RunCommand({"run", prepared, "--input", checkpoint.input(), "--output",
                                                checkpoint.output(), "--pack-cache", checkpoint.path()});
  EXPECT_EQ(of_prepared.exit_code, 2);
  EXPECT_NE(of_prepared.err.find("--pack-cache"), std::string::npos) << of_prepared.err;
}

TEST(Run, MissingFiles_FailWithTheirNames) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const ProcessResult no_checkpoint =
      RunCommand({"run", checkpoint.path() + "x", "--input", "a", "--output", "b"});
  EXPECT_GE(no_checkpoint.exit_code, 3);
  EXPECT_NE(no_checkpoint.err.find(checkpoint.path() + "x: cannot open the checkpoint: No such file"),
            std::string::npos)
      << no_checkpoint.err;
  const ProcessResult no_input = RunCommand(
      {"run", checkpoint.path(), "--input", "/nonexistent.safetensors", "--output", checkpoint.output()});
  EXPECT_GE(no_input.exit_code, 3);
  EXPECT_NE(no_input.err.find("/nonexistent.safetensors"), std::string::npos);
  const ProcessResult no_target = RunCommand(
      {"run", checkpoint.path(), "--input", checkpoint.input(), "--output", "/nonexistent/out.safetensors"});
  EXPECT_EQ(no_target.exit_code, 5) << no_target.err;
}

TEST(Run, OutputOverWhatIsRead_IsRefused) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4"),
      shards("qwen3_moe", "nvfp4_w4a4", {"--max-shard-bytes", "200000"});
  const std::string prepared = checkpoint.path() + "/prepared.safetensors";
  const std::string index = shards.path() + "/model.safetensors.index.json",
                    settings = shards.path() + "/hf_quant_config.json";
  ASSERT_TRUE(std::filesystem::exists(index));
  WriteFile(settings, R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}})");
  ASSERT_EQ(RunCommand({"prepare", checkpoint.path(), "--backend", "MARLIN", "--output", prepared}).exit_code,
            0);
  const std::string weights = checkpoint.path() + "/model.safetensors";
  const std::vector<std::vector<std::string>> commands = {
      {"run", checkpoint.path(), "--input", checkpoint.input(), "--output", checkpoint.input()},
      {"run", checkpoint.path(), "--input", checkpoint.input(), "--output", weights},
      {"run", prepared, "--input", checkpoint.input(), "--output", prepared},
      {"run", shards.path(), "--input", checkpoint.input(), "--output", index},
      {"run", shards.path(), "--input", checkpoint.input(), "--output", settings},
      {"verify", shards.path(), "--plot", index},
      {"calibrate", checkpoint.path(), "--input", checkpoint.input(), "--output", checkpoint.input()},
      {"calibrate", checkpoint.path(), "--input", checkpoint.input(), "--output", weights},
      {"prepare", checkpoint.path(), "--backend", "MARLIN", "--output", weights},
      {"prepare", prepared, "--invert", "--output", prepared}};
  for (const std::vector<std::string>& command : commands) {
    const std::string before = ReadFile(command.back());
    const ProcessResult result = RunCommand(command);
    EXPECT_EQ(result.exit_code, 2) << command[0] << ": " << result.err;
    EXPECT_NE(result.err.find(command.back()), std::string::npos) << result.err;
    EXPECT_EQ(ReadFile(command.back()), before) << command[0] << " replaced what it read";
  }
}

TEST(Run, Threads_DoNotChangeTheBits) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a4");
  ASSERT_EQ(checkpoint.Run({"--threads", "1"}).exit_code, 0);
  const std::string one = ReadFile(checkpoint.output());
  for (const char* threads : {"2", "3", "7"}) {
    ASSERT_EQ(checkpoint.Run({"--threads", threads}).exit_code, 0);
    EXPECT_EQ(ReadFile(checkpoint.output()), one) << threads << " threads";
  }
}

TEST(Run, GivenExperts_AreUsedAndReturned) {
  const SampleCheckpoint checkpoint("mixtral", "unquantized");
  ASSERT_EQ(checkpoint.Run().exit_code, 0);
  const std::string routed = ReadFile(checkpoint.output());
  const Result<SafetensorsFile> file = ReadSafetensors(checkpoint.output());
  ASSERT_TRUE(file.ok());
  // The router's own choice handed back must give the same bytes.
  checkpoint.Rewrite("io/input.safetensors", [&file](std::vector<NamedTensor>& tensors) {
    tensors.push_back({"topk_ids", *file->Find("topk_ids")});
    tensors.push_back({"topk_weights", *file->Find("topk_weights")});
  });
  ASSERT_EQ(checkpoint.Run({"--check"}).exit_code, 0);
  EXPECT_EQ(ReadFile(checkpoint.output()), routed);
}

TEST(Run, TokenIds_HaveTwoNames) {
  const std::string model = std::string(FMOE_GOLDEN_DIR) + "/families/deepseek_v4-orig";
  const TemporaryDirectory folder;
  const auto run = [&](const std::function<void(std::vector<NamedTensor>&)>& change,
                       const std::string& output) {
    Result<SafetensorsFile> input = ReadSafetensors(model + "/io/m5.safetensors");
    EXPECT_TRUE(input.ok()) << input.status().ToString();
    change(input->tensors);
    EXPECT_TRUE(WriteSafetensors(folder / "in.safetensors", input->tensors).ok());
    return RunCommand({"run", model, "--input", folder / "in.safetensors", "--output", folder / output});
  };
  const auto rename = [](std::vector<NamedTensor>& tensors) {
    for (NamedTensor& tensor : tensors) {
      tensor.name = tensor.name == "input_ids" ? "token_ids" : tensor.name;
    }
  };
  const ProcessResult as_models_do = run([](auto&) {}, "a.safetensors"),
                      renamed = run(rename, "b.safetensors");
  ASSERT_EQ(as_models_do.exit_code, 0) << as_models_do.err;
  ASSERT_EQ(renamed.exit_code, 0) << renamed.err;
  const auto one = ReadSafetensors(folder / "a.safetensors"),
             other = ReadSafetensors(folder / "b.safetensors");
  ASSERT_TRUE(one.ok() && other.ok());
  const TensorView first = one->Find("output")->view(), second = other->Find("output")->view();
  EXPECT_EQ(std::memcmp(first.data(), second.data(), static_cast<size_t>(first.total_bytes())), 0);
  const ProcessResult both = run(
      [](std::vector<NamedTensor>& tensors) {
        for (size_t at = 0, count = tensors.size(); at < count; ++at) {
          if (tensors[at].name == "input_ids") {
            tensors.push_back({"token_ids", tensors[at].tensor});
          }
        }
      },
      "c.safetensors");
  EXPECT_EQ(both.exit_code, 3) << both.err;
  EXPECT_NE(both.err.find("input_ids and token_ids are two names of one input"), std::string::npos)
      << both.err;
}

TEST(Run, Int8Activations_AreOptInAndNamed) {
  const SampleCheckpoint checkpoint("qwen3_moe", "nvfp4_w4a16");
  const ProcessResult result = checkpoint.Run({"--activation", "a8", "--check", "--json"});
  if (result.exit_code == 4) {
    GTEST_SKIP() << "no kernel with int8 activations on this machine: " << result.err;
  }
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(result.Json().at("plan").at("activation"), "a8");
  EXPECT_GT(result.Json().at("check").at("rel_l2").get<double>(), 0.004) << "that is not what int8 costs";
}

TEST(Run, SharedExperts_CountUnlessLeftOut) {
  const SampleCheckpoint checkpoint("qwen2_moe", "unquantized");
  ASSERT_EQ(checkpoint.Run({"--check"}).exit_code, 0);
  const std::string with = ReadFile(checkpoint.output());
  const ProcessResult result = checkpoint.Run({"--check", "--no-shared-experts", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_FALSE(result.Json().at("plan").contains("shared"));
  EXPECT_NE(ReadFile(checkpoint.output()), with);
}

// The layout of this backend changes the weights of the shared expert (one tensor scale for gate and up), not
// those of the only routed one.
TEST(Run, SharedExpertsThatAreMissing_StandInNotes) {
  const SampleCheckpoint checkpoint("deepseek_v3", "unquantized");
  const auto notes = [&](const std::vector<std::string>& more) {
    std::vector<std::string> arguments = {"--json"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return checkpoint.Run(arguments).Json().value("notes", nlohmann::json::array()).dump();
  };
  EXPECT_EQ(notes({}).find("shared experts"), std::string::npos);
  checkpoint.Rewrite("model.safetensors", [](std::vector<NamedTensor>& tensors) {
    std::erase_if(tensors,
                  [](const NamedTensor& tensor) { return tensor.name.find("shared") != std::string::npos; });
  });
  EXPECT_NE(notes({}).find("promises shared experts"), std::string::npos) << notes({});
  EXPECT_EQ(notes({"--no-shared-experts"}).find("promises"), std::string::npos);
}

TEST(Run, CheckOfALayer_KnowsWhatItsSharedExpertMayDiffer) {
  const TemporaryDirectory folder;
  const std::string path = folder.path() / "checkpoint";
  ASSERT_EQ(RunCommand({"sample", "--family", "qwen3_next", "--scheme", "nvfp4_w4a4", "--hidden", "256",
                        "--intermediate", "48", "--experts", "1", "--top-k", "1", "--tokens", "5", "--seed",
                        "0", "--output", path})
                .exit_code,
            0);
  const ProcessResult result =
      RunCommand({"run", path, "--input", path + "/io/input.safetensors", "--output",
                  folder.path() / "o.safetensors", "--backend", "FLASHINFER_CUTLASS", "--check", "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_GT(result.Json().at("check").at("rel_l2").get<double>(), 0.01) << "nothing was changed";
  EXPECT_LT(result.Json().at("check").at("rel_l2").get<double>(), 0.1);
}

TEST(Sample, DirectoryThatIsNotEmpty_IsLeftAlone) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const std::string before = ReadFile(checkpoint.path() + "/config.json");
  const ProcessResult result =
      RunCommand({"sample", "--family", "mixtral", "--scheme", "unquantized", "--output", checkpoint.path()});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_EQ(ReadFile(checkpoint.path() + "/config.json"), before);
}

TEST(Sample, Force_ReplacesTheCheckpointThatStandsThere) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  WriteFile(checkpoint.path() + "/model-00001-of-00002.safetensors", "of a larger one");
  std::vector<std::string> arguments = {"sample",   "--family",        "mixtral", "--scheme", "unquantized",
                                        "--output", checkpoint.path(), "--top-k", "2",        "--force"};
  arguments.insert(arguments.end(), kTinySizes.begin(), kTinySizes.end());
  const ProcessResult result = RunCommand(arguments);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(RunCommand({"inspect", checkpoint.path(), "--json"}).Json().at("family"), "mixtral");
  EXPECT_FALSE(std::filesystem::exists(checkpoint.path() + "/model-00001-of-00002.safetensors"));
}

TEST(Inspect, ListsEveryLayer) {
  const SampleCheckpoint checkpoint("deepseek_v3", "nvfp4_w4a4", {"--layers", "3"});
  const ProcessResult result = RunCommand({"inspect", checkpoint.path(), "--json"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json json = result.Json();
  EXPECT_EQ(json.at("family"), "deepseek_v3");
  EXPECT_EQ(json.at("producer"), "modelopt");
  EXPECT_EQ(json.at("moe_layers"), (std::vector<int>{0, 1, 2}));
  ASSERT_EQ(json.at("layers").size(), 3U);
  EXPECT_EQ(json.at("layers")[2].at("scheme"), "nvfp4_w4a4");
  EXPECT_EQ(json.at("layers")[2].at("config").at("shared_intermediate"), 128);
  EXPECT_NE(RunCommand({"inspect", checkpoint.path()}).out.find("DeepSeekV3"), std::string::npos);

  int64_t bytes = 0;
  for (const nlohmann::json& layer : json.at("layers")) {
    bytes += layer.at("expert_bytes").get<int64_t>();
  }
  const nlohmann::json& shares = json.at("expert_bytes_per_rank");
  EXPECT_EQ(shares[0], (nlohmann::json{{"ranks", 1}, {"ep", bytes}, {"tp", bytes}}));
  EXPECT_EQ(shares[1], (nlohmann::json{{"ranks", 2}, {"ep", bytes / 2}, {"tp", bytes / 2}}));
}

TEST(Inspect, ConfigThatContradictsItsTensors_ExitsWith3) {
  const SampleCheckpoint checkpoint("qwen3_moe", "unquantized");
  const std::string path = checkpoint.path() + "/config.json";
  nlohmann::json config = nlohmann::json::parse(ReadFile(path));
  config["hidden_size"] = config.at("hidden_size").get<int64_t>() * 2;
  std::ofstream(path) << config;
  for (const char* command : {"inspect", "explain"}) {
    const ProcessResult result = RunCommand({command, checkpoint.path(), "--json"});
    EXPECT_EQ(result.exit_code, 3) << command << result.out;
    EXPECT_NE(result.err.find("experts.0."), std::string::npos) << result.err;
  }
}

}  // namespace
}  // namespace fusedmoe::test
