#include "oracle/family_tables.hpp"

// FP8 and unquantized experts.

namespace fusedmoe {
namespace {

constexpr uint32_t kTensor = Set({WeightKey::kFp8Tensor});
constexpr uint32_t kChannel = Set({WeightKey::kFp8Channel});
constexpr uint32_t kBlock = Set({WeightKey::kFp8Block128});
constexpr uint32_t kPlain = Set({WeightKey::kNone});
constexpr uint32_t kToken = Set({ActivationKey::kFp8Token});
constexpr uint32_t kGroup = Set({ActivationKey::kFp8Group128});
constexpr uint32_t kTensorInput = Set({ActivationKey::kFp8TensorStatic, ActivationKey::kFp8TensorDynamic});
// e4m3 needs the card's own conversions; Triton has none for older ones.
constexpr PlatformMask kTritonFp8 = on::kFromSm89 | on::kAmd | on::kXpu;

constexpr SchemePair kBlockPairs[] = {{kBlock, kGroup, kAny}};
constexpr SchemePair kPlainPairs[] = {{kPlain, kWeightOnly, kAny}};
constexpr SchemePair kTritonPairs[] = {
    {kBlock, kGroup, kTritonFp8},
    {kChannel, kToken, kTritonFp8},
    {kTensor, kToken | kTensorInput, kTritonFp8},
};
constexpr SchemePair kCutlassPairs[] = {{kChannel, kToken, kAny}, {kTensor, kTensorInput, kAny}};
constexpr SchemePair kMarlinPairs[] = {{kTensor | kChannel | kBlock, kAny, kAny}};
constexpr SchemePair kAiterPairs[] = {
    {kBlock, kGroup, kAny}, {kChannel, kToken, kAny}, {kTensor, kTensorInput, kAny}};
constexpr SchemePair kFlashInferPairs[] = {{kTensor, Set({ActivationKey::kFp8TensorStatic}), kAny},
                                           {kBlock, kGroup, on::kSm90}};
constexpr SchemePair kTrtllmMonolithicPairs[] = {{kBlock, kGroup, kAny},
                                                 {kTensor, Set({ActivationKey::kFp8TensorStatic}), kAny}};
constexpr SchemePair kXpuPairs[] = {{kTensor | kChannel, kToken | kTensorInput | kWeightOnly, kAny},
                                    {kBlock, kGroup, kAny}};
constexpr SchemePair kCpuPairs[] = {{kBlock, kGroup | kWeightOnly, kAny}};
constexpr std::string_view kTrtllmFp8Steps[] = {"swap_gate_up", "interleave_gate_up", "shuffle_rows(128)"};
constexpr std::string_view kSwapSteps[] = {"swap_gate_up"};

constexpr Capability TrtllmFp8(bool monolithic) {
  Capability trtllm;
  trtllm.variant = monolithic ? "monolithic" : "modular";
  trtllm.platforms = on::kSm100Family;
  trtllm.schemes = monolithic ? std::span<const SchemePair>(kTrtllmMonolithicPairs)
                              : std::span<const SchemePair>(kBlockPairs);
  trtllm.activations = Set({ActivationKind::kSilu, ActivationKind::kRelu2NoMul});
  trtllm.excludes = Excludes::kAllToAllButGather | Excludes::kEplb;
  trtllm.routes_inside = monolithic;
  trtllm.routing = kTrtllmRouting;
  trtllm.router_logits = kLogits;
  trtllm.f32_logits_for_deepseek = true;
  trtllm.max_top_k = 10;
  trtllm.experts = {4, 512};
  trtllm.ids = ExpertIds::kContiguous;
  trtllm.mode = "latency";
  trtllm.pad_intermediate = 128;
  trtllm.recipe = kTrtllmFp8Steps;
  trtllm.scratch = Scratch::kOutputOnly;
  return trtllm;
}
constexpr Capability kTrtllm[] = {TrtllmFp8(true), TrtllmFp8(false)};

constexpr Capability kFlashInferCutlass[] = {{
    .platforms = on::kSm90 | on::kSm100Family | on::kSm120Family,
    .schemes = kFlashInferPairs,
    .activations = kFlashInferActivations,
    .ids = ExpertIds::kContiguous,
    .pad_intermediate = 16,
    .recipe = kSwapSteps,
    .scratch = Scratch::kOutputOnly,
}};

// Each call goes to Triton when DeepGEMM cannot take its shape (M < 128, intermediate <= 512, sizes off 128).
constexpr Capability kDeepGemm[] = {{
    .platforms = on::kSm90 | on::kSm100Family,
    .schemes = kBlockPairs,
    .activations = Set({ActivationKind::kSilu, ActivationKind::kSwigluStep}),
    .excludes = Excludes::kFlashInferAllToAll,
    .scratch = Scratch::kDeepGemm,
}};
constexpr Capability kBatchedDeepGemm[] = {{
    .platforms = on::kSm90 | on::kSm100Family,
    .schemes = kBlockPairs,
    .activations = Set({ActivationKind::kSilu}),
    .hidden = {128},
    .intermediate = {128},
    .ids = ExpertIds::kLocal,
    .format = ActivationFormatKind::kBatchedExperts,
    .mode = "masked",
    .scratch = Scratch::kBatched,
}};

constexpr Capability CutlassFp8(bool batched) {
  Capability cutlass;
  cutlass.platforms = on::kSm90 | on::kSm100Family | on::kSm120Family;
  cutlass.schemes = kCutlassPairs;
  cutlass.activations = kSiluGeluOai;
  cutlass.excludes =
      batched ? Excludes::kNothing : Excludes::kDeepEpHighThroughput | Excludes::kFlashInferAllToAll;
  cutlass.ids = ExpertIds::kLocal;
  cutlass.hidden = {16};
  cutlass.intermediate = {16};
  cutlass.format = batched ? ActivationFormatKind::kBatchedExperts : ActivationFormatKind::kStandard;
  cutlass.mode = batched ? "masked" : "throughput";
  cutlass.scratch = batched ? Scratch::kBatched : Scratch::kCutlass;
  return cutlass;
}
constexpr Capability kVllmCutlass[] = {CutlassFp8(false)};
constexpr Capability kBatchedVllmCutlass[] = {CutlassFp8(true)};

constexpr Capability BatchedTriton(std::span<const SchemePair> schemes) {
  Capability triton;
  triton.platforms = on::kNvidia | on::kAmd;
  triton.schemes = schemes;
  triton.activations = kTritonActivations & ~Set({ActivationKind::kSwigluStep});
  triton.ids = ExpertIds::kLocal;
  triton.format = ActivationFormatKind::kBatchedExperts;
  triton.dtypes = kAllFloats;
  triton.mode = "masked";
  triton.scratch = Scratch::kBatched;
  return triton;
}
constexpr Capability kTriton[] = {Triton(kTritonPairs)};
constexpr Capability kBatchedTriton[] = {BatchedTriton(kTritonPairs)};
constexpr Capability kTritonPlain[] = {Triton(kPlainPairs)};
constexpr Capability kBatchedTritonPlain[] = {BatchedTriton(kPlainPairs)};
constexpr Capability kMarlin[] = {Marlin(kMarlinPairs, ActivationFormatKind::kStandard)};

constexpr Capability Aiter(std::span<const SchemePair> schemes) {
  Capability aiter;
  aiter.platforms = on::kAmd;
  aiter.schemes = schemes;
  aiter.activations = kSiluGeluOai;
  aiter.needs_aiter = true;
  aiter.pad_hidden = 256;
  aiter.scratch = Scratch::kOutputOnly;
  return aiter;
}
constexpr Capability kAiter[] = {Aiter(kAiterPairs)};
constexpr Capability kAiterPlain[] = {Aiter(kPlainPairs)};

constexpr Capability kXpu[] = {Xpu(kXpuPairs)};
constexpr Capability kXpuPlain[] = {Xpu(kPlainPairs)};

constexpr Capability kCpuFp8[] = {{
    .variant = "monolithic",
    .platforms = on::kCpu,
    .schemes = kCpuPairs,
    .activations = Set({ActivationKind::kSilu}),
    .routes_inside = true,
    .ids = ExpertIds::kLocal,
    .activation_mode = ActivationMode::kWeightOnly,
    .pad_hidden = 32,
    .pad_intermediate = 32,
    .scratch = Scratch::kOneActivation,
}};
constexpr Capability kCpuPlain[] = {{
    .platforms = on::kCpu,
    .schemes = kPlainPairs,
    .activations = kSiluGeluOai,
    .ids = ExpertIds::kLocal,
    .bias = true,
    .dtypes = kAllFloats,
    .scratch = Scratch::kOneActivation,
}};
constexpr Capability kTrtllmPlain[] = {{
    .variant = "monolithic",
    .platforms = on::kSm100Family,
    .schemes = kPlainPairs,
    .activations = Set({ActivationKind::kSilu}),
    .excludes = Excludes::kAllToAllButGather | Excludes::kEplb,
    .routes_inside = true,
    .routing = kTrtllmRouting,
    .router_logits = kLogits,
    .ids = ExpertIds::kContiguous,
    .dtypes = Set({DType::kBF16}),
    .mode = "latency",
    .pad_intermediate = 128,
    .recipe = kTrtllmFp8Steps,
    .scratch = Scratch::kOutputOnly,
}};
constexpr Capability kFlashInferCutlassPlain[] = {{
    .platforms = on::kSm90 | on::kSm100Family | on::kSm120Family,
    .schemes = kPlainPairs,
    .activations = kFlashInferActivations,
    .ids = ExpertIds::kContiguous,
    .recipe = kSwapSteps,
    .scratch = Scratch::kOutputOnly,
}};

constexpr DescribedBackend kFp8Rows[] = {
    {.name = "AITER", .word = "aiter", .kernels = kAiter},
    {.name = "FLASHINFER_TRTLLM", .word = "flashinfer_trtllm", .kernels = kTrtllm},
    {.name = "FLASHINFER_CUTLASS", .word = "flashinfer_cutlass", .kernels = kFlashInferCutlass},
    {.name = "DEEPGEMM", .word = "deep_gemm", .kernels = kDeepGemm},
    {.name = "VLLM_CUTLASS", .word = "cutlass", .vllm_cutlass = true, .kernels = kVllmCutlass},
    {.name = "TRITON", .word = "triton", .kernels = kTriton},
    {.name = "MARLIN", .word = "marlin", .kernels = kMarlin},
    {.name = "BATCHED_DEEPGEMM", .word = "deep_gemm", .batched_of = "DEEPGEMM", .kernels = kBatchedDeepGemm},
    {.name = "BATCHED_VLLM_CUTLASS",
     .word = "cutlass",
     .batched_of = "VLLM_CUTLASS",
     .vllm_cutlass = true,
     .kernels = kBatchedVllmCutlass},
    {.name = "BATCHED_TRITON", .word = "triton", .batched_of = "TRITON", .kernels = kBatchedTriton},
    {.name = "XPU", .word = "xpu", .kernels = kXpu},
    {.name = "CPU", .word = "cpu", .kernels = kCpuFp8},
};
// On Hopper block FP8 runs faster through Triton on one rank, and FlashInfer's kernel is the faster one under
// EP.
constexpr OrderRule kFp8Order[] = {
    {on::kSm90, OrderRule::When::kBlockFp8WithEp, "FLASHINFER_CUTLASS", OrderRule::Where::kFront},
    {on::kSm90, OrderRule::When::kBlockFp8WithoutEp, "TRITON", OrderRule::Where::kFront},
    {on::kXpu, OrderRule::When::kAlways, "XPU", OrderRule::Where::kFront},
    {on::kCpu, OrderRule::When::kAlways, "CPU", OrderRule::Where::kFront},
};

constexpr DescribedBackend kUnquantizedRows[] = {
    {.name = "AITER", .word = "aiter", .kernels = kAiterPlain},
    {.name = "FLASHINFER_TRTLLM", .word = "flashinfer_trtllm", .kernels = kTrtllmPlain},
    {.name = "FLASHINFER_CUTLASS", .word = "flashinfer_cutlass", .kernels = kFlashInferCutlassPlain},
    {.name = "TRITON", .word = "triton", .kernels = kTritonPlain},
    {.name = "BATCHED_TRITON", .word = "triton", .batched_of = "TRITON", .kernels = kBatchedTritonPlain},
    {.name = "XPU", .word = "xpu", .kernels = kXpuPlain},
    {.name = "CPU", .word = "cpu", .kernels = kCpuPlain},
};
constexpr OrderRule kUnquantizedOrder[] = {
    {on::kNvidia, OrderRule::When::kDataParallel, "FLASHINFER_CUTLASS", OrderRule::Where::kBack},
    {on::kXpu, OrderRule::When::kAlways, "XPU", OrderRule::Where::kFront},
};

}  // namespace

DescribedTable Fp8Table() {
  return {kFp8Rows, kFp8Order};
}
DescribedTable UnquantizedTable() {
  return {kUnquantizedRows, kUnquantizedOrder};
}

}  // namespace fusedmoe
