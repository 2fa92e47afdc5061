#include <fusedmoe/machine.hpp>
#include <fusedmoe/probe.hpp>

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "platform/ceilings.hpp"
#include "platform/cpu_features.hpp"

namespace fusedmoe {
namespace {

constexpr uint32_t Mask(std::initializer_list<Isa> levels) {
  uint32_t mask = 0;
  for (const Isa isa : levels) {
    mask |= 1U << static_cast<int>(isa);
  }
  return mask;
}

// Words as `cpuid -r` prints them on such processors.
X86Features Haswell() {
  return {.leaf1_ecx = 0x7ffafbffU, .leaf7_ebx = 0x000027abU, .xcr0 = 0x7};
}
X86Features AlderLake() {
  return {.leaf1_ecx = 0x7ffafbffU,
          .leaf7_ebx = 0x239c27ebU,
          .leaf7_ecx = 0x98c007bcU,
          .leaf7_edx = 0xfc18c410U,
          .leaf7_1_eax = 0x10,
          .xcr0 = 0x207};
}
X86Features SapphireRapids() {
  return {.leaf1_ecx = 0x7ffefbffU,
          .leaf7_ebx = 0xf3bfbfebU,
          .leaf7_ecx = 0xfb417ffeU,
          .leaf7_edx = 0xffdd4432U,
          .leaf7_1_eax = 0x1c30,
          .xcr0 = 0x602e7,
          .amx_offered = true};
}

TEST(IsaNames, RoundTripAndUnknownIsNothing) {
  std::set<std::string_view> names;
#define FMOE_CHECK_NAME(id, text, needs) \
  EXPECT_EQ(IsaName(Isa::id), text);     \
  EXPECT_EQ(ParseIsa(text), Isa::id);    \
  EXPECT_EQ(IsaNeeds(Isa::id), needs);   \
  EXPECT_TRUE(names.insert(text).second);
  FMOE_ISA_TABLE(FMOE_CHECK_NAME)
#undef FMOE_CHECK_NAME
  EXPECT_FALSE(ParseIsa("avx"));
  EXPECT_FALSE(ParseIsa(""));
  EXPECT_FALSE(ParseIsa("AVX2"));
}

TEST(CpuVendor, StandsInEbxEdxEcx) {
  EXPECT_EQ(CpuVendorOf(0x756e6547U, 0x6c65746eU, 0x49656e69U), "GenuineIntel");
  EXPECT_EQ(CpuVendorOf(0x68747541U, 0x444d4163U, 0x69746e65U), "AuthenticAMD");
  EXPECT_EQ(CpuVendorOf(0x6f677948U, 0x656e6975U, 0x6e65476eU), "HygonGenuine");
  EXPECT_EQ(CpuVendorOf(0, 0, 0), "");
#if defined(__x86_64__)
  EXPECT_EQ(HostMachine().cpu_vendor.size(), 12U);
#else
  EXPECT_EQ(HostMachine().cpu_vendor, "");
#endif
}

TEST(IsaMaskOf, DescribedProcessorsHaveTheirLevels) {
  EXPECT_EQ(IsaMask({}), 0U);
  EXPECT_EQ(IsaMask(Haswell()), Mask({Isa::kAvx2}));
  EXPECT_EQ(IsaMask(AlderLake()), Mask({Isa::kAvx2, Isa::kAvx2Vnni}));
  EXPECT_EQ(IsaMask(SapphireRapids()), Mask({Isa::kAvx2, Isa::kAvx2Vnni, Isa::kAvx512, Isa::kAvx512Vnni,
                                             Isa::kAvx512Bf16, Isa::kAvx512Fp16, Isa::kAmx}));
}

TEST(IsaMaskOf, EachLevelNeedsTheStateThatTheSystemSaves) {
  X86Features features = SapphireRapids();
  features.amx_offered = false;
  EXPECT_EQ(IsaMask(features) & Mask({Isa::kAmx}), 0U);
  features = SapphireRapids();
  features.xcr0 = 0xe7;  // no tiles
  EXPECT_EQ(IsaMask(features) & Mask({Isa::kAmx}), 0U);
  EXPECT_NE(IsaMask(features) & Mask({Isa::kAvx512Fp16}), 0U);
  features.xcr0 = 0x7;  // no zmm
  EXPECT_EQ(IsaMask(features), Mask({Isa::kAvx2, Isa::kAvx2Vnni}));
  features.xcr0 = 0x3;  // no ymm
  EXPECT_EQ(IsaMask(features), 0U);
}

TEST(IsaMaskOf, VnniWithoutVbmiIsPlainAvx512) {
  X86Features cascade_lake = SapphireRapids();
  cascade_lake.leaf7_ecx = 1U << 11;
  cascade_lake.leaf7_1_eax = 0;
  EXPECT_EQ(IsaMask(cascade_lake), Mask({Isa::kAvx2, Isa::kAvx512}));
}

TEST(IsaMaskOf, ArmNeedsTheDotProduct) {
  // The features that /proc/cpuinfo names on such processors, as bits.
  constexpr uint64_t kCortexA72 = 0x8ff, kNeoverseN1 = 0x10119fff;
  EXPECT_EQ(ArmIsaMask(kCortexA72), 0U);
  EXPECT_EQ(ArmIsaMask(kNeoverseN1), Mask({Isa::kNeon}));
}

TEST(CpuNameIn, TakesTheModelOrTheNumbersOfArm) {
  const auto name = [](const char* text) {
    std::istringstream cpuinfo(text);
    return CpuNameIn(cpuinfo);
  };
  EXPECT_EQ(name("processor\t: 0\nmodel name\t: A core\n"), "A core");
  EXPECT_EQ(name("CPU implementer\t: 0x41\nCPU part\t: 0xd40\nCPU revision\t: 1\n"), "Neoverse-V1");
  EXPECT_EQ(name("CPU implementer\t: 0xc0\nCPU part\t: 0xac3\n"), "CPU part 0xac3 of implementer 0xc0");
  EXPECT_EQ(name("processor\t: 0\n"), "");
}

#if defined(__x86_64__)
/// The words of a line of /proc/cpuinfo; empty where there is no such file or line.
std::set<std::string> KernelFlags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) {
      std::istringstream words(line.substr(line.find(':') + 1));
      return {std::istream_iterator<std::string>(words), {}};
    }
  }
  return {};
}

