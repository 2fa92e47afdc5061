#include "checkpoint/gguf/gguf_header.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <limits>
#include <set>

#include <fmt/format.h>

#include "checkpoint/gguf/gguf_blocks.hpp"
#include "checkpoint/gguf/gguf_cursor.hpp"
#include "core/checked_math.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr char kMagic[] = {'G', 'G', 'U', 'F'};
constexpr int64_t kKeptText = 4096;
constexpr int64_t kKeptList = 4096;
constexpr int64_t kLargestAlignment = int64_t{1} << 20;
constexpr size_t kMostDims = 4;
constexpr int64_t kMostTensors = 1'000'000;

// Types of metadata, by number.
enum ValueType : uint32_t {
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kFloat32,
  kBoolean,
  kText,
  kArray,
  kUint64,
  kInt64,
  kFloat64
};

int64_t SizeOf(uint32_t type) {
  switch (type) {
    case kUint8:
    case kInt8:
    case kBoolean:
      return 1;
    case kUint16:
    case kInt16:
      return 2;
    case kUint32:
    case kInt32:
    case kFloat32:
      return 4;
    case kUint64:
    case kInt64:
    case kFloat64:
      return 8;
    default:
      return 0;
  }
}

GgufValue::Kind KindOf(uint32_t type) {
  return type == kFloat32 || type == kFloat64 ? GgufValue::Kind::kFloat
         : type == kBoolean                   ? GgufValue::Kind::kBool
         : type == kText                      ? GgufValue::Kind::kString
         : SizeOf(type) > 0                   ? GgufValue::Kind::kInteger
                                              : GgufValue::Kind::kOther;
}

template <typename T>
Result<double> As(GgufCursor& cursor) {
  FMOE_ASSIGN_OR_RETURN(const T value, cursor.Value<T>());
  return static_cast<double>(value);
}

Result<double> Number(GgufCursor& cursor, uint32_t type) {
  switch (type) {
    case kUint8:
    case kBoolean:
      return As<uint8_t>(cursor);
    case kInt8:
      return As<int8_t>(cursor);
    case kUint16:
      return As<uint16_t>(cursor);
    case kInt16:
      return As<int16_t>(cursor);
    case kUint32:
      return As<uint32_t>(cursor);
    case kInt32:
      return As<int32_t>(cursor);
    case kFloat32:
      return As<float>(cursor);
    case kUint64:
      return As<uint64_t>(cursor);
    case kInt64:
      return As<int64_t>(cursor);
    default:
      return As<double>(cursor);
  }
}

Status Wrong(const std::string& key, std::string message) {
  return Status::BadInput(fmt::format("'{}' {}", key, std::move(message)));
}

Status ReadText(GgufCursor& cursor, const std::string& key, std::string* text) {
  FMOE_ASSIGN_OR_RETURN(const int64_t length, cursor.Count(fmt::format("length of '{}'", key), 1));
  if (text == nullptr || length > kKeptText) {
    return cursor.Pass(length);
  }
  text->resize(static_cast<size_t>(length));
  return cursor.Bytes(text->data(), length);
}

Result<GgufValue> ReadValue(GgufCursor& cursor, const std::string& key) {
  GgufValue value;
  FMOE_ASSIGN_OR_RETURN(uint32_t type, cursor.Value<uint32_t>());
  int64_t count = 1;
  if (type == kArray) {
    value.is_list = true;
    FMOE_ASSIGN_OR_RETURN(type, cursor.Value<uint32_t>());
    if (type == kArray) {
      return Wrong(key, "is a list of lists");
    }
    // The least that an element takes: a string has a length.
    const int64_t each = type == kText ? 8 : std::max<int64_t>(SizeOf(type), 1);
    FMOE_ASSIGN_OR_RETURN(count, cursor.Count(fmt::format("length of '{}'", key), each));
  }
  value.kind = KindOf(type);
  if (value.kind == GgufValue::Kind::kOther) {
    return Wrong(key, fmt::format("has the unknown type {}", type));
  }
  if (type == kText) {
    for (int64_t i = 0; i < count; ++i) {
      FMOE_RETURN_IF_ERROR(ReadText(cursor, key, value.is_list ? nullptr : &value.text));
    }
    return value;
  }
  if (count > kKeptList) {
    FMOE_RETURN_IF_ERROR(cursor.Pass(count * SizeOf(type)));
    return value;
  }
  for (int64_t i = 0; i < count; ++i) {
    FMOE_ASSIGN_OR_RETURN(const double number, Number(cursor, type));
    if (type == kBoolean && number != 0.0 && number != 1.0) {
      return Wrong(key, fmt::format("is {}; 0 or 1 is needed", number));
    }
    value.numbers.push_back(number);
  }
  return value;
}

