#include <fusedmoe/fusedmoe.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <fusedmoe/layer.hpp>

#include "capi/handles.hpp"
#include "support/count_allocations.hpp"
#include "support/random_layer.hpp"

// The C interface gives what the C++ one gives, bit by bit, and says what is wrong with what it is given.
namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::RandomLayer;
using testing_support::RandomRows;

const std::string kCheckpoint = FMOE_GOLDEN_DIR "/checkpoints/mixtral-modelopt-nvfp4";
constexpr int64_t kTokens = 5;

fmoe_tensor ToC(TensorView view) {
  fmoe_tensor tensor{};
  tensor.data = const_cast<std::byte*>(view.data());
  tensor.dtype = static_cast<fmoe_dtype>(view.dtype());
  tensor.rank = view.rank();
  for (int axis = 0; axis < view.rank(); ++axis) {
    tensor.shape[axis] = view.dim(axis);
  }
  return tensor;
}

std::string LastText() {
  return fmoe_last_error()->text;
}

/// A layer with its workspace, run once.
struct Loaded {
  fmoe_layer* layer = nullptr;
  fmoe_workspace* workspace = nullptr;
  ~Loaded() {
    fmoe_workspace_release(workspace);
    fmoe_layer_release(layer);
  }
  /// F32 output of `hidden` under `logits`, or nothing after a failure.
  std::vector<float> Run(const Tensor& hidden, const Tensor& logits,
                         const fmoe_executor* executor = nullptr) {
    if (workspace == nullptr) {
      EXPECT_EQ(fmoe_workspace_create(layer, &workspace), FMOE_OK) << LastText();
    }
    std::vector<float> output(static_cast<size_t>(hidden.view().count()));
    fmoe_forward forward{};
    forward.hidden = ToC(hidden.view());
    forward.router_logits = ToC(logits.view());
    forward.output =
        ToC(TensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, hidden.shape()));
    EXPECT_EQ(fmoe_layer_forward(layer, &forward, workspace, executor), FMOE_OK) << LastText();
    return output;
  }
};

std::vector<float> RunCpp(const MoeLayer& layer, const Tensor& hidden, const Tensor& logits) {
  std::vector<float> output(static_cast<size_t>(hidden.view().count()));
  const Workspace workspace = *layer.CreateWorkspace();
  const Status status = layer.Forward(
      hidden.view(), logits.view(),
      MutableTensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, hidden.shape()), workspace);
  EXPECT_TRUE(status.ok()) << status.ToString();
  return output;
}

MoeConfig SmallConfig() {
  MoeConfig config;
  config.num_experts = config.num_local_experts = 6;
  config.hidden = 128;
  config.intermediate = 64;
  config.routing.top_k = 3;
  return config;
}

fmoe_layer_config ToC(const MoeConfig& from, const char* scheme) {
  fmoe_layer_config config;
  fmoe_layer_config_init(&config);
  config.num_experts = from.num_experts;
  config.top_k = from.top_k();
  config.hidden = from.hidden;
  config.intermediate = from.intermediate;
  config.scheme = scheme;
  return config;
}

/// Experts as a caller of the C interface would hold them.
struct HeldExperts {
  explicit HeldExperts(const RandomLayer& random) {
    for (int64_t expert = 0; expert < random.source.num_local_experts; ++expert) {
      experts.push_back(*random.source.load(expert));
    }
  }
  static fmoe_matrix ToMatrix(const CanonicalMatrix& from) {
    fmoe_matrix matrix{};
    matrix.codes = ToC(from.codes.view());
    matrix.block_scale = ToC(from.block_scale.view());
    matrix.zero_point = ToC(from.zero_point.view());
    matrix.channel_scale = ToC(from.channel_scale.view());
    matrix.bias = ToC(from.bias.view());
    matrix.tensor_scale = from.tensor_scale ? &*from.tensor_scale : nullptr;
    matrix.input_tensor_scale = from.input_tensor_scale ? &*from.input_tensor_scale : nullptr;
    return matrix;
  }
  fmoe_expert_source Source() {
    fmoe_expert_source source{};
    source.self = this;
    source.load = [](void* self, int64_t expert, fmoe_expert* out) -> int32_t {
      auto* held = static_cast<HeldExperts*>(self);
      ++held->loads;
      if (expert == held->refused) {
        return 7;
      }
      const CanonicalExpert& from = held->experts[static_cast<size_t>(expert)];
      *out = {ToMatrix(from.gate), ToMatrix(from.up), ToMatrix(from.down)};
      if (expert == held->cut_short) {
        out->up.codes.shape[0] -= 1;
      }
      return 0;
    };
    source.unload = [](void* self, int64_t /*expert*/) { ++static_cast<HeldExperts*>(self)->unloads; };
    return source;
  }
  std::vector<CanonicalExpert> experts;
  std::atomic<int> loads{0}, unloads{0};
  int64_t refused = -1, cut_short = -1;
};

