#pragma once

#include <cstdint>
#include <istream>
#include <string>

#include <fusedmoe/machine.hpp>
#include <fusedmoe/status.hpp>

namespace fusedmoe {

/// The words of CPUID and XCR0 that the instruction-set levels depend on. Plain data, so that a test can
/// describe a processor that is not at hand.
struct X86Features {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0;
  uint32_t leaf7_ecx = 0;
  uint32_t leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;
  bool amx_offered = false;  ///< the system hands out the tile state on request
};

/// The twelve characters of CPUID leaf 0, in which EDX stands before ECX.
std::string CpuVendorOf(uint32_t ebx, uint32_t ecx, uint32_t edx);

/// Reads them from the processor; all zero where it is no x86.
X86Features ReadX86Features();

/// The mask of Machine::isa_mask: a level counts only with every instruction the build uses for it, and only
/// when the system saves its registers.
uint32_t IsaMask(const X86Features& features);

/// The same on AArch64, from the word AT_HWCAP in which Linux tells what a process may use.
uint32_t ArmIsaMask(uint64_t hwcap);

/// The levels of this processor, on any architecture.
uint32_t HostIsaMask();

/// The name of the first processor that a text like /proc/cpuinfo describes; on AArch64 that has numbers
/// only.
std::string CpuNameIn(std::istream& cpuinfo);

/// The name the processor gives itself; empty where it has none.
std::string CpuName();

/// Machine::cpu_vendor of the processor.
std::string CpuVendor();

/// Asks the system for the AMX tile registers, once for the process (all its threads have them afterwards). A
/// kernel must have an ok from here before its first tile instruction. Thread-safe. Errors: kUnsupported.
Status RequestAmxPermission();

}  // namespace fusedmoe
