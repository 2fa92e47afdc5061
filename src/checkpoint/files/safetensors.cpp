#include <fusedmoe/safetensors.hpp>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <unordered_map>

#include <fmt/format.h>

#include "checkpoint/files/safetensors_header.hpp"
#include "core/checked_math.hpp"
#include "core/json_text.hpp"
#include "platform/file.hpp"
#include "platform/output_file.hpp"

namespace fusedmoe {
namespace {

Status CheckSpec(const TensorSpec& spec) {
  const auto refuse = [&](std::string message) {
    return Status::Usage(std::move(message)).WithTensor(spec.name);
  };
  if (spec.name.empty() || spec.name == "__metadata__") {
    return refuse("no name for a tensor");
  }
  if (spec.name.size() > 4096) {
    return refuse("a tensor name has at most 4096 bytes");
  }
  if (!checkpoint::IsUtf8(spec.name)) {
    return refuse("a tensor name must be UTF-8");
  }
  for (const char c : spec.name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) {
      return refuse("a tensor name must not hold control characters");
    }
  }
  if (spec.dtype == DType::kU4 || spec.dtype == DType::kI4) {
    return refuse(fmt::format("safetensors has no dtype {}", DTypeName(spec.dtype)));
  }
  return Status::Ok();
}

}  // namespace

const Tensor* SafetensorsFile::Find(std::string_view name) const {
  for (const NamedTensor& named : tensors) {
    if (named.name == name) {
      return &named.tensor;
    }
  }
  return nullptr;
}

Result<SafetensorsFile> ReadSafetensors(const std::string& path) {
  FMOE_ASSIGN_OR_RETURN(auto file, platform::InputFile::Open(path, platform::FileAccess::kRead));
  FMOE_ASSIGN_OR_RETURN(checkpoint::SafetensorsHeader header, checkpoint::ReadSafetensorsHeader(*file));
  SafetensorsFile result;
  result.metadata = std::move(header.metadata);
  for (checkpoint::HeaderEntry& entry : header.entries) {
    if (!entry.problem.empty()) {
      return Status::BadInput(entry.problem).WithFile(path).WithTensor(entry.name);
    }
    FMOE_ASSIGN_OR_RETURN(platform::FileBytes bytes, file->Read(entry.begin, entry.end - entry.begin));
    const TensorView view(bytes.data, entry.dtype, entry.shape);
    result.tensors.push_back({std::move(entry.name), Tensor::Borrow(view, std::move(bytes.owner))});
  }
  return result;
}

struct SafetensorsWriter::Impl {
  struct Slot {
    TensorSpec spec;
    int64_t begin = 0, bytes = 0;  ///< in the file
    bool written = false;
  };
  /// Slots for `specs` one behind the other, from 0 on.
  Status Place(std::vector<TensorSpec> specs);
  /// The JSON header of the slots, padded so that the data starts at a multiple of 8.
  std::string Header(const SafetensorsMetadata& metadata) const;
  /// The data follows a header of so many bytes.
  Status MoveBehind(int64_t header_bytes);

  std::unique_ptr<platform::OutputFile> file;
  std::string path;
  std::vector<Slot> slots;
  std::unordered_map<std::string_view, size_t> by_name;
  int64_t total = 0;
};

Status SafetensorsWriter::Impl::Place(std::vector<TensorSpec> specs) {
  std::sort(specs.begin(), specs.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return std::make_tuple(-static_cast<int>(a.dtype), std::string_view(a.name)) <
           std::make_tuple(-static_cast<int>(b.dtype), std::string_view(b.name));
  });
  slots.reserve(specs.size());
  for (TensorSpec& spec : specs) {
    if (Status status = CheckSpec(spec); !status.ok()) {
      return std::move(status).WithFile(path);
    }
    const std::optional<int64_t> bytes = CheckedTensorBytes(spec.dtype, spec.shape.dims());
    const std::optional<int64_t> end = bytes ? CheckedAdd(total, *bytes) : std::nullopt;
    if (!end) {
      return Status::Usage(fmt::format("{} of {} does not fill whole bytes or overflows 64 bits",
                                       spec.shape.ToString(), DTypeName(spec.dtype)))
          .WithFile(path)
          .WithTensor(spec.name);
    }
    slots.push_back({std::move(spec), total, *bytes, false});
    total = *end;
  }
  return Status::Ok();
}

std::string SafetensorsWriter::Impl::Header(const SafetensorsMetadata& metadata) const {
  std::string header = "{";
  if (!metadata.empty()) {
    header += "\"__metadata__\":{";
    for (const auto& [key, value] : metadata) {
      if (header.back() != '{') {
        header.push_back(',');
      }
      AppendJsonString(key, &header);
      header.push_back(':');
      AppendJsonString(value, &header);
    }
    header += "}";
  }
  for (const Slot& slot : slots) {
    if (header.size() > 1) {
      header.push_back(',');
    }
    AppendJsonString(slot.spec.name, &header);
    header += fmt::format(":{{\"dtype\":\"{}\",\"shape\":[", DTypeName(slot.spec.dtype));
    for (int axis = 0; axis < slot.spec.shape.rank(); ++axis) {
      header += fmt::format("{}{}", axis == 0 ? "" : ",", slot.spec.shape[axis]);
    }
    header += fmt::format("],\"data_offsets\":[{},{}]}}", slot.begin, slot.begin + slot.bytes);
  }
  header += "}";
  header.resize(static_cast<size_t>(RoundUp(static_cast<int64_t>(header.size()), 8)), ' ');
  return header;
}

