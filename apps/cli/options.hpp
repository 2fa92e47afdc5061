#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/problems.hpp>

#include "command.hpp"

namespace fusedmoe::cli {

/// Options that several commands share: each function adds them to a parser; names are resolved afterwards,
/// so that an unknown one is a Status that lists what exists.

/// The words of "a,b,c" that `option` has; none of an empty text. kUsage for an empty one among them.
Result<std::vector<std::string>> SplitList(std::string_view option, const std::string& text);

/// A number from `least` to `most`. CLI::Range lets "nan" pass.
CLI::Validator Between(double least, double most);

/// Writes a file of text, or to a pipe; a file that cannot be finished is removed, one that cannot be opened
/// stays as it is.
Status WriteText(const std::string& path, const std::string& text);
/// kSystem where WriteText could not make the file: asked before the minutes of work that fill it. Empty
/// paths are none to write.
Status CheckPlace(const std::string& path);
/// kUsage when the file `output` is `input`: what is written must not replace what is read.
Status CheckOutput(const std::string& output, const std::string& input);
/// The same for every file of a checkpoint.
Status CheckOutput(const std::string& output, const Checkpoint& checkpoint);
/// The same of several files; empty names are none.
Status CheckOutput(const std::string& output, const std::vector<std::string>& inputs);
/// kUsage when `folder`, which will be replaced, holds `input`.
Status CheckReplaced(const std::string& folder, const std::string& input);

/// --threads, or FUSEDMOE_THREADS.
void AddThreads(CLI::App& app, int& threads);

/// --layer.
CLI::Option* AddLayer(CLI::App& app, std::optional<int64_t>& layer,
                      const std::string& about = "Decoder layer; may be left out when only one has experts");

/// --max-shard-bytes and --force, of commands that write a checkpoint.
void AddNewCheckpoint(CLI::App& app, int64_t& max_shard_bytes, bool& overwrite);

/// --seed.
void AddSeed(CLI::App& app, uint64_t& seed, const std::string& about);

/// What stands behind the argument `checkpoint` in the help of commands that read one.
inline constexpr const char* kCheckpointHelp =
    "Directory with config.json and safetensors files, or a GGUF file";
inline constexpr const char* kCheckpointOrPreparedHelp =
    "Directory with config.json and safetensors files, a GGUF file, or a file that `prepare` wrote";

struct CheckpointFlags {
  std::string directory;
  std::string io = "auto";
  std::string expert_layout;
  bool allow_partial = false;
};
void AddCheckpoint(CLI::App& app, CheckpointFlags& flags, bool required,
                   const std::string& about = kCheckpointHelp);
Result<CheckpointOptions> Resolve(const CheckpointFlags& flags);
/// The first of these options that is given, for commands whose subject is no checkpoint; empty for none.
std::string IdleWithoutCheckpoint(const CheckpointFlags& flags);
/// `decode_blocks`: of commands that write weights anew (CheckpointOptions).
Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(const CheckpointFlags& flags,
                                                         bool decode_blocks = false);

/// The layer that was asked for, or the only one with experts. kUsage with those that exist.
Result<int64_t> ResolveLayer(const std::optional<int64_t>& layer, const Checkpoint& checkpoint);

/// What a plan may be forced to.
struct PlanFlags {
  std::string device = "cpu";
  std::string backend;
  std::string isa;
  std::string mode;
  std::string determinism = "thread_invariant";
  std::string activation = "as_checkpoint";
  std::string activation_rule;
  std::string activation_format = "standard";  ///< empty: not asked for
  std::string pack_cache;
  std::string tune;
};
void AddPlan(CLI::App& app, PlanFlags& flags);
/// --activation-rule, of commands that compute layers.
void AddActivationRule(CLI::App& app, std::string& name);
/// --pack-cache, of commands that load weights.
void AddPackCache(CLI::App& app, std::string& directory);
/// --tune, of commands that plan layers.
void AddTune(CLI::App& app, std::string& file);
/// The file of --tune; null where none was named.
Result<std::shared_ptr<const CpuCosts>> ReadTune(const std::string& file);
/// The layer options of these flags, with everything else at its default.
Result<LayerOptions> Resolve(const PlanFlags& flags);

/// Why --tune changed nothing for a layer that was planned with `costs` (Plan::costs); empty where it did, or
/// was not given.
std::string IdleTune(const PlanFlags& flags, const std::string& backend, const std::string& costs);

}  // namespace fusedmoe::cli
