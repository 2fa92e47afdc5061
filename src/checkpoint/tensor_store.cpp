#include "checkpoint/tensor_store.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/json.hpp"
#include "checkpoint/safetensors_header.hpp"

namespace fusedmoe::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxIndexBytes = int64_t{1} << 30;

struct Index {
  std::string path;
  std::string text;  // the views below point into it, or into `reader`
  std::unique_ptr<JsonReader> reader;
  std::unordered_map<std::string_view, std::string_view> file_of;  // tensor -> shard
  std::vector<std::string> files;                                  // in order of first use
};

Status ParseIndex(Index* index) {
  if (!IsUtf8(index->text))
    return Status::BadInput("the index is not valid UTF-8");
  index->reader = std::make_unique<JsonReader>(index->text);
  JsonReader& json = *index->reader;
  bool has_map = false;
  std::map<std::string_view, bool> seen_files;
  if (json.Peek() != JsonReader::Kind::kObject)
    return Status::BadInput("the index is no JSON object");
  json.EnterObject();
  for (std::string_view key; json.NextKey(&key);) {
    if (key != "weight_map") {
      json.Skip();
      continue;
    }
    if (std::exchange(has_map, true))
      return Status::BadInput("'weight_map' occurs twice");
    if (json.Peek() != JsonReader::Kind::kObject)
      return Status::BadInput("'weight_map' is no object");
    json.EnterObject();
    index->file_of.reserve(index->text.size() / 100);
    for (std::string_view tensor; json.NextKey(&tensor);) {
      std::string_view file;
      if (json.Peek() != JsonReader::Kind::kString) {
        return Status::BadInput("'weight_map' must give a file name").WithTensor(tensor);
      }
      if (!json.String(&file))
        break;
      if (!index->file_of.emplace(tensor, file).second) {
        return Status::BadInput("the name occurs twice in 'weight_map'").WithTensor(tensor);
      }
      if (seen_files.emplace(file, true).second)
        index->files.emplace_back(file);
    }
  }
  if (!json.Finish())
    return json.status();
  if (!has_map)
    return Status::BadInput("the index has no 'weight_map'");
  return Status::Ok();
}

// "model.safetensors, consolidated.safetensors" first, else every file of that kind.
Result<std::vector<std::string>> FindFiles(const std::string& directory, std::string* index_name) {
  std::error_code error;
  for (const char* stem : {"model", "consolidated", "pytorch_model", "diffusion_pytorch_model"}) {
    const std::string index = fmt::format("{}.safetensors.index.json", stem);
    if (fs::exists(fs::path(directory) / index, error)) {
      *index_name = index;
      return std::vector<std::string>{};
    }
    const std::string single = fmt::format("{}.safetensors", stem);
    if (fs::exists(fs::path(directory) / single, error))
      return std::vector<std::string>{single};
  }
  std::vector<std::string> files;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.ends_with(".safetensors.index.json"))
      *index_name = name;
    if (name.ends_with(".safetensors"))
      files.push_back(name);
  }
  if (error) {
    return Status::BadInput(fmt::format("cannot list the directory: {}", error.message()))
        .WithFile(directory);
  }
  if (files.empty() && index_name->empty()) {
    return Status::BadInput("no safetensors file in the directory")
        .WithFile(directory)
        .WithHint("a checkpoint holds model.safetensors, or shards with model.safetensors.index.json");
  }
  std::sort(files.begin(), files.end());
  return files;
}

std::string Sample(const std::vector<std::string_view>& names) {
  std::string out;
  for (size_t i = 0; i < names.size() && i < 3; ++i)
    out += fmt::format("{}'{}'", i == 0 ? "" : ", ", names[i]);
  return names.size() > 3 ? out + fmt::format(" and {} more", names.size() - 3) : out;
}

}  // namespace

