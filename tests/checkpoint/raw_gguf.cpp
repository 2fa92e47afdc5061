#include "checkpoint/raw_gguf.hpp"

#include <gtest/gtest.h>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe::testing_support {
namespace {

// A block of that type whose element j has the code j (mod 16); scales of 0.5.
std::string Block(uint32_t type) {
  std::string block;
  if (type == kTypeF32) {
    return Raw(0.25F);
  }
  if (type == kTypeQ4_0 || type == kTypeQ8_0) {
    block = Raw<uint16_t>(0x3800);
  }
  if (type == kTypeMxfp4) {
    block = Raw<uint8_t>(126);
  }
  if (type == kTypeNvfp4) {
    block = std::string(4, '\x30');
  }
  if (type == kTypeQ8_0) {
    for (int j = 0; j < 32; ++j) {
      block += static_cast<char>(j - 16);
    }
    return block;
  }
  if (type == kTypeQ8K) {
    return std::string(292, '\0');
  }
  // Nibbles: element j below element j + half; halves of 16 (of 8 in NVFP4).
  const int half = type == kTypeNvfp4 ? 8 : 16;
  const int groups = type == kTypeNvfp4 ? 4 : 1;
  for (int group = 0; group < groups; ++group) {
    for (int j = 0; j < half; ++j) {
      block += static_cast<char>((j % 16) | ((j + half) % 16) << 4);
    }
  }
  return block;
}

int64_t ElementsOf(uint32_t type) {
  return type == kTypeF32 ? 1 : type == kTypeNvfp4 ? 64 : type == kTypeQ8K ? 256 : 32;
}

}  // namespace

RawGguf::Tensor& RawGguf::Find(const std::string& name) {
  for (Tensor& tensor : tensors) {
    if (tensor.name == name) {
      return tensor;
    }
  }
  ADD_FAILURE() << name;
  return tensors.front();
}

std::string RawGguf::Bytes() const {
  std::string out = magic + Raw(version) + Raw<uint64_t>(tensors.size() + more_tensors) +
                    Raw<uint64_t>(values.size() + more_values);
  for (const auto& [key, bytes] : values) {
    out += Text(key) + bytes;
  }
  std::string data;
  const auto pad = [&](std::string* bytes) {
    bytes->resize((bytes->size() + alignment - 1) / alignment * alignment, '\0');
  };
  for (const Tensor& tensor : tensors) {
    out += Text(tensor.name) + Raw<uint32_t>(static_cast<uint32_t>(tensor.dims.size()));
    for (const uint64_t dim : tensor.dims) {
      out += Raw(dim);
    }
    out += Raw(tensor.type) + Raw<uint64_t>(data.size() + static_cast<uint64_t>(tensor.offset_error));
    data += tensor.bytes;
    pad(&data);
  }
  pad(&out);
  return out + data + tail;
}

RawGguf::Tensor Stack(const std::string& name, std::vector<uint64_t> dims, uint32_t type) {
  uint64_t count = 1;
  for (const uint64_t dim : dims) {
    count *= dim;
  }
  RawGguf::Tensor tensor{name, std::move(dims), type, "", 0};
  for (uint64_t i = 0; i < count / static_cast<uint64_t>(ElementsOf(type)); ++i) {
    tensor.bytes += Block(type);
  }
  return tensor;
}

RawGguf Model(uint32_t type, const std::string& architecture) {
  RawGguf model;
  model.Value("general.architecture", kText, Text(architecture));
  model.Value("general.name", kText, Text("tiny"));
  model.Value(architecture + ".block_count", kUint32, Raw<uint32_t>(1));
  model.Value(architecture + ".embedding_length", kUint32, Raw<uint32_t>(kHiddenSize));
  model.Value(architecture + ".expert_feed_forward_length", kUint32, Raw<uint32_t>(kMiddle));
  model.Value(architecture + ".expert_count", kUint32, Raw<uint32_t>(2));
  model.Value(architecture + ".expert_used_count", kUint32, Raw<uint32_t>(1));
  model.Value("tokenizer.ggml.tokens", kArray, Raw(kText) + Raw<uint64_t>(2) + Text("a") + Text("bc"));
  model.Value("tokenizer.ggml.scores", kArray, Raw(kFloat32) + Raw<uint64_t>(2) + Raw(1.0F) + Raw(2.0F));
  model.tensors = {Stack("blk.0.ffn_gate_inp.weight", {kHiddenSize, 2}, kTypeF32),
                   Stack("blk.0.ffn_gate_exps.weight", {kHiddenSize, kMiddle, 2}, type),
                   Stack("blk.0.ffn_up_exps.weight", {kHiddenSize, kMiddle, 2}, type),
                   Stack("blk.0.ffn_down_exps.weight", {kMiddle, kHiddenSize, 2}, type)};
  return model;
}

Status LoadEverything(const RawGguf& model) {
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  return LoadEverything(folder.path() / "a.gguf");
}

}  // namespace fusedmoe::testing_support
