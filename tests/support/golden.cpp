#include "support/golden.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <stdexcept>

namespace fusedmoe::golden {

struct DataFile {
  std::string bytes;
  std::map<std::string, TensorView, std::less<>> tensors;
};

namespace {

// The golden files are trusted, so this reader checks little; the strict one is in src/checkpoint and has
// tests of its own. Keeping the two apart lets the vectors judge the library without the library's reader.
std::shared_ptr<const DataFile> ReadData(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  auto file = std::make_shared<DataFile>();
  if (!stream) {
    return file;
  }
  std::stringstream buffer;
  buffer << stream.rdbuf();
  file->bytes = std::move(buffer).str();
  uint64_t header_bytes = 0;
  if (file->bytes.size() < sizeof header_bytes) {
    throw std::out_of_range(path.string() + " is shorter than a header length");
  }
  std::memcpy(&header_bytes, file->bytes.data(), sizeof header_bytes);
  const auto header = nlohmann::json::parse(file->bytes.substr(8, header_bytes));
  const char* data = file->bytes.data() + 8 + header_bytes;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      continue;
    }
    const auto dtype = ParseDType(entry["dtype"].get<std::string>());
    const auto dims = entry["shape"].get<std::vector<int64_t>>();
    const auto begin = entry["data_offsets"][0].get<uint64_t>(),
               end = entry["data_offsets"][1].get<uint64_t>();
    if (begin > end || end > file->bytes.size() - 8 - header_bytes) {
      throw std::out_of_range(path.string() + ": " + name + " lies outside the file");
    }
    file->tensors.emplace(name, TensorView(reinterpret_cast<const std::byte*>(data + begin), dtype.value(),
                                           Shape(std::span<const int64_t>(dims))));
  }
  return file;
}

float HalfToFloat(uint16_t half) {
  const int exponent = half >> 10 & 31;
  const int mantissa = half & 1023;
  const float sign = (half & 0x8000) != 0 ? -1.0F : 1.0F;
  if (exponent == 31) {
    return mantissa == 0 ? sign * INFINITY : NAN;
  }
  return sign * (exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -24)
                               : std::ldexp(static_cast<float>(1024 + mantissa), exponent - 25));
}

float ReadFloat(TensorView view, int64_t index) {
  switch (view.dtype()) {
    case DType::kF32:
      return view.as<float>()[index];
    case DType::kF64:
      return static_cast<float>(view.as<double>()[index]);
    case DType::kBF16: {
      const uint32_t bits = static_cast<uint32_t>(view.as<uint16_t>()[index]) << 16;
      float value = 0;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    }
    case DType::kF16:
      return HalfToFloat(view.as<uint16_t>()[index]);
    default:
      return NAN;
  }
}

int64_t ReadInteger(TensorView view, int64_t index) {
  switch (view.dtype()) {
    case DType::kI16:
      return view.as<int16_t>()[index];
    case DType::kU16:
      return view.as<uint16_t>()[index];
    case DType::kI32:
      return view.as<int32_t>()[index];
    case DType::kI64:
      return view.as<int64_t>()[index];
    case DType::kI8:
      return view.as<int8_t>()[index];
    default:
      return view.as<uint8_t>()[index];
  }
}

bool IsFloat(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16 || dtype == DType::kF64;
}

// Maps each code of a packed byte whose value is zero to the positive zero.
uint8_t WithoutZeroSigns(uint8_t byte, DType element) {
  if (element == DType::kF4E2M1) {
    const uint8_t low = (byte & 15) == 8 ? 0 : byte & 15;
    const uint8_t high = byte >> 4 == 8 ? 0 : byte >> 4;
    return static_cast<uint8_t>(high << 4 | low);
  }
  return byte == 0x80 ? 0 : byte;
}

std::string At(const Shape& shape, int64_t index) {
  std::string text = "]";
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    text = std::to_string(index % shape[axis]) + (axis == shape.rank() - 1 ? "" : ",") + text;
    index /= shape[axis];
  }
  return "[" + text;
}

template <typename T>
std::string Difference(std::string_view tensor, const Shape& shape, int64_t index, T expected, T produced) {
  std::ostringstream text;
  text.precision(9);
  text << tensor << At(shape, index) << ": expected " << expected << ", got " << produced;
  return text.str();
}

Outcome CompareSixBit(std::string_view tensor, TensorView expected, TensorView produced) {
  for (int64_t at = 0; at < expected.total_bytes() * 8; at += 6) {
    const auto code = [at](TensorView view) {
      const int64_t byte = at / 8;
      const int next = at % 8 > 2 ? view.as<uint8_t>()[byte + 1] : 0;
      return (view.as<uint8_t>()[byte] | next << 8) >> at % 8 & 63;
    };
    const int want = code(expected), got = code(produced);
    if (want != got && !((want & 31) == 0 && (got & 31) == 0)) {
      return Difference(tensor, {expected.total_bytes() * 8 / 6}, at / 6, want, got);
    }
  }
  return std::nullopt;
}

}  // namespace