Status SafetensorsWriter::Impl::MoveBehind(int64_t header_bytes) {
  if (header_bytes > checkpoint::kMaxHeaderBytes) {
    return Status::Usage(fmt::format("a header of {} bytes; readers accept {}", header_bytes,
                                     checkpoint::kMaxHeaderBytes))
        .WithFile(path)
        .WithHint("write several shards");
  }
  const int64_t data_begin = 8 + header_bytes;
  for (size_t i = 0; i < slots.size(); ++i) {
    slots[i].begin += data_begin;
    if (!by_name.emplace(slots[i].spec.name, i).second) {
      return Status::Usage("the name occurs twice").WithFile(path).WithTensor(slots[i].spec.name);
    }
  }
  total += data_begin;
  return Status::Ok();
}

SafetensorsWriter::SafetensorsWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafetensorsWriter::~SafetensorsWriter() = default;

Result<std::unique_ptr<SafetensorsWriter>> SafetensorsWriter::Create(const std::string& path,
                                                                     std::vector<TensorSpec> specs,
                                                                     const SafetensorsMetadata& metadata) {
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  FMOE_RETURN_IF_ERROR(impl->Place(std::move(specs)));
  const std::string header = impl->Header(metadata);
  FMOE_RETURN_IF_ERROR(impl->MoveBehind(static_cast<int64_t>(header.size())));
  FMOE_ASSIGN_OR_RETURN(impl->file, platform::OutputFile::Create(path));
  FMOE_RETURN_IF_ERROR(impl->file->Resize(impl->total));
  const auto length = static_cast<uint64_t>(header.size());
  FMOE_RETURN_IF_ERROR(impl->file->WriteAt(0, std::as_bytes(std::span<const uint64_t>(&length, 1))));
  FMOE_RETURN_IF_ERROR(impl->file->WriteAt(8, std::as_bytes(std::span<const char>(header))));
  return std::unique_ptr<SafetensorsWriter>(new SafetensorsWriter(std::move(impl)));
}

int64_t SafetensorsWriter::file_bytes() const {
  return impl_->total;
}

Status SafetensorsWriter::Write(std::string_view name, TensorView tensor) {
  const auto refuse = [&](std::string message) {
    return Status::Usage(std::move(message)).WithFile(impl_->path).WithTensor(name);
  };
  const auto found = impl_->by_name.find(name);
  if (found == impl_->by_name.end()) {
    return refuse("the file was planned without this tensor");
  }
  Impl::Slot& slot = impl_->slots[found->second];
  if (slot.written) {
    return refuse("the tensor was written before");
  }
  if (tensor.dtype() != slot.spec.dtype || !(tensor.shape() == slot.spec.shape)) {
    return refuse(fmt::format("{} {} is given, {} {} was planned", DTypeName(tensor.dtype()),
                              tensor.shape().ToString(), DTypeName(slot.spec.dtype),
                              slot.spec.shape.ToString()));
  }
  slot.written = true;
  if (slot.bytes == 0) {
    return Status::Ok();
  }
  if (tensor.dense()) {
    return impl_->file->WriteAt(slot.begin, {tensor.data(), static_cast<size_t>(slot.bytes)});
  }
  // Rows of the last axis are contiguous; a strided tensor is gathered row by row into one buffer.
  std::vector<std::byte> packed(static_cast<size_t>(slot.bytes));
  const int64_t row_bytes = tensor.row_bytes();
  const int64_t rows = slot.bytes / row_bytes;
  std::array<int64_t, kMaxRank> index{};
  for (int64_t row = 0; row < rows; ++row) {
    int64_t source = 0;
    for (int axis = 0; axis + 1 < tensor.rank(); ++axis) {
      source += index[static_cast<size_t>(axis)] * tensor.stride_bytes(axis);
    }
    std::memcpy(packed.data() + row * row_bytes, tensor.data() + source, static_cast<size_t>(row_bytes));
    for (int axis = tensor.rank() - 2; axis >= 0; --axis) {
      if (++index[static_cast<size_t>(axis)] < tensor.dim(axis)) {
        break;
      }
      index[static_cast<size_t>(axis)] = 0;
    }
  }
  return impl_->file->WriteAt(slot.begin, packed);
}

Status SafetensorsWriter::Finish() {
  for (const Impl::Slot& slot : impl_->slots) {
    if (!slot.written) {
      return Status::Usage("the tensor was planned but not written")
          .WithFile(impl_->path)
          .WithTensor(slot.spec.name);
    }
  }
  return impl_->file->Commit();
}

Status CheckSafetensorsPlace(const std::string& path) {
  return platform::OutputFile::CheckPlace(path);
}

Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors,
                        const SafetensorsMetadata& metadata) {
  std::vector<TensorSpec> specs;
  specs.reserve(tensors.size());
  for (const NamedTensor& named : tensors) {
    specs.push_back({named.name, named.tensor.dtype(), named.tensor.shape()});
  }
  FMOE_ASSIGN_OR_RETURN(auto writer, SafetensorsWriter::Create(path, std::move(specs), metadata));
  for (const NamedTensor& named : tensors) {
    FMOE_RETURN_IF_ERROR(writer->Write(named.name, named.tensor.view()));
  }
  return writer->Finish();
}

}  // namespace fusedmoe
