// GGUF types of integers: what they decode to, and that the codes, scales and zero points that they are
// listed as mean the same values.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include <fusedmoe/safetensors.hpp>

#include "checkpoint/gguf/gguf_blocks.hpp"
#include "checkpoint/gguf_types.hpp"
#include "weights/dequantize.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

// The values of the gguf package's own decoder, bit for bit.
TEST(GgufBlocks, DecodeAsThePackageDoes) {
  const auto file = ReadSafetensors(FMOE_GOLDEN_DIR "/gguf/blocks.safetensors");
  ASSERT_TRUE(file.ok()) << file.status().ToString();
  for (const GgufType& type : kGgufTypes) {
    if (type.id == 41 || type.id == 42) {  // Q1_0 and Q2_0, which that decoder lacks
      continue;
    }
    SCOPED_TRACE(type.name);
    const checkpoint::BlockType* found = checkpoint::FindBlockType(type.id);
    ASSERT_TRUE(found != nullptr);
    const checkpoint::BlockType& decoded = checkpoint::DecodedType(*found);
    ASSERT_EQ(decoded.parts.size(), 1U);
    ASSERT_EQ(decoded.parts[0].dtype, DType::kF32);
    const Tensor* blocks = file->Find(std::string(type.name) + ".blocks");
    const Tensor* values = file->Find(std::string(type.name) + ".values");
    ASSERT_TRUE(blocks != nullptr && values != nullptr);
    ASSERT_EQ(blocks->dim(1), decoded.bytes);
    ASSERT_EQ(values->dim(1), decoded.elements);
    std::vector<float> ours(static_cast<size_t>(values->shape().count()));
    decoded.parts[0].decode(blocks->view().data(), blocks->dim(0), reinterpret_cast<std::byte*>(ours.data()));
    for (size_t i = 0; i < ours.size(); ++i) {
      ASSERT_EQ(ours[i], values->view().as<float>()[i]) << "element " << i;
    }
  }
}

TEST(GgufBlocks, Q1_0_IsAScaleAndSigns) {
  const checkpoint::BlockType& decoded = checkpoint::DecodedType(*checkpoint::FindBlockType(41));
  std::string block = Raw<uint16_t>(0x4100) + std::string("\x05\x00\x80", 3) + std::string(13, '\0');  // 2.5
  ASSERT_EQ(static_cast<int64_t>(block.size()), decoded.bytes);
  float values[128];
  decoded.parts[0].decode(reinterpret_cast<const std::byte*>(block.data()), 1,
                          reinterpret_cast<std::byte*>(values));
  for (int i = 0; i < 128; ++i) {
    EXPECT_EQ(values[i], i == 0 || i == 2 || i == 23 ? 2.5F : -2.5F) << "element " << i;
  }
}

TEST(GgufBlocks, Q2_0_IsAScaleAndFourValues) {
  const checkpoint::BlockType& decoded = checkpoint::DecodedType(*checkpoint::FindBlockType(42));
  std::string block = Raw<uint16_t>(0x4100) + std::string("\x1b", 1) + std::string(15, '\x55');  // 2.5
  ASSERT_EQ(static_cast<int64_t>(block.size()), decoded.bytes);
  float values[64];
  decoded.parts[0].decode(reinterpret_cast<const std::byte*>(block.data()), 1,
                          reinterpret_cast<std::byte*>(values));
  const float first[] = {5.0F, 2.5F, 0.0F, -2.5F};  // 3, 2, 1, 0
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(values[i], i < 4 ? first[i] : 0.0F) << "element " << i;
  }
}

class GgufIntegers : public GgufOfType {};
INSTANTIATE_TEST_SUITE_P(Types, GgufIntegers, testing::ValuesIn(kGgufTypes), NameOfType);

TEST_P(GgufIntegers, CodesBelowScales_MeanTheDecodedValues) {
  const GgufType& type = GetParam();
  const TemporaryDirectory folder;
  const std::string path = (folder.path() / "a.gguf").string();
  folder.Write("a.gguf", ModelOf(type, type).Bytes());
  const LoadedExpert integers = LoadExpert(path, false), decoded = LoadExpert(path, true);
  EXPECT_EQ(integers.scheme.name, type.scheme);
  EXPECT_EQ(decoded.scheme.name, type.decoded ? "unquantized" : type.scheme);
  for (const auto matrix : {&CanonicalExpert::gate, &CanonicalExpert::up, &CanonicalExpert::down}) {
    EXPECT_EQ((integers.expert.*matrix).zero_point.empty(), !type.zeros);
    if (type.decoded) {
      ExpectSameValues(integers.expert.*matrix, decoded.expert.*matrix);
    }
    EXPECT_EQ((integers.expert.*matrix).format.super_cols, HasTwoLevels(type) ? 256 : 0);
    if (HasTwoLevels(type)) {
      ExpectPanelsOfTwoLevels(integers.expert.*matrix, decoded.expert.*matrix);
    }
  }
}

// A group of one value: its scale is zero and its minimum is not.
TEST(GgufIntegers, GroupsOfOneValue_KeepIt) {
  const GgufType& q4_k = TypeNamed("Q4_K");
  RawGguf model = ModelOf(q4_k, q4_k);
  RawGguf::Tensor& up = model.Find("blk.0.ffn_up_exps.weight");
  for (size_t at = 0; at < up.bytes.size(); at += static_cast<size_t>(q4_k.bytes)) {
    up.bytes.replace(at, 4, Raw<uint16_t>(0) + Raw<uint16_t>(0x1c01));  // 0 and 2^-8 (1 + 2^-10)
    up.bytes.replace(at + 4, 12, 12, '\x03');                           // steps and minima of three
  }
  const TemporaryDirectory folder;
  folder.Write("a.gguf", model.Bytes());
  const LoadedExpert integers = LoadExpert((folder.path() / "a.gguf").string(), false);
  const auto values = DequantizeMatrix(integers.expert.up);
  ASSERT_TRUE(values.ok()) << values.status().ToString();
  for (int64_t i = 0; i < 8 * kGgufHidden; ++i) {
    const float wanted = i % 256 < 128 ? -3.0F * 0x1.004p-8F : 0.0F;  // the last four minima are zero
    ASSERT_EQ(values->view().as<float>()[i], wanted) << i;
  }
}

TEST(GgufIntegers, ScalesAndMinimaThatAreNotFinite_AreRefused) {
  const GgufType& q4_k = TypeNamed("Q4_K");
  for (const int64_t at : {0, 2}) {
    for (const uint16_t half : {uint16_t{0x7c00}, uint16_t{0xfe00}}) {
      RawGguf model = ModelOf(q4_k, q4_k);
      RawGguf::Tensor& down = model.Find("blk.0.ffn_down_exps.weight");
      down.bytes.replace(static_cast<size_t>(at), 2, Raw(half));
      down.bytes.replace(4, 12, 12, '\x03');
      const Status status = LoadEverything(model);
      EXPECT_EQ(status.code(), StatusCode::kBadInput) << at << " " << half << status.ToString();
      EXPECT_EQ(status.tensor(),
                at == 0 ? "blk.0.ffn_down_exps.weight_scale" : "blk.0.ffn_down_exps.weight_zero");
    }
  }
}

}  // namespace
}  // namespace fusedmoe
