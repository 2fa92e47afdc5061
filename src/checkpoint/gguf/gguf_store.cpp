// GGUF files as tensors: blocks are listed as the tensors that they hold, and taken to pieces when these are
// read.
#include <algorithm>
#include <filesystem>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/files/tensor_store.hpp"

namespace fusedmoe::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kWeight = ".weight";
constexpr int64_t kMostFiles = 10'000;

// "x-00002-of-00003.gguf" for part 1 of 3 of "x-00001-of-00003.gguf".
Result<std::string> PartOf(const std::string& first, int64_t index, int64_t count) {
  const std::string ending = fmt::format("-{:05}-of-{:05}.gguf", 1, count);
  if (!first.ends_with(ending)) {
    return Status::BadInput(
               fmt::format("the file is one of {}, and its name does not end in '{}'", count, ending))
        .WithFile(first)
        .WithHint("give the first of them");
  }
  return first.substr(0, first.size() - ending.size()) +
         fmt::format("-{:05}-of-{:05}.gguf", index + 1, count);
}

// The name that the matrices of a layer's routed, or shared, experts have in common: "blk.3_exps.weight" for
// "blk.3.ffn_down_exps.weight" and for the "blk.3.ffn_down.7.weight" of old files. Empty for other tensors,
// such as the gate of shared experts (ffn_gate_inp_shexp) and Arctic's norm (ffn_norm_exps), which are floats
// beside matrices of any type.
std::string ExpertsOf(std::string_view name) {
  for (const std::string_view matrix : {".ffn_gate", ".ffn_up", ".ffn_down", ".ffn_gate_up"}) {
    for (const std::string_view experts : {"_exps.weight", "_shexp.weight"}) {
      const size_t ending = matrix.size() + experts.size();
      if (name.ends_with(experts) && name.substr(0, name.size() - experts.size()).ends_with(matrix)) {
        return fmt::format("{}{}", name.substr(0, name.size() - ending), experts);
      }
    }
    if (!name.ends_with(kWeight)) {
      continue;
    }
    const std::string_view module = name.substr(0, name.size() - kWeight.size());
    const std::string_view numbered = module.substr(0, module.find_last_not_of("0123456789") + 1);
    if (numbered.size() < module.size() && numbered.ends_with(std::string(matrix) + ".")) {
      return fmt::format("{}_exps.weight", numbered.substr(0, numbered.size() - matrix.size() - 1));
    }
  }
  return "";
}

// Types that published schemes have: what they are listed as, whatever is asked for.
bool HasScheme(const BlockType& type) {
  return type.id == kGgufQ4_0 || type.id == kGgufQ8_0;
}

// A layer runs by one scheme. Where quantizers chose a type for each matrix (a row of 1408 elements, say, is
// no whole number of blocks of Q6_K, and becomes Q8_0), integers are listed as bytes in the shortest groups,
// with zero points where one of them has minima and two levels of scales where all have them; other mixtures
// are decoded.
MixedExperts FindMixedExperts(std::span<const GgufHeader> headers) {
  std::unordered_map<std::string, std::vector<const BlockType*>> types;
  for (const GgufHeader& header : headers) {
    for (const GgufTensor& tensor : header.tensors) {
      if (std::string experts = ExpertsOf(tensor.name); !experts.empty()) {
        types[std::move(experts)].push_back(FindBlockType(tensor.type));
      }
    }
  }
  MixedExperts mixed;
  for (const auto& entry : types) {
    const std::vector<const BlockType*>& own = entry.second;
    if (std::all_of(own.begin(), own.end(), [&](const BlockType* type) { return type == own.front(); })) {
      continue;
    }
    IntegerBlocks common{8, 32, false, own.front()->integers.super};
    for (const BlockType* type : own) {
      common.group = type->integers.group == 16 ? 16 : common.group;
      common.zeros |= type->integers.zeros;
      common.super = std::min(common.super, type->integers.super);
    }
    const bool integers = std::all_of(
        own.begin(), own.end(), [&](const BlockType* type) { return BytesType(*type, common) != nullptr; });
    mixed.emplace(entry.first, integers ? common : IntegerBlocks{});
  }
  return mixed;
}

