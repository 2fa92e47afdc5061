#include <fusedmoe/jobs/sample.hpp>

#include <algorithm>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/routing.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/files/config_files.hpp"
#include "checkpoint/storage/storage.hpp"
#include "core/names.hpp"
#include "jobs/common/output_checkpoint.hpp"
#include "jobs/sample/families.hpp"
#include "jobs/sample/units.hpp"
#include "numerics/element_types.hpp"

namespace fusedmoe {
namespace {

using Json = nlohmann::ordered_json;
using checkpoint::StorageRow;
using sample::FamilyRow;
using sample::Sizes;

// A size that no model has, and whose products with the others stay far from overflow.
constexpr int64_t kLargestSize = int64_t{1} << 20;

std::string_view TorchName(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kF16 ? "float16" : "bfloat16";
}

std::vector<std::string> Unquantized(const FamilyRow& family, const Sizes& sizes) {
  std::vector<std::string> modules = {"lm_head", "model.embed_tokens"};
  for (int64_t layer = 0; layer < sizes.num_layers; ++layer) {
    modules.push_back(fmt::format("model.layers.{}.{}.{}", layer, family.block, family.router));
    for (const std::string_view projection : {family.to_latent, family.from_latent}) {
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
  if (family.name == "phimoe" && sizes.top_k != 2) {
    return Status::Usage(
        fmt::format("top_k={}: the router of Phi-MoE chooses two experts a token", sizes.top_k));
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
    return UnknownName("family", options.family, JoinNames(SampleFamilies(), &SampleFamily::name));
  }
  if (!IsPlainFloat(options.dtype)) {
    return Status::Usage(fmt::format("dtype {} is none of BF16, F16, F32", DTypeName(options.dtype)));
  }
  FMOE_ASSIGN_OR_RETURN(const Sizes sizes, SizesOf(options, family->family));
  FMOE_ASSIGN_OR_RETURN(const Scheme scheme, SchemeFor(options.scheme, sizes));
  FMOE_ASSIGN_OR_RETURN(const StorageRow* const storage, StorageFor(scheme, *family));
  FMOE_ASSIGN_OR_RETURN(const auto output, jobs::OutputCheckpoint::Create({.directory = options.directory,
                                                                           .overwrite = options.overwrite}));
  FMOE_RETURN_IF_ERROR(output->WriteText(checkpoint::kModelConfigFile,
                                         ConfigOf(options, *family, sizes, scheme, storage).dump(2) + "\n"));
  if (storage != nullptr && storage->side_file != nullptr) {
    const std::string text = storage->side_file(scheme, {.ignored = Unquantized(*family, sizes)});
    FMOE_RETURN_IF_ERROR(
        output->WriteText(checkpoint::kModelOptConfigFile, Json::parse(text).dump(2) + "\n"));
  }
  jobs::WriteOptions how;
  how.max_shard_bytes = options.max_shard_bytes;
  how.executor = options.executor;
  how.hash = false;
  FMOE_RETURN_IF_ERROR(output->WriteWeights(sample::UnitsOf(options, *family, sizes, scheme, storage), how));
  SampleReport report;
  report.bytes = output->bytes();
  report.input_file = "io/input.safetensors";
  FMOE_ASSIGN_OR_RETURN(Tensor hidden,
                        sample::RandomTensor(options.seed, "hidden_states", options.dtype,
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
