#include "checkpoint/files/tensor_index.hpp"

#include <algorithm>
#include <filesystem>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/files/safetensors_header.hpp"
#include "checkpoint/files/tensor_store.hpp"
#include "platform/file.hpp"

namespace fusedmoe::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxIndexBytes = int64_t{1} << 30;

// A download that broke off, as a rule.
Status EndsEarly(JsonReader& json) {
  json.Fail("the text ends where a value is expected");
  return Status(json.status()).WithHint("the index is truncated: copy it again");
}

// A value as it stands there, or what it begins with.
std::string_view Beginning(std::string_view text) {
  constexpr size_t kEnough = 40;
  return text.substr(0, std::min(text.find_first_of(",}\r\n"), kEnough));
}

Status ParseIndex(TensorIndex* index) {
  if (!IsUtf8(index->text)) {
    return Status::BadInput("the index is not valid UTF-8");
  }
  index->reader = std::make_unique<JsonReader>(index->text);
  JsonReader& json = *index->reader;
  bool has_map = false;
  std::map<std::string_view, bool> seen_files;
  if (json.Peek() != JsonReader::Kind::kObject) {
    return Status::BadInput("the index is no JSON object");
  }
  json.EnterObject();
  for (std::string_view key; json.NextKey(&key);) {
    if (key != "weight_map") {
      json.Skip();
      continue;
    }
    if (std::exchange(has_map, true)) {
      return Status::BadInput("'weight_map' occurs twice");
    }
    if (const JsonReader::Kind kind = json.Peek(); kind != JsonReader::Kind::kObject) {
      return kind == JsonReader::Kind::kInvalid ? EndsEarly(json)
                                                : Status::BadInput("'weight_map' is no object");
    }
    json.EnterObject();
    index->file_of.reserve(index->text.size() / 100);
    for (std::string_view tensor; json.NextKey(&tensor);) {
      std::string_view file;
      if (const JsonReader::Kind kind = json.Peek(); kind != JsonReader::Kind::kString) {
        return kind == JsonReader::Kind::kInvalid
                   ? EndsEarly(json)
                   : Status::BadInput(
                         fmt::format("'weight_map' holds {} for it; a file name (string) is required",
                                     Beginning(std::string_view(index->text).substr(json.position()))))
                         .WithTensor(tensor);
      }
      if (!json.String(&file)) {
        break;
      }
      if (!index->file_of.emplace(tensor, file).second) {
        return Status::BadInput("the name occurs twice in 'weight_map'").WithTensor(tensor);
      }
      if (seen_files.emplace(file, true).second) {
        index->files.emplace_back(file);
      }
    }
  }
  if (!json.Finish()) {
    return json.status();
  }
  if (!has_map) {
    return Status::BadInput("the index has no 'weight_map'");
  }
  return Status::Ok();
}

std::string Sample(const std::vector<std::string_view>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < 3; ++i) {
    out += fmt::format("{}'{}'", i == 0 ? "" : ", ", names[i]);
  }
  return names.size() > 3 ? out + fmt::format(" and {} more", names.size() - 3) : out;
}

}  // namespace

Result<std::string> ResolveInside(const std::string& directory, std::string_view name) {
  const fs::path relative{std::string(name)};
  const auto refuse = [&](std::string_view why) {
    return Status::BadInput(fmt::format("the file name '{}' {}", std::string(name.substr(0, 200)), why))
        .WithFile(directory);
  };
  if (name.empty() || name.find('\0') != std::string_view::npos) {
    return refuse("is no file name");
  }
  if (relative.is_absolute()) {
    return refuse("is absolute; shards lie in the checkpoint's directory");
  }
  for (const fs::path& part : relative) {
    if (part == "..") {
      return refuse("leaves the checkpoint's directory");
    }
  }
  const fs::path path = fs::path(directory) / relative;
  std::error_code error;
  const fs::path root = fs::canonical(directory, error);
  if (error) {
    return Status::BadInput(fmt::format("cannot open the directory: {}", error.message()))
        .WithFile(directory);
  }
  const fs::path target = fs::weakly_canonical(path, error);
  if (error) {
    return refuse(fmt::format("cannot be resolved: {}", error.message()));
  }
  const auto lies_in = [&](const fs::path& parent) {
    return std::mismatch(parent.begin(), parent.end(), target.begin(), target.end()).first == parent.end();
  };
  if (lies_in(root)) {
    return path.string();
  }
  // The Hugging Face cache: <repository>/snapshots/<revision>/<name> -> ../../blobs/<hash>.
  if (root.parent_path().filename() == "snapshots" && lies_in(root.parent_path().parent_path() / "blobs")) {
    return path.string();
  }
  return refuse("is a symbolic link that leaves the checkpoint's directory");
}

