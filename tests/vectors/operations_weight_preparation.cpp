#include <cmath>

#include "numerics/row_math.hpp"
#include "vectors/quantize_support.hpp"
#include "vectors/weight_recipes.hpp"
#include "weights/steps/layout_ops.hpp"
#include "weights/steps/marlin_ops.hpp"
#include "weights/steps/output_scales.hpp"
#include "weights/steps/recipes.hpp"
#include "weights/steps/row_maps.hpp"

namespace fusedmoe::golden {
namespace {

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

Outcome MarlinScales(const GoldenCase& golden_case, const std::string& name) {
  const TensorView scale = golden_case.Input("scale");
  if (name.find("mxfp4") != std::string::npos) {
    const bool wide = golden_case.parameters().value("activation_bits", 16) == 16;
    const Result<Tensor> codes = wide ? SwapInFours(scale) : MoveExponents(scale, 6);
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
    return ComparePadding(golden_case, name);
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
    return CompareRecipe(golden_case, name);
  }
  return UnknownOperation(golden_case);
}

}  // namespace fusedmoe::golden
