#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "ranks/mpirun.hpp"
#include "support/temporary_directory.hpp"

#ifdef FMOE_ALL_RANK_TESTS
namespace fusedmoe {
namespace {

using test::Job;

/// Two network namespaces that stand for two machines, joined by a virtual cable.
class TwoMachines : public test::MpiTest {
 protected:
  void SetUp() override {
    MpiTest::SetUp();
    if (IsSkipped()) {
      return;
    }
    const std::string id = std::to_string(getpid() % 10000);
    for (int host = 0; host < 2; ++host) {
      space_[host] = "fmoe" + id + "abc"[host];
      cable_[host] = "fm" + id + "v" + "abc"[host];
    }
    if (geteuid() != 0 || !Try("ip netns add " + space_[0])) {
      GTEST_SKIP()
          << "network namespaces cannot be made here: that needs root with CAP_NET_ADMIN, and iproute2";
    }
    const bool built = Try("ip netns add " + space_[1]) &&
                       Try("ip link add " + cable_[0] + " type veth peer name " + cable_[1]) && Host(0) &&
                       Host(1) && Try("ip netns exec " + space_[0] + " unshare --uts --ipc --mount true");
    if (!built) {
      GTEST_SKIP() << "no virtual cable or no namespaces of host names can be made here";
    }
    // What ssh would be: runs the command that follows the host's name there. Host names must differ, or Open
    // MPI takes both for one machine; so must /dev/shm.
    agent_ = directory_ / "agent.sh";
    std::ofstream(agent_) << "#!/bin/bash\nwhile [[ \"$1\" == -* ]]; do shift; done\nhost=$1; shift\nspace=" +
                                 space_[0] + "\n[ \"$host\" = nodeb ] && space=" + space_[1] +
                                 "\nexec ip netns exec $space unshare --uts --ipc --mount bash -c "
                                 "\"hostname $host; mount -t tmpfs tmpfs /dev/shm; $*\"\n";
    std::filesystem::permissions(agent_, std::filesystem::perms::owner_all);
  }

  void TearDown() override {
    std::error_code ignored;
    for (const std::string& space : space_) {
      if (!space.empty()) {
        Try("ip netns del " + space);
        std::filesystem::remove_all("/etc/netns/" + space, ignored);
      }
    }
  }

  static bool Try(const std::string& command) {
    return std::system((command + " >/dev/null 2>&1").c_str()) == 0;
  }

  bool Host(int host) const {
    const std::string& space = space_[host];
    std::error_code error;
    std::filesystem::create_directories("/etc/netns/" + space, error);
    std::ofstream("/etc/netns/" + space + "/hosts")
        << "127.0.0.1 localhost\n10.77.0.1 nodea\n10.77.0.2 nodeb\n";
    return Try("ip link set " + cable_[host] + " netns " + space) &&
           Try("ip -n " + space + " addr add 10.77.0." + std::to_string(host + 1) + "/24 dev " +
               cable_[host]) &&
           Try("ip -n " + space + " link set " + cable_[host] + " up") &&
           Try("ip -n " + space + " link set lo up");
  }

  /// mpirun on the first machine, two ranks on each.
  Job RunOnBoth(const std::string& command) const {
    const std::string out = directory_ / "out";
    const std::string line = agent_ +
                             " nodea \"mpirun --oversubscribe --bind-to none --mca mpi_yield_when_idle 1" +
                             " --mca plm_rsh_agent " + agent_ +
                             " --mca btl_tcp_if_include 10.77.0.0/24 --mca oob_tcp_if_include 10.77.0.0/24" +
                             " --mca oob_tcp_keepalive_time 2 --mca oob_tcp_keepalive_intvl 1" +
                             " --mca oob_tcp_keepalive_probes 2 -H nodea:2,nodeb:2 -np 4 " + command +
                             "\" > " + out + " 2>&1 < /dev/null";
    const auto start = std::chrono::steady_clock::now();
    Job job;
    const int status = std::system(line.c_str());
    job.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    job.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::ifstream file(out);
    job.text.assign(std::istreambuf_iterator<char>(file), {});
    return job;
  }

  std::string space_[2], cable_[2], agent_;
  const test::TemporaryDirectory directory_;
};

TEST_F(TwoMachines, Doctor_AcceptsTheSettingsThatItPrints) {
  const Job job = RunOnBoth(std::string(FMOE_CLI) + " doctor --ranks");
  EXPECT_EQ(job.exit_code, 0) << job.text;
  EXPECT_TRUE(job.Says({"4 ranks on 2 machines"})) << job.text;
}

TEST_F(TwoMachines, Steps_AreThoseOfOneMachine) {
  const Job job = RunOnBoth(std::string(FMOE_RANKS_DRIVER) + " " + FMOE_MPI_PLUGIN + " steps 60 -");
  EXPECT_EQ(job.exit_code, 0) << job.text;
}

TEST_F(TwoMachines, CutLink_EndsTheJob) {
  constexpr double kRun = 4, kDeadline = 3;
  const std::string mark = Mark();
  std::thread cutter([this, kRun] {
    std::this_thread::sleep_for(std::chrono::duration<double>(kRun));
    Try("ip -n " + space_[0] + " link set " + cable_[0] + " down");
  });
  const Job job = RunOnBoth(std::string(FMOE_RANKS_DRIVER) + " " + FMOE_MPI_PLUGIN + " fault none " +
                            std::to_string(kDeadline) + " " + mark);
  cutter.join();
  EXPECT_NE(job.exit_code, 0) << job.text;
  EXPECT_GT(job.seconds, kRun) << job.text;
  EXPECT_LT(job.seconds, kRun + kDeadline + 5) << job.text;
  EXPECT_TRUE(job.Says({"waited for ranks 2, 3"}) || job.Says({"for ranks 2, 3, the deadline"}) ||
              job.Says({"waited for ranks 0, 1"}))
      << "no line says what happened:\n"
      << job.text;
  EXPECT_EQ(ProcessesWith(mark), 0);
}

}  // namespace
}  // namespace fusedmoe
#endif
