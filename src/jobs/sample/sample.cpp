#include <fusedmoe/jobs/sample.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/routing.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/storage/storage.hpp"
#include "core/checked_math.hpp"
#include "jobs/common/output_checkpoint.hpp"
#include "jobs/sample/families.hpp"
#include "jobs/sample/random.hpp"
#include "numerics/element_types.hpp"
#include "numerics/rows.hpp"
#include "weights/quantize.hpp"

namespace fusedmoe {
namespace {

using Json = nlohmann::ordered_json;
using checkpoint::StorageOptions;
using checkpoint::StorageRow;
using jobs::Unit;
using sample::ExpertForm;
using sample::FamilyRow;
using sample::NormalStream;
using sample::Sizes;

// A size that no model has, and whose products with the others stay far from overflow.
constexpr int64_t kLargestSize = int64_t{1} << 20;
// Rows of a random tensor are made in pieces of this many values.
constexpr int64_t kPiece = 4096;

/// Normal values of that deviation around `mean`, rounded to the dtype. The same bytes for any executor.
Result<Tensor> RandomTensor(uint64_t seed, std::string_view name, DType dtype, const Shape& shape,
                            float deviation, const Executor& executor = {}, float mean = 0.0F) {
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(dtype, shape));
  std::byte* data = tensor.mutable_view().data();
  const int64_t count = shape.count();
  const NormalStream stream(NormalStream::Key(seed, name));
  ParallelFor(executor, CeilDiv(count, kPiece), [&](int64_t piece) {
    float values[kPiece];
    const int64_t begin = piece * kPiece;
    const int64_t here = std::min(kPiece, count - begin);
    stream.Fill(begin, here, deviation, values);
    if (mean != 0.0F) {
      std::for_each(values, values + here, [mean](float& value) { value += mean; });
    }
    EncodeRow(dtype, values, here, data + PackedBytes(dtype, begin));
  });
  return tensor;
}

float FanIn(int64_t inputs) {
  return 1.0F / std::sqrt(static_cast<float>(inputs));
}

/// Builds the list of units of a checkpoint.
class UnitList {
 public:
  UnitList(const SampleOptions& options, const FamilyRow& family, const Sizes& sizes, const Scheme& scheme,
           const StorageRow* storage)
      : options_(options), family_(family), sizes_(sizes), scheme_(scheme), storage_(storage) {}

