#include "experts/contracts/common/weight_rows.hpp"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "numerics/rows.hpp"
#include "weights/marlin.hpp"
#include "weights/steps/marlin_ops.hpp"

namespace fusedmoe {
namespace {

/// The dtype that the codes have after the steps.
DType StoredElement(const LayoutRecipe& recipe, const std::string& name, DType element) {
  for (const LayoutStep& step : recipe.steps) {
    if (step.tensor == name && step.op == LayoutOp::kFlipSign) {
      return DTypeBits(element) == 4 ? DType::kU4 : DType::kU8;
    }
  }
  return element;
}

/// The first step of that kind on a tensor; null: there is none.
const LayoutStep* FindStep(const LayoutRecipe& recipe, const std::string& name, LayoutOp op) {
  const auto found = std::find_if(recipe.steps.begin(), recipe.steps.end(), [&](const LayoutStep& step) {
    return step.tensor == name && step.op == op;
  });
  return found == recipe.steps.end() ? nullptr : &*found;
}

bool HasStep(const LayoutRecipe& recipe, const std::string& name, LayoutOp op) {
  return FindStep(recipe, name, op) != nullptr;
}

Status WrongBytes(const std::string& name, const Tensor* tensor, int64_t required) {
  return Status::BadInput(fmt::format("the prepared tensor is {}, {} bytes an expert are required",
                                      tensor == nullptr ? "missing" : tensor->shape().ToString(), required))
      .WithTensor(name);
}

/// One expert of a stacked tensor as the matrix that the steps left.
TensorView ExpertOf(const Tensor& stacked, int64_t expert) {
  return stacked.view()[expert];
}

}  // namespace

// What the steps of a tensor make of its place, and of the numbers of its rows.
Status WeightRows::FollowSteps(const LayoutRecipe& recipe, const std::string& name, Located& located,
                               Tensor& numbers) {
  for (const LayoutStep& step : recipe.steps) {
    if (step.tensor != name) {
      continue;
    }
    switch (step.op) {
      case LayoutOp::kPadColumns:
        located.stored_columns = step.values[1];
        break;
      case LayoutOp::kBlockMajorK:
        located.place = Place::kBlockMajor;
        break;
      case LayoutOp::kSwizzleScales:
        located.place = Place::kSwizzled;
        break;
      case LayoutOp::kMarlinWeights:
        if (step.values[1] != 16) {
          return Status::Unsupported(fmt::format("{} is for {}-bit activations; rows are read for 16",
                                                 TextOf(step), step.values[1]));
        }
        located.place = Place::kMarlin;
        break;
      case LayoutOp::kMarlinNvfp4Scales: {
        FMOE_ASSIGN_OR_RETURN(numbers, SwapInFours(numbers.view()));
        break;
      }
      case LayoutOp::kMarlinScales:
        located.place = Place::kColumns;
        [[fallthrough]];
      case LayoutOp::kPadRows:
      case LayoutOp::kSwapHalves:
      case LayoutOp::kInterleaveRows:
      case LayoutOp::kShuffleRows:
      case LayoutOp::kMarlinFours: {
        FMOE_ASSIGN_OR_RETURN(numbers, ApplyStep(step, numbers.view()));
        break;
      }
      default:
        break;  // steps that leave every row where it is
    }
  }
  return Status::Ok();
}

// The row steps are run on the numbers of the rows themselves: what comes out says where each went.
Result<WeightRows::Located> WeightRows::Locate(const PreparedWeights& weights, const LayoutRecipe& recipe,
                                               const std::string& name, int64_t rows, int64_t columns) {
  const Tensor* tensor = weights.Find(name);
  if (tensor == nullptr || tensor->shape().rank() < 3) {
    return WrongBytes(name, tensor, rows * columns);
  }
  Located located;
  located.data = tensor->view().data();
  located.dtype = tensor->dtype();
  located.expert_bytes = tensor->view().total_bytes() / tensor->dim(0);
  located.stored_columns = columns;
  FMOE_ASSIGN_OR_RETURN(Tensor numbers, Tensor::Allocate(DType::kI32, Shape{rows, 1}));
  for (int64_t row = 0; row < rows; ++row) {
    numbers.mutable_view().as<int32_t>()[row] = static_cast<int32_t>(row + 1);
  }
  FMOE_RETURN_IF_ERROR(FollowSteps(recipe, name, located, numbers));
  located.stored_rows = numbers.view().count();
  located.at.assign(static_cast<size_t>(rows), 0);
  for (int64_t place = 0; place < located.stored_rows; ++place) {
    if (const int32_t number = numbers.view().as<int32_t>()[place]; number > 0) {
      located.at[static_cast<size_t>(number - 1)] = static_cast<int32_t>(place);
    }
  }
  int64_t required = located.stored_rows * PackedBytes(located.dtype, located.stored_columns);
  if (located.place == Place::kSwizzled) {
    required = BlockScaleBytes(BlockScaleLayout::k128x4, located.stored_rows, located.stored_columns);
  } else if (located.place == Place::kMarlin) {
    required = located.expert_bytes;  // words of several codes; checked against the element by the caller
  }
  if (located.expert_bytes != required) {
    return WrongBytes(name, tensor, required);
  }
  return located;
}

// Vectors and zero points are few: they are read once, by the inverse of their steps.
Status WeightRows::TakeVectors(const PreparedWeights& weights, const LayoutRecipe& recipe,
                               const std::string& name) {
  const auto restore = [&](const std::string& tensor_name, auto& out) -> Status {
    const Tensor* stacked = weights.Find(tensor_name);
    if (stacked == nullptr) {
      return Status::Ok();
    }
    for (int64_t expert = 0; expert < num_experts_; ++expert) {
      Tensor matrix = Tensor::Borrow(ExpertOf(*stacked, expert), nullptr);
      for (auto step = recipe.steps.rbegin(); step != recipe.steps.rend(); ++step) {
        if (step->tensor == tensor_name && step->op != LayoutOp::kTensorRows) {
          FMOE_ASSIGN_OR_RETURN(matrix, InvertStep(*step, matrix.view()));
        }
      }
      using Value = typename std::remove_reference_t<decltype(out)>::value_type;
      const auto* values = matrix.view().template as<Value>();
      out.insert(out.end(), values, values + matrix.view().count());
    }
    return Status::Ok();
  };
  FMOE_RETURN_IF_ERROR(restore(name + "_zero_point", zero_points_));
  FMOE_RETURN_IF_ERROR(restore(name + "_channel_scale", channel_scales_));
  if (HasStep(recipe, name + "_tensor_scale", LayoutOp::kTensorRows)) {
    FMOE_RETURN_IF_ERROR(restore(name + "_tensor_scale", channel_scales_));
  }
  if (!channel_scales_.empty() && channel_scales_.size() != static_cast<size_t>(num_experts_ * rows_)) {
    return Status::BadInput(fmt::format("{} scales of rows are prepared, {} of each expert are required",
                                        channel_scales_.size(), rows_))
        .WithTensor(name);
  }
  return restore(name + "_bias", bias_);
}

Result<WeightRows> WeightRows::Create(const PreparedWeights& weights, const LayoutRecipe& recipe,
                                      const FusedShape& shape, const char* projection) {
  const std::string name = projection;
  const bool down = name == "down";
  const WeightFormat& format = shape.format;
  const int64_t parts = shape.gated && !down ? 2 : 1;
  WeightRows reader;
  reader.rows_ = down ? shape.hidden : parts * shape.intermediate;
  reader.cols_ = down ? shape.intermediate : shape.hidden;
  FMOE_ASSIGN_OR_RETURN(reader.codes_, Locate(weights, recipe, name, reader.rows_, reader.cols_));
  reader.num_experts_ = weights.Find(name)->dim(0);
  const DType element = StoredElement(recipe, name, format.element);
  WeightFormat stored = format;
  stored.element = element;
  reader.implied_zero_ = static_cast<float>(stored.implied_zero());
  if (reader.codes_.place == Place::kMarlin) {
    const int bits = DTypeBits(element);
    if (reader.codes_.expert_bytes != reader.codes_.stored_rows * reader.codes_.stored_columns * bits / 8) {
      return WrongBytes(name, weights.Find(name),
                        reader.codes_.stored_rows * reader.codes_.stored_columns * bits / 8);
    }
    std::vector<int32_t> permutation = MarlinWeightPermutation({bits, 16});
    reader.fragment_.resize(permutation.size());
    for (size_t place = 0; place < permutation.size(); ++place) {
      reader.fragment_[static_cast<size_t>(permutation[place])] = static_cast<int32_t>(place);
    }
  }
  reader.codes_.dtype = element;
  for (uint32_t code = 0; DTypeBits(element) <= 8 && code < uint32_t{1} << DTypeBits(element); ++code) {
    reader.value_of_.push_back(DecodeCode(element, code));
  }
  if (format.has_block_scale()) {
    const std::string scale = name + "_block_scale";
    const bool repeated = HasStep(recipe, scale, LayoutOp::kRepeatRows);
    reader.block_rows_ = repeated || format.block.row < 0 ? 1 : format.block.row;
    reader.block_cols_ = format.block.col < 0 ? reader.cols_ : format.block.col;
    reader.groups_ = CeilDiv(reader.cols_, reader.block_cols_);
    // Blocks of gate end where gate ends, also when the last one is partial.
    const int64_t half = reader.rows_ / parts;
    const int64_t block_rows = format.block.row < 0 && !repeated ? 1 : CeilDiv(half, reader.block_rows_);
    if (format.block.row < 0) {
      reader.block_rows_ = half;
    }
    FMOE_ASSIGN_OR_RETURN(reader.scales_, Locate(weights, recipe, scale, parts * block_rows, reader.groups_));
    reader.scale_is_s0e5m3_ = HasStep(recipe, scale, LayoutOp::kMarlinNvfp4Scales);
    if (const LayoutStep* typed = FindStep(recipe, scale, LayoutOp::kMarlinScaleType); typed != nullptr) {
      reader.scale_factor_ = std::ldexp(1.0F, -static_cast<int>(typed->values[1]));
    }
    // From here on `at` is asked with rows, not with blocks.
    std::vector<int32_t> at(static_cast<size_t>(reader.rows_));
    for (int64_t row = 0; row < reader.rows_; ++row) {
      const int64_t block = row / half * block_rows + row % half / reader.block_rows_;
      at[static_cast<size_t>(row)] = reader.scales_.at[static_cast<size_t>(block)];
    }
    reader.scales_.at = std::move(at);
  }
  FMOE_RETURN_IF_ERROR(reader.TakeVectors(weights, recipe, name));
  if (HasStep(recipe, name, LayoutOp::kSortInputs)) {
    FMOE_RETURN_IF_ERROR(reader.TakeOrder(weights, name));
  }
  return reader;
}

Status WeightRows::TakeOrder(const PreparedWeights& weights, const std::string& name) {
  const Tensor* order = weights.Find(name + "_input_order");
  const Tensor* groups = weights.Find(name + "_group_index");
  for (const auto& [tensor, suffix] : {std::pair(order, "_input_order"), std::pair(groups, "_group_index")}) {
    if (tensor == nullptr || tensor->view().count() != num_experts_ * cols_) {
      return WrongBytes(name + suffix, tensor, cols_ * 4);
    }
  }
  stored_column_.assign(static_cast<size_t>(num_experts_ * cols_), -1);
  group_of_.assign(stored_column_.size(), 0);
  for (int64_t place = 0; place < num_experts_ * cols_; ++place) {
    const int32_t column = order->view().as<int32_t>()[place];
    const int32_t group = groups->view().as<int32_t>()[place];
    const int64_t expert = place / cols_;
    if (column < 0 || column >= cols_ || stored_column_[static_cast<size_t>(expert * cols_ + column)] >= 0 ||
        group < 0 || group >= groups_) {
      return Status::BadInput(fmt::format("expert {}: input {} in group {} at {}; each of {} inputs must be "
                                          "there once, groups are 0..{}",
                                          expert, column, group, place % cols_, cols_, groups_ - 1))
          .WithTensor(name + "_input_order");
    }
    stored_column_[static_cast<size_t>(expert * cols_ + column)] = static_cast<int32_t>(place % cols_);
    group_of_[static_cast<size_t>(expert * cols_ + column)] = group;
  }
  return Status::Ok();
}

void WeightRows::DecodeCodes(int64_t expert, int64_t row, int64_t begin, int64_t count, float* out) const {
  const std::byte* base = codes_.data + expert * codes_.expert_bytes;
  const int64_t stored = codes_.at[static_cast<size_t>(row)];
  switch (codes_.place) {
    case Place::kBlockMajor: {
      constexpr int64_t kBlock = 128;
      for (int64_t col = begin; col < begin + count;) {
        const int64_t length = std::min(kBlock - col % kBlock, begin + count - col);
        DecodeRow(codes_.dtype, base + (col / kBlock * codes_.stored_rows + stored) * kBlock, col % kBlock,
                  length, out + (col - begin));
        col += length;
      }
      return;
    }
    case Place::kMarlin: {
      const DType byte_type = DTypeBits(codes_.dtype) == 4 ? DType::kU4 : DType::kU8;
      const int64_t band = 16 * codes_.stored_rows;  // codes of 16 inputs
      const int64_t column = stored / 16 * 256 + stored % 16;
      const int32_t* order = stored_column_.empty() ? nullptr : stored_column_.data() + expert * cols_;
      for (int64_t col = begin; col < begin + count; ++col) {
        const int64_t k = order == nullptr ? col : order[col];
        const int64_t tiled = k / 16 * band + column + k % 16 * 16;
        const int64_t place = tiled - tiled % 1024 + fragment_[static_cast<size_t>(tiled % 1024)];
        out[col - begin] = value_of_[LoadCode(byte_type, base, place)];
      }
      return;
    }
    default:
      DecodeRow(codes_.dtype, base + stored * PackedBytes(codes_.dtype, codes_.stored_columns), begin, count,
                out);
  }
}

float WeightRows::ScaleAt(int64_t expert, int64_t row, int64_t group) const {
  const std::byte* base = scales_.data + expert * scales_.expert_bytes;
  const int64_t stored = scales_.at[static_cast<size_t>(row)];
  int64_t index = stored * scales_.stored_columns + group;
  if (scales_.place == Place::kSwizzled) {
    index = BlockScaleOffset(BlockScaleLayout::k128x4, stored, group, scales_.stored_columns);
  } else if (scales_.place == Place::kColumns) {
    index = group * scales_.stored_rows + stored;
  }
  if (scale_is_s0e5m3_) {
    return DecodeS0E5M3(static_cast<uint8_t>(base[index]));
  }
  float scale = 0.0F;
  DecodeRow(scales_.dtype, base, index, 1, &scale);
  return scale * scale_factor_;
}

void WeightRows::Decode(int64_t expert, int64_t row, int64_t begin, int64_t count, float* out) const {
  DecodeCodes(expert, row, begin, count, out);
  const int64_t slot = expert * rows_ + row;
  const float channel = channel_scales_.empty() ? 1.0F : channel_scales_[static_cast<size_t>(slot)];
  if (scales_.data == nullptr) {
    for (int64_t index = 0; index < count; ++index) {
      out[index] = (out[index] - implied_zero_) * channel;
    }
    return;
  }
  const int32_t* groups = group_of_.empty() ? nullptr : group_of_.data() + expert * cols_;
  for (int64_t col = begin; col < begin + count;) {
    const int64_t group = groups == nullptr ? col / block_cols_ : groups[col];
    const int64_t end = groups == nullptr ? std::min(begin + count, (group + 1) * block_cols_) : col + 1;
    const float zero = zero_points_.empty()
                           ? implied_zero_
                           : static_cast<float>(zero_points_[static_cast<size_t>(slot * groups_ + group)]);
    const float scale = ScaleAt(expert, row, group) * channel;
    for (; col < end; ++col) {
      out[col - begin] = (out[col - begin] - zero) * scale;
    }
  }
}

}  // namespace fusedmoe
