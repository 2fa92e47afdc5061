#include "platform/cpu_features.hpp"

#include <array>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fusedmoe {
namespace {

constexpr uint32_t Bit(Isa isa) {
  return 1U << static_cast<int>(isa);
}

constexpr bool HasAll(uint64_t word, uint64_t bits) {
  return (word & bits) == bits;
}

// CPUID.1:ECX
constexpr uint32_t kFma = 1U << 12, kOsXsave = 1U << 27, kAvx = 1U << 28, kF16c = 1U << 29;
// CPUID.7.0:EBX
constexpr uint32_t kAvx2Bit = 1U << 5, kBmi2 = 1U << 8;
constexpr uint32_t kAvx512F = 1U << 16, kAvx512Dq = 1U << 17, kAvx512Bw = 1U << 30, kAvx512Vl = 1U << 31;
// CPUID.7.0:ECX and EDX, CPUID.7.1:EAX
constexpr uint32_t kVbmi = 1U << 1, kVnni = 1U << 11;
constexpr uint32_t kAmxBf16 = 1U << 22, kAvx512Fp16Bit = 1U << 23, kAmxTile = 1U << 24, kAmxInt8 = 1U << 25;
constexpr uint32_t kAvxVnni = 1U << 4, kAvx512Bf16Bit = 1U << 5;
// XCR0: which register files the system saves at a context switch.
constexpr uint64_t kYmmState = 0x6, kZmmState = 0xe6, kTileState = 0x60000;

#if defined(__linux__) && defined(__x86_64__)
// From the kernel's interface for dynamically enabled states; the numbers are ABI, the names are not in the
// headers of older systems.
constexpr long kArchGetXcompSupp = 0x1021;
constexpr long kArchReqXcompPerm = 0x1023;
constexpr long kTileDataFeature = 18;

bool SystemOffersTiles() {
  uint64_t supported = 0;
  return syscall(SYS_arch_prctl, kArchGetXcompSupp, &supported) == 0 &&
         (supported >> kTileDataFeature & 1U) != 0;
}
#endif

}  // namespace

X86Features ReadX86Features() {
  X86Features features;
#if defined(__x86_64__)
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) {
    return features;
  }
  features.leaf1_ecx = ecx;
  if ((ecx & kOsXsave) != 0) {
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    features.xcr0 = static_cast<uint64_t>(high) << 32 | low;
  }
  uint32_t max_subleaf = 0;
  if (__get_cpuid_count(7, 0, &max_subleaf, &ebx, &ecx, &edx) != 0) {
    features.leaf7_ebx = ebx;
    features.leaf7_ecx = ecx;
    features.leaf7_edx = edx;
    if (max_subleaf >= 1 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0) {
      features.leaf7_1_eax = eax;
    }
  }
#if defined(__linux__)
  features.amx_offered = SystemOffersTiles();
#endif
#endif
  return features;
}

uint32_t IsaMask(const X86Features& f) {
  // Each level contains the one before it, except that BF16 and FP16 are siblings above VNNI, and that VNNI
  // of 256 bits stands beside those of AVX-512: some processors have these alone, others both.
  if (!HasAll(f.leaf1_ecx, kFma | kOsXsave | kAvx | kF16c) || !HasAll(f.leaf7_ebx, kAvx2Bit | kBmi2) ||
      !HasAll(f.xcr0, kYmmState)) {
    return 0;
  }
  uint32_t mask = Bit(Isa::kAvx2);
  if (HasAll(f.leaf7_1_eax, kAvxVnni)) {
    mask |= Bit(Isa::kAvx2Vnni);
  }
  if (!HasAll(f.leaf7_ebx, kAvx512F | kAvx512Dq | kAvx512Bw | kAvx512Vl) || !HasAll(f.xcr0, kZmmState)) {
    return mask;
  }
  mask |= Bit(Isa::kAvx512);
  if (!HasAll(f.leaf7_ecx, kVbmi | kVnni)) {
    return mask;
  }
  mask |= Bit(Isa::kAvx512Vnni);
  const bool bf16 = HasAll(f.leaf7_1_eax, kAvx512Bf16Bit);
  const bool fp16 = HasAll(f.leaf7_edx, kAvx512Fp16Bit);
  if (bf16) {
    mask |= Bit(Isa::kAvx512Bf16);
  }
  if (fp16) {
    mask |= Bit(Isa::kAvx512Fp16);
  }
  if (bf16 && fp16 && HasAll(f.leaf7_edx, kAmxBf16 | kAmxTile | kAmxInt8) && HasAll(f.xcr0, kTileState) &&
      f.amx_offered) {
    mask |= Bit(Isa::kAmx);
  }
  return mask;
}