  std::vector<Unit> Units() {
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
  void AddTensor(const std::string& name, DType dtype, const Shape& shape, float deviation,
                 float mean = 0.0F) {
    Unit unit;
    unit.specs = {{name, dtype, shape}};
    unit.large = true;
    unit.make = [=, seed = options_.seed](const Executor& executor) -> Result<std::vector<NamedTensor>> {
      FMOE_ASSIGN_OR_RETURN(Tensor tensor, RandomTensor(seed, name, dtype, shape, deviation, executor, mean));
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
      AddTensor(block + ".fc1_latent_proj.weight", options_.dtype, {sizes_.latent, sizes_.hidden},
                FanIn(sizes_.hidden));
      AddTensor(block + ".fc2_latent_proj.weight", options_.dtype, {sizes_.hidden, sizes_.latent},
                FanIn(sizes_.latent));
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
    unit.make = [projections, bias, this](const Executor& executor) -> Result<std::vector<NamedTensor>> {
      std::vector<NamedTensor> tensors;
      for (const Projection& projection : projections) {
        FMOE_RETURN_IF_ERROR(MakeProjection(projection.name, projection.rows, projection.cols,
                                            projection.input_amax, executor, tensors));
        if (bias) {
          const std::string bias_name = projection.name + ".bias";
          FMOE_ASSIGN_OR_RETURN(Tensor tensor, RandomTensor(options_.seed, bias_name, options_.dtype,
                                                            {projection.rows}, 0.1F, executor));
          tensors.push_back({bias_name, std::move(tensor)});
        }
      }
      return tensors;
    };
    units_.push_back(std::move(unit));
  }

  Status MakeProjection(const std::string& name, int64_t rows, int64_t cols, float input_amax,
                        const Executor& executor, std::vector<NamedTensor>& out) const {
    FMOE_ASSIGN_OR_RETURN(Tensor weights, RandomTensor(options_.seed, name + ".weight", options_.dtype,
                                                       {rows, cols}, FanIn(cols), executor));
    if (storage_ == nullptr) {
      out.push_back({name + ".weight", std::move(weights)});
      return Status::Ok();
    }
    WeightQuantizerOptions quantizer;
    quantizer.recipe = storage_->producer == "compressed-tensors" ? WeightRecipe::kCompressedTensors
                                                                  : WeightRecipe::kModelOpt;
    auto matrix = QuantizeMatrix(weights.view(), scheme_.weight, quantizer);
    if (!matrix.ok()) {
      return std::move(matrix).status().WithTensor(name);
    }
    matrix->input_tensor_scale = input_amax / InputRange();
    FMOE_ASSIGN_OR_RETURN(std::vector<NamedTensor> tensors,
                          checkpoint::Store(*storage_, *matrix, StorageOptions{}, name));
    std::move(tensors.begin(), tensors.end(), std::back_inserter(out));
    return Status::Ok();
  }

  // amax / range is the stored scale: one level, or the second above e4m3 block scales.
  float InputRange() const {
    const ActivationFormat& format = scheme_.activation;
    if (!format.quantized()) {
      return 1.0F;
    }
    return LargestValue(*format.element) * (format.scale_dtype == DType::kF8E4M3 ? 448.0F : 1.0F);
  }

  const SampleOptions& options_;
  const FamilyRow& family_;
  const Sizes sizes_;
  const Scheme& scheme_;
  const StorageRow* storage_;
  std::vector<Unit> units_;
};

std::string_view TorchName(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kF16 ? "float16" : "bfloat16";
}

std::vector<std::string> Unquantized(const FamilyRow& family, const Sizes& sizes) {
  std::vector<std::string> modules = {"lm_head", "model.embed_tokens"};
  for (int64_t layer = 0; layer < sizes.num_layers; ++layer) {
    modules.push_back(fmt::format("model.layers.{}.{}.{}", layer, family.block, family.router));
    for (const char* projection : {"fc1_latent_proj", "fc2_latent_proj"}) {
      if (sizes.latent > 0) {
        modules.push_back(fmt::format("model.layers.{}.{}.{}", layer, family.block, projection));
      }
    }
    if (family.shared_gate) {
      modules.push_back(fmt::format("model.layers.{}.{}.{}_gate", layer, family.block, family.shared));
    }
  }
  return modules;
}

Json ConfigOf(const SampleOptions& options, const FamilyRow& family, const Sizes& sizes, const Scheme& scheme,
              const StorageRow* storage) {
  Json json = {{"architectures", {std::string(family.architecture)}},
               {"model_type", family.family.name},
               {"dtype", TorchName(options.dtype)},
               {"hidden_act", "silu"},
               {"hidden_size", sizes.hidden},
               {"num_hidden_layers", sizes.num_layers},
               {"num_experts_per_tok", sizes.top_k},
               {"vocab_size", 32}};
  json.update(Json::parse(family.config(sizes)));
  if (storage != nullptr) {
    json["quantization_config"] =
        Json::parse(storage->config(scheme, {.ignored = Unquantized(family, sizes)}));
  }
  return json;
}

Status CheckSize(std::string_view name, int64_t value, int64_t largest = kLargestSize) {
  if (value < 1 || value > largest) {
    return Status::Usage(fmt::format("{}={} is outside 1..{}", name, value, largest));
  }
  return Status::Ok();
}

Result<Sizes> SizesOf(const SampleOptions& options, const SampleFamily& family) {
  const auto pick = [](int64_t given, int64_t own) { return given == 0 ? own : given; };
  Sizes sizes{pick(options.hidden, family.hidden),
              pick(options.intermediate, family.intermediate),
              pick(options.num_experts, family.num_experts),
              pick(options.top_k, family.top_k),
              options.num_layers,
              pick(options.latent, family.latent)};
  if (options.latent != 0 && family.latent == 0) {
    return Status::Usage(
        fmt::format("latent={}: the experts of {} read the hidden states", options.latent, family.name));
  }
  FMOE_RETURN_IF_ERROR(CheckSize("hidden", sizes.hidden));
  FMOE_RETURN_IF_ERROR(CheckSize("rows of experts", sizes.expert_hidden()));
  FMOE_RETURN_IF_ERROR(CheckSize("intermediate", sizes.intermediate));
  FMOE_RETURN_IF_ERROR(CheckSize("experts", sizes.num_experts, kMaxRoutedExperts));
  FMOE_RETURN_IF_ERROR(CheckSize("layers", sizes.num_layers));
  FMOE_RETURN_IF_ERROR(CheckSize("tokens", options.num_tokens));
  if (options.top_k == 0) {
    sizes.top_k = std::min(sizes.top_k, sizes.num_experts);
  }
  if (sizes.top_k < 1 || sizes.top_k > sizes.num_experts) {
    return Status::Usage(
        fmt::format("top_k={} is outside 1..{}, the number of experts", sizes.top_k, sizes.num_experts));
  }
  if (family.name == "llama4_text" && sizes.top_k != 1) {
    return Status::Usage(fmt::format(
        "top_k={}: Llama-4 weighs the input of its experts, so that a token has one", sizes.top_k));
  }
  return sizes;
}

// Bare "int4_w4a16" means groups of 128, or the largest that divides both sizes.
Result<Scheme> SchemeFor(const std::string& name, const Sizes& sizes) {
  if (name == "int4_w4a16") {
    for (const int64_t group : {128, 64, 32}) {
      if (sizes.hidden % group == 0 && sizes.expert_hidden() % group == 0 &&
          sizes.intermediate % group == 0) {
        return ParseScheme(fmt::format("{}:g{}", name, group));
      }
    }
  }
  return ParseScheme(name);
}

Result<const StorageRow*> StorageFor(const Scheme& scheme, const FamilyRow& family) {
  if (scheme.name == "unquantized") {
    return nullptr;
  }
  const StorageRow* row =
      checkpoint::FindStorage(scheme, family.compressed_tensors ? "compressed-tensors" : "modelopt");
  if (row == nullptr) {
    return Status::Unsupported(
        fmt::format("no layout of scheme '{}' is known here; there are unquantized, {}", scheme.name,
                    checkpoint::StorableSchemes()));
  }
  return row;
}

}  // namespace

Result<SampleReport> WriteSample(const SampleOptions& options) {
  const FamilyRow* family = sample::FindFamily(options.family);
  if (family == nullptr) {
    std::string names;
    for (const SampleFamily& known : SampleFamilies()) {
      names += fmt::format("{}{}", names.empty() ? "" : ", ", known.name);
    }
    return Status::Usage(fmt::format("family '{}' does not exist; there are {}", options.family, names));
  }
  if (options.dtype != DType::kBF16 && options.dtype != DType::kF16 && options.dtype != DType::kF32) {
    return Status::Usage(fmt::format("dtype {} is none of BF16, F16, F32", DTypeName(options.dtype)));
  }
  FMOE_ASSIGN_OR_RETURN(const Sizes sizes, SizesOf(options, family->family));
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme, SchemeFor(options.scheme, sizes));
  FMOE_ASSIGN_OR_RETURN(const StorageRow* const storage, StorageFor(scheme, *family));

