// Blocks of GGUF files that are read once for all that they hold.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/raw_gguf.hpp"
#include "support/temporary_directory.hpp"

namespace fusedmoe::checkpoint {
namespace {

using namespace testing_support;

constexpr const char* kCodes = "blk.0.ffn_gate_up_exps.weight";
constexpr const char* kScales = "blk.0.ffn_gate_up_exps.weight_scale";

/// Gate and up of two experts in one tensor, no two blocks alike.
std::unique_ptr<const TensorStore> OpenJoined(const test::TemporaryDirectory& folder, uint32_t type) {
  RawGguf model = Model(type);
  RawGguf::Tensor joined = Stack(kCodes, {kHiddenSize, 2 * kMiddle, 2}, type);
  const size_t block = joined.bytes.size() / (kHiddenSize * 2 * kMiddle * 2 / 32);
  for (size_t i = 0; i < joined.bytes.size(); i += block) {
    joined.bytes[i] = static_cast<char>(i / block % 120);  // in the scale
    joined.bytes[i + block - 1] = static_cast<char>(i / block);
  }
  model.tensors = {model.Find("blk.0.ffn_gate_inp.weight"), joined, model.Find("blk.0.ffn_down_exps.weight")};
  folder.Write("a.gguf", model.Bytes());
  GgufHeader header;
  auto store = TensorStore::OpenGguf((folder.path() / "a.gguf").string(), {}, &header);
  EXPECT_TRUE(store.ok()) << store.status().ToString();
  return store.ok() ? *std::move(store) : nullptr;
}

void ExpectSame(const Result<Tensor>& read, const Result<Tensor>& alone) {
  ASSERT_TRUE(read.ok()) << read.status().ToString();
  ASSERT_TRUE(alone.ok()) << alone.status().ToString();
  ASSERT_EQ(read->shape(), alone->shape());
  ASSERT_EQ(read->dtype(), alone->dtype());
  EXPECT_EQ(std::memcmp(read->view().data(), alone->view().data(),
                        static_cast<size_t>(alone->view().total_bytes())),
            0);
}

class BlocksReadOnce : public testing::TestWithParam<uint32_t> {
 protected:
  void SetUp() override { ASSERT_TRUE(store != nullptr); }

  test::TemporaryDirectory folder;
  std::shared_ptr<const TensorStore> store = OpenJoined(folder, GetParam());
  BlockParts beside;
};

INSTANTIATE_TEST_SUITE_P(Types, BlocksReadOnce, testing::Values(kTypeQ4_0, kTypeQ8_0, kTypeMxfp4));

TEST_P(BlocksReadOnce, HoldTheScalesOfTheCodesUntilTheyAreAskedFor) {
  ExpectSame(store->Load(kCodes, &beside), store->Load(kCodes));
  ASSERT_EQ(beside.parts.size(), 1U);
  const std::byte* held = beside.parts.front().data.view().data();
  const auto scales = store->Load(kScales, &beside);
  ExpectSame(scales, store->Load(kScales));
  EXPECT_EQ(scales->view().data(), held) << "the blocks were read again";
  EXPECT_TRUE(beside.parts.empty());
  // The other way round: scales leave codes.
  ExpectSame(store->Load(kScales, &beside), store->Load(kScales));
  ExpectSame(store->Load(kCodes, &beside), store->Load(kCodes));
  EXPECT_TRUE(beside.parts.empty());
}

TEST_P(BlocksReadOnce, HaveBytesThatCanBeReadAlone) {
  for (const char* name : {kCodes, kScales}) {
    const auto whole = store->Load(name);
    ASSERT_TRUE(whole.ok()) << whole.status().ToString();
    const int64_t bytes = whole->view().total_bytes();
    const std::pair<int64_t, int64_t> parts[] = {{0, bytes}, {0, 1}, {5, 70}, {bytes - 3, 3}, {bytes, 0}};
    for (const auto& [offset, count] : parts) {
      const auto read = store->LoadBytes(name, offset, count);
      ASSERT_TRUE(read.ok()) << read.status().ToString();
      ASSERT_EQ(read->size, count);
      EXPECT_EQ(std::memcmp(read->data, whole->view().data() + offset, static_cast<size_t>(count)), 0);
    }
    EXPECT_EQ(store->LoadBytes(name, bytes - 3, 4).status().code(), StatusCode::kBadInput);
  }
}

TEST_P(BlocksReadOnce, AreThoseOfTheItemsAndRowsThatWereRead) {
  for (const int64_t item : {0, 1}) {
    ExpectSame(store->LoadItem(kCodes, item, &beside), store->LoadItem(kCodes, item));
  }
  EXPECT_EQ(beside.parts.size(), 2U);
  ExpectSame(store->Load(kScales, &beside), store->Load(kScales));  // all of them is none of those held
  for (const int64_t item : {1, 0}) {
    ExpectSame(store->LoadItem(kScales, item, &beside), store->LoadItem(kScales, item));
  }
  ExpectSame(store->LoadRows(kCodes, 1, 1, &beside), store->LoadRows(kCodes, 1, 1));
  ExpectSame(store->LoadRows(kScales, 0, 2, &beside), store->LoadRows(kScales, 0, 2));
  ExpectSame(store->LoadRows(kScales, 1, 1, &beside), store->LoadRows(kScales, 1, 1));
}

}  // namespace
}  // namespace fusedmoe::checkpoint
