// The C interface gives what the C++ one gives, bit by bit.
#include <fusedmoe/fusedmoe.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "capi/handles.hpp"
#include "capi/held_layer.hpp"
#include "capi/layer_info.hpp"
#include "quant/activation_quantizer.hpp"
#include "support/allocations.hpp"

namespace fusedmoe {
namespace {

using testing_support::MakeRandomLayer;
using testing_support::RandomLayer;
using testing_support::RandomRows;

const std::string kCheckpoint = FMOE_GOLDEN_DIR "/checkpoints/mixtral-modelopt-nvfp4";
constexpr int64_t kTokens = 5;

TEST(CApi, BatchScaleIsThatOfTheQuantizer) {
  int with = 0;
  for (const std::string& name : SchemeNames()) {
    const Scheme scheme = *ParseScheme(name);
    const bool expected = NeedsDynamicTensorScale(scheme.activation);
    EXPECT_EQ(capi::InfoOf(MoeConfig(), scheme).batch_scale, expected ? 1 : 0) << name;
    with += expected ? 1 : 0;
  }
  EXPECT_GT(with, 0);
}

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

// The width of the rows of experts, before a layer is loaded and then.
TEST(CApi, LatentExperts_AreToldOf) {
  const std::string path = std::string(FMOE_GOLDEN_DIR) + "/families/nemotron_h_latent-orig";
  fmoe_checkpoint* checkpoint = nullptr;
  ASSERT_EQ(fmoe_checkpoint_open(path.c_str(), &checkpoint), FMOE_OK) << LastText();
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  ASSERT_EQ(fmoe_checkpoint_describe(checkpoint, 1, &info), FMOE_OK) << LastText();
  EXPECT_EQ(info.hidden, 32);
  EXPECT_EQ(info.latent, 16);
  Loaded loaded;
  ASSERT_EQ(fmoe_layer_load(checkpoint, 1, nullptr, &loaded.layer), FMOE_OK) << LastText();
  fmoe_checkpoint_release(checkpoint);
  ASSERT_EQ(fmoe_layer_get_info(loaded.layer, &info), FMOE_OK) << LastText();
  EXPECT_EQ(info.latent, 16);
  const auto cpp = MoeLayer::Load(*Checkpoint::Open(path), 1);
  ASSERT_TRUE(cpp.ok()) << cpp.status().ToString();
  const Tensor hidden = RandomRows(kTokens, info.hidden, DType::kF32, 3);
  const Tensor logits = RandomRows(kTokens, info.num_experts, DType::kF32, 4);
  EXPECT_EQ(loaded.Run(hidden, logits, nullptr), RunCpp(**cpp, hidden, logits));
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

// As the types of GGUF become: F32 scales, and zero points that are no codes.
TEST(CApi, ScalesAndZeroPointsOfIntegers_MayBeF32) {
  RandomLayer random = MakeRandomLayer(SmallConfig(), "int4_w4a16:g32", 5);
  random.source.load = [load = random.source.load](int64_t index) -> Result<CanonicalExpert> {
    FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, load(index));
    for (CanonicalMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      const Shape shape = matrix->block_scale.shape();
      Tensor scales = *Tensor::Allocate(DType::kF32, shape), zeros = *Tensor::Allocate(DType::kF32, shape);
      for (int64_t i = 0; i < shape.count(); ++i) {
        scales.mutable_view().as<float>()[i] = 0.01F + 0.001F * static_cast<float>((i + index) % 7);
        zeros.mutable_view().as<float>()[i] = 6.3F + 0.1F * static_cast<float>(i % 11);
      }
      matrix->block_scale = std::move(scales);
      matrix->zero_point = std::move(zeros);
      matrix->format.block_scale_dtype = matrix->format.zero_point_dtype = DType::kF32;
    }
    return expert;
  };
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  const fmoe_layer_config config = ToC(random.config, "int4_w4a16:g32");
  Loaded loaded;
  ASSERT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_OK) << LastText();
  const auto cpp = MoeLayer::Create(random.config, random.source, RouterWeights{}, {});
  ASSERT_TRUE(cpp.ok()) << cpp.status().ToString();
  const Tensor hidden = RandomRows(kTokens, config.hidden, DType::kBF16, 6);
  const Tensor logits = RandomRows(kTokens, config.num_experts, DType::kF32, 7);
  EXPECT_EQ(loaded.Run(hidden, logits), RunCpp(**cpp, hidden, logits));
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
  {
    Loaded by_ids;  // without a callback, forwards bring ids
    EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &by_ids.layer), FMOE_OK) << LastText();
  }
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

