#include "jobs/common/output_checkpoint.hpp"

#include <filesystem>
#include <mutex>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "jobs/common/sha256.hpp"
#include "platform/file.hpp"

namespace fusedmoe::jobs {
namespace {

namespace fs = std::filesystem;
// Tells a directory that a killed run left behind from one that somebody else put there.
constexpr std::string_view kMarker = ".fusedmoe-incomplete";
constexpr int64_t kLargestSideFile = int64_t{256} << 20;

bool IsSideFile(const std::string& name) {
  static constexpr std::string_view kOurs[] = {
      "config.json",       "hf_quant_config.json",     "quantize_config.json",
      "quant_config.json", "quantization_report.json", "conversion_report.json"};
  static constexpr std::string_view kWeights[] = {".safetensors", ".safetensors.index.json",
                                                  ".bin",         ".bin.index.json",
                                                  ".pt",          ".pth",
                                                  ".gguf",        ".onnx",
                                                  ".h5",          ".msgpack"};
  for (const std::string_view own : kOurs) {
    if (name == own) {
      return false;
    }
  }
  for (const std::string_view ending : kWeights) {
    if (name.ends_with(ending)) {
      return false;
    }
  }
  return !name.starts_with('.');
}

std::string HashOf(const NamedTensor& tensor) {
  Sha256 hash;
  const std::string head =
      fmt::format("{} {} ", DTypeName(tensor.tensor.dtype()), tensor.tensor.shape().ToString());
  hash.Add(std::as_bytes(std::span(head)));
  const TensorView view = tensor.tensor.view();
  hash.Add(std::span(view.data(), static_cast<size_t>(view.total_bytes())));
  return hash.Finish();
}

/// Whether `inner` is `outer` or lies below it, by what stands on the disk.
bool IsWithin(const fs::path& inner, const fs::path& outer) {
  std::error_code error;
  for (fs::path place = fs::weakly_canonical(inner, error); !error; place = place.parent_path()) {
    if (fs::equivalent(place, outer, error)) {
      return true;
    }
    if (place == place.parent_path()) {
      return false;
    }
  }
  return false;
}

/// --force removes the whole folder: what else than a checkpoint lies there may be anybody's.
Status CheckReplaceable(const fs::path& directory, const std::string& source) {
  if (IsWithin(source, directory)) {
    return Status::Usage("the folder holds the checkpoint that is read, and would be replaced")
        .WithFile(directory.string())
        .WithHint("choose another folder");
  }
  std::error_code error;
  if (fs::is_directory(directory, error) && !fs::is_empty(directory, error) &&
      !fs::exists(directory / "config.json", error) &&
      !fs::exists(directory / "conversion_report.json", error)) {
    return Status::Usage("the folder is not empty and holds no config.json; only a checkpoint is replaced")
        .WithFile(directory.string())
        .WithHint("choose another folder, or remove this one");
  }
  return Status::Ok();
}

/// All but the mark.
void ClearUnfinished(const fs::path& temporary) {
  std::error_code ignored;
  std::vector<fs::path> files;
  for (fs::directory_iterator entry(temporary, ignored), end; !ignored && entry != end;
       entry.increment(ignored)) {
    if (entry->path().filename() != kMarker) {
      files.push_back(entry->path());
    }
  }
  for (const fs::path& file : files) {
    fs::remove_all(file, ignored);
  }
}

/// Where Commit moves the checkpoint that it replaces.
fs::path MovedAway(const fs::path& temporary) {
  return temporary.string() + ".old";
}

/// What a run that was killed in Commit has moved away: the only checkpoint of that name goes back, one that
/// has been replaced goes for good.
Status ClearMovedAway(const fs::path& temporary, const OutputPlace& place, const fs::path& final_path) {
  const fs::path old = MovedAway(temporary);
  std::error_code error;
  if (!fs::exists(old, error)) {
    return Status::Ok();
  }
  if (fs::exists(final_path, error)) {
    fs::remove_all(old, error);
    return Status::Ok();
  }
  fs::rename(old, final_path, error);
  if (error) {
    return Status::System("cannot move the directory back: " + error.message()).WithFile(old.string());
  }
  return place.overwrite
             ? Status::Ok()
             : Status::Usage("the directory is not empty: a run that was killed had moved it away")
                   .WithFile(place.directory)
                   .WithHint("--force replaces it");
}

/// The mark goes last: a run that is killed meanwhile leaves what the next one knows for its own.
void RemoveUnfinished(const fs::path& temporary) {
  std::error_code ignored;
  ClearUnfinished(temporary);
  fs::remove_all(temporary, ignored);
}

}  // namespace

int64_t Unit::bytes() const {
  int64_t sum = 0;
  for (const TensorSpec& spec : specs) {
    sum += PackedBytes(spec.dtype, spec.shape.count());
  }
  return sum;
}

Result<std::unique_ptr<OutputCheckpoint>> OutputCheckpoint::Create(const OutputPlace& place) {
  std::error_code error;
  fs::path final_path = fs::path(place.directory).lexically_normal();
  if (!final_path.has_filename()) {
    final_path = final_path.parent_path();  // "DIR/"
  }
  if (final_path.empty() || final_path.filename() == "." || final_path.filename() == "..") {
    return Status::Usage(
        fmt::format("'{}' cannot be made: a name for a new directory is needed", place.directory));
  }
  const bool is_directory = fs::is_directory(final_path, error), exists = fs::exists(final_path, error);
  const bool single_file = final_path.extension() == ".gguf" && !is_directory;
  if (single_file && !place.gguf) {
    return Status::Usage("a directory is written; a name that ends in .gguf is that of a GGUF file")
        .WithFile(place.directory)
        .WithHint("convert --to gguf writes those");
  }
  if (exists && !single_file && !is_directory) {
    return Status::Usage("a file stands there, and a directory is to be written").WithFile(place.directory);
  }
  if (exists && !place.overwrite && (single_file || !fs::is_empty(final_path, error))) {
    return Status::Usage(single_file ? "the file exists" : "the directory is not empty")
        .WithFile(place.directory)
        .WithHint("--force replaces it");
  }
  if (exists && place.overwrite) {
    FMOE_RETURN_IF_ERROR(CheckReplaceable(final_path, place.source));
  }
  const fs::path temporary =
      final_path.parent_path() / fmt::format(".{}.incomplete", final_path.filename().string());
  const fs::path marker = temporary / kMarker;
  fs::create_directories(temporary, error);
  if (error) {
    return Status::System("cannot create the directory: " + error.message()).WithFile(temporary.string());
  }
  // A run that was killed has left the directory with its mark, or empty.
  if (!fs::exists(marker) && !fs::is_empty(temporary, error)) {
    return Status::Usage("the place for unfinished files is taken").WithFile(temporary.string());
  }
  Result<std::unique_ptr<platform::FileLock>> lock = platform::FileLock::Take(marker.string());
  if (!lock.ok()) {
    return lock.status().code() == StatusCode::kUsage
               ? Status::Usage("another run writes there").WithFile(place.directory)
               : lock.status();
  }
  ClearUnfinished(temporary);
  if (Status moved = ClearMovedAway(temporary, place, final_path); !moved.ok()) {
    RemoveUnfinished(temporary);
    return moved;
  }
  std::unique_ptr<OutputCheckpoint> output(
      new OutputCheckpoint(final_path.string(), temporary.string(), place.overwrite));
  if (single_file) {
    output->single_file_ = true;
    output->gguf_name_ = final_path.filename().string();
  }
  output->lock_ = *std::move(lock);
  return output;
}

OutputCheckpoint::~OutputCheckpoint() {
  if (!committed_) {
    RemoveUnfinished(temporary_);
  }
}

Status OutputCheckpoint::WriteText(const std::string& file, const std::string& text) {
  FMOE_ASSIGN_OR_RETURN(const auto output, platform::OutputFile::Create(temporary_ + "/" + file));
  FMOE_RETURN_IF_ERROR(output->Append(std::as_bytes(std::span(text))));
  FMOE_RETURN_IF_ERROR(output->Commit());
  files_.push_back(file);
  return Status::Ok();
}

Status OutputCheckpoint::WriteTensors(const std::string& file, std::span<const NamedTensor> tensors) {
  const fs::path path = fs::path(temporary_) / file;
  std::error_code error;
  fs::create_directories(path.parent_path(), error);  // WriteSafetensors says it where that failed
  FMOE_RETURN_IF_ERROR(WriteSafetensors(path.string(), tensors));
  files_.push_back(file);
  return Status::Ok();
}

Status OutputCheckpoint::CopySideFiles(const std::string& source) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator entry(source, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->is_regular_file(error) && IsSideFile(entry->path().filename().string()) &&
        static_cast<int64_t>(entry->file_size(error)) <= kLargestSideFile) {
      found.push_back(entry->path());
    }
  }
  for (const fs::path& path : found) {
    const std::string name = path.filename().string();
    if (!fs::copy_file(path, temporary_ + "/" + name, error)) {
      return Status::System("cannot copy the file: " + error.message()).WithFile(path.string());
    }
    files_.push_back(name);
  }
  return Status::Ok();
}

