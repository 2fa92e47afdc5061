#include "checkpoint/gguf/gguf_writer.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include <fmt/format.h>

#include "checkpoint/formats.hpp"
#include "platform/output_file.hpp"

namespace fusedmoe::checkpoint {
namespace {

constexpr int64_t kAlignment = 32;
constexpr size_t kLongestName = 63;  // GGML_MAX_NAME with its end
// Types of metadata, by number.
constexpr uint32_t kUint32 = 4, kFloat32 = 6, kBoolean = 7, kText = 8, kArray = 9;

int64_t Align(int64_t at) {
  return (at + kAlignment - 1) / kAlignment * kAlignment;
}

template <typename T>
void Put(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void PutText(std::string& out, std::string_view text) {
  Put<uint64_t>(out, text.size());
  out += text;
}

void PutValue(std::string& out, const GgufEntry& entry) {
  if (const auto* integer = std::get_if<uint32_t>(&entry.value)) {
    Put(out, kUint32);
    Put(out, *integer);
  } else if (const auto* number = std::get_if<float>(&entry.value)) {
    Put(out, kFloat32);
    Put(out, *number);
  } else if (const auto* flag = std::get_if<bool>(&entry.value)) {
    Put(out, kBoolean);
    Put<uint8_t>(out, *flag ? 1 : 0);
  } else if (const auto* text = std::get_if<std::string>(&entry.value)) {
    Put(out, kText);
    PutText(out, *text);
  } else {
    const auto& list = std::get<std::vector<float>>(entry.value);
    Put(out, kArray);
    Put(out, kFloat32);
    Put<uint64_t>(out, list.size());
    for (const float value : list) {
      Put(out, value);
    }
  }
}

Status Wrong(const GgufSpec& spec, std::string message) {
  return Status::Usage(std::move(message)).WithTensor(spec.name);
}

// Bytes of a tensor.
Result<int64_t> SizeOf(const GgufSpec& spec) {
  const BlockType* type = FindBlockType(spec.type);
  if (type == nullptr) {
    return Wrong(spec, fmt::format("the tensor type {} is unknown", spec.type));
  }
  if (spec.dims.empty() || spec.dims.size() > 4) {
    return Wrong(spec, fmt::format("{} dimensions; 1 to 4 are possible", spec.dims.size()));
  }
  if (spec.dims.back() % type->elements != 0) {
    return Wrong(spec, fmt::format("rows of {} elements are no whole blocks of {} ({})", spec.dims.back(),
                                   type->elements, type->name));
  }
  int64_t bytes = spec.dims.back() / type->elements * type->bytes;
  for (size_t i = 0; i + 1 < spec.dims.size(); ++i) {
    bytes *= spec.dims[i];
  }
  if (spec.parts < 1 || bytes % spec.parts != 0) {
    return Wrong(spec, fmt::format("{} bytes do not come in {} equal parts", bytes, spec.parts));
  }
  return bytes;
}

}  // namespace

struct GgufWriter::Impl {
  struct Place {
    int64_t begin = 0, part_bytes = 0;
    std::vector<bool> written;
  };
  std::unique_ptr<platform::OutputFile> file;
  std::map<std::string, Place, std::less<>> places;
  int64_t bytes = 0;
};

GgufWriter::GgufWriter(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
GgufWriter::~GgufWriter() = default;

Result<std::unique_ptr<GgufWriter>> GgufWriter::Create(const std::string& path,
                                                       const std::vector<GgufEntry>& entries,
                                                       std::vector<GgufSpec> specs) {
  auto impl = std::make_unique<Impl>();
  std::string header = "GGUF";
  Put<uint32_t>(header, 3);
  Put<uint64_t>(header, specs.size());
  Put<uint64_t>(header, entries.size());
  std::set<std::string_view> keys;
  for (const GgufEntry& entry : entries) {
    if (entry.key.empty() || !keys.insert(entry.key).second) {
      return Status::Usage(fmt::format("the key '{}' is empty or occurs twice", entry.key));
    }
    PutText(header, entry.key);
    PutValue(header, entry);
  }
  int64_t end = 0;
  for (const GgufSpec& spec : specs) {
    if (spec.name.empty() || spec.name.size() > kLongestName) {
      return Wrong(spec,
                   fmt::format("a name of {} bytes; 1 to {} are possible", spec.name.size(), kLongestName));
    }
    FMOE_ASSIGN_OR_RETURN(const int64_t bytes, SizeOf(spec));
    Impl::Place place{Align(end), bytes / spec.parts, std::vector<bool>(static_cast<size_t>(spec.parts))};
    PutText(header, spec.name);
    Put(header, static_cast<uint32_t>(spec.dims.size()));
    for (auto dim = spec.dims.rbegin(); dim != spec.dims.rend(); ++dim) {
      Put(header, static_cast<uint64_t>(*dim));
    }
    Put(header, spec.type);
    Put(header, static_cast<uint64_t>(place.begin));
    end = place.begin + bytes;
    if (!impl->places.emplace(spec.name, std::move(place)).second) {
      return Wrong(spec, "the tensor occurs twice");
    }
  }
  header.resize(static_cast<size_t>(Align(static_cast<int64_t>(header.size()))), '\0');
  const auto data = static_cast<int64_t>(header.size());
  for (auto& [name, place] : impl->places) {
    place.begin += data;
  }
  impl->bytes = Align(data + end);
  FMOE_ASSIGN_OR_RETURN(impl->file, platform::OutputFile::Create(path));
  FMOE_RETURN_IF_ERROR(impl->file->Resize(impl->bytes));
  FMOE_RETURN_IF_ERROR(impl->file->WriteAt(0, std::as_bytes(std::span(header))));
  return std::unique_ptr<GgufWriter>(new GgufWriter(std::move(impl)));
}

Status GgufWriter::Write(std::string_view name, int64_t part, std::span<const std::byte> bytes) {
  const auto found = impl_->places.find(name);
  if (found == impl_->places.end()) {
    return Status::Usage("no such tensor was announced").WithTensor(std::string(name));
  }
  Impl::Place& place = found->second;
  if (part < 0 || part >= static_cast<int64_t>(place.written.size()) ||
      static_cast<int64_t>(bytes.size()) != place.part_bytes || place.written[static_cast<size_t>(part)]) {
    return Status::Usage(fmt::format("part {} of {} bytes; {} parts of {} bytes are written once each", part,
                                     bytes.size(), place.written.size(), place.part_bytes))
        .WithTensor(std::string(name));
  }
  FMOE_RETURN_IF_ERROR(impl_->file->WriteAt(place.begin + part * place.part_bytes, bytes));
  place.written[static_cast<size_t>(part)] = true;
  return Status::Ok();
}

Status GgufWriter::Finish() {
  for (const auto& [name, place] : impl_->places) {
    if (std::find(place.written.begin(), place.written.end(), false) != place.written.end()) {
      return Status::Usage("not all of the tensor was written").WithTensor(name);
    }
  }
  return impl_->file->Commit();
}

int64_t GgufWriter::file_bytes() const {
  return impl_->bytes;
}

namespace {

// Pairs of neighbours in a byte to the halves of each group of `group` elements: the first half of them in
// the low nibbles.
void SplitHalves(const std::byte* pairs, int64_t group, std::byte* out) {
  const int64_t half = group / 2;
  const auto code = [&](int64_t j) {
    const auto byte = std::to_integer<uint32_t>(pairs[j / 2]);
    return j % 2 == 0 ? byte & 15U : byte >> 4;
  };
  for (int64_t j = 0; j < half; ++j) {
    out[j] = static_cast<std::byte>(code(j) | code(j + half) << 4);
  }
}

void EncodeBlock(uint32_t type, const std::byte* codes, const std::byte* scales, std::byte* out) {
  switch (type) {
    case kGgufQ4_0:
      std::memcpy(out, scales, 2);
      SplitHalves(codes, 32, out + 2);
      return;
    case kGgufQ8_0:
      std::memcpy(out, scales, 2);
      for (int64_t j = 0; j < 32; ++j) {
        out[2 + j] = codes[j] ^ std::byte{0x80};
      }
      return;
    case kGgufMxfp4:
      out[0] = scales[0];
      SplitHalves(codes, 32, out + 1);
      return;
    default:  // NVFP4
      std::memcpy(out, scales, 4);
      for (int64_t group = 0; group < 4; ++group) {
        SplitHalves(codes + group * 8, 16, out + 4 + group * 8);
      }
      return;
  }
}

}  // namespace

WeightFormat FormatOfBlocks(const BlockType& type) {
  switch (type.id) {
    case kGgufQ4_0:
    case kGgufQ8_0: {
      WeightFormat format = IntegerWeight(type.id == kGgufQ4_0 ? 4 : 8, type.elements);
      format.block_scale_dtype = DType::kF16;
      return format;
    }
    case kGgufMxfp4:
      return Mx(DType::kF4E2M1);
    case kGgufNvfp4:
      return Nvfp4(16);
    default: {
      WeightFormat format;
      if (type.parts.size() == 1 && type.parts.front().decode == nullptr) {
        format.element = type.parts.front().dtype;
      }
      return format;
    }
  }
}

Result<Tensor> EncodeBlocks(const BlockType& type, const CanonicalMatrix& matrix) {
  const WeightFormat wanted = FormatOfBlocks(type);
  if (!(matrix.format == wanted) || (type.elements == 1 && wanted.quantized())) {
    return Status::Unsupported(fmt::format("{} does not hold {}", type.name, Describe(matrix.format)));
  }
  if (matrix.cols % type.elements != 0) {
    return Status::Unsupported(fmt::format("{} columns are no multiple of {}, which {} needs", matrix.cols,
                                           type.elements, type.name));
  }
  const int64_t blocks = matrix.cols / type.elements;
  FMOE_ASSIGN_OR_RETURN(Tensor tensor, Tensor::Allocate(DType::kU8, {matrix.rows, blocks * type.bytes}));
  std::byte* out = tensor.mutable_view().data();
  const TensorView codes = matrix.codes.view();
  if (!wanted.quantized()) {
    for (int64_t row = 0; row < matrix.rows; ++row) {
      std::memcpy(out + row * blocks * type.bytes, codes.data() + row * codes.stride_bytes(0),
                  static_cast<size_t>(blocks * type.bytes));
    }
    return tensor;
  }
  const TensorView scales = matrix.block_scale.view();
  const int64_t code_bytes = PackedBytes(wanted.element, type.elements);
  const int64_t scale_bytes = type.elements / wanted.block.col * DTypeBits(wanted.block_scale_dtype) / 8;
  for (int64_t row = 0; row < matrix.rows; ++row) {
    for (int64_t block = 0; block < blocks; ++block) {
      EncodeBlock(type.id, codes.data() + row * codes.stride_bytes(0) + block * code_bytes,
                  scales.data() + row * scales.stride_bytes(0) + block * scale_bytes,
                  out + (row * blocks + block) * type.bytes);
    }
  }
  return tensor;
}

}  // namespace fusedmoe::checkpoint
