#pragma once

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <fusedmoe/jobs/prepare.hpp>
#include <fusedmoe/jobs/sample.hpp>
#include <fusedmoe/jobs/verify.hpp>
#include <fusedmoe/safetensors.hpp>

#include "jobs/prepare/prepared_file.hpp"
#include "support/temporary_directory.hpp"

/// A sample checkpoint, prepared for a backend, and copies of that file with something wrong.
namespace fusedmoe::prepared_test {

struct PreparedCase {
  std::string backend;
  std::string scheme;
  std::string family = "qwen3_moe";
  bool batched = false;
};

inline void PrintTo(const PreparedCase& c, std::ostream* out) {
  *out << c.backend << " " << c.scheme << " " << c.family << (c.batched ? " batched" : "");
}

/// Every backend, every kind of layout.
inline std::vector<PreparedCase> AllCases() {
  return {{"FLASHINFER_TRTLLM", "nvfp4_w4a4", "deepseek_v3"},
          {"FLASHINFER_TRTLLM", "fp8_w8a8:block128"},
          {"FLASHINFER_TRTLLM", "fp8_w8a8:tensor_static"},
          {"FLASHINFER_CUTLASS", "nvfp4_w4a4", "qwen2_moe"},
          {"FLASHINFER_CUTLASS", "fp8_w8a8:block128"},
          {"FLASHINFER_CUTEDSL", "nvfp4_w4a4", "qwen3_moe", true},
          {"VLLM_CUTLASS", "nvfp4_w4a4", "qwen2_moe"},
          {"VLLM_CUTLASS", "fp8_w8a8:channel"},
          {"MARLIN", "nvfp4_w4a4"},
          {"MARLIN", "int4_w4a16:g32", "qwen2_moe"},
          {"MARLIN", "mxfp4_w4a16", "gpt_oss"},
          {"MARLIN", "fp8_w8a8:channel", "qwen3_moe", true},
          {"MARLIN", "fp8_w8a8:tensor_static"},
          {"EMULATION", "nvfp4_w4a4"}};
}

class Files : public test::TemporaryDirectory {
 public:
  std::shared_ptr<const Checkpoint> Sample(const std::string& family, const std::string& scheme,
                                           int64_t experts = 8) const {
    SampleOptions options;
    options.family = family;
    options.scheme = scheme;
    options.directory = *this / "checkpoint";
    options.hidden = options.intermediate = 128;
    options.num_experts = experts;
    options.top_k = 2;
    options.num_tokens = 3;
    options.overwrite = true;
    const auto written = WriteSample(options);
    EXPECT_TRUE(written.ok()) << written.status().ToString();
    auto checkpoint = Checkpoint::Open(options.directory);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    return *checkpoint;
  }

  /// The first layer with experts, prepared.
  std::string Prepare(const Checkpoint& checkpoint, const PreparedCase& c) const {
    const auto report = WritePrepared(checkpoint, checkpoint.moe_layers().front(), OptionsOf(c),
                                      *this / "prepared.safetensors");
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return *this / "prepared.safetensors";
  }

  static LayerOptions OptionsOf(const PreparedCase& c) {
    LayerOptions options;
    options.backend = c.backend;
    options.activation_format =
        c.batched ? ActivationFormatKind::kBatchedExperts : ActivationFormatKind::kStandard;
    options.max_tokens = 16;
    return options;
  }
};

/// A copy of a safetensors file after `change`.
inline void Rewrite(const std::string& from, const std::string& to,
                    const std::function<void(SafetensorsFile&)>& change) {
  Result<SafetensorsFile> file = ReadSafetensors(from);
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  change(*file);
  const Status status = WriteSafetensors(to, file->tensors, file->metadata);
  ASSERT_TRUE(status.ok()) << status.ToString();
}

/// Changes the bytes of one expert of a stacked tensor. False when the file has no such tensor.
inline bool ChangeExpert(SafetensorsFile& file, const std::string& name, int64_t expert,
                         const std::function<void(std::byte*, int64_t)>& change) {
  for (NamedTensor& named : file.tensors) {
    if (named.name == name) {
      Tensor copy = *Tensor::Allocate(named.tensor.dtype(), named.tensor.shape());
      std::memcpy(copy.mutable_view().data(), named.tensor.view().data(),
                  static_cast<size_t>(named.tensor.view().total_bytes()));
      const int64_t bytes = copy.view().total_bytes() / copy.dim(0);
      change(copy.mutable_view().data() + expert * bytes, bytes);
      named.tensor = copy;
      return true;
    }
  }
  return false;
}

}  // namespace fusedmoe::prepared_test
