#include "conformance/expected_output.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <utility>

#include "conformance/contested_codes.hpp"
#include "conformance/rounding_errors.hpp"
#include "moe/activation.hpp"
#include "moe/backend.hpp"
#include "numerics/row_math.hpp"
#include "numerics/rows.hpp"
#include "quant/activation_quantizer.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe::conformance {
namespace {

/// A matrix as the GEMM sees it.
struct Weights {
  Weights(const CanonicalMatrix& source, std::optional<DType> held_in) : matrix(source) {
    if (matrix.empty()) {
      return;
    }
    const Tensor decoded = *DequantizeMatrix(matrix);
    const auto* first = decoded.view().as<float>();
    values.assign(first, first + matrix.rows * matrix.cols);
    if (held_in) {
      RoundRow(*held_in, values.data(), matrix.rows * matrix.cols);
    }
  }
  const float* row(int64_t index) const { return values.data() + index * matrix.cols; }
  double bias(int64_t row) const {
    return matrix.bias.empty() ? 0.0 : static_cast<double>(matrix.bias.view().as<float>()[row]);
  }

  const CanonicalMatrix& matrix;
  Row values;
};

/// Rows between the GEMMs with the error of each value, and what the second GEMM may read of them.
struct Middle {
  Row values;
  std::vector<double> deviation;
  double largest = 0, least = 0;  ///< what their largest magnitude may be
};

class Evaluation {
 public:
  Evaluation(const DrawnCase& drawn, const Batch& batch, const Plan& plan, const Executor& executor)
      : drawn_(drawn), batch_(batch), config_(drawn.config), executor_(executor), mode_(plan.activation) {
    if (mode_ != ActivationMode::kWeightOnly) {
      format_ = drawn.source.scheme.activation;
    }
    if (mode_ == ActivationMode::kA8 && plan.backend == "REFERENCE") {
      format_ = A8Format();
    }
    arithmetic_ = ArithmeticOf(drawn, plan, format_.quantized());
    if (plan.backend == "EMULATION") {  // that is what it emulates: operands and results of 16 bits
      held_in_ = config_.dtype == DType::kF16 ? DType::kF16 : DType::kBF16;
      arithmetic_ = {};  // and its sums are of fp64
    } else if (format_.quantized() &&
               (plan.intermediate_dtype == "BF16" || plan.intermediate_dtype == "F16")) {
      middle_in_ = plan.intermediate_dtype == "F16" ? DType::kF16 : DType::kBF16;
    } else if (IsOnCard(plan) && !format_.quantized() && plan.input_dtype != "F32") {
      input_in_ = plan.input_dtype == "F16" ? DType::kF16 : DType::kBF16;
    }
    for (int64_t expert = 0; expert < config_.num_experts; ++expert) {
      experts_.push_back(*drawn.source.load(expert));
    }
    ShareInputScales();
  }

  ExpectedOutput Run() {
    const auto count = static_cast<size_t>(drawn_.tokens * config_.hidden);
    output_ = {std::vector<double>(count), std::vector<double>(count), std::vector<double>(count),
               std::vector<double>(count)};
    std::vector<Middle> middles(static_cast<size_t>(drawn_.tokens * config_.top_k()));
    const float input_scale = InputScale();
    float least = 0, nominal = 0, largest = 0;
    for (size_t expert = 0; expert < experts_.size(); ++expert) {
      const Weights gate(experts_[expert].gate, held_in_), up(experts_[expert].up, held_in_);
      const auto slots = SlotsOf(expert);
      ParallelFor(executor_, static_cast<int64_t>(slots.size()), [&](int64_t index) {
        const int64_t slot = slots[static_cast<size_t>(index)];
        middles[static_cast<size_t>(slot)] = GateUp(gate, up, slot, input_scale);
      });
    }
    for (const Middle& middle : middles) {  // none of slots that the caller leaves out
      least = std::max(least, static_cast<float>(middle.least));
      nominal =
          std::max(nominal, RowFiniteAmax(middle.values.data(), static_cast<int64_t>(middle.values.size())));
      largest = std::max(largest, static_cast<float>(middle.largest));
    }
    std::vector<float> scales = {1.0F};
    if (NeedsDynamicTensorScale(format_)) {
      for (const float amax : {nominal, least, largest}) {
        scales.push_back(DynamicTensorScale(format_, amax));
      }
      scales.erase(scales.begin());
    }
    for (size_t expert = 0; expert < experts_.size(); ++expert) {
      const Weights down(experts_[expert].down, held_in_);
      if (format_.static_tensor_scale) {
        scales = {down.matrix.input_tensor_scale.value_or(1.0F)};
      }
      const auto slots = SlotsOf(expert);  // of as many tokens
      ParallelFor(executor_, static_cast<int64_t>(slots.size()), [&](int64_t index) {
        const int64_t slot = slots[static_cast<size_t>(index)];
        Down(down, slot, middles[static_cast<size_t>(slot)], scales);
      });
    }
    for (auto* roots : {&output_.deviation, &output_.contested_square}) {
      std::transform(roots->begin(), roots->end(), roots->begin(), [](double sum) { return std::sqrt(sum); });
    }
    return std::move(output_);
  }