Result<std::vector<std::string>> FindSafetensors(const std::string& directory, std::string* index_name) {
  std::error_code error;
  for (const char* stem : {"model", "consolidated", "pytorch_model", "diffusion_pytorch_model"}) {
    const std::string index = fmt::format("{}.safetensors.index.json", stem);
    if (fs::exists(fs::path(directory) / index, error)) {
      *index_name = index;
      return std::vector<std::string>{};
    }
    const std::string single = fmt::format("{}.safetensors", stem);
    if (fs::exists(fs::path(directory) / single, error)) {
      return std::vector<std::string>{single};
    }
  }
  std::vector<std::string> files;
  std::string other;  // weights in a form that nothing here reads
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(".safetensors.index.json")) {
      *index_name = name;
    }
    if (name.ends_with(".safetensors")) {
      files.push_back(name);
    }
    for (const std::string_view ending :
         {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".tensors"}) {
      if (name.ends_with(ending) && (other.empty() || name < other)) {
        other = name;
      }
    }
  }
  if (error) {
    return Status::BadInput(fmt::format("cannot list the directory: {}", error.message()))
        .WithFile(directory);
  }
  if (files.empty() && index_name->empty() && !other.empty()) {
    return Status::Unsupported(
               fmt::format("weights in '{}'; safetensors and GGUF are read", other.substr(0, 200)))
        .WithFile(directory)
        .WithHint("write them as safetensors first (save_pretrained of transformers does)");
  }
  if (files.empty() && index_name->empty()) {
    return Status::BadInput("no safetensors file in the directory")
        .WithFile(directory)
        .WithHint("a checkpoint holds model.safetensors, or shards with model.safetensors.index.json");
  }
  std::sort(files.begin(), files.end());
  return files;
}

Status ReadIndex(const std::string& directory, const std::string& name, TensorIndex* index) {
  FMOE_ASSIGN_OR_RETURN(index->path, ResolveInside(directory, name));
  FMOE_ASSIGN_OR_RETURN(index->text, platform::ReadTextFile(index->path, kMaxIndexBytes));
  Status status = ParseIndex(index);
  return status.ok() ? status : std::move(status).WithFile(index->path);
}

Result<std::vector<std::string>> ShardsOf(const TensorIndex& index, const std::string& directory,
                                          bool allow_partial) {
  const auto refuse = [&index](const std::string& why) { return Status::BadInput(why).WithFile(index.path); };
  std::vector<std::string> shards;
  for (const std::string& file : index.files) {
    if (!file.ends_with(".safetensors")) {
      return refuse(fmt::format("the index names '{}', which is no safetensors file", file.substr(0, 200)));
    }
    const Result<std::string> path = ResolveInside(directory, file);
    if (!path.ok()) {
      return refuse(path.status().message());
    }
    std::error_code error;
    if (fs::exists(*path, error)) {
      shards.push_back(file);
    } else if (!allow_partial) {
      return refuse(fmt::format("the shard '{}', which the index names, is missing", file));
    }
  }
  return shards;
}

Status CheckIndex(const TensorIndex& index, const TensorStore& store, bool allow_partial) {
  const auto refuse = [&index](const std::string& why, std::string_view tensor) {
    return Status::BadInput(why).WithFile(index.path).WithTensor(tensor);
  };
  size_t found = 0;
  for (const TensorInfo& info : store.tensors()) {
    const auto entry = index.file_of.find(info.name);
    if (entry == index.file_of.end()) {
      if (allow_partial) {
        continue;
      }
      return refuse(fmt::format("the shard '{}' holds a tensor that the index does not name", info.file),
                    info.name);
    }
    if (entry->second != info.file) {
      return refuse(fmt::format("the index places it in '{}', but '{}' holds it", entry->second, info.file),
                    info.name);
    }
    ++found;
  }
  if (allow_partial || found == index.file_of.size()) {  // names are unique on both sides
    return Status::Ok();
  }
  std::vector<std::string_view> missing;
  for (const auto& [tensor, file] : index.file_of) {
    if (!store.Has(tensor)) {
      missing.push_back(tensor);
    }
  }
  std::sort(missing.begin(), missing.end());
  return refuse(fmt::format("{} tensors of the index are in no shard: {}", missing.size(), Sample(missing)),
                missing.front())
      .WithHint("--allow-partial goes on without them");
}

}  // namespace fusedmoe::checkpoint
