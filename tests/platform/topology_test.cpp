#include "platform/topology.hpp"

#include <unistd.h>

#include <filesystem>
#include <string>

#include <gtest/gtest.h>

#include "support/temporary_directory.hpp"

namespace fusedmoe {
namespace {

/// A tree of files like the kernel's, below a folder of its own.
class FakeSystem : public testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((directory_.path() / path).parent_path());
    directory_.Write(path, text + "\n");
  }
  void WriteCpu(int cpu, const std::string& siblings, const std::string& l3_shared_by) {
    const std::string folder = "sys/devices/system/cpu/cpu" + std::to_string(cpu);
    Write(folder + "/topology/thread_siblings_list", siblings);
    const struct {
      const char *type, *level, *size, *shared;
    } caches[] = {{"Data", "1", "48K", siblings.c_str()},
                  {"Instruction", "1", "32K", siblings.c_str()},
                  {"Unified", "2", "2048K", siblings.c_str()},
                  {"Unified", "3", "96M", l3_shared_by.c_str()}};
    for (int i = 0; i < 4; ++i) {
      const std::string cache = folder + "/cache/index" + std::to_string(i);
      Write(cache + "/type", caches[i].type);
      Write(cache + "/level", caches[i].level);
      Write(cache + "/size", caches[i].size);
      Write(cache + "/shared_cpu_list", caches[i].shared);
    }
  }
  std::string root() const { return directory_.path().string(); }

 private:
  const test::TemporaryDirectory directory_;
};

TEST(NumberList, RangesAndSinglesAndNonsense) {
  EXPECT_EQ(ParseNumberList("0-3,8"), (std::vector<int>{0, 1, 2, 3, 8}));
  EXPECT_EQ(ParseNumberList("0,2-3"), (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(ParseNumberList("5"), (std::vector<int>{5}));
  EXPECT_TRUE(ParseNumberList("").empty());
  EXPECT_TRUE(ParseNumberList("a-b,-1,3-1").empty());
  EXPECT_EQ(ParseNumberList("0-99999999").size(), 4096U);
}

TEST(CacheSize, UnitsAndNonsense) {
  EXPECT_EQ(ParseCacheSize("32K"), 32768);
  EXPECT_EQ(ParseCacheSize("96M"), 96 << 20);
  EXPECT_EQ(ParseCacheSize("512"), 512);
  EXPECT_EQ(ParseCacheSize(""), 0);
  EXPECT_EQ(ParseCacheSize("K"), 0);
  EXPECT_EQ(ParseCacheSize("-4K"), 0);
  EXPECT_EQ(ParseCacheSize("99999999999999K"), 0);
}

TEST_F(FakeSystem, HardwareThreadsOfACoreCountOnceAndCachesPerGroup) {
  for (int cpu = 0; cpu < 8; ++cpu) {
    WriteCpu(cpu, std::to_string(cpu % 4) + "," + std::to_string(cpu % 4 + 4),
             cpu % 4 < 2 ? "0-1,4-5" : "2-3,6-7");
  }
  Write("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 5 kB");
  const Topology all = ReadTopology(root(), {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_EQ(all.num_cores, 4);
  EXPECT_EQ(all.l1d_bytes, 48 << 10);
  EXPECT_EQ(all.l2_bytes, 2 << 20);
  EXPECT_EQ(all.l3_bytes, 96 << 20);
  EXPECT_EQ(all.l3_total_bytes, 2 * (96 << 20));
  EXPECT_EQ(all.memory_bytes, 1000 * 1024);
  const Topology some = ReadTopology(root(), {0, 4, 1});
  EXPECT_EQ(some.num_cores, 2);
  EXPECT_EQ(some.l3_total_bytes, 96 << 20);
}

/// Node 1 has processors only, node 3 memory only; numbers have holes, and more than 64 of them.
TEST_F(FakeSystem, MemoryNodesAreThoseWithMemoryBesideProcessorsOfTheProcess) {
  const std::string nodes = "sys/devices/system/node";
  Write(nodes + "/has_memory", "0,2-3,70");
  Write(nodes + "/has_cpu", "0-2,70");
  Write(nodes + "/node0/cpulist", "0-1,8-9");
  Write(nodes + "/node1/cpulist", "2-3");
  Write(nodes + "/node2/cpulist", "4-5");
  Write(nodes + "/node3/cpulist", "");
  Write(nodes + "/node70/cpulist", "6-7");
  EXPECT_EQ(ReadTopology(root(), {0, 1, 2, 3, 4, 5, 6, 7}).memory_nodes, (std::vector<int>{0, 2, 70}));
  EXPECT_EQ(ReadTopology(root(), {3, 4, 9}).memory_nodes, (std::vector<int>{0, 2}));
  EXPECT_EQ(ReadTopology(root(), {6}).memory_nodes, (std::vector<int>{70}));
  EXPECT_TRUE(ReadTopology(root(), {2, 3}).memory_nodes.empty());
}

TEST_F(FakeSystem, MemoryNodesAreThoseThatControlGroupsAllow) {
  const std::string nodes = "sys/devices/system/node";
  Write(nodes + "/has_memory", "0-2");
  for (int node = 0; node < 3; ++node) {
    Write(nodes + "/node" + std::to_string(node) + "/cpulist", std::to_string(node));
  }
  Write("proc/self/status", "Name:\tlayer\nMems_allowed:\t5\nMems_allowed_list:\t0,2\nUid:\t1");
  EXPECT_EQ(ReadTopology(root(), {0, 1, 2}).memory_nodes, (std::vector<int>{0, 2}));
}

TEST_F(FakeSystem, QuotaOfVersionTwoLimitsFromAnyLevel) {
  Write("proc/self/cgroup", "0::/slice/leaf");
  Write("proc/meminfo", "MemTotal: 1000000 kB");
  Write("sys/fs/cgroup/slice/cpu.max", "250000 100000");
  Write("sys/fs/cgroup/slice/leaf/cpu.max", "max 100000");
  Write("sys/fs/cgroup/slice/leaf/memory.max", "4096");
  const Topology topology = ReadTopology(root(), {0, 1, 2, 3, 4, 5});
  EXPECT_EQ(topology.num_cores, 3);  // 2.5, rounded up
  EXPECT_EQ(topology.memory_bytes, 4096);
}

TEST_F(FakeSystem, QuotaOfVersionOneLimits) {
  Write("proc/self/cgroup", "3:cpu,cpuacct:/job\n2:memory:/\nnonsense");
  Write("proc/meminfo", "MemTotal: 1000000 kB");
  Write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "50000");
  Write("sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "8192");
  const Topology topology = ReadTopology(root(), {0, 1});
  EXPECT_EQ(topology.num_cores, 1);
  EXPECT_EQ(topology.memory_bytes, 8192);
}

TEST_F(FakeSystem, NothingToReadIsOneUnlimitedCoreEach) {
  const Topology topology = ReadTopology(root(), {0, 1, 2});
  EXPECT_EQ(topology.num_cores, 3);
  EXPECT_TRUE(topology.memory_nodes.empty());
  EXPECT_EQ(topology.l3_total_bytes, 0);
}

}  // namespace
}  // namespace fusedmoe