Status OutputCheckpoint::MakeUnits(const Unit* units, int64_t count, const WriteOptions& options,
                                   int64_t& done, int64_t total,
                                   const std::function<Status(const Unit&, const NamedTensor&)>& write) {
  std::mutex mutex;
  // The failure of the first unit in order, so that the message does not depend on the threads.
  int64_t failed_index = count;
  Status failure;
  const auto run = [&](int64_t index, const Executor& threads) {
    {
      const std::lock_guard lock(mutex);
      if (failed_index < index) {
        return;
      }
    }
    Status status;
    std::vector<std::string> hashes;
    auto tensors = units[index].make(threads);
    if (!tensors.ok()) {
      status = tensors.status();
    } else if (options.hash) {
      for (const NamedTensor& tensor : *tensors) {
        hashes.push_back(HashOf(tensor));
      }
    }
    const std::lock_guard lock(mutex);
    for (size_t i = 0; status.ok() && i < tensors->size(); ++i) {
      const NamedTensor& tensor = (*tensors)[i];
      if (options.hash) {
        const int64_t part = units[index].part;
        tensor_hashes_[part == 0 ? tensor.name : fmt::format("{} part {}", tensor.name, part)] = hashes[i];
      }
      status = write(units[index], tensor);
    }
    if (!status.ok() && index < failed_index) {
      failed_index = index;
      failure = std::move(status);
    }
    ++done;
    if (options.progress) {
      options.progress(done, total);
    }
  };
  std::vector<int64_t> small;
  for (int64_t index = 0; index < count; ++index) {
    if (units[index].large) {
      run(index, options.executor);
    } else {
      small.push_back(index);
    }
  }
  ParallelFor(options.executor, static_cast<int64_t>(small.size()),
              [&](int64_t index) { run(small[static_cast<size_t>(index)], Executor{}); });
  return failure;
}