/// A loaded layer of held experts, with its workspace.
struct HeldLayer {
  explicit HeldLayer(const char* scheme)
      : random(MakeRandomLayer(SmallConfig(), scheme, 5)), held(random), config(ToC(random.config, scheme)) {
    const fmoe_expert_source source = held.Source();
    EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_OK) << LastText();
    EXPECT_EQ(fmoe_workspace_create(loaded.layer, &loaded.workspace), FMOE_OK) << LastText();
  }
  RandomLayer random;
  HeldExperts held;
  fmoe_layer_config config;
  Loaded loaded;
};

TEST(CApi, ForwardOfACheckpoint_GivesTheBitsOfTheCppLayer) {
  fmoe_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(fmoe_checkpoint_open(kCheckpoint.c_str(), &checkpoint), FMOE_OK) << LastText();
  EXPECT_STREQ(fmoe_checkpoint_family(checkpoint), "mixtral");
  EXPECT_STREQ(fmoe_checkpoint_producer(checkpoint), "modelopt");
  int64_t count = 0;
  const int64_t* layers = fmoe_checkpoint_moe_layers(checkpoint, &count);
  ASSERT_GE(count, 1);
  const int64_t number = layers[0];
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  ASSERT_EQ(fmoe_checkpoint_describe(checkpoint, number, &info), FMOE_OK) << LastText();
  EXPECT_STREQ(info.scheme, "nvfp4_w4a4");
  EXPECT_STREQ(info.backend, "");

  fmoe_thread_pool* pool = nullptr;
  ASSERT_EQ(fmoe_thread_pool_create(2, &pool), FMOE_OK) << LastText();
  const fmoe_executor executor = fmoe_thread_pool_executor(pool);
  fmoe_layer_options options;
  fmoe_layer_options_init(&options);
  options.max_tokens = 16;
  options.executor = executor;
  Loaded loaded;
  ASSERT_EQ(fmoe_layer_load(checkpoint, number, &options, &loaded.layer), FMOE_OK) << LastText();
  fmoe_checkpoint_release(checkpoint);  // the layer keeps what it needs

  ASSERT_EQ(fmoe_layer_get_info(loaded.layer, &info), FMOE_OK) << LastText();
  LayerOptions cpp_options;
  cpp_options.max_tokens = 16;
  const auto cpp = MoeLayer::Load(*Checkpoint::Open(kCheckpoint), number, cpp_options);
  ASSERT_TRUE(cpp.ok()) << cpp.status().ToString();
  EXPECT_EQ(info.backend, (*cpp)->plan().backend);
  EXPECT_EQ(info.max_tokens, 16);
  EXPECT_EQ(info.workspace_bytes, (*cpp)->plan().workspace_bytes);
  EXPECT_EQ(fmoe_layer_plan_text(loaded.layer), ToString((*cpp)->plan()));
  EXPECT_EQ(fmoe_layer_selection_text(loaded.layer), ToString((*cpp)->selection()));

  const Tensor hidden = RandomRows(kTokens, info.hidden, DType::kBF16, 3);
  const Tensor logits = RandomRows(kTokens, info.num_experts, DType::kF32, 4);
  EXPECT_EQ(loaded.Run(hidden, logits, &executor), RunCpp(**cpp, hidden, logits));
  fmoe_thread_pool_release(pool);
}

