#include <cmath>

#include "core/checked_math.hpp"
#include "numerics/row_math.hpp"
#include "vectors/quantize_support.hpp"
#include "weights/steps/layout_ops.hpp"
#include "weights/steps/output_scales.hpp"
#include "weights/steps/recipes.hpp"
#include "weights/steps/row_maps.hpp"

namespace fusedmoe::golden {
namespace {

Outcome UnlessOk(const Status& status) {
  return status.ok() ? Outcome() : Outcome(status.ToString());
}

Outcome CompareGather(const GoldenCase& golden_case, const char* tensor,
                      Result<std::vector<int32_t>> gather) {
  if (!gather.ok()) {
    return gather.status().ToString();
  }
  return golden_case.CompareIntegers(tensor, {gather->begin(), gather->end()});
}

Outcome GatedShuffle(const GoldenCase& golden_case, const char* tensor, int64_t rows, int64_t tile) {
  const auto interleave = InterleavedHalves(rows);
  const auto shuffle = ShuffledRows(rows, tile);
  if (!interleave.ok() || !shuffle.ok()) {
    return "the rows cannot be shuffled: " + std::to_string(rows);
  }
  return CompareGather(golden_case, tensor, Compose(*interleave, *shuffle));
}

Outcome RowOrders(const GoldenCase& golden_case, const std::string& name) {
  const auto rows = golden_case.parameters().at("rows").get<int64_t>();
  const int64_t tile = golden_case.parameters().value("epilogue_tile", int64_t{128});
  if (name.starts_with("interleave_halves")) {
    return CompareGather(golden_case, "gather", InterleavedHalves(rows));
  }
  if (name.starts_with("gated_shuffle_rows")) {
    return GatedShuffle(golden_case, "gather", rows, tile);
  }
  if (name.starts_with("shuffle_scale_rows")) {
    return FirstOf({CompareGather(golden_case, "gather", ShuffledRows(rows, tile)),
                    GatedShuffle(golden_case, "gather_gated", rows, tile)});
  }
  if (golden_case.parameters().value("block", ShuffleBlock(tile)) != ShuffleBlock(tile)) {
    return "the block of the shuffle is " + std::to_string(ShuffleBlock(tile));
  }
  return CompareGather(golden_case, "gather", ShuffledRows(rows, tile));
}

/// Applies `steps` to each expert of [E, rows, columns], compares the concatenation, and undoes it.
Outcome RunSteps(const GoldenCase& golden_case, const char* input, const char* output,
                 const std::vector<LayoutStep>& steps) {
  TensorView all = golden_case.Input(input);
  if (all.rank() == 2) {
    all = TensorView(all.data(), all.dtype(), Shape{1, all.dim(0), all.dim(1)});
  }
  std::vector<std::byte> bytes;
  for (int64_t expert = 0; expert < all.dim(0); ++expert) {
    std::vector<Tensor> stages = {Tensor::Borrow(all[expert], nullptr)};
    for (const LayoutStep& step : steps) {
      Result<Tensor> next = ApplyStep(step, stages.back().view());
      if (!next.ok()) {
        return next.status().ToString();
      }
      stages.push_back(*std::move(next));
    }
    const TensorView done = stages.back().view();
    bytes.insert(bytes.end(), done.data(), done.data() + done.total_bytes());
    Tensor back = stages.back();
    for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
      Result<Tensor> previous = InvertStep(*step, back.view());
      if (!previous.ok()) {
        return previous.status().ToString();
      }
      back = *std::move(previous);
    }
    if (!std::equal(back.view().data(), back.view().data() + back.view().total_bytes(), all[expert].data())) {
      return std::string("the inverse does not give ") + input + " back";
    }
  }
  const TensorView expected = golden_case.Input(output);
  if (static_cast<int64_t>(bytes.size()) != expected.total_bytes()) {
    return std::string(output) + " has " + std::to_string(bytes.size()) + " bytes";
  }
  return golden_case.Compare(output, TensorView(bytes.data(), expected.dtype(), expected.shape()));
}

Outcome MmaLayout(const GoldenCase& golden_case) {
  const Result<Tensor> swizzled = SwizzleScaleMatrix(golden_case.Input("linear"), 128);
  if (!swizzled.ok()) {
    return swizzled.status().ToString();
  }
  const TensorView one(swizzled->view().data(), DType::kU8, Shape{1, swizzled->dim(0), swizzled->dim(1)});
  const Result<Tensor> mma = ScaleMmaView(one);
  return mma.ok() ? golden_case.Compare("mma", mma->view()) : Outcome(mma.status().ToString());
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

/// The power of two that keeps the block scales of all experts within Marlin's S0E5M3.
int MarlinFactorOf(const GoldenCase& golden_case, const char* tensor, DType activation) {
  const TensorView codes = golden_case.Input(tensor);
  std::vector<float> scales(static_cast<size_t>(codes.count()));
  DecodeRow(DType::kF8E4M3, codes.data(), 0, codes.count(), scales.data());
  return MarlinNvfp4Factor(RowAmax(scales.data(), codes.count()), activation);
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
  if (golden_case.parameters().value("activation_dtype", "") == "fp16") {
    problem.activation = DType::kF16;
  }
  if (format.block_scale_dtype == DType::kF8E4M3 && golden_case.Has("down_scale")) {
    problem.gate_up_factor = MarlinFactorOf(golden_case, "gate_up_scale", problem.activation);
    problem.down_factor = MarlinFactorOf(golden_case, "down_scale", problem.activation);
  }
  return problem;
}

Outcome Padding(const GoldenCase& golden_case, const std::string& name) {
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
  if (Contains(backend, "MARLIN") || Contains(backend, "marlin")) {
    return MarlinRecipe(problem);
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

Outcome Pipeline(const GoldenCase& golden_case, const std::string& name) {
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

Outcome MarlinScales(const GoldenCase& golden_case, const std::string& name) {
  const TensorView scale = golden_case.Input("scale");
  if (Contains(name, "mxfp4")) {
    const bool wide = golden_case.parameters().value("activation_bits", 16) == 16;
    const Result<Tensor> codes = wide ? SwapInFours(scale) : MarlinMxfp4ScalesFor8Bit(scale);
    return codes.ok() ? golden_case.Compare("codes", codes->view()) : Outcome(codes.status().ToString());
  }
  const DType activation =
      golden_case.parameters().at("activation_dtype") == "fp16" ? DType::kF16 : DType::kBF16;
  const std::vector<float> values = golden_case.Floats("scale");
  const float largest = RowAmax(values.data(), static_cast<int64_t>(values.size()));
  const int factor = MarlinNvfp4Factor(largest, activation);
  const Result<Tensor> codes = MarlinNvfp4Scales(scale, factor);
  if (!codes.ok()) {
    return codes.status().ToString();
  }
  return FirstOf({golden_case.CompareFloats("factor", {std::ldexp(1.0F, factor)}),
                  golden_case.Compare("codes", codes->view())});
}

Outcome MarlinTensorScales(const GoldenCase& golden_case) {
  Outcome outcome;
  for (const auto& [tensor, dtype] : {std::pair("bf16", DType::kBF16), std::pair("fp16", DType::kF16)}) {
    std::vector<float> scales = golden_case.Floats("global_scale");
    for (float& scale : scales) {
      scale = std::ldexp(scale, MarlinNvfp4TensorExponent(0, dtype));
    }
    outcome = FirstOf({outcome, golden_case.CompareFloats(tensor, scales)});
  }
  return outcome;
}

Outcome Fp8Outputs(const GoldenCase& golden_case) {
  const Result<Fp8OutputScales> scales =
      MakeFp8OutputScales(golden_case.Floats("gate_up_scale"), golden_case.Floats("input_scale").at(0),
                          golden_case.Floats("down_scale"), golden_case.Floats("mid_scale").at(0));
  if (!scales.ok()) {
    return scales.status().ToString();
  }
  return FirstOf({golden_case.CompareFloats("w2_input_scale_inv", {scales->mid_encode_multiplier}),
                  golden_case.CompareFloats("output1_scales_gate_scalar", scales->gate_output_scale),
                  golden_case.CompareFloats("output1_scales_scalar", scales->requantized_output_scale),
                  golden_case.CompareFloats("output2_scales_scalar", scales->down_output_scale)});
}

Outcome CompareTiles(const GoldenCase& golden_case, int64_t largest) {
  for (const nlohmann::json& row : golden_case.manifest().at("rows")) {
    const int64_t tile =
        TileTokens(row.at(0).get<int64_t>(), row.at(1).get<int64_t>(), row.at(2).get<int64_t>(), largest);
    if (tile != row.at(3).get<int64_t>()) {
      return "row " + row.dump() + ": the tile is " + std::to_string(tile);
    }
  }
  return std::nullopt;
}

}  // namespace

Outcome RunWeightPreparation(const GoldenCase& golden_case) {
  const std::string& name = golden_case.name();
  if (golden_case.is_table()) {
    if (name.starts_with("tile_tokens")) {
      return CompareTiles(golden_case, name.ends_with("vllm") ? kTileTokensOfVllm : kTileTokensOfFlashInfer);
    }
    return UnknownOperation(golden_case);
  }
  if (name.starts_with("shuffle_") || name.starts_with("gated_shuffle_") ||
      name.starts_with("interleave_halves")) {
    return RowOrders(golden_case, name);
  }
  if (name.starts_with("block_major_k")) {
    return RunSteps(
        golden_case, "x", "y",
        {{LayoutOp::kBlockMajorK, "x", {golden_case.parameters().value("block_k", int64_t{128})}}});
  }
  if (name.starts_with("swap_halves")) {
    return RunSteps(golden_case, "gate_up", "up_gate", {{LayoutOp::kSwapHalves, "gate_up", {}}});
  }
  if (name.starts_with("interleave_groups")) {
    return RunSteps(
        golden_case, "x", "y",
        {{LayoutOp::kInterleaveRows, "x", {golden_case.parameters().at("group").get<int64_t>()}}});
  }
  if (name.starts_with("scale_mma_layout")) {
    return MmaLayout(golden_case);
  }
  if (name.starts_with("pad_")) {
    return Padding(golden_case, name);
  }
  if (name.starts_with("marlin_nvfp4_global")) {
    return MarlinTensorScales(golden_case);
  }
  if (name.starts_with("marlin_")) {
    return MarlinScales(golden_case, name);
  }
  if (name.starts_with("fp8_tensor_output_scales")) {
    return Fp8Outputs(golden_case);
  }
  if (name.starts_with("fp8_") || name.starts_with("mxfp8_") || name.starts_with("mxfp4_") ||
      name.starts_with("nvfp4_")) {
    return Pipeline(golden_case, name);
  }
  return UnknownOperation(golden_case);
}

}  // namespace fusedmoe::golden
