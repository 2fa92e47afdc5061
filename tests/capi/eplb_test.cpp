#include <fusedmoe/fusedmoe.h>

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <fusedmoe/eplb.hpp>

#include "capi/handles.hpp"

// Load balancing through the C interface: the plans of the C++ one, and layers that move their experts.
namespace fusedmoe {
namespace {

std::string LastText() {
  return fmoe_last_error()->text;
}

TEST(CApiEplb, Rebalance_IsThePolicyOfTheLibrary) {
  // The example that DeepSeek publishes with its policy: two layers, 12 experts, 16 slots.
  const std::vector<std::vector<double>> loads = {{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86},
                                                  {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}};
  const std::vector<std::vector<int32_t>> plans = {{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1},
                                                   {7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}};
  fmoe_eplb_shape shape;
  fmoe_eplb_shape_init(&shape);
  shape.num_experts = 12;
  shape.num_physical = 16;
  shape.num_groups = 4;
  shape.num_nodes = 2;
  shape.num_ranks = 8;
  for (size_t layer = 0; layer < loads.size(); ++layer) {
    std::vector<int32_t> slots(16);
    ASSERT_EQ(fmoe_eplb_rebalance(&shape, loads[layer].data(), nullptr, slots.data()), FMOE_OK) << LastText();
    EXPECT_EQ(slots, plans[layer]);
    std::vector<int32_t> logical(12 * 5), count(12);
    ASSERT_EQ(fmoe_eplb_maps(slots.data(), 16, 12, 5, logical.data(), count.data()), FMOE_OK) << LastText();
    const EplbMaps maps = *MakeEplbMaps(slots, 12, 5);
    EXPECT_EQ(logical, maps.logical_to_physical);
    EXPECT_EQ(count, maps.replica_count);
    // The same load again, by other names of the slots of each rank: nothing moves.
    std::vector<int32_t> swapped = slots, kept(16);
    for (size_t slot = 0; slot < 16; slot += 2) {
      std::swap(swapped[slot], swapped[slot + 1]);
    }
    ASSERT_EQ(fmoe_eplb_rebalance(&shape, loads[layer].data(), swapped.data(), kept.data()), FMOE_OK);
    EXPECT_EQ(kept, swapped);
  }
}

TEST(CApiEplb, ShapesAndLoadsThatDoNotFit_AreRefusedByName) {
  fmoe_eplb_shape shape;
  fmoe_eplb_shape_init(&shape);
  shape.num_experts = 4;
  shape.num_physical = 6;
  std::vector<double> load(4, 1.0);
  std::vector<int32_t> slots(6);
  const auto refused = [&](const char* part) {
    EXPECT_EQ(fmoe_eplb_rebalance(&shape, load.data(), nullptr, slots.data()), FMOE_USAGE);
    EXPECT_NE(LastText().find(part), std::string::npos) << LastText();
  };
  load[2] = -1;
  refused("load[2] is -1");
  load[2] = 1;
  shape.num_ranks = 4;
  refused("cannot be shared equally by 4 ranks");
  shape.num_ranks = 1;
  shape.num_physical = int64_t{1} << 19;
  refused("shape.num_physical");
  shape.struct_size += 8;
  refused("fmoe_eplb_shape.struct_size");
  int32_t lost[2] = {0, 0}, logical[4], count[2];
  EXPECT_EQ(fmoe_eplb_maps(lost, 2, 2, 2, logical, count), FMOE_USAGE) << "expert 1 has no slot";
  lost[1] = 9;
  EXPECT_EQ(fmoe_eplb_maps(lost, 2, 2, 2, logical, count), FMOE_USAGE) << "no such expert";
}

/// One of two ranks in this process, whose experts move where the load is.
void BalanceOnRank(const std::shared_ptr<Communicator>& joined) {
  fmoe_communicator communicator{joined};
  fmoe_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(fmoe_checkpoint_open(FMOE_GOLDEN_DIR "/checkpoints/qwen3_moe-modelopt-nvfp4", &checkpoint),
            FMOE_OK)
      << LastText();
  int64_t count = 0;
  const int64_t number = fmoe_checkpoint_moe_layers(checkpoint, &count)[0];
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  ASSERT_EQ(fmoe_checkpoint_describe(checkpoint, number, &info), FMOE_OK) << LastText();
  fmoe_layer_options options;
  fmoe_layer_options_init(&options);
  options.communicator = &communicator;
  options.data_parallel = 2;
  options.expert_parallel = 1;
  options.load_balancing = 1;
  options.redundant_experts = 2;
  options.eplb_window_steps = options.eplb_interval_steps = 4;
  options.max_tokens = 16;
  options.determinism = "rank_invariant";
  fmoe_layer* layer = nullptr;
  ASSERT_EQ(fmoe_layer_load(checkpoint, number, &options, &layer), FMOE_OK) << LastText();
  fmoe_workspace* workspace = nullptr;
  ASSERT_EQ(fmoe_workspace_create(layer, &workspace), FMOE_OK) << LastText();

  int64_t slots = 0;
  ASSERT_EQ(fmoe_layer_physical_to_logical(layer, nullptr, 0, &slots), FMOE_OK) << LastText();
  EXPECT_EQ(slots, info.num_experts + 2);
  std::vector<int32_t> map(static_cast<size_t>(slots));
  EXPECT_EQ(fmoe_layer_physical_to_logical(layer, map.data(), slots - 1, &slots), FMOE_USAGE);
  ASSERT_EQ(fmoe_layer_physical_to_logical(layer, map.data(), slots, &slots), FMOE_OK);
  EXPECT_EQ(map, InitialPhysicalToLogical(info.num_experts, 2));

  constexpr int64_t kTokens = 6;
  std::vector<float> hidden(static_cast<size_t>(kTokens * info.hidden), 0.25F), output(hidden.size()), first;
  std::vector<int32_t> ids;  // all tokens go to the last expert, which has one slot to begin with
  for (int64_t slot = 0; slot < kTokens * info.top_k; ++slot) {
    ids.push_back(slot % info.top_k == 0 ? static_cast<int32_t>(info.num_experts - 1) : -1);
  }
  std::vector<float> weights(ids.size(), 1.0F);
  const auto rows = [](void* data, fmoe_dtype dtype, int64_t cols) {
    fmoe_tensor tensor{};
    tensor.data = data;
    tensor.dtype = dtype;
    tensor.rank = 2;
    tensor.shape[0] = kTokens;
    tensor.shape[1] = cols;
    return tensor;
  };
  fmoe_forward forward{};
  forward.hidden = rows(hidden.data(), FMOE_F32, info.hidden);
  forward.topk_ids = rows(ids.data(), FMOE_I32, info.top_k);
  forward.topk_weights = rows(weights.data(), FMOE_F32, info.top_k);
  forward.output = rows(output.data(), FMOE_F32, info.hidden);
  bool switched = false;
  for (int step = 0; step < 6; ++step) {
    ASSERT_EQ(fmoe_layer_forward(layer, &forward, workspace, nullptr), FMOE_OK) << LastText();
    first = first.empty() ? output : first;
    EXPECT_EQ(output, first) << "step " << step << ": replicas are equal";
    fmoe_eplb_step ended;
    fmoe_eplb_step_init(&ended);
    ASSERT_EQ(fmoe_layer_end_step(layer, &ended), FMOE_OK) << LastText();
    EXPECT_STREQ(ended.kept, "");
    switched = switched || ended.switched != 0;
    if (ended.switched != 0) {
      EXPECT_EQ(ended.epoch, 1);
      EXPECT_GT(ended.slots_changed, 0);
      EXPECT_GT(ended.planned_balancedness, ended.balancedness);
    }
  }
  EXPECT_TRUE(switched);
  const std::vector<int32_t> before = map;
  ASSERT_EQ(fmoe_layer_physical_to_logical(layer, map.data(), slots, &slots), FMOE_OK);
  EXPECT_NE(map, before);
  fmoe_workspace_release(workspace);
  fmoe_layer_release(layer);
  fmoe_checkpoint_release(checkpoint);
}

TEST(CApiEplb, LayersOnTwoRanks_MoveTheirExpertsToTheLoad) {
  const auto ranks = *InProcessCommunicators(2);
  std::thread other([&] { BalanceOnRank(ranks[1]); });
  BalanceOnRank(ranks[0]);
  other.join();
}

}  // namespace
}  // namespace fusedmoe
