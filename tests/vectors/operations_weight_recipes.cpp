#include "vectors/weight_recipes.hpp"

#include <algorithm>

#include "core/checked_math.hpp"
#include "weights/steps/layout_ops.hpp"
#include "weights/steps/recipes.hpp"

namespace fusedmoe::golden {
namespace {

Outcome UnlessOk(const Status& status) {
  return status.ok() ? Outcome() : Outcome(status.ToString());
}

/// All experts of a case as fused tensors of their own types, and what a recipe made of them.
class Experts {
 public:
  Experts(const GoldenCase& golden_case, const WeightFormat& format) : golden_case_(golden_case) {
    Bind("gate_up", "gate_up", format.element);
    Bind("down", "down", format.element);
    Bind("gate_up_scale", "gate_up_block_scale", format.block_scale_dtype);
    Bind("down_scale", "down_block_scale", format.block_scale_dtype);
    Bind("gate_up_tensor_scale", "gate_up_tensor_scale", DType::kF32);
    Bind("down_tensor_scale", "down_tensor_scale", DType::kF32);
    Bind("input_tensor_scale", "input_tensor_scale", DType::kF32);
    Bind("mid_tensor_scale", "mid_tensor_scale", DType::kF32);
  }

  Status Apply(const LayoutRecipe& recipe) {
    LayoutGlobals globals;
    const auto largest = [&](const char* name) {
      float value = 0.0F;
      if (golden_case_.Has(name)) {
        for (const float scale : golden_case_.Floats(name)) {
          value = std::max(value, scale);
        }
      }
      return value;
    };
    globals.input_tensor_scale = largest("input_tensor_scale");
    globals.mid_tensor_scale = largest("mid_tensor_scale");
    for (ExpertTensors& expert : experts_) {
      ExpertTensors original = expert;
      FMOE_RETURN_IF_ERROR(recipe.Apply(globals, expert));
      ExpertTensors back = expert;
      FMOE_RETURN_IF_ERROR(recipe.Invert(back));
      for (const auto& [name, tensor] : original.tensors) {
        const Tensor* other = back.Find(name);
        if (other == nullptr || !(other->shape() == tensor.shape()) ||
            !std::equal(tensor.view().data(), tensor.view().data() + tensor.view().total_bytes(),
                        other->view().data())) {
          return Status::No("the recipe's inverse does not give " + name + " back");
        }
      }
    }
    return Status::Ok();
  }

  std::vector<std::byte> Bytes(std::string_view name) const {
    std::vector<std::byte> bytes;
    for (const ExpertTensors& expert : experts_) {
      if (const Tensor* tensor = expert.Find(name); tensor != nullptr) {
        bytes.insert(bytes.end(), tensor->view().data(),
                     tensor->view().data() + tensor->view().total_bytes());
      }
    }
    return bytes;
  }

  /// `expected` against the tensor `name`, where the case has it.
  Outcome Compare(const std::string& expected, std::string_view name) const {
    if (!golden_case_.Has(expected)) {
      return std::nullopt;
    }
    const TensorView wanted = golden_case_.Input(expected);
    const std::vector<std::byte> bytes = Bytes(name);
    if (static_cast<int64_t>(bytes.size()) != wanted.total_bytes()) {
      return expected + " has " + std::to_string(bytes.size()) + " bytes, not " +
             std::to_string(wanted.total_bytes());
    }
    return golden_case_.Compare(expected, TensorView(bytes.data(), wanted.dtype(), wanted.shape()));
  }

  int64_t count() const { return static_cast<int64_t>(experts_.size()); }

 private:
  void Bind(const char* golden, const char* name, DType dtype) {
    if (!golden_case_.Has(golden)) {
      return;
    }
    const TensorView all = golden_case_.Input(golden);
    experts_.resize(static_cast<size_t>(all.dim(0)));
    const int64_t bytes = all.total_bytes() / all.dim(0);
    for (int64_t expert = 0; expert < all.dim(0); ++expert) {
      const int64_t rows = all.rank() == 3 ? all.dim(1) : 1;
      const Shape shape{rows, bytes / rows * 8 / DTypeBits(dtype)};
      experts_[static_cast<size_t>(expert)].Set(
          name, Tensor::Borrow(TensorView(all.data() + expert * bytes, dtype, shape), nullptr));
    }
  }

