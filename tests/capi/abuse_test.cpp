#include <fusedmoe/fusedmoe.h>

#include <array>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

// What a careless or hostile caller may pass: every call answers with a status, and none crashes. Addresses
// that are given are real ones; sizes, types and names are drawn.
namespace {

const std::string kCheckpoint = FMOE_GOLDEN_DIR "/checkpoints/mixtral-modelopt-nvfp4";

/// A layer to abuse.
class CApiAbuse : public testing::Test {
 public:
  void SetUp() override {
    ASSERT_EQ(fmoe_checkpoint_open(kCheckpoint.c_str(), &checkpoint_), FMOE_OK);
    int64_t count = 0;
    number_ = fmoe_checkpoint_moe_layers(checkpoint_, &count)[0];
    fmoe_layer_options options;
    fmoe_layer_options_init(&options);
    options.max_tokens = 8;
    ASSERT_EQ(fmoe_layer_load(checkpoint_, number_, &options, &layer_), FMOE_OK);
    ASSERT_EQ(fmoe_workspace_create(layer_, &workspace_), FMOE_OK);
    fmoe_layer_info_init(&info_);
    ASSERT_EQ(fmoe_layer_get_info(layer_, &info_), FMOE_OK);
  }
  void TearDown() override {
    fmoe_workspace_release(workspace_);
    fmoe_layer_release(layer_);
    fmoe_checkpoint_release(checkpoint_);
  }
  template <typename T>
  T Pick(std::initializer_list<T> from) {
    return *(from.begin() + random_() % from.size());
  }
  int64_t Size(int64_t right) {
    return Pick<int64_t>({right, right, right, right, 0, 1, right - 1, right + 1, -1, int64_t{1} << 31,
                          int64_t{1} << 62, std::numeric_limits<int64_t>::max(),
                          std::numeric_limits<int64_t>::min()});
  }
  /// [rows, cols] of `dtype` in real memory, with something wrong more often than not.
  fmoe_tensor Spoiled(void* data, fmoe_dtype dtype, int64_t rows, int64_t cols) {
    fmoe_tensor tensor{};
    tensor.data = random_() % 8 == 0 ? nullptr : data;
    tensor.dtype = random_() % 4 == 0 ? static_cast<fmoe_dtype>(static_cast<int>(random_() % 40) - 8) : dtype;
    tensor.rank = random_() % 6 == 0 ? static_cast<int32_t>(random_() % 12) - 3 : 2;
    for (int64_t& extent : tensor.shape) {
      extent = Size(1);
    }
    tensor.shape[0] = Size(rows);
    tensor.shape[1] = Size(cols);
    return tensor;
  }

