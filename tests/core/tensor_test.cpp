#include <fusedmoe/tensor.hpp>
#include <fusedmoe/workspace.hpp>

#include <gtest/gtest.h>

#include "core/checked_math.hpp"

namespace fusedmoe {
namespace {

TEST(Tensor_, PackedViewHasLogicalShapeAndByteStrides) {
  auto tensor = Tensor::Allocate(DType::kF4E2M1, {3, 5, 32});
  ASSERT_TRUE(tensor.ok());
  EXPECT_EQ(tensor->view().stride_bytes(1), 16);
  EXPECT_EQ(tensor->view().stride_bytes(0), 80);
  EXPECT_EQ(tensor->view().total_bytes(), 240);
  EXPECT_TRUE(tensor->view().dense());
  EXPECT_EQ(tensor->view()[2].data() - tensor->view().data(), 160);
  EXPECT_FALSE(tensor->view()[1].Rows(1, 2).empty());
}

TEST(Tensor_, AllocationThatCannotBeAddressedIsAnError) {
  const auto tensor = Tensor::Allocate(DType::kF32, {int64_t{1} << 40, int64_t{1} << 40});
  ASSERT_FALSE(tensor.ok());
  EXPECT_EQ(tensor.status().code(), StatusCode::kSystem);
}

TEST(CheckedMath, OverflowAndNegativeAreNothing) {
  const int64_t huge[] = {int64_t{1} << 62, 4};
  EXPECT_FALSE(CheckedElementCount(huge));
  const int64_t negative[] = {2, -1};
  EXPECT_FALSE(CheckedElementCount(negative));
  const int64_t zero[] = {int64_t{1} << 62, 4, 0};
  EXPECT_EQ(CheckedElementCount(zero), 0);
  const int64_t odd[] = {3};
  EXPECT_FALSE(CheckedTensorBytes(DType::kF4E2M1, odd));
}

TEST(StatusText, NamesFileTensorAndRemedy) {
  const Status status =
      Status::BadInput("shape is [3]").WithFile("a.safetensors").WithTensor("w").WithHint("expected [4]");
  EXPECT_EQ(status.ToString(), "a.safetensors: tensor 'w': shape is [3] (expected [4])");
  EXPECT_EQ(Status(status).WithFile("b").file(), "a.safetensors");
  EXPECT_TRUE(Status::Ok().WithFile("x").ok());
}

TEST(WorkspaceBooking, SlotsAreAlignedAndDisjoint) {
  WorkspaceBook book;
  const WorkspaceSlot a = book.Book("a", 100);
  const WorkspaceSlot b = book.Book("b", 1);
  EXPECT_EQ(a.offset, 0);
  EXPECT_EQ(b.offset, 128);
  EXPECT_EQ(book.total_bytes(), 192);
  auto workspace = Workspace::Allocate(book.total_bytes());
  ASSERT_TRUE(workspace.ok());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(workspace->Get<char>(b)) % 64, 0U);
}

TEST(WorkspaceBooking, MovedFrom_HoldsNothing) {
  Workspace from = *Workspace::Allocate(100);
  const Workspace to = std::move(from);
  EXPECT_EQ(to.bytes(), 100);
  EXPECT_EQ(from.bytes(), 0);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(Workspace::Allocate(std::numeric_limits<int64_t>::max()).status().code(), StatusCode::kSystem);
}

}  // namespace
}  // namespace fusedmoe
