#include "layer/pack_cache.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>
#include <span>
#include <utility>

#include <fmt/format.h>
#include <fusedmoe/version.hpp>

#include "core/checked_math.hpp"
#include "core/memory.hpp"
#include "platform/file.hpp"
#include "platform/output_file.hpp"
#include "weights/panel_revision.hpp"

/// A packed file: magic, length and checksum of the header, the header, then the tensors on pages of their
/// own. All numbers little-endian, as x86 and ARM keep them; the layouts inside are for such machines as
/// well.
namespace fusedmoe {
namespace {

constexpr char kMagic[8] = {'F', 'M', 'O', 'E', 'P', 'A', 'K', '1'};
constexpr int64_t kPreludeBytes = 24;  // magic, header bytes, header checksum
constexpr int64_t kLargestHeader = int64_t{1} << 24;
constexpr int64_t kPage = 4096;
/// Pieces that are hashed in parallel.
constexpr int64_t kPieceBytes = int64_t{4} << 20;

/// Eight chains of xor and multiplication: every step is a bijection of the chain, so that a single changed
/// word always changes the result; a few bytes a cycle, faster than memory delivers them.
uint64_t HashPiece(const std::byte* data, int64_t bytes) {
  constexpr uint64_t kFactor = 0x9e3779b97f4a7c15ULL;
  uint64_t chains[8];
  for (size_t i = 0; i < 8; ++i) {
    chains[i] = kFactor * (i + 1) + static_cast<uint64_t>(bytes);
  }
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) {
    uint64_t words[8];
    std::memcpy(words, data + at, sizeof(words));
    for (size_t i = 0; i < 8; ++i) {
      chains[i] = std::rotl((chains[i] ^ words[i]) * kFactor, 29);
    }
  }
  if (at < bytes) {
    uint64_t words[8] = {};
    std::memcpy(words, data + at, static_cast<size_t>(bytes - at));
    for (size_t i = 0; i < 8; ++i) {
      chains[i] = std::rotl((chains[i] ^ words[i]) * kFactor, 29);
    }
  }
  uint64_t hash = kFactor;
  for (const uint64_t chain : chains) {
    hash = std::rotl((hash ^ chain) * kFactor, 31);
  }
  return hash ^ hash >> 32;
}

uint64_t HashText(std::string_view text, uint64_t seed) {
  return HashPiece(reinterpret_cast<const std::byte*>(text.data()), static_cast<int64_t>(text.size())) ^ seed;
}

uint64_t Hash(const std::byte* data, int64_t bytes, const Executor& executor) {
  std::vector<uint64_t> pieces(static_cast<size_t>(CeilDiv(bytes, kPieceBytes)));
  ParallelFor(executor, static_cast<int64_t>(pieces.size()), [&](int64_t piece) {
    const int64_t begin = piece * kPieceBytes;
    pieces[static_cast<size_t>(piece)] = HashPiece(data + begin, std::min(kPieceBytes, bytes - begin));
  });
  return HashPiece(reinterpret_cast<const std::byte*>(pieces.data()),
                   static_cast<int64_t>(pieces.size() * sizeof(uint64_t)));
}

class HeaderWriter {
 public:
  template <typename T>
  void Number(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  void Text(std::string_view text) {
    Number(static_cast<int64_t>(text.size()));
    text_.append(text);
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

/// Reads what HeaderWriter wrote; anything else sets `ok` to false and gives zeros.
class HeaderReader {
 public:
  explicit HeaderReader(std::string_view text) : text_(text) {}
  template <typename T>
  T Number() {
    T value{};
    if (Take(sizeof(T))) {
      std::memcpy(&value, text_.data() + at_ - sizeof(T), sizeof(T));
    }
    return value;
  }
  std::string Text() {
    const auto size = Number<int64_t>();
    if (size < 0 || !Take(static_cast<size_t>(size))) {
      ok_ = false;
      return {};
    }
    return std::string(text_.substr(at_ - static_cast<size_t>(size), static_cast<size_t>(size)));
  }
  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && at_ == text_.size(); }

 private:
  bool Take(size_t count) {
    ok_ = ok_ && count <= text_.size() - at_;
    at_ += ok_ ? count : 0;
    return ok_;
  }
  std::string_view text_;
  size_t at_ = 0;
  bool ok_ = true;
};

Status Damaged(const std::string& path, std::string_view what) {
  return Status::BadInput(fmt::format("the packed weights are damaged: {}", what)).WithFile(path);
}

Result<PreparedWeights::Named> ReadTensor(const platform::InputFile& file, HeaderReader& reader,
                                          const Executor& executor) {
  PreparedWeights::Named named;
  named.name = reader.Text();
  const std::optional<DType> dtype = ParseDType(reader.Text());
  std::vector<int64_t> dims(static_cast<size_t>(std::clamp<int64_t>(reader.Number<int64_t>(), 0, 4)));
  int64_t count = 1;
  bool sizes = true;
  for (int64_t& dim : dims) {
    dim = reader.Number<int64_t>();
    sizes = sizes && dim >= 0 && dim <= (int64_t{1} << 40) && (dim == 0 || count <= (int64_t{1} << 45) / dim);
    count *= sizes ? dim : 0;
  }
  const auto offset = reader.Number<int64_t>();
  const auto bytes = reader.Number<int64_t>();
  const auto hash = reader.Number<uint64_t>();
  if (!reader.ok() || !dtype || !sizes || bytes != PackedBytes(*dtype, count) || offset % kPage != 0) {
    return Damaged(file.path(), fmt::format("tensor '{}' is not described as it was written", named.name));
  }
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes data, file.View(offset, bytes));
  if (Hash(data.data, bytes, executor) != hash) {
    return Damaged(file.path(), fmt::format("the bytes of '{}' do not have their checksum", named.name));
  }
  const TensorView view(data.data, *dtype, Shape(std::span<const int64_t>(dims)));
  named.tensor = Tensor::Borrow(view, data.owner);
  return named;
}

/// The text that a cache file stands for.
std::string PackCacheKey(const Backend& backend, const Plan& plan, const MoeProblem& problem,
                         const ExpertSource& source) {
  const MoeConfig& config = problem.config;
  // The recipe names the layout, which no instruction set changes, and the revision says what that text
  // means.
  return fmt::format("{} | panels {} | {} | {} | {} experts of {} x {} {} {} | tp {} {} | {}",
                     FUSEDMOE_VERSION_STRING, kPanelRevision, backend.name, fmt::join(plan.recipe, ", "),
                     config.num_local_experts, config.hidden, config.intermediate,
                     ActivationName(config.activation.kind), source.scheme.name, config.parallel.tp_size,
                     static_cast<int>(problem.activation), source.identity);
}

/// The file that a key is in.
std::string PackCachePath(const std::string& directory, std::string_view key) {
  const std::string name = fmt::format("{:016x}{:016x}.packed", HashText(key, 0),
                                       HashText(std::string("second half ") + std::string(key), 0));
  return (std::filesystem::path(directory) / name).string();
}

}  // namespace

Status WritePacked(const std::string& path, std::string_view key, const PreparedWeights& weights,
                   const Executor& executor) {
  HeaderWriter header;
  header.Text(key);
  header.Text(weights.layout_key);
  header.Number(static_cast<int64_t>(weights.recipe.size()));
  for (const std::string& step : weights.recipe) {
    header.Text(step);
  }
  header.Number(weights.layout_error);
  header.Number(static_cast<int64_t>(weights.tensors.size()));
  // Names and shapes fill far less than the first of these pages leave.
  int64_t header_room = kPreludeBytes + static_cast<int64_t>(header.text().size());
  for (const PreparedWeights::Named& named : weights.tensors) {
    header_room += static_cast<int64_t>(named.name.size()) + 128;
  }
  int64_t offset = RoundUp(header_room, kPage);
  std::vector<int64_t> offsets;
  for (const PreparedWeights::Named& named : weights.tensors) {
    const TensorView& view = named.tensor.view();
    header.Text(named.name);
    header.Text(DTypeName(view.dtype()));
    header.Number(static_cast<int64_t>(view.rank()));
    for (const int64_t dim : view.shape().dims()) {
      header.Number(dim);
    }
    header.Number(offset);
    header.Number(view.total_bytes());
    header.Number(Hash(view.data(), view.total_bytes(), executor));
    offsets.push_back(offset);
    offset = RoundUp(offset + view.total_bytes(), kPage);
  }
  FMOE_ASSIGN_OR_RETURN(const auto file, platform::OutputFile::Create(path));
  FMOE_RETURN_IF_ERROR(file->Resize(offset));
  HeaderWriter prelude;
  prelude.Number(static_cast<int64_t>(header.text().size()));
  prelude.Number(HashText(header.text(), 0));
  FMOE_RETURN_IF_ERROR(file->Append(std::as_bytes(std::span(kMagic))));
  FMOE_RETURN_IF_ERROR(file->Append(std::as_bytes(std::span(prelude.text()))));
  FMOE_RETURN_IF_ERROR(file->Append(std::as_bytes(std::span(header.text()))));
  for (size_t i = 0; i < offsets.size(); ++i) {
    const TensorView& view = weights.tensors[i].tensor.view();
    FMOE_RETURN_IF_ERROR(file->WriteAt(offsets[i], {view.data(), static_cast<size_t>(view.total_bytes())}));
  }
  return file->Commit();
}

Result<PreparedWeights> ReadPacked(const std::string& path, std::string_view key, const Executor& executor) {
  FMOE_ASSIGN_OR_RETURN(const auto file, platform::InputFile::Open(path, platform::FileAccess::kMap));
  if (file->size() < kPreludeBytes) {
    return Damaged(path, fmt::format("{} bytes are no file of packed weights", file->size()));
  }
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes prelude, file->Read(0, kPreludeBytes));
  int64_t header_bytes = 0;
  uint64_t header_hash = 0;
  std::memcpy(&header_bytes, prelude.data + 8, 8);
  std::memcpy(&header_hash, prelude.data + 16, 8);
  if (std::memcmp(prelude.data, kMagic, sizeof(kMagic)) != 0 || header_bytes < 0 ||
      header_bytes > std::min(kLargestHeader, file->size() - kPreludeBytes)) {
    return Damaged(path, "it does not begin as one");
  }
  FMOE_ASSIGN_OR_RETURN(const platform::FileBytes bytes, file->Read(kPreludeBytes, header_bytes));
  const std::string_view header(reinterpret_cast<const char*>(bytes.data), static_cast<size_t>(header_bytes));
  if (HashText(header, 0) != header_hash) {
    return Damaged(path, "its header does not have its checksum");
  }
  HeaderReader reader(header);
  if (reader.Text() != key) {
    return Status::BadInput("the packed weights are those of something else").WithFile(path);
  }
  PreparedWeights weights;
  weights.layout_key = reader.Text();
  const auto steps = reader.Number<int64_t>();
  for (int64_t i = 0; i < steps && reader.ok(); ++i) {
    weights.recipe.push_back(reader.Text());
  }
  weights.layout_error = reader.Number<double>();
  const auto tensors = reader.Number<int64_t>();
  for (int64_t i = 0; i < tensors && reader.ok(); ++i) {
    FMOE_ASSIGN_OR_RETURN(PreparedWeights::Named named, ReadTensor(*file, reader, executor));
    weights.tensors.push_back(std::move(named));
  }
  if (!reader.at_end()) {
    return Damaged(path, "its header does not end where it should");
  }
  weights.from_file = true;
  return weights;
}

