#include "checkpoint/files/safetensors_header.hpp"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <tuple>
#include <unordered_set>
#include <utility>

#include <fmt/format.h>

#include "checkpoint/files/json_reader.hpp"
#include "core/checked_math.hpp"
#include "core/json_text.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr size_t kMaxNameBytes = 4096;
constexpr size_t kMaxFileRank = 16;

// The dtypes of the file format; U4 and I4 are our own and never stand in a file.
std::optional<DType> FileDType(std::string_view name) {
  const std::optional<DType> dtype = ParseDType(name);
  if (dtype == DType::kU4 || dtype == DType::kI4) {
    return std::nullopt;
  }
  return dtype;
}

bool HasControlCharacter(std::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; });
}

// What an entry says, before it is known to be consistent.
struct RawEntry {
  std::string_view dtype;
  std::vector<int64_t> dims;
  int64_t begin = 0, end = 0;
  bool has_dtype = false, has_shape = false, has_offsets = false;
};

// True when a list begins; anything else of JSON is refused as such.
bool EnterList(JsonReader& json, std::string_view key) {
  const JsonReader::Kind kind = json.Peek();
  if (kind != JsonReader::Kind::kArray && kind != JsonReader::Kind::kInvalid) {
    return json.Refuse(fmt::format("'{}' is no list", key));
  }
  return json.EnterArray();
}

bool ReadShape(JsonReader& json, RawEntry* entry) {
  if (!EnterList(json, "shape")) {
    return false;
  }
  while (json.NextElement()) {
    int64_t dim = 0;
    if (!json.Integer(&dim)) {
      return false;
    }
    if (dim < 0) {
      return json.Refuse(fmt::format("dimension {} is negative", dim));
    }
    if (entry->dims.size() == kMaxFileRank) {
      return json.Refuse(fmt::format("more than {} dimensions", kMaxFileRank));
    }
    entry->dims.push_back(dim);
  }
  return json.ok();
}

bool ReadOffsets(JsonReader& json, RawEntry* entry) {
  if (!EnterList(json, "data_offsets")) {
    return false;
  }
  if (!json.NextElement() || !json.Integer(&entry->begin) || !json.NextElement() ||
      !json.Integer(&entry->end) || json.NextElement()) {
    return json.Refuse("data_offsets needs two integers");
  }
  return json.ok();
}

// A member of an entry that occurs twice is a mistake; members that nobody knows are skipped, as every reader
// does.
bool ReadEntry(JsonReader& json, RawEntry* entry) {
  if (!json.EnterObject()) {
    return false;
  }
  for (std::string_view key; json.NextKey(&key);) {
    const auto once = [&](bool* seen) {
      if (*seen) {
        return json.Refuse(fmt::format("'{}' occurs twice in one entry", key));
      }
      return *seen = true;
    };
    if (key == "dtype") {
      if (!once(&entry->has_dtype) || !json.String(&entry->dtype)) {
        return false;
      }
    } else if (key == "shape") {
      if (!once(&entry->has_shape) || !ReadShape(json, entry)) {
        return false;
      }
    } else if (key == "data_offsets") {
      if (!once(&entry->has_offsets) || !ReadOffsets(json, entry)) {
        return false;
      }
    } else if (!json.Skip()) {
      return false;
    }
    if (!json.ok()) {
      return false;
    }
  }
  if (!json.ok()) {
    return false;
  }
  if (!entry->has_dtype || !entry->has_shape || !entry->has_offsets) {
    return json.Refuse(fmt::format("the entry lacks '{}'", !entry->has_dtype   ? "dtype"
                                                           : !entry->has_shape ? "shape"
                                                                               : "data_offsets"));
  }
  return true;
}

