#include "oracle/family_tables.hpp"

// NVFP4: TRTLLM, CUTEDSL, FlashInfer CUTLASS, MARLIN; VLLM_CUTLASS and EMULATION by name. CUTEDSL is the only
// one that takes batched rows.

namespace fusedmoe {
namespace {

constexpr uint32_t kWeights = Set({WeightKey::kNvfp4});
constexpr SchemePair kW4A4[] = {{kWeights, Set({ActivationKey::kNvfp4}), kAny}};
constexpr SchemePair kW4A4FromSm100[] = {{kWeights, Set({ActivationKey::kNvfp4}), on::kFromSm100}};
constexpr SchemePair kAnyInput[] = {{kWeights, kAny, kAny}};
constexpr SchemePair kEmulated[] = {{kWeights, Set({ActivationKey::kNvfp4, ActivationKey::kNone}), kAny}};

// Blocks of 16 along K; a partial one has no scale.
constexpr SizeRule kBlocks{16};

constexpr Capability kTrtllm[] = {{
    .variant = "monolithic",
    .platforms = on::kSm100Family,
    .schemes = kW4A4,
    .activations = Set({ActivationKind::kSilu}),
    .routes_inside = true,
    .routing = kTrtllmRouting,
    .router_logits = kLogits,
    .hidden = kBlocks,
    .intermediate = kBlocks,
    .ids = ExpertIds::kContiguous,
    .activation_mode = ActivationMode::kMaxExpanded,
    .mode = "latency",
    .pad_hidden = 256,
    .pad_intermediate = 64,  // twice the padded size must divide by 128
    .recipe = kTrtllmSteps,
    .scratch = Scratch::kOutputOnly,
}};

constexpr Capability kCuteDsl[] = {{
    .platforms = on::kSm100Family,
    .schemes = kW4A4,
    .activations = Set({ActivationKind::kSilu}),
    .hidden = kBlocks,
    .intermediate = kBlocks,
    .ids = ExpertIds::kLocal,
    .format = ActivationFormatKind::kBatchedExperts,
    .activation_mode = ActivationMode::kMaxExpanded,
    .mode = "masked",
    .recipe = kScaleSwizzleSteps,
    .scratch = Scratch::kBatched,
}};

constexpr Capability kFlashInferCutlass[] = {{
    .platforms = on::kSm90 | on::kSm100Family | on::kSm120Family,
    .schemes = kW4A4FromSm100,  // Hopper has this backend, but no fp4 in it
    .activations = kFlashInferActivations,
    .parameters = Parameters::kFixed,
    .hidden = kBlocks,
    .intermediate = kBlocks,
    .ids = ExpertIds::kContiguous,
    .bias = true,
    .activation_mode = ActivationMode::kMaxExpanded,
    .recipe = kSwizzleSteps,
    .scratch = Scratch::kOutputOnly,
}};

constexpr Capability MarlinNvfp4() {
  Capability marlin = Marlin(kAnyInput, ActivationFormatKind::kStandard);
  marlin.hidden = kBlocks;
  marlin.intermediate = kBlocks;
  return marlin;
}
constexpr Capability kMarlin[] = {MarlinNvfp4()};

constexpr Capability kVllmCutlass[] = {{
    .platforms = on::kFromSm100,
    .schemes = kW4A4,
    .activations = Set({ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kSwigluOai,
                        ActivationKind::kSwigluStep, ActivationKind::kSiluNoMul, ActivationKind::kGeluNoMul,
                        ActivationKind::kRelu2NoMul}),
    .excludes = Excludes::kExpertParallel,
    .hidden = {32},
    .intermediate = {32},
    .ids = ExpertIds::kLocal,
    .recipe = kScaleSwizzleSteps,
    .scratch = Scratch::kCutlassFp4,
}};

constexpr Capability EmulationNvfp4() {
  Capability emulation = Emulation(kEmulated);
  emulation.hidden = kBlocks;
  emulation.intermediate = kBlocks;
  return emulation;
}
constexpr Capability kEmulation[] = {EmulationNvfp4()};

constexpr DescribedBackend kRows[] = {
    {.name = "FLASHINFER_TRTLLM", .word = "flashinfer_trtllm", .kernels = kTrtllm},
    {.name = "FLASHINFER_CUTEDSL", .word = "flashinfer_cutedsl", .kernels = kCuteDsl},
    {.name = "FLASHINFER_CUTLASS", .word = "flashinfer_cutlass", .kernels = kFlashInferCutlass},
    {.name = "MARLIN", .word = "marlin", .kernels = kMarlin},
    {.name = "VLLM_CUTLASS", .word = "cutlass", .choice = BackendChoice::kByName, .kernels = kVllmCutlass},
    {.name = "EMULATION", .word = "emulation", .choice = BackendChoice::kByName, .kernels = kEmulation},
};

}  // namespace

DescribedTable Nvfp4Table() {
  return {kRows, {}};
}

}  // namespace fusedmoe