GoldenCase::GoldenCase(std::string topic, nlohmann::json manifest, std::shared_ptr<const DataFile> data)
    : topic_(std::move(topic)), manifest_(std::move(manifest)), data_(std::move(data)) {
  name_ = manifest_.value("name", "");
  parameters_ = manifest_.value("parameters", nlohmann::json::object());
}

GoldenCase GoldenCase::Table(std::string topic, std::string name, nlohmann::json table,
                             std::shared_ptr<const DataFile> data) {
  GoldenCase golden_case(std::move(topic), std::move(table), std::move(data));
  golden_case.name_ = std::move(name);
  golden_case.is_table_ = true;
  return golden_case;
}

bool GoldenCase::Has(std::string_view tensor) const {
  return manifest_.contains("tensors") && manifest_["tensors"].contains(std::string(tensor));
}

TensorView GoldenCase::ByKey(const std::string& key) const {
  const auto found = data_->tensors.find(key);
  return found == data_->tensors.end() ? TensorView() : found->second;
}

TensorView GoldenCase::Input(std::string_view tensor) const {
  const auto& entry = manifest_.at("tensors").at(std::string(tensor));
  const std::string key = entry.value("key", name_ + "." + std::string(tensor));
  if (data_->tensors.find(key) == data_->tensors.end()) {
    throw std::out_of_range("the data file has no tensor " + key);  // RunCase makes it the case's failure
  }
  return ByKey(key);
}

std::vector<float> GoldenCase::Floats(std::string_view tensor) const {
  const TensorView view = Input(tensor);
  std::vector<float> values(static_cast<size_t>(view.count()));
  for (size_t index = 0; index < values.size(); ++index) {
    values[index] = ReadFloat(view, static_cast<int64_t>(index));
  }
  return values;
}

std::vector<int64_t> GoldenCase::Integers(std::string_view tensor) const {
  const TensorView view = Input(tensor);
  std::vector<int64_t> values(static_cast<size_t>(view.count()));
  for (size_t index = 0; index < values.size(); ++index) {
    values[index] = ReadInteger(view, static_cast<int64_t>(index));
  }
  return values;
}

std::vector<std::string> GoldenCase::Expected() const {
  std::vector<std::string> names;
  if (manifest_.contains("tensors")) {
    for (const auto& [name, entry] : manifest_["tensors"].items()) {
      if (entry.at("role") == "output" || entry.at("role") == "stage") {
        names.push_back(name);
      }
    }
  }
  return names;
}

Outcome GoldenCase::CompareFloats(std::string_view tensor, const std::vector<float>& produced) const {
  return Compare(tensor, TensorView(reinterpret_cast<const std::byte*>(produced.data()), DType::kF32,
                                    {static_cast<int64_t>(produced.size())}));
}

Outcome GoldenCase::CompareIntegers(std::string_view tensor, const std::vector<int64_t>& produced) const {
  const std::vector<int64_t> expected = Integers(tensor);
  if (expected.size() != produced.size()) {
    return std::string(tensor) + ": expected " + std::to_string(expected.size()) + " elements, got " +
           std::to_string(produced.size());
  }
  for (size_t index = 0; index < expected.size(); ++index) {
    if (expected[index] != produced[index]) {
      return Difference(tensor, Input(tensor).shape(), static_cast<int64_t>(index), expected[index],
                        produced[index]);
    }
  }
  return std::nullopt;
}

