#pragma once

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <fusedmoe/jobs/convert.hpp>
#include <fusedmoe/jobs/sample.hpp>
#include <fusedmoe/safetensors.hpp>

#include "support/files.hpp"
#include "support/temporary_directory.hpp"

/// Checkpoints that are converted, in a folder that goes away.
namespace fusedmoe::convert_test {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

class ConvertTest : public testing::Test {
 protected:
  std::string At(const std::string& name) const { return (root_ / name).string(); }

  std::string Sample(const std::string& name, const std::string& scheme,
                     const std::string& family = "qwen3_moe", int64_t layers = 1) const {
    SampleOptions options;
    options.directory = At(name);
    options.family = family;
    options.scheme = scheme;
    options.hidden = options.intermediate = 128;
    options.num_experts = 4;
    options.top_k = 2;
    options.num_tokens = 3;
    options.num_layers = layers;
    const auto report = WriteSample(options);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    return options.directory;
  }

  Result<ConvertReport> To(const std::string& source, const std::string& to, const std::string& output,
                           const std::string& scheme = "", bool allow_lossy = false) const {
    FMOE_ASSIGN_OR_RETURN(const auto checkpoint, Checkpoint::Open(source));
    ConvertOptions options;
    options.to = to;
    options.scheme = scheme;
    options.directory = At(output);
    options.allow_lossy = allow_lossy;
    return Convert(checkpoint, options);
  }

  /// The same, which must succeed and be lossless; the place of the result.
  std::string Lossless(const std::string& source, const std::string& to, const std::string& output,
                       const std::string& scheme = "") const {
    const auto report = To(source, to, output, scheme);
    EXPECT_TRUE(report.ok()) << output << ": " << report.status().ToString();
    EXPECT_TRUE(!report.ok() || (report->lossless && report->values > 0)) << output;
    return At(output);
  }

  static Json ReadJson(const std::string& path) { return Json::parse(test::ReadFile(path)); }
  static void WriteJson(const std::string& path, const Json& json) { std::ofstream(path) << json.dump(1); }

  /// Every weight of the experts as F32, decoded in a conversion of its own: layer by layer, in order.
  std::vector<float> Values(const std::string& source) const {
    const std::string plain = "values" + std::to_string(counter_++);
    const auto report = To(source, "f32", plain);
    EXPECT_TRUE(report.ok()) << report.status().ToString();
    const auto checkpoint = Checkpoint::Open(At(plain));
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
    std::vector<float> values;
    for (const int64_t layer : (*checkpoint)->moe_layers()) {
      const auto experts = (*checkpoint)->Experts(layer);
      EXPECT_TRUE(experts.ok()) << experts.status().ToString();
      for (int64_t expert = 0; expert < experts->num_local_experts; ++expert) {
        const auto loaded = experts->load(expert);
        EXPECT_TRUE(loaded.ok()) << loaded.status().ToString();
        for (const CanonicalMatrix* matrix : {&loaded->gate, &loaded->up, &loaded->down}) {
          for (int64_t row = 0; row < matrix->rows; ++row) {
            const auto* from = reinterpret_cast<const float*>(matrix->codes.view().data() +
                                                              row * matrix->codes.view().stride_bytes(0));
            values.insert(values.end(), from, from + matrix->cols);
          }
        }
      }
    }
    return values;
  }

  const test::TemporaryDirectory directory_;
  const fs::path& root_ = directory_.path();
  mutable int counter_ = 0;
};

}  // namespace fusedmoe::convert_test
