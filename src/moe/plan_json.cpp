#include <cmath>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <fusedmoe/plan.hpp>

#include "core/json_text.hpp"

namespace fusedmoe {
namespace {

std::string Quoted(std::string_view text) {
  std::string quoted;
  AppendJsonString(text, &quoted);
  return quoted;
}

/// One object, member by member.
class Members {
 public:
  void Text(std::string_view name, std::string_view value) { Add(name, Quoted(value)); }
  void Integer(std::string_view name, int64_t value) { Add(name, fmt::format("{}", value)); }
  void Real(std::string_view name, double value) {
    std::string text = std::isfinite(value) ? fmt::format("{}", value) : "null";
    if (text.find_first_not_of("-0123456789") == std::string::npos) {
      text += ".0";
    }
    Add(name, text);
  }
  void Add(std::string_view name, std::string_view json) {
    text_ += fmt::format("{}\"{}\":{}", text_.empty() ? "" : ",", name, json);
  }
  std::string Object() const { return fmt::format("{{{}}}", text_); }

 private:
  std::string text_;
};

}  // namespace

std::string JsonText(const Plan& plan) {
  std::vector<std::string> recipe;
  for (const std::string& step : plan.recipe) {
    recipe.push_back(Quoted(step));
  }
  Members members;
  members.Text("backend", plan.backend);
  if (!plan.isa.empty()) {
    members.Text("isa", plan.isa);
  }
  members.Text("mode", plan.mode);
  members.Text("activation_format", ActivationFormatName(plan.activation_format));
  members.Text("activation", ActivationModeName(plan.activation));
  members.Text("prepare_finalize", plan.prepare_finalize);
  members.Add("recipe", fmt::format("[{}]", fmt::join(recipe, ",")));
  if (!plan.input_dtype.empty()) {
    members.Text("input_dtype", plan.input_dtype);
  }
  members.Text("intermediate_dtype", plan.intermediate_dtype);
  members.Text("rows_dtype", plan.rows_dtype.empty() ? "F32" : plan.rows_dtype);
  members.Text("arithmetic", plan.arithmetic);
  members.Integer("tile_tokens", plan.tile_tokens);
  members.Text("costs", plan.costs);
  members.Integer("workspace_bytes", plan.workspace_bytes);
  members.Real("layout_error", plan.layout_error);
  members.Integer("weight_bytes", plan.weight_bytes);
  if (!plan.weight_nodes.empty()) {
    members.Add("weight_nodes", fmt::format("[{}]", fmt::join(plan.weight_nodes, ",")));
  }
  members.Integer("read_bytes", plan.read_bytes);
  members.Integer("flops", plan.flops);
  members.Integer("tokens", plan.tokens);
  if (plan.latent > 0) {
    members.Integer("latent", plan.latent);
    members.Integer("latent_bytes", plan.latent_bytes);
    members.Integer("latent_flops", plan.latent_flops);
  }
  if (!plan.communicator.empty()) {
    members.Text("communicator", plan.communicator);
  }
  if (plan.shared != nullptr) {
    members.Add("shared", JsonText(*plan.shared));
  }
  return members.Object();
}

}  // namespace fusedmoe
