#include "checkpoint/files/tensor_store.hpp"

#include <algorithm>
#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/files/safetensors_header.hpp"
#include "checkpoint/files/tensor_index.hpp"
#include "core/checked_math.hpp"

namespace fusedmoe::checkpoint {

namespace fs = std::filesystem;

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
  FMOE_ASSIGN_OR_RETURN(std::vector<std::string> files, FindSafetensors(directory, &index_name));
  std::unique_ptr<TensorStore> store(new TensorStore);
  store->source_ = directory;
  TensorIndex index;
  if (!index_name.empty()) {
    FMOE_RETURN_IF_ERROR(ReadIndex(directory, index_name, &index));
    FMOE_ASSIGN_OR_RETURN(files, ShardsOf(index, directory, options.allow_partial));
    store->source_ = index.path;
    store->tensors_.reserve(index.file_of.size());
    store->places_.reserve(index.file_of.size());
  }
  for (const std::string& file : files) {
    FMOE_RETURN_IF_ERROR(store->AddFile(directory, file, options));
  }
  FMOE_RETURN_IF_ERROR(store->IndexNames());
  if (!index_name.empty()) {
    FMOE_RETURN_IF_ERROR(CheckIndex(index, *store, options.allow_partial));
  }
  FMOE_RETURN_IF_ERROR(store->FoldFourBit());
  if (mlx != nullptr) {
    FMOE_RETURN_IF_ERROR(store->FoldMlx(*mlx, options.decode_blocks));
  }
  return std::unique_ptr<const TensorStore>(std::move(store));
}

Status TensorStore::IndexNames() {
  by_name_.reserve(tensors_.size());
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto [it, added] = by_name_.emplace(tensors_[i].name, i);
    if (added) {
      continue;
    }
    return Status::BadInput(
               fmt::format("the tensor stands in two files, the other is '{}'", tensors_[it->second].file))
        .WithFile(files_[static_cast<size_t>(places_[i].file)]->path())
        .WithTensor(tensors_[i].name);
  }
  sorted_.assign(tensors_.size(), {});
  std::transform(tensors_.begin(), tensors_.end(), sorted_.begin(),
                 [](const TensorInfo& info) { return std::string_view(info.name); });
  std::sort(sorted_.begin(), sorted_.end());
  return Status::Ok();
}

Status TensorStore::FoldFourBit() {
  std::vector<bool> hidden;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const std::string_view weight = FourBitWeightOf(tensors_[i].name);
    if (weight.empty()) {
      continue;
    }
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
    if (hidden[i]) {
      continue;
    }
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
  if (codes == by_name_.end()) {
    return Blame(Status::BadInput(fmt::format("describes '{}', which no file holds", weight))
                     .WithHint("download the missing shard"),
                 state.name);
  }
  TensorInfo& listed = tensors_[codes->second];
  Place& listed_place = places_[codes->second];
  const auto spoil = [&](const std::string& why) {
    listed.problem = fmt::format("4 bits of bitsandbytes: {}", why);
    return Status::Ok();
  };
  constexpr int64_t kMostStateBytes = 1 << 16;
  if (state.dtype != DType::kU8 || state.bytes > kMostStateBytes) {
    return spoil(
        fmt::format("'{}' is {} of {} bytes; U8 is needed", state.name, DTypeName(state.dtype), state.bytes));
  }
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes text,
                        files_[static_cast<size_t>(place.file)]->Read(place.begin, state.bytes));
  const Result<FourBitMatrix> matrix = ParseFourBitState(
      std::string_view(reinterpret_cast<const char*>(text.data), static_cast<size_t>(text.size)));
  if (!matrix.ok()) {
    return spoil(fmt::format("'{}': {}", state.name, matrix.status().message()));
  }
  FourBitTensor tensor{.matrix = *matrix, .codes = listed_place, .parts = {}};
  const bool nested = matrix->nested_block > 0;
  const std::array<int64_t, kFourBitParts.size()> bytes = {matrix->num_blocks() * (nested ? 1 : 4), 16 * 4,
                                                           nested ? matrix->num_nested_blocks() * 4 : 0,
                                                           nested ? 256 * 4 : 0};
  for (size_t i = 0; i < kFourBitParts.size(); ++i) {
    const std::string name = std::string(weight) + std::string(kFourBitParts[i]);
    const auto found = by_name_.find(name);
    if (found != by_name_.end()) {
      (*hidden)[found->second] = true;
    }
    if (bytes[i] == 0) {
      continue;
    }
    if (found == by_name_.end()) {
      return spoil(fmt::format("'{}' is missing", name));
    }
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
  if (listed.bytes < packed || listed.bytes > packed + 7) {
    return spoil(fmt::format("codes of {} bytes; {} is needed", listed.bytes, packed));
  }
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
    while (index < kFourBitParts.size() && kFourBitParts[index] != part) {
      ++index;
    }
    const Place& from = part.empty() ? tensor.codes : tensor.parts[index];
    return files_[static_cast<size_t>(from.file)]->Read(from.begin + at, count);
  };
  return ReadFourBit(tensor.matrix, read, offset / width, bytes / width);
}

