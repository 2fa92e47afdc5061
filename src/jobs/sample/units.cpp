#include "jobs/sample/units.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include <fmt/format.h>

#include "core/checked_math.hpp"
#include "jobs/sample/random.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "weights/quantize.hpp"

namespace fusedmoe::sample {
namespace {

using checkpoint::StorageOptions;
using checkpoint::StorageRow;
using jobs::Unit;

// Rows of a random tensor are made in pieces of this many values.
constexpr int64_t kPiece = 4096;

float FanIn(int64_t inputs) {
  return 1.0F / std::sqrt(static_cast<float>(inputs));
}

// What the values of a checkpoint are made from.
struct Source {
  SampleOptions options;
  const FamilyRow& family;
  Sizes sizes;
  Scheme scheme;
  const StorageRow* storage;

  // amax / range is the stored scale: one level, or the second above e4m3 block scales.
  float InputRange() const {
    const ActivationFormat& format = scheme.activation;
    if (!format.quantized()) {
      return 1.0F;
    }
    return LargestValue(*format.element) * (format.scale_dtype == DType::kF8E4M3 ? 448.0F : 1.0F);
  }

  Status MakeProjection(const std::string& name, int64_t rows, int64_t cols, float input_amax,
                        const Executor& executor, std::vector<NamedTensor>& out) const {
    FMOE_ASSIGN_OR_RETURN(Tensor weights, RandomTensor(options.seed, name + ".weight", options.dtype,
                                                       {rows, cols}, FanIn(cols), executor));
    if (storage == nullptr) {
      out.push_back({name + ".weight", std::move(weights)});
      return Status::Ok();
    }
    WeightQuantizerOptions quantizer;
    quantizer.recipe = storage->producer == "compressed-tensors" ? WeightRecipe::kCompressedTensors
                                                                 : WeightRecipe::kModelOpt;
    auto matrix = QuantizeMatrix(weights.view(), scheme.weight, quantizer);
    if (!matrix.ok()) {
      return std::move(matrix).status().WithTensor(name);
    }
    matrix->input_tensor_scale = input_amax / InputRange();
    FMOE_ASSIGN_OR_RETURN(std::vector<NamedTensor> tensors,
                          checkpoint::Store(*storage, *matrix, StorageOptions{}, name));
    std::move(tensors.begin(), tensors.end(), std::back_inserter(out));
    return Status::Ok();
  }
};

// Builds the list of units of a checkpoint.
class UnitList {
 public:
  explicit UnitList(std::shared_ptr<const Source> source) : source_(std::move(source)) {}

  std::vector<Unit> Build() {
    for (int64_t layer = 0; layer < sizes_.num_layers; ++layer) {
      const std::string block = fmt::format("model.layers.{}.{}", layer, family_.block);
      AddRouter(block);
      AddProjections(block);
      AddShared(block);
      if (storage_ == nullptr && family_.form == ExpertForm::kFusedInOut) {
        AddFusedInOut(block);
      } else if (storage_ == nullptr && family_.form == ExpertForm::kFusedOutIn) {
        AddFusedOutIn(block);
      } else {
        for (int64_t expert = 0; expert < sizes_.num_experts; ++expert) {
          AddExpert(fmt::format("{}.experts.{}", block, expert), sizes_.expert_hidden(), sizes_.intermediate,
                    family_.expert_bias);
        }
      }
    }
    return std::move(units_);
  }

 private:
  void AddTensor(const std::string& name, DType dtype, const Shape& shape, float deviation) {
    Unit unit;
    unit.specs = {{name, dtype, shape}};
    unit.large = true;
    unit.make = [=, seed = options_.seed](const Executor& executor) -> Result<std::vector<NamedTensor>> {
      FMOE_ASSIGN_OR_RETURN(Tensor tensor, RandomTensor(seed, name, dtype, shape, deviation, executor));
      return std::vector<NamedTensor>{{name, std::move(tensor)}};
    };
    units_.push_back(std::move(unit));
  }

  void AddRouter(const std::string& block) {
    // Logits spread enough that experts differ, and not so much that one takes all.
    AddTensor(fmt::format("{}.{}.weight", block, family_.router), options_.dtype,
              {sizes_.num_experts, sizes_.hidden}, 1.5F * FanIn(sizes_.hidden));
    if (family_.router_bias) {
      AddTensor(fmt::format("{}.{}.bias", block, family_.router), options_.dtype, {sizes_.num_experts}, 0.1F);
    }
    if (!family_.correction_bias.empty()) {
      AddTensor(fmt::format("{}.{}", block, family_.correction_bias), DType::kF32, {sizes_.num_experts},
                0.05F);
    }
  }

  void AddProjections(const std::string& block) {
    if (sizes_.latent > 0) {
      AddTensor(fmt::format("{}.{}.weight", block, family_.to_latent), options_.dtype,
                {sizes_.latent, sizes_.hidden}, FanIn(sizes_.hidden));
      AddTensor(fmt::format("{}.{}.weight", block, family_.from_latent), options_.dtype,
                {sizes_.hidden, sizes_.latent}, FanIn(sizes_.latent));
      if (!family_.latent_norm.empty()) {
        AddTensor(fmt::format("{}.{}.weight", block, family_.latent_norm), options_.dtype, {sizes_.latent},
                  1.0F);
      }
    }
  }

