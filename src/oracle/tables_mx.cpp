#include "oracle/family_tables.hpp"

// MXFP4 (gpt-oss and all others), MXFP8, and the OCP-MX schemes that only emulation runs.

namespace fusedmoe {
namespace {

constexpr uint32_t kFp4 = Set({WeightKey::kMxfp4});
constexpr uint32_t kFp8 = Set({WeightKey::kMxfp8});
constexpr uint32_t kMxfp8Input = Set({ActivationKey::kMxfp8});
constexpr uint32_t kSwigluActivations = Set({ActivationKind::kSilu, ActivationKind::kSwigluOai});
// One e8m0 scale for 32 elements of a row. Upstream cuts the shards of MXFP4 at block borders and pads them,
// so that the intermediate size of a rank need not be a multiple.
constexpr SizeRule kBlocks{32};

constexpr SchemePair kFp4Plain[] = {{kFp4, kWeightOnly, kAny}};
constexpr SchemePair kFp4Mxfp8[] = {{kFp4, kMxfp8Input, kAny}};
constexpr SchemePair kFp4Fp8Static[] = {{kFp4, Set({ActivationKey::kFp8TensorStatic}), kAny}};
constexpr SchemePair kFp4Group[] = {{kFp4, Set({ActivationKey::kFp8Group128}), kAny}};
constexpr SchemePair kFp4Fp4[] = {{kFp4, Set({ActivationKey::kMxfp4}), kAny}};
constexpr SchemePair kFp4Any[] = {{kFp4, kAny, kAny}};
constexpr SchemePair kFp8Pairs[] = {{kFp8, kMxfp8Input, kAny}};
constexpr SchemePair kFp8Any[] = {{kFp8, kAny, kAny}};
constexpr SchemePair kOcp[] = {{kFp4 | Set({WeightKey::kMxfp6}), kAny, kAny}};

constexpr Capability Trtllm(std::span<const SchemePair> schemes, bool monolithic) {
  Capability trtllm;
  trtllm.variant = monolithic ? "monolithic" : "modular";
  trtllm.platforms = on::kSm100Family;
  trtllm.schemes = schemes;
  trtllm.activations = kSwigluActivations;
  trtllm.parameters =
      Parameters::kFree;  // alpha, beta and limit are vectors of the kernel, one value an expert
  trtllm.excludes = monolithic ? Excludes::kSeveralRanks | Excludes::kEplb : Excludes::kNothing;
  trtllm.routes_inside = monolithic;
  trtllm.routing =
      Set({RoutingMethod::kRenormalize, RoutingMethod::kRenormalizeNaive, RoutingMethod::kDeepSeekV3});
  trtllm.router_logits = kLogits;
  trtllm.hidden = kBlocks;
  trtllm.bias = true;
  trtllm.dtypes = Set({DType::kBF16});
  trtllm.mode = "latency";
  trtllm.pad_hidden = 256;
  trtllm.pad_intermediate = 256;
  trtllm.recipe = kTrtllmSteps;
  trtllm.scratch = Scratch::kOutputOnly;
  return trtllm;
}
constexpr Capability kTrtllmBf16[] = {Trtllm(kFp4Plain, true), Trtllm(kFp4Plain, false)};
constexpr Capability kTrtllmMxfp8[] = {Trtllm(kFp4Mxfp8, true), Trtllm(kFp4Mxfp8, false)};

constexpr Capability Cutlass(std::span<const SchemePair> schemes, PlatformMask platforms) {
  Capability cutlass;
  cutlass.platforms = platforms;
  cutlass.schemes = schemes;
  cutlass.activations = kFlashInferActivations;
  cutlass.parameters = Parameters::kFree;
  cutlass.hidden = kBlocks;
  cutlass.ids = ExpertIds::kContiguous;
  cutlass.bias = true;
  cutlass.pad_hidden = 128;
  cutlass.pad_intermediate = 128;
  cutlass.recipe = kSwizzleSteps;
  cutlass.scratch = Scratch::kOutputOnly;
  return cutlass;
}
constexpr Capability kCutlassBf16[] = {Cutlass(kFp4Plain, on::kSm90)};
constexpr Capability kCutlassMxfp8[] = {Cutlass(kFp4Mxfp8, on::kSm100Family | on::kSm120Family)};

constexpr Capability Aiter(std::span<const SchemePair> schemes) {
  Capability aiter;
  aiter.platforms = on::kAmd;
  aiter.schemes = schemes;
  aiter.activations = kSiluGeluOai;
  aiter.needs_aiter = true;
  aiter.hidden = kBlocks;
  aiter.bias = true;
  aiter.pad_hidden = 256;
  aiter.pad_intermediate = 256;
  aiter.scratch = Scratch::kOutputOnly;
  return aiter;
}
constexpr Capability kAiterBf16[] = {Aiter(kFp4Plain)};
constexpr Capability kAiterFp8[] = {Aiter(kFp4Fp8Static)};
constexpr Capability AiterFp4() {
  Capability aiter = Aiter(kFp4Fp4);
  aiter.platforms = Bit(PlatformId::kGfx950);  // the first of them with scaled fp4 matrix instructions
  return aiter;
}
constexpr Capability kAiterMxfp4[] = {AiterFp4()};

// triton_kernels: matrix instructions of Hopper, Blackwell (not the 12.x ones) and CDNA.
constexpr Capability kTriton[] = {{
    .platforms = on::kSm90 | on::kSm100Family | on::kAmd,
    .schemes = kFp4Plain,
    .activations = Set({ActivationKind::kSwigluOai, ActivationKind::kSilu, ActivationKind::kGelu,
                        ActivationKind::kSwigluStep}),
    .parameters = Parameters::kFree,
    .hidden = kBlocks,
    .bias = true,
    .pad_intermediate = 64,
    .scratch = Scratch::kOneActivation,
}};

constexpr Capability MarlinMx(std::span<const SchemePair> schemes, ActivationFormatKind format) {
  Capability marlin = Marlin(schemes, format);
  marlin.hidden = kBlocks;
  marlin.dtypes = Set({DType::kBF16});  // its kernels read E8M0 scales beside no other type
  return marlin;
}
constexpr Capability kMarlin[] = {MarlinMx(kFp4Any, ActivationFormatKind::kStandard)};
constexpr Capability kBatchedMarlin[] = {MarlinMx(kFp4Any, ActivationFormatKind::kBatchedExperts)};
constexpr Capability kMarlinFp8[] = {MarlinMx(kFp8Any, ActivationFormatKind::kStandard)};

constexpr Capability kDeepGemm[] = {{
    .platforms = on::kSm100Family,
    .schemes = kFp4Group,
    .activations = Set({ActivationKind::kSilu, ActivationKind::kSwigluStep}),
    .parameters = Parameters::kSiluLimit,
    .excludes = Excludes::kFlashInferAllToAll,
    .hidden = kBlocks,
    .pad_hidden = 128,
    .pad_intermediate = 128,
    .scratch = Scratch::kDeepGemm,
}};

constexpr Capability XpuMx(std::span<const SchemePair> schemes) {
  Capability xpu = Xpu(schemes);
  xpu.hidden = kBlocks;
  return xpu;
}
constexpr Capability kXpuFp4[] = {XpuMx(kFp4Plain)};
constexpr Capability kXpuFp8[] = {XpuMx(kFp8Pairs)};

constexpr Capability kCpu[] = {{
    .variant = "monolithic",
    .platforms = on::kCpu,
    .schemes = kFp4Plain,
    .activations = kSwigluActivations,
    .routes_inside = true,
    .hidden = kBlocks,
    .ids = ExpertIds::kLocal,
    .bias = true,
    .activation_mode = ActivationMode::kWeightOnly,
    .pad_hidden = 32,
    .pad_intermediate = 32,
    .scratch = Scratch::kOneActivation,
}};

constexpr Capability TrtllmFp8() {
  Capability trtllm = Trtllm(kFp8Pairs, true);
  trtllm.activations = Set({ActivationKind::kSilu, ActivationKind::kRelu2NoMul});
  trtllm.parameters = Parameters::kFixed;
  trtllm.excludes = Excludes::kAllToAllButGather | Excludes::kEplb;
  trtllm.routing = kTrtllmRouting;
  trtllm.intermediate = kBlocks;
  trtllm.f32_logits_for_deepseek = true;
  trtllm.ids = ExpertIds::kContiguous;
  trtllm.bias = false;
  trtllm.max_top_k = 10;
  trtllm.experts = {4, 512};
  trtllm.pad_hidden = 128;
  trtllm.pad_intermediate = 128;
  return trtllm;
}
constexpr Capability kTrtllmFp8[] = {TrtllmFp8()};

constexpr Capability EmulationMx(std::span<const SchemePair> schemes) {
  Capability emulation = Emulation(schemes);
  emulation.hidden = kBlocks;
  return emulation;
}
constexpr Capability kEmulationFp4[] = {EmulationMx(kFp4Any)};
constexpr Capability kEmulationFp8[] = {EmulationMx(kFp8Any)};
constexpr Capability kEmulationOcp[] = {EmulationMx(kOcp)};

constexpr DescribedBackend kGptOssRows[] = {
    {.name = "FLASHINFER_TRTLLM_BF16", .word = "flashinfer_trtllm", .kernels = kTrtllmBf16},
    {.name = "FLASHINFER_TRTLLM_MXFP8", .word = "flashinfer_trtllm", .kernels = kTrtllmMxfp8},
    {.name = "AITER_MXFP4_BF16", .word = "aiter", .kernels = kAiterBf16},
    {.name = "AITER_MXFP4_FP8", .word = "aiter", .kernels = kAiterFp8},
    {.name = "AITER_MXFP4_MXFP4", .word = "aiter", .kernels = kAiterMxfp4},
    {.name = "TRITON", .word = "triton", .kernels = kTriton},
    {.name = "FLASHINFER_CUTLASS_BF16", .word = "flashinfer_cutlass", .kernels = kCutlassBf16},
    {.name = "FLASHINFER_CUTLASS_MXFP8", .word = "flashinfer_cutlass", .kernels = kCutlassMxfp8},
    {.name = "MARLIN", .word = "marlin", .kernels = kMarlin},
    {.name = "BATCHED_MARLIN", .word = "marlin", .batched_of = "MARLIN", .kernels = kBatchedMarlin},
    {.name = "XPU", .word = "xpu", .kernels = kXpuFp4},
    {.name = "CPU", .word = "cpu", .kernels = kCpu},
    {.name = "EMULATION", .word = "emulation", .choice = BackendChoice::kByName, .kernels = kEmulationFp4},
};
constexpr DescribedBackend kMxfp4Rows[] = {
    {.name = "FLASHINFER_TRTLLM_MXFP8", .word = "flashinfer_trtllm", .kernels = kTrtllmMxfp8},
    {.name = "DEEPGEMM_MXFP4", .word = "deep_gemm", .kernels = kDeepGemm},
    {.name = "MARLIN", .word = "marlin", .kernels = kMarlin},
    {.name = "BATCHED_MARLIN", .word = "marlin", .batched_of = "MARLIN", .kernels = kBatchedMarlin},
    {.name = "XPU", .word = "xpu", .kernels = kXpuFp4},
    {.name = "CPU", .word = "cpu", .kernels = kCpu},
    {.name = "EMULATION", .word = "emulation", .choice = BackendChoice::kByName, .kernels = kEmulationFp4},
};
constexpr DescribedBackend kMxfp8Rows[] = {
    {.name = "FLASHINFER_TRTLLM", .word = "flashinfer_trtllm", .kernels = kTrtllmFp8},
    {.name = "MARLIN", .word = "marlin", .kernels = kMarlinFp8},
    {.name = "XPU", .word = "xpu", .kernels = kXpuFp8},
    {.name = "EMULATION", .word = "emulation", .choice = BackendChoice::kByName, .kernels = kEmulationFp8},
};
// Nothing else computes these formats, so the emulation need not be named.
constexpr DescribedBackend kOcpRows[] = {
    {.name = "EMULATION", .word = "emulation", .kernels = kEmulationOcp},
};

}  // namespace

DescribedTable Mxfp4Table() {
  return {kMxfp4Rows, {}};
}
DescribedTable Mxfp4GptOssTable() {
  return {kGptOssRows, {}};
}
DescribedTable Mxfp8Table() {
  return {kMxfp8Rows, {}};
}
DescribedTable OcpMxTable() {
  return {kOcpRows, {}};
}

}  // namespace fusedmoe
