#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <fusedmoe/status.hpp>

/// GGUF files made byte by byte, sound and damaged ones.
namespace fusedmoe::testing_support {

inline constexpr uint32_t kUint8 = 0, kUint32 = 4, kFloat32 = 6, kBoolean = 7, kText = 8, kArray = 9,
                          kUint64 = 10;
inline constexpr uint32_t kTypeF32 = 0, kTypeQ4_0 = 2, kTypeQ8_0 = 8, kTypeQ8K = 15, kTypeMxfp4 = 39,
                          kTypeNvfp4 = 40;
inline constexpr int64_t kHiddenSize = 64, kMiddle = 64;

template <typename T>
std::string Raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

inline std::string Text(const std::string& text) {
  return Raw<uint64_t>(text.size()) + text;
}

struct RawGguf {
  struct Tensor {
    std::string name;
    std::vector<uint64_t> dims;  // fastest first
    uint32_t type = kTypeF32;
    std::string bytes;
    int64_t offset_error = 0;
  };
  std::string magic = "GGUF";
  uint32_t version = 3;
  uint64_t more_tensors = 0, more_values = 0;  // lies about the counts
  std::vector<std::pair<std::string, std::string>> values;
  std::vector<Tensor> tensors;
  std::string tail;
  size_t alignment = 32;

  void Value(const std::string& key, uint32_t type, const std::string& bytes) {
    values.emplace_back(key, Raw(type) + bytes);
  }
  Tensor& Find(const std::string& name);
  std::string Bytes() const;
};

/// A tensor of such blocks: element j of one has the code j (mod 16), scales are 0.5; F32 is 0.25 throughout.
RawGguf::Tensor Stack(const std::string& name, std::vector<uint64_t> dims, uint32_t type);

/// One layer of Qwen3 with two experts of that type, under the name of any architecture.
RawGguf Model(uint32_t type, const std::string& architecture = "qwen3moe");

/// Opens the model and loads all of layer 0: the first failure, or ok.
Status LoadEverything(const RawGguf& model);

}  // namespace fusedmoe::testing_support