// Left unset, they are those of the models: with 1, 0, 0 swigluoai would be silu.
TEST(CApi, ParametersOfActivations_AreTheirOwnUnlessTheyAreSet) {
  const float unset = std::numeric_limits<float>::quiet_NaN();
  struct Case {
    const char* name;
    float alpha, beta, limit;
    ActivationSpec expected;
  };
  for (const Case& c :
       {Case{"swigluoai", unset, unset, unset, {ActivationKind::kSwigluOai, 1.702F, 1.0F, 7.0F}},
        Case{"swigluoai", unset, 0.5F, 0.0F, {ActivationKind::kSwigluOai, 1.702F, 0.5F, 0.0F}},
        Case{"swiglustep", unset, unset, unset, {ActivationKind::kSwigluStep, 1.0F, 0.0F, 7.0F}},
        Case{"silu", unset, unset, 0.25F, {ActivationKind::kSilu, 1.0F, 0.0F, 0.25F}}}) {
    MoeConfig expected = SmallConfig();
    expected.activation = c.expected;
    const RandomLayer random = MakeRandomLayer(expected, "unquantized", 5);
    HeldExperts held(random);
    const fmoe_expert_source source = held.Source();
    fmoe_layer_config config = ToC(random.config, "unquantized");
    EXPECT_TRUE(std::isnan(config.alpha) && std::isnan(config.beta) && std::isnan(config.limit));
    config.activation = c.name, config.alpha = c.alpha, config.beta = c.beta, config.limit = c.limit;
    Loaded loaded;
    ASSERT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_OK) << LastText();
    EXPECT_EQ(loaded.layer->layer->config().activation, c.expected) << c.name;
    const Tensor hidden = RandomRows(kTokens, config.hidden, DType::kF32, 6);
    const Tensor logits = RandomRows(kTokens, config.num_experts, DType::kF32, 7);
    const auto cpp = MoeLayer::Create(random.config, random.source, RouterWeights{}, {});
    ASSERT_TRUE(cpp.ok()) << cpp.status().ToString();
    EXPECT_EQ(loaded.Run(hidden, logits), RunCpp(**cpp, hidden, logits)) << c.name;
  }
}

TEST(CApi, EveryFieldOfTheRouting_ReachesTheLayer) {
  MoeConfig expected = SmallConfig();
  RoutingConfig& routing = expected.routing;
  routing.method = RoutingMethod::kDeepseekV4;
  routing.norm_epsilon = 0.25F;
  routing.logit_softcap = 2.0F;
  routing.num_zero_experts = 2;
  const RandomLayer random = MakeRandomLayer(expected, "unquantized", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  fmoe_layer_config config = ToC(random.config, "unquantized");
  config.routing = "DeepseekV4";
  config.norm_epsilon = 0.25F, config.logit_softcap = 2.0F, config.num_zero_experts = 2;
  config.jitter = 0.5F, config.select_on_logits = 1;
  const Tensor hidden = RandomRows(kTokens, config.hidden, DType::kF32, 6);
  const Tensor logits = RandomRows(kTokens, config.num_experts + 2, DType::kF32, 7);
  {
    Loaded loaded;
    ASSERT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_OK) << LastText();
    const RoutingConfig& taken = loaded.layer->layer->config().routing;
    EXPECT_EQ(taken.jitter, 0.5F);
    EXPECT_TRUE(taken.select_on_logits);
    const auto cpp = MoeLayer::Create(random.config, random.source, RouterWeights{}, {});
    ASSERT_TRUE(cpp.ok()) << cpp.status().ToString();
    EXPECT_EQ(loaded.Run(hidden, logits), RunCpp(**cpp, hidden, logits));
  }
  // The table decides: token id 1 goes to the experts 4, 0, 5.
  const int32_t table[] = {0, 1, 2, 4, 0, 5};
  const int64_t ids[kTokens] = {1, 1, 0, 1, 0};
  config.token_id_to_experts =
      ToC(TensorView(reinterpret_cast<const std::byte*>(table), DType::kI32, {2, config.top_k}));
  Loaded hashed;
  ASSERT_EQ(fmoe_layer_create(&config, &source, nullptr, &hashed.layer), FMOE_OK) << LastText();
  ASSERT_EQ(fmoe_workspace_create(hashed.layer, &hashed.workspace), FMOE_OK) << LastText();
  std::vector<float> output(static_cast<size_t>(kTokens * config.hidden));
  std::vector<int32_t> chosen(static_cast<size_t>(kTokens * config.top_k));
  fmoe_forward forward{};
  forward.hidden = ToC(hidden.view());
  forward.router_logits = ToC(logits.view());
  forward.token_ids = ToC(TensorView(reinterpret_cast<const std::byte*>(ids), DType::kI64, {kTokens}));
  forward.output = ToC(TensorView(reinterpret_cast<std::byte*>(output.data()), DType::kF32, hidden.shape()));
  forward.chosen_ids =
      ToC(TensorView(reinterpret_cast<std::byte*>(chosen.data()), DType::kI32, {kTokens, config.top_k}));
  ASSERT_EQ(fmoe_layer_forward(hashed.layer, &forward, hashed.workspace, nullptr), FMOE_OK) << LastText();
  EXPECT_EQ(std::vector<int32_t>(chosen.begin(), chosen.begin() + 3), (std::vector<int32_t>{4, 0, 5}));
  EXPECT_EQ(std::vector<int32_t>(chosen.begin() + 6, chosen.begin() + 9), (std::vector<int32_t>{0, 1, 2}));
}