Result<std::string> ResolveInside(const std::string& directory, std::string_view name) {
  const fs::path relative{std::string(name)};
  const auto refuse = [&](std::string_view why) {
    return Status::BadInput(fmt::format("the file name '{}' {}", std::string(name.substr(0, 200)), why))
        .WithFile(directory);
  };
  if (name.empty() || name.find('\0') != std::string_view::npos)
    return refuse("is no file name");
  if (relative.is_absolute())
    return refuse("is absolute; shards lie in the checkpoint's directory");
  for (const fs::path& part : relative) {
    if (part == "..")
      return refuse("leaves the checkpoint's directory");
  }
  const fs::path path = fs::path(directory) / relative;
  std::error_code error;
  const fs::path root = fs::canonical(directory, error);
  if (error)
    return Status::BadInput(fmt::format("cannot open the directory: {}", error.message()))
        .WithFile(directory);
  const fs::path target = fs::weakly_canonical(path, error);
  if (error)
    return refuse(fmt::format("cannot be resolved: {}", error.message()));
  const auto lies_in = [&](const fs::path& parent) {
    return std::mismatch(parent.begin(), parent.end(), target.begin(), target.end()).first == parent.end();
  };
  if (lies_in(root))
    return path.string();
  // The Hugging Face cache: <repository>/snapshots/<revision>/<name> -> ../../blobs/<hash>.
  if (root.parent_path().filename() == "snapshots" && lies_in(root.parent_path().parent_path() / "blobs")) {
    return path.string();
  }
  return refuse("is a symbolic link that leaves the checkpoint's directory");
}

namespace {

Status ReadIndex(const std::string& directory, const std::string& name, Index* index) {
  FMOE_ASSIGN_OR_RETURN(index->path, ResolveInside(directory, name));
  FMOE_ASSIGN_OR_RETURN(index->text, platform::ReadTextFile(index->path, kMaxIndexBytes));
  Status status = ParseIndex(index);
  return status.ok() ? status : std::move(status).WithFile(index->path);
}

/// The files that an index names, without those that are missing where that is allowed.
Result<std::vector<std::string>> ShardsOf(const Index& index, const std::string& directory,
                                          bool allow_partial) {
  const auto refuse = [&index](const std::string& why) { return Status::BadInput(why).WithFile(index.path); };
  std::vector<std::string> shards;
  for (const std::string& file : index.files) {
    if (!file.ends_with(".safetensors"))
      return refuse(fmt::format("the index names '{}', which is no safetensors file", file.substr(0, 200)));
    const Result<std::string> path = ResolveInside(directory, file);
    if (!path.ok())
      return refuse(path.status().message());
    std::error_code error;
    if (fs::exists(*path, error))
      shards.push_back(file);
    else if (!allow_partial)
      return refuse(fmt::format("the shard '{}', which the index names, is missing", file));
  }
  return shards;
}

/// Index and shards hold the same tensors in the same files; with `allow_partial` some may be missing from
/// either.
Status CheckIndex(const Index& index, const TensorStore& store, bool allow_partial) {
  const auto refuse = [&index](const std::string& why, std::string_view tensor) {
    return Status::BadInput(why).WithFile(index.path).WithTensor(tensor);
  };
  for (const TensorInfo& info : store.tensors()) {
    const auto entry = index.file_of.find(info.name);
    if (entry == index.file_of.end() && !allow_partial) {
      return refuse(fmt::format("the shard '{}' holds a tensor that the index does not name", info.file),
                    info.name);
    }
    if (entry != index.file_of.end() && entry->second != info.file) {
      return refuse(fmt::format("the index places it in '{}', but '{}' holds it", entry->second, info.file),
                    info.name);
    }
  }
  std::vector<std::string_view> missing;
  for (const auto& [tensor, file] : index.file_of) {
    if (!store.Has(tensor))
      missing.push_back(tensor);
  }
  if (allow_partial || missing.empty())
    return Status::Ok();
  std::sort(missing.begin(), missing.end());
  return refuse(fmt::format("{} tensors of the index are in no shard: {}", missing.size(), Sample(missing)),
                missing.front())
      .WithHint("--allow-partial goes on without them");
}

}  // namespace

