#include <fusedmoe/jobs/lint.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include <fmt/format.h>

#include "checkpoint/access.hpp"
#include "checkpoint/matrices/matrix_reader.hpp"
#include "jobs/lint/statistics.hpp"
#include "numerics/rows.hpp"

namespace fusedmoe {
namespace {

using checkpoint::Access;
using checkpoint::LayerContext;
using checkpoint::LinearFormat;
using checkpoint::Located;
using checkpoint::Projection;

// Shares above which a statistic is a finding. Right checkpoints stay a decade below: of the block scales of
// a matrix one is the largest, of normal weights in e4m3 one code in 10^5 is.
constexpr double kBlocksAtLimit = 0.05, kCodesAtLimit = 0.02, kSlackGroups = 0.1;
// Standard deviations by which rows must alternate before interleaving is suspected, and by how much at all.
constexpr double kPatternDeviations = 12, kPatternShare = 0.1;

struct MatrixNote {
  bool loaded = false;
  std::string base;
  std::optional<float> tensor_scale, input_scale;
  lint::MatrixStatistics statistics;
};

struct ExpertNote {
  MatrixNote gate, up, down;
};

class Linter {
 public:
  Linter(const std::shared_ptr<const Checkpoint>& checkpoint, const LintOptions& options)
      : checkpoint_(checkpoint), options_(options) {}

  Result<LintReport> Run();

 private:
  void Add(LintCode id, std::string tensor, std::string message);
  void AddRefusal(LintCode id, const std::string& fallback, const Status& status);
  void LintLayer(int64_t layer);
  void LintMatrix(const LayerContext& context, int64_t expert, Projection projection, MatrixNote& note);
  bool LintScales(const LayerContext& context, const LinearFormat& format, const Located& located);
  void LintNumbers(const MatrixNote& note);
  void LintGateUp(const LayerContext& context, const ExpertNote& note);
  void LintInputScales(const std::vector<ExpertNote>& notes, MatrixNote ExpertNote::*which);
  void LintShards(const LayerContext& context, const Scheme& scheme);
  void LintUnused(const LayerContext& context);
  void LintShared(const LayerContext& context, int64_t layer);

  const std::shared_ptr<const Checkpoint>& checkpoint_;
  const LintOptions& options_;
  std::mutex mutex_;
  LintReport report_;
  std::set<std::pair<int64_t, std::string>> shard_notes_;
};

void Linter::Add(LintCode id, std::string tensor, std::string message) {
  const LintRule& rule = LintTable()[static_cast<size_t>(id)];
  const std::lock_guard lock(mutex_);
  report_.findings.push_back({id, rule.code, rule.severity, std::move(tensor), std::move(message)});
}

void Linter::AddRefusal(LintCode id, const std::string& fallback, const Status& status) {
  Add(id, status.tensor().empty() ? fallback : status.tensor(), status.message());
}

// The values of a scale tensor that no reader accepts. True when there is one.
bool Linter::LintScales(const LayerContext& context, const LinearFormat& format, const Located& located) {
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
      Add(LintCode::kScaleInvalid, name,
          fmt::format("element {} is {}; finite{} is required", bad - values.begin(), *bad,
                      may_be_negative ? (may_be_zero ? "" : " and not zero")
                      : may_be_zero   ? " and not negative"
                                      : " and positive"));
    }
  }
  return found;
}

void Linter::LintMatrix(const LayerContext& context, int64_t expert, Projection projection,
                        MatrixNote& note) {
  const Located located = Locate(context, expert, projection);
  note.base = located.place.base;
  const auto format = RoutedFormat(context, located);
  if (!format.ok()) {
    AddRefusal(LintCode::kTensorRefused, note.base, format.status());
    return;
  }
  const bool scales_are_bad = located.place.item < 0 && LintScales(context, *format, located);
  const auto matrix = ReadMatrix(*context.store, *format, located.place, located.rows, located.cols);
  if (!matrix.ok()) {
    const bool input_missing = !format->input_scale.empty() && format->activation.static_tensor_scale &&
                               matrix.status().tensor().ends_with(format->input_scale.substr(1)) &&
                               !context.store->Has(matrix.status().tensor());
    if (!scales_are_bad) {
      AddRefusal(input_missing ? LintCode::kInputScaleMissing : LintCode::kTensorRefused, note.base,
                 matrix.status());
    }
    return;
  }
  note.loaded = true;
  note.tensor_scale = matrix->tensor_scale;
  note.input_scale = matrix->input_tensor_scale;
  note.statistics = lint::Measure(*matrix);
  LintNumbers(note);
}

