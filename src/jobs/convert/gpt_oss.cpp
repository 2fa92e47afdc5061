#include "jobs/convert/gpt_oss.hpp"

#include <cstring>

#include <nlohmann/json.hpp>

#include "numerics/rows.hpp"

namespace fusedmoe::jobs {
namespace {

constexpr int64_t kBlock = 32;

// Places of the tensors in the list of specs.
enum : size_t { kGateUpBlocks, kGateUpScales, kDownBlocks, kDownScales, kGateUpBias, kDownBias };

struct Halves {
  std::byte* blocks;
  std::byte* scales;
  std::byte* bias;  // null: none
};

// Rows of a matrix go to rows first, first + step, ... of the tensors.
void PutRows(const CanonicalMatrix& matrix, int64_t first, int64_t step, DType bias_dtype, const Halves& to) {
  const int64_t code_bytes = matrix.cols / 2, scale_bytes = matrix.cols / kBlock;
  const TensorView codes = matrix.codes.view(), scales = matrix.block_scale.view();
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const int64_t at = first + row * step;
    std::memcpy(to.blocks + at * code_bytes, codes.data() + row * codes.stride_bytes(0),
                static_cast<size_t>(code_bytes));
    std::memcpy(to.scales + at * scale_bytes, scales.data() + row * scales.stride_bytes(0),
                static_cast<size_t>(scale_bytes));
    if (to.bias != nullptr && !matrix.bias.empty()) {
      EncodeRow(bias_dtype, matrix.bias.view().as<float>() + row, 1,
                to.bias + at * DTypeBits(bias_dtype) / 8);
    }
  }
}

}  // namespace

Unit GptOssUnit(const SourceLayer& layer, std::function<Result<CanonicalExpert>(int64_t expert)> expert) {
  const MoeConfig& config = layer.context->spec.config;
  const int64_t experts = config.num_experts, hidden = config.hidden, middle = config.intermediate;
  const std::string stem = ExpertStem(layer);
  Unit unit;
  unit.specs = {
      {stem + "gate_up_proj_blocks", DType::kU8, Shape{experts, 2 * middle, hidden / kBlock, kBlock / 2}},
      {stem + "gate_up_proj_scales", DType::kU8, Shape{experts, 2 * middle, hidden / kBlock}},
      {stem + "down_proj_blocks", DType::kU8, Shape{experts, hidden, middle / kBlock, kBlock / 2}},
      {stem + "down_proj_scales", DType::kU8, Shape{experts, hidden, middle / kBlock}}};
  if (layer.has_bias) {
    unit.specs.push_back({stem + "gate_up_proj_bias", layer.bias_dtype, Shape{experts, 2 * middle}});
    unit.specs.push_back({stem + "down_proj_bias", layer.bias_dtype, Shape{experts, hidden}});
  }
  unit.make = [specs = unit.specs, expert = std::move(expert), bias_dtype = layer.bias_dtype,
               experts](const Executor&) -> Result<std::vector<NamedTensor>> {
    std::vector<NamedTensor> tensors;
    for (const TensorSpec& spec : specs) {
      FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(spec.dtype, spec.shape));
      tensors.push_back({spec.name, std::move(tensor)});
    }
    const auto part = [&](size_t place, int64_t index) -> std::byte* {
      if (place >= tensors.size()) {
        return nullptr;
      }
      const MutableTensorView view = tensors[place].tensor.mutable_view();
      return view.data() + index * view.stride_bytes(0);
    };
    for (int64_t index = 0; index < experts; ++index) {
      FMOE_ASSIGN_OR_RETURN(const CanonicalExpert loaded, expert(index));
      const Halves both{part(kGateUpBlocks, index), part(kGateUpScales, index), part(kGateUpBias, index)};
      PutRows(loaded.gate, 0, 2, bias_dtype, both);
      PutRows(loaded.up, 1, 2, bias_dtype, both);
      PutRows(loaded.down, 0, 1, bias_dtype,
              {part(kDownBlocks, index), part(kDownScales, index), part(kDownBias, index)});
    }
    return tensors;
  };
  return unit;
}

std::string GptOssConfig(std::vector<std::string> unquantized) {
  for (std::string& module : unquantized) {
    module = checkpoint::InWordsOf("mxfp4", std::move(module));
  }
  return nlohmann::ordered_json{{"modules_to_not_convert", unquantized}, {"quant_method", "mxfp4"}}.dump();
}

}  // namespace fusedmoe::jobs