TEST(CApi, SimulatedRouting_DrawsExperts) {
  const RandomLayer random = MakeRandomLayer(SmallConfig(), "unquantized", 5);
  HeldExperts held(random);
  const fmoe_expert_source source = held.Source();
  fmoe_layer_config config = ToC(random.config, "unquantized");
  config.routing = "Simulated";
  const Tensor hidden = RandomRows(kTokens, config.hidden, DType::kF32, 6);
  const Tensor logits = RandomRows(kTokens, config.num_experts, DType::kF32, 7);
  std::vector<std::vector<float>> outputs;
  for (const auto& [simulation, seed] : {std::pair<const char*, uint64_t>{nullptr, 0},
                                         {"uniform_random", 0},
                                         {"normal_routing", 0},
                                         {"uniform_random", 1}}) {
    config.simulation = simulation, config.simulation_seed = seed;
    Loaded loaded;
    ASSERT_EQ(fmoe_layer_create(&config, &source, nullptr, &loaded.layer), FMOE_OK) << LastText();
    outputs.push_back(loaded.Run(hidden, logits));
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_NE(outputs[0], outputs[2]);
  EXPECT_NE(outputs[0], outputs[3]);
  config.simulation = "dice";
  fmoe_layer* refused = nullptr;
  EXPECT_EQ(fmoe_layer_create(&config, &source, nullptr, &refused), FMOE_USAGE);
  EXPECT_NE(LastText().find("uniform_random, normal_routing"), std::string::npos) << LastText();
}

TEST(CApi, PlanAsJson_SaysWhatTheLayerSays) {
  const HeldLayer layer("nvfp4_w4a16");
  const std::string json = fmoe_layer_plan_json(layer.loaded.layer);
  fmoe_layer_info info;
  fmoe_layer_info_init(&info);
  ASSERT_EQ(fmoe_layer_get_info(layer.loaded.layer, &info), FMOE_OK) << LastText();
  for (const std::string& part : {std::string("{\"backend\":\"") + info.backend + "\"",
                                  std::string("\"activation_format\":\"standard\""),
                                  "\"workspace_bytes\":" + std::to_string(info.workspace_bytes)}) {
    EXPECT_NE(json.find(part), std::string::npos) << part << " in " << json;
  }
  EXPECT_STREQ(fmoe_layer_plan_json(nullptr), "");
}

// On CPUs nothing outlives a forward in it.
TEST(CApi, WorkspaceOfTheLargestLayer_ServesTheOthers) {
  const HeldLayer small("nvfp4_w4a16"), large("unquantized");
  fmoe_layer_info infos[2];
  fmoe_layer_info_init(&infos[0]);
  fmoe_layer_info_init(&infos[1]);
  ASSERT_EQ(fmoe_layer_get_info(small.loaded.layer, &infos[0]), FMOE_OK);
  ASSERT_EQ(fmoe_layer_get_info(large.loaded.layer, &infos[1]), FMOE_OK);
  const bool first = infos[0].workspace_bytes > infos[1].workspace_bytes;
  const fmoe_workspace* shared = first ? small.loaded.workspace : large.loaded.workspace;
  const Tensor hidden = RandomRows(kTokens, small.config.hidden, DType::kF32, 6);
  const Tensor logits = RandomRows(kTokens, small.config.num_experts, DType::kF32, 7);
  for (const HeldLayer* layer : {&small, &large, &small}) {
    EXPECT_EQ(layer->loaded.RunIn(shared, hidden, logits),
              RunCpp(*layer->loaded.layer->layer, hidden, logits));
  }
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

}  // namespace
}  // namespace fusedmoe