  const GoldenCase& golden_case_;
  std::vector<ExpertTensors> experts_;
};

WeightFormat FormatOf(const std::string& name) {
  if (name.find("nvfp4") != std::string::npos) {
    return {.element = DType::kF4E2M1,
            .block = {1, 16},
            .block_scale_dtype = DType::kF8E4M3,
            .has_tensor_scale = true};
  }
  if (name.find("mxfp4") != std::string::npos) {
    return {.element = DType::kF4E2M1, .block = {1, 32}, .block_scale_dtype = DType::kF8E8M0};
  }
  if (name.find("mxfp8") != std::string::npos) {
    return {.element = DType::kF8E4M3, .block = {1, 32}, .block_scale_dtype = DType::kF8E8M0};
  }
  if (name.find("block") != std::string::npos) {
    return {.element = DType::kF8E4M3, .block = {128, 128}};
  }
  return {.element = DType::kF8E4M3, .has_tensor_scale = true};
}

LayoutProblem ProblemOf(const GoldenCase& golden_case, const WeightFormat& format) {
  const TensorView gate_up = golden_case.Input("gate_up");
  const TensorView down = golden_case.Input("down");
  LayoutProblem problem;
  problem.format = format;
  problem.hidden = down.dim(1);
  problem.intermediate = down.dim(2) * 8 / DTypeBits(format.element);
  problem.gated = gate_up.dim(1) == 2 * problem.intermediate;
  problem.has_input_scales = golden_case.Has("input_tensor_scale");
  problem.max_gate_up = true;
  return problem;
}

bool Contains(const std::string& name, const char* part) {
  return name.find(part) != std::string::npos;
}

/// The columns of gate_up_tensor_scale follow the rows in upstream's reordering; ours keeps gate first.
Outcome CompareTensorScales(const GoldenCase& golden_case, const Experts& experts, bool swapped) {
  if (!golden_case.Has("gate_up_tensor_scale_prepared")) {
    return std::nullopt;
  }
  const std::vector<std::byte> bytes = experts.Bytes("gate_up_tensor_scale");
  const auto* values = reinterpret_cast<const float*>(bytes.data());
  std::vector<float> scales(values, values + bytes.size() / sizeof(float));
  for (size_t index = 0; swapped && index + 1 < scales.size(); index += 2) {
    std::swap(scales[index], scales[index + 1]);
  }
  return golden_case.CompareFloats("gate_up_tensor_scale_prepared", scales);
}

/// 128x4-swizzled scales in the six-dimensional view, where the case has that.
Outcome CompareScales(const GoldenCase& golden_case, const Experts& experts, const std::string& expected,
                      const std::string& name, int64_t rows) {
  if (!golden_case.Has(expected) || golden_case.Input(expected).rank() != 6) {
    return experts.Compare(expected, name);
  }
  const std::vector<std::byte> bytes = experts.Bytes(name);
  const int64_t padded = RoundUp(rows, 128);
  const int64_t columns = static_cast<int64_t>(bytes.size()) / experts.count() / padded;
  const Result<Tensor> mma =
      ScaleMmaView(TensorView(bytes.data(), DType::kU8, Shape{experts.count(), padded, columns}));
  return mma.ok() ? golden_case.Compare(expected, mma->view()) : Outcome(mma.status().ToString());
}

Result<LayoutRecipe> RecipeOf(const std::string& backend, const LayoutProblem& problem) {
  if (Contains(backend, "TRTLLM") || Contains(backend, "trtllm")) {
    return FlashInferTrtllmRecipe(problem);
  }
  if (Contains(backend, "CUTEDSL")) {
    return FlashInferCuteDslRecipe(problem, Contains(backend, "BATCHED"));
  }
  if (Contains(backend, "VLLM_CUTLASS")) {
    return VllmCutlassRecipe(problem);
  }
  if (Contains(backend, "CUTLASS") || Contains(backend, "cutlass")) {
    return FlashInferCutlassRecipe(problem);
  }
  return Status::Unsupported("no recipe for backend '" + backend + "'");
}

/// The recipe of a case. Some have a gate_up and a down that do not belong to one layer: each then takes its
/// steps from a problem of its own.
Result<LayoutRecipe> RecipeOf(const GoldenCase& golden_case, const std::string& backend,
                              LayoutProblem& problem) {
  if (!golden_case.parameters().contains("gate_up_rows")) {
    return RecipeOf(backend, problem);
  }
  FMOE_ASSIGN_OR_RETURN(const LayoutRecipe for_down, RecipeOf(backend, problem));
  problem.gated = true;
  problem.intermediate = golden_case.Input("gate_up").dim(1) / 2;
  FMOE_ASSIGN_OR_RETURN(LayoutRecipe recipe, RecipeOf(backend, problem));
  std::erase_if(recipe.steps, [](const LayoutStep& step) { return step.tensor.starts_with("down"); });
  for (const LayoutStep& step : for_down.steps) {
    if (step.tensor.starts_with("down")) {
      recipe.steps.push_back(step);
    }
  }
  return recipe;
}

}  // namespace

Outcome ComparePadding(const GoldenCase& golden_case, const std::string& name) {
  const WeightFormat format = FormatOf(name);
  const LayoutProblem problem = ProblemOf(golden_case, format);
  const int64_t alignment = golden_case.parameters().value("alignment", int64_t{1});
  const int64_t intermediate =
      golden_case.parameters().value("padded_intermediate", RoundUp(problem.intermediate, alignment));
  const int64_t hidden = golden_case.parameters().value("padded_hidden", problem.hidden);
  LayoutRecipe recipe;
  recipe.Add(LayoutOp::kPadRows, "gate_up", {problem.parts(), problem.intermediate, intermediate});
  recipe.Add(LayoutOp::kPadColumns, "gate_up", {problem.hidden, hidden});
  recipe.Add(LayoutOp::kPadRows, "down", {1, problem.hidden, hidden});
  recipe.Add(LayoutOp::kPadColumns, "down", {problem.intermediate, intermediate});
  if (format.has_block_scale()) {
    const int64_t group = format.block.col;
    recipe.Add(LayoutOp::kPadRows, "gate_up_block_scale",
               {problem.parts(), problem.intermediate, intermediate});
    recipe.Add(LayoutOp::kPadColumns, "gate_up_block_scale", {problem.hidden / group, hidden / group});
    recipe.Add(LayoutOp::kPadRows, "down_block_scale", {1, problem.hidden, hidden});
    recipe.Add(LayoutOp::kPadColumns, "down_block_scale",
               {problem.intermediate / group, intermediate / group});
  }
  Experts experts(golden_case, format);
  return FirstOf({UnlessOk(experts.Apply(recipe)), experts.Compare("gate_up_padded", "gate_up"),
                  experts.Compare("down_padded", "down"),
                  experts.Compare("gate_up_scale_padded", "gate_up_block_scale"),
                  experts.Compare("down_scale_padded", "down_block_scale")});
}

Outcome CompareRecipe(const GoldenCase& golden_case, const std::string& name) {
  const WeightFormat format = FormatOf(name);
  LayoutProblem problem = ProblemOf(golden_case, format);
  const std::string backend = golden_case.parameters().value("backend", name);
  const Result<LayoutRecipe> recipe = RecipeOf(golden_case, backend, problem);
  if (!recipe.ok()) {
    return recipe.status().ToString();
  }
  const bool swapped =
      problem.gated && (Contains(backend, "FLASHINFER_TRTLLM") || Contains(backend, "FLASHINFER_CUTLASS"));
  Experts experts(golden_case, format);
  if (Outcome failed = UnlessOk(experts.Apply(*recipe)); failed) {
    return failed;
  }
  return FirstOf(
      {experts.Compare("gate_up_prepared", "gate_up"), experts.Compare("down_prepared", "down"),
       CompareScales(golden_case, experts, "gate_up_scale_prepared", "gate_up_block_scale",
                     problem.parts() * problem.intermediate),
       CompareScales(golden_case, experts, "down_scale_prepared", "down_block_scale", problem.hidden),
       CompareTensorScales(golden_case, experts, swapped),
       experts.Compare("down_tensor_scale_prepared", "down_tensor_scale"),
       experts.Compare("input_tensor_scale_prepared", "input_tensor_scale"),
       experts.Compare("mid_tensor_scale_prepared", "mid_tensor_scale"),
       experts.Compare("gate_up_alpha", "gate_up_output_scale"),
       experts.Compare("down_alpha", "down_output_scale")});
}

}  // namespace fusedmoe::golden