Result<PreparedWeights> PrepareCached(const Backend& backend, const Plan& plan, const MoeProblem& problem,
                                      const Machine& machine, const ExpertSource& source,
                                      const Executor& executor, const std::string& directory,
                                      std::vector<std::string>& notes) {
  const MemoryReuse reuse;  // of one expert by the next
  const bool on_card = backend.device != "cpu";
  if (directory.empty() || on_card || source.identity.empty()) {
    if (!directory.empty()) {
      notes.emplace_back(
          on_card ? "pack cache: weights on a card are not kept"
                  : "pack cache: weights that come from no file have no identity and are not kept");
    }
    return backend.prepare(problem, machine, source, executor);
  }
  const std::string key = PackCacheKey(backend, plan, problem, source);
  const std::string path = PackCachePath(directory, key);
  std::error_code error;
  if (std::filesystem::exists(path, error)) {
    Result<PreparedWeights> kept = ReadPacked(path, key, executor);
    if (kept.ok()) {
      notes.push_back(fmt::format("pack cache: mapped {}", path));
      return kept;
    }
    notes.push_back(fmt::format("pack cache: made again, since {}", kept.status().ToString()));
  }
  FMOE_ASSIGN_OR_RETURN(PreparedWeights weights, backend.prepare(problem, machine, source, executor));
  if (weights.tensors.empty() || !weights.canonical.empty()) {
    notes.push_back(
        fmt::format("pack cache: {} computes on the canonical form, nothing is kept", backend.name));
    return weights;
  }
  std::filesystem::create_directories(directory, error);
  const Status written =
      error ? Status::System(fmt::format("cannot make the folder: {}", error.message())).WithFile(directory)
            : WritePacked(path, key, weights, executor);
  notes.push_back(written.ok() ? fmt::format("pack cache: wrote {}", path)
                               : fmt::format("pack cache: not kept, since {}", written.ToString()));
  return weights;
}

}  // namespace fusedmoe