Status OutputCheckpoint::WriteShard(const std::string& file, const Unit* units, int64_t count,
                                    const WriteOptions& options, int64_t& done, int64_t total) {
  std::vector<TensorSpec> specs;
  for (int64_t index = 0; index < count; ++index) {
    specs.insert(specs.end(), units[index].specs.begin(), units[index].specs.end());
  }
  FMOE_ASSIGN_OR_RETURN(const auto writer, SafetensorsWriter::Create(temporary_ + "/" + file,
                                                                     std::move(specs), {{"format", "pt"}}));
  FMOE_RETURN_IF_ERROR(
      MakeUnits(units, count, options, done, total, [&](const Unit&, const NamedTensor& tensor) {
        return writer->Write(tensor.name, tensor.tensor.view());
      }));
  bytes_ += writer->file_bytes();
  FMOE_RETURN_IF_ERROR(writer->Finish());
  files_.push_back(file);
  return Status::Ok();
}

Status OutputCheckpoint::WriteWeights(const std::vector<Unit>& units, const WriteOptions& options) {
  std::vector<std::pair<size_t, size_t>> shards;
  int64_t tensor_bytes = 0;
  for (size_t begin = 0; begin < units.size();) {
    size_t end = begin;
    int64_t bytes = 0;
    while (end < units.size() && (end == begin || bytes + units[end].bytes() <= options.max_shard_bytes)) {
      bytes += units[end++].bytes();
    }
    shards.emplace_back(begin, end);
    tensor_bytes += bytes;
    begin = end;
  }
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  int64_t done = 0;
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    const auto [begin, end] = shards[shard];
    const std::string file = shards.size() == 1
                                 ? "model.safetensors"
                                 : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, shards.size());
    FMOE_RETURN_IF_ERROR(WriteShard(file, units.data() + begin, static_cast<int64_t>(end - begin), options,
                                    done, static_cast<int64_t>(units.size())));
    for (size_t unit = begin; unit < end; ++unit) {
      for (const TensorSpec& spec : units[unit].specs) {
        weight_map[spec.name] = file;
      }
    }
  }
  if (shards.size() < 2) {
    return Status::Ok();
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", tensor_bytes}}},
                                        {"weight_map", weight_map}};
  return WriteText("model.safetensors.index.json", index.dump(2) + "\n");
}

