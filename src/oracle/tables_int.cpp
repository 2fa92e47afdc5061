#include "oracle/family_tables.hpp"

// INT8, integer weight-only, and int4 weights with 8-bit activations.

namespace fusedmoe {
namespace {

constexpr uint32_t kInt4 = Set({WeightKey::kInt4Group, WeightKey::kInt4Fp8Scale});
constexpr uint32_t kInteger = kInt4 | Set({WeightKey::kInt8Group, WeightKey::kInt8Channel});

constexpr SchemePair kInt8Pairs[] = {
    {Set({WeightKey::kInt8Channel}), Set({ActivationKey::kInt8Token}), kAny}};
constexpr SchemePair kWeightOnlyPairs[] = {{kInteger, kWeightOnly, kAny}};
constexpr SchemePair kInt4Any[] = {{Set({WeightKey::kInt4Group}), kAny, kAny}};
constexpr SchemePair kInt4Fp8[] = {{Set({WeightKey::kInt4Fp8Scale}), Set({ActivationKey::kFp8Token}), kAny}};

constexpr Capability kTriton[] = {Triton(kInt8Pairs)};

constexpr Capability MarlinInteger(std::span<const SchemePair> schemes, ActivationFormatKind format) {
  Capability marlin = Marlin(schemes, format);
  marlin.zero_points = true;
  marlin.group_multiple = 32;
  marlin.group_index = true;
  return marlin;
}
constexpr Capability kMarlin[] = {MarlinInteger(kWeightOnlyPairs, ActivationFormatKind::kStandard)};
constexpr Capability kBatchedMarlin[] = {
    MarlinInteger(kWeightOnlyPairs, ActivationFormatKind::kBatchedExperts)};
constexpr Capability kMarlinW4A8[] = {MarlinInteger(kInt4Any, ActivationFormatKind::kStandard)};
constexpr Capability kBatchedMarlinW4A8[] = {MarlinInteger(kInt4Any, ActivationFormatKind::kBatchedExperts)};

constexpr Capability kCutlassW4A8[] = {{
    .platforms = on::kSm90,
    .schemes = kInt4Fp8,
    .activations = kSiluGeluOai,
    .excludes = Excludes::kFlashInferAllToAll,
    .hidden = {128},
    .intermediate = {128},
    .group_multiple = 128,
    .dtypes = Set({DType::kBF16}),
    .scratch = Scratch::kCutlass,
}};

constexpr DescribedBackend kInt8Rows[] = {{.name = "TRITON", .word = "triton", .kernels = kTriton}};
constexpr DescribedBackend kWna16Rows[] = {
    {.name = "MARLIN", .word = "marlin", .kernels = kMarlin},
    {.name = "BATCHED_MARLIN", .word = "marlin", .batched_of = "MARLIN", .kernels = kBatchedMarlin},
};
constexpr DescribedBackend kW4a8Rows[] = {
    {.name = "VLLM_CUTLASS", .word = "cutlass", .kernels = kCutlassW4A8},
    {.name = "MARLIN", .word = "marlin", .kernels = kMarlinW4A8},
    {.name = "BATCHED_MARLIN", .word = "marlin", .batched_of = "MARLIN", .kernels = kBatchedMarlinW4A8},
};

}  // namespace

DescribedTable Int8Table() {
  return {kInt8Rows, {}};
}
DescribedTable Wna16Table() {
  return {kWna16Rows, {}};
}
DescribedTable W4a8Table() {
  return {kW4a8Rows, {}};
}

}  // namespace fusedmoe