Outcome GoldenCase::Compare(std::string_view tensor, TensorView produced,
                            std::optional<DType> code_element) const {
  const TensorView expected = Input(tensor);
  if (!produced.dense()) {
    return std::string(tensor) + ": the produced tensor is not dense";
  }
  const nlohmann::json rule =
      manifest_["tensors"][std::string(tensor)].value("compare", nlohmann::json("exact"));
  const bool as_values = IsFloat(expected.dtype()) && IsFloat(produced.dtype());
  if (as_values ? produced.count() != expected.count() : produced.total_bytes() != expected.total_bytes()) {
    return std::string(tensor) + ": expected " + expected.shape().ToString() + ", got " +
           produced.shape().ToString();
  }
  const int64_t count = expected.count();
  if (as_values) {
    const bool exact = rule == "exact";
    if (!exact && rule.contains("row_l2")) {
      const int64_t columns = expected.rank() == 0 ? 1 : expected.dim(expected.rank() - 1);
      for (int64_t row = 0; row < (columns == 0 ? 0 : count / columns); ++row) {
        double error = 0, norm = 0;
        for (int64_t col = 0; col < columns; ++col) {
          const double want = ReadFloat(expected, row * columns + col);
          const double got = ReadFloat(produced, row * columns + col);
          error += (want - got) * (want - got);
          norm += want * want;
        }
        if (!(std::sqrt(error) <= rule["row_l2"].get<double>() * std::sqrt(norm))) {
          std::ostringstream text;
          text << tensor << " row " << row << ": relative L2 error " << std::sqrt(error / norm)
               << ", allowed " << rule["row_l2"];
          return text.str();
        }
      }
      return std::nullopt;
    }
    const double absolute = exact ? 0.0 : rule.value("abs", 0.0);
    const double relative = exact ? 0.0 : rule.value("rel", 0.0);
    for (int64_t index = 0; index < count; ++index) {
      const float want = ReadFloat(expected, index), got = ReadFloat(produced, index);
      if (std::isnan(want) && std::isnan(got)) {
        continue;
      }
      const bool same_sign_of_zero =
          topic_ != "codecs" || want != 0.0F || std::signbit(want) == std::signbit(got);
      if (want == got && same_sign_of_zero) {
        continue;
      }
      if (exact || !(std::abs(double{got} - want) <= absolute + relative * std::abs(double{want}))) {
        return Difference(tensor, expected.shape(), index, want, got);
      }
    }
    return std::nullopt;
  }
  const double allowed_fraction = rule.is_object() ? rule.value("differing_codes_fraction", 0.0) : 0.0;
  if (code_element == DType::kF6E2M3 || code_element == DType::kF6E3M2) {
    return CompareSixBit(tensor, expected, produced);
  }
  int64_t differing = 0, first = -1;
  const auto* want = expected.as<uint8_t>();
  const auto* got = produced.as<uint8_t>();
  for (int64_t index = 0; index < expected.total_bytes(); ++index) {
    const bool same = code_element ? WithoutZeroSigns(want[index], *code_element) ==
                                         WithoutZeroSigns(got[index], *code_element)
                                   : want[index] == got[index];
    if (!same) {
      first = differing++ == 0 ? index : first;
    }
  }
  if (static_cast<double>(differing) > allowed_fraction * static_cast<double>(expected.total_bytes())) {
    return std::string(tensor) + ": " + std::to_string(differing) + " of " +
           std::to_string(expected.total_bytes()) + " bytes differ, first at byte " + std::to_string(first) +
           ": expected " + std::to_string(want[first]) + ", got " + std::to_string(got[first]);
  }
  return std::nullopt;
}

namespace {

// Throws what the JSON parser throws: LoadTopic turns it into an answer.
Result<std::vector<GoldenCase>> ReadTopic(const std::filesystem::path& manifest_path,
                                          const std::string& directory, const std::string& topic) {
  std::ifstream stream(manifest_path);
  if (!stream) {
    return Status::BadInput("cannot be opened").WithFile(manifest_path.string());
  }
  const auto manifest = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!manifest.is_object()) {
    return Status::BadInput("is not a JSON object").WithFile(manifest_path.string());
  }
  const auto named = manifest.find("data");
  const bool has_name = named != manifest.end() && named->is_string();
  const auto data = ReadData(std::filesystem::path(directory) /
                             (has_name ? named->get<std::string>() : topic + ".safetensors"));
  std::vector<GoldenCase> cases;
  for (const auto& entry : manifest.value("cases", nlohmann::json::array())) {
    cases.emplace_back(manifest.value("topic", topic), entry, data);
  }
  const nlohmann::json tables = manifest.value("tables", nlohmann::json::object());
  for (const auto& [name, table] : tables.items()) {
    cases.push_back(GoldenCase::Table(manifest.value("topic", topic), name, table, data));
  }
  return cases;
}

}  // namespace

Result<std::vector<GoldenCase>> LoadTopic(const std::string& directory, const std::string& topic) {
  const std::filesystem::path manifest_path = std::filesystem::path(directory) / (topic + ".json");
  try {
    return ReadTopic(manifest_path, directory, topic);
  } catch (const std::exception& error) {
    return Status::BadInput(std::string("the manifest or its data cannot be read: ") + error.what())
        .WithFile(manifest_path.string());
  }
}

std::vector<std::string> TopicsIn(const std::string& directory) {
  std::vector<std::string> topics;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    if (entry.path().extension() == ".json") {
      topics.push_back(entry.path().stem().string());
    }
  }
  std::sort(topics.begin(), topics.end());
  return topics;
}

}  // namespace fusedmoe::golden