Status TensorStore::AddFile(const std::string& directory, const std::string& name,
                            const CheckpointOptions& options) {
  FMOE_ASSIGN_OR_RETURN(const std::string path, ResolveInside(directory, name));
  // Reading copies, and that is what makes a shrinking file an error instead of a signal, on network file
  // systems too. Mapping is there for those who ask for it.
  const auto access = options.io == IoMode::kMmap ? platform::FileAccess::kMap : platform::FileAccess::kRead;
  FMOE_ASSIGN_OR_RETURN(auto file, platform::InputFile::Open(path, access));
  FMOE_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(*file));
  const auto file_index = static_cast<int32_t>(files_.size());
  files_.push_back(std::move(file));
  for (HeaderEntry& entry : header.entries) {
    tensors_.push_back({std::move(entry.name), entry.dtype, entry.shape, name, entry.end - entry.begin,
                        std::move(entry.problem)});
    places_.push_back({file_index, entry.begin});
  }
  return Status::Ok();
}

Result<std::unique_ptr<const TensorStore>> TensorStore::Open(const std::string& directory,
                                                             const CheckpointOptions& options,
                                                             const MlxGroups* mlx) {
  std::error_code error;
  if (!fs::is_directory(directory, error)) {
    return Status::BadInput("not a directory")
        .WithFile(directory)
        .WithHint("give the folder that holds config.json");
  }
  std::string index_name;
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> files, FindFiles(directory, &index_name));
  std::unique_ptr<TensorStore> store(new TensorStore);
  store->source_ = directory;
  Index index;
  if (!index_name.empty()) {
    FMOE_RETURN_IF_ERROR(ReadIndex(directory, index_name, &index));
    FMOE_ASSIGN_OR_RETURN(files, ShardsOf(index, directory, options.allow_partial));
    store->source_ = index.path;
  }
  for (const std::string& file : files)
    FMOE_RETURN_IF_ERROR(store->AddFile(directory, file, options));
  FMOE_RETURN_IF_ERROR(store->IndexNames());
  if (!index_name.empty())
    FMOE_RETURN_IF_ERROR(CheckIndex(index, *store, options.allow_partial));
  FMOE_RETURN_IF_ERROR(store->FoldFourBit());
  if (mlx != nullptr)
    FMOE_RETURN_IF_ERROR(store->FoldMlx(*mlx));
  return std::unique_ptr<const TensorStore>(std::move(store));
}

Status TensorStore::IndexNames() {
  by_name_.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto [it, added] = by_name_.emplace(tensors_[i].name, i);
    if (added)
      continue;
    return Status::BadInput(
               fmt::format("the tensor stands in two files, the other is '{}'", tensors_[it->second].file))
        .WithFile(files_[static_cast<size_t>(places_[i].file)]->path())
        .WithTensor(tensors_[i].name);
  }
  return Status::Ok();
}

Status TensorStore::FoldFourBit() {
  std::vector<bool> hidden;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const std::string_view weight = FourBitWeightOf(tensors_[i].name);
    if (weight.empty())
      continue;
    hidden.resize(tensors_.size());
    hidden[i] = true;
    FMOE_RETURN_IF_ERROR(FoldFourBit(tensors_[i], places_[i], weight, &hidden));
  }
  return hidden.empty() ? Status::Ok() : Hide(hidden);
}

Status TensorStore::Hide(const std::vector<bool>& hidden) {
  by_name_.clear();  // its keys are views of names that move
  size_t kept = 0;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    if (hidden[i])
      continue;
    if (kept != i) {
      tensors_[kept] = std::move(tensors_[i]);
      places_[kept] = places_[i];
    }
    ++kept;
  }
  tensors_.resize(kept);
  places_.resize(kept);
  return IndexNames();
}

