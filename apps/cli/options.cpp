#include "options.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>

#include <fmt/format.h>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/tune.hpp>
#include <fusedmoe/machine.hpp>

namespace fusedmoe::cli {
namespace {

constexpr int64_t kMaxLayer = 1 << 20;
constexpr const char* kThreadsVariable = "FUSEDMOE_THREADS";

Status NotWritten(const std::string& path, int error) {
  return Status::System(fmt::format("cannot be written: {}", std::strerror(error))).WithFile(path);
}

/// 0, or the error of the system.
int Put(const std::filesystem::path& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  return file ? 0 : errno != 0 ? errno : EIO;
}

/// The same by a file beside it, so that what stands there stays until the new text is whole. Nothing where
/// only writing in place is possible: a device, a pipe, a link to nothing, a mount point, a folder that must
/// not be written.
std::optional<int> Replace(const std::string& path, const std::string& text) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status before = fs::status(path, error);
  const bool there = fs::exists(before);
  if (there ? !fs::is_regular_file(before) : fs::is_symlink(fs::symlink_status(path, error))) {
    return std::nullopt;
  }
  const fs::path target = there ? fs::canonical(path, error) : fs::path(path);  // links stay
  fs::path beside = target;
  beside += fmt::format(".{}.incomplete", getpid());
  const int created = open(beside.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0666);
  if (created < 0) {
    return std::nullopt;
  }
  close(created);
  const int reason = Put(beside, text);
  if (reason == 0) {
    if (there) {
      fs::permissions(beside, before.permissions(), error);
    }
    fs::rename(beside, target, error);
    if (!error) {
      return 0;
    }
  }
  std::error_code ignored;
  fs::remove(beside, ignored);
  return reason == 0 ? std::nullopt : std::optional(reason);
}

/// kUsage where something other than a folder stands at `path`.
Status CheckFolder(const char* option, const std::string& path) {
  std::error_code ignored;
  const bool other = std::filesystem::exists(path, ignored) && !std::filesystem::is_directory(path, ignored);
  return other ? Status::Usage(fmt::format("{} names a folder, and this is none", option)).WithFile(path)
               : Status::Ok();
}

}  // namespace

