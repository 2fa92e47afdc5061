#include <memory>
#include <string>

#include <gtest/gtest.h>
#include <fusedmoe/plan.hpp>
#include <nlohmann/json.hpp>

namespace fusedmoe {
namespace {

using Json = nlohmann::ordered_json;

TEST(PlanAsJson, IsReadBackAsItIs) {
  Plan plan;
  plan.backend = "CPU_FUSED";
  plan.mode = "latency";
  plan.recipe = {"pad_rows(96 -> 128)", "a \"quoted\" \\ step\n"};
  plan.communicator = "nccl 2.28.3 (/tmp/\xff/n\xc3\xa9) over mpi";
  plan.workspace_bytes = int64_t{1} << 40;
  plan.layout_error = 1.25e-7;
  plan.weight_nodes = {0, 2};
  plan.latent = 64;
  plan.shared = std::make_shared<Plan>(Plan{.backend = "REFERENCE", .isa = "amx"});
  const Json json = Json::parse(JsonText(plan));
  EXPECT_EQ(json.begin().key(), "backend");
  EXPECT_EQ(json["backend"], "CPU_FUSED");
  EXPECT_FALSE(json.contains("isa"));
  EXPECT_EQ(json["recipe"], Json(plan.recipe));
  EXPECT_EQ(json["communicator"], "nccl 2.28.3 (/tmp/\xef\xbf\xbd/n\xc3\xa9) over mpi");
  EXPECT_EQ(json["rows_dtype"], "F32");
  EXPECT_EQ(json["workspace_bytes"], int64_t{1} << 40);
  EXPECT_EQ(json["layout_error"], 1.25e-7);
  EXPECT_EQ(json["weight_nodes"], Json({0, 2}));
  EXPECT_EQ(json["latent"], 64);
  EXPECT_EQ(json["shared"]["isa"], "amx");
  EXPECT_TRUE(json["shared"]["layout_error"].is_number_float());
  EXPECT_FALSE(json["shared"].contains("weight_nodes"));
  EXPECT_FALSE(json["shared"].contains("latent"));
}

}  // namespace
}  // namespace fusedmoe
