#include "experts/reference/reference_experts.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>

#include "moe/activation.hpp"
#include "moe/expert_slots.hpp"
#include "moe/plain_rows.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/columns_by_group.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kFloatBytes = static_cast<int64_t>(sizeof(float));

// sums[t] = row `row` of the matrix times inputs[t], for the rows of a token block.
void RowTimesTokens(const CanonicalMatrix& matrix, int64_t row, const float* inputs, int64_t num_rows,
                    double* sums) {
  const RowDecoder decoder(matrix);
  float weights[kColumnBlock];
  std::fill(sums, sums + num_rows, 0.0);
  for (int64_t begin = 0; begin < matrix.cols; begin += kColumnBlock) {
    const int64_t count = std::min(kColumnBlock, matrix.cols - begin);
    decoder.Decode(row, begin, begin + count, weights);
    for (int64_t token = 0; token < num_rows; ++token) {
      sums[token] += DotRows(weights, inputs + token * matrix.cols + begin, count);
    }
  }
  if (!matrix.bias.empty()) {
    const double bias = matrix.bias.view().as<float>()[row];
    for (int64_t token = 0; token < num_rows; ++token) {
      sums[token] += bias;
    }
  }
}

// Groups of the columns in another order than they stand.
void FakeQuantizeInOrder(const ActivationFormat& format, std::span<const int32_t> columns, float* row) {
  constexpr size_t kMostColumns = 64;
  const auto group = std::min(static_cast<size_t>(format.group.col), kMostColumns);
  for (size_t begin = 0; begin < columns.size(); begin += group) {
    const std::span<const int32_t> own = columns.subspan(begin, std::min(group, columns.size() - begin));
    float values[kMostColumns];
    for (size_t k = 0; k < own.size(); ++k) {
      values[k] = row[own[k]];
    }
    FakeQuantizeRow(format, 1.0F, values, static_cast<int64_t>(own.size()));
    for (size_t k = 0; k < own.size(); ++k) {
      row[own[k]] = values[k];
    }
  }
}

// What stands between a plain row and the projection that reads it: smoothing, then the quantization of the
// scheme or of a8. `order`: of the columns, where they are grouped in one.
void QuantizeForProjection(const ActivationFormat& format, std::span<const int32_t> order,
                           const CanonicalMatrix& matrix, float batch_scale, float* row) {
  if (!matrix.pre_quant_scale.empty()) {
    const auto* smoothing = matrix.pre_quant_scale.view().as<float>();
    for (int64_t col = 0; col < matrix.cols; ++col) {
      row[col] *= smoothing[col];
    }
  }
  if (!order.empty()) {
    FakeQuantizeInOrder(format, order, row);
  } else if (format.quantized()) {
    const float scale = format.static_tensor_scale ? matrix.input_tensor_scale.value_or(1.0F) : batch_scale;
    FakeQuantizeRow(format, scale, row, matrix.cols);
  }
}

// Row `index` of plain or quantized rows, as floats. BatchedExperts rows count through all experts.
void LoadRow(const ExpertRows& rows, const ActivationFormat& format, int64_t index, int64_t width,
             float* out) {
  const std::byte* values = RowAt(rows.values, index);
  if (rows.quantized) {
    DequantizeRow(format, rows.tensor_scale == nullptr ? 1.0F : *rows.tensor_scale, values,
                  rows.block_scale.empty() ? nullptr : RowAt(rows.block_scale, index), width, out);
  } else {
    DecodeRow(rows.values.dtype(), values, 0, width, out);
  }
}

}  // namespace

// Rows of the batch sorted by local expert: rows[offsets[e] .. offsets[e + 1]).
struct ReferenceExperts::Slots {
  const int32_t* offsets = nullptr;
  const int32_t* rows = nullptr;
  int64_t rows_per_token = 1;  // top_k in the Standard format: row / rows_per_token is the token
  int64_t total_rows = 0;
  float input_batch_scale = 1.0F;
  float mid_batch_scale = 1.0F;

  // The scale of the batch that these rows are, over those that some local expert computes.
  template <typename Row>
  float BatchScale(const ActivationFormat& format, int64_t num_experts, int64_t width, Row row) const {
    float amax = 0.0F;
    for (int32_t index = 0; index < offsets[num_experts]; ++index) {
      amax = std::max(amax, row(rows[index], width));
    }
    return DynamicTensorScale(format, amax);
  }
};

namespace {

int64_t RowsToBook(const MoeProblem& problem) {
  return problem.config.activation_format == ActivationFormatKind::kStandard
             ? problem.config.max_tokens * problem.config.top_k()
             : problem.config.max_tokens * problem.config.num_local_experts;
}

}  // namespace