Result<std::vector<std::string>> SplitList(std::string_view option, const std::string& text) {
  std::vector<std::string> words;
  for (size_t begin = 0; !text.empty() && begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    if (end == begin) {
      return Status::Usage(
          fmt::format("{} '{}' has an empty entry; a comma stands between two", option, text));
    }
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

CLI::Validator Between(double least, double most) {
  return CLI::Validator(
      [least, most](std::string& text) {
        double value = 0;
        const bool within = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
        return within ? std::string() : fmt::format("{} is not a number from {} to {}", text, least, most);
      },
      fmt::format("FLOAT in [{} - {}]", least, most));
}

Status WriteText(const std::string& path, const std::string& text) {
  std::optional<int> reason = Replace(path, text);
  if (!reason) {
    reason = Put(path, text);
  }
  return *reason == 0 ? Status::Ok() : NotWritten(path, *reason);
}

Status CheckPlace(const std::string& path) {
  if (path.empty()) {
    return Status::Ok();
  }
  std::error_code ignored;
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  const auto refused = [](const std::filesystem::path& place, int wanted) {
    return faccessat(AT_FDCWD, place.c_str(), wanted, AT_EACCESS) == 0 ? 0 : errno;
  };
  const int reason = std::filesystem::is_directory(path, ignored) ? EISDIR
                     : std::filesystem::is_socket(path, ignored)  ? ENXIO
                     : std::filesystem::exists(path, ignored)
                         ? refused(path, W_OK)
                         : refused(folder.empty() ? "." : folder, W_OK | X_OK);
  return reason == 0 ? Status::Ok() : NotWritten(path, reason);
}

Status CheckOutput(const std::string& output, const std::string& input) {
  std::error_code ignored;
  return std::filesystem::equivalent(output, input, ignored)
             ? Status::Usage("the output would replace a file that is read").WithFile(output)
             : Status::Ok();
}

Status CheckOutput(const std::string& output, const Checkpoint& checkpoint) {
  return CheckOutput(output, checkpoint.Files());
}

Status CheckOutput(const std::string& output, const std::vector<std::string>& inputs) {
  for (const std::string& input : inputs) {
    FMOE_RETURN_IF_ERROR(CheckOutput(output, input));
  }
  return Status::Ok();
}

Status CheckReplaced(const std::string& folder, const std::string& input) {
  std::error_code ignored;
  for (std::filesystem::path place = std::filesystem::canonical(input, ignored); place.has_relative_path();
       place = place.parent_path()) {
    if (std::filesystem::equivalent(place, folder, ignored)) {
      return Status::Usage("the folder would be replaced, and holds a file that is read")
          .WithFile(input)
          .WithHint("choose another folder");
    }
  }
  return Status::Ok();
}

namespace {

// CLI::Range takes a number beyond 64 bits for the largest one, and calls a word a value out of range.
CLI::Validator WholeNumber(int64_t low, int64_t high) {
  CLI::Validator check = CLI::Range(low, high);  // its words for --help
  check.operation([low, high](std::string& text) {
    int64_t value = 0;
    const char* const end = text.data() + text.size();
    const auto [parsed, error] = std::from_chars(text.data(), end, value);
    return error == std::errc() && parsed == end && value >= low && value <= high
               ? std::string()
               : fmt::format("'{}' is no integer from {} to {}", text, low, high);
  });
  return check;
}

}  // namespace

void AddThreads(CLI::App& app, int& threads) {
  const CLI::Validator range = WholeNumber(0, ThreadPool::kMaxThreads);
  const CLI::Option* option =
      app.add_option(
             "--threads", threads,
             fmt::format("Threads of the CPU kernels; 0: one per usable core (or {})", kThreadsVariable))
          ->check(range);
  // Read where a command has the option and it is not given. The parser's own envname() would blame
  // --threads, and for a command that has no such option.
  app.parse_complete_callback([option, range, &threads] {
    const char* value = std::getenv(kThreadsVariable);
    if (option->count() > 0 || value == nullptr || *value == '\0') {
      return;
    }
    std::string text = value;
    if (const std::string error = range(text); !error.empty()) {
      throw CLI::ValidationError(kThreadsVariable, error);
    }
    threads = std::stoi(text);
  });
}

CLI::Option* AddLayer(CLI::App& app, std::optional<int64_t>& layer, const std::string& about) {
  return app.add_option("--layer", layer, about)->check(WholeNumber(0, kMaxLayer));
}

void AddNewCheckpoint(CLI::App& app, int64_t& max_shard_bytes, bool& overwrite) {
  app.add_option("--max-shard-bytes", max_shard_bytes, "Largest safetensors file")
      ->check(WholeNumber(1, INT64_MAX));
  app.add_flag("--force", overwrite,
               "Replace a checkpoint that stands there: the whole folder, with all that is in it");
}

void AddSeed(CLI::App& app, uint64_t& seed, const std::string& about) {
  app.add_option("--seed", seed, about)->check(WholeNumber(0, INT64_MAX));
}

void AddCheckpoint(CLI::App& app, CheckpointFlags& flags, bool required, const std::string& about) {
  app.add_option("checkpoint", flags.directory, about)->required(required);
  app.add_option("--io", flags.io, "How files are read: auto, mmap, pread");
  app.add_option(
      "--expert-layout", flags.expert_layout,
      "Axes of fused expert tensors where the family is not enough: in_out or out_in, with ,interleaved or "
      ",chunked");
  app.add_flag("--allow-partial", flags.allow_partial, "Accept an index that names tensors no shard holds");
}

Result<CheckpointOptions> Resolve(const CheckpointFlags& flags) {
  CheckpointOptions options;
  if (flags.io == "mmap") {
    options.io = IoMode::kMmap;
  } else if (flags.io == "pread") {
    options.io = IoMode::kPread;
  } else if (flags.io != "auto") {
    return UnknownName("io mode", flags.io, "auto, mmap, pread");
  }
  options.expert_layout = flags.expert_layout;
  options.allow_partial = flags.allow_partial;
  return options;
}

std::string IdleWithoutCheckpoint(const CheckpointFlags& flags) {
  return !flags.expert_layout.empty() ? "--expert-layout"
         : flags.allow_partial        ? "--allow-partial"
         : flags.io != "auto"         ? "--io"
                                      : "";
}

Result<std::shared_ptr<const Checkpoint>> OpenCheckpoint(const CheckpointFlags& flags, bool decode_blocks) {
  FMOE_ASSIGN_OR_RETURN(CheckpointOptions options, Resolve(flags));
  options.decode_blocks = decode_blocks;
  return Checkpoint::Open(flags.directory, options);
}

Result<int64_t> ResolveLayer(const std::optional<int64_t>& layer, const Checkpoint& checkpoint) {
  const std::vector<int64_t>& layers = checkpoint.moe_layers();
  if (layers.empty()) {
    return Status::BadInput("no layer of the checkpoint has experts").WithFile(checkpoint.directory());
  }
  if (!layer && layers.size() == 1) {
    return layers.front();
  }
  if (layer && std::find(layers.begin(), layers.end(), *layer) != layers.end()) {
    return *layer;
  }
  // A layer whose tensors contradict config.json is not the caller's mistake.
  if (const Status status = layer ? checkpoint.Describe(*layer).status() : Status::Ok();
      status.code() == StatusCode::kBadInput) {
    return status;
  }
  const std::string have = fmt::format("layers with experts: {}", fmt::join(layers, ", "));
  return layer ? Status::Usage(fmt::format("layer {} has no experts; {}", *layer, have))
               : Status::Usage(fmt::format("--layer is required; {}", have));
}

void AddPlan(CLI::App& app, PlanFlags& flags) {
  app.add_option("--device", flags.device, "cpu or cuda");
  app.add_option("--backend", flags.backend, "Use this backend or fail (fusedmoe backends lists them)");
  app.add_option("--isa", flags.isa, "Force the instruction set of the CPU kernels");
  app.add_option("--mode", flags.mode, "Force latency or throughput");
  app.add_option("--determinism", flags.determinism, DeterminismNames());
  app.add_option("--activation", flags.activation,
                 "a8 lets weight-only layers multiply with activations of 8 bits, and FP8 add up in f16");
  app.add_option("--activation-format", flags.activation_format, ActivationFormatNames());
  AddTune(app, flags.tune);
}

void AddActivationRule(CLI::App& app, std::string& name) {
  app.add_option("--activation-rule", name,
                 "Quantize activations as another program does, by a rule of docs/numerics.md (vllm_nvfp4)");
}

void AddPackCache(CLI::App& app, std::string& directory) {
  app.add_option("--pack-cache", directory,
                 "Keep packed weights in this folder, and map them from there the next time");
}

void AddTune(CLI::App& app, std::string& file) {
  app.add_option("--tune", file, "Choose kernels by the figures that `fusedmoe tune` wrote to this file");
}

Result<std::shared_ptr<const CpuCosts>> ReadTune(const std::string& file) {
  if (file.empty()) {
    return std::shared_ptr<const CpuCosts>();
  }
  FMOE_ASSIGN_OR_RETURN(CpuCosts costs, ReadCpuCosts(file));
  return std::make_shared<const CpuCosts>(std::move(costs));
}

std::string IdleTune(const PlanFlags& flags, const std::string& backend, const std::string& costs) {
  if (flags.tune.empty() || costs.starts_with("measured here")) {
    return "";
  }
  return fmt::format("--tune has no effect: {}", costs.empty()
                                                     ? fmt::format("{} chooses by no figures", backend)
                                                     : "the file lacks these kernels, figures are " + costs);
}

Result<LayerOptions> Resolve(const PlanFlags& flags) {
  LayerOptions options;
  FMOE_ASSIGN_OR_RETURN(options.cpu_costs, ReadTune(flags.tune));
  FMOE_RETURN_IF_ERROR(CheckFolder("--pack-cache", flags.pack_cache));
  options.pack_cache = flags.pack_cache;
  if (flags.device != "cpu" && flags.device != "cuda") {
    return UnknownName("device", flags.device, "cpu, cuda");
  }
  options.device = flags.device;
  options.backend = flags.backend;
  if (!flags.isa.empty() && !ParseIsa(flags.isa)) {
    return UnknownName("isa", flags.isa, fusedmoe::IsaNames());
  }
  options.isa = flags.isa;
  if (!flags.mode.empty() && flags.mode != "latency" && flags.mode != "throughput") {
    return UnknownName("mode", flags.mode, "latency, throughput");
  }
  options.mode = flags.mode;
  const std::optional<Determinism> determinism = ParseDeterminism(flags.determinism);
  if (!determinism) {
    return UnknownName("determinism level", flags.determinism, DeterminismNames());
  }
  options.determinism = *determinism;
  if (flags.activation == "a8") {
    options.activation = ActivationMode::kA8;
  } else if (flags.activation != "as_checkpoint") {
    return UnknownName("activation", flags.activation, "as_checkpoint, a8");
  }
  options.activation_rule = flags.activation_rule;
  if (!flags.activation_format.empty()) {
    const std::optional<ActivationFormatKind> format = ParseActivationFormat(flags.activation_format);
    if (!format) {
      return UnknownName("activation format", flags.activation_format, ActivationFormatNames());
    }
    options.activation_format = *format;
  }
  return options;
}

}  // namespace fusedmoe::cli
