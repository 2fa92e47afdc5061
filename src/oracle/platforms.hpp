#pragma once

#include <cstdint>
#include <string>

#include <fusedmoe/oracle.hpp>

namespace fusedmoe {

/// One bit a described platform, in the order of platforms.inc, so that a record can say where it runs.
enum class PlatformId : uint8_t {
#define FMOE_PLATFORM(id, ...) id,
#include "oracle/platforms.inc"
#undef FMOE_PLATFORM
};

using PlatformMask = uint32_t;

constexpr PlatformMask Bit(PlatformId id) {
  return PlatformMask{1} << static_cast<int>(id);
}

namespace on {
inline constexpr PlatformMask kSm90 = Bit(PlatformId::kSm90);
inline constexpr PlatformMask kSm100Family = Bit(PlatformId::kSm100) | Bit(PlatformId::kSm103);
inline constexpr PlatformMask kSm110 = Bit(PlatformId::kSm110);
inline constexpr PlatformMask kSm120Family = Bit(PlatformId::kSm120) | Bit(PlatformId::kSm121);
inline constexpr PlatformMask kFromSm100 = kSm100Family | kSm110 | kSm120Family;
inline constexpr PlatformMask kFromSm89 = Bit(PlatformId::kSm89) | kSm90 | kFromSm100;
inline constexpr PlatformMask kFromSm80 = Bit(PlatformId::kSm80) | Bit(PlatformId::kSm86) | kFromSm89;
inline constexpr PlatformMask kNvidia = Bit(PlatformId::kSm75) | kFromSm80;
inline constexpr PlatformMask kAmd = Bit(PlatformId::kGfx942) | Bit(PlatformId::kGfx950);
inline constexpr PlatformMask kXpu = Bit(PlatformId::kXpu);
inline constexpr PlatformMask kCpu = Bit(PlatformId::kCpu);
inline constexpr PlatformMask kGpu = kNvidia | kAmd | kXpu;
}  // namespace on

/// The bit of a described platform; 0 for the host.
PlatformMask BitOf(const Platform& platform);

/// "sm90, sm100, sm103": the names in `mask`.
std::string NamesIn(PlatformMask mask);

}  // namespace fusedmoe
