#include "jobs/prepare/prepared_file.hpp"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/sha256.hpp"
#include "jobs/prepare/canonical_tensors.hpp"
#include "jobs/prepare/description.hpp"

namespace fusedmoe::prepared {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kDigestLength = 32;  // hexadecimal digits kept: a checksum, not a signature

std::string DigestOf(const std::byte* data, int64_t bytes) {
  Sha256 hash;
  hash.Add({data, static_cast<size_t>(bytes)});
  return hash.Finish().substr(0, kDigestLength);
}

std::vector<std::string> DigestsOf(const Tensor& tensor, bool by_expert, const Executor& executor) {
  const int64_t parts = by_expert ? tensor.dim(0) : 1;
  const int64_t bytes = tensor.view().total_bytes() / std::max<int64_t>(parts, 1);
  std::vector<std::string> digests(static_cast<size_t>(parts));
  ParallelFor(executor, parts, [&](int64_t part) {
    digests[static_cast<size_t>(part)] = DigestOf(tensor.view().data() + part * bytes, bytes);
  });
  return digests;
}

}  // namespace

Result<std::vector<NamedTensor>> OtherTensors(const PreparedFile& file) {
  std::vector<NamedTensor> tensors;
  for (const auto& [name, tensor] :
       {std::pair("router.weight", &file.router.weight), std::pair("router.bias", &file.router.bias),
        std::pair("router.correction_bias", &file.router.correction_bias),
        std::pair("router.token_id_to_experts", &file.router.token_id_to_experts)}) {
    if (!tensor->empty()) {
      tensors.push_back({name, *tensor});
    }
  }
  if (file.latent) {
    for (const auto& [name, tensor] : {std::pair("latent.to", &file.latent->to_latent),
                                       std::pair("latent.to_bias", &file.latent->to_latent_bias),
                                       std::pair("latent.from", &file.latent->from_latent),
                                       std::pair("latent.from_bias", &file.latent->from_latent_bias),
                                       std::pair("latent.norm", &file.latent->norm)}) {
      if (!tensor->empty()) {
        tensors.push_back({name, *tensor});
      }
    }
  }
  if (file.shared) {
    if (!file.shared->gate.empty()) {
      tensors.push_back({"shared.output_gate", file.shared->gate});
    }
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, file.shared->source.load(0));
    if (!expert.gate.empty()) {
      AppendMatrix("shared.gate", expert.gate, tensors);
    }
    AppendMatrix("shared.up", expert.up, tensors);
    AppendMatrix("shared.down", expert.down, tensors);
  }
  return tensors;
}

Result<Tensor> Dense(const Tensor& tensor) {
  if (tensor.view().dense()) {
    return tensor;
  }
  FMOE_ASSIGN_OR_RETURN(Tensor copy, Tensor::Allocate(tensor.dtype(), tensor.shape()));
  const int64_t bytes = tensor.view().row_bytes();
  for (int64_t row = 0; row < tensor.dim(0); ++row) {
    std::copy_n(tensor.view().data() + row * tensor.view().stride_bytes(0), bytes,
                copy.mutable_view().data() + row * bytes);
  }
  return copy;
}

namespace {

Json DescribeTensors(const PreparedWeights& weights) {
  Json json = Json::object();
  for (const PreparedWeights::Named& named : weights.tensors) {
    json[named.name] = {{"dtype", std::string(DTypeName(named.tensor.dtype()))},
                        {"shape", std::vector<int64_t>(named.tensor.shape().dims().begin(),
                                                       named.tensor.shape().dims().end())}};
  }
  return json;
}

}  // namespace

bool SameKind(const WeightFormat& a, const WeightFormat& b) {
  return a.element == b.element && a.block == b.block && a.has_channel_scale == b.has_channel_scale &&
         a.has_tensor_scale == b.has_tensor_scale;
}

FusedShape ShapeOf(const LayerDescription& description) {
  const MoeConfig& config = description.config;
  return {config.expert_hidden(), config.intermediate, config.activation.gated(), description.scheme.weight};
}