// Whatever is wrong with one matrix spoils that matrix alone: its listing says why it cannot be read.
Status TensorStore::FoldFourBit(const TensorInfo& state, const Place& place, std::string_view weight,
                                std::vector<bool>* hidden) {
  const auto codes = by_name_.find(weight);
  if (codes == by_name_.end())
    return Blame(Status::BadInput("its matrix is missing"), state.name);
  TensorInfo& listed = tensors_[codes->second];
  Place& listed_place = places_[codes->second];
  const auto spoil = [&](const std::string& why) {
    listed.problem = fmt::format("4 bits of bitsandbytes: {}", why);
    return Status::Ok();
  };
  constexpr int64_t kMostStateBytes = 1 << 16;
  if (state.dtype != DType::kU8 || state.bytes > kMostStateBytes)
    return spoil(
        fmt::format("'{}' is {} of {} bytes; U8 is needed", state.name, DTypeName(state.dtype), state.bytes));
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes text,
                        files_[static_cast<size_t>(place.file)]->Read(place.begin, state.bytes));
  const Result<FourBitMatrix> matrix = ParseFourBitState(
      std::string_view(reinterpret_cast<const char*>(text.data), static_cast<size_t>(text.size)));
  if (!matrix.ok())
    return spoil(fmt::format("'{}': {}", state.name, matrix.status().message()));
  FourBitTensor tensor{.matrix = *matrix, .codes = listed_place, .parts = {}};
  const bool nested = matrix->nested_block > 0;
  const std::array<int64_t, kFourBitParts.size()> bytes = {matrix->num_blocks() * (nested ? 1 : 4), 16 * 4,
                                                           nested ? matrix->num_nested_blocks() * 4 : 0,
                                                           nested ? 256 * 4 : 0};
  for (size_t i = 0; i < kFourBitParts.size(); ++i) {
    const std::string name = std::string(weight) + std::string(kFourBitParts[i]);
    const auto found = by_name_.find(name);
    if (found != by_name_.end())
      (*hidden)[found->second] = true;
    if (bytes[i] == 0)
      continue;
    if (found == by_name_.end())
      return spoil(fmt::format("'{}' is missing", name));
    const TensorInfo& info = tensors_[found->second];
    const DType dtype = nested && i == 0 ? DType::kU8 : DType::kF32;
    if (info.dtype != dtype || info.bytes != bytes[i]) {
      return spoil(fmt::format("'{}' is {} of {} bytes; {} of {} is needed", name, DTypeName(info.dtype),
                               info.bytes, DTypeName(dtype), bytes[i]));
    }
    tensor.parts[i] = places_[found->second];
  }
  const int64_t packed = (matrix->shape.count() + 1) / 2;
  // Training stores the bytes as another type, and that type pads them to whole elements.
  if (listed.bytes < packed || listed.bytes > packed + 7)
    return spoil(fmt::format("codes of {} bytes; {} is needed", listed.bytes, packed));
  listed.dtype = matrix->dtype;
  listed.shape = matrix->shape;
  listed.bytes = matrix->shape.count() * (DTypeBits(matrix->dtype) / 8);
  listed_place.four_bit = static_cast<int32_t>(four_bit_.size());
  four_bit_.push_back(tensor);
  return Status::Ok();
}

Result<platform::FileBytes> TensorStore::ReadFourBitAt(const Place& place, int64_t offset,
                                                       int64_t bytes) const {
  const FourBitTensor& tensor = four_bit_[static_cast<size_t>(place.four_bit)];
  const int64_t width = DTypeBits(tensor.matrix.dtype) / 8;
  const auto read = [&](std::string_view part, int64_t at, int64_t count) {
    size_t index = 0;
    while (index < kFourBitParts.size() && kFourBitParts[index] != part)
      ++index;
    const Place& from = part.empty() ? tensor.codes : tensor.parts[index];
    return files_[static_cast<size_t>(from.file)]->Read(from.begin + at, count);
  };
  return ReadFourBit(tensor.matrix, read, offset / width, bytes / width);
}

const TensorInfo* TensorStore::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

