#include "experts/cpu/cpu_weights.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "experts/cpu/expert_packer.hpp"
#include "experts/cpu/weight_pages.hpp"

namespace fusedmoe::cpu {
namespace {

template <typename T>
Status AddRows(PreparedWeights& weights, const char* name, DType dtype, int64_t cols, int64_t row_length,
               const std::vector<ExpertExtras>& extras, std::vector<T> (ExpertExtras::*member)[3], int first,
               int count) {
  const bool any = std::any_of(extras.begin(), extras.end(), [&](const ExpertExtras& expert) {
    return std::any_of(expert.*member + first, expert.*member + first + count,
                       [](const std::vector<T>& row) { return !row.empty(); });
  });
  if (!any) {
    return Status::Ok();
  }
  const Shape shape{static_cast<int64_t>(extras.size()), count, row_length};
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(dtype, shape));
  T* out = tensor.mutable_view().as<T>();
  for (const ExpertExtras& expert : extras) {
    for (int i = first; i < first + count; ++i, out += row_length) {
      const std::vector<T>& row = (expert.*member)[i];
      for (int64_t k = 0; k < row_length; ++k) {
        // Absent ones become what changes nothing: the identity, or a factor of one.
        const T neutral = std::is_same_v<T, float> ? T{1} : static_cast<T>(k < cols ? k : -1);
        out[k] = row.empty() ? neutral : row[static_cast<size_t>(k)];
      }
    }
  }
  weights.tensors.push_back({name, std::move(tensor)});
  return Status::Ok();
}

Status AddTensorScales(PreparedWeights& weights, const std::vector<ExpertExtras>& extras) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor,
                        Tensor::Allocate(DType::kF32, Shape{static_cast<int64_t>(extras.size()), 3}));
  float* out = tensor.mutable_view().as<float>();
  for (const ExpertExtras& expert : extras) {
    out = std::copy(expert.tensor_scale, expert.tensor_scale + 3, out);
  }
  weights.tensors.push_back({"input_tensor_scale", std::move(tensor)});
  return Status::Ok();
}

/// The format of both GEMMs, or that of each.
std::string PanelNames(const CpuPlan& plan, const char* between) {
  const std::string gate_up = plan.gate_up.panel.ToString(), down = plan.down.panel.ToString();
  return gate_up == down ? gate_up : gate_up + between + down;
}

/// Tensors of prepared weights by name and number of elements, and the first that is missing or has others.
class Finder {
 public:
  explicit Finder(const PreparedWeights& weights) : weights_(weights) {}
  const Status& status() const { return status_; }

  template <typename T>
  const T* Find(std::string_view name, int64_t count) {
    const Tensor* tensor = weights_.Find(name);
    if (tensor == nullptr) {
      return nullptr;
    }
    if (tensor->view().count() != count && status_.ok()) {
      status_ = Status::BadInput(fmt::format("prepared tensor '{}' has {} elements; this plan needs {}", name,
                                             tensor->view().count(), count));
    }
    return tensor->view().as<T>();
  }
  template <typename T>
  const T* FindNeeded(std::string_view name, int64_t count) {
    const T* data = Find<T>(name, count);
    if (data == nullptr && status_.ok()) {
      status_ = Status::BadInput(fmt::format("prepared weights lack '{}'", name));
    }
    return data;
  }

 private:
  const PreparedWeights& weights_;
  Status status_ = Status::Ok();
};

/// "n16k64(F4, E4M3 per 16)/2048x768/gated": which layout, so that other weights are refused.
std::string LayoutKey(const CpuPlan& plan) {
  return fmt::format("{}/{}x{}x{}/{}", PanelNames(plan, "+"), plan.num_local_experts, plan.gate_up.cols,
                     plan.gate_up.rows, plan.gate_up.parts == 2 ? "gated" : "ungated");
}

}  // namespace

RecipeText LayoutRecipe(const CpuPlan& plan) {
  RecipeText recipe;
  const auto pad = [&](const char* what, int64_t from, int64_t to) {
    if (from != to) {
      recipe.push_back(fmt::format("pad_{}({} -> {})", what, from, to));
    }
  };
  pad("intermediate", plan.gate_up.rows, plan.gate_up.padded_rows());
  pad("hidden_k", plan.gate_up.cols, plan.gate_up.padded_cols);
  pad("intermediate_k", plan.down.cols, plan.down.padded_cols);
  if (plan.gate_up.parts == 2) {
    recipe.emplace_back("interleave_gate_up(16)");
  }
  if (plan.products) {
    recipe.emplace_back("multiply_block_scales(BF16)");
  }
  recipe.push_back("panel(" + PanelNames(plan, ", down ") + ")");
  return recipe;
}

int64_t PreparedExpertBytes(const CpuPlan& plan, bool has_bias) {
  const int64_t rows = plan.gate_up.parts * plan.gate_up.padded_rows() + plan.down.padded_rows();
  return plan.gate_up.expert_bytes() + plan.down.expert_bytes() + (rows * (has_bias ? 2 : 1) + 3) * 4;
}