void ReferenceExperts::BookWorkspace(const MoeProblem& problem, WorkspaceBook& book,
                                     WorkspaceSlot* input_rows, WorkspaceSlot* mid_rows,
                                     WorkspaceSlot* lists) {
  const MoeConfig& config = problem.config;
  const int64_t rows = RowsToBook(problem);
  const int64_t width = std::max(2 * config.hidden, config.intermediate);
  *input_rows = book.Book("reference.block", kTokenBlock * width * kFloatBytes);
  *mid_rows = book.Book(kReferenceMidEntry, rows * config.intermediate * kFloatBytes);
  *lists = book.Book("reference.lists",
                     (rows + config.num_local_experts + 1) * static_cast<int64_t>(sizeof(int32_t)));
}

ReferenceExperts::ReferenceExperts(const MoeProblem& problem, std::shared_ptr<const PreparedWeights> weights,
                                   WorkspaceBook& book)
    : config_(problem.config), activation_format_(problem.scheme.activation), weights_(std::move(weights)) {
  if (problem.activation == ActivationMode::kWeightOnly) {
    activation_format_ = ActivationFormat{};
  } else if (problem.activation == ActivationMode::kA8) {
    activation_format_ = A8Format();
  }
  orders_.resize(weights_->canonical.size());
  for (size_t expert = 0; problem.activation == ActivationMode::kA8 && expert < orders_.size(); ++expert) {
    const CanonicalExpert& from = weights_->canonical[expert];
    // Kernels lay columns out in the order of their groups, and a8 is what they round: 64 side by side.
    const auto order_of = [](const CanonicalMatrix& matrix) {
      return matrix.group_index.empty() ? std::vector<int32_t>() : ColumnsByGroup(matrix.group_index);
    };
    orders_[expert] = {order_of(from.gate), order_of(from.up), order_of(from.down)};
  }
  traits_.activation_format = config_.activation_format;
  traits_.weight_and_reduce = config_.activation_format == ActivationFormatKind::kStandard
                                  ? WeightAndReduceKind::kContiguous
                                  : WeightAndReduceKind::kDelegate;
  // Static scales belong to each expert, and gate may have another than up: one quantized copy of the input
  // cannot serve all. Smoothing factors, likewise, act before quantization and belong to the projection.
  traits_.expects_unquantized_inputs = true;
  traits_.takes_codes = problem.scheme.activation.quantized() && activation_format_.quantized();
  for (const CanonicalExpert& expert : weights_->canonical) {
    for (const CanonicalMatrix* matrix : {&expert.gate, &expert.up}) {
      if (matrix->empty()) {
        continue;
      }
      if (activation_format_.static_tensor_scale && !traits_.input_tensor_scale) {
        traits_.input_tensor_scale = matrix->input_tensor_scale;
      }
      traits_.takes_codes = traits_.takes_codes && matrix->pre_quant_scale.empty() &&
                            (!activation_format_.static_tensor_scale ||
                             matrix->input_tensor_scale == traits_.input_tensor_scale);
    }
  }
  traits_.input_tensor_scale = traits_.takes_codes ? traits_.input_tensor_scale : std::nullopt;
  BookWorkspace(problem, book, &input_rows_, &mid_rows_, &lists_);
}

MutableTensorView ReferenceExperts::MidRows(int64_t rows, const Workspace& workspace) const {
  return {workspace.Get<std::byte>(mid_rows_), DType::kF32, {rows, config_.intermediate}};
}

void ReferenceExperts::GateUp(int64_t expert, const ExpertsInput& input, const Slots& slots,
                              const Workspace& workspace, const Executor& executor) const {
  const CanonicalExpert& weights = weights_->canonical[static_cast<size_t>(expert)];
  const ColumnOrders& orders = orders_[static_cast<size_t>(expert)];
  const bool gated = !weights.gate.empty();
  const int64_t hidden = config_.hidden;
  auto* up_rows = workspace.Get<float>(input_rows_);
  auto* gate_rows = up_rows + kTokenBlock * hidden;
  auto* mid = workspace.Get<float>(mid_rows_);
  for (int64_t begin = slots.offsets[expert]; begin < slots.offsets[expert + 1]; begin += kTokenBlock) {
    const int64_t count = std::min<int64_t>(kTokenBlock, slots.offsets[expert + 1] - begin);
    const int32_t* rows = slots.rows + begin;
    ParallelFor(executor, count, [&](int64_t index) {
      float* up_row = up_rows + index * hidden;
      LoadRow(input.rows, activation_format_, rows[index] / slots.rows_per_token, hidden, up_row);
      if (gated) {
        float* gate_row = gate_rows + index * hidden;
        std::memcpy(gate_row, up_row, static_cast<size_t>(hidden * kFloatBytes));
        if (!input.rows.quantized) {
          QuantizeForProjection(activation_format_, orders.gate, weights.gate, slots.input_batch_scale,
                                gate_row);
        }
      }
      if (!input.rows.quantized) {
        QuantizeForProjection(activation_format_, orders.up, weights.up, slots.input_batch_scale, up_row);
      }
    });
    ParallelFor(executor, config_.intermediate, [&](int64_t col) {
      double gate[kTokenBlock] = {}, up[kTokenBlock] = {};
      if (gated) {
        RowTimesTokens(weights.gate, col, gate_rows, count, gate);
      }
      RowTimesTokens(weights.up, col, up_rows, count, up);
      for (int64_t index = 0; index < count; ++index) {
        mid[rows[index] * config_.intermediate + col] =
            static_cast<float>(Activate(config_.activation, gated ? gate[index] : up[index], up[index]));
      }
    });
  }
}

