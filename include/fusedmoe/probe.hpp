#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include <fusedmoe/executor.hpp>
#include <fusedmoe/machine.hpp>
#include <fusedmoe/status.hpp>

/// The arithmetic units that kernels can be bound by, once: enumerator, name (as `bench` prints a bound), the
/// ceiling it is measured as, the instruction-set level that has it, the instruction.
#define FMOE_COMPUTE_UNIT_TABLE(X)                                                              \
  X(kVnniInt8, "vnni_int8", "int8_gops", kAvx512Vnni, "vpdpbusd, 512 bits")                     \
  X(kF16Fma, "f16_fma", "f16_gflops", kAvx512Fp16, "vfmadd231ph, 512 bits")                     \
  X(kBf16Dot, "bf16_dot", "avx512_bf16_gflops", kAvx512Bf16, "vdpbf16ps, 512 bits")             \
  X(kF32Fma, "f32_fma", "f32_gflops", kAvx512, "vfmadd231ps, 512 bits")                         \
  X(kAmxInt8, "amx_int8", "amx_int8_gops", kAmx, "tdpbssd")                                     \
  X(kAmxBf16, "amx_bf16", "amx_bf16_gflops", kAmx, "tdpbf16ps")                                 \
  X(kAvx512Int8, "avx512_int8", "avx512_int8_gops", kAvx512, "vpmaddubsw and vpaddw, 512 bits") \
  X(kAvx2Fma, "avx2_f32_fma", "avx2_f32_gflops", kAvx2, "vfmadd231ps, 256 bits")                \
  X(kAvx2Int8, "avx2_int8", "avx2_int8_gops", kAvx2, "vpmaddubsw and vpaddw, 256 bits")         \
  X(kAvx2VnniInt8, "avx2_vnni_int8", "avx2_vnni_int8_gops", kAvx2Vnni, "vpdpbusd, 256 bits")    \
  X(kNeonFma, "neon_f32_fma", "neon_f32_gflops", kNeon, "fmla, 128 bits")                       \
  X(kNeonInt8, "neon_int8", "neon_int8_gops", kNeon, "sdot, 128 bits")

namespace fusedmoe {

/// Bytes a second that the threads of the executor read from memory together, measured now: the best of
/// several passes over a buffer larger than all caches. Takes about half a second and up to 2 GiB of memory
/// while it runs. 0 where the memory cannot be had.
double MeasureReadBandwidth(const Executor& executor);

enum class ComputeUnit : uint8_t {
#define FMOE_COMPUTE_UNIT_ENUMERATOR(id, name, ceiling, isa, instruction) id,
  FMOE_COMPUTE_UNIT_TABLE(FMOE_COMPUTE_UNIT_ENUMERATOR)
#undef FMOE_COMPUTE_UNIT_ENUMERATOR
};

/// A line of the table.
struct ComputeUnitInfo {
  ComputeUnit unit;
  std::string_view name;     ///< "vnni_int8"
  std::string_view ceiling;  ///< "int8_gops"
  Isa isa;
  std::string_view instruction;
};
std::span<const ComputeUnitInfo> ComputeUnits();                     ///< all that a peak is measured of
std::optional<ComputeUnit> ParseComputeUnit(std::string_view name);  ///< by ComputeUnitInfo::name

/// Operations a second (two per multiply-add) of the threads of the executor together, when they do nothing
/// but issue that instruction on registers, measured now: the best of several samples, a few milliseconds
/// each. 0 where the machine lacks the unit.
double MeasurePeak(ComputeUnit unit, const Executor& executor);

/// What the card of HostMachine does at most, measured now.
struct CardCeilings {
  double read_bytes = 0;       ///< bytes a second that a kernel reads from its memory
  double bf16_operations = 0;  ///< a second, tensor cores: bf16 inputs, fp32 sums, two per multiply-add
  double upload_bytes = 0;     ///< bytes a second from pinned host memory
};

/// Takes about a tenth of a second and up to 2 GiB of the card's memory while it runs. kUnsupported, with the
/// reason, where there is no card that this build can run on; kSystem when the card fails.
Result<CardCeilings> MeasureCard();

}  // namespace fusedmoe