// What a tensor of such blocks is listed as.
const BlockType& ListedType(const BlockType& type, const IntegerBlocks* mixed, bool decode) {
  if (decode && (mixed != nullptr || (type.integers.bits > 0 && !HasScheme(type)))) {
    return DecodedType(type);
  }
  if (mixed == nullptr) {
    return type;
  }
  return mixed->bits > 0 ? *BytesType(type, *mixed) : DecodedType(type);
}

}  // namespace

Status TensorStore::OpenGgufFile(const std::string& path, const CheckpointOptions& options,
                                 std::vector<GgufHeader>* headers) {
  const auto access = options.io == IoMode::kMmap ? platform::FileAccess::kMap : platform::FileAccess::kRead;
  FMOE_ASSIGN_OR_RETURN(auto file, platform::InputFile::Open(path, access));
  FMOE_ASSIGN_OR_RETURN(headers->emplace_back(), ReadGgufHeader(*file));
  files_.push_back(std::move(file));
  return Status::Ok();
}

void TensorStore::ListGguf(const GgufHeader& header, int32_t number, const MixedExperts& mixed, bool decode) {
  const std::string file_name = fs::path(files_[static_cast<size_t>(number)]->path()).filename().string();
  for (const GgufTensor& tensor : header.tensors) {
    const std::string experts = ExpertsOf(tensor.name);
    const auto common = mixed.find(experts);
    // Routers and projections are read as floats, or in types that checkpoints have.
    const BlockType* type =
        &ListedType(*FindBlockType(tensor.type),  // known: the header was checked
                    common == mixed.end() ? nullptr : &common->second, decode || experts.empty());
    if (type->parts.empty()) {
      TensorInfo info{tensor.name, DType::kU8, Shape(tensor.dims), file_name, tensor.end - tensor.begin, ""};
      info.problem = fmt::format("tensors of type {} are not read", type->name);
      tensors_.push_back(std::move(info));
      places_.push_back({number, tensor.begin, type, nullptr});
      continue;
    }
    const int64_t blocks = (tensor.end - tensor.begin) / type->bytes;
    for (const BlockPart& part : type->parts) {
      std::string name = tensor.name;
      if (!part.suffix.empty()) {
        if (name.ends_with(kWeight)) {
          name.resize(name.size() - kWeight.size());
        }
        name += part.suffix;
      }
      Shape shape(tensor.dims);
      shape[shape.rank() - 1] = tensor.dims.back() / type->elements * part.elements;
      tensors_.push_back({std::move(name), part.dtype, shape, file_name, blocks * part.bytes, ""});
      places_.push_back({number, tensor.begin, type, part.decode == nullptr ? nullptr : &part});
    }
  }
}

Result<std::unique_ptr<const TensorStore>> TensorStore::OpenGguf(const std::string& path,
                                                                 const CheckpointOptions& options,
                                                                 GgufHeader* header) {
  std::unique_ptr<TensorStore> store(new TensorStore);
  store->source_ = path;
  store->gguf_ = true;
  std::vector<GgufHeader> headers;
  FMOE_RETURN_IF_ERROR(store->OpenGgufFile(path, options, &headers));
  const int64_t count = headers.front().Integer("split.count").value_or(1);
  if (count < 0 || count > kMostFiles) {
    return Status::BadInput(fmt::format("'split.count' is {}; 0 to {} is required", count, kMostFiles))
        .WithFile(path);
  }
  for (int64_t index = 1; index < count; ++index) {
    FMOE_ASSIGN_OR_RETURN(const std::string part, PartOf(path, index, count));
    FMOE_RETURN_IF_ERROR(store->OpenGgufFile(part, options, &headers));
    const GgufHeader& own = headers.back();
    if (own.Integer("split.count") != count || own.Integer("split.no") != index) {
      return Status::BadInput(fmt::format("is not part {} of {}", index + 1, count)).WithFile(part);
    }
  }
  const MixedExperts mixed = FindMixedExperts(headers);
  for (size_t number = 0; number < headers.size(); ++number) {
    store->ListGguf(headers[number], static_cast<int32_t>(number), mixed, options.decode_blocks);
  }
  *header = std::move(headers.front());
  // A matrix of two levels whose second is one everywhere lacks it in the file.
  const size_t listed = store->tensors_.size();
  FMOE_RETURN_IF_ERROR(store->IndexNames());
  for (size_t i = 0; i < listed; ++i) {
    const TensorInfo info = store->tensors_[i];
    if (store->places_[i].type->id != kGgufNvfp4 || !info.name.ends_with(kWeight)) {
      continue;
    }
    std::string scale = info.name.substr(0, info.name.size() - kWeight.size()) + ".scale";
    if (store->Has(scale)) {
      continue;
    }
    const Shape shape = info.shape.rank() == 3 ? Shape{info.shape[0]} : Shape{1};
    const BlockPart& one = UnitScalePart();
    store->tensors_.push_back({std::move(scale), one.dtype, shape, info.file, shape.count() * one.bytes, ""});
    store->places_.push_back({store->places_[i].file, 0, nullptr, &one});
  }
  store->by_name_.clear();  // its keys are views of names that have moved
  FMOE_RETURN_IF_ERROR(store->IndexNames());
  return std::unique_ptr<const TensorStore>(std::move(store));
}