void ReferenceExperts::Down(int64_t expert, const Slots& slots, MutableTensorView output,
                            const Workspace& workspace, const Executor& executor) const {
  const CanonicalMatrix& down = weights_->canonical[static_cast<size_t>(expert)].down;
  const std::vector<int32_t>& order = orders_[static_cast<size_t>(expert)].down;
  const int64_t width = config_.intermediate;
  auto* block = workspace.Get<float>(input_rows_);
  const auto* mid = workspace.Get<float>(mid_rows_);
  auto* out = output.as<float>();
  for (int64_t begin = slots.offsets[expert]; begin < slots.offsets[expert + 1]; begin += kTokenBlock) {
    const int64_t count = std::min<int64_t>(kTokenBlock, slots.offsets[expert + 1] - begin);
    const int32_t* rows = slots.rows + begin;
    ParallelFor(executor, count, [&](int64_t index) {
      float* row = block + index * width;
      std::memcpy(row, mid + rows[index] * width, static_cast<size_t>(width * kFloatBytes));
      QuantizeForProjection(activation_format_, order, down, slots.mid_batch_scale, row);
    });
    ParallelFor(executor, config_.hidden, [&](int64_t col) {
      double sums[kTokenBlock];
      RowTimesTokens(down, col, block, count, sums);
      for (int64_t index = 0; index < count; ++index) {
        out[rows[index] * config_.hidden + col] = static_cast<float>(sums[index]);
      }
    });
  }
}

Status ReferenceExperts::Apply(const ExpertsInput& input, MutableTensorView output,
                               const Workspace& workspace, const Executor& executor) const {
  const bool standard = config_.activation_format == ActivationFormatKind::kStandard;
  const int64_t num_experts = config_.num_local_experts;
  auto* offsets = workspace.Get<int32_t>(lists_);
  int32_t* rows = offsets + num_experts + 1;
  std::fill(offsets, offsets + num_experts + 1, 0);
  Slots slots{offsets, rows, 1, 0, 1.0F, 1.0F};
  if (standard) {
    const int64_t top_k = config_.top_k();
    slots.rows_per_token = top_k;
    slots.total_rows = input.num_tokens * top_k;
    std::memset(output.data(), 0, static_cast<size_t>(output.total_bytes()));
    const ExpertSlots problem{input.topk_ids, input.expert_map,    input.num_tokens,
                              top_k,          config_.num_experts, num_experts};
    FMOE_RETURN_IF_ERROR(SortSlotsByExpert(problem, offsets, rows));
  } else {
    const int64_t rows_per_expert = output.dim(1);
    slots.total_rows = num_experts * rows_per_expert;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      const int32_t count = input.expert_num_tokens[expert];
      if (count < 0 || count > rows_per_expert) {
        return Status::Usage("expert " + std::to_string(expert) + " is said to hold " +
                             std::to_string(count) + " rows of a batch of " +
                             std::to_string(rows_per_expert));
      }
      for (int32_t index = 0; index < count; ++index) {
        rows[offsets[expert] + index] = static_cast<int32_t>(expert * rows_per_expert + index);
      }
      offsets[expert + 1] = offsets[expert] + count;
    }
  }
  auto* scratch = workspace.Get<float>(input_rows_);
  if (NeedsDynamicTensorScale(activation_format_) && !input.rows.quantized) {
    slots.input_batch_scale =
        slots.BatchScale(activation_format_, num_experts, config_.hidden, [&](int64_t row, int64_t width) {
          LoadRow(input.rows, activation_format_, row / slots.rows_per_token, width, scratch);
          return RowFiniteAmax(scratch, width);
        });
  }
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    GateUp(expert, input, slots, workspace, executor);
  }
  if (NeedsDynamicTensorScale(activation_format_)) {
    const auto* mid = workspace.Get<float>(mid_rows_);
    slots.mid_batch_scale =
        slots.BatchScale(activation_format_, num_experts, config_.intermediate,
                         [&](int64_t row, int64_t width) { return RowFiniteAmax(mid + row * width, width); });
  }
  for (int64_t expert = 0; expert < num_experts; ++expert) {
    Down(expert, slots, output, workspace, executor);
  }
  return Status::Ok();
}

}  // namespace fusedmoe
