#pragma once

#include <string>

#include <fusedmoe/checkpoint.hpp>

/// What a prepared file says about its layer, as JSON text in its metadata. Reading is strict: a field that
/// is missing, of another kind or out of range is kBadInput with its path.
namespace fusedmoe::prepared {

std::string ConfigText(const MoeConfig& config);
Result<MoeConfig> ParseConfig(const std::string& text);

std::string SchemeText(const Scheme& scheme);
Result<Scheme> ParseSchemeText(const std::string& text);

/// Where the layer came from: "layer", "family", "producer".
std::string SourceText(const LayerDescription& description);
Status ParseSource(const std::string& text, LayerDescription& description);

/// The shared expert: its scheme, whether it has a gate projection, the format of each matrix.
struct SharedDescription {
  Scheme scheme;
  bool gated = true;
  WeightFormat gate, up, down;
};
std::string SharedText(const SharedDescription& shared);
Result<SharedDescription> ParseSharedText(const std::string& text);

}  // namespace fusedmoe::prepared