  if (storage != nullptr) {
    const int64_t word = checkpoint::ColumnsOfAWord(*storage, scheme.weight);
    for (const auto& [name, size] : {std::pair("hidden", sizes.hidden),
                                     {"latent", sizes.latent},
                                     {"intermediate", sizes.intermediate}}) {
      if (size % word != 0) {
        return Status::Usage(fmt::format("{}={} is no multiple of {}, which {} stores in one word", name,
                                         size, word, scheme.name));
      }
    }
  }
  FMOE_ASSIGN_OR_RETURN(const auto output, jobs::OutputCheckpoint::Create({.directory = options.directory,
                                                                           .overwrite = options.overwrite}));
  FMOE_RETURN_IF_ERROR(
      output->WriteText("config.json", ConfigOf(options, *family, sizes, scheme, storage).dump(2) + "\n"));
  if (storage != nullptr && storage->side_file != nullptr) {
    const std::string text = storage->side_file(scheme, {.ignored = Unquantized(*family, sizes)});
    FMOE_RETURN_IF_ERROR(output->WriteText("hf_quant_config.json", Json::parse(text).dump(2) + "\n"));
  }
  UnitList list(options, *family, sizes, scheme, storage);
  jobs::WriteOptions how;
  how.max_shard_bytes = options.max_shard_bytes;
  how.executor = options.executor;
  how.hash = false;
  FMOE_RETURN_IF_ERROR(output->WriteWeights(list.Units(), how));
  SampleReport report;
  report.bytes = output->bytes();
  report.input_file = "io/input.safetensors";
  FMOE_ASSIGN_OR_RETURN(Tensor hidden,
                        RandomTensor(options.seed, "hidden_states", options.dtype,
                                     {options.num_tokens, sizes.hidden}, 1.0F, options.executor));
  const NamedTensor input{"hidden_states", std::move(hidden)};
  FMOE_RETURN_IF_ERROR(output->WriteTensors(report.input_file, std::span(&input, 1)));
  FMOE_RETURN_IF_ERROR(output->Commit());
  report.files = output->files();
  report.producer = storage == nullptr ? "none" : storage->producer;
  report.hidden = sizes.hidden;
  report.latent = sizes.latent;
  report.intermediate = sizes.intermediate;
  report.num_experts = sizes.num_experts;
  report.top_k = sizes.top_k;
  return report;
}

}  // namespace fusedmoe