  void AddShared(const std::string& block) {
    if (family_.shared.empty()) {
      return;
    }
    AddExpert(fmt::format("{}.{}", block, family_.shared), sizes_.hidden,
              sizes_.intermediate * family_.shared_factor, false);
    if (family_.shared_gate) {
      AddTensor(fmt::format("{}.{}_gate.weight", block, family_.shared), options_.dtype, {1, sizes_.hidden},
                FanIn(sizes_.hidden));
    }
  }

  void AddFusedInOut(const std::string& block) {
    const int64_t experts = sizes_.num_experts;
    AddTensor(block + ".experts.gate_up_proj", options_.dtype,
              {experts, sizes_.hidden, 2 * sizes_.intermediate}, FanIn(sizes_.hidden));
    AddTensor(block + ".experts.down_proj", options_.dtype, {experts, sizes_.intermediate, sizes_.hidden},
              FanIn(sizes_.intermediate));
    if (family_.expert_bias) {
      AddTensor(block + ".experts.gate_up_proj_bias", options_.dtype, {experts, 2 * sizes_.intermediate},
                0.1F);
      AddTensor(block + ".experts.down_proj_bias", options_.dtype, {experts, sizes_.hidden}, 0.1F);
    }
  }

  void AddFusedOutIn(const std::string& block) {
    AddTensor(block + ".input_linear.weight", options_.dtype,
              {sizes_.num_experts, 2 * sizes_.intermediate, sizes_.hidden}, FanIn(sizes_.hidden));
    AddTensor(block + ".output_linear.weight", options_.dtype,
              {sizes_.num_experts, sizes_.hidden, sizes_.intermediate}, FanIn(sizes_.intermediate));
  }

  void AddExpert(const std::string& name, int64_t hidden, int64_t intermediate, bool bias) {
    struct Projection {
      std::string name;
      int64_t rows, cols;
      float input_amax;
    };
    // compressed-tensors spells the projections alike in every family (docs/checkpoints.md). Inputs are
    // normal, so five deviations are about their largest; the same for the product of gate and up.
    const bool renamed = storage_ != nullptr && storage_->producer == "compressed-tensors";
    const auto spelt = [&name, renamed](std::string_view own, std::string_view common) {
      return fmt::format("{}.{}", name, renamed ? common : own);
    };
    constexpr float kLargest = 5.0F;
    const bool gated = !family_.gate.empty();
    const float mid = gated ? kLargest / (1.0F + std::exp(-kLargest)) * kLargest * 0.5F : kLargest * kLargest;
    std::vector<Projection> projections;
    if (gated) {
      projections.push_back({spelt(family_.gate, "gate_proj"), intermediate, hidden, kLargest});
    }
    projections.push_back({spelt(family_.up, "up_proj"), intermediate, hidden, kLargest});
    projections.push_back({spelt(family_.down, "down_proj"), hidden, intermediate, mid});
    Unit unit;
    for (const Projection& projection : projections) {
      if (storage_ == nullptr) {
        unit.specs.push_back(
            {projection.name + ".weight", options_.dtype, {projection.rows, projection.cols}});
      } else {
        for (TensorSpec& spec : checkpoint::SpecsOf(*storage_, scheme_, StorageOptions{}, projection.name,
                                                    projection.rows, projection.cols)) {
          unit.specs.push_back(std::move(spec));
        }
      }
      if (bias) {
        unit.specs.push_back({projection.name + ".bias", options_.dtype, {projection.rows}});
      }
    }
    unit.make = [projections, bias,
                 source = source_](const Executor& executor) -> Result<std::vector<NamedTensor>> {
      std::vector<NamedTensor> tensors;
      for (const Projection& projection : projections) {
        FMOE_RETURN_IF_ERROR(source->MakeProjection(projection.name, projection.rows, projection.cols,
                                                    projection.input_amax, executor, tensors));
        if (bias) {
          const std::string bias_name = projection.name + ".bias";
          FMOE_ASSIGN_OR_RETURN(Tensor tensor,
                                RandomTensor(source->options.seed, bias_name, source->options.dtype,
                                             {projection.rows}, 0.1F, executor));
          tensors.push_back({bias_name, std::move(tensor)});
        }
      }
      return tensors;
    };
    units_.push_back(std::move(unit));
  }

  const std::shared_ptr<const Source> source_;  // shared with the units, which make values later
  const SampleOptions& options_ = source_->options;
  const FamilyRow& family_ = source_->family;
  const Sizes& sizes_ = source_->sizes;
  const Scheme& scheme_ = source_->scheme;
  const StorageRow* const storage_ = source_->storage;
  std::vector<Unit> units_;
};

}  // namespace

Result<Tensor> RandomTensor(uint64_t seed, std::string_view name, DType dtype, const Shape& shape,
                            float deviation, const Executor& executor) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(dtype, shape));
  std::byte* data = tensor.mutable_view().data();
  const int64_t count = shape.count();
  const NormalStream stream(NormalStream::Key(seed, name));
  ParallelFor(executor, CeilDiv(count, kPiece), [&](int64_t piece) {
    float values[kPiece];
    const int64_t begin = piece * kPiece;
    const int64_t here = std::min(kPiece, count - begin);
    stream.Fill(begin, here, deviation, values);
    EncodeRow(dtype, values, here, data + PackedBytes(dtype, begin));
  });
  return tensor;
}

std::vector<Unit> UnitsOf(const SampleOptions& options, const FamilyRow& family, const Sizes& sizes,
                          const Scheme& scheme, const StorageRow* storage) {
  return UnitList(std::make_shared<Source>(Source{options, family, sizes, scheme, storage})).Build();
}

}  // namespace fusedmoe::sample