TEST(CApi, LayerOfHeldExperts_GivesTheBitsOfTheCppLayer) {
  for (const char* scheme : {"unquantized", "nvfp4_w4a16", "fp8_w8a8:block128", "int4_w4a16:g32"}) {
    SCOPED_TRACE(scheme);
    const RandomLayer random = MakeRandomLayer(SmallConfig(), scheme, 5);
    HeldExperts held(random);
    const fmoe_expert_source source = held.Source();
    fmoe_layer_options options;
    fmoe_layer_options_init(&options);
    options.max_tokens = 16;
    const fmoe_layer_config config = ToC(random.config, scheme);
    {
      Loaded loaded;
      ASSERT_EQ(fmoe_layer_create(&config, &source, &options, &loaded.layer), FMOE_OK) << LastText();
      LayerOptions cpp_options;
      cpp_options.max_tokens = 16;
      const auto cpp = MoeLayer::Create(random.config, random.source, RouterWeights{}, cpp_options);
      ASSERT_TRUE(cpp.ok()) << cpp.status().ToString();
      const Tensor hidden = RandomRows(kTokens, config.hidden, DType::kBF16, 6);
      const Tensor logits = RandomRows(kTokens, config.num_experts, DType::kF32, 7);
      EXPECT_EQ(loaded.Run(hidden, logits), RunCpp(**cpp, hidden, logits));
    }
    EXPECT_GE(held.loads, config.num_experts);
    EXPECT_EQ(held.unloads, held.loads);
  }
}

TEST(CApi, ForwardAllocatesNothing) {
  const HeldLayer layer("nvfp4_w4a16");
  const fmoe_layer_config& config = layer.config;
  const Tensor hidden = RandomRows(kTokens, config.hidden, DType::kF32, 6);
  const Tensor logits = RandomRows(kTokens, config.num_experts, DType::kF32, 7);
  std::vector<float> output(static_cast<size_t>(kTokens * config.hidden));
  fmoe_forward forward{};
  forward.hidden = ToC(hidden.view());
  forward.router_logits = ToC(logits.view());
  forward.output = ToC(TensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, hidden.shape()));
  const int64_t before = CountAllocations();
  ASSERT_EQ(fmoe_layer_forward(layer.loaded.layer, &forward, layer.loaded.workspace, nullptr), FMOE_OK)
      << LastText();
  EXPECT_EQ(CountAllocations(), before);
}

TEST(CApi, ExpertsThatDoNotFit_AreRefusedByName) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "nvfp4_w4a16", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  const fmoe_layer_config config = ToC(random.config, "nvfp4_w4a16");
  fmoe_layer* layer = nullptr;
  held.refused = 2;
  EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &layer), FMOE_BAD_INPUT);
  EXPECT_NE(LastText().find("load of expert 2 returned 7"), std::string::npos) << LastText();
  held.refused = -1;
  held.cut_short = 4;
  EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &layer), FMOE_BAD_INPUT);
  EXPECT_NE(LastText().find("expert 4"), std::string::npos) << LastText();
  EXPECT_NE(LastText().find("up"), std::string::npos) << LastText();
  EXPECT_EQ(layer, nullptr);
  fmoe_layer_config wider = config;
  wider.hidden *= 2;
  held.cut_short = -1;
  EXPECT_EQ(fmoe_layer_create(&wider, &source, nullptr, &layer), FMOE_BAD_INPUT) << LastText();
}