std::string MetadataDigest(const SafetensorsMetadata& metadata) {
  Sha256 hash;
  for (const auto& [key, value] : metadata) {
    if (key != "metadata_digest") {
      // Lengths first, so that no two lists of fields read alike.
      const std::string head = fmt::format("{} {} ", key.size(), value.size());
      hash.Add(std::as_bytes(std::span(head)));
      hash.Add(std::as_bytes(std::span(key)));
      hash.Add(std::as_bytes(std::span(value)));
    }
  }
  return hash.Finish();
}

void Seal(SafetensorsMetadata& metadata) {
  metadata["metadata_digest"] = MetadataDigest(metadata);
}

Status WritePreparedFile(const PreparedFile& file, const std::string& path, const Executor& executor) {
  std::vector<NamedTensor> stored;
  Json digests = Json::object();
  for (const PreparedWeights::Named& named : file.weights.tensors) {
    stored.push_back(AsStored(named.name, named.tensor));
    digests[named.name] = DigestsOf(named.tensor, true, executor);
  }
  FMOE_ASSIGN_OR_RETURN(const std::vector<NamedTensor> others, OtherTensors(file));
  for (const NamedTensor& other : others) {
    FMOE_ASSIGN_OR_RETURN(Tensor dense, Dense(other.tensor));
    digests[other.name] = DigestsOf(dense, false, executor);
    stored.push_back({other.name, std::move(dense)});
  }
  SafetensorsMetadata metadata = {{"format", kFormat},
                                  {"backend", file.backend},
                                  {"layout_key", file.weights.layout_key},
                                  {"recipe", Json(file.weights.recipe).dump()},
                                  {"layout_error", Json(file.weights.layout_error).dump()},
                                  {"scheme", file.description.scheme.name},
                                  {"config", ConfigText(file.description.config)},
                                  {"quant_config", SchemeText(file.description.scheme)},
                                  {"source", SourceText(file.description)},
                                  {"tensors", DescribeTensors(file.weights).dump()},
                                  {"digests", digests.dump()}};
  if (file.shared) {
    FMOE_ASSIGN_OR_RETURN(const CanonicalExpert expert, file.shared->source.load(0));
    metadata["shared"] = SharedText({file.shared->source.scheme, !expert.gate.empty(), expert.gate.format,
                                     expert.up.format, expert.down.format});
  }
  Seal(metadata);
  return WriteSafetensors(path, stored, metadata);
}

std::vector<DamagedTensor> FindDamage(const PreparedFile& file, const Executor& executor) {
  std::vector<DamagedTensor> damaged;
  const Result<std::vector<NamedTensor>> read = OtherTensors(file);
  if (!read.ok()) {
    damaged.push_back({-1, "shared", read.status().ToString()});
    return damaged;
  }
  const std::vector<NamedTensor>& others = *read;
  for (const auto& [name, promised] : file.digests) {
    const Tensor* tensor = file.weights.Find(name);
    const bool by_expert = tensor != nullptr;
    if (!by_expert) {
      const auto found = std::find_if(others.begin(), others.end(), [&name = name](const NamedTensor& other) {
        return other.name == name;
      });
      tensor = found == others.end() ? nullptr : &found->tensor;
    }
    if (tensor == nullptr) {
      damaged.push_back({-1, name, "nothing of the layer has this name"});
      continue;
    }
    const std::vector<std::string> actual = DigestsOf(*tensor, by_expert, executor);
    for (size_t part = 0; part < actual.size(); ++part) {
      if (actual[part] != promised[part]) {
        damaged.push_back({by_expert ? static_cast<int64_t>(part) : -1, name,
                           fmt::format("its digest is {}, the file promises {}", actual[part].substr(0, 12),
                                       promised[part].substr(0, 12))});
      }
    }
  }
  std::stable_sort(damaged.begin(), damaged.end(),
                   [](const DamagedTensor& a, const DamagedTensor& b) { return a.expert < b.expert; });
  return damaged;
}

}  // namespace fusedmoe::prepared