void Linter::LintNumbers(const MatrixNote& note) {
  const lint::MatrixStatistics& numbers = note.statistics;
  const auto share = [](int64_t part, int64_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  if (numbers.not_finite > 0) {
    Add(LintCode::kWeightNotFinite, note.base, fmt::format("{} weights are not finite", numbers.not_finite));
  }
  if (numbers.nonzero == 0 && numbers.not_finite == 0) {
    Add(LintCode::kWeightsZero, note.base, "every weight decodes to zero");
  }
  if (const double part = share(numbers.blocks_at_limit, numbers.blocks);
      part > kBlocksAtLimit && numbers.blocks_at_limit > 1) {
    Add(LintCode::kBlocksSaturated, note.base,
        fmt::format("{} of {} block scales are 448", numbers.blocks_at_limit, numbers.blocks));
  }
  if (const double part = share(numbers.codes_at_limit, numbers.codes); part > kCodesAtLimit) {
    Add(LintCode::kCodesSaturated, note.base,
        fmt::format("{} of {} codes are the largest of their type", numbers.codes_at_limit, numbers.codes));
  }
  if (const double part = share(numbers.slack_groups, numbers.groups); part > kSlackGroups) {
    Add(LintCode::kCodeOrder, note.base,
        fmt::format("{} of {} groups use less than half of the range of their codes", numbers.slack_groups,
                    numbers.groups));
  }
}

void Linter::LintGateUp(const LayerContext& context, const ExpertNote& note) {
  if (!note.gate.loaded || !note.up.loaded) {
    return;
  }
  if (note.gate.tensor_scale && note.up.tensor_scale && *note.gate.tensor_scale != *note.up.tensor_scale) {
    Add(LintCode::kGateUpScale, note.gate.base,
        fmt::format("tensor scale {:g} of gate and {:g} of up (ratio {:.4f})", *note.gate.tensor_scale,
                    *note.up.tensor_scale, *note.gate.tensor_scale / *note.up.tensor_scale));
  }
  if (note.gate.input_scale && note.up.input_scale && *note.gate.input_scale != *note.up.input_scale) {
    Add(LintCode::kGateUpInputScale, note.gate.base,
        fmt::format("input scale {:g} of gate and {:g} of up", *note.gate.input_scale, *note.up.input_scale));
  }
  if (!context.spec.names.experts.joins_gate_up()) {
    return;
  }
  // As the file has the rows: what is taken for gate and up, put together again.
  const auto& gate = note.gate.statistics.row_power;
  const auto& up = note.up.statistics.row_power;
  for (const auto* half : {&gate, &up}) {
    const lint::RowPattern inside = lint::PatternOf(*half);
    const bool interleaved = context.spec.axes.interleaved;
    // Taken apart rightly, neither half has a structure of its own; wrongly, each holds both projections:
    // alternating if rows were not taken as interleaved, one after the other if they were.
    const double suspicious = interleaved ? inside.halves : inside.alternation;
    const double noise = interleaved ? inside.halves_noise : inside.alternation_noise;
    if (suspicious > kPatternDeviations * noise && suspicious > kPatternShare) {
      Add(LintCode::kInterleaving, note.up.base,
          fmt::format("taken as {}, but the {} of what is {} then differ in power by {:.0f} %",
                      interleaved ? "interleaved" : "halves",
                      interleaved ? "first and second rows" : "even and odd rows",
                      half == &gate ? "gate" : "up", 200 * suspicious));
      return;
    }
  }
}

// Calibration leaves every expert a scale of its own; equal ones are borrowed from somewhere.
void Linter::LintInputScales(const std::vector<ExpertNote>& notes, MatrixNote ExpertNote::*which) {
  std::vector<std::pair<float, const MatrixNote*>> scales;
  for (const ExpertNote& note : notes) {
    const MatrixNote& matrix = note.*which;
    if (matrix.loaded && matrix.input_scale) {
      scales.emplace_back(*matrix.input_scale, &matrix);
    }
  }
  if (scales.size() < 2) {
    return;
  }
  std::map<float, int64_t> counts;
  for (const auto& [scale, matrix] : scales) {
    ++counts[scale];
  }
  if (counts.size() == 1) {
    Add(LintCode::kInputScaleConstant, scales.front().second->base,
        fmt::format("{} experts share the input scale {:g}", scales.size(), scales.front().first));
    return;
  }
  std::vector<float> sorted;
  for (const auto& entry : scales) {
    sorted.push_back(entry.first);
  }
  std::sort(sorted.begin(), sorted.end());
  const float median = sorted[sorted.size() / 2], largest = sorted.back();
  constexpr float kFar = 256.0F;
  for (const auto& [scale, matrix] : scales) {
    if (scale == largest && counts[scale] > 1) {
      Add(LintCode::kExpertUncalibrated, matrix->base,
          fmt::format("its input scale {:g} is the largest of the layer, and {} experts have it", scale,
                      counts[scale]));
    } else if (scale < median / kFar || scale > median * kFar) {
      Add(LintCode::kExpertUncalibrated, matrix->base,
          fmt::format("its input scale {:g} is far from the median {:g}", scale, median));
    }
  }
}

void Linter::LintShards(const LayerContext& context, const Scheme& scheme) {
  const int64_t intermediate = context.spec.config.intermediate;
  int64_t unit = 1;
  for (const int64_t extent :
       {scheme.weight.block.row, scheme.weight.block.col, scheme.activation.group.col}) {
    unit = std::max(unit, extent);
  }
  std::string bad;
  for (const int64_t ranks : {2, 4, 8}) {
    if (intermediate % (ranks * unit) != 0) {
      bad += fmt::format("{}{}", bad.empty() ? "" : ", ", ranks);
    }
  }
  if (!bad.empty() && shard_notes_.emplace(intermediate, scheme.name).second) {
    Add(LintCode::kTpShard, Locate(context, 0, Projection::kDown).place.base,
        fmt::format("intermediate {} in groups of {} does not split evenly over {} ranks; here shares become "
                    "uneven, other engines refuse",
                    intermediate, unit, bad));
  }
}

// Tensors below the experts that belong to no projection, or have a suffix that the format does not know.
void Linter::LintUnused(const LayerContext& context) {
  std::map<std::string, std::set<std::string>> used;  // module -> suffixes
  std::set<std::string> known;
  for (int64_t expert = 0; expert < context.spec.config.num_experts; ++expert) {
    for (const Projection projection : Projections(context)) {
      const Located located = Locate(context, expert, projection);
      if (used.contains(located.place.base)) {
        continue;
      }
      const auto format = RoutedFormat(context, located);
      std::set<std::string>& suffixes = used[located.place.base];
      if (!format.ok()) {
        return;  // reported already, and what belongs here is not known
      }
      for (const std::string_view suffix :
           {format->codes, format->scale, format->second_scale, format->input_scale, format->zero_point,
            format->group_index, format->pre_quant_scale, format->shape, format->row_major,
            std::string_view(".bias")}) {
        if (!suffix.empty()) {
          suffixes.insert(std::string(suffix));
        }
      }
    }
  }
  const std::string& up = context.spec.names.experts.up;
  const std::string stem = up.substr(0, up.find("experts.") + 8);
  if (up.find("experts.") == std::string::npos || !context.spec.names.experts.per_expert()) {
    return;  // parameters of fused modules have names of many forms
  }
  for (const TensorInfo& info : checkpoint_->tensors()) {
    if (!info.name.starts_with(stem) || info.name == context.spec.names.correction_bias) {
      continue;
    }
    const size_t dot = info.name.rfind('.');
    const auto module = used.find(info.name.substr(0, dot));
    if (module == used.end() || !module->second.contains(info.name.substr(dot))) {
      // Zero points of symmetric GPTQ and the like are read or implied; an act-order index of 0, 1, 2 ...
      // too.
      Add(LintCode::kUnusedTensor, info.name,
          fmt::format("{} {} is not part of this format", DTypeName(info.dtype), info.shape.ToString()));
    }
  }
}

void Linter::LintLayer(int64_t layer) {
  const auto context = Access::Context(*checkpoint_, layer);
  if (!context.ok()) {
    AddRefusal(LintCode::kLayerRefused, fmt::format("layer {}", layer), context.status());
    return;
  }
  const LayerContext& inside = **context;
  if (const auto router = checkpoint_->LoadRouter(layer); !router.ok()) {
    AddRefusal(LintCode::kRouterRefused, inside.spec.names.router, router.status());
  }
  std::vector<ExpertNote> notes(static_cast<size_t>(inside.spec.config.num_experts));
  const std::vector<Projection> projections = Projections(inside);
  ParallelFor(options_.executor, inside.spec.config.num_experts, [&](int64_t expert) {
    ExpertNote& note = notes[static_cast<size_t>(expert)];
    for (const Projection projection : projections) {
      LintMatrix(inside, expert, projection,
                 projection == Projection::kGate ? note.gate
                 : projection == Projection::kUp ? note.up
                                                 : note.down);
    }
    LintGateUp(inside, note);
    note.gate.statistics = note.up.statistics = note.down.statistics = {};
  });
  report_.experts += inside.spec.config.num_experts;
  LintInputScales(notes, &ExpertNote::up);
  LintInputScales(notes, &ExpertNote::down);
  const auto scheme = RoutedScheme(inside);
  const bool refused =
      std::any_of(report_.findings.begin(), report_.findings.end(), [&](const LintFinding& f) {
        return f.severity == LintSeverity::kError && f.tensor.starts_with(inside.spec.names.prefix);
      });
  if (scheme.ok()) {
    LintShards(inside, *scheme);
    const Located up = Locate(inside, 0, Projection::kUp);
    const auto declared = inside.rules->format_of(up.place.base);
    if (declared.ok() && declared->input_scale_optional && declared->activation.quantized() &&
        !scheme->activation.quantized()) {
      Add(LintCode::kInputScaleIgnored, up.place.base,
          fmt::format("no {} is there; the layer runs as {}", declared->input_scale.substr(1), scheme->name));
    }
  } else if (!refused) {
    AddRefusal(LintCode::kLayerRefused, inside.spec.names.block, scheme.status());
  }
  if (const auto experts = checkpoint_->Experts(layer); !experts.ok() && scheme.ok()) {
    AddRefusal(LintCode::kTensorRefused, inside.spec.names.block, experts.status());
  }
  LintShared(inside, layer);
  LintUnused(inside);
}

void Linter::LintShared(const LayerContext& context, int64_t layer) {
  if (const auto shared = checkpoint_->SharedExperts(layer); !shared.ok()) {
    AddRefusal(LintCode::kTensorRefused, context.spec.names.shared_up, shared.status());
  } else if (shared->has_value()) {
    const checkpoint::LayerNames& names = context.spec.names;
    const auto expert = (*shared)->source.load(0);
    if (!expert.ok()) {
      AddRefusal(LintCode::kTensorRefused, names.shared_up, expert.status());
      return;
    }
    const std::pair<const CanonicalMatrix*, const std::string*> matrices[] = {
        {&expert->gate, names.shared_fused ? &names.shared_up : &names.shared_gate_proj},
        {&expert->up, &names.shared_up},
        {&expert->down, &names.shared_down}};
    for (const auto& [matrix, name] : matrices) {
      const int64_t bad = matrix->empty() ? 0 : lint::Measure(*matrix).not_finite;
      if (bad > 0) {
        Add(LintCode::kWeightNotFinite, *name, fmt::format("{} weights are not finite", bad));
      }
    }
  }
}

Result<LintReport> Linter::Run() {
  const std::vector<int64_t>& layers = options_.layers.empty() ? checkpoint_->moe_layers() : options_.layers;
  if (layers.empty()) {
    return Status::Usage("no layer with routed experts was found").WithFile(checkpoint_->directory());
  }
  for (const int64_t layer : layers) {
    const size_t before = report_.findings.size();
    LintLayer(layer);
    ++report_.layers;
    // Experts were read in any order.
    std::stable_sort(report_.findings.begin() + static_cast<std::ptrdiff_t>(before), report_.findings.end(),
                     [](const LintFinding& a, const LintFinding& b) {
                       return std::tie(a.tensor, a.id, a.message) < std::tie(b.tensor, b.id, b.message);
                     });
  }
  std::stable_sort(report_.findings.begin(), report_.findings.end(),
                   [](const LintFinding& a, const LintFinding& b) { return a.severity > b.severity; });
  report_.ok = report_.findings.empty() || report_.findings.front().severity != LintSeverity::kError;
  return std::move(report_);
}

}  // namespace

std::string_view LintSeverityName(LintSeverity severity) {
  return severity == LintSeverity::kError ? "error" : "warning";
}

std::span<const LintRule> LintTable() {
  static constexpr LintRule kTable[] = {
#define FMOE_LINT_ROW(id, name, severity, what) {LintCode::id, name, LintSeverity::severity, what},
      FMOE_LINT_TABLE(FMOE_LINT_ROW)
#undef FMOE_LINT_ROW
  };
  return kTable;
}

Result<LintReport> Lint(const std::shared_ptr<const Checkpoint>& checkpoint, const LintOptions& options) {
  return Linter(checkpoint, options).Run();
}

}  // namespace fusedmoe