Status CheckEntry(const RawEntry& raw, int64_t data_bytes, HeaderEntry* entry) {
  if (raw.begin < 0 || raw.end < raw.begin || raw.end > data_bytes) {
    return Status::BadInput(
        fmt::format("data_offsets [{}, {}] lie outside the data of {} bytes or run backwards", raw.begin,
                    raw.end, data_bytes));
  }
  entry->begin = raw.begin;
  entry->end = raw.end;
  const std::optional<int64_t> count = CheckedElementCount(raw.dims);
  if (!count) {
    return Status::BadInput("the product of the dimensions does not fit in 64 bits");
  }
  const std::optional<DType> dtype = FileDType(raw.dtype);
  if (static_cast<int>(raw.dims.size()) <= kMaxRank) {
    entry->shape = Shape(std::span<const int64_t>(raw.dims));
  } else {
    entry->problem = fmt::format("{} dimensions; this library handles {}", raw.dims.size(), kMaxRank);
  }
  if (!dtype) {
    entry->problem = fmt::format("unknown dtype '{}'", raw.dtype.substr(0, 40));
    return Status::Ok();
  }
  entry->dtype = *dtype;
  const std::optional<int64_t> bytes = CheckedTensorBytes(*dtype, raw.dims);
  // Strides are computed from the dimensions alone, so that [2^62, 0, 2^62] must not overflow either.
  std::vector<int64_t> at_least_one = raw.dims;
  for (int64_t& dim : at_least_one) {
    dim = std::max<int64_t>(dim, 1);
  }
  const std::optional<int64_t> cells = CheckedElementCount(at_least_one);
  const bool strides_fit = cells && CheckedMultiply(*cells, 64);
  if (!bytes || !strides_fit) {
    return Status::BadInput(fmt::format("{} elements of {} do not fill whole bytes or overflow 64 bits",
                                        *count, DTypeName(*dtype)));
  }
  if (*bytes != raw.end - raw.begin) {
    return Status::BadInput(fmt::format("{} elements of {} take {} bytes, data_offsets [{}, {}] give {}",
                                        *count, DTypeName(*dtype), *bytes, raw.begin, raw.end,
                                        raw.end - raw.begin));
  }
  if (!raw.dims.empty() && raw.dims.back() * DTypeBits(*dtype) % 8 != 0) {
    entry->problem =
        fmt::format("rows of {} elements of {} do not fill whole bytes", raw.dims.back(), DTypeName(*dtype));
  }
  return Status::Ok();
}

bool ReadMetadata(JsonReader& json, SafetensorsMetadata* metadata) {
  if (json.Peek() == JsonReader::Kind::kNull) {
    return json.Null();  // MLX, of a file without metadata
  }
  if (json.Peek() != JsonReader::Kind::kObject) {
    return json.Refuse("__metadata__ must be an object of strings");
  }
  if (!json.EnterObject()) {
    return false;
  }
  for (std::string_view key; json.NextKey(&key);) {
    std::string_view value;
    if (json.Peek() != JsonReader::Kind::kString) {
      return json.Refuse(fmt::format("__metadata__ '{}' must be a string", key));
    }
    if (!json.String(&value)) {
      return false;
    }
    if (!metadata->emplace(key, value).second) {
      return json.Refuse(fmt::format("__metadata__ '{}' occurs twice", key));
    }
  }
  return json.ok();
}

// The data must be covered from the first byte to the last, without hole and without overlap.
Status CheckCoverage(const std::vector<HeaderEntry>& entries, int64_t data_bytes) {
  int64_t expected = 0;
  for (const HeaderEntry& entry : entries) {
    if (entry.begin != expected) {
      return Status::BadInput(fmt::format("data_offsets begin at {}, but the tensor before ends at {}: {}",
                                          entry.begin, expected,
                                          entry.begin < expected ? "they overlap" : "there is a hole"))
          .WithTensor(entry.name);
    }
    expected = entry.end;
  }
  if (expected != data_bytes) {
    return Status::BadInput(
               fmt::format("the tensors end at byte {} of the data, the file holds {} bytes of it", expected,
                           data_bytes))
        .WithHint("the file is truncated or carries foreign bytes");
  }
  return Status::Ok();
}

