#pragma once

#include "oracle/described_tables.hpp"

/// Pieces that the tables of several families share.
namespace fusedmoe {

inline constexpr uint32_t kAllActivations = kAny;
inline constexpr uint32_t kTritonActivations =
    Set({ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kGeluTanh, ActivationKind::kSwigluOai,
         ActivationKind::kSwigluStep, ActivationKind::kSiluNoMul, ActivationKind::kGeluNoMul,
         ActivationKind::kGeluTanhNoMul, ActivationKind::kRelu2NoMul});
inline constexpr uint32_t kSiluGeluOai =
    Set({ActivationKind::kSilu, ActivationKind::kGelu, ActivationKind::kSwigluOai});
inline constexpr uint32_t kFlashInferActivations =
    Set({ActivationKind::kSilu, ActivationKind::kRelu2NoMul, ActivationKind::kSwigluOai});
inline constexpr uint32_t kTrtllmRouting = Set({RoutingMethod::kDeepSeekV3, RoutingMethod::kRenormalize,
                                                RoutingMethod::kRenormalizeNaive, RoutingMethod::kLlama4});
inline constexpr uint32_t kLogits = Set({DType::kF32, DType::kBF16});
inline constexpr uint32_t kAllFloats = Set({DType::kBF16, DType::kF16, DType::kF32});
inline constexpr uint32_t kWeightOnly = Set({ActivationKey::kNone});

inline constexpr std::string_view kSwizzleSteps[] = {"swap_gate_up", "swizzle_scales(128x4)"};
inline constexpr std::string_view kTrtllmSteps[] = {"swap_gate_up", "interleave_gate_up", "shuffle_rows(128)",
                                                    "swizzle_scales(128x4)"};
inline constexpr std::string_view kScaleSwizzleSteps[] = {"swizzle_scales(128x4)"};
inline constexpr std::string_view kMarlinSteps[] = {"marlin_repack(16x64)", "marlin_permute_scales"};

/// Weight-only GEMMs on every NVIDIA card since Turing. Activation formats of the checkpoint are ignored.
constexpr Capability Marlin(std::span<const SchemePair> schemes, ActivationFormatKind format) {
  Capability marlin;
  marlin.platforms = on::kNvidia;
  marlin.schemes = schemes;
  marlin.activations = kAllActivations;
  marlin.parameters = Parameters::kSiluLimit;
  marlin.excludes = Excludes::kFlashInferAllToAll;
  marlin.format = format;
  marlin.bias = true;
  marlin.int8_input = true;
  marlin.activation_mode = ActivationMode::kWeightOnly;
  marlin.mode = format == ActivationFormatKind::kStandard ? "throughput" : "masked";
  marlin.pad_hidden = 256;
  marlin.pad_intermediate = 128;
  marlin.recipe = kMarlinSteps;
  marlin.scratch = format == ActivationFormatKind::kStandard ? Scratch::kMarlin : Scratch::kBatched;
  return marlin;
}

/// Dequantizes, quantizes and dequantizes activations, and runs the 16-bit Triton kernel.
constexpr Capability Emulation(std::span<const SchemePair> schemes) {
  Capability emulation;
  emulation.platforms = on::kGpu;
  emulation.schemes = schemes;
  emulation.activations = kTritonActivations;
  emulation.parameters = Parameters::kSiluLimit;
  emulation.excludes = Excludes::kFlashInferAllToAll;
  emulation.bias = true;
  emulation.scratch = Scratch::kTriton;
  return emulation;
}

/// The Triton GEMM over sorted tokens: the kernel that Emulation feeds, with what dequantizing takes from it.
constexpr Capability Triton(std::span<const SchemePair> schemes) {
  Capability triton = Emulation(schemes);
  triton.batch_invariant = true;
  triton.lora = true;
  triton.dtypes = kAllFloats;
  return triton;
}

/// Intel GPUs through their own fused layer.
constexpr Capability Xpu(std::span<const SchemePair> schemes) {
  Capability xpu;
  xpu.platforms = on::kXpu;
  xpu.schemes = schemes;
  xpu.activations = kSiluGeluOai | Set({ActivationKind::kRelu2NoMul});
  xpu.bias = true;
  xpu.scratch = Scratch::kOutputOnly;
  return xpu;
}

DescribedTable Nvfp4Table();
DescribedTable Fp8Table();
DescribedTable UnquantizedTable();
DescribedTable Mxfp4Table();
DescribedTable Mxfp4GptOssTable();
DescribedTable Mxfp8Table();
DescribedTable Int8Table();
DescribedTable Wna16Table();
DescribedTable W4a8Table();
DescribedTable OcpMxTable();

}  // namespace fusedmoe