TEST(CApi, WrongArguments_AreRefusedByName) {
  fmoe_checkpoint* checkpoint = reinterpret_cast<fmoe_checkpoint*>(16);
  EXPECT_EQ(fmoe_checkpoint_open("/no/such/folder", &checkpoint), FMOE_BAD_INPUT);
  EXPECT_EQ(checkpoint, nullptr);
  const fmoe_error* error = fmoe_last_error();
  EXPECT_EQ(error->code, FMOE_BAD_INPUT);
  EXPECT_NE(std::string(error->file).find("/no/such/folder"), std::string::npos) << error->text;
  EXPECT_EQ(fmoe_checkpoint_open(nullptr, &checkpoint), FMOE_USAGE);
  EXPECT_STREQ(fmoe_last_error()->message, "path is null");
  EXPECT_EQ(fmoe_checkpoint_open("x", nullptr), FMOE_USAGE);

  ASSERT_EQ(fmoe_checkpoint_open(kCheckpoint.c_str(), &checkpoint), FMOE_OK) << LastText();
  int64_t count = 0;
  const int64_t number = fmoe_checkpoint_moe_layers(checkpoint, &count)[0];
  fmoe_layer* layer = nullptr;
  fmoe_layer_options options;
  const auto refused = [&](const char* part) {
    EXPECT_EQ(fmoe_layer_load(checkpoint, number, &options, &layer), FMOE_USAGE);
    EXPECT_NE(LastText().find(part), std::string::npos) << LastText();
    fmoe_layer_options_init(&options);
  };
  fmoe_layer_options_init(&options);
  struct Wrong {
    const char* fmoe_layer_options::*field;
    const char* value;
    const char* part;
  };
  for (const Wrong& wrong :
       {Wrong{&fmoe_layer_options::determinism, "always", "determinism 'always' is unknown"},
        Wrong{&fmoe_layer_options::activation, "a4", "activation 'a4' is unknown"},
        Wrong{&fmoe_layer_options::device, "tpu", "device 'tpu' is unknown, known are: cpu, cuda"},
        Wrong{&fmoe_layer_options::isa, "sse9", "isa 'sse9' is unknown, known are: avx2, "},
        Wrong{&fmoe_layer_options::mode, "fast", "mode 'fast' is unknown"},
        Wrong{&fmoe_layer_options::activation_format, "striped", "activation_format 'striped' is unknown"},
        Wrong{&fmoe_layer_options::backend, "FASTEST", "FASTEST"}}) {
    options.*wrong.field = wrong.value;
    refused(wrong.part);
  }
  options.tensor_parallel = 2;
  refused("tensor_parallel=2");
  options.tensor_parallel = options.data_parallel = int64_t{1} << 62;
  refused("data_parallel=4611686018427387904");
  options.struct_size = sizeof(options) + 8;
  refused("struct_size");
  EXPECT_EQ(fmoe_layer_load(checkpoint, 99, &options, &layer), FMOE_USAGE);
  EXPECT_NE(LastText().find("99"), std::string::npos) << LastText();
  count = 7;
  EXPECT_EQ(fmoe_checkpoint_moe_layers(nullptr, &count), nullptr);
  EXPECT_EQ(count, 0);
  fmoe_checkpoint_release(checkpoint);
  fmoe_checkpoint_release(nullptr);
}

// Logits are written for every row of the router: one row too many would end behind the workspace.
TEST(CApi, RouterThatDoesNotFit_IsRefusedByName) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "unquantized", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  const int64_t experts = random.config.num_experts, hidden = random.config.hidden;
  const auto refused = [&](fmoe_tensor fmoe_layer_config::*field, const Shape& shape, DType dtype,
                           const char* name) {
    const Tensor tensor = *Tensor::Allocate(dtype, shape);
    fmoe_layer_config config = ToC(random.config, "unquantized");
    config.*field = ToC(tensor.view());
    config.routing = config.correction_bias.data == nullptr ? nullptr : "DeepSeekV3";
    fmoe_layer* layer = nullptr;
    EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &layer), FMOE_USAGE) << name;
    EXPECT_NE(LastText().find(name), std::string::npos) << LastText();
    fmoe_layer_release(layer);
  };
  refused(&fmoe_layer_config::router_weight, {experts + 1, hidden}, DType::kF32,
          "router weight has shape [7, 128]");
  refused(&fmoe_layer_config::router_weight, {experts, hidden / 2}, DType::kF32,
          "router weight has shape [6, 64]");
  refused(&fmoe_layer_config::router_weight, {experts, hidden}, DType::kI32, "router weight is I32");
  refused(&fmoe_layer_config::router_bias, {experts - 1}, DType::kF32, "router bias is F32 [5]");
  refused(&fmoe_layer_config::correction_bias, {experts}, DType::kI32, "correction bias is I32 [6]");
}

