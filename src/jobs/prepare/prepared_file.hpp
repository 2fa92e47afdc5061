#pragma once

#include <optional>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/jobs/prepare.hpp>
#include <fusedmoe/safetensors.hpp>

#include "moe/backend.hpp"
#include "weights/steps/fused_expert.hpp"

/// A prepared file: safetensors whose metadata says everything that running it needs.
///
///   format, backend, layout_key, recipe, layout_error    which layout, and how it came about
///   config, scheme, quant_config, source                 MoeConfig, Scheme, layer and family
///   tensors                                              dtype and shape [experts, ...] of each prepared one
///   shared                                               scheme and sizes of the shared expert, if any
///   digests                                              128 bits of SHA-256 of each tensor, by expert
///   metadata_digest                                      SHA-256 of all of the above
namespace fusedmoe::prepared {

inline constexpr const char* kFormat = "fusedmoe.prepared/1";
inline constexpr const char* kCanonicalKey = "canonical";

struct PreparedFile {
  LayerDescription description;  ///< layer, family, producer, config, scheme
  std::string backend;
  PreparedWeights weights;
  RouterWeights router;
  std::optional<SharedExpertWeights> shared;
  std::optional<LatentWeights> latent;
  /// By tensor: one digest for each expert (prepared ones), or one (all others).
  std::vector<std::pair<std::string, std::vector<std::string>>> digests;
};

/// Writes `file` (its digests are made anew, in `executor`).
Status WritePreparedFile(const PreparedFile& file, const std::string& path, const Executor& executor);

/// Reads and checks everything but the digests of tensors: the file is untrusted.
Result<PreparedFile> ReadPreparedFile(const std::string& path);

/// The digest of all fields except itself.
std::string MetadataDigest(const SafetensorsMetadata& metadata);

/// Puts the digest of all other fields into the metadata.
void Seal(SafetensorsMetadata& metadata);

/// Router, projections and shared expert: what the file carries beside the layout.
Result<std::vector<NamedTensor>> OtherTensors(const PreparedFile& file);

/// Dense memory, so that digests, files and comparisons see the bytes one after another.
Result<Tensor> Dense(const Tensor& tensor);

/// Where tensors do not have the digest that the metadata promises.
std::vector<DamagedTensor> FindDamage(const PreparedFile& file, const Executor& executor);

/// The canonical tensors of all experts as a layout of their own, with no steps.
Result<PreparedWeights> StackCanonical(const ExpertSource& source);

/// Whether two formats have the same codes and kinds of scales; types of scales may differ.
bool SameKind(const WeightFormat& a, const WeightFormat& b);

/// Sizes of an expert without its layout.
FusedShape ShapeOf(const LayerDescription& description);

}  // namespace fusedmoe::prepared
