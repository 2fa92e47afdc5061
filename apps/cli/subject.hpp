#pragma once

#include <memory>
#include <optional>
#include <string>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/jobs/prepare.hpp>
#include <fusedmoe/layer.hpp>

#include "options.hpp"

namespace fusedmoe::cli {

/// The layer that a command is about: one of a checkpoint, or that of a prepared file. One of the two is set.
struct Subject {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const PreparedLayer> prepared;
  LayerDescription description;

  const std::string& path() const { return checkpoint ? checkpoint->directory() : prepared->path(); }
  int64_t layer() const { return description.layer; }
  Result<std::unique_ptr<MoeLayer>> Load(const LayerOptions& options) const;
  /// For the reference: from the checkpoint, or from what the prepared file leads back to.
  Result<std::unique_ptr<MoeLayer>> LoadCanonical(const LayerOptions& options) const;
  /// What a prepared file says about its backend, where nothing else was asked for. kUsage for flags that
  /// serve checkpoints only; `files` are those of the subject alone.
  Status Complete(const PlanFlags& flags, const CheckpointFlags& files, LayerOptions& options) const;
};

/// kUsage when `output` would replace a file that the subject is read from.
Status CheckOutput(const std::string& output, const Subject& subject);

/// Opens a directory or a GGUF file as a checkpoint and any other file as a prepared layer, whose own layer
/// number is the only one that `layer` may name.
Result<Subject> OpenSubject(const CheckpointFlags& flags, const std::optional<int64_t>& layer);

}  // namespace fusedmoe::cli
