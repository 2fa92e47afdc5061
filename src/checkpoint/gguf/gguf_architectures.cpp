#include "checkpoint/gguf/gguf_architectures.hpp"

#include <algorithm>
#include <iterator>

namespace fusedmoe::checkpoint {
namespace {

struct Architecture {
  std::string_view name;        ///< general.architecture
  std::string_view model_type;  ///< of the family table
};
constexpr Architecture kArchitectures[] = {
    {"llama", "mixtral"},
    {"llama4", "llama4_text"},
    {"grok", "grok"},
    {"qwen2moe", "qwen2_moe"},
    {"qwen3moe", "qwen3_moe"},
    {"qwen3vlmoe", "qwen3_vl_moe_text"},
    {"qwen3next", "qwen3_next"},
    {"qwen35moe", "qwen3_5_moe_text"},
    {"qwen4exp", "qwen4_exp_text"},
    {"phimoe", "phimoe"},
    {"jamba", "jamba"},
    {"dbrx", "dbrx"},
    {"olmoe", "olmoe"},
    {"arctic", "arctic"},
    {"deepseek", "deepseek_v2"},
    {"deepseek2", "deepseek_v2"},  // deepseek_v3 where scores are sigmoids
    {"deepseek2-ocr", "deepseek_ocr2"},
    {"deepseek32", "deepseek_v32"},
    {"deepseek4", "deepseek_v4"},
    {"glm4moe", "glm4_moe"},
    {"glm-dsa", "glm_moe_dsa"},
    {"glm5-next", "glm5_next_text"},
    {"ernie4_5-moe", "ernie4_5_moe"},
    {"nemotron_h_moe", "nemotron_h"},
    {"exaone-moe", "exaone_moe"},
    {"granitemoe", "granitemoe"},
    {"granitehybrid", "granitemoehybrid"},
    {"granite_swa", "granitemoe_swa"},
    {"bailingmoe", "bailing_moe"},
    {"bailingmoe2", "bailing_moe_v2"},
    {"bailingmoe3", "bailing_hybrid"},
    {"dots1", "dots1"},
    {"dots3note", "dots3_note_text"},
    {"afmoe", "afmoe"},
    {"hunyuan-moe", "hunyuan_v1_moe"},
    {"hy_v3", "hy_v3"},
    {"hy_v4", "hy_v4"},
    {"laguna", "laguna"},
    {"mellum", "mellum"},
    {"cohere2moe", "cohere2_moe"},
    {"gpt-oss", "gpt_oss"},
    {"lfm2moe", "lfm2_moe"},
    {"minimax-01", "minimax_text_01"},
    {"minimax-m2", "minimax_m2"},
    {"minimax-m3", "minimax_m3_vl_text"},
    {"mistral4", "mistral4"},
    {"mimo2", "mimo_v2_flash"},
    {"step35", "step3p5"},
    {"kimi-linear", "kimi_linear"},
    {"kimi-k3", "kimi_k3"},
    {"llada-moe", "llada_moe"},
    {"maple", "maple"},
    {"mistral3", "mixtral"},
    {"rnd1", "qwen3_moe"},
    {"gemma4", "gemma4"},
    {"smallthinker", "smallthinker"},
    {"grovemoe", "grove_moe"},  // refused, with a reason
};

}  // namespace

std::string_view GgufModelType(std::string_view architecture) {
  const auto* known = std::find_if(std::begin(kArchitectures), std::end(kArchitectures),
                                   [&](const Architecture& row) { return row.name == architecture; });
  return known == std::end(kArchitectures) ? std::string_view() : known->model_type;
}

std::string_view GgufArchitectureOf(const Family& family) {
  if (family.name == "deepseek_v3") {
    return "deepseek2";
  }
  if (!family.routed_by_caller.empty()) {
    return "";
  }
  for (const Architecture& row : kArchitectures) {
    // "deepseek" holds the first generation alone.
    if (row.name != "deepseek" && FindFamily(row.model_type) == &family) {
      return row.name;
    }
  }
  return "";
}

}  // namespace fusedmoe::checkpoint
