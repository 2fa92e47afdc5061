#include "experts/cpu/expert_packer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include "core/checked_math.hpp"
#include "experts/cpu/panel_packer.hpp"
#include "weights/narrow.hpp"

namespace fusedmoe::cpu {
namespace {

struct Matrix {
  const CanonicalMatrix* canonical;
  const GemmShape* shape;
  int part;   // position among the stripes of the shape
  int index;  // of ExpertExtras
  const char* name;
};

Status CheckMatrix(const Matrix& matrix) {
  const CanonicalMatrix& canonical = *matrix.canonical;
  if (canonical.rows != matrix.shape->rows || canonical.cols != matrix.shape->cols) {
    return Status::BadInput(fmt::format("{} is {} x {}; the layer needs {} x {}", matrix.name, canonical.rows,
                                        canonical.cols, matrix.shape->rows, matrix.shape->cols));
  }
  const Result<PanelFormat> panel = ChoosePanelFormat(canonical);
  FMOE_RETURN_IF_ERROR(panel.status());
  if (!matrix.shape->panel.Holds(*panel)) {
    return Status::BadInput(fmt::format("{} has format {}; the plan was made for {}", matrix.name,
                                        panel->ToString(), matrix.shape->panel.ToString()));
  }
  return Status::Ok();
}

/// An expert whose matrices are as the plan's GEMMs need them.
Result<CanonicalExpert> LoadExpert(const CpuPlan& plan, const ExpertSource& source, int64_t index) {
  FMOE_ASSIGN_OR_RETURN(CanonicalExpert expert, source.load(index));
  const std::tuple<CanonicalMatrix*, const GemmShape*, const char*> matrices[] = {
      {&expert.gate, &plan.gate_up, "gate"},
      {&expert.up, &plan.gate_up, "up"},
      {&expert.down, &plan.down, "down"}};
  for (const auto& [matrix, shape, name] : matrices) {
    if (shape->narrow) {
      FMOE_RETURN_IF_ERROR(NarrowInPlace(name, *matrix));
    }
  }
  return expert;
}

/// Which stripes of every matrix of an expert a task packs; the first share also fills what stands beside
/// them.
struct Share {
  int64_t index = 0, count = 1;
};

/// One matrix on its way to panels.
class MatrixPacking {
 public:
  Status Begin(const CpuPlan& plan, const Matrix& matrix, const PackTargets& targets, int64_t expert) {
    FMOE_RETURN_IF_ERROR(CheckMatrix(matrix));
    matrix_ = &matrix;
    const GemmShape& shape = *matrix.shape;
    columns_ = PanelColumns(*matrix.canonical, shape.panel);
    if (static_cast<int64_t>(columns_.size()) > shape.padded_cols) {
      return Status::Unsupported(
                 fmt::format("the groups of {} cut its {} columns into pieces that need {} packed columns; "
                             "{} are planned",
                             matrix.name, shape.cols, columns_.size(), shape.padded_cols))
          .WithHint("scale groups that a slice cuts need activation order to be declared");
    }
    columns_.resize(static_cast<size_t>(shape.padded_cols), -1);
    const Gemm target = shape.gemm;
    const int64_t rows = shape.parts * shape.stripes * kPanelRows;
    panels_ = targets.panels[target] + expert * shape.expert_bytes();
    row_scale_ = targets.row_scale[target] + expert * rows;
    bias_ = targets.bias[target] + expert * rows;
    output_scale_ = KernelOutputScale(shape.kernel);
    packer_.emplace(*matrix.canonical, shape.panel, columns_, *FindKernelTable(plan.vector_isa));
    return Status::Ok();
  }

  void PrefetchPages(int64_t stripe) const { packer_->PrefetchPages(stripe); }

  void Pack(int64_t stripe, const MatrixPacking* next, int64_t next_stripe) {
    const CanonicalMatrix& canonical = *matrix_->canonical;
    const int64_t position = stripe * matrix_->shape->parts + matrix_->part;
    const uint32_t nan_rows = packer_->Pack(stripe, panels_ + position * matrix_->shape->stripe_bytes,
                                            next == nullptr ? nullptr : &*next->packer_, next_stripe);
    float* scales = row_scale_ + position * kPanelRows;
    PanelRowScales(canonical, stripe, scales);
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      const bool spoilt = (nan_rows >> lane & 1) != 0;
      scales[lane] = spoilt ? std::numeric_limits<float>::quiet_NaN() : scales[lane] * output_scale_;
    }
    if (!canonical.bias.empty()) {
      const int64_t first = stripe * kPanelRows;
      std::copy_n(canonical.bias.view().as<float>() + first, std::min(kPanelRows, canonical.rows - first),
                  bias_ + position * kPanelRows);
    }
  }

  /// What stands beside the panels.
  void End(ExpertExtras& extras) {
    const CanonicalMatrix& canonical = *matrix_->canonical;
    extras.has_bias = extras.has_bias || !canonical.bias.empty();
    extras.tensor_scale[matrix_->index] = canonical.input_tensor_scale.value_or(1.0F);
    if (!PanelColumnsAreIdentity(columns_)) {
      extras.columns[matrix_->index] = std::move(columns_);
    }
    if (!canonical.pre_quant_scale.empty()) {
      const float* scale = canonical.pre_quant_scale.view().as<float>();
      extras.pre_quant_scale[matrix_->index].assign(scale, scale + canonical.cols);
    }
  }

