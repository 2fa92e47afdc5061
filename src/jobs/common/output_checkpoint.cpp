#include "jobs/common/output_checkpoint.hpp"

#include <algorithm>
#include <filesystem>
#include <mutex>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "checkpoint/files/config_files.hpp"
#include "core/sha256.hpp"
#include "platform/output_file.hpp"

namespace fusedmoe::jobs {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kLargestSideFile = int64_t{256} << 20;

bool IsSideFile(const std::string& name) {
  static constexpr std::string_view kWeights[] = {".safetensors", ".safetensors.index.json",
                                                  ".bin",         ".bin.index.json",
                                                  ".pt",          ".pth",
                                                  ".gguf",        ".onnx",
                                                  ".h5",          ".msgpack"};
  const auto is_it = [&](const checkpoint::ConfigFile& file) { return name == file.name; };
  if (std::ranges::any_of(checkpoint::kConfigFiles, is_it) || name == kQuantizationReport ||
      name == kConversionReport) {
    return false;
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

}  // namespace

int64_t Unit::bytes() const {
  int64_t sum = 0;
  for (const TensorSpec& spec : specs) {
    sum += PackedBytes(spec.dtype, spec.shape.count());
  }
  return sum;
}

Result<std::unique_ptr<OutputCheckpoint>> OutputCheckpoint::Create(const OutputPlace& place) {
  FMOE_ASSIGN_OR_RETURN(std::unique_ptr<UnfinishedOutput> output, UnfinishedOutput::Take(place));
  return std::unique_ptr<OutputCheckpoint>(new OutputCheckpoint(std::move(output)));
}

Status OutputCheckpoint::WriteText(const std::string& file, const std::string& text) {
  FMOE_ASSIGN_OR_RETURN(const auto output, platform::OutputFile::Create(path() + "/" + file));
  FMOE_RETURN_IF_ERROR(output->Append(std::as_bytes(std::span(text))));
  FMOE_RETURN_IF_ERROR(output->Commit());
  files_.push_back(file);
  return Status::Ok();
}

Status OutputCheckpoint::WriteTensors(const std::string& file, std::span<const NamedTensor> tensors) {
  const fs::path path = fs::path(output_->path()) / file;
  std::error_code error;
  fs::create_directories(path.parent_path(), error);  // WriteSafetensors says it where that failed
  FMOE_RETURN_IF_ERROR(WriteSafetensors(path.string(), tensors));
  files_.push_back(file);
  return Status::Ok();
}

Status OutputCheckpoint::CopySideFiles(const std::string& source) {
  std::error_code error, of_entry;
  if (fs::is_regular_file(source, of_entry)) {
    return Status::Ok();  // a GGUF file holds all that it has
  }
  std::vector<fs::path> found;
  for (fs::directory_iterator entry(source, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->is_regular_file(of_entry) && IsSideFile(entry->path().filename().string()) &&
        static_cast<int64_t>(entry->file_size(of_entry)) <= kLargestSideFile) {
      found.push_back(entry->path());
    }
  }
  if (error) {
    return Status::System("cannot list the folder: " + error.message())
        .WithFile(source)
        .WithHint("the tokenizer and other small files are copied from there: it must be readable");
  }
  for (const fs::path& path : found) {
    FMOE_ASSIGN_OR_RETURN(const std::string text, platform::ReadTextFile(path.string(), kLargestSideFile));
    const std::string name = path.filename().string();
    FMOE_RETURN_IF_ERROR(WriteText(name, text));
    fs::permissions(output_->path() + "/" + name, fs::status(path, of_entry).permissions(), of_entry);
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
  FMOE_ASSIGN_OR_RETURN(const auto writer,
                        SafetensorsWriter::Create(path() + "/" + file, std::move(specs), {{"format", "pt"}}));
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
  files_.push_back(output_->gguf_name());
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
  FMOE_RETURN_IF_ERROR(output_->Commit());
  if (output_->single_file()) {
    files_ = {output_->gguf_name()};
  }
  return Status::Ok();
}

}  // namespace fusedmoe::jobs
