#include "experts/cpu/cpu_weights.hpp"

#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "core/checked_math.hpp"
#include "experts/cpu/panel_packer.hpp"

namespace fusedmoe::cpu {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

/// Spreads pages that nobody has touched over memory nodes, one after the other. Every thread reads its
/// columns of every expert, so that no node is a better home for an expert than another, and all nodes
/// deliver at once; left to the first touch, an expert would lie where the thread that packed it happened to
/// run. Advice only: where the system refuses, pages come from where they are touched.
void SpreadOverNodes(void* pages, size_t bytes, int nodes) {
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE; the header of libnuma is not needed for one number
  const unsigned long mask = nodes >= kMostMemoryNodes ? ~0UL : (1UL << nodes) - 1;
  (void)syscall(SYS_mbind, pages, bytes, kInterleave, &mask, static_cast<unsigned long>(nodes) + 1, 0U);
}

/// Memory of the system that is zero, in huge pages where they can be had: they are worth 2 to 9 % of the
/// read bandwidth.
Result<Tensor> AllocatePages(DType dtype, const Shape& shape, int nodes, std::byte** data) {
  const int64_t bytes = std::max<int64_t>(PackedBytes(dtype, shape.count()), 1);
  const auto mapped = static_cast<size_t>(RoundUp(bytes, kHugePage) + kHugePage);
  void* memory =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) {
    return Status::System(fmt::format("out of memory: {} bytes of prepared weights", bytes));
  }
  std::shared_ptr<void> owner(memory, [mapped](void* pages) { munmap(pages, mapped); });
  auto* first = static_cast<std::byte*>(memory);
  first += RoundUp(static_cast<int64_t>(reinterpret_cast<uintptr_t>(first)), kHugePage) -
           static_cast<int64_t>(reinterpret_cast<uintptr_t>(first));
  if (bytes >= kHugePage) {
    (void)madvise(first, static_cast<size_t>(RoundUp(bytes, kHugePage)), MADV_HUGEPAGE);  // advice only
  }
  if (nodes > 1) {
    SpreadOverNodes(first, static_cast<size_t>(RoundUp(bytes, kHugePage)), nodes);
  }
  *data = first;
  return Tensor::Borrow(TensorView(first, dtype, shape), std::move(owner));
}

/// What an expert has beside its panels, kept until all are known.
struct Extras {
  std::vector<int32_t> columns[3];  // gate (or up), up, down; empty: identity
  std::vector<float> pre_quant_scale[3];
  float tensor_scale[3] = {1.0F, 1.0F, 1.0F};
  bool has_bias = false;
  Status status;
};

struct Matrix {
  const CanonicalMatrix* canonical;
  const GemmShape* shape;
  int part;   // position among the stripes of the shape
  int index;  // of Extras
  const char* name;
};

struct Targets {
  std::byte* panels[2];  // gate_up, down
  float* row_scale[2];
  float* bias[2];
};

Status CheckMatrix(const CpuPlan& plan, const Matrix& matrix) {
  const CanonicalMatrix& canonical = *matrix.canonical;
  if (canonical.rows != matrix.shape->rows || canonical.cols != matrix.shape->cols) {
    return Status::BadInput(fmt::format("{} is {} x {}; the layer needs {} x {}", matrix.name, canonical.rows,
                                        canonical.cols, matrix.shape->rows, matrix.shape->cols));
  }
  const Result<PanelFormat> panel = ChoosePanelFormat(canonical.format, !canonical.zero_point.empty());
  FMOE_RETURN_IF_ERROR(panel.status());
  if (!plan.panel.Holds(*panel)) {
    return Status::BadInput(fmt::format("{} has format {}; the plan was made for {}", matrix.name,
                                        panel->ToString(), plan.panel.ToString()));
  }
  return Status::Ok();
}

/// Which stripes of every matrix of an expert a task packs; the first share also fills what stands beside
/// them.
struct Share {
  int64_t index = 0, count = 1;
};