const BlockType* TensorStore::BlockTypeOf(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : places_[it->second].type;
}

// Whole blocks, as callers read whole rows. Their other tensors stand beside this one in the list.
Result<Tensor> TensorStore::ReadBlocks(size_t index, int64_t offset, int64_t bytes, const Shape& shape,
                                       BlockParts* beside) const {
  const Place& place = places_[index];
  const BlockPart& wanted = *place.part;
  const int64_t first = offset / wanted.bytes, blocks = bytes / wanted.bytes;
  if (beside != nullptr) {
    const auto kept =
        std::find_if(beside->parts.begin(), beside->parts.end(), [&](const BlockParts::Part& part) {
          return part.tensor == index && part.first_block == first && part.data.shape() == shape;
        });
    if (kept != beside->parts.end()) {
      Tensor data = std::move(kept->data);
      beside->parts.erase(kept);
      return data;
    }
  }
  const bool all = beside != nullptr && place.type != nullptr;
  const std::span<const BlockPart> parts =
      all ? place.type->parts : std::span<const BlockPart>(&wanted, size_t{1});
  const auto own = static_cast<size_t>(&wanted - parts.data());
  std::vector<std::shared_ptr<std::byte>> memory(parts.size());
  for (size_t p = 0; p < parts.size(); ++p) {
    FMOE_ASSIGN_OR_RETURN(memory[p], platform::AllocateBytes(blocks * parts[p].bytes));
  }
  // In pieces that stay in a core's cache while they are taken apart.
  constexpr int64_t kPieceBytes = 512 << 10;
  const int64_t block_bytes = place.type == nullptr ? 0 : place.type->bytes;
  const int64_t piece = std::max<int64_t>(1, block_bytes == 0 ? blocks : kPieceBytes / block_bytes);
  FMOE_ASSIGN_OR_RETURN(const std::shared_ptr<std::byte> raw,
                        platform::AllocateBytes(std::min(piece, blocks) * block_bytes));
  for (int64_t block = 0; block < blocks; block += piece) {
    const int64_t count = std::min(piece, blocks - block);
    Status status = files_[static_cast<size_t>(place.file)]->ReadInto(
        place.begin + (first + block) * block_bytes, {raw.get(), static_cast<size_t>(count * block_bytes)});
    if (!status.ok()) {
      return Blame(std::move(status), tensors_[index].name);
    }
    for (size_t p = 0; p < parts.size(); ++p) {
      parts[p].decode(raw.get(), count, memory[p].get() + block * parts[p].bytes);
    }
  }
  Tensor result;
  for (size_t p = 0; p < parts.size(); ++p) {
    Shape own_shape = shape;
    own_shape[shape.rank() - 1] = shape[shape.rank() - 1] / wanted.elements * parts[p].elements;
    const TensorView view(memory[p].get(), parts[p].dtype, own_shape);
    Tensor data = Tensor::Borrow(view, std::move(memory[p]));
    if (p == own) {
      result = std::move(data);
    } else {
      beside->parts.push_back({index - own + p, first, std::move(data)});
    }
  }
  return result;
}

}  // namespace fusedmoe::checkpoint
