#include "jobs/lint/matrix_checks.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include <fmt/format.h>

#include "checkpoint/matrices/matrix_reader.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe::lint {
namespace {

using checkpoint::LayerContext;
using checkpoint::LinearFormat;
using checkpoint::Located;
using checkpoint::Projection;

// Shares above which a statistic is a finding. Right checkpoints stay a decade below: of the block scales of
// a matrix one is the largest, of normal weights in e4m3 one code in 10^5 is.
constexpr double kBlocksAtLimit = 0.05, kCodesAtLimit = 0.02, kSlackGroups = 0.1;
// Standard deviations by which rows must alternate before interleaving is suspected, and by how much at all.
constexpr double kPatternDeviations = 12, kPatternShare = 0.1;

// The values of a scale tensor that no reader accepts. True when there is one.
bool LintScales(const LayerContext& context, const LinearFormat& format, const Located& located,
                Findings& findings) {
  bool found = false;
  for (const std::string_view suffix : {format.scale, format.second_scale, format.input_scale}) {
    const std::string name = located.place.base + std::string(suffix);
    const TensorInfo* info = suffix.empty() ? nullptr : context.store->Find(name);
    if (info == nullptr || info->shape.count() == 0) {
      continue;
    }
    auto tensor = context.store->Load(name);
    if (!tensor.ok()) {
      continue;  // reported when the matrix is read
    }
    const TensorView view = tensor->view();
    const bool e8m0 = suffix == format.scale && format.weight.block_scale_dtype == DType::kF8E8M0;
    const bool level_above = suffix != format.scale || format.weight.has_tensor_scale;
    const bool may_be_negative = format.negative_scales && suffix == format.scale;
    const bool may_be_zero = !level_above || (suffix == format.scale && format.weight.has_block_scale());
    std::vector<float> values(static_cast<size_t>(view.count()));
    DecodeRow(e8m0 ? DType::kF8E8M0 : view.dtype(), view.data(), 0, view.count(), values.data());
    const auto bad = std::find_if(values.begin(), values.end(), [&](float value) {
      return !std::isfinite(value) || (value == 0 && !may_be_zero) ||
             (std::signbit(value) && !may_be_negative);
    });
    if (bad != values.end()) {
      found = true;
      findings.Add(LintCode::kScaleInvalid, name,
                   fmt::format("element {} is {}; finite{} is required", bad - values.begin(), *bad,
                               may_be_negative ? (may_be_zero ? "" : " and not zero")
                               : may_be_zero   ? " and not negative"
                                               : " and positive"));
    }
  }
  return found;
}

void LintNumbers(const MatrixNote& note, Findings& findings) {
  const MatrixStatistics& numbers = note.statistics;
  const auto share = [](int64_t part, int64_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  if (numbers.not_finite > 0) {
    findings.Add(LintCode::kWeightNotFinite, note.base,
                 fmt::format("{} weights are not finite", numbers.not_finite));
  }
  if (numbers.nonzero == 0 && numbers.not_finite == 0) {
    findings.Add(LintCode::kWeightsZero, note.base, "every weight decodes to zero");
  }
  if (const double part = share(numbers.blocks_at_limit, numbers.blocks);
      part > kBlocksAtLimit && numbers.blocks_at_limit > 1) {
    findings.Add(LintCode::kBlocksSaturated, note.base,
                 fmt::format("{} of {} block scales are 448", numbers.blocks_at_limit, numbers.blocks));
  }
  if (const double part = share(numbers.codes_at_limit, numbers.codes); part > kCodesAtLimit) {
    findings.Add(
        LintCode::kCodesSaturated, note.base,
        fmt::format("{} of {} codes are the largest of their type", numbers.codes_at_limit, numbers.codes));
  }
  if (const double part = share(numbers.slack_groups, numbers.groups); part > kSlackGroups) {
    findings.Add(LintCode::kCodeOrder, note.base,
                 fmt::format("{} of {} groups use less than half of the range of their codes",
                             numbers.slack_groups, numbers.groups));
  }
}

void LintMatrix(const LayerContext& context, int64_t expert, Projection projection, MatrixNote& note,
                Findings& findings) {
  const Located located = Locate(context, expert, projection);
  note.base = located.place.base;
  const auto format = RoutedFormat(context, located);
  if (!format.ok()) {
    findings.AddRefusal(LintCode::kTensorRefused, note.base, format.status());
    return;
  }
  const bool scales_are_bad = located.place.item < 0 && LintScales(context, *format, located, findings);
  const auto matrix = ReadMatrix(*context.store, *format, located.place, located.rows, located.cols);
  if (!matrix.ok()) {
    const bool input_missing = !format->input_scale.empty() && format->activation.static_tensor_scale &&
                               matrix.status().tensor().ends_with(format->input_scale.substr(1)) &&
                               !context.store->Has(matrix.status().tensor());
    if (!scales_are_bad) {
      findings.AddRefusal(input_missing ? LintCode::kInputScaleMissing : LintCode::kTensorRefused, note.base,
                          matrix.status());
    }
    return;
  }
  note.loaded = true;
  note.tensor_scale = matrix->tensor_scale;
  note.input_scale = matrix->input_tensor_scale;
  note.statistics = Measure(*matrix);
  LintNumbers(note, findings);
}

void LintGateUp(const LayerContext& context, const ExpertNote& note, Findings& findings) {
  if (!note.gate.loaded || !note.up.loaded) {
    return;
  }
  if (note.gate.tensor_scale && note.up.tensor_scale && *note.gate.tensor_scale != *note.up.tensor_scale) {
    findings.Add(
        LintCode::kGateUpScale, note.gate.base,
        fmt::format("tensor scale {:g} of gate and {:g} of up (ratio {:.4f})", *note.gate.tensor_scale,
                    *note.up.tensor_scale, *note.gate.tensor_scale / *note.up.tensor_scale));
  }
  if (note.gate.input_scale && note.up.input_scale && *note.gate.input_scale != *note.up.input_scale) {
    findings.Add(
        LintCode::kGateUpInputScale, note.gate.base,
        fmt::format("input scale {:g} of gate and {:g} of up", *note.gate.input_scale, *note.up.input_scale));
  }
  if (!context.spec.names.experts.joins_gate_up()) {
    return;
  }
  // As the file has the rows: what is taken for gate and up, put together again.
  const auto& gate = note.gate.statistics.row_power;
  const auto& up = note.up.statistics.row_power;
  for (const auto* half : {&gate, &up}) {
    const RowPattern inside = PatternOf(*half);
    const bool interleaved = context.spec.axes.interleaved;
    // Taken apart rightly, neither half has a structure of its own; wrongly, each holds both projections:
    // alternating if rows were not taken as interleaved, one after the other if they were.
    const double suspicious = interleaved ? inside.halves : inside.alternation;
    const double noise = interleaved ? inside.halves_noise : inside.alternation_noise;
    if (suspicious > kPatternDeviations * noise && suspicious > kPatternShare) {
      findings.Add(LintCode::kInterleaving, note.up.base,
                   fmt::format("taken as {}, but the {} of what is {} then differ in power by {:.0f} %",
                               interleaved ? "interleaved" : "halves",
                               interleaved ? "first and second rows" : "even and odd rows",
                               half == &gate ? "gate" : "up", 200 * suspicious));
      return;
    }
  }
}

}  // namespace

ExpertNote LintExpert(const LayerContext& context, int64_t expert, Findings& findings) {
  ExpertNote note;
  for (const Projection projection : Projections(context)) {
    LintMatrix(context, expert, projection,
               projection == Projection::kGate ? note.gate
               : projection == Projection::kUp ? note.up
                                               : note.down,
               findings);
  }
  LintGateUp(context, note, findings);
  note.gate.statistics = note.up.statistics = note.down.statistics = {};
  return note;
}

}  // namespace fusedmoe::lint