 private:
  std::vector<int64_t> SlotsOf(size_t expert) const {
    std::vector<int64_t> slots;
    for (size_t slot = 0; slot < batch_.routing.ids.size(); ++slot) {
      if (batch_.routing.ids[slot] == static_cast<int32_t>(expert)) {
        slots.push_back(static_cast<int64_t>(slot));
      }
    }
    return slots;
  }

  /// The rules of backends that keep one stored input scale: for all experts, or for gate and up of each.
  void ShareInputScales() {
    float input = 0, middle = 0;
    for (CanonicalExpert& expert : experts_) {
      const float own = std::max(expert.gate.input_tensor_scale.value_or(0.0F),
                                 expert.up.input_tensor_scale.value_or(0.0F));
      if (mode_ == ActivationMode::kMaxGateUp) {
        expert.gate.input_tensor_scale = expert.up.input_tensor_scale = own;
      }
      input = std::max(input, own);
      middle = std::max(middle, expert.down.input_tensor_scale.value_or(0.0F));
    }
    for (CanonicalExpert& expert : experts_) {
      if (mode_ == ActivationMode::kMaxExpanded) {
        expert.gate.input_tensor_scale = expert.up.input_tensor_scale = input;
        expert.down.input_tensor_scale = middle;
      }
    }
  }

  Row InputRow(int64_t slot) const {
    Row row(static_cast<size_t>(config_.hidden));
    const int64_t token = slot / config_.top_k();
    DecodeRow(drawn_.dtype, batch_.hidden.view().data() + token * batch_.hidden.view().stride_bytes(0), 0,
              config_.hidden, row.data());
    if (config_.apply_router_weight_on_input) {
      for (float& value : row) {
        value *= batch_.routing.weights[static_cast<size_t>(slot)];
      }
    }
    return row;
  }

  /// The scale that all rows share, where it follows from them.
  float InputScale() const {
    float amax = 0;
    for (size_t slot = 0; slot < batch_.routing.ids.size(); ++slot) {
      if (batch_.routing.ids[slot] >= 0) {
        amax = std::max(amax, RowFiniteAmax(InputRow(static_cast<int64_t>(slot)).data(), config_.hidden));
      }
    }
    return NeedsDynamicTensorScale(format_) ? DynamicTensorScale(format_, amax) : 1.0F;
  }

  static void Smooth(const CanonicalMatrix& matrix, float* row) {
    for (int64_t k = 0; !matrix.pre_quant_scale.empty() && k < matrix.cols; ++k) {
      row[k] *= matrix.pre_quant_scale.view().as<float>()[k];
    }
  }