TEST(CApi, WeightsOfTheCaller_MayHaveEveryPlainFloatType) {
  const HeldLayer one("unquantized");
  const int64_t hidden = one.random.config.hidden, top_k = one.random.config.top_k();
  Tensor rows = *Tensor::Allocate(DType::kBF16, {2, hidden});
  std::fill_n(rows.mutable_view().as<uint16_t>(), 2 * hidden, uint16_t{0x3f80});
  std::vector<int32_t> ids;
  for (int64_t slot = 0; slot < 2 * top_k; ++slot) {
    ids.push_back(static_cast<int32_t>(slot % top_k));
  }
  std::vector<float> output(static_cast<size_t>(2 * hidden)), first;
  for (const auto& [dtype, half] :
       {std::pair{DType::kF32, 0}, {DType::kBF16, 0x3f00}, {DType::kF16, 0x3800}}) {
    Tensor weights = *Tensor::Allocate(dtype, {2, top_k});
    if (dtype == DType::kF32) {
      std::fill_n(weights.mutable_view().as<float>(), 2 * top_k, 0.5F);
    } else {
      std::fill_n(weights.mutable_view().as<uint16_t>(), 2 * top_k, static_cast<uint16_t>(half));
    }
    fmoe_forward forward{};
    forward.hidden = ToC(rows.view());
    forward.topk_ids = ToC(TensorView(reinterpret_cast<std::byte*>(ids.data()), DType::kI32, {2, top_k}));
    forward.topk_weights = ToC(weights.view());
    forward.output = ToC(TensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, rows.shape()));
    ASSERT_EQ(fmoe_layer_forward(one.loaded.layer, &forward, one.loaded.workspace, nullptr), FMOE_OK)
        << LastText();
    first = first.empty() ? output : first;
    EXPECT_EQ(output, first) << DTypeName(dtype);
  }
}

TEST(CApi, RanksOnCardsThatCannotJoin_AreToldWhatIsMissing) {
  fmoe_communicator host{SingleCommunicator()};
  fmoe_communicator* cards = nullptr;
  EXPECT_EQ(fmoe_communicator_nccl(nullptr, nullptr, 1, -1, nullptr, &cards), FMOE_USAGE);
  EXPECT_STREQ(fmoe_last_error()->message, "host is null");
  EXPECT_EQ(fmoe_communicator_nccl(&host, "/no/such/libnccl.so", 1, -1, nullptr, &cards), FMOE_UNSUPPORTED);
  EXPECT_NE(LastText().find("/no/such/libnccl.so"), std::string::npos) << LastText();
  EXPECT_NE(LastText().find("2.18.0 or later"), std::string::npos) << LastText();
  EXPECT_EQ(cards, nullptr);
  EXPECT_EQ(fmoe_communicator_nccl(&host, nullptr, 0, -1, nullptr, &cards), FMOE_USAGE);
  EXPECT_EQ(fmoe_communicator_finish(&host, nullptr), FMOE_UNSUPPORTED);
  EXPECT_EQ(fmoe_communicator_finish(nullptr, nullptr), FMOE_USAGE);
}

TEST(CApi, ForwardOfTheWrongShape_IsRefusedWithBothShapes) {
  const HeldLayer layer("unquantized");
  const Loaded& loaded = layer.loaded;
  const Tensor hidden = RandomRows(kTokens, layer.config.hidden + 2, DType::kF32, 6);
  fmoe_forward forward{};
  forward.hidden = ToC(hidden.view());
  forward.output = forward.hidden;
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_USAGE);
  EXPECT_NE(LastText().find("[5, 130]"), std::string::npos) << LastText();
  forward.hidden.rank = 9;
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_USAGE);
  EXPECT_NE(LastText().find("hidden.rank is 9"), std::string::npos) << LastText();
  forward.hidden.rank = 2;
  forward.hidden.dtype = static_cast<fmoe_dtype>(77);
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_USAGE);
  EXPECT_NE(LastText().find("hidden.dtype is 77"), std::string::npos) << LastText();
}

// What a program was compiled with may lack the last fields of a struct.
TEST(CApi, StructOfAnOlderHeader_KeepsDefaultsForTheRest) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "unquantized", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  const fmoe_layer_config config = ToC(random.config, "unquantized");
  fmoe_layer_options options;
  fmoe_layer_options_init(&options);
  std::memset(reinterpret_cast<char*>(&options) + offsetof(fmoe_layer_options, max_tokens), 0x7f,
              sizeof(options) - offsetof(fmoe_layer_options, max_tokens));
  options.struct_size = offsetof(fmoe_layer_options, max_tokens);
  Loaded loaded;
  ASSERT_EQ(fmoe_layer_create(&config, &source, &options, &loaded.layer), FMOE_OK) << LastText();
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  info.struct_size = offsetof(fmoe_layer_info, workspace_bytes);
  info.workspace_bytes = -1;
  ASSERT_EQ(fmoe_layer_get_info(loaded.layer, &info), FMOE_OK) << LastText();
  EXPECT_EQ(info.max_tokens, LayerOptions().max_tokens);
  EXPECT_EQ(info.workspace_bytes, -1);
}

