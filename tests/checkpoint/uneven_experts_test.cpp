// Checkpoints whose experts do not all have the same tensors beside their codes.
#include <fusedmoe/layer.hpp>

#include <algorithm>
#include <cstring>
#include <string>

#include <gtest/gtest.h>

#include "checkpoint/raw_checkpoint.hpp"

namespace fusedmoe {
namespace {

using testing_support::Bf16;
using testing_support::ExpectRefused;
using testing_support::Ints;
using testing_support::kHidden;
using testing_support::kIntermediate;
using testing_support::RawTensor;
using testing_support::TinyModel;
using testing_support::WrittenModel;

const std::string kExpert = "model.layers.0.mlp.experts.";  // of TinyModel

std::vector<std::string> Modules(int expert) {
  std::vector<std::string> modules;
  for (const char* projection : {"gate_proj", "up_proj", "down_proj"}) {
    modules.push_back(kExpert + std::to_string(expert) + "." + projection);
  }
  return modules;
}

/// GPTQ in which one expert lacks zero points and the columns of the other are in order.
TinyModel UnevenGptq(int symmetric, int plain) {
  TinyModel model("gptq");
  model.config["quantization_config"]["sym"] = true;
  for (const std::string& module : Modules(symmetric)) {
    model.Drop(module + ".qzeros");
  }
  for (const std::string& module : Modules(plain)) {
    RawTensor& index = model.Find(module + ".g_idx");
    for (int64_t col = 0; col < index.shape[0]; ++col) {
      const auto group = static_cast<int32_t>(col / 32);
      std::memcpy(index.bytes.data() + col * 4, &group, sizeof(group));
    }
  }
  return model;
}

TEST(UnevenExperts, EachHasWhatSomeHave) {
  for (const int symmetric : {0, 1}) {
    const WrittenModel written(UnevenGptq(symmetric, 1 - symmetric));
    ASSERT_TRUE(written.source.ok()) << written.source.status().ToString();
    EXPECT_TRUE(written.source->alike);
    const auto without = written.source->load(symmetric), plain = written.source->load(1 - symmetric);
    ASSERT_TRUE(without.ok() && plain.ok());
    for (const CanonicalMatrix* matrix : {&without->gate, &without->up, &without->down}) {
      ASSERT_FALSE(matrix->zero_point.empty());
      const auto* zeros = matrix->zero_point.view().as<uint8_t>();
      EXPECT_TRUE(std::all_of(zeros, zeros + matrix->zero_point.view().count(),
                              [](uint8_t zero) { return zero == 8; }));
    }
    for (const CanonicalMatrix* matrix : {&plain->gate, &plain->up}) {  // down has one group
      ASSERT_FALSE(matrix->group_index.empty()) << "expert " << 1 - symmetric;
      EXPECT_EQ(matrix->group_index.view().as<int32_t>()[matrix->cols - 1], (matrix->cols - 1) / 32);
    }
  }
}

TEST(UnevenExperts, LayersLoadAndRun) {
  for (const int symmetric : {0, 1}) {
    const WrittenModel written(UnevenGptq(symmetric, 1 - symmetric));
    for (const char* backend : {"CPU_FUSED", "REFERENCE"}) {
      LayerOptions options;
      options.backend = backend;
      options.max_tokens = 4;
      const auto layer = MoeLayer::Load(written.checkpoint, 0, options);
      EXPECT_TRUE(layer.ok()) << "expert " << symmetric << ": " << layer.status().ToString();
    }
  }
}

TEST(UnevenExperts, ScalesOfTwoTypes_BecomeF32) {
  TinyModel model("gptq");
  for (const std::string& module : Modules(1)) {
    RawTensor& scales = model.Find(module + ".scales");
    scales = testing_support::Floats(scales.name, scales.shape, 0.5F);
  }
  const WrittenModel written(model);
  const auto first = written.source->load(0);
  ASSERT_TRUE(first.ok()) << first.status().ToString();
  EXPECT_EQ(first->up.block_scale.dtype(), DType::kF32);
  EXPECT_EQ(first->up.format.block_scale_dtype, DType::kF32);
  EXPECT_EQ(first->up.block_scale.view().as<float>()[0], 0.5F);
}

TEST(UnevenExperts, Biases_AreMissedByName) {
  TinyModel model("bf16");
  for (const std::string& module : Modules(1)) {
    const int64_t rows = module.ends_with("down_proj") ? kHidden : kIntermediate;
    model.tensors.push_back(Bf16(module + ".bias", {rows}, 0.25F));
  }
  ExpectRefused("biases of one expert alone", model, {.tensor = Modules(0)[0] + ".bias"});
}

}  // namespace
}  // namespace fusedmoe
