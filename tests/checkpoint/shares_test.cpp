// What one rank gets: columns of the intermediate size, or experts; and what safetensors files the writer
// makes.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include <fusedmoe/problems.hpp>
#include <fusedmoe/safetensors.hpp>

#include "checkpoint/raw_checkpoint.hpp"
#include "checkpoint/rules/quant_rules.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

Scheme Make(const std::string& name) {
  const auto scheme = ParseScheme(name);
  EXPECT_TRUE(scheme.ok()) << name;
  return *scheme;
}

TEST(IntermediateShare, RanksCoverEveryColumnOnce) {
  for (const std::string name :
       {"unquantized", "nvfp4_w4a4", "mxfp4_w4a16", "fp8_w8a8:block128", "fp8_w8a8", "int4_w4a16:g128"}) {
    const Scheme scheme = Make(name);
    for (const int64_t intermediate : {64, 192, 320, 768, 1408, 1536, 2048}) {
      for (const int64_t ranks : {1, 2, 3, 4, 7, 8}) {
        int64_t expected = 0, least = intermediate, most = 0;
        for (int64_t rank = 0; rank < ranks; ++rank) {
          const auto share = IntermediateShare(intermediate, {.tp_size = ranks, .tp_rank = rank}, scheme);
          ASSERT_TRUE(share.ok()) << name << " " << intermediate << " " << ranks << ": "
                                  << share.status().ToString();
          EXPECT_EQ(share->begin, expected);
          EXPECT_GT(share->end, share->begin);
          expected = share->end;
          least = std::min(least, share->end - share->begin);
          most = std::max(most, share->end - share->begin);
          const int64_t block = std::max(scheme.weight.block.col, scheme.activation.group.col);
          if (block > 1 && intermediate / block >= ranks) {
            EXPECT_EQ(share->begin % block, 0) << name << " splits a block";
          }
        }
        EXPECT_EQ(expected, intermediate);
        EXPECT_LE(most - least, 128) << name << " " << intermediate << " over " << ranks;
      }
    }
  }
  EXPECT_EQ(IntermediateShare(4, {.tp_size = 8, .tp_rank = 0}, Make("nvfp4_w4a4")).status().code(),
            StatusCode::kUnsupported);
  EXPECT_EQ(IntermediateShare(64, {.tp_size = 2, .tp_rank = 2}, Make("unquantized")).status().code(),
            StatusCode::kUsage);
}

// The slices of all ranks side by side are the whole matrix, for every format and any number of ranks.
TEST(TensorParallel, SlicesTogether_AreTheWhole) {
  for (const std::string format : {"bf16", "modelopt_nvfp4", "ct_nvfp4", "ct_mxfp4", "ct_int4", "ct_int8",
                                   "fp8_block", "gptq", "awq", "autoround"}) {
    const TemporaryDirectory folder;
    TinyModel model(format);
    // Different codes everywhere, so that a slice from the wrong place shows.
    for (RawTensor& tensor : model.tensors) {
      if (tensor.name.find("experts") == std::string::npos) {
        continue;
      }
      if (tensor.name.ends_with("weight_packed") || tensor.name.ends_with("qweight") ||
          tensor.dtype == "I8") {
        for (size_t i = 0; i < tensor.bytes.size(); ++i) {
          tensor.bytes[i] = static_cast<char>(i * 37 + i / 64);
        }
      }
    }
    model.WriteTo(folder);
    const auto checkpoint = Checkpoint::Open(folder.path().string());
    ASSERT_TRUE(checkpoint.ok());
    const auto whole = (*checkpoint)->Experts(0);
    ASSERT_TRUE(whole.ok()) << whole.status().ToString();
    const CanonicalExpert expert = *whole->load(1);
    const Tensor up = *DequantizeMatrix(expert.up), down = *DequantizeMatrix(expert.down);
    for (const int64_t ranks : {2, 3, 5}) {
      int64_t column = 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto source = (*checkpoint)->Experts(0, {.tp_size = ranks, .tp_rank = rank});
        ASSERT_TRUE(source.ok()) << source.status().ToString();
        const auto slice = source->load(1);
        ASSERT_TRUE(slice.ok()) << slice.status().ToString();
        EXPECT_TRUE(ValidateCanonical(slice->down).ok())
            << format << ": " << ValidateCanonical(slice->down).ToString();
        const Tensor up_slice = *DequantizeMatrix(slice->up), down_slice = *DequantizeMatrix(slice->down);
        const int64_t width = slice->up.rows;
        ASSERT_EQ(slice->down.cols, width);
        EXPECT_EQ(std::memcmp(up_slice.view().data(), up.view().data() + column * kHidden * 4,
                              static_cast<size_t>(width * kHidden * 4)),
                  0)
            << format;
        for (int64_t r = 0; r < kHidden; ++r) {
          EXPECT_EQ(std::memcmp(down_slice.view().data() + r * width * 4,
                                down.view().data() + (r * kIntermediate + column) * 4,
                                static_cast<size_t>(width * 4)),
                    0)
              << format << " row " << r;
        }
        column += width;
      }
      EXPECT_EQ(column, kIntermediate);
    }
  }
}