// Token t goes to experts t and t + 1, with weights 0.75 and 0.25.
int32_t ChooseByToken(void* self, const fmoe_tensor* hidden, const fmoe_tensor* logits, int64_t top_k,
                      int32_t /*renormalize*/, int32_t* ids, float* weights) {
  const int32_t answer = *static_cast<int32_t*>(self);
  for (int64_t token = 0; token < hidden->shape[0] && answer == 0; ++token) {
    for (int64_t slot = 0; slot < top_k; ++slot) {
      ids[token * top_k + slot] = static_cast<int32_t>((token + slot) % logits->shape[1]);
      weights[token * top_k + slot] = slot == 0 ? 0.75F : slot == 1 ? 0.25F : 0.0F;
    }
  }
  return answer;
}

TEST(CApi, RoutingOfTheCaller_ChoosesTheExperts) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "unquantized", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  fmoe_layer_config config = ToC(random.config, "unquantized");
  int32_t answer = 0;
  config.routing = "Custom";
  Loaded loaded;
  EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_USAGE) << "no callback";
  config.custom_routing = &ChooseByToken;
  config.routing_self = &answer;
  ASSERT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_OK) << LastText();
  const Tensor hidden = RandomRows(kTokens, config.hidden, DType::kF32, 6);
  const Tensor logits = RandomRows(kTokens, config.num_experts, DType::kF32, 7);
  const std::vector<float> output = loaded.Run(hidden, logits);
  std::vector<int32_t> ids(static_cast<size_t>(kTokens * config.top_k));
  std::vector<float> weights(ids.size());
  const fmoe_tensor hidden_c = ToC(hidden.view()), logits_c = ToC(logits.view());
  ChooseByToken(&answer, &hidden_c, &logits_c, config.top_k, 1, ids.data(), weights.data());
  std::vector<float> given(output.size());
  fmoe_forward forward{};
  forward.hidden = hidden_c;
  const Shape slots{kTokens, config.top_k};
  forward.topk_ids = ToC(TensorView(reinterpret_cast<std::byte*>(ids.data()), DType::kI32, slots));
  forward.topk_weights = ToC(TensorView(reinterpret_cast<std::byte*>(weights.data()), DType::kF32, slots));
  forward.output = ToC(TensorView(reinterpret_cast<std::byte*>(given.data()), DType::kF32, hidden.shape()));
  ASSERT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_OK) << LastText();
  EXPECT_EQ(output, given);

  answer = 7;
  fmoe_forward routed{};
  routed.hidden = hidden_c;
  routed.router_logits = logits_c;
  routed.output = forward.output;
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &routed, loaded.workspace, nullptr), FMOE_BAD_INPUT);
  EXPECT_NE(LastText().find("custom_routing returned 7"), std::string::npos) << LastText();
  EXPECT_EQ(fmoe_layer_forward(loaded.layer, &forward, loaded.workspace, nullptr), FMOE_OK) << LastText();
}

TEST(CApi, InitOfAnOlderHeader_WritesNoMoreThanItKnows) {
  struct {
    fmoe_layer_options options;
    char behind[64];
  } memory;
  std::memset(&memory, 0x5a, sizeof(memory));
  constexpr size_t kOlder = offsetof(fmoe_layer_options, max_tokens);
  fmoe_layer_options_init_sized(&memory.options, kOlder);
  EXPECT_EQ(memory.options.struct_size, kOlder);
  EXPECT_EQ(memory.options.shared_experts, 1);
  const auto* bytes = reinterpret_cast<const char*>(&memory);
  EXPECT_EQ(std::count(bytes + kOlder, bytes + sizeof(memory), 0x5a),
            static_cast<int64_t>(sizeof(memory) - kOlder));
}

TEST(CApi, LastError_BelongsToItsThread) {
  fmoe_checkpoint* checkpoint = nullptr;
  EXPECT_EQ(fmoe_checkpoint_open(nullptr, &checkpoint), FMOE_USAGE);
  std::thread([] {
    EXPECT_EQ(fmoe_last_error()->code, FMOE_OK);
    EXPECT_STREQ(fmoe_last_error()->text, "");
  }).join();
  EXPECT_EQ(fmoe_last_error()->code, FMOE_USAGE);
}

}  // namespace
}  // namespace fusedmoe