  fmoe_checkpoint* checkpoint_ = nullptr;
  fmoe_layer* layer_ = nullptr;
  fmoe_workspace* workspace_ = nullptr;
  fmoe_layer_info info_{};
  int64_t number_ = 0;
  std::mt19937_64 random_{20260};
};

TEST_F(CApiAbuse, NullWhereSomethingIsNeeded_IsUsage) {
  fmoe_layer_options options;
  fmoe_layer_options_init(&options);
  fmoe_layer_config config;
  fmoe_layer_config_init(&config);
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  const fmoe_forward forward{};
  const fmoe_expert_source source{};
  fmoe_stacked_experts stacked;
  fmoe_stacked_experts_init(&stacked);
  fmoe_eplb_shape shape;
  fmoe_eplb_shape_init(&shape);
  fmoe_layer* layer = nullptr;
  fmoe_workspace* workspace = nullptr;
  fmoe_dtype element{};
  int64_t count = 0;
  int32_t numbers[8] = {};
  const double load[8] = {};
  const std::vector<std::pair<const char*, std::function<fmoe_code()>>> calls = {
      {"thread_pool_create", [] { return fmoe_thread_pool_create(1, nullptr); }},
      {"communicator_mpi", [] { return fmoe_communicator_mpi(nullptr, 1, nullptr); }},
      {"communicator_nccl", [] { return fmoe_communicator_nccl(nullptr, nullptr, 1, -1, nullptr, nullptr); }},
      {"communicator_finish", [] { return fmoe_communicator_finish(nullptr, nullptr); }},
      {"checkpoint_open", [] { return fmoe_checkpoint_open(nullptr, nullptr); }},
      {"checkpoint_describe", [&] { return fmoe_checkpoint_describe(nullptr, 0, &info); }},
      {"checkpoint_describe", [&] { return fmoe_checkpoint_describe(checkpoint_, number_, nullptr); }},
      {"layer_load", [&] { return fmoe_layer_load(nullptr, 0, &options, &layer); }},
      {"layer_load", [&] { return fmoe_layer_load(checkpoint_, number_, &options, nullptr); }},
      {"layer_get_info", [&] { return fmoe_layer_get_info(nullptr, &info); }},
      {"layer_get_info", [&] { return fmoe_layer_get_info(layer_, nullptr); }},
      {"scheme_element", [&] { return fmoe_scheme_element(nullptr, &element); }},
      {"scheme_element", [&] { return fmoe_scheme_element("int8_w8a8", nullptr); }},
      {"layer_create", [&] { return fmoe_layer_create(nullptr, &source, &options, &layer); }},
      {"layer_create", [&] { return fmoe_layer_create(&config, nullptr, &options, &layer); }},
      {"layer_create", [&] { return fmoe_layer_create(&config, &source, &options, &layer); }},
      {"layer_create", [&] { return fmoe_layer_create(&config, &source, &options, nullptr); }},
      {"layer_create_stacked",
       [&] { return fmoe_layer_create_stacked(nullptr, &stacked, &options, &layer); }},
      {"layer_create_stacked", [&] { return fmoe_layer_create_stacked(&config, nullptr, &options, &layer); }},
      {"layer_create_stacked",
       [&] { return fmoe_layer_create_stacked(&config, &stacked, &options, nullptr); }},
      {"workspace_create", [&] { return fmoe_workspace_create(nullptr, &workspace); }},
      {"workspace_create", [&] { return fmoe_workspace_create(layer_, nullptr); }},
      {"layer_forward", [&] { return fmoe_layer_forward(nullptr, &forward, workspace_, nullptr); }},
      {"layer_forward", [&] { return fmoe_layer_forward(layer_, nullptr, workspace_, nullptr); }},
      {"layer_forward", [&] { return fmoe_layer_forward(layer_, &forward, nullptr, nullptr); }},
      {"layer_forward", [&] { return fmoe_layer_forward(layer_, &forward, workspace_, nullptr); }},
      {"layer_forward_from_host",
       [&] { return fmoe_layer_forward_from_host(nullptr, &forward, workspace_, nullptr); }},
      {"layer_end_step", [] { return fmoe_layer_end_step(nullptr, nullptr); }},
      {"layer_end_step", [&] { return fmoe_layer_end_step(layer_, nullptr); }},  // no load balancing
      {"physical_to_logical", [&] { return fmoe_layer_physical_to_logical(nullptr, numbers, 8, &count); }},
      {"physical_to_logical", [&] { return fmoe_layer_physical_to_logical(layer_, numbers, 8, nullptr); }},
      {"physical_to_logical", [&] { return fmoe_layer_physical_to_logical(layer_, numbers, -1, &count); }},
      {"eplb_rebalance", [&] { return fmoe_eplb_rebalance(nullptr, load, nullptr, numbers); }},
      {"eplb_rebalance", [&] { return fmoe_eplb_rebalance(&shape, load, nullptr, numbers); }},
      {"eplb_maps", [&] { return fmoe_eplb_maps(nullptr, 1, 1, 1, numbers, numbers); }},
      {"eplb_maps", [&] { return fmoe_eplb_maps(numbers, 1, 1, 1, nullptr, numbers); }},
      {"eplb_maps", [&] { return fmoe_eplb_maps(numbers, 1, 1, -5, numbers, numbers); }},
  };
  for (const auto& [name, call] : calls) {
    EXPECT_EQ(call(), FMOE_USAGE) << name << ": " << fmoe_last_error()->text;
    EXPECT_STRNE(fmoe_last_error()->message, "") << name;
  }
  EXPECT_EQ(fmoe_checkpoint_moe_layers(nullptr, &count), nullptr);
  EXPECT_STREQ(fmoe_checkpoint_family(nullptr), "");
  EXPECT_STREQ(fmoe_checkpoint_producer(nullptr), "");
  EXPECT_STREQ(fmoe_layer_plan_text(nullptr), "");
  EXPECT_STREQ(fmoe_layer_selection_text(nullptr), "");
  EXPECT_EQ(fmoe_communicator_size(nullptr), 1);
  EXPECT_EQ(fmoe_communicator_rank(nullptr), 0);
  EXPECT_EQ(fmoe_thread_pool_executor(nullptr).parallel, nullptr);
  fmoe_layer_options_init(nullptr);
  fmoe_layer_info_init(nullptr);
  fmoe_layer_config_init(nullptr);
  fmoe_stacked_experts_init(nullptr);
  fmoe_eplb_step_init(nullptr);
  fmoe_eplb_shape_init(nullptr);
  fmoe_thread_pool_release(nullptr);
  fmoe_communicator_release(nullptr);
  fmoe_checkpoint_release(nullptr);
  fmoe_layer_release(nullptr);
  fmoe_workspace_release(nullptr);
}

TEST_F(CApiAbuse, SizesOfStructs_AreRefusedUnlessKnown) {
  fmoe_layer_options options;
  fmoe_layer* layer = nullptr;
  for (const size_t size :
       {size_t{0}, size_t{1}, size_t{7}, sizeof(options) + 1, size_t{1} << 40, SIZE_MAX}) {
    fmoe_layer_options_init(&options);
    options.struct_size = size;
    EXPECT_EQ(fmoe_layer_load(checkpoint_, number_, &options, &layer), FMOE_USAGE) << size;
    fmoe_layer_info info{};
    info.struct_size = size == sizeof(options) + 1 ? sizeof(info) + 1 : size;
    EXPECT_EQ(fmoe_layer_get_info(layer_, &info), FMOE_USAGE) << size;
  }
  fmoe_layer_info smallest{};
  smallest.struct_size = sizeof(size_t);
  EXPECT_EQ(fmoe_layer_get_info(layer_, &smallest), FMOE_OK);
  EXPECT_EQ(smallest.num_experts, 0);
}

TEST_F(CApiAbuse, DrawnOptions_NeverCrash) {
  for (int round = 0; round < 300; ++round) {
    fmoe_layer_options options;
    fmoe_layer_options_init(&options);
    options.device = Pick<const char*>({nullptr, nullptr, "cpu", "cuda", "", "tpu"});
    options.backend = Pick<const char*>({nullptr, nullptr, "REFERENCE", "MARLIN", "FASTEST", ""});
    options.isa = Pick<const char*>({nullptr, nullptr, nullptr, "avx2", "amx", "x"});
    options.mode = Pick<const char*>({nullptr, nullptr, nullptr, "latency", "fast"});
    options.determinism = Pick<const char*>({nullptr, nullptr, "rank_invariant", "never"});
    options.activation_format = Pick<const char*>({nullptr, nullptr, "standard", "batched", "x"});
    options.all2all = Pick<const char*>({nullptr, "allgather_reducescatter", "nobody"});
    options.max_tokens = Size(4);
    options.plan_tokens = Size(1);
    options.tensor_parallel = Size(1);
    options.data_parallel = Size(1);
    options.sequence_parallel = Size(1);
    options.load_balancing = static_cast<int32_t>(random_() % 2);
    options.redundant_experts = Size(0);
    options.eplb_window_steps = Size(10);
    options.eplb_interval_steps = Size(10);
    options.executor.num_threads = static_cast<int32_t>(random_() % 5) - 2;
    fmoe_layer* layer = nullptr;
    const fmoe_code code =
        fmoe_layer_load(checkpoint_, random_() % 4 == 0 ? Size(number_) : number_, &options, &layer);
    EXPECT_EQ(code == FMOE_OK, layer != nullptr);
    fmoe_layer_release(layer);
  }
}

TEST_F(CApiAbuse, DrawnForwards_NeverCrash) {
  constexpr int64_t kTokens = 5;
  std::vector<double> memory[8];
  for (std::vector<double>& buffer : memory) {
    buffer.assign(static_cast<size_t>((kTokens + 1) * (info_.hidden + info_.num_experts + 1)), 0.0);
  }
  int run = 0;
  for (int round = 0; round < 3000; ++round) {
    fmoe_forward forward{};
    forward.hidden = Spoiled(memory[0].data(), FMOE_F32, kTokens, info_.hidden);
    forward.output = Spoiled(memory[1].data(), FMOE_F32, kTokens, info_.hidden);
    if (random_() % 2 == 0) {
      forward.router_logits = Spoiled(memory[2].data(), FMOE_F32, kTokens, info_.num_experts);
    }
    if (random_() % 2 == 0) {
      forward.topk_ids = Spoiled(memory[3].data(), FMOE_I32, kTokens, info_.top_k);
      forward.topk_weights = Spoiled(memory[4].data(), FMOE_F32, kTokens, info_.top_k);
    }
    if (random_() % 4 == 0) {
      forward.token_ids = Spoiled(memory[5].data(), FMOE_I64, kTokens, 1);
      forward.chosen_ids = Spoiled(memory[6].data(), FMOE_I32, kTokens, info_.top_k);
      forward.chosen_weights = Spoiled(memory[7].data(), FMOE_F32, kTokens, info_.top_k);
    }
    const auto function = random_() % 2 == 0 ? &fmoe_layer_forward : &fmoe_layer_forward_from_host;
    run += function(layer_, &forward, workspace_, nullptr) == FMOE_OK ? 1 : 0;
  }
  EXPECT_GT(run, 0) << "all were refused: nothing was tried";
}

TEST_F(CApiAbuse, DrawnExperts_NeverCrash) {
  struct Caller {
    CApiAbuse* test;
    std::array<std::vector<float>, 3> memory;
    int64_t hidden = 64, intermediate = 32;
    const char* scheme;
  };
  const auto load = [](void* self, int64_t /*expert*/, fmoe_expert* out) -> int32_t {
    auto* caller = static_cast<Caller*>(self);
    CApiAbuse& test = *caller->test;
    const auto matrix = [&](size_t part, int64_t rows, int64_t cols) {
      fmoe_matrix made{};
      made.codes = test.Spoiled(caller->memory[part].data(), FMOE_BF16, rows, cols);
      if (test.random_() % 4 == 0) {
        made.block_scale = test.Spoiled(caller->memory[part].data(), FMOE_F32, rows, cols / 32);
        made.channel_scale = test.Spoiled(caller->memory[part].data(), FMOE_F32, rows, 1);
        made.group_index = test.Spoiled(caller->memory[part].data(), FMOE_I32, cols, 1);
      }
      return made;
    };
    const bool sound = test.random_() % 4 != 0;  // every expert is asked for more than once
    *out = {matrix(0, caller->intermediate, caller->hidden), matrix(1, caller->intermediate, caller->hidden),
            matrix(2, caller->hidden, caller->intermediate)};
    if (sound) {
      const auto plain = [&](size_t part, int64_t rows, int64_t cols) {
        fmoe_matrix made{};
        made.codes.data = caller->memory[part].data();
        made.codes.dtype = FMOE_BF16;
        made.codes.rank = 2;
        made.codes.shape[0] = rows;
        made.codes.shape[1] = cols;
        return made;
      };
      *out = {plain(0, caller->intermediate, caller->hidden), plain(1, caller->intermediate, caller->hidden),
              plain(2, caller->hidden, caller->intermediate)};
    }
    return test.random_() % 40 == 0 ? 1 : 0;
  };
  int made = 0;
  for (int round = 0; round < 600; ++round) {
    Caller caller{this, {}, 64, 32, nullptr};
    for (std::vector<float>& buffer : caller.memory) {
      buffer.assign(65 * 65, 0.0F);
    }
    fmoe_layer_config config;
    fmoe_layer_config_init(&config);
    config.num_experts = random_() % 8 == 0 ? Size(2) : 2;
    config.top_k = random_() % 8 == 0 ? Size(1) : 1;
    config.hidden = random_() % 8 == 0 ? Size(64) : 64;
    config.intermediate = random_() % 8 == 0 ? Size(32) : 32;
    config.dtype =
        random_() % 8 == 0 ? static_cast<fmoe_dtype>(static_cast<int>(random_() % 40) - 8) : FMOE_BF16;
    config.scheme = Pick<const char*>(
        {nullptr, "unquantized", "unquantized", "unquantized", "fp8_w8a16", "int4_w4a16", "x"});
    config.activation = Pick<const char*>({nullptr, "silu", "relu2", "x"});
    config.routing = Pick<const char*>({nullptr, nullptr, "DeepSeekV3", "Custom", "x"});
    config.num_groups = random_() % 8 == 0 ? Size(1) : 1;
    const fmoe_expert_source source = {&caller, load, nullptr};
    fmoe_layer* layer = nullptr;
    const fmoe_code code = fmoe_layer_create(&config, &source, nullptr, &layer);
    EXPECT_EQ(code == FMOE_OK, layer != nullptr);
    made += code == FMOE_OK ? 1 : 0;
    fmoe_layer_release(layer);
  }
  EXPECT_GT(made, 0) << "all were refused: nothing was tried";
}

}  // namespace
