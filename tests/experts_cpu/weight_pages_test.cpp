#include "experts/cpu/weight_pages.hpp"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <vector>

#include <fusedmoe/machine.hpp>

namespace fusedmoe::cpu {
namespace {

constexpr unsigned long kOfPage = 1, kOfAddress = 2;  // MPOL_F_NODE, MPOL_F_ADDR
constexpr int kInterleave = 3;                        // MPOL_INTERLEAVE

/// The policy of the page at an address, and its nodes. Nothing: the system does not tell.
std::vector<int> NodesOfPolicy(const void* page, int policy) {
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  std::array<unsigned long, 4096 / kBits> mask{};
  int found = -1;
  std::vector<int> nodes;
  if (syscall(SYS_get_mempolicy, &found, mask.data(), mask.size() * kBits, page, kOfAddress) == 0 &&
      found == policy) {
    for (size_t node = 0; node < mask.size() * kBits; ++node) {
      if ((mask[node / kBits] >> node % kBits & 1U) != 0) {
        nodes.push_back(static_cast<int>(node));
      }
    }
  }
  return nodes;
}

/// The numbers that are asked for, not the first of them; a node that the system does not have is left out.
TEST(WeightPages, AreBoundToTheNodesWithTheseNumbers) {
  std::vector<int> nodes = HostMachine().memory_nodes;
  if (nodes.empty()) {
    GTEST_SKIP() << "the system does not tell its memory nodes, or the process has a memory policy";
  }
  std::byte* data = nullptr;
  const Tensor one = *AllocatePages(DType::kU8, Shape{1000}, {nodes.back()}, &data);
  EXPECT_TRUE(NodesOfPolicy(data, kInterleave).empty());  // nothing to spread over
  std::vector<int> more = nodes;
  more.push_back(1000);
  const Tensor spread = *AllocatePages(DType::kU8, Shape{1000}, more, &data);
  const std::vector<int> bound = NodesOfPolicy(data, kInterleave);
  if (bound.empty()) {
    GTEST_SKIP() << "the system refuses memory policies (a filter of system calls)";
  }
  EXPECT_EQ(bound, nodes);
}

/// Where there are several nodes: small pages and huge ones lie on all of them alike.
TEST(WeightPages, LieOnAllNodesInTurn) {
  const std::vector<int>& nodes = HostMachine().memory_nodes;
  if (nodes.size() < 2) {
    GTEST_SKIP() << "one memory node";
  }
  constexpr int64_t kPage = 4096, kHugePage = int64_t{2} << 20;
  for (const int64_t bytes : {256 * kPage, 16 * kHugePage}) {
    std::byte* data = nullptr;
    const Tensor tensor = *AllocatePages(DType::kU8, Shape{bytes}, nodes, &data);
    std::memset(data, 1, static_cast<size_t>(bytes));
    std::map<int, int64_t> pages;
    for (int64_t at = 0; at < bytes; at += kPage) {
      int node = -1;
      ASSERT_EQ(syscall(SYS_get_mempolicy, &node, nullptr, 0UL, data + at, kOfPage | kOfAddress), 0);
      ++pages[node];
    }
    ASSERT_EQ(pages.size(), nodes.size());
    // Huge pages are whole, and 16 of them need not be a multiple of the nodes.
    const int64_t whole = bytes < kHugePage ? 1 : kHugePage / kPage;
    for (const int node : nodes) {
      EXPECT_NEAR(static_cast<double>(pages[node]),
                  static_cast<double>(bytes / kPage) / static_cast<double>(nodes.size()),
                  static_cast<double>(whole))
          << "node " << node;
    }
  }
}

}  // namespace
}  // namespace fusedmoe::cpu