const TensorInfo* TensorStore::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

std::span<const std::string_view> TensorStore::Below(std::string_view prefix) const {
  const auto first = std::lower_bound(sorted_.begin(), sorted_.end(), prefix);
  const auto end = std::partition_point(first, sorted_.end(),
                                        [prefix](std::string_view name) { return name.starts_with(prefix); });
  return {first, end};
}

std::vector<std::string> TensorStore::Paths() const {
  std::vector<std::string> paths;
  std::transform(files_.begin(), files_.end(), std::back_inserter(paths),
                 [](const auto& file) { return file->path(); });
  if (std::error_code ignored; !gguf_ && !fs::is_directory(source_, ignored)) {
    paths.push_back(source_);
  }
  return paths;
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
  if (it == by_name_.end()) {
    return Blame(Status::BadInput("the tensor is missing"), name);
  }
  if (!tensors_[it->second].problem.empty()) {
    return Blame(Status::BadInput(tensors_[it->second].problem), name);
  }
  return it->second;
}

Result<Tensor> TensorStore::ReadAt(size_t index, int64_t offset, int64_t bytes, const Shape& shape,
                                   BlockParts* beside) const {
  const Place& place = places_[index];
  if (place.part != nullptr) {
    return ReadBlocks(index, offset, bytes, shape, beside);
  }
  const auto& file = files_[static_cast<size_t>(place.file)];
  Result<platform::FileBytes> read = place.four_bit >= 0 ? ReadFourBitAt(place, offset, bytes)
                                     : place.affine >= 0 ? ReadAffineAt(place, offset, bytes)
                                                         : file->Read(place.begin + offset, bytes);
  if (!read.ok()) {
    return Blame(std::move(read).status(), tensors_[index].name);
  }
  return Tensor::Borrow(TensorView(read->data, tensors_[index].dtype, shape), std::move(read->owner));
}

Result<Tensor> TensorStore::Load(std::string_view name, BlockParts* beside) const {
  FMOE_ASSIGN_OR_RETURN(const size_t index, Require(name));
  return ReadAt(index, 0, tensors_[index].bytes, tensors_[index].shape, beside);
}

Result<Tensor> TensorStore::LoadRows(std::string_view name, int64_t first, int64_t count,
                                     BlockParts* beside) const {
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
  return ReadAt(index, first * row_bytes, count * row_bytes, shape, beside);
}

Result<Tensor> TensorStore::LoadItem(std::string_view name, int64_t index, BlockParts* beside) const {
  FMOE_ASSIGN_OR_RETURN(Tensor rows, LoadRows(name, index, 1, beside));
  const Shape shape(rows.shape().dims().subspan(1));
  return Tensor::Borrow(TensorView(rows.view().data(), rows.dtype(), shape), rows.owner());
}

Result<platform::FileBytes> TensorStore::LoadBytes(std::string_view name, int64_t offset,
                                                   int64_t count) const {
  FMOE_ASSIGN_OR_RETURN(const size_t index, Require(name));
  const TensorInfo& info = tensors_[index];
  const Place& place = places_[index];
  if (offset < 0 || count < 0 || count > info.bytes - offset) {
    return Blame(
        Status::BadInput(fmt::format("bytes [{}, {}) are needed of {}", offset, offset + count, info.bytes)),
        name);
  }
  const int64_t unit = place.part != nullptr ? place.part->bytes
                       : place.affine >= 0   ? affine_[static_cast<size_t>(place.affine)].matrix.row_bytes()
                       : place.four_bit >= 0 ? DTypeBits(info.dtype) / 8
                                             : 1;
  const int64_t first = offset / unit * unit, bytes = RoundUp(offset + count, unit) - first;
  const int64_t elements =
      place.part != nullptr ? bytes / unit * place.part->elements : bytes * 8 / DTypeBits(info.dtype);
  FMOE_ASSIGN_OR_RETURN(const Tensor whole, ReadAt(index, first, bytes, Shape{elements}, nullptr));
  return platform::FileBytes{whole.view().data() + (offset - first), count, whole.owner()};
}

}  // namespace fusedmoe::checkpoint