TEST(HostMachine_, AgreesWithTheFlagsOfTheKernel) {
  const std::set<std::string> flags = KernelFlags();
  if (flags.empty()) {
    GTEST_SKIP() << "no flags in /proc/cpuinfo";
  }
  const auto all = [&](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(), [&](const char* name) { return flags.count(name) != 0; });
  };
  const Machine& machine = HostMachine();
  const bool avx2 = all({"avx2", "fma", "f16c", "bmi2"});
  const bool avx512 = avx2 && all({"avx512f", "avx512bw", "avx512dq", "avx512vl"});
  const bool vnni = avx512 && all({"avx512_vnni", "avx512vbmi"});
  EXPECT_EQ(machine.Has(Isa::kAvx2), avx2);
  EXPECT_EQ(machine.Has(Isa::kAvx2Vnni), avx2 && all({"avx_vnni"}));
  EXPECT_EQ(machine.Has(Isa::kAvx512), avx512);
  EXPECT_EQ(machine.Has(Isa::kAvx512Vnni), vnni);
  EXPECT_EQ(machine.Has(Isa::kAvx512Bf16), vnni && all({"avx512_bf16"}));
  EXPECT_EQ(machine.Has(Isa::kAvx512Fp16), vnni && all({"avx512_fp16"}));
  EXPECT_FALSE(machine.Has(Isa::kAmx) && !all({"amx_tile", "amx_int8", "amx_bf16"}));
  EXPECT_FALSE(machine.Has(Isa::kNeon));
}
#endif

TEST(HostMachine_, AmxPermissionIsGrantedWhereTheMaskPromisesIt) {
  EXPECT_EQ(RequestAmxPermission().ok(), ReadX86Features().amx_offered);
  if (HostMachine().Has(Isa::kAmx)) {
    EXPECT_TRUE(RequestAmxPermission().ok());
  }
}

TEST(HostMachine_, SizesArePlausibleAndTheSameEachTime) {
  const Machine& machine = HostMachine();
  EXPECT_EQ(&machine, &HostMachine());
  EXPECT_GE(machine.num_cores, 1);
  EXPECT_TRUE(std::ranges::is_sorted(machine.memory_nodes));
  EXPECT_GE(machine.l1d_bytes, 8 << 10);
  EXPECT_LE(machine.l1d_bytes, 1 << 20);
  EXPECT_GE(machine.l2_bytes, machine.l1d_bytes);
  EXPECT_GT(machine.memory_bytes, int64_t{64} << 20);
}

TEST(ReadBandwidth, IsWithinWhatMemoriesDo) {
  const double bytes_per_second = MeasureReadBandwidth(Executor{});
  EXPECT_GT(bytes_per_second, 0.1e9);
  EXPECT_LT(bytes_per_second, 1e12);  // one core; more means that the loads were optimized away
}

#if defined(__x86_64__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
/// A ceiling is not below what a loop of one load a line does: vectors wider than the registers, which wait
/// for their own stores, read at two thirds of that (Zen 3).
TEST(ReadProbe, IsNotSlowerThanALoadOfEveryLine) {
  constexpr int64_t kWindow = int64_t{64} << 20, kBytes = 4 * kWindow, kLine = 64;
  auto probe = ReadProbe::Create(Executor{});
  ASSERT_TRUE(probe.ok()) << probe.status().ToString();
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(size_t{2} << 20, kBytes),
                                                      &std::free);
  (void)madvise(memory.get(), kBytes, MADV_HUGEPAGE);
  std::memset(memory.get(), 1, kBytes);
  double read = 0, touched = 0;
  for (int turn = 0; turn < 24 && (turn < 8 || read < 0.85 * touched); ++turn) {  // in turns: others disturb
    const std::byte* window = static_cast<const std::byte*>(memory.get()) + turn % 4 * kWindow;
    const auto begin = std::chrono::steady_clock::now();
    unsigned sum = 0;
    for (int64_t i = 0; i < kWindow; i += kLine) {
      sum += static_cast<unsigned>(*static_cast<const volatile std::byte*>(window + i));
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    ASSERT_EQ(sum, kWindow / kLine);
    touched = std::max(touched, static_cast<double>(kWindow) / seconds.count());
    read = std::max(read, probe->Sample(Executor{}, kWindow));
  }
  EXPECT_GE(read, 0.85 * touched) << "bytes a second";
}
#endif

TEST(Peak, EveryUnitOfThisMachine_IsWithinWhatCoresDo_AndOthersAreZero) {
  for (const ComputeUnitInfo& info : ComputeUnits()) {
    EXPECT_EQ(ParseComputeUnit(info.name), info.unit);
    const double rate = MeasurePeak(info.unit, Executor{});
    if (HostMachine().Has(info.isa)) {
      EXPECT_GT(rate, 1e7) << info.name;                                   // emulated processors reach 2e8
      EXPECT_LT(rate, info.isa == Isa::kAmx ? 50e12 : 5e12) << info.name;  // more: nothing was computed
    } else {
      EXPECT_EQ(rate, 0.0) << info.name;
    }
  }
}

}  // namespace
}  // namespace fusedmoe