TEST(ExpertParallel, OnlyTheAskedExperts_AreRead) {
  const TemporaryDirectory folder;
  TinyModel model("bf16");
  // Expert 0 is damaged; a rank that has expert 1 alone does not notice.
  model.Find("model.layers.0.mlp.experts.0.up_proj.weight").dtype = "I16";
  model.WriteTo(folder);
  const auto checkpoint = Checkpoint::Open(folder.path().string());
  ASSERT_TRUE(checkpoint.ok());
  const auto one = (*checkpoint)->Experts(0, {}, {1});
  ASSERT_TRUE(one.ok()) << one.status().ToString();
  EXPECT_EQ(one->num_local_experts, 1);
  EXPECT_TRUE(one->load(0).ok());
  EXPECT_EQ(one->load(1).status().code(), StatusCode::kUsage);
  EXPECT_EQ((*checkpoint)->Experts(0, {}, {2}).status().code(), StatusCode::kUsage);
  EXPECT_EQ((*checkpoint)->Describe(1).status().code(), StatusCode::kUsage);
}

TEST(ExpertLayout, UnknownWords_AreUsageErrors) {
  const TemporaryDirectory folder;
  TinyModel("bf16").WriteTo(folder);
  EXPECT_EQ(Checkpoint::Open(folder.path().string(), {.expert_layout = "sideways"}).status().code(),
            StatusCode::kUsage);
  EXPECT_TRUE(Checkpoint::Open(folder.path().string(), {.expert_layout = "in_out,interleaved"}).ok());
  for (const char* layout : {"in_out,,interleaved", "in_out,", ","}) {
    EXPECT_EQ(Checkpoint::Open(folder.path().string(), {.expert_layout = layout}).status().code(),
              StatusCode::kUsage)
        << layout;
  }
}

TEST(ExpertLayout, WhereNothingIsFused_IsAUsageError) {
  const TemporaryDirectory folder;
  TinyModel("bf16").WriteTo(folder);
  const auto checkpoint = Checkpoint::Open(folder.path().string(), {.expert_layout = "in_out"});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status().ToString();
  const Status status = (*checkpoint)->Describe(0).status();
  EXPECT_EQ(status.code(), StatusCode::kUsage);
  EXPECT_NE(status.message().find("'in_out' has no effect"), std::string::npos) << status.message();
}

TEST(Components, WholeOnesOnly) {
  EXPECT_TRUE(checkpoint::HasComponents("model.layers.1.mlp", "model.layers.1"));
  EXPECT_FALSE(checkpoint::HasComponents("model.layers.10.mlp", "model.layers.1"));
  EXPECT_TRUE(checkpoint::HasComponents("model.layers.1.mlp.shared_expert.up_proj", "shared_expert"));
  EXPECT_FALSE(checkpoint::HasComponents("model.layers.1.mlp.shared_experts.up_proj", "shared_expert"));
  EXPECT_FALSE(checkpoint::HasComponents("model", ""));
}