uint32_t ArmIsaMask(uint64_t hwcap) {
  // HWCAP_ASIMD and HWCAP_ASIMDDP of the system's interface.
  constexpr uint64_t kAsimd = 1U << 1, kAsimdDotProduct = 1U << 20;
  return HasAll(hwcap, kAsimd | kAsimdDotProduct) ? Bit(Isa::kNeon) : 0;
}

uint32_t HostIsaMask() {
#if defined(__aarch64__) && defined(__linux__)
  return ArmIsaMask(getauxval(AT_HWCAP));
#else
  return IsaMask(ReadX86Features());
#endif
}

std::string CpuNameIn(std::istream& cpuinfo) {
  std::string implementer, part;
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(": ");
    if (colon == std::string::npos) {
      continue;
    }
    const std::string value = line.substr(colon + 2);
    if (line.rfind("model name", 0) == 0) {
      return value;
    }
    if (line.rfind("CPU implementer", 0) == 0) {
      implementer = value;
    } else if (line.rfind("CPU part", 0) == 0) {
      part = value;
      break;
    }
  }
  if (implementer == "0x41") {  // Arm; the numbers of its server cores, as Linux knows them
    constexpr std::pair<std::string_view, std::string_view> kCores[] = {
        {"0xd0c", "Neoverse-N1"}, {"0xd40", "Neoverse-V1"}, {"0xd49", "Neoverse-N2"},
        {"0xd4f", "Neoverse-V2"}, {"0xd84", "Neoverse-V3"}, {"0xd8e", "Neoverse-N3"}};
    for (const auto& [number, core] : kCores) {
      if (part == number) {
        return std::string(core);
      }
    }
  }
  return part.empty() ? std::string() : "CPU part " + part + " of implementer " + implementer;
}

std::string CpuName() {
  std::string name;
#if defined(__x86_64__)
  std::array<uint32_t, 12> words = {};
  if (static_cast<uint32_t>(__get_cpuid_max(0x80000000U, nullptr)) >= 0x80000004U) {
    for (uint32_t leaf = 0; leaf < 3; ++leaf) {
      uint32_t* out = words.data() + 4 * leaf;
      __get_cpuid(0x80000002U + leaf, out, out + 1, out + 2, out + 3);
    }
    std::array<char, sizeof(words) + 1> text = {};
    std::memcpy(text.data(), words.data(), sizeof(words));
    name = text.data();
  }
#else
  std::ifstream file("/proc/cpuinfo");
  name = CpuNameIn(file);
#endif
  const size_t first = name.find_first_not_of(' ');
  return first == std::string::npos ? std::string()
                                    : name.substr(first, name.find_last_not_of(' ') - first + 1);
}

std::string CpuVendorOf(uint32_t ebx, uint32_t ecx, uint32_t edx) {
  const std::array<uint32_t, 3> words = {ebx, edx, ecx};
  std::array<char, sizeof(words) + 1> text = {};
  std::memcpy(text.data(), words.data(), sizeof(words));
  return text.data();
}

std::string CpuVendor() {
#if defined(__x86_64__)
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  __get_cpuid(0, &eax, &ebx, &ecx, &edx);
  return CpuVendorOf(ebx, ecx, edx);
#else
  return {};
#endif
}

Status RequestAmxPermission() {
#if defined(__linux__) && defined(__x86_64__)
  static const bool granted =
      SystemOffersTiles() && syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileDataFeature) == 0;
  if (granted) {
    return Status::Ok();
  }
#endif
  return Status::Unsupported("the system does not grant the AMX tile registers to this process")
      .WithHint("Linux 5.16 or newer on a processor with AMX");
}

}  // namespace fusedmoe