Status TensorStore::Blame(Status status, std::string_view name) const {
  if (const auto it = by_name_.find(name); it != by_name_.end()) {
    status = std::move(status).WithFile(files_[static_cast<size_t>(places_[it->second].file)]->path());
  } else {
    status = std::move(status).WithFile(files_.size() == 1 ? files_.front()->path() : source_);
  }
  return std::move(status).WithTensor(name);
}

std::string TensorStore::Version(std::string_view prefix) const {
  std::string text;
  for (const auto& file : files_) {
    text += fmt::format("{}: {}\n", fs::path(file->path()).filename().string(), file->Version());
  }
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const TensorInfo& info = tensors_[i];
    if (info.name.starts_with(prefix)) {
      text += fmt::format("{} {} {} {}@{}\n", info.name, DTypeName(info.dtype), info.shape.ToString(),
                          places_[i].file, places_[i].begin);
    }
  }
  return text;
}

Result<size_t> TensorStore::Require(std::string_view name) const {
  const auto it = by_name_.find(name);
  if (it == by_name_.end())
    return Blame(Status::BadInput("the tensor is missing"), name);
  if (!tensors_[it->second].problem.empty())
    return Blame(Status::BadInput(tensors_[it->second].problem), name);
  return it->second;
}

Result<Tensor> TensorStore::ReadAt(size_t index, int64_t offset, int64_t bytes, const Shape& shape) const {
  const Place& place = places_[index];
  const auto& file = files_[static_cast<size_t>(place.file)];
  Result<platform::FileBytes> read = place.four_bit >= 0     ? ReadFourBitAt(place, offset, bytes)
                                     : place.affine >= 0     ? ReadAffineAt(place, offset, bytes)
                                     : place.part == nullptr ? file->Read(place.begin + offset, bytes)
                                                             : ReadParts(place, offset, bytes);
  if (!read.ok())
    return Blame(std::move(read).status(), tensors_[index].name);
  // Only the start of the data is aligned in a file; a mapped tensor that would be misread by type is copied.
  const auto width = static_cast<uintptr_t>(std::max(1, DTypeBits(tensors_[index].dtype) / 8));
  if (reinterpret_cast<uintptr_t>(read->data) % width != 0) {
    FMOE_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> copy, platform::AllocateBytes(bytes));
    std::memcpy(copy.get(), read->data, static_cast<size_t>(bytes));
    read->data = copy.get();
    read->owner = std::move(copy);
  }
  return Tensor::Borrow(TensorView(read->data, tensors_[index].dtype, shape), std::move(read->owner));
}

Result<Tensor> TensorStore::Load(std::string_view name) const {
  FMOE_ASSIGN_OR_RETURN(const size_t index, Require(name));
  return ReadAt(index, 0, tensors_[index].bytes, tensors_[index].shape);
}

Result<Tensor> TensorStore::LoadRows(std::string_view name, int64_t first, int64_t count) const {
  FMOE_ASSIGN_OR_RETURN(const size_t index, Require(name));
  const TensorInfo& info = tensors_[index];
  const int64_t rows = info.shape.rank() == 0 ? 0 : info.shape[0];
  if (first < 0 || count < 0 || count > rows - first || rows == 0) {
    return Blame(Status::BadInput(fmt::format("rows [{}, {}) are needed of a tensor {}", first, first + count,
                                              info.shape.ToString())),
                 name);
  }
  Shape shape = info.shape;
  shape[0] = count;
  const int64_t row_bytes = info.bytes / rows;
  return ReadAt(index, first * row_bytes, count * row_bytes, shape);
}

Result<Tensor> TensorStore::LoadItem(std::string_view name, int64_t index) const {
  FMOE_ASSIGN_OR_RETURN(Tensor rows, LoadRows(name, index, 1));
  const Shape shape(rows.shape().dims().subspan(1));
  return Tensor::Borrow(TensorView(rows.view().data(), rows.dtype(), shape), rows.owner());
}

}  // namespace fusedmoe::checkpoint
