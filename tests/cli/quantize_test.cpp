#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/safetensors.hpp>

#include "cli/checkpoint_fixture.hpp"
#include "cli/process.hpp"
#include "platform/file_lock.hpp"
#include "support/test_name.hpp"

namespace fusedmoe::test {
namespace {

namespace fs = std::filesystem;

ProcessResult Quantize(const std::string& source, const std::string& scheme, const std::string& output,
                       std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {"quantize", source, "--scheme", scheme, "--output", output, "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return RunCommand(arguments);
}

std::string Calibrate(const SampleCheckpoint& checkpoint, const std::string& file,
                      std::vector<std::string> more = {}) {
  std::vector<std::string> arguments = {
      "calibrate", checkpoint.path(), "--input", checkpoint.input(), "--output", file, "--layer", "0"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const ProcessResult result = RunCommand(arguments);
  EXPECT_EQ(result.exit_code, 0) << result.err;
  return file;
}

struct Row {
  std::string scheme, format;
  double low, high;  // relative L2 of normal weights
};

// What rounding does to normal numbers, with a tenth of slack on both sides for small matrices.
std::vector<Row> Rows() {
  return {
      {"nvfp4_w4a16", "modelopt", 0.085, 0.105},
      {"nvfp4_w4a16", "compressed-tensors", 0.085, 0.105},
      {"nvfp4_w4a4", "modelopt", 0.085, 0.105},
      {"nvfp4_w4a4", "compressed-tensors", 0.085, 0.105},
      {"mxfp4_w4a16", "", 0.1, 0.125},
      {"mxfp4_w4a4", "", 0.1, 0.125},
      {"mxfp4_w4a8:group128", "", 0.1, 0.125},
      {"w_mxfp6_e2m3", "", 0.022, 0.033},
      {"w_mxfp6_e2m3_a_mxfp6_e2m3", "", 0.022, 0.033},
      {"mxfp8_w8a8", "compressed-tensors", 0.022, 0.033},
      {"mxfp8_w8a8", "modelopt", 0.022, 0.033},
      {"fp8_w8a8", "", 0.022, 0.03},
      {"fp8_w8a8", "modelopt", 0.022, 0.03},
      {"fp8_w8a8:tensor", "", 0.022, 0.03},
      {"fp8_w8a8:tensor_static", "modelopt", 0.022, 0.03},
      {"fp8_w8a8:tensor_static", "compressed-tensors", 0.022, 0.03},
      {"fp8_w8a8:block128", "deepseek", 0.022, 0.03},
      {"fp8_w8a8:block128", "compressed-tensors", 0.022, 0.03},
      {"fp8_w8a16", "", 0.022, 0.03},
      {"int8_w8a8", "", 0.005, 0.009},
      {"int8_w8a16:g64", "", 0.005, 0.009},
      {"int4_w4a16", "", 0.1, 0.125},
      {"int4_w4a16:g32", "", 0.085, 0.105},
      {"int4_w4a16:channel", "", 0.1, 0.125},
  };
}

class QuantizeScheme : public testing::TestWithParam<Row> {};
INSTANTIATE_TEST_SUITE_P(All, QuantizeScheme, testing::ValuesIn(Rows()), [](const auto& entry) {
  return TestName(entry.param.scheme + "_" + entry.param.format);
});

TEST_P(QuantizeScheme, RunsReadsBackAndHasTheErrorOfItsFormat) {
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  const TemporaryDirectory directory;
  const std::string output = directory / "quantized";
  std::vector<std::string> more;
  const auto scheme = ParseScheme(GetParam().scheme);
  ASSERT_TRUE(scheme.ok()) << scheme.status().ToString();
  if (scheme->activation.static_tensor_scale) {
    more = {"--act-stats", Calibrate(source, directory / "stats.safetensors")};
  }
  if (!GetParam().format.empty()) {
    more.insert(more.end(), {"--format", GetParam().format});
  }
  const ProcessResult result = Quantize(source.path(), GetParam().scheme, output, more);
  ASSERT_EQ(result.exit_code, 0) << result.err;
  const nlohmann::json json = result.Json();
  EXPECT_GT(json.at("rel_l2").get<double>(), GetParam().low);
  EXPECT_LT(json.at("rel_l2").get<double>(), GetParam().high);
  EXPECT_EQ(json.at("zero_blocks"), 0);
  EXPECT_EQ(json.at("saturated_blocks"), 0);
  EXPECT_EQ(json.at("content_hash").get<std::string>().size(), 64U);

  const nlohmann::json report = nlohmann::json::parse(ReadFile(output + "/quantization_report.json"));
  EXPECT_EQ(report.at("tensors").size(), 8U * 3);
  EXPECT_EQ(report.at("content_hash"), json.at("content_hash"));
  const ProcessResult run = RunCommand({"run", output, "--layer", "0", "--input", source.input(), "--output",
                                        directory / "out.safetensors", "--check", "--json"});
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const ProcessResult verify = RunCommand({"verify", output, "--against", source.path(), "--json"});
  EXPECT_EQ(verify.exit_code, 0) << verify.out << verify.err;
  const ProcessResult lint = RunCommand({"lint", output, "--json"});
  EXPECT_EQ(lint.exit_code, 0) << lint.out;
  const nlohmann::json findings = lint.Json().at("findings");
  for (const auto& finding : findings) {
    const std::string code = finding.at("code").get<std::string>();
    EXPECT_TRUE(code == "tp_shard" || code == "expert_uncalibrated") << finding;
  }
}

TEST(Quantize, EveryFamily_KeepsItsNamesOrSplitsItsTensors) {
  for (const char* family : {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe", "llama4_text"}) {
    const SampleCheckpoint source(family, "unquantized", {"--top-k", "1"});
    const TemporaryDirectory directory;
    const std::string output = directory / "quantized";
    const ProcessResult result = Quantize(source.path(), "nvfp4_w4a16", output);
    ASSERT_EQ(result.exit_code, 0) << family << result.err;
    const ProcessResult verify = RunCommand({"verify", output, "--against", source.path(), "--json"});
    EXPECT_EQ(verify.exit_code, 0) << family << verify.out << verify.err;
    EXPECT_GT(verify.Json().at("rel_l2").get<double>(), 0.03) << family << ": nothing was quantized";
    // What is not an expert is there as it was.
    const auto before = ReadSafetensors(source.path() + "/model.safetensors");
    const auto after = ReadSafetensors(output + "/model.safetensors");
    ASSERT_TRUE(before.ok() && after.ok());
    for (const NamedTensor& tensor : before->tensors) {
      if (tensor.name.find("experts") == std::string::npos) {
        ASSERT_NE(after->Find(tensor.name), nullptr) << tensor.name;
        EXPECT_EQ(after->Find(tensor.name)->dtype(), tensor.tensor.dtype()) << tensor.name;
      }
    }
  }
}

TEST(Quantize, Bytes_AreTheSameForAnyThreads) {
  const SampleCheckpoint source("qwen3_moe", "unquantized", {"--layers", "2"});
  const TemporaryDirectory directory;
  std::set<std::string> hashes;
  for (const char* threads : {"1", "3"}) {
    const std::string output = directory / (std::string("out") + threads);
    const ProcessResult result =
        Quantize(source.path(), "nvfp4_w4a16", output, {"--threads", threads, "--max-shard-bytes", "200000"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    hashes.insert(result.Json().at("content_hash").get<std::string>());
  }
  EXPECT_EQ(hashes.size(), 1U);
  int compared = 0;
  for (const auto& entry : fs::directory_iterator(directory / "out1")) {
    const std::string other = (directory / "out3") + "/" + entry.path().filename().string();
    if (entry.is_regular_file()) {
      EXPECT_EQ(ReadFile(entry.path()), ReadFile(other)) << other;
      ++compared;
    }
  }
  EXPECT_GE(compared, 5) << "shards, index, config, report";
}

TEST(Quantize, Memory_IsThatOfAFewExpertsAndNotOfTheCheckpoint) {
  const TemporaryDirectory directory;
  const std::string source = directory / "source";
  ASSERT_EQ(RunCommand({"sample", "--family", "qwen3_moe", "--scheme", "unquantized", "--output", source,
                        "--hidden", "1024", "--intermediate", "1024", "--experts", "14", "--top-k", "2",
                        "--tokens", "1"})
                .exit_code,
            0);
  const ProcessResult result = Quantize(source, "nvfp4_w4a16", directory / "out", {"--threads", "1"});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  // 88 MB of weights; an expert has 6 MB, its F32 copies and the program the rest.
  EXPECT_LT(result.peak_bytes, int64_t{60} << 20);
}

TEST(Quantize, ScaleSearch_LeavesLessError) {
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  const TemporaryDirectory directory;
  // Powers of two leave a search little to choose from.
  const std::pair<const char*, double> kGains[] = {
      {"nvfp4_w4a16", 0.9}, {"mxfp4_w4a16", 0.998}, {"int4_w4a16:g32", 0.98}};
  for (const auto& [scheme, gain] : kGains) {
    const ProcessResult result = Quantize(source.path(), scheme, directory / scheme, {"--scale-search"});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const nlohmann::json json = result.Json();
    const double before = json.at("rel_l2_before_search").get<double>(),
                 after = json.at("rel_l2").get<double>();
    EXPECT_LT(after, gain * before) << scheme;
    EXPECT_NEAR(json.at("scale_search_gain").get<double>(), 1 - after / before, 1e-12) << scheme;
  }
}

TEST(Quantize, Refusals_HaveTheirCodesAndLeaveNothing) {
  const SampleCheckpoint source("qwen3_moe", "unquantized"), quantized("qwen3_moe", "nvfp4_w4a16");
  const TemporaryDirectory directory;
  const std::string output = directory / "out";
  EXPECT_EQ(Quantize(source.path(), "nvfp4_w4a4", output).exit_code, 2) << "no statistics";
  EXPECT_EQ(Quantize(source.path(), "no_such_scheme", output).exit_code, 2);
  EXPECT_EQ(Quantize(source.path(), "nvfp4_w4a16", output, {"--format", "nobody"}).exit_code, 2);
  EXPECT_EQ(Quantize(source.path(), "int8_w8a8", output, {"--format", "modelopt"}).exit_code, 4);
  EXPECT_EQ(Quantize(quantized.path(), "nvfp4_w4a16", output).exit_code, 4) << "quantized already";
  EXPECT_EQ(Quantize(source.path(), "fp8_w8a8", output, {"--scale-search"}).exit_code, 2);
  EXPECT_EQ(Quantize(source.path(), "int4_w4a16", output, {"--mx-scale", "floor"}).exit_code, 2);
  EXPECT_EQ(Quantize(source.path(), "nvfp4_w4a16", source.path()).exit_code, 2) << "not empty";
  EXPECT_EQ(Quantize(source.path(), "nvfp4_w4a16", output + ".gguf").exit_code, 2) << "the name of a file";
  EXPECT_TRUE(fs::is_empty(directory.path())) << "a failing command leaves nothing";
  const std::string statistics = Calibrate(source, directory / "stats.safetensors");
  const ProcessResult idle = Quantize(source.path(), "nvfp4_w4a16", output, {"--act-stats", statistics});
  EXPECT_EQ(idle.exit_code, 2);
  EXPECT_NE(idle.err.find("nvfp4_w4a16 stores no scales of inputs"), std::string::npos) << idle.err;
  EXPECT_FALSE(fs::exists(output));
}

// What is wrong with the source is an error of its file, before anything is written.
TEST(Quantize, SourceThatCannotBeCopied_IsBadInput) {
  const TemporaryDirectory directory;
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  std::string header =
      R"({"extra.weight":{"dtype":"F13","shape":[1099511627776,1048576],"data_offsets":[0,8]}})";
  header += std::string(header.size() % 8 == 0 ? 0 : 8 - header.size() % 8, ' ');
  const uint64_t size = header.size();
  WriteFile(source.path() + "/extra.safetensors",
            std::string(reinterpret_cast<const char*>(&size), 8) + header + std::string(8, 'x'));
  const auto weights = ReadSafetensors(source.path() + "/model.safetensors");
  ASSERT_TRUE(weights.ok());
  nlohmann::json index = {{"metadata", {{"total_size", 0}}},
                          {"weight_map", {{"extra.weight", "extra.safetensors"}}}};
  for (const NamedTensor& tensor : weights->tensors) {
    index["weight_map"][tensor.name] = "model.safetensors";
  }
  WriteFile(source.path() + "/model.safetensors.index.json", index.dump());
  const ProcessResult result = Quantize(source.path(), "nvfp4_w4a16", directory / "out");
  EXPECT_EQ(result.exit_code, 3) << result.err;
  for (const char* said : {"extra.safetensors", "'extra.weight'", "'F13'"}) {
    EXPECT_NE(result.err.find(said), std::string::npos) << said << ": " << result.err;
  }
  const SampleCheckpoint dense("qwen3_moe", "unquantized");
  dense.Rewrite("model.safetensors", [](std::vector<NamedTensor>& tensors) {
    std::erase_if(tensors,
                  [](const NamedTensor& tensor) { return tensor.name.find("mlp") != std::string::npos; });
  });
  EXPECT_EQ(Quantize(dense.path(), "nvfp4_w4a16", directory / "out").exit_code, 3);
  EXPECT_EQ(RunCommand({"lint", dense.path()}).exit_code, 3);
  EXPECT_TRUE(fs::is_empty(directory.path()));
}

// --force replaces a whole folder: never the one that is read, and never one that is no checkpoint.
TEST(Quantize, Force_ReplacesOtherCheckpointsOnly) {
  const TemporaryDirectory directory;
  const std::string source = directory / "models/source", output = directory / "out";
  ASSERT_EQ(RunCommand({"sample", "--family", "qwen3_moe", "--scheme", "unquantized", "--output", source,
                        "--hidden", "64", "--intermediate", "32", "--experts", "2", "--top-k", "1"})
                .exit_code,
            0);
  fs::create_directory_symlink(source, directory / "alias");
  for (const std::string& place : {source, source + "/", directory / "models", directory / "alias"}) {
    const ProcessResult result = Quantize(source, "nvfp4_w4a16", place, {"--force"});
    EXPECT_EQ(result.exit_code, 2) << place << ": " << result.err;
    EXPECT_NE(result.err.find("the checkpoint that is read"), std::string::npos) << result.err;
    ASSERT_TRUE(fs::exists(source + "/model.safetensors")) << place << ": the source is gone";
  }
  fs::create_directories(output);
  WriteFile(output + "/thesis.txt", "not ours");
  const ProcessResult foreign = Quantize(source, "nvfp4_w4a16", output, {"--force"});
  EXPECT_EQ(foreign.exit_code, 2) << foreign.err;
  EXPECT_NE(foreign.err.find("config.json"), std::string::npos) << foreign.err;
  EXPECT_TRUE(fs::exists(output + "/thesis.txt"));
  WriteFile(output + "/config.json", "{}");
  EXPECT_EQ(Quantize(source, "nvfp4_w4a16", output, {"--force"}).exit_code, 0);
  EXPECT_FALSE(fs::exists(output + "/thesis.txt")) << "the folder is replaced, not written into";
}

TEST(Quantize, Force_KeepsTheStatisticsThatItReads) {
  const TemporaryDirectory directory;
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  const std::string output = directory / "out", statistics = output + "/statistics.safetensors";
  fs::create_directories(output);
  WriteFile(output + "/config.json", "{}");
  ASSERT_EQ(RunCommand({"calibrate", source.path(), "--layer", "0", "--input", source.input(), "--output",
                        statistics})
                .exit_code,
            0);
  const ProcessResult result =
      Quantize(source.path(), "nvfp4_w4a4", output, {"--force", "--act-stats", statistics});
  EXPECT_EQ(result.exit_code, 2) << result.err;
  EXPECT_TRUE(fs::exists(statistics));
}

// Two runs with one place: the second one took the unfinished files of the first for those of a dead one.
TEST(Quantize, PlaceWhereAnotherRunWrites_IsRefused) {
  const TemporaryDirectory directory;
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  const fs::path unfinished = directory.path() / ".out.incomplete";
  fs::create_directories(unfinished);
  {
    const auto lock = platform::FileLock::Take((unfinished / ".fusedmoe-incomplete").string());
    ASSERT_TRUE(lock.ok()) << lock.status().ToString();
    WriteFile((unfinished / "model.safetensors").string(), "of the other run");
    const ProcessResult result = Quantize(source.path(), "nvfp4_w4a16", directory / "out");
    EXPECT_EQ(result.exit_code, 2) << result.err;
    EXPECT_NE(result.err.find("another run"), std::string::npos) << result.err;
    EXPECT_TRUE(fs::exists(unfinished / "model.safetensors"));
  }
  EXPECT_EQ(Quantize(source.path(), "nvfp4_w4a16", directory / "out").exit_code, 0)
      << "the other run is dead";
  EXPECT_FALSE(fs::exists(unfinished));
}

// Rows of packed integers are whole words, of which compressed-tensors fills the last one with zeros.
TEST(Quantize, ColumnsThatFillNoWord_ArePadded) {
  const TemporaryDirectory directory;
  const std::string source = directory / "odd";
  const std::vector<std::string> sizes = {"--hidden",  "66", "--intermediate", "18",
                                          "--experts", "2",  "--top-k",        "1"};
  const auto sample = [&](const std::string& scheme, const std::string& output) {
    std::vector<std::string> arguments = {"sample", "--family", "qwen3_moe", "--scheme",
                                          scheme,   "--output", output};
    arguments.insert(arguments.end(), sizes.begin(), sizes.end());
    return RunCommand(arguments).exit_code;
  };
  ASSERT_EQ(sample("unquantized", source), 0);
  for (const char* scheme : {"int8_w8a16", "int8_w8a8"}) {
    const std::string out = directory / scheme;
    ASSERT_EQ(Quantize(source, scheme, out).exit_code, 0) << scheme;
    EXPECT_EQ(RunCommand({"verify", out, "--against", source}).exit_code, 0) << scheme;
  }
  const auto file = ReadSafetensors(directory / "int8_w8a16" + "/model.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  EXPECT_EQ(file->Find("model.layers.0.mlp.experts.0.up_proj.weight_packed")->shape(), Shape({18, 17}));
  for (const char* scheme : {"int8_w8a16:channel", "int4_w4a16:channel"}) {
    const std::string out = directory / scheme;
    ASSERT_EQ(sample(scheme, out), 0) << scheme;
    EXPECT_EQ(RunCommand({"run", out, "--input", out + "/io/input.safetensors", "--output", directory / "o",
                          "--check"})
                  .exit_code,
              0)
        << scheme;
    EXPECT_EQ(
        RunCommand({"convert", out, "--to", "compressed-tensors", "--output", out + "-again"}).exit_code, 0)
        << scheme;
  }
}

TEST(Quantize, SizesThatGroupsDoNotDivide_AreRefusedByName) {
  const TemporaryDirectory directory;
  const std::string source = directory / "odd";
  ASSERT_EQ(RunCommand({"sample", "--family", "qwen3_moe", "--scheme", "unquantized", "--output", source,
                        "--hidden", "64", "--intermediate", "40", "--experts", "2", "--top-k", "1"})
                .exit_code,
            0);
  const ProcessResult result = Quantize(source, "nvfp4_w4a16", directory / "out");
  EXPECT_EQ(result.exit_code, 4);
  EXPECT_EQ(result.Json().at("error").at("tensor"), "model.layers.0.mlp.experts.0.down_proj.weight");
  EXPECT_FALSE(fs::exists(directory / "out"));
}

TEST(Calibrate, CountsTokensAndMerges) {
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  const TemporaryDirectory directory;
  const std::string file = Calibrate(source, directory / "stats.safetensors");
  const auto once = ReadSafetensors(file);
  ASSERT_TRUE(once.ok());
  int64_t tokens = 0;
  const Tensor* counts = once->Find("layers.0.tokens");
  ASSERT_NE(counts, nullptr);
  for (int64_t expert = 0; expert < 8; ++expert) {
    const int64_t count = counts->view().as<int64_t>()[expert];
    tokens += count;
    EXPECT_EQ(once->Find("layers.0.gate_up_amax")->view().as<float>()[expert] > 0, count > 0);
    EXPECT_EQ(once->Find("layers.0.down_amax")->view().as<float>()[expert] > 0, count > 0);
  }
  EXPECT_EQ(tokens, 5 * 2);
  Calibrate(source, file, {"--merge"});
  const auto twice = ReadSafetensors(file);
  for (int64_t expert = 0; expert < 8; ++expert) {
    EXPECT_EQ(twice->Find("layers.0.tokens")->view().as<int64_t>()[expert],
              2 * counts->view().as<int64_t>()[expert]);
  }
}

// One process a layer: each read what stood there, and the last one that wrote won.
TEST(Calibrate, MergesOfSeveralProcesses_KeepAllLayers) {
  constexpr int kLayers = 4;
  const SampleCheckpoint source("qwen3_moe", "unquantized", {"--layers", std::to_string(kLayers)});
  const TemporaryDirectory directory;
  const std::string file = directory / "stats.safetensors";
  std::string all;
  for (int layer = 0; layer < kLayers; ++layer) {
    all += CommandText() + " calibrate " + source.path() + " --layer " + std::to_string(layer) + " --input " +
           source.input() + " --output " + file + " --merge >/dev/null & p" + std::to_string(layer) + "=$!; ";
  }
  for (int layer = 0; layer < kLayers; ++layer) {
    all += "wait $p" + std::to_string(layer) + " || exit 1; ";
  }
  ASSERT_EQ(std::system(all.c_str()), 0);
  const auto statistics = ReadSafetensors(file);
  ASSERT_TRUE(statistics.ok()) << statistics.status().ToString();
  for (int layer = 0; layer < kLayers; ++layer) {
    EXPECT_NE(statistics->Find("layers." + std::to_string(layer) + ".tokens"), nullptr) << layer;
  }
}

TEST(Calibrate, StatisticsOfAnotherModel_AreNotMixedAndNotUsed) {
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  const TemporaryDirectory directory;
  const std::string file = Calibrate(source, directory / "stats.safetensors");
  const std::string other = directory / "other";
  ASSERT_EQ(RunCommand({"sample", "--family", "qwen3_moe", "--scheme", "unquantized", "--output", other,
                        "--hidden", "192", "--intermediate", "64", "--experts", "8", "--top-k", "2"})
                .exit_code,
            0);
  const ProcessResult merged = RunCommand({"calibrate", other, "--layer", "0", "--input",
                                           other + "/io/input.safetensors", "--output", file, "--merge"});
  EXPECT_EQ(merged.exit_code, 3) << merged.err;
  EXPECT_NE(merged.err.find(file + ": "), std::string::npos) << merged.err;
  EXPECT_NE(merged.err.find("8 experts, hidden 192, intermediate 64"), std::string::npos) << merged.err;
  EXPECT_NE(ReadSafetensors(file)->Find("layers.0.sizes")->view().as<int64_t>()[0], 192)
      << "it stays as it was";
  const ProcessResult used = Quantize(other, "nvfp4_w4a4", directory / "out", {"--act-stats", file});
  EXPECT_EQ(used.exit_code, 3) << used.err;
  EXPECT_NE(used.err.find(file + ": "), std::string::npos) << used.err;
  EXPECT_NE(used.err.find("the layer has 8 experts, hidden 192"), std::string::npos) << used.err;
}

TEST(Calibrate, CountsThatWouldOverflow_AreRefused) {
  const SampleCheckpoint source("qwen3_moe", "unquantized");
  const TemporaryDirectory directory;
  const std::string file = Calibrate(source, directory / "stats.safetensors");
  auto contents = *ReadSafetensors(file);
  for (NamedTensor& tensor : contents.tensors) {
    if (tensor.name == "layers.0.tokens") {
      Tensor counts = *Tensor::Allocate(DType::kI64, tensor.tensor.shape());
      std::fill_n(counts.mutable_view().as<int64_t>(), 8, std::numeric_limits<int64_t>::max());
      tensor.tensor = counts;
    }
  }
  ASSERT_TRUE(WriteSafetensors(file, contents.tensors, contents.metadata).ok());
  const std::string before = ReadFile(file);
  const ProcessResult merged = RunCommand(
      {"calibrate", source.path(), "--layer", "0", "--input", source.input(), "--output", file, "--merge"});
  EXPECT_EQ(merged.exit_code, 3) << merged.err;
  EXPECT_NE(merged.err.find(file + ": expert "), std::string::npos) << merged.err;
  EXPECT_EQ(ReadFile(file), before);
}

}  // namespace
}  // namespace fusedmoe::test