std::string ReadBytes(const std::filesystem::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

NamedTensor Filled(const std::string& name, DType dtype, const Shape& shape, int seed) {
  Tensor tensor = *Tensor::Allocate(dtype, shape);
  std::byte* data = tensor.mutable_view().data();
  for (int64_t i = 0; i < tensor.view().total_bytes(); ++i) {
    data[i] = static_cast<std::byte>(i * 31 + seed);
  }
  return {name, tensor};
}

TEST(SafetensorsWriter, RoundTrip_KeepsEveryByteAndIsDeterministic) {
  const TemporaryDirectory folder;
  std::vector<NamedTensor> tensors = {
      Filled("b", DType::kBF16, {3, 5}, 1),       Filled("a \"quoted\"\\", DType::kF8E4M3, {7}, 2),
      Filled("scalar", DType::kF32, {}, 3),       Filled("empty", DType::kF32, {0, 4}, 4),
      Filled("codes", DType::kF4E2M1, {2, 6}, 5), Filled("wide", DType::kI64, {2}, 6)};
  const SafetensorsMetadata metadata = {{"z", "1"}, {"format", "pt"}, {"line", "a\nb"}};
  const std::string first = (folder.path() / "first.safetensors").string(),
                    second = (folder.path() / "second.safetensors").string();
  ASSERT_TRUE(WriteSafetensors(first, tensors, metadata).ok());
  std::reverse(tensors.begin(), tensors.end());
  ASSERT_TRUE(WriteSafetensors(second, tensors, metadata).ok());
  const std::string bytes = ReadBytes(first);
  EXPECT_EQ(bytes, ReadBytes(second)) << "the order of the arguments shows in the file";
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), 8);
  EXPECT_EQ(header % 8, 0U);
  EXPECT_EQ(bytes[8], '{');
  const auto read = ReadSafetensors(first);
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  EXPECT_EQ(read->metadata, metadata);
  for (const NamedTensor& written : tensors) {
    const Tensor* found = read->Find(written.name);
    ASSERT_NE(found, nullptr) << written.name;
    EXPECT_EQ(found->dtype(), written.tensor.dtype());
    EXPECT_EQ(found->shape(), written.tensor.shape());
    EXPECT_EQ(std::memcmp(found->view().data(), written.tensor.view().data(),
                          static_cast<size_t>(written.tensor.view().total_bytes())),
              0)
        << written.name;
  }
}

TEST(SafetensorsWriter, NothingStandsUnderTheFinalName_UntilFinish) {
  const TemporaryDirectory folder;
  const std::string path = (folder.path() / "x.safetensors").string();
  {
    auto writer = SafetensorsWriter::Create(path, {{"a", DType::kF32, {2}}, {"b", DType::kF32, {2}}});
    ASSERT_TRUE(writer.ok());
    const NamedTensor a = Filled("a", DType::kF32, {2}, 1);
    EXPECT_TRUE((*writer)->Write("a", a.tensor.view()).ok());
    EXPECT_EQ((*writer)->Write("a", a.tensor.view()).code(), StatusCode::kUsage);
    EXPECT_EQ((*writer)->Write("c", a.tensor.view()).code(), StatusCode::kUsage);
    EXPECT_EQ((*writer)->Write("b", Filled("b", DType::kF32, {3}, 1).tensor.view()).code(),
              StatusCode::kUsage);
    EXPECT_EQ((*writer)->Finish().code(), StatusCode::kUsage);
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << "an abandoned writer leaves files behind";
  EXPECT_EQ(SafetensorsWriter::Create(path, {{"a", DType::kU4, {2}}}).status().code(), StatusCode::kUsage);
  EXPECT_EQ(SafetensorsWriter::Create(path, {{"a", DType::kF32, {}}, {"a", DType::kF32, {}}}).status().code(),
            StatusCode::kUsage);
  EXPECT_EQ(SafetensorsWriter::Create(path, {{"", DType::kF32, {}}}).status().code(), StatusCode::kUsage);
  EXPECT_EQ(SafetensorsWriter::Create((folder.path() / "no" / "x").string(), {{"a", DType::kF32, {}}})
                .status()
                .code(),
            StatusCode::kSystem);
}

TEST(SafetensorsWriter, StridedTensors_AreGathered) {
  const TemporaryDirectory folder;
  const NamedTensor whole = Filled("x", DType::kF32, {4, 6}, 9);
  TensorView columns(whole.tensor.view().data() + 8, DType::kF32, Shape{4, 3});
  columns.set_stride_bytes(0, whole.tensor.view().stride_bytes(0));
  const std::vector<NamedTensor> tensors = {{"x", Tensor::Borrow(columns, whole.tensor.owner())}};
  const std::string path = (folder.path() / "x.safetensors").string();
  ASSERT_TRUE(WriteSafetensors(path, tensors).ok());
  const auto read = ReadSafetensors(path);
  ASSERT_TRUE(read.ok());
  for (int64_t r = 0; r < 4; ++r) {
    EXPECT_EQ(std::memcmp(read->tensors[0].tensor.view().data() + r * 12,
                          whole.tensor.view().data() + r * 24 + 8, 12),
              0)
        << r;
  }
}

}  // namespace
}  // namespace fusedmoe
