#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/tensor.hpp>

/// Every kind of quantized operand: enumerator, the name that vLLM's configurations use, whether vLLM holds
/// it as a torch dtype (true) or as a string (false). Only string kinds take part in OCP-MX scheme names.
#define FMOE_QUANT_KIND_TABLE(X)     \
  X(kNone, "", false)                \
  X(kFp8E4M3, "float8_e4m3fn", true) \
  X(kInt8, "int8", true)             \
  X(kFp8, "fp8", false)              \
  X(kNvfp4, "nvfp4", false)          \
  X(kMxfp4, "mxfp4", false)          \
  X(kMxfp6E3M2, "mxfp6_e3m2", false) \
  X(kMxfp6E2M3, "mxfp6_e2m3", false) \
  X(kMxfp8, "mxfp8", false)          \
  X(kMxfp8E4M3, "mxfp8_e4m3", false) \
  X(kMxfp8E5M2, "mxfp8_e5m2", false) \
  X(kMxInt8, "mxint8", false)        \
  X(kInt4, "int4", false)

/// The factories of a QuantConfig: function, name, what it describes.
#define FMOE_QUANT_CONFIG_FACTORY_TABLE(X)                                                      \
  X(UnquantizedConfig, "unquantized", "16- or 32-bit weights and activations")                  \
  X(BiasedConfig, "biased", "the same with biases")                                             \
  X(Fp8W8A8Config, "fp8_w8a8", "e4m3 both; scales per tensor, token and channel, or block")     \
  X(Int8W8A8Config, "int8_w8a8", "int8 both; activation scales per tensor or token")            \
  X(GptqMarlinConfig, "gptq_marlin", "integer weights of 4 or 8 bits in groups, Marlin layout") \
  X(AwqMarlinConfig, "awq_marlin", "the same from AWQ, with zero points")                       \
  X(Mxfp4W4A16Config, "mxfp4_w4a16", "MXFP4 weights")                                           \
  X(Mxfp4Mxfp8Config, "mxfp4_mxfp8", "MXFP4 weights, MXFP8 activations")                        \
  X(Mxfp4W4A8Config, "mxfp4_w4a8", "MXFP4 weights, e4m3 activations per tensor")                \
  X(OcpMxConfig, "ocp_mx", "any pair of OCP-MX kinds")                                          \
  X(Nvfp4Config, "nvfp4", "NVFP4 both")                                                         \
  X(Mxfp4Config, "mxfp4", "MXFP4 both")                                                         \
  X(Nvfp4W4A16Config, "nvfp4_w4a16", "NVFP4 weights")                                           \
  X(Int4W4A16Config, "int4_w4a16", "int4 weights in groups")                                    \
  X(Fp8W8A16Config, "fp8_w8a16", "e4m3 weights")                                                \
  X(Int8W8A16Config, "int8_w8a16", "int8 weights in groups")                                    \
  X(Int4W4AFp8Config, "int4_w4afp8", "int4 weights with e4m3 group and F32 channel scales, e4m3 activations")

