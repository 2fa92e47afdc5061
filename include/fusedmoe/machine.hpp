#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Instruction-set levels of the CPU kernels, once, best last: enumerator, name (as --isa takes it), what it
/// needs.
#define FMOE_ISA_TABLE(X)                                                                   \
  X(kAvx2, "avx2", "AVX2, FMA, F16C")                                                       \
  X(kAvx2Vnni, "avx2_vnni", "avx2 and AVX-VNNI")                                            \
  X(kAvx512, "avx512", "AVX-512 F, BW, DQ, VL")                                             \
  X(kAvx512Vnni, "avx512_vnni", "avx512 and VNNI, VBMI")                                    \
  X(kAvx512Bf16, "avx512_bf16", "avx512_vnni and AVX-512 BF16")                             \
  X(kAvx512Fp16, "avx512_fp16", "avx512_vnni and AVX-512 FP16")                             \
  X(kAmx, "amx", "avx512_fp16, AVX-512 BF16 and AMX tile, int8, bf16, with the permission") \
  X(kNeon, "neon", "Armv8.2 with dot product")

namespace fusedmoe {

enum class Isa : uint8_t {
#define FMOE_ISA_ENUMERATOR(id, name, needs) id,
  FMOE_ISA_TABLE(FMOE_ISA_ENUMERATOR)
#undef FMOE_ISA_ENUMERATOR
};

std::string_view IsaName(Isa isa);                   ///< "avx512_vnni"
std::string_view IsaNeeds(Isa isa);                  ///< "avx512 and VNNI, VBMI"
std::optional<Isa> ParseIsa(std::string_view name);  ///< nothing for another name
/// "avx2, avx512, ...", for messages.
std::string IsaNames();

/// The card of a CUDA machine: the first that the process may use.
struct CudaDevice {
  int index = 0;
  std::string name;
  std::string bus_address;  ///< on the PCI bus
  int compute_major = 0, compute_minor = 0;
  int64_t memory_bytes = 0;
  int64_t l2_bytes = 0;
  int num_multiprocessors = 0;
  int64_t shared_bytes_per_block = 0;  ///< the most that one block may ask for
  int driver_version = 0;              ///< as the driver reports it: 12040 is 12.4
};

/// What verdicts need to know of the machine at hand. Plain data: tests make their own.
struct Machine {
  std::string cpu_name;
  /// Who made the CPU, as CPUID says it, whatever a guest calls itself: "GenuineIntel", "AuthenticAMD",
  /// "HygonGenuine"; empty: no x86, or described by its name alone.
  std::string cpu_vendor;
  /// Bit static_cast<int>(Isa) where its instructions exist and the system saves their state.
  uint32_t isa_mask = 0;
  int num_cores = 1;  ///< usable by this process
  /// NUMA nodes that this process may use and that are local to its cores; empty: unknown, or the process has
  /// a memory policy of its own (numactl).
  std::vector<int> memory_nodes;
  int64_t l1d_bytes = 32 << 10;
  int64_t l2_bytes = 1 << 20;  ///< per core
  int64_t l3_bytes = 0;        ///< shared; 0: unknown
  int64_t memory_bytes = 0;
  std::optional<CudaDevice> cuda;
  std::string cuda_missing;  ///< why `cuda` is empty, with figures; empty where it is not

  bool Has(Isa isa) const { return (isa_mask >> static_cast<int>(isa) & 1U) != 0; }
};

/// The machine this process runs on; detected once, thread-safe.
const Machine& HostMachine();

/// What a card does now; -1: not told. Its driver tells (NVML), where that library is installed.
struct CardState {
  int sm_mhz = -1, max_sm_mhz = -1, memory_mhz = -1;
  double power_watts = -1, power_limit_watts = -1;
  int temperature_celsius = -1;
  std::string driver;  ///< "580.159.04"; empty: not told
};
/// Reads the state of the card that HostMachine names; thread-safe. All -1 without a card.
CardState ReadCardState();

}  // namespace fusedmoe
