// Shares of ranks of matrices that have GGUF types: the values that the whole matrix has there.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>

#include <fusedmoe/machine.hpp>

#include "checkpoint/gguf_types.hpp"
#include "experts/cpu/cpu_plan.hpp"
#include "weights/dequantize.hpp"
#include "weights/narrow.hpp"
#include "weights/panel.hpp"
#include "weights/slice.hpp"

namespace fusedmoe {
namespace {

using namespace testing_support;

class GgufShares : public GgufOfType {};
INSTANTIATE_TEST_SUITE_P(Types, GgufShares, testing::ValuesIn(kGgufTypes), NameOfType);

/// A rank's part of expert 1 of such a layer.
struct Share {
  const Checkpoint& checkpoint;
  ParallelConfig parallel;
  CanonicalExpert expert;
  const CanonicalExpert& whole;  // of all ranks, decoded
  int64_t begin;                 // of the rank's rows of gate and up and columns of down

  CanonicalMatrix WantedDown() const {
    return *SliceMatrix(whole.down, 0, kGgufHidden, begin, expert.down.cols);
  }
};

/// `check` of the shares of some numbers of ranks: halves of super-blocks while these go round, then less.
template <typename Check>
void ForShares(const GgufType& inputs, const GgufType& down, const Check& check) {
  const TemporaryDirectory folder;
  folder.Write("a.gguf", ModelOf(inputs, down).Bytes());
  const std::string path = (folder.path() / "a.gguf").string();
  const auto checkpoint = *Checkpoint::Open(path);
  const CanonicalExpert whole = LoadExpert(path, true).expert;
  for (const int ranks : {2, 3, 5, 16}) {
    int64_t begin = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      SCOPED_TRACE(fmt::format("{} and {}, rank {} of {}", inputs.name, down.name, rank, ranks));
      ParallelConfig parallel;
      parallel.tp_size = ranks;
      parallel.tp_rank = rank;
      const auto experts = checkpoint->Experts(0, parallel);
      ASSERT_TRUE(experts.ok()) << experts.status().ToString();
      const auto expert = experts->load(1);
      ASSERT_TRUE(expert.ok()) << expert.status().ToString();
      check(Share{*checkpoint, parallel, *expert, whole, begin});
      begin += expert->down.cols;
    }
    EXPECT_EQ(begin, kGgufInner);
  }
}

/// `check(share, narrow)`: down as the panels of the layer hold it. The plan has room for them.
template <typename Check>
void ForNarrowDown(const GgufType& inputs, const GgufType& down, const Check& check) {
  ForShares(inputs, down, [&](const Share& share) {
    const Result<CanonicalMatrix> narrow = Narrow(share.expert.down);
    ASSERT_TRUE(narrow.ok()) << narrow.status().ToString();
    const cpu::CpuPlan plan = cpu::MakeCpuPlan(ProblemOf(share.checkpoint, share.parallel), HostMachine());
    ASSERT_EQ(plan.down.panel, *ChoosePanelFormat(narrow->format, !narrow->zero_point.empty()));
    EXPECT_LE(static_cast<int64_t>(PanelColumns(*narrow, plan.down.panel).size()), plan.down.padded_cols);
    check(share, *narrow);
  });
}

TEST_P(GgufShares, HoldTheSameValues) {
  const GgufType& type = GetParam();
  if (!HasTwoLevels(type)) {
    return;
  }
  ForShares(type, type, [](const Share& share) {
    const CanonicalMatrix& down = share.expert.down;
    ASSERT_TRUE(ValidateCanonical(down).ok()) << ValidateCanonical(down).ToString();
    ExpectPanelsOfTwoLevels(share.expert.up,
                            *SliceMatrix(share.whole.up, share.begin, down.cols, 0, kGgufHidden));
    ExpectPanelsOfTwoLevels(down, share.WantedDown());
  });
}

// Alone, and down of such a type beside others: shares of ranks have the values of the whole matrix. Of Q5_1
// they are rounded.
TEST_P(GgufShares, OfNarrowTypes_HoldTheSame) {
  const GgufType& type = GetParam();
  if (NarrowBits(type) == 0 || type.id == 7) {
    return;
  }
  for (const GgufType* inputs : {&type, &TypeNamed("Q4_K"), &TypeNamed("Q6_K")}) {
    ForNarrowDown(*inputs, type, [](const Share& share, const CanonicalMatrix& narrow) {
      ExpectPanels(narrow, share.WantedDown());
    });
  }
}

// Shares of ranks know the groups of the layer; those of a type may be longer.
TEST(GgufShares, BesideOthers_NarrowToTheSameValues) {
  for (const auto& [inputs, down] : {std::pair("Q6_K", "Q4_K"), std::pair("Q4_K", "Q6_K"),
                                     std::pair("Q8_0", "Q4_K"), std::pair("Q3_K", "Q4_1")}) {
    ForNarrowDown(TypeNamed(inputs), TypeNamed(down), [](const Share& share, const CanonicalMatrix& narrow) {
      const Status valid = ValidateCanonical(narrow);
      ASSERT_EQ(valid.ok(), narrow.format.code_bits == 0) << valid.ToString();
      // Codes less zero points are the same numbers, but where the zero point has left.
      std::vector<float> found(static_cast<size_t>(narrow.cols)), same(found.size());
      for (int64_t row = 0; row < narrow.rows; ++row) {
        DequantizeRow(narrow, row, found.data());
        DequantizeRow(share.expert.down, row, same.data());
        ASSERT_EQ(std::memcmp(found.data(), same.data(), found.size() * sizeof(float)), 0) << row;
      }
      const PanelFormat panel = *ChoosePanelFormat(narrow.format, !narrow.zero_point.empty());
      if (panel.scale == PanelScale::kI8) {
        ExpectPanelsOfTwoLevels(narrow, share.WantedDown());
      }
    });
  }
}

}  // namespace
}  // namespace fusedmoe