namespace fusedmoe {

enum class QuantKind : uint8_t {
#define FMOE_QUANT_KIND_ENUMERATOR(id, name, is_torch_dtype) id,
  FMOE_QUANT_KIND_TABLE(FMOE_QUANT_KIND_ENUMERATOR)
#undef FMOE_QUANT_KIND_ENUMERATOR
};

/// The name in the table; "" for kNone.
std::string_view QuantKindName(QuantKind kind);
/// The kind of that name (exact spelling), or nothing; "" is kNone.
std::optional<QuantKind> ParseQuantKind(std::string_view name);
std::string QuantKindNames();  ///< "float8_e4m3fn, int8, ...", for messages

/// One operand: what it is quantized to and with which tensors. Views are not owned; an empty view is absent.
struct QuantDesc {
  QuantKind kind = QuantKind::kNone;
  /// Elements that share a scale; absent where the kind says it (NVFP4, MX weights) or nothing is quantized.
  std::optional<GroupShape> shape;
  TensorView scale;
  /// Second level: NVFP4 weights, per-channel scales of W4A8, w*a products of FP8. For NVFP4 activations, the
  /// one place that holds a reciprocal, because the accessors mirror vLLM's (docs/scales.md).
  TensorView global_scale;
  TensorView zero_point;
  TensorView bias;
  /// Activations only: how their producer forms scales and codes.
  ActivationRule rule;
};

/// What a factory takes. A factory reads what its scheme has and leaves the rest as it is.
struct QuantConfigArguments {
  TensorView a1_scale, a2_scale, w1_scale, w2_scale;
  TensorView a1_gscale, a2_gscale, g1_alphas, g2_alphas;
  TensorView w1_zp, w2_zp, w1_bias, w2_bias;
  bool per_act_token_quant = false;
  bool per_out_ch_quant = false;
  std::optional<GroupShape> block_shape;
  int weight_bits = 0;                       ///< gptq_marlin, awq_marlin: 4 or 8
  int64_t group_size = -1;                   ///< gptq_marlin, awq_marlin: -1 is one group a row
  QuantKind quant_kind = QuantKind::kNone;   ///< ocp_mx: activations
  QuantKind weight_kind = QuantKind::kNone;  ///< ocp_mx: weights; kNone: as the activations
  std::optional<float> gemm1_alpha, gemm1_beta, gemm1_clamp_limit;
  int64_t mx_alignment = 0;
  bool is_scale_swizzled = true;
};

/// The quantization of one experts layer as vLLM's FusedMoEQuantConfig describes it: descriptors of both
/// activations and both weights (1: the fused gate_up GEMM, 2: down) and everything that follows from them.
/// A MoeLayer takes a Scheme and experts instead: SourceOfStacked (stacked.hpp) makes both of it. A plain
/// value, immutable once made: any number of threads may read it, and all functions of this header are pure
/// and may be called from any thread.
struct QuantConfig {
  QuantDesc a1, a2, w1, w2;
  bool is_scale_swizzled = true;
  std::optional<float> gemm1_alpha, gemm1_beta, gemm1_clamp_limit;
  int64_t mx_alignment = 0;

  QuantKind quant_kind() const { return a1.kind; }
  QuantKind weight_quant_kind() const { return w1.kind; }
  bool is_quantized() const { return a1.kind != QuantKind::kNone; }
  bool is_per_act_token() const { return a1.shape == kPerRow; }
  bool per_act_token_quant() const { return a1.shape == kPerRow; }
  bool per_out_ch_quant() const { return w1.shape == kPerRow; }
  bool is_per_tensor() const { return a1.shape == kPerTensor; }
  /// Rows and columns of a block, or nothing. Reported by weight-only group schemes as well.
  std::optional<GroupShape> block_shape() const;
  bool is_block_quantized() const { return block_shape().has_value(); }

  bool use_fp8_w8a8() const { return a1.kind == QuantKind::kFp8E4M3; }
  bool use_int8_w8a8() const { return a1.kind == QuantKind::kInt8; }
  bool use_int8_w8a16() const { return WeightOnly(QuantKind::kInt8); }
  bool use_fp8_w8a16() const { return WeightOnly(QuantKind::kFp8E4M3); }
  bool use_int4_w4a16() const { return WeightOnly(QuantKind::kInt4); }
  bool use_nvfp4_w4a16() const { return WeightOnly(QuantKind::kNvfp4); }
  bool use_mxfp4_w4a16() const { return WeightOnly(QuantKind::kMxfp4); }
  bool use_mxfp4_w4a4() const { return a1.kind == QuantKind::kMxfp4 && w1.kind == QuantKind::kMxfp4; }
  bool use_nvfp4_w4a4() const { return a1.kind == QuantKind::kNvfp4; }
  bool use_mxfp4_w4a8() const { return a1.kind == QuantKind::kFp8 && w1.kind == QuantKind::kMxfp4; }
  /// One of the eleven names, or "".
  std::string_view ocp_mx_scheme() const;