 private:
  const Matrix* matrix_ = nullptr;
  std::vector<int32_t> columns_;
  std::byte* panels_ = nullptr;
  float* row_scale_ = nullptr;
  float* bias_ = nullptr;
  float output_scale_ = 1.0F;
  std::optional<PanelPacker> packer_;
};

Status PackExpert(const CpuPlan& plan, const CanonicalExpert& expert, const PackTargets& targets,
                  int64_t index, Share share, ExpertExtras& extras) {
  const bool gated = plan.gate_up.parts == 2;
  if (gated != !expert.gate.empty()) {
    return Status::BadInput(gated ? "the activation is gated and there is no gate projection"
                                  : "there is a gate projection and the activation takes none");
  }
  const Matrix matrices[3] = {{&expert.gate, &plan.gate_up, 0, 0, "gate"},
                              {&expert.up, &plan.gate_up, gated ? 1 : 0, 1, "up"},
                              {&expert.down, &plan.down, 0, 2, "down"}};
  MatrixPacking packings[3];
  for (int i = gated ? 0 : 1; i < 3; ++i) {
    FMOE_RETURN_IF_ERROR(packings[i].Begin(plan, matrices[i], targets, index));
  }
  // Gate and up in turn: they are neighbours in the panels, whose pages are touched once.
  struct Step {
    MatrixPacking* packing;
    int64_t stripe;
  };
  std::vector<Step> steps;
  const auto add = [&](int first, int end, int64_t stripes) {
    for (int64_t stripe = stripes * share.index / share.count;
         stripe < stripes * (share.index + 1) / share.count; ++stripe) {
      for (int i = first; i < end; ++i) {
        steps.push_back({&packings[i], stripe});
      }
    }
  };
  add(gated ? 0 : 1, 2, plan.gate_up.stripes);
  add(2, 3, plan.down.stripes);
  for (size_t i = 0; i < steps.size(); ++i) {
    const Step next = i + 1 < steps.size() ? steps[i + 1] : Step{};
    if (i + 2 < steps.size()) {
      steps[i + 2].packing->PrefetchPages(steps[i + 2].stripe);
    }
    steps[i].packing->Pack(steps[i].stripe, next.packing, next.stripe);
  }
  if (share.index > 0) {
    return Status::Ok();
  }
  for (int i = gated ? 0 : 1; i < 3; ++i) {
    packings[i].End(extras);
  }
  if (!gated) {
    extras.columns[0] = extras.columns[1];
    extras.pre_quant_scale[0] = extras.pre_quant_scale[1];
    extras.tensor_scale[0] = extras.tensor_scale[1];
  }
  return Status::Ok();
}

}  // namespace

void PackExperts(const CpuPlan& plan, const ExpertSource& source, const Executor& executor,
                 const PackTargets& targets, std::vector<ExpertExtras>& extras) {
  const int64_t experts = source.num_local_experts;
  const int64_t threads = std::max(executor.num_threads, 1);
  constexpr int64_t kExpertsPerThread = 4;
  if (threads == 1 || experts >= kExpertsPerThread * threads) {
    ParallelFor(executor, experts, [&](int64_t expert) {
      ExpertExtras& mine = extras[static_cast<size_t>(expert)];
      const Result<CanonicalExpert> loaded = LoadExpert(plan, source, expert);
      mine.status = loaded.ok() ? PackExpert(plan, *loaded, targets, expert, {}, mine) : loaded.status();
    });
    return;
  }
  for (int64_t first = 0; first < experts; first += threads) {
    const int64_t count = std::min(threads, experts - first);
    std::vector<CanonicalExpert> loaded(static_cast<size_t>(count));
    ParallelFor(executor, count, [&](int64_t i) {
      Result<CanonicalExpert> expert = LoadExpert(plan, source, first + i);
      if (expert.ok()) {
        loaded[static_cast<size_t>(i)] = *std::move(expert);
      } else {
        extras[static_cast<size_t>(first + i)].status = expert.status();
      }
    });
    const int64_t shares = CeilDiv(kExpertsPerThread * threads, count);
    std::vector<ExpertExtras> others(
        static_cast<size_t>(count * shares));  // their status is that of the first share
    ParallelFor(executor, count * shares, [&](int64_t task) {
      const int64_t i = task / shares;
      ExpertExtras& mine =
          task % shares == 0 ? extras[static_cast<size_t>(first + i)] : others[static_cast<size_t>(task)];
      if (loaded[static_cast<size_t>(i)].up.empty()) {
        return;  // was not loaded
      }
      Status status =
          PackExpert(plan, loaded[static_cast<size_t>(i)], targets, first + i, {task % shares, shares}, mine);
      if (task % shares == 0) {
        mine.status = std::move(status);
      }
    });
  }
}

}  // namespace fusedmoe::cpu
