#include "oracle/platforms.hpp"

#include <vector>

#include "core/names.hpp"

namespace fusedmoe {
namespace {

constexpr int64_t kGigabyte = 1'000'000'000;

/// The instruction sets of a CPU described by feature set: the named one and all that it contains.
Machine MachineOf(PlatformId id, std::string_view model, int64_t memory_bytes) {
  const auto bit = [](Isa isa) { return uint32_t{1} << static_cast<int>(isa); };
  constexpr int kServerCores = 64;
  Machine machine;
  machine.cpu_name = model;
  machine.cpu_vendor = id == PlatformId::kCpuNeon  ? ""
                       : model.starts_with("EPYC") ? "AuthenticAMD"
                                                   : "GenuineIntel";
  machine.num_cores = kServerCores;
  machine.memory_bytes = memory_bytes;
  const uint32_t avx2 = bit(Isa::kAvx2);
  const uint32_t avx512 = avx2 | bit(Isa::kAvx512);
  const uint32_t vnni = avx512 | bit(Isa::kAvx512Vnni);
  switch (id) {
    case PlatformId::kCpuAvx2:
      machine.isa_mask = avx2;
      break;
    case PlatformId::kCpuAvx2Vnni:
      machine.isa_mask = avx2 | bit(Isa::kAvx2Vnni);
      break;
    case PlatformId::kCpuAvx512:
      machine.isa_mask = avx512;
      break;
    case PlatformId::kCpuAvx512Vnni:
      machine.isa_mask = vnni;
      break;
    case PlatformId::kCpuAvx512Bf16:
      machine.isa_mask = vnni | bit(Isa::kAvx512Bf16);
      break;
    case PlatformId::kCpuAvx512Fp16:
      machine.isa_mask = vnni | bit(Isa::kAvx512Bf16) | bit(Isa::kAvx512Fp16);
      break;
    case PlatformId::kCpuAmx:
      machine.isa_mask = vnni | bit(Isa::kAvx512Bf16) | bit(Isa::kAvx512Fp16) | bit(Isa::kAmx);
      break;
    case PlatformId::kCpuNeon:
      machine.isa_mask = bit(Isa::kNeon);
      break;
    default:
      break;
  }
  return machine;
}

Platform MakePlatform(PlatformId id, Platform platform) {
  platform.machine = MachineOf(id, platform.model, platform.memory_bytes);
  platform.runs_this_build = platform.machine.isa_mask != 0;
  return platform;
}

Platform Host() {
  Platform host;
  host.name = "host";
  host.machine = HostMachine();
  host.model = host.machine.cpu_name;
  host.memory_bytes = host.machine.memory_bytes;
  host.source = "detected; rates are not measured here";
  host.runs_this_build = true;
  return host;
}

}  // namespace

std::string_view PlatformKindName(PlatformKind kind) {
  switch (kind) {
    case PlatformKind::kNvidia:
      return "cuda";
    case PlatformKind::kAmd:
      return "rocm";
    case PlatformKind::kIntelGpu:
      return "xpu";
    case PlatformKind::kCpu:
      return "cpu";
  }
  return {};
}

std::span<const Platform> DescribedPlatforms() {
  static const std::vector<Platform> platforms = {
#define FMOE_PLATFORM(id, name, model, kind, capability, gbps, f16, fp8, fp4, int8, gigabytes, source) \
  MakePlatform(PlatformId::id, {name,                                                                  \
                                model,                                                                 \
                                PlatformKind::kind,                                                    \
                                capability,                                                            \
                                gbps,                                                                  \
                                f16,                                                                   \
                                fp8,                                                                   \
                                fp4,                                                                   \
                                int8,                                                                  \
                                gigabytes * kGigabyte,                                                 \
                                source,                                                                \
                                false,                                                                 \
                                {}}),
#include "oracle/platforms.inc"
#undef FMOE_PLATFORM
  };
  return platforms;
}

Result<Platform> FindPlatform(std::string_view name) {
  if (name == "host" || name.empty()) {
    return Host();
  }
  for (const Platform& platform : DescribedPlatforms()) {
    if (platform.name == name) {
      return platform;
    }
  }
  return UnknownName("platform", name, "host, " + NamesIn(~PlatformMask{0}));
}

PlatformMask BitOf(const Platform& platform) {
  const std::span<const Platform> platforms = DescribedPlatforms();
  for (size_t index = 0; index < platforms.size(); ++index) {
    if (platforms[index].name == platform.name) {
      return PlatformMask{1} << index;
    }
  }
  return 0;
}

std::string NamesIn(PlatformMask mask) {
  std::string names;
  const std::span<const Platform> platforms = DescribedPlatforms();
  for (size_t index = 0; index < platforms.size(); ++index) {
    if ((mask >> index & 1U) != 0) {
      AppendName(names, platforms[index].name);
    }
  }
  return names;
}

}  // namespace fusedmoe
