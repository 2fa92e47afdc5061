#include <fusedmoe/jobs/simulate.hpp>

#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

namespace fusedmoe {
namespace {

SimulateReport CostOn(int64_t ranks, const std::string& all2all, int64_t tokens = 128, double zipf = 0) {
  SimulateOptions options;
  options.ranks = ranks;
  options.all2all = all2all;
  options.tokens = tokens;
  options.link = *ParseLink("h800_cx7");
  options.zipf = zipf;
  const auto report = Simulate(*ParseProblem("deepseek-v3"), options);
  EXPECT_TRUE(report.ok()) << report.status().ToString();
  return report.ok() ? *report : SimulateReport{};
}

// DeepEP's published low-latency table: H800, ConnectX-7, 128 tokens, hidden 7168, top 8, FP8 out, BF16 back.
struct Published {
  int64_t ranks;
  double dispatch_us, combine_us;
};
constexpr Published kLowLatency[] = {{8, 77, 114},   {16, 118, 195},  {32, 155, 273},
                                     {64, 173, 314}, {128, 192, 369}, {256, 194, 360}};

TEST(Simulate, LowLatency_ReproducesThePublishedTable) {
  for (const Published& row : kLowLatency) {
    const SimulateReport report = CostOn(row.ranks, "deepep_low_latency");
    EXPECT_NEAR(report.dispatch.seconds * 1e6 / row.dispatch_us, 1, 0.05) << row.ranks << " ranks, dispatch";
    EXPECT_NEAR(report.combine.seconds * 1e6 / row.combine_us, 1, 0.12) << row.ranks << " ranks, combine";
  }
}

TEST(Simulate, HighThroughput_MovesAsManyBytesAsItsRowsHave) {
  // 4096 tokens on 16 ranks of two nodes: a token goes to one other node (1.00 expected), rows of 7392 bytes
  // of FP8 with scales, 8 ids and weights, an index.
  const SimulateReport report = CostOn(16, "deepep_high_throughput", 4096);
  const double remote = ExpectedDestinations(256, 8, 2) / 2;
  EXPECT_NEAR(remote, 1.0, 0.01);
  EXPECT_NEAR(report.dispatch.network_bytes, 4096 * remote * (7392 + 64 + 4), 1);
  EXPECT_NEAR(report.combine.network_bytes, 4096 * remote * 2 * 7168, 1);
  // Published: 43 GB/s by DeepEP's count, which includes the rows of the own node: 21.5 of remote bytes,
  // since NVLink forwards meanwhile. The network alone would take this long.
  EXPECT_GT(report.dispatch.seconds, report.dispatch.network_bytes / 46e9);
}

TEST(Simulate, LatentExperts_SendShorterRowsAndProjectThem) {
  Problem problem = *ParseProblem("nemotron-3-super");
  SimulateOptions options;
  options.link = *ParseLink("h800_cx7");
  options.all2all = "deepep_low_latency";
  const auto latent = Simulate(problem, options);
  ASSERT_TRUE(latent.ok()) << latent.status().ToString();
  problem.config.hidden = problem.config.latent;
  problem.config.latent = 0;
  const auto short_rows = Simulate(problem, options);  // of a model as narrow as they are
  ASSERT_TRUE(short_rows.ok());
  EXPECT_EQ(latent->dispatch.row_bytes, short_rows->dispatch.row_bytes);
  EXPECT_EQ(latent->combine.row_bytes, short_rows->combine.row_bytes);
  const double bytes = 2.0 * 2 * 4096 * 1024, flops = 4.0 * 128 * 4096 * 1024;
  EXPECT_EQ(latent->weight_bytes - short_rows->weight_bytes, static_cast<int64_t>(bytes));
  EXPECT_NEAR(latent->compute_seconds - short_rows->compute_seconds,
              std::max(bytes / (options.link.read_gbps * 1e9), flops / (options.link.gflops * 1e9)), 1e-9);
}

TEST(Simulate, ExpectedDestinations_AreThoseOfDrawsWithoutRepetition) {
  EXPECT_DOUBLE_EQ(ExpectedDestinations(8, 1, 4), 1);
  EXPECT_DOUBLE_EQ(ExpectedDestinations(4, 4, 4), 4);
  EXPECT_NEAR(ExpectedDestinations(256, 8, 2), 1.99, 0.005);
  EXPECT_NEAR(ExpectedDestinations(256, 8, 8), 5.2947, 1e-4);
  EXPECT_NEAR(ExpectedDestinations(256, 8, 64), 7.68, 0.005);
  EXPECT_NEAR(ExpectedDestinations(256, 8, 256), 8, 1e-9);
}

TEST(Simulate, TimeGrowsWithTokensRanksAndRowBytes) {
  for (const char* name : {"allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"}) {
    double before = 0;
    for (const int64_t tokens : {1, 8, 64, 512, 4096}) {
      const double now = CostOn(16, name, tokens).seconds();
      EXPECT_GE(now, before) << name << ", " << tokens << " tokens";
      before = now;
    }
    before = 0;
    for (const int64_t ranks : {16, 32, 64, 128}) {
      const double now = CostOn(ranks, name).dispatch.seconds;
      EXPECT_GE(now, before) << name << ", " << ranks << " ranks";
      before = now;
    }
  }
}

TEST(Simulate, GatherSendsEveryRowEverywhere) {
  const SimulateReport report = CostOn(4, "naive", 100);
  EXPECT_DOUBLE_EQ(report.dispatch.bytes, 3.0 * 100 * (7392 + 64));
  EXPECT_DOUBLE_EQ(report.combine.bytes, 3.0 * 100 * 2 * 7168);
  EXPECT_EQ(report.dispatch.network_bytes, 0);
}

TEST(Simulate, UnevenExperts_SlowTheBusiestRank) {
  const SimulateReport even = CostOn(32, "deepep_low_latency"),
                       uneven = CostOn(32, "deepep_low_latency", 128, 1.0);
  EXPECT_GT(even.slot_imbalance, 1);
  EXPECT_LT(even.slot_imbalance, 1.2);
  EXPECT_GT(uneven.slot_imbalance, 1.5);
  EXPECT_GT(uneven.slowest_seconds(), uneven.seconds());
  EXPECT_EQ(CostOn(1, "naive").slot_imbalance, 1);
}

TEST(Simulate, WrongOptions_AreUsageErrors) {
  const Problem problem = *ParseProblem("deepseek-v3");
  const auto code = [&](auto change) {
    SimulateOptions options;
    options.link = *ParseLink("shm");
    change(options);
    const auto report = Simulate(problem, options);
    return report.ok() ? StatusCode::kOk : report.status().code();
  };
  EXPECT_EQ(code([](SimulateOptions&) {}), StatusCode::kOk);
  EXPECT_EQ(code([](SimulateOptions& o) { o.ranks = 0; }), StatusCode::kUsage);
  EXPECT_EQ(code([](SimulateOptions& o) { o.ranks = 257; }), StatusCode::kUsage);
  EXPECT_EQ(code([](SimulateOptions& o) { o.tokens = 0; }), StatusCode::kUsage);
  EXPECT_EQ(code([](SimulateOptions& o) { o.all2all = "none"; }), StatusCode::kUsage);
  EXPECT_EQ(code([](SimulateOptions& o) { o.dispatch_format = "fp7"; }), StatusCode::kUsage);
  EXPECT_EQ(code([](SimulateOptions& o) { o.zipf = std::nan(""); }), StatusCode::kUsage);
  for (const double rate : {0.0, 1e-320, std::numeric_limits<double>::infinity()}) {
    EXPECT_EQ(code([&](SimulateOptions& o) { o.link.network_gbps = rate; }), StatusCode::kUsage) << rate;
  }
  EXPECT_EQ(ParseLink("wire").status().code(), StatusCode::kUsage);
}

}  // namespace
}  // namespace fusedmoe