Result<GgufTensor> ReadTensor(GgufCursor& cursor, uint64_t* offset) {
  GgufTensor tensor;
  FMOE_ASSIGN_OR_RETURN(tensor.name, cursor.Name("tensor name"));
  const auto wrong = [&](std::string message) {
    return Status::BadInput(std::move(message)).WithTensor(tensor.name);
  };
  FMOE_ASSIGN_OR_RETURN(const uint32_t rank, cursor.Value<uint32_t>());
  if (rank < 1 || rank > kMostDims) {
    return wrong(fmt::format("{} dimensions; 1 to {} are accepted", rank, kMostDims));
  }
  for (uint32_t i = 0; i < rank; ++i) {
    FMOE_ASSIGN_OR_RETURN(const uint64_t dim, cursor.Value<uint64_t>());
    if (dim < 1 || dim > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return wrong(fmt::format("a dimension is {}", dim));
    }
    tensor.dims.insert(tensor.dims.begin(), static_cast<int64_t>(dim));
  }
  FMOE_ASSIGN_OR_RETURN(tensor.type, cursor.Value<uint32_t>());
  FMOE_ASSIGN_OR_RETURN(*offset, cursor.Value<uint64_t>());
  return tensor;
}

// Bytes of all blocks, or nothing when rows are no whole blocks or the product overflows.
Result<int64_t> SizeOfData(const GgufTensor& tensor) {
  const BlockType* type = FindBlockType(tensor.type);
  if (type == nullptr) {
    return Status::Unsupported(fmt::format("the tensor type {} is unknown", tensor.type))
        .WithTensor(tensor.name)
        .WithHint(
            "types of forks (IQ4_K, IQ4_KS and others of ik_llama.cpp) and those that llama.cpp gave up are "
            "not read: take a file in llama.cpp's own types");
  }
  if (tensor.dims.back() % type->elements != 0) {
    return Status::BadInput(fmt::format("rows of {} elements are no whole blocks of {} ({})",
                                        tensor.dims.back(), type->elements, type->name))
        .WithTensor(tensor.name);
  }
  std::optional<int64_t> bytes = CheckedMultiply(tensor.dims.back() / type->elements, type->bytes);
  for (size_t i = 0; bytes && i + 1 < tensor.dims.size(); ++i) {
    bytes = CheckedMultiply(*bytes, tensor.dims[i]);
  }
  if (!bytes) {
    return Status::BadInput("its size overflows").WithTensor(tensor.name);
  }
  return *bytes;
}

Result<int64_t> Alignment(const GgufHeader& header) {
  const GgufValue* value = header.Find("general.alignment");
  if (value == nullptr) {
    return int64_t{32};
  }
  const int64_t alignment = header.Integer("general.alignment").value_or(0);
  if (alignment < 1 || alignment > kLargestAlignment || (alignment & (alignment - 1)) != 0) {
    return Wrong("general.alignment", "must be a power of two up to 2^20");
  }
  return alignment;
}

Status ReadMagic(GgufCursor& cursor) {
  char magic[sizeof(kMagic)] = {};
  FMOE_RETURN_IF_ERROR(cursor.Bytes(magic, sizeof(magic)));
  if (std::memcmp(magic, kMagic, sizeof(magic)) != 0) {
    return Status::BadInput("the file does not begin with 'GGUF'");
  }
  FMOE_ASSIGN_OR_RETURN(const uint32_t version, cursor.Value<uint32_t>());
  if (version != 2 && version != 3) {
    if ((version & 0xffffU) == 0) {
      return Status::Unsupported("big-endian GGUF is not supported")
          .WithHint("gguf-convert-endian of the Python package gguf rewrites it: FILE little");
    }
    return Status::Unsupported(fmt::format("GGUF version {}; 2 and 3 are read", version));
  }
  return Status::Ok();
}

Status ReadValues(GgufCursor& cursor, int64_t count, GgufHeader& header) {
  for (int64_t i = 0; i < count; ++i) {
    FMOE_ASSIGN_OR_RETURN(std::string key, cursor.Name("key"));
    FMOE_ASSIGN_OR_RETURN(GgufValue value, ReadValue(cursor, key));
    if (header.values.contains(key)) {
      return Wrong(key, "occurs twice");
    }
    header.values.emplace(std::move(key), std::move(value));
  }
  return Status::Ok();
}

