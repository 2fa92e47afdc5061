#include <fusedmoe/jobs/tune.hpp>

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include <fusedmoe/version.hpp>

#include "jobs/tune/fit.hpp"
#include "support/temporary_directory.hpp"

namespace fusedmoe {
namespace {

CpuCosts Example() {
  CpuCosts costs;
  costs.cpu = HostMachine().cpu_name;
  costs.version = FUSEDMOE_VERSION_STRING;
  costs.threads = 2;
  costs.rows = {{"nvfp4_w4a16", "amx", "nvfp4", "a16", false, {1, 2, 3, 0, 4.5}, {5, 6, 7, 8, 9}, true, 0.25},
                {"int4_w4a16:g128:a8", "avx2", "u4_g128", "a8", false, {1, 2, 3, 0, 4}, {}, false, 0},
                {"int8_w8a8", "avx2", "u8", "a8", true, {1.5, 0, 0, 0, 1e-3}, {}, false, 0}};
  return costs;
}

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

TEST(CpuCostsFile_WrittenAndRead, IsTheSame) {
  const CpuCosts costs = Example();
  const Result<CpuCosts> read = ParseCpuCosts(ToJson(costs));
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(read->cpu, costs.cpu);
  EXPECT_EQ(read->threads, 2);
  EXPECT_EQ(read->rows, costs.rows);
}

TEST(CpuCostsFile_Malformed, NamesTheField) {
  const std::string text = ToJson(Example());
  struct Case {
    std::string from, to, named;
  };
  for (const Case& each :
       std::vector<Case>{{"\"read_ns\": 6.0", "\"read_ns\": -6.0", "costs[0].tiles.read_ns"},
                         {"\"read_ns\": 6.0", "\"read_ns\": \"6\"", "costs[0].tiles.read_ns"},
                         {"\"read_ns\": 6.0", "\"read_ns\": 1e300", "costs[0].tiles.read_ns"},
                         {"\"token_ns\": 4.5", "\"tokens\": 4.5", "costs[0].vectors.token_ns"},
                         {"\"isa\": \"avx2\"", "\"isa\": \"avx3\"", "costs[1].isa"},
                         {"\"codes\": true", "\"codes\": 1", "costs[2].codes"},
                         {"\"threads\": 2", "\"threads\": 0", "threads"},
                         {"\"threads\": 2", "\"threads\": 1.5", "threads"},
                         {"\"kind\": \"cpu_costs\"", "\"kind\": \"costs\"", "kind"},
                         {"\"schema_version\": 1", "\"schema_version\": 2", "schema_version"},
                         {"\"version\": \"", "\"build\": \"", "version"}}) {
    const Result<CpuCosts> read = ParseCpuCosts(Replaced(text, each.from, each.to));
    ASSERT_FALSE(read.ok()) << each.to;
    EXPECT_EQ(read.status().code(), StatusCode::kBadInput) << each.to;
    EXPECT_NE(read.status().message().find(each.named), std::string::npos) << read.status().ToString();
  }
  for (const char* broken : {"", "{", "[]", "3", "{\"costs\": 3}", "null"}) {
    EXPECT_EQ(ParseCpuCosts(broken).status().code(), StatusCode::kBadInput) << broken;
  }
  for (size_t length = 0; length < text.size() - 2; length += 7) {
    EXPECT_FALSE(ParseCpuCosts(text.substr(0, length)).ok()) << length;
  }
}

TEST(CpuCostsFile_BadWholeNumber, SaysWhatThatFieldMayBe) {
  const std::string text = ToJson(Example());
  const auto message = [&](const std::string& from, const std::string& to) {
    return ParseCpuCosts(Replaced(text, from, to)).status().message();
  };
  for (const char* threads : {"0", "-1", "1.5", "65537", "1e300", "\"2\"", "null"}) {
    EXPECT_TRUE(message("\"threads\": 2", std::string("\"threads\": ") + threads)
                    .ends_with("it must be an integer from 1 to 65536"))
        << threads;
  }
  for (const char* version : {"0", "-1", "1.5", "2", "1e300", "\"1\"", "null"}) {
    EXPECT_TRUE(message("\"schema_version\": 1", std::string("\"schema_version\": ") + version)
                    .ends_with("it must be 1"))
        << version;
  }
}

TEST(CpuCostsFile_OfAnotherMachineOrBuild, IsRefused) {
  const test::TemporaryDirectory directory;
  const std::string path = directory / "costs.json";
  const auto write = [&](const CpuCosts& costs) { std::ofstream(path) << ToJson(costs); };
  write(Example());
  const Result<CpuCosts> read = ReadCpuCosts(path);
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(read->source, path);
  CpuCosts other = Example();
  other.cpu = "another CPU";
  write(other);
  EXPECT_EQ(ReadCpuCosts(path).status().code(), StatusCode::kBadInput);
  EXPECT_EQ(ReadCpuCosts(path).status().file(), path);
  other = Example();
  other.version = "0.0.0";
  write(other);
  EXPECT_NE(ReadCpuCosts(path).status().message().find("version"), std::string::npos);
  std::remove(path.c_str());
  for (const std::string& odd :
       {path, directory / "", std::string("/dev/zero")}) {  // absent, folder, endless
    EXPECT_EQ(ReadCpuCosts(odd).status().code(), StatusCode::kBadInput) << odd;
    EXPECT_EQ(ReadCpuCosts(odd).status().file(), odd);
  }
}

std::vector<tune::Point> PointsOf(const CpuPathCost& cost, bool tiles) {
  std::vector<tune::Point> points;
  for (const double blocks : {700.0, 4600.0}) {
    for (const int64_t tokens : {1, 2, 4, 8, 12, 20, 32, 52, 128}) {
      const double passes = tiles ? 1 : std::ceil(static_cast<double>(tokens) / 8);
      const double rows = tiles ? std::ceil(static_cast<double>(tokens) / 16) * 16 : 0;
      const double work =
          passes * cost.decode_ns + rows * cost.row_ns + static_cast<double>(tokens) * cost.token_ns;
      points.push_back({blocks, tokens, passes, rows, static_cast<double>(tokens),
                        cost.fixed_ns + blocks * std::max(cost.read_ns, work)});
    }
  }
  return points;
}

TEST(FitPath, OfExactTimes_FindsTheConstants) {
  for (const bool tiles : {false, true}) {
    const CpuPathCost cost = {5000, 40, 6, tiles ? 1.5 : 0, 3};
    const tune::Fit fit = tune::FitPath(PointsOf(cost, tiles));
    EXPECT_LT(fit.misfit, 1e-6);
    EXPECT_NEAR(fit.cost.fixed_ns, cost.fixed_ns, 1);
    EXPECT_NEAR(fit.cost.read_ns, cost.read_ns, 1e-3);
    EXPECT_NEAR(fit.cost.decode_ns, cost.decode_ns, 1e-3);
    EXPECT_NEAR(fit.cost.row_ns, cost.row_ns, 1e-3);
    EXPECT_NEAR(fit.cost.token_ns, cost.token_ns, 1e-3);
  }
}

/// Vectors whose tokens get cheaper beyond twenty, and tiles that meet them at eight: no constants fit all.
TEST(FitPath, WeighedByNearness_IsRightWherePathsMeet) {
  const auto points_of = [](const std::vector<int64_t>& counts, bool tiles) {
    std::vector<tune::Point> points;
    for (const int64_t n : counts) {
      const auto tokens = static_cast<double>(n);
      const double block = tiles ? 100 + tokens : n <= 20 ? 20 + 11 * tokens : 172 + 3.4 * tokens;
      points.push_back({4608, n, 1, 0, tokens, 4608 * block});
    }
    return points;
  };
  std::vector<tune::Point> vectors = points_of({1, 2, 4, 6, 8, 12, 20, 32, 52, 128}, false);
  std::vector<tune::Point> tiles = points_of({1, 2, 4, 6, 8, 12, 20, 32, 52}, true);
  const auto off_at_eight = [&] {
    const CpuPathCost cost = tune::FitPath(vectors).cost;
    const double time = cost.fixed_ns + 4608 * std::max(cost.read_ns, cost.decode_ns + 8 * cost.token_ns);
    return std::fabs(time / (4608 * 108.0) - 1);
  };
  EXPECT_GT(off_at_eight(), 0.1) << "unweighted";
  tune::WeighByNearness(vectors, tiles);
  EXPECT_NEAR(vectors[4].weight, 1.0, 1e-12);
  EXPECT_NEAR(vectors[0].weight, 31.0 / 101.0 * 31.0 / 101.0, 1e-12);
  EXPECT_EQ(tiles[0].weight, vectors[0].weight);
  EXPECT_DOUBLE_EQ(vectors.back().weight, 0.1);
  EXPECT_LT(off_at_eight(), 0.05);
}

TEST(FitPath, OfNoisyTimes_HasNoNegativeConstants) {
  std::vector<tune::Point> points = PointsOf({0, 10, 0, 0, 2}, true);
  for (size_t i = 0; i < points.size(); ++i) {
    points[i].nanoseconds *= i % 3 == 0 ? 1.2 : 0.9;
  }
  const tune::Fit fit = tune::FitPath(points);
  for (const double constant :
       {fit.cost.fixed_ns, fit.cost.read_ns, fit.cost.decode_ns, fit.cost.row_ns, fit.cost.token_ns}) {
    EXPECT_GE(constant, 0.0);
  }
  EXPECT_LT(fit.misfit, 0.5);
  EXPECT_EQ(tune::FitPath({}).cost, CpuPathCost{});
}

TEST(Tune_OneScheme, MeasuresWhatTheMachineHas) {
  if (!HostMachine().Has(Isa::kAvx2)) {
    GTEST_SKIP() << "no AVX2 here";
  }
  TuneOptions options;
  options.schemes = {"nvfp4_w4a16"};
  options.isas = {"avx2"};
  options.seconds_per_point = 0;
  options.experts_per_call = 8;
  options.max_bytes = 1 << 20;
  const Result<CpuCosts> costs = RunTune(options);
  ASSERT_TRUE(costs.ok()) << costs.status().ToString();
  ASSERT_EQ(costs->rows.size(), 1U);
  const CpuCostRow& row = costs->rows.front();
  EXPECT_EQ(row.weights, "nvfp4");
  EXPECT_EQ(row.activations, "a16");
  EXPECT_GT(row.vectors.token_ns + row.vectors.decode_ns, 0.0);
  EXPECT_FALSE(row.has_tiles);
  EXPECT_GE(CrossoverOf(row).latency_tokens, 1);
  options.schemes = {"nvfp5"};
  EXPECT_EQ(RunTune(options).status().code(), StatusCode::kUsage);
  options.schemes = {"nvfp4_w4a16"};
  options.isas = {"avx1024"};
  EXPECT_EQ(RunTune(options).status().code(), StatusCode::kUsage);
}

}  // namespace
}  // namespace fusedmoe