/// One matrix on its way to panels.
class MatrixPacking {
 public:
  Status Begin(const CpuPlan& plan, const Matrix& matrix, const Targets& targets, int64_t expert) {
    FMOE_RETURN_IF_ERROR(CheckMatrix(plan, matrix));
    matrix_ = &matrix;
    const GemmShape& shape = *matrix.shape;
    columns_ = PanelColumns(*matrix.canonical, plan.panel);
    if (static_cast<int64_t>(columns_.size()) > shape.padded_cols) {
      return Status::Unsupported(
                 fmt::format("the groups of {} cut its {} columns into pieces that need {} packed columns; "
                             "{} are planned",
                             matrix.name, shape.cols, columns_.size(), shape.padded_cols))
          .WithHint("scale groups that a slice cuts need activation order to be declared");
    }
    columns_.resize(static_cast<size_t>(shape.padded_cols), -1);
    const int target = matrix.shape == &plan.down ? 1 : 0;
    const int64_t side = shape.parts * shape.stripes * kPanelRows;
    panels_ = targets.panels[target] + expert * shape.expert_bytes();
    row_scale_ = targets.row_scale[target] + expert * side;
    bias_ = targets.bias[target] + expert * side;
    output_scale_ = KernelOutputScale(plan.kernel);
    packer_.emplace(*matrix.canonical, plan.panel, columns_, *FindKernelTable(plan.isa));
    return Status::Ok();
  }

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
  void End(Extras& extras) {
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

Status PackExpert(const CpuPlan& plan, const CanonicalExpert& expert, const Targets& targets, int64_t index,
                  Share share, Extras& extras) {
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

/// All experts, streamed: besides the result there is never more than one expert for each thread. Where there
/// are too few experts to keep the threads busy, those of one round are loaded together and packed in shares.
void PackExperts(const CpuPlan& plan, const ExpertSource& source, const Executor& executor,
                 const Targets& targets, std::vector<Extras>& extras) {
  const int64_t experts = source.num_local_experts;
  const int64_t threads = std::max(executor.num_threads, 1);
  constexpr int64_t kExpertsPerThread = 4;
  if (threads == 1 || experts >= kExpertsPerThread * threads) {
    ParallelFor(executor, experts, [&](int64_t expert) {
      Extras& mine = extras[static_cast<size_t>(expert)];
      const Result<CanonicalExpert> loaded = source.load(expert);
      mine.status = loaded.ok() ? PackExpert(plan, *loaded, targets, expert, {}, mine) : loaded.status();
    });
    return;
  }
  for (int64_t first = 0; first < experts; first += threads) {
    const int64_t count = std::min(threads, experts - first);
    std::vector<CanonicalExpert> loaded(static_cast<size_t>(count));
    ParallelFor(executor, count, [&](int64_t i) {
      Result<CanonicalExpert> expert = source.load(first + i);
      if (expert.ok()) {
        loaded[static_cast<size_t>(i)] = *std::move(expert);
      } else {
        extras[static_cast<size_t>(first + i)].status = expert.status();
      }
    });
    const int64_t shares = CeilDiv(kExpertsPerThread * threads, count);
    std::vector<Extras> others(
        static_cast<size_t>(count * shares));  // their status is that of the first share
    ParallelFor(executor, count * shares, [&](int64_t task) {
      const int64_t i = task / shares;
      Extras& mine =
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

template <typename T>
Status AddRows(PreparedWeights& weights, const char* name, DType dtype, int64_t cols, int64_t row_length,
               const std::vector<Extras>& extras, std::vector<T> (Extras::*member)[3], int first, int count) {
  const bool any = std::any_of(extras.begin(), extras.end(), [&](const Extras& expert) {
    return std::any_of(expert.*member + first, expert.*member + first + count,
                       [](const std::vector<T>& row) { return !row.empty(); });
  });
  if (!any) {
    return Status::Ok();
  }
  const Shape shape{static_cast<int64_t>(extras.size()), count, row_length};
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(dtype, shape));
  T* out = tensor.mutable_view().as<T>();
  for (const Extras& expert : extras) {
    for (int i = first; i < first + count; ++i, out += row_length) {
      const std::vector<T>& row = (expert.*member)[i];
      for (int64_t k = 0; k < row_length; ++k) {
        // Absent ones become what changes nothing: the identity, or a factor of one.
        const T neutral = std::is_same_v<T, float> ? T{1} : static_cast<T>(k < cols ? k : -1);
        out[k] = row.empty() ? neutral : row[static_cast<size_t>(k)];
      }
    }
  }
  weights.tensors.push_back({name, std::move(tensor)});
  return Status::Ok();
}

Status AddTensorScales(PreparedWeights& weights, const std::vector<Extras>& extras) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor,
                        Tensor::Allocate(DType::kF32, Shape{static_cast<int64_t>(extras.size()), 3}));
  float* out = tensor.mutable_view().as<float>();
  for (const Extras& expert : extras) {
    out = std::copy(expert.tensor_scale, expert.tensor_scale + 3, out);
  }
  weights.tensors.push_back({"input_tensor_scale", std::move(tensor)});
  return Status::Ok();
}

template <typename T>
const T* FindData(const PreparedWeights& weights, std::string_view name) {
  const Tensor* tensor = weights.Find(name);
  return tensor == nullptr ? nullptr : tensor->view().as<T>();
}

}  // namespace

std::string LayoutKey(const CpuPlan& plan) {
  return fmt::format("{}/{}x{}x{}/{}", plan.panel.ToString(), plan.num_local_experts, plan.gate_up.cols,
                     plan.gate_up.rows, plan.gate_up.parts == 2 ? "gated" : "ungated");
}

RecipeText LayoutRecipe(const CpuPlan& plan) {
  RecipeText recipe;
  const auto pad = [&](const char* what, int64_t from, int64_t to) {
    if (from != to) {
      recipe.push_back(fmt::format("pad_{}({} -> {})", what, from, to));
    }
  };
  pad("intermediate", plan.gate_up.rows, plan.gate_up.padded_rows());
  pad("hidden_k", plan.gate_up.cols, plan.gate_up.padded_cols);
  pad("intermediate_k", plan.down.cols, plan.down.padded_cols);
  if (plan.gate_up.parts == 2) {
    recipe.push_back("interleave_gate_up(16)");
  }
  if (plan.products) {
    recipe.push_back("multiply_block_scales(BF16)");
  }
  recipe.push_back("panel(" + plan.panel.ToString() + ")");
  return recipe;
}

Result<PreparedWeights> PrepareCpuWeights(const CpuPlan& plan, const ExpertSource& source,
                                          const Executor& executor) {
  const int64_t experts = source.num_local_experts;
  if (experts != plan.num_local_experts) {
    return Status::BadInput(
        fmt::format("the source has {} experts; the layer has {}", experts, plan.num_local_experts));
  }
  PreparedWeights weights;
  weights.layout_key = LayoutKey(plan);
  weights.recipe = LayoutRecipe(plan);
  const GemmShape* shapes[2] = {&plan.gate_up, &plan.down};
  const char* names[2][3] = {{"gate_up", "gate_up_row_scale", "gate_up_bias"},
                             {"down", "down_row_scale", "down_bias"}};
  Targets targets{};
  Tensor bias[2];
  for (int i = 0; i < 2; ++i) {
    const GemmShape& shape = *shapes[i];
    std::byte* data = nullptr;
    FMOE_ASSIGN_OR_RETURN(Tensor panels, AllocatePages(DType::kU8, Shape{experts, shape.expert_bytes()},
                                                       plan.weight_nodes, &data));
    targets.panels[i] = data;
    weights.tensors.push_back({names[i][0], std::move(panels)});
    const Shape side{experts, shape.stripes, shape.parts, kPanelRows};
    FMOE_ASSIGN_OR_RETURN(Tensor row_scale, AllocatePages(DType::kF32, side, plan.weight_nodes, &data));
    targets.row_scale[i] = reinterpret_cast<float*>(data);
    weights.tensors.push_back({names[i][1], std::move(row_scale)});
    FMOE_ASSIGN_OR_RETURN(bias[i], AllocatePages(DType::kF32, side, plan.weight_nodes, &data));
    targets.bias[i] = reinterpret_cast<float*>(data);
  }
  std::vector<Extras> extras(static_cast<size_t>(experts));
  PackExperts(plan, source, executor, targets, extras);
  bool has_bias = false;
  for (size_t expert = 0; expert < extras.size(); ++expert) {
    if (!extras[expert].status.ok()) {
      return std::move(extras[expert].status).WithContext(fmt::format("expert {}", expert));
    }
    has_bias = has_bias || extras[expert].has_bias;
  }
  if (has_bias) {
    weights.tensors.push_back({names[0][2], bias[0]});
    weights.tensors.push_back({names[1][2], bias[1]});
  }
  FMOE_RETURN_IF_ERROR(AddRows(weights, "input_columns", DType::kI32, plan.gate_up.cols,
                               plan.gate_up.padded_cols, extras, &Extras::columns, 0, 2));
  FMOE_RETURN_IF_ERROR(AddRows(weights, "mid_columns", DType::kI32, plan.down.cols, plan.down.padded_cols,
                               extras, &Extras::columns, 2, 1));
  FMOE_RETURN_IF_ERROR(AddRows(weights, "input_pre_quant_scale", DType::kF32, plan.gate_up.cols,
                               plan.gate_up.cols, extras, &Extras::pre_quant_scale, 0, 2));
  FMOE_RETURN_IF_ERROR(AddRows(weights, "mid_pre_quant_scale", DType::kF32, plan.down.cols, plan.down.cols,
                               extras, &Extras::pre_quant_scale, 2, 1));
  FMOE_RETURN_IF_ERROR(AddTensorScales(weights, extras));
  return weights;
}

Result<std::vector<ExpertPanels>> ViewCpuWeights(const CpuPlan& plan, const PreparedWeights& weights) {
  if (weights.layout_key != LayoutKey(plan)) {
    return Status::Unsupported(fmt::format("the weights are in layout '{}'; this backend needs '{}'",
                                           weights.layout_key, LayoutKey(plan)));
  }
  const auto* gate_up = FindData<uint8_t>(weights, "gate_up");
  const auto* down = FindData<uint8_t>(weights, "down");
  const auto* gate_up_scale = FindData<float>(weights, "gate_up_row_scale");
  const auto* down_scale = FindData<float>(weights, "down_row_scale");
  const auto* tensor_scale = FindData<float>(weights, "input_tensor_scale");
  if (gate_up == nullptr || down == nullptr || gate_up_scale == nullptr || down_scale == nullptr ||
      tensor_scale == nullptr) {
    return Status::BadInput(
        "prepared weights lack one of gate_up, down, their row scales, input_tensor_scale");
  }
  const auto* gate_up_bias = FindData<float>(weights, "gate_up_bias");
  const auto* down_bias = FindData<float>(weights, "down_bias");
  const auto* input_columns = FindData<int32_t>(weights, "input_columns");
  const auto* mid_columns = FindData<int32_t>(weights, "mid_columns");
  const auto* input_factor = FindData<float>(weights, "input_pre_quant_scale");
  const auto* mid_factor = FindData<float>(weights, "mid_pre_quant_scale");
  const auto at = [](const auto* base, int64_t offset) { return base == nullptr ? base : base + offset; };
  std::vector<ExpertPanels> experts(static_cast<size_t>(plan.num_local_experts));
  const int64_t gate_up_side = plan.gate_up.parts * plan.gate_up.padded_rows();
  for (int64_t e = 0; e < plan.num_local_experts; ++e) {
    ExpertPanels& expert = experts[static_cast<size_t>(e)];
    expert.gate_up = gate_up + e * plan.gate_up.expert_bytes();
    expert.down = down + e * plan.down.expert_bytes();
    expert.gate_up_scale = gate_up_scale + e * gate_up_side;
    expert.gate_up_bias = at(gate_up_bias, e * gate_up_side);
    expert.down_scale = down_scale + e * plan.down.padded_rows();
    expert.down_bias = at(down_bias, e * plan.down.padded_rows());
    for (int64_t part = 0; part < 2; ++part) {
      expert.input[part] = {at(input_columns, (2 * e + part) * plan.gate_up.padded_cols),
                            at(input_factor, (2 * e + part) * plan.gate_up.cols), tensor_scale[3 * e + part]};
    }
    expert.mid = {at(mid_columns, e * plan.down.padded_cols), at(mid_factor, e * plan.down.cols),
                  tensor_scale[3 * e + 2]};
  }
  return experts;
}

}  // namespace fusedmoe::cpu
