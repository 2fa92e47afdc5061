#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <fusedmoe/status.hpp>

#include "checkpoint/files/json_reader.hpp"

namespace fusedmoe::checkpoint {

class TensorStore;

/// The path of `name` in `directory`, refused (kBadInput) when it leaves the directory: absolute, with "..",
/// or through a symbolic link (links into the blobs of a Hugging Face cache are its normal form, and
/// accepted).
Result<std::string> ResolveInside(const std::string& directory, std::string_view name);

/// Files of a directory to read tensors from: "model.safetensors", "consolidated.safetensors", ... first,
/// else every file of that kind. Where an index says which they are, its name instead.
Result<std::vector<std::string>> FindSafetensors(const std::string& directory, std::string* index_name);

/// Which shard holds which tensor, by "model.safetensors.index.json".
struct TensorIndex {
  std::string path;
  std::string text;  // the views below point into it, or into `reader`
  std::unique_ptr<JsonReader> reader;
  std::unordered_map<std::string_view, std::string_view> file_of;  // tensor -> shard
  std::vector<std::string> files;                                  // in order of first use
};

Status ReadIndex(const std::string& directory, const std::string& name, TensorIndex* index);
/// The files that an index names, without those that are missing where that is allowed.
Result<std::vector<std::string>> ShardsOf(const TensorIndex& index, const std::string& directory,
                                          bool allow_partial);
/// Index and shards hold the same tensors in the same files; with `allow_partial` some may be missing from
/// either.
Status CheckIndex(const TensorIndex& index, const TensorStore& store, bool allow_partial);

}  // namespace fusedmoe::checkpoint