Status OutputCheckpoint::WriteGguf(const std::vector<checkpoint::GgufEntry>& entries,
                                   const std::vector<checkpoint::GgufSpec>& specs,
                                   const std::vector<Unit>& units, const WriteOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const auto writer, checkpoint::GgufWriter::Create(gguf_path(), entries, specs));
  int64_t done = 0;
  const auto total = static_cast<int64_t>(units.size());
  FMOE_RETURN_IF_ERROR(
      MakeUnits(units.data(), total, options, done, total, [&](const Unit& unit, const NamedTensor& tensor) {
        const TensorView view = tensor.tensor.view();
        return writer->Write(tensor.name, unit.part,
                             std::span(view.data(), static_cast<size_t>(view.total_bytes())));
      }));
  bytes_ += writer->file_bytes();
  FMOE_RETURN_IF_ERROR(writer->Finish());
  files_.push_back(gguf_name_);
  return Status::Ok();
}

std::string OutputCheckpoint::ContentHash() const {
  Sha256 hash;
  for (const auto& [name, tensor_hash] : tensor_hashes_) {
    const std::string line = name + " " + tensor_hash + "\n";
    hash.Add(std::as_bytes(std::span(line)));
  }
  return hash.Finish();
}

Status OutputCheckpoint::Commit() {
  std::error_code error;
  const auto failed = [&](std::string_view what) {
    return Status::System(fmt::format("cannot {}: {}", what, error.message())).WithFile(final_);
  };
  if (single_file_) {
    fs::rename(gguf_path(), final_, error);
    if (error) {
      return failed("move the file to its name");
    }
    files_ = {gguf_name_};
    return Status::Ok();  // the destructor removes the rest
  }
  fs::path old;
  if (overwrite_ && fs::exists(final_, error) && !fs::is_empty(final_, error)) {
    old = MovedAway(temporary_);
    fs::rename(final_, old, error);
    if (error) {
      return failed("move the old directory away");
    }
  }
  fs::rename(temporary_, final_, error);
  if (error) {
    const Status status = failed("move the directory to its name");
    if (!old.empty()) {
      fs::rename(old, final_, error);
    }
    return status;
  }
  committed_ = true;
  // Last, so that a run killed here has left either a marked directory or a complete one.
  fs::remove(final_ + "/" + std::string(kMarker), error);
  if (!old.empty()) {
    fs::remove_all(old, error);
  }
  return Status::Ok();
}

}  // namespace fusedmoe::jobs