Status ParseHeader(std::string_view text, int64_t data_bytes, SafetensorsHeader* header) {
  if (!IsUtf8(text)) {
    return Status::BadInput("the header is not valid UTF-8");
  }
  JsonReader json(text);
  if (json.Peek() != JsonReader::Kind::kObject) {
    return Status::BadInput("the header is no JSON object");
  }
  json.EnterObject();
  // Views of `text`, or of strings that `json` keeps.
  std::unordered_set<std::string_view> names;
  names.reserve(text.size() / 100);
  bool has_metadata = false;
  RawEntry raw;
  for (std::string_view name; json.NextKey(&name);) {
    if (name == "__metadata__") {
      if (std::exchange(has_metadata, true)) {
        return Status::BadInput("__metadata__ occurs twice");
      }
      if (!ReadMetadata(json, &header->metadata)) {
        return json.status();
      }
      continue;
    }
    if (name.empty() || name.size() > kMaxNameBytes) {
      return Status::BadInput(
          fmt::format("a tensor name of {} bytes; 1 to {} are accepted", name.size(), kMaxNameBytes));
    }
    if (HasControlCharacter(name)) {
      return Status::BadInput(
          fmt::format("a control character in the tensor name at byte {}", json.position()));
    }
    if (!names.insert(name).second) {
      return Status::BadInput("the name occurs twice").WithTensor(name);
    }
    raw.dims.clear();
    raw.has_dtype = raw.has_shape = raw.has_offsets = false;
    if (json.Peek() != JsonReader::Kind::kObject) {
      json.Refuse("the entry is no object");
    }
    if (!json.ok() || !ReadEntry(json, &raw)) {
      return Status(json.status()).WithTensor(name);
    }
    HeaderEntry entry;
    entry.name = name;
    if (Status status = CheckEntry(raw, data_bytes, &entry); !status.ok()) {
      return std::move(status).WithTensor(name);
    }
    header->entries.push_back(std::move(entry));
  }
  if (!json.Finish()) {
    return json.status();
  }
  std::sort(header->entries.begin(), header->entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  return CheckCoverage(header->entries, data_bytes);
}

}  // namespace

bool IsUtf8(std::string_view text) {
  const auto* p = reinterpret_cast<const unsigned char*>(text.data());
  const auto* const end = p + text.size();
  while (p < end) {
    if (end - p >= 8) {
      uint64_t word = 0;
      std::memcpy(&word, p, sizeof(word));
      if ((word & 0x8080808080808080U) == 0) {
        p += 8;
        continue;
      }
    }
    const size_t length = Utf8Length({reinterpret_cast<const char*>(p), static_cast<size_t>(end - p)});
    if (length == 0) {
      return false;
    }
    p += length;
  }
  return true;
}

Result<SafetensorsHeader> ReadSafetensorsHeader(const platform::InputFile& file) {
  constexpr int64_t kPrefix = 8;
  constexpr char kLfsPointer[] = "version https://git-lfs";
  const auto bad = [&](std::string message) {
    return Status::BadInput(std::move(message)).WithFile(file.path());
  };
  if (file.size() < kPrefix) {
    return bad(
        fmt::format("{} bytes are too few for a safetensors file, which starts with 8 bytes of header length",
                    file.size()));
  }
  uint64_t stored = 0;
  FMOE_RETURN_IF_ERROR(file.ReadInto(0, std::as_writable_bytes(std::span<uint64_t>(&stored, 1))));
  if (std::memcmp(&stored, kLfsPointer, sizeof(stored)) == 0) {
    return bad("the file is a pointer of Git LFS, not the tensors it stands for")
        .WithHint("run 'git lfs pull' in the repository, or download the file itself");
  }
  if (stored > static_cast<uint64_t>(kMaxHeaderBytes)) {
    return bad(fmt::format("the header claims {} bytes; at most {} are accepted", stored, kMaxHeaderBytes));
  }
  const auto header_bytes = static_cast<int64_t>(stored);
  if (header_bytes > file.size() - kPrefix) {
    return bad(fmt::format("the header claims {} bytes, but only {} follow", header_bytes,
                           file.size() - kPrefix))
        .WithHint("the file is truncated");
  }
  const int64_t data_begin = kPrefix + header_bytes;
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes text, file.Read(kPrefix, header_bytes));
  SafetensorsHeader header;
  const std::string_view view(reinterpret_cast<const char*>(text.data), static_cast<size_t>(text.size));
  if (Status status = ParseHeader(view, file.size() - data_begin, &header); !status.ok()) {
    return std::move(status).WithFile(file.path());
  }
  for (HeaderEntry& entry : header.entries) {
    entry.begin += data_begin;
    entry.end += data_begin;
  }
  return header;
}

}  // namespace fusedmoe::checkpoint