Result<PreparedWeights> PrepareCpuWeights(const CpuPlan& plan, const ExpertSource& source,
                                          const Executor& executor) {
  const int64_t experts = source.num_local_experts;
  if (experts != plan.num_local_experts) {
    return Status::BadInput(
        fmt::format("the source has {} experts; the layer has {}", experts, plan.num_local_experts));
  }
  PreparedWeights weights;
  weights.layout_key = LayoutKey(plan);
  weights.recipe = LayoutRecipe(plan);
  const GemmShape* shapes[2] = {&plan.gate_up, &plan.down};
  const char* names[2][3] = {{"gate_up", "gate_up_row_scale", "gate_up_bias"},
                             {"down", "down_row_scale", "down_bias"}};
  PackTargets targets{};
  Tensor bias[2];
  for (int i = 0; i < 2; ++i) {
    const GemmShape& shape = *shapes[i];
    std::byte* data = nullptr;
    FMOE_ASSIGN_OR_RETURN(Tensor panels, AllocatePages(DType::kU8, Shape{experts, shape.expert_bytes()},
                                                       plan.weight_nodes, &data));
    targets.panels[i] = data;
    weights.tensors.push_back({names[i][0], std::move(panels)});
    const Shape row_shape{experts, shape.stripes, shape.parts, kPanelRows};
    FMOE_ASSIGN_OR_RETURN(Tensor row_scale, AllocatePages(DType::kF32, row_shape, plan.weight_nodes, &data));
    targets.row_scale[i] = reinterpret_cast<float*>(data);
    weights.tensors.push_back({names[i][1], std::move(row_scale)});
    FMOE_ASSIGN_OR_RETURN(bias[i], AllocatePages(DType::kF32, row_shape, plan.weight_nodes, &data));
    targets.bias[i] = reinterpret_cast<float*>(data);
  }
  std::vector<ExpertExtras> extras(static_cast<size_t>(experts));
  PackExperts(plan, source, executor, targets, extras);
  bool has_bias = false;
  for (size_t expert = 0; expert < extras.size(); ++expert) {
    if (!extras[expert].status.ok()) {
      return std::move(extras[expert].status).WithContext(fmt::format("expert {}", expert));
    }
    has_bias = has_bias || extras[expert].has_bias;
  }
  if (has_bias) {
    weights.tensors.push_back({names[0][2], bias[0]});
    weights.tensors.push_back({names[1][2], bias[1]});
  }
  FMOE_RETURN_IF_ERROR(AddRows(weights, "input_columns", DType::kI32, plan.gate_up.cols,
                               plan.gate_up.padded_cols, extras, &ExpertExtras::columns, 0, 2));
  FMOE_RETURN_IF_ERROR(AddRows(weights, "mid_columns", DType::kI32, plan.down.cols, plan.down.padded_cols,
                               extras, &ExpertExtras::columns, 2, 1));
  FMOE_RETURN_IF_ERROR(AddRows(weights, "input_pre_quant_scale", DType::kF32, plan.gate_up.cols,
                               plan.gate_up.cols, extras, &ExpertExtras::pre_quant_scale, 0, 2));
  FMOE_RETURN_IF_ERROR(AddRows(weights, "mid_pre_quant_scale", DType::kF32, plan.down.cols, plan.down.cols,
                               extras, &ExpertExtras::pre_quant_scale, 2, 1));
  FMOE_RETURN_IF_ERROR(AddTensorScales(weights, extras));
  return weights;
}

Result<std::vector<ExpertPanels>> ViewCpuWeights(const CpuPlan& plan, const PreparedWeights& weights) {
  if (weights.layout_key != LayoutKey(plan)) {
    return Status::Unsupported(fmt::format("the weights are in layout '{}'; this backend needs '{}'",
                                           weights.layout_key, LayoutKey(plan)));
  }
  const int64_t num = plan.num_local_experts;
  const int64_t gate_up_rows = plan.gate_up.parts * plan.gate_up.padded_rows();
  const int64_t down_rows = plan.down.padded_rows();
  Finder finder(weights);
  const auto* gate_up = finder.FindNeeded<uint8_t>("gate_up", num * plan.gate_up.expert_bytes());
  const auto* down = finder.FindNeeded<uint8_t>("down", num * plan.down.expert_bytes());
  const auto* gate_up_scale = finder.FindNeeded<float>("gate_up_row_scale", num * gate_up_rows);
  const auto* down_scale = finder.FindNeeded<float>("down_row_scale", num * down_rows);
  const auto* tensor_scale = finder.FindNeeded<float>("input_tensor_scale", num * 3);
  const auto* gate_up_bias = finder.Find<float>("gate_up_bias", num * gate_up_rows);
  const auto* down_bias = finder.Find<float>("down_bias", num * down_rows);
  const auto* input_columns = finder.Find<int32_t>("input_columns", num * 2 * plan.gate_up.padded_cols);
  const auto* mid_columns = finder.Find<int32_t>("mid_columns", num * plan.down.padded_cols);
  const auto* input_factor = finder.Find<float>("input_pre_quant_scale", num * 2 * plan.gate_up.cols);
  const auto* mid_factor = finder.Find<float>("mid_pre_quant_scale", num * plan.down.cols);
  FMOE_RETURN_IF_ERROR(finder.status());
  const auto at = [](const auto* base, int64_t offset) { return base == nullptr ? base : base + offset; };
  std::vector<ExpertPanels> experts(static_cast<size_t>(plan.num_local_experts));
  for (int64_t e = 0; e < plan.num_local_experts; ++e) {
    ExpertPanels& expert = experts[static_cast<size_t>(e)];
    expert.gate_up = {gate_up + e * plan.gate_up.expert_bytes(), gate_up_scale + e * gate_up_rows,
                      at(gate_up_bias, e * gate_up_rows)};
    expert.down = {down + e * plan.down.expert_bytes(), down_scale + e * down_rows,
                   at(down_bias, e * down_rows)};
    for (const Operand operand : {kGateInput, kUpInput}) {
      expert.input[operand] = {at(input_columns, (2 * e + operand) * plan.gate_up.padded_cols),
                               at(input_factor, (2 * e + operand) * plan.gate_up.cols),
                               tensor_scale[3 * e + operand]};
    }
    expert.input[kMid] = {at(mid_columns, e * plan.down.padded_cols), at(mid_factor, e * plan.down.cols),
                          tensor_scale[3 * e + kMid]};
  }
  return experts;
}

}  // namespace fusedmoe::cpu