  /// Where the columns of a matrix stand while they are quantized: a8 groups them as their weights are.
  std::vector<size_t> OrderOf(const CanonicalMatrix& matrix) const {
    std::vector<size_t> order(static_cast<size_t>(matrix.cols));
    std::iota(order.begin(), order.end(), size_t{0});
    if (mode_ == ActivationMode::kA8 && format_.quantized() && !matrix.group_index.empty()) {
      const auto* groups = matrix.group_index.view().as<int32_t>();
      std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return groups[a] < groups[b]; });
    }
    return order;
  }
  template <typename Values>
  static Values Ordered(const Values& values, const std::vector<size_t>& order) {
    Values ordered(values.size());
    for (size_t k = 0; k < order.size(); ++k) {
      ordered[k] = values[order[k]];
    }
    return ordered;
  }
  template <typename Values>
  static Values Restored(const Values& ordered, const std::vector<size_t>& order) {
    Values values(ordered.size());
    for (size_t k = 0; k < order.size(); ++k) {
      values[order[k]] = ordered[k];
    }
    return values;
  }

  void Quantize(const CanonicalMatrix& matrix, float scale, Row& row) const {
    const std::vector<size_t> order = OrderOf(matrix);
    row = Ordered(row, order);
    FakeQuantizeRow(format_, scale, row.data(), static_cast<int64_t>(row.size()));
    row = Restored(row, order);
    if (held_in_) {
      RoundRow(*held_in_, row.data(), static_cast<int64_t>(row.size()));
    }
  }

  struct Sums {
    std::vector<double> values, deviation;
  };

  Sums Multiply(const Weights& weights, Row row, float batch_scale) const {
    const CanonicalMatrix& matrix = weights.matrix;
    Smooth(matrix, row.data());
    Quantize(matrix, format_.static_tensor_scale ? matrix.input_tensor_scale.value_or(1.0F) : batch_scale,
             row);
    if (input_in_) {
      RoundRow(*input_in_, row.data(), matrix.cols);
    }
    const Row deviations = Deviations(row, std::hypot(arithmetic_.sums, arithmetic_.input), arithmetic_.step,
                                      !matrix.group_index.empty());
    Sums sums{std::vector<double>(static_cast<size_t>(matrix.rows)),
              std::vector<double>(static_cast<size_t>(matrix.rows))};
    Row scratch;
    for (int64_t index = 0; index < matrix.rows; ++index) {
      const double bias = weights.bias(index);
      const double sum = DotRows(weights.row(index), row.data(), matrix.cols) + bias;
      auto held = static_cast<float>(sum);
      if (held_in_) {
        RoundRow(*held_in_, &held, 1);
      }
      const auto at = static_cast<size_t>(index);
      sums.values[at] = held_in_ ? static_cast<double>(held) : sum;
      sums.deviation[at] = std::sqrt(VarianceOfDot(weights.row(index), deviations, scratch) +
                                     Square(arithmetic_.sums) * (Square(bias) + Square(sum)));
    }
    return sums;
  }

  Middle GateUp(const Weights& gate_weights, const Weights& up_weights, int64_t slot, float scale) const {
    const Row row = InputRow(slot);
    const bool gated = !gate_weights.matrix.empty();
    const Sums up = Multiply(up_weights, row, scale);
    const Sums gate = gated ? Multiply(gate_weights, row, scale) : up;
    Middle middle{Row(up.values.size()), std::vector<double>(up.values.size()), 0, 0};
    for (size_t i = 0; i < up.values.size(); ++i) {
      const auto activate = [&](double g, double u) { return Activate(config_.activation, g, u); };
      const double g = gate.values[i], u = up.values[i], value = activate(g, u);
      // How far the ends of what gate and up may be lead away, kinks of clamps included. They read one row,
      // so that their errors may be one.
      const auto spread = [&](double by_gate, double by_up) {
        return std::max(std::abs(activate(g + by_gate, u + by_up) - value),
                        std::abs(activate(g - by_gate, u - by_up) - value)) /
               kReach;
      };
      const double by = spread(kReach * std::hypot(gate.deviation[i], arithmetic_.argument * g), 0) +
                        (gated ? spread(0, kReach * up.deviation[i]) : 0.0);
      // 1 + erf and 1 + tanh cancel in fp64, too.
      const double cancelled = 0x1p-52 * std::abs(g) * (gated ? std::abs(u) + 1 : 1);
      middle.deviation[i] = std::hypot(by, arithmetic_.middle * value, arithmetic_.least) + cancelled;
      middle.values[i] = static_cast<float>(value);
      if (held_in_) {
        RoundRow(*held_in_, &middle.values[i], 1);
      }
      middle.least = std::max(middle.least, std::abs(value) - kReach * middle.deviation[i]);
      middle.largest = std::max(middle.largest, std::abs(value) + kReach * middle.deviation[i]);
    }
    return middle;
  }

  /// What the second GEMM may read.
  ContestedRow QuantizeMiddle(const CanonicalMatrix& matrix, const Middle& middle,
                              const std::vector<float>& scales) const {
    Row values = middle.values;
    if (!format_.quantized() || held_in_) {  // not one code is contested
      Smooth(matrix, values.data());
      Quantize(matrix, scales.front(), values);
      return {values, std::vector<double>(values.size())};
    }
    Row lower = values, upper = values;
    for (size_t i = 0; i < values.size(); ++i) {
      const double value = values[i], by = kReach * middle.deviation[i];
      lower[i] = static_cast<float>(value - by);
      upper[i] = static_cast<float>(value + by);
    }
    for (Row* row : {&lower, &values, &upper}) {
      Smooth(matrix, row->data());
      if (middle_in_) {
        RoundRow(*middle_in_, row->data(), matrix.cols);
      }
    }
    const std::vector<size_t> order = OrderOf(matrix);
    ContestedRow row = QuantizeBetween(format_, scales, Ordered(lower, order), Ordered(values, order),
                                       Ordered(upper, order));
    return {Restored(row.values, order), Restored(row.by, order)};
  }

  void Down(const Weights& weights, int64_t slot, const Middle& middle, const std::vector<float>& scales) {
    const CanonicalMatrix& matrix = weights.matrix;
    const ContestedRow row = QuantizeMiddle(matrix, middle, scales);
    Row deviations = Deviations(row.values, arithmetic_.sums, arithmetic_.step, !matrix.group_index.empty());
    if (!format_.quantized()) {
      Row own(middle.deviation.begin(), middle.deviation.end());
      Smooth(matrix, own.data());
      std::transform(own.begin(), own.end(), deviations.begin(), deviations.begin(),
                     [](float a, float b) { return std::hypot(a, b); });
    }
    std::vector<size_t> contested;
    for (size_t i = 0; i < row.by.size(); ++i) {
      if (row.by[i] > 0) {
        contested.push_back(i);
      }
    }
    const double weight = config_.apply_router_weight_on_input
                              ? 1.0
                              : static_cast<double>(batch_.routing.weights[static_cast<size_t>(slot)]);
    const size_t first = static_cast<size_t>(slot / config_.top_k() * config_.hidden);
    Row scratch;
    for (int64_t index = 0; index < matrix.rows; ++index) {
      const size_t at = first + static_cast<size_t>(index);
      const double bias = weights.bias(index);
      const double sum = DotRows(weights.row(index), row.values.data(), matrix.cols) + bias;
      output_.values[at] += weight * sum;
      output_.deviation[at] +=
          Square(weight) * (VarianceOfDot(weights.row(index), deviations, scratch) +
                            (Square(arithmetic_.sums) + Square(kUlp)) * (Square(bias) + Square(sum)) +
                            Square(arithmetic_.row * sum)) +
          Square(kUlp * output_.values[at]);  // of the sum over experts
      for (const size_t i : contested) {
        const double by = std::abs(weight * static_cast<double>(weights.row(index)[i])) * row.by[i];
        output_.contested[at] += by;
        output_.contested_square[at] += Square(by);
      }
    }
  }

  const DrawnCase& drawn_;
  const Batch& batch_;
  const MoeConfig& config_;
  const Executor& executor_;
  ActivationMode mode_;
  ActivationFormat format_;
  Arithmetic arithmetic_;
  std::optional<DType> held_in_;    ///< weights, inputs of GEMMs and their results
  std::optional<DType> middle_in_;  ///< the values between the GEMMs alone
  std::optional<DType> input_in_;   ///< inputs of the first GEMM alone
  std::vector<CanonicalExpert> experts_;
  ExpectedOutput output_;
};

}  // namespace

double ExpectedOutput::Excess(const std::vector<float>& actual) const {
  // Of one value among many six deviations, of the norm over all of them four. On average one in ten
  // contested codes changes, so that the root of their squares is three deviations, where they are many.
  constexpr double kOfOne = 6, kOfAll = 4;
  const auto allowed = [&](size_t i, double deviations) {
    return deviations * deviation[i] + std::min(contested[i], deviations / 3 * contested_square[i]);
  };
  double excess = 0, difference = 0, allowed_of_all = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double away = std::abs(static_cast<double>(actual[i]) - values[i]);
    if (!(away <= 0)) {
      const double share = away / allowed(i, kOfOne);
      excess = share > excess || std::isnan(share) ? share : excess;
    }
    difference += Square(away);
    allowed_of_all += Square(allowed(i, kOfAll));
  }
  return difference > 0 ? std::max(excess, std::sqrt(difference / allowed_of_all)) : excess;
}

ExpectedOutput Evaluate(const DrawnCase& drawn, const Batch& batch, const Plan& plan,
                        const Executor& executor) {
  return Evaluation(drawn, batch, plan, executor).Run();
}

}  // namespace fusedmoe::conformance