// The tensors without their bytes, and where each says that these begin.
Result<std::vector<uint64_t>> ReadTensors(GgufCursor& cursor, int64_t count, GgufHeader& header) {
  std::vector<uint64_t> offsets(static_cast<size_t>(count));
  std::set<std::string_view> names;
  header.tensors.reserve(offsets.size());
  for (uint64_t& offset : offsets) {
    FMOE_ASSIGN_OR_RETURN(GgufTensor tensor, ReadTensor(cursor, &offset));
    header.tensors.push_back(std::move(tensor));
    if (!names.insert(header.tensors.back().name).second) {
      return Status::BadInput("the tensor occurs twice").WithTensor(header.tensors.back().name);
    }
  }
  return offsets;
}

// From the end of the header on, one tensor behind the other, each aligned; nothing stands behind the last.
Status PlaceTensors(int64_t header_bytes, int64_t file_bytes, const std::vector<uint64_t>& offsets,
                    GgufHeader& header) {
  FMOE_ASSIGN_OR_RETURN(const int64_t alignment, Alignment(header));
  const auto align = [&](int64_t at) { return (at + alignment - 1) / alignment * alignment; };
  const int64_t data = align(header_bytes);
  int64_t end = data;
  for (size_t i = 0; i < offsets.size(); ++i) {
    GgufTensor& tensor = header.tensors[i];
    FMOE_ASSIGN_OR_RETURN(const int64_t bytes, SizeOfData(tensor));
    tensor.begin = align(end);
    if (offsets[i] != static_cast<uint64_t>(tensor.begin - data)) {
      return Status::BadInput(fmt::format("its offset is {}; the tensors before it end at {}", offsets[i],
                                          tensor.begin - data))
          .WithTensor(tensor.name);
    }
    if (tensor.begin > file_bytes || bytes > file_bytes - tensor.begin) {
      return Status::BadInput(fmt::format("its {} bytes at {} lie outside the file of {} bytes", bytes,
                                          tensor.begin, file_bytes))
          .WithTensor(tensor.name);
    }
    tensor.end = end = tensor.begin + bytes;
  }
  if (!offsets.empty() && file_bytes > align(end)) {
    return Status::BadInput(fmt::format("{} bytes stand behind the last tensor", file_bytes - align(end)));
  }
  return Status::Ok();
}

Result<GgufHeader> Read(const platform::InputFile& file) {
  GgufCursor cursor(file);
  FMOE_RETURN_IF_ERROR(ReadMagic(cursor));
  // A tensor takes at least a name, a rank, a dimension, a type and an offset; a value a key and a type.
  FMOE_ASSIGN_OR_RETURN(const int64_t num_tensors, cursor.Count("number of tensors", 8 + 1 + 4 + 8 + 4 + 8));
  FMOE_ASSIGN_OR_RETURN(const int64_t num_values, cursor.Count("number of values", 8 + 1 + 4 + 1));
  if (num_tensors > kMostTensors) {
    return Status::BadInput(fmt::format("{} tensors; at most {} are accepted", num_tensors, kMostTensors));
  }
  GgufHeader header;
  FMOE_RETURN_IF_ERROR(ReadValues(cursor, num_values, header));
  FMOE_ASSIGN_OR_RETURN(const std::vector<uint64_t> offsets, ReadTensors(cursor, num_tensors, header));
  FMOE_RETURN_IF_ERROR(PlaceTensors(cursor.position(), file.size(), offsets, header));
  return header;
}

}  // namespace

const GgufValue* GgufHeader::Find(std::string_view key) const {
  const auto found = values.find(key);
  return found == values.end() ? nullptr : &found->second;
}

std::optional<int64_t> GgufHeader::Integer(std::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr || value->is_list || value->kind != GgufValue::Kind::kInteger) {
    return std::nullopt;
  }
  return ExactInteger(value->numbers.front());
}

Result<GgufHeader> ReadGgufHeader(const platform::InputFile& file) {
  Result<GgufHeader> header = Read(file);
  return header.ok() ? std::move(header) : std::move(header).status().WithFile(file.path());
}

bool IsGgufFile(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    return false;
  }
  const auto file = platform::InputFile::Open(path, platform::FileAccess::kRead);
  std::byte magic[sizeof(kMagic)] = {};
  return file.ok() && (*file)->size() >= static_cast<int64_t>(sizeof(magic)) &&
         (*file)->ReadInto(0, magic).ok() && std::memcmp(magic, kMagic, sizeof(magic)) == 0;
}

}  // namespace fusedmoe::checkpoint
