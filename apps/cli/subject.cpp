#include "subject.hpp"

#include <filesystem>

#include <fmt/format.h>

namespace fusedmoe::cli {

Result<std::unique_ptr<MoeLayer>> Subject::Load(const LayerOptions& options) const {
  return checkpoint ? MoeLayer::Load(checkpoint, description.layer, options) : prepared->Load(options);
}

Result<std::unique_ptr<MoeLayer>> Subject::LoadCanonical(const LayerOptions& options) const {
  return checkpoint ? MoeLayer::Load(checkpoint, description.layer, options)
                    : prepared->LoadCanonical(options);
}

Status Subject::Complete(const PlanFlags& flags, const CheckpointFlags& files, LayerOptions& options) const {
  const std::string idle = !flags.pack_cache.empty() ? "--pack-cache" : IdleWithoutCheckpoint(files);
  if (prepared && !idle.empty()) {
    return Status::Usage(fmt::format("{} has no effect on a prepared file, which is read as it is", idle))
        .WithFile(path());
  }
  if (prepared && flags.activation_format.empty()) {
    options.activation_format = description.config.activation_format;
  }
  return Status::Ok();
}

Status CheckOutput(const std::string& output, const Subject& subject) {
  return subject.checkpoint ? CheckOutput(output, *subject.checkpoint) : CheckOutput(output, subject.path());
}

Result<Subject> OpenSubject(const CheckpointFlags& flags, const std::optional<int64_t>& layer) {
  Subject subject;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(flags.directory, ignored) || Checkpoint::IsFile(flags.directory)) {
    FMOE_ASSIGN_OR_RETURN(subject.checkpoint, OpenCheckpoint(flags));
    FMOE_ASSIGN_OR_RETURN(const int64_t index, ResolveLayer(layer, *subject.checkpoint));
    FMOE_ASSIGN_OR_RETURN(subject.description, subject.checkpoint->Describe(index));
    return subject;
  }
  auto prepared = PreparedLayer::Open(flags.directory);
  if (!prepared.ok() && prepared.status().hint().empty()) {  // config.json, say, or the index of shards
    return std::move(prepared).status().WithHint(
        "give the folder that holds config.json, a GGUF file, or a file that fusedmoe prepare wrote");
  }
  FMOE_ASSIGN_OR_RETURN(subject.prepared, std::move(prepared));
  subject.description = subject.prepared->description();
  if (layer && *layer != subject.layer()) {
    return Status::Usage(
        fmt::format("--layer {}: the prepared file holds layer {}", *layer, subject.layer()));
  }
  return subject;
}

}  // namespace fusedmoe::cli