  const TensorView& a1_scale() const { return a1.scale; }
  const TensorView& a2_scale() const { return a2.scale; }
  const TensorView& a1_gscale() const { return a1.global_scale; }
  const TensorView& a2_gscale() const { return a2.global_scale; }
  const TensorView& w1_scale() const { return w1.scale; }
  const TensorView& w2_scale() const { return w2.scale; }
  const TensorView& g1_alphas() const { return w1.global_scale; }
  const TensorView& g2_alphas() const { return w2.global_scale; }
  const TensorView& w1_zp() const { return w1.zero_point; }
  const TensorView& w2_zp() const { return w2.zero_point; }
  const TensorView& w1_bias() const { return w1.bias; }
  const TensorView& w2_bias() const { return w2.bias; }

  /// The word for this configuration in names of tuning files, "" where there is none. `dtype`: of the input.
  std::string_view ConfigName(DType dtype) const;
  /// Shape of the activation scales for that many rows, or nothing without activation quantization.
  std::optional<std::array<int64_t, 2>> ScaleShape(int64_t max_tokens, int64_t hidden) const;
  std::optional<std::array<int64_t, 3>> BatchedScaleShape(int64_t num_experts, int64_t max_tokens,
                                                          int64_t hidden) const;

  /// What every factory checks before it hands a configuration out; the message names the fields (kUsage).
  Status Validate() const;

 private:
  bool WeightOnly(QuantKind kind) const { return a1.kind == QuantKind::kNone && w1.kind == kind; }
};

#define FMOE_QUANT_CONFIG_FACTORY(function, name, what) \
  Result<QuantConfig> function(const QuantConfigArguments& arguments);
FMOE_QUANT_CONFIG_FACTORY_TABLE(FMOE_QUANT_CONFIG_FACTORY)
#undef FMOE_QUANT_CONFIG_FACTORY

/// The factory of that name in the table, called. Unknown names: kUsage.
Result<QuantConfig> MakeQuantConfig(std::string_view factory, const QuantConfigArguments& arguments);

/// The group shapes {activations, weights} that the flags mean. Blocks exclude both per-token and per-channel
/// scales (kUsage).
Result<std::pair<std::optional<GroupShape>, std::optional<GroupShape>>> GroupShapesFor(
    QuantKind quant_kind, bool per_act_token, bool per_out_channel, std::optional<GroupShape> block_shape);

/// The OCP-MX scheme of a pair of kinds, "" where there is none.
std::string_view OcpMxSchemeName(QuantKind activation, QuantKind weight);

/// One level of scales in a QuantKey.
struct ScaleKey {
  DType dtype = DType::kF32;
  bool is_static = true;
  GroupShape group = kPerTensor;
  bool operator==(const ScaleKey&) const = default;
};

/// How one operand is quantized, as backends list what they support and as vLLM prints it in its logs.
struct QuantKey {
  DType dtype = DType::kU8;  ///< of the stored tensor: packed 4-bit floats are kU8
  ScaleKey scale;
  std::optional<ScaleKey> scale2;
  bool symmetric = true;
  /// "QuantKey(u8,scale(f8e4m3fn,static,GroupShape(row=1, col=16)),scale2(f32,static,per_tensor),symmetric)"
  std::string ToString() const;
  bool operator==(const QuantKey&) const = default;
};

struct NamedQuantKey {
  std::string_view name;  ///< "kNvfp4Static"
  QuantKey key;
};

/// All keys that have a name.
std::span<const NamedQuantKey> QuantKeyTable();

/// The keys of a scheme's operands; nothing where the operand is not quantized.
std::optional<QuantKey> QuantKeyOf(const WeightFormat& format);
std::optional<QuantKey> QuantKeyOf(const ActivationFormat& format);

}  // namespace fusedmoe
