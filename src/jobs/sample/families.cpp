#include "jobs/sample/families.hpp"

#include <vector>

#include <nlohmann/json.hpp>

namespace fusedmoe::sample {
namespace {

using Json = nlohmann::ordered_json;

// The keys of config.json that differ between families; those that all share are added by the caller.

void ConfigQwen(Json& json, const Sizes& sizes) {
  json["num_experts"] = sizes.num_experts;
  json["moe_intermediate_size"] = sizes.intermediate;
  json["intermediate_size"] = sizes.intermediate * 8;
  json["norm_topk_prob"] = true;
  json["decoder_sparse_step"] = 1;
  json["mlp_only_layers"] = Json::array();
}

void ConfigQwen2(Json& json, const Sizes& sizes) {
  ConfigQwen(json, sizes);
  json["norm_topk_prob"] = false;
  json["shared_expert_intermediate_size"] = sizes.intermediate * 4;
}

void ConfigQwen3Next(Json& json, const Sizes& sizes) {
  ConfigQwen(json, sizes);
  json["shared_expert_intermediate_size"] = sizes.intermediate;
}

void ConfigMixtral(Json& json, const Sizes& sizes) {
  json["num_local_experts"] = sizes.num_experts;
  json["intermediate_size"] = sizes.intermediate;
}

void ConfigOlmoe(Json& json, const Sizes& sizes) {
  json["num_experts"] = sizes.num_experts;
  json["intermediate_size"] = sizes.intermediate;
  json["norm_topk_prob"] = false;
}

// Groups only where they divide: a small sample keeps the family but not the eight groups of the real model.
void Groups(Json& json, const Sizes& sizes, int64_t groups, int64_t kept) {
  const bool divides = sizes.num_experts % groups == 0 && sizes.num_experts / groups >= 2 &&
                       sizes.num_experts / groups * kept >= sizes.top_k;
  json["n_group"] = divides ? groups : 1;
  json["topk_group"] = divides ? kept : 1;
}

void ConfigDeepSeek(Json& json, const Sizes& sizes) {
  json["n_routed_experts"] = sizes.num_experts;
  json["moe_intermediate_size"] = sizes.intermediate;
  json["intermediate_size"] = sizes.intermediate * 9;
  json["first_k_dense_replace"] = 0;
  json["moe_layer_freq"] = 1;
}

void ConfigDeepSeekV2(Json& json, const Sizes& sizes) {
  ConfigDeepSeek(json, sizes);
  json["n_shared_experts"] = 2;
  Groups(json, sizes, 8, 3);
  json["topk_method"] = "group_limited_greedy";
  json["scoring_func"] = "softmax";
  json["norm_topk_prob"] = false;
  json["routed_scaling_factor"] = 16.0;
}

void ConfigDeepSeekV3(Json& json, const Sizes& sizes) {
  ConfigDeepSeek(json, sizes);
  json["n_shared_experts"] = 1;
  Groups(json, sizes, 8, 4);
  json["topk_method"] = "noaux_tc";
  json["scoring_func"] = "sigmoid";
  json["norm_topk_prob"] = true;
  json["routed_scaling_factor"] = 2.5;
}

void ConfigGlm(Json& json, const Sizes& sizes) {
  json["n_routed_experts"] = sizes.num_experts;
  json["moe_intermediate_size"] = sizes.intermediate;
  json["intermediate_size"] = sizes.intermediate * 8;
  json["first_k_dense_replace"] = 0;
  json["n_shared_experts"] = 1;
  json["n_group"] = 1;
  json["topk_group"] = 1;
  json["norm_topk_prob"] = true;
  json["routed_scaling_factor"] = 1.0;
}

void ConfigLlama4(Json& json, const Sizes& sizes) {
  ConfigMixtral(json, sizes);
  json["intermediate_size_mlp"] = sizes.intermediate * 2;
  json["interleave_moe_layer_step"] = 1;
  Json layers = Json::array();
  for (int64_t layer = 0; layer < sizes.num_layers; ++layer) {
    layers.push_back(layer);
  }
  json["moe_layers"] = layers;
}

void ConfigGptOss(Json& json, const Sizes& sizes) {
  ConfigMixtral(json, sizes);
  json["swiglu_alpha"] = 1.702;
  json["swiglu_limit"] = 7.0;
}

void ConfigMiniMax(Json& json, const Sizes& sizes) {
  ConfigMixtral(json, sizes);
  json["scoring_func"] = "sigmoid";
  json["use_routing_bias"] = true;
}

void ConfigPhi(Json& json, const Sizes& sizes) {
  ConfigMixtral(json, sizes);
  json["router_jitter_noise"] = 0.01;
}

void ConfigNemotron(Json& json, const Sizes& sizes) {
  json["n_routed_experts"] = sizes.num_experts;
  json["moe_intermediate_size"] = sizes.intermediate;
  json["moe_latent_size"] = sizes.latent;
  json["intermediate_size"] = sizes.intermediate * 2;
  json["moe_shared_expert_intermediate_size"] = sizes.intermediate * 2;
  json["n_shared_experts"] = 1;
  json["layers_block_type"] = std::vector<std::string>(static_cast<size_t>(sizes.num_layers), "moe");
  json["mlp_hidden_act"] = "relu2";
  json["mlp_bias"] = false;
  json["n_group"] = 1;
  json["topk_group"] = 1;
  json["norm_topk_prob"] = true;
  json["routed_scaling_factor"] = 5.0;
}

void ConfigKimiK3(Json& json, const Sizes& sizes) {
  json["hidden_act"] = "situ";
  json["activation_situ_beta"] = 4.0;
  json["activation_situ_linear_beta"] = 25.0;
  json["num_experts"] = sizes.num_experts;
  json["moe_intermediate_size"] = sizes.intermediate;
  json["routed_expert_hidden_size"] = sizes.latent;
  json["latent_moe_use_norm"] = true;
  json["rms_norm_eps"] = 1e-5;
  json["num_shared_experts"] = 2;
  json["moe_router_activation_func"] = "sigmoid";
  json["moe_renormalize"] = true;
  json["num_expert_group"] = 1;
  json["topk_group"] = 1;
  json["routed_scaling_factor"] = 2.5;
}

template <void (*kAdd)(Json& json, const Sizes& sizes)>
std::string Text(const Sizes& sizes) {
  Json json = Json::object();
  kAdd(json, sizes);
  return json.dump();
}

}  // namespace

std::span<const FamilyRow> FamilyTable() {
  static constexpr std::string_view kBias = "gate.e_score_correction_bias";
  static constexpr FamilyRow kTable[] = {
      {.family = {"qwen3_moe", "Qwen3-30B-A3B", 2048, 768, 128, 8},
       .architecture = "Qwen3MoeForCausalLM",
       .config = Text<ConfigQwen>},
      {.family = {"qwen2_moe", "Qwen1.5-MoE-A2.7B", 2048, 1408, 60, 4},
       .architecture = "Qwen2MoeForCausalLM",
       .shared = "shared_expert",
       .shared_factor = 4,
       .shared_gate = true,
       .config = Text<ConfigQwen2>},
      {.family = {"qwen3_next", "Qwen3-Next-80B-A3B", 2048, 512, 512, 10},
       .architecture = "Qwen3NextForCausalLM",
       .shared = "shared_expert",
       .shared_factor = 1,
       .shared_gate = true,
       .config = Text<ConfigQwen3Next>},
      {.family = {"mixtral", "Mixtral-8x7B", 4096, 14336, 8, 2},
       .architecture = "MixtralForCausalLM",
       .block = "block_sparse_moe",
       .gate = "w1",
       .up = "w3",
       .down = "w2",
       .config = Text<ConfigMixtral>},
      {.family = {"deepseek_v2", "DeepSeek-V2", 5120, 1536, 160, 6},
       .architecture = "DeepseekV2ForCausalLM",
       .shared = "shared_experts",
       .shared_factor = 2,
       .config = Text<ConfigDeepSeekV2>},
      {.family = {"deepseek_v3", "DeepSeek-V3", 7168, 2048, 256, 8},
       .architecture = "DeepseekV3ForCausalLM",
       .correction_bias = kBias,
       .shared = "shared_experts",
       .shared_factor = 1,
       .config = Text<ConfigDeepSeekV3>},
      {.family = {"llama4_text", "Llama-4-Scout", 5120, 8192, 16, 1},
       .architecture = "Llama4ForCausalLM",
       .block = "feed_forward",
       .router = "router",
       .form = ExpertForm::kFusedInOut,
       .shared = "shared_expert",
       .shared_factor = 1,
       .compressed_tensors = true,
       .config = Text<ConfigLlama4>},
      {.family = {"gpt_oss", "gpt-oss-20b", 2880, 2880, 32, 4},
       .architecture = "GptOssForCausalLM",
       .router = "router",
       .router_bias = true,
       .expert_bias = true,
       .form = ExpertForm::kFusedInOut,
       .compressed_tensors = true,
       .config = Text<ConfigGptOss>},
      {.family = {"glm4_moe", "GLM-4.5", 5120, 1536, 160, 8},
       .architecture = "Glm4MoeForCausalLM",
       .correction_bias = kBias,
       .shared = "shared_experts",
       .shared_factor = 1,
       .config = Text<ConfigGlm>},
      {.family = {"olmoe", "OLMoE-1B-7B", 2048, 1024, 64, 8},
       .architecture = "OlmoeForCausalLM",
       .config = Text<ConfigOlmoe>},
      {.family = {"minimax_m2", "MiniMax-M2", 3072, 1536, 256, 8},
       .architecture = "MiniMaxM2ForCausalLM",
       .block = "block_sparse_moe",
       .correction_bias = "e_score_correction_bias",
       .gate = "w1",
       .up = "w3",
       .down = "w2",
       .config = Text<ConfigMiniMax>},
      {.family = {"granitemoe", "granite-3.1-3b-a800m", 1536, 512, 40, 8},
       .architecture = "GraniteMoeForCausalLM",
       .block = "block_sparse_moe",
       .router = "router.layer",
       .form = ExpertForm::kFusedOutIn,
       .compressed_tensors = true,
       .config = Text<ConfigMixtral>},
      {.family = {"phimoe", "Phi-3.5-MoE", 4096, 6400, 16, 2},
       .architecture = "PhiMoEForCausalLM",
       .block = "block_sparse_moe",
       .gate = "w1",
       .up = "w3",
       .down = "w2",
       .config = Text<ConfigPhi>},
      {.family = {"nemotron_h", "NVIDIA-Nemotron-3-Super-120B-A12B", 4096, 2688, 512, 22, 1024},
       .architecture = "NemotronHForCausalLM",
       .block = "mixer",
       .correction_bias = kBias,
       .gate = "",
       .shared = "shared_experts",
       .shared_factor = 2,
       .config = Text<ConfigNemotron>},
      {.family = {"kimi_k3", "Kimi-K3", 7168, 3072, 896, 16, 3584},
       .architecture = "KimiK3ForCausalLM",
       .block = "block_sparse_moe",
       .correction_bias = kBias,
       .gate = "w1",
       .up = "w3",
       .down = "w2",
       .to_latent = "routed_expert_down_proj",
       .from_latent = "routed_expert_up_proj",
       .latent_norm = "routed_expert_norm",
       .shared = "shared_experts",
       .shared_factor = 2,
       .compressed_tensors = true,
       .config = Text<ConfigKimiK3>},
  };
  return kTable;
}

const FamilyRow* FindFamily(std::string_view name) {
  // The text part of a multimodal family goes by the name of the whole.
  const std::string_view wanted = name == "llama4" ? "llama4_text" : name;
  for (const FamilyRow& row : FamilyTable()) {
    if (row.family.name == wanted) {
      return &row;
    }
  }
  return nullptr;
}

}  // namespace fusedmoe::sample

namespace fusedmoe {

std::span<const SampleFamily> SampleFamilies() {
  static const std::vector<SampleFamily> families = [] {
    std::vector<SampleFamily> list;
    for (const sample::FamilyRow& row : sample::FamilyTable()) {
      list.push_back(row.family);
    }
    return list;
  }();
  return families;
}

}  // namespace fusedmoe
