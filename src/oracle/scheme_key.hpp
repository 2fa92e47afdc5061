#pragma once

#include <cstdint>
#include <string_view>

#include <fusedmoe/quant.hpp>

/// What upstream's oracles tell schemes apart by: enumerator, name. One key for weights, one for activations.
#define FMOE_WEIGHT_KEY_TABLE(X)                  \
  X(kNone, "unquantized")                         \
  X(kFp8Tensor, "fp8 per tensor")                 \
  X(kFp8Channel, "fp8 per channel")               \
  X(kFp8Block128, "fp8 128x128")                  \
  X(kInt8Tensor, "int8 per tensor")               \
  X(kInt8Channel, "int8 per channel")             \
  X(kInt8Group, "int8 groups")                    \
  X(kInt4Group, "int4 groups")                    \
  X(kInt4Fp8Scale, "int4 groups with fp8 scales") \
  X(kNvfp4, "nvfp4")                              \
  X(kMxfp4, "mxfp4")                              \
  X(kMxfp6, "mxfp6")                              \
  X(kMxfp8, "mxfp8")                              \
  X(kOther, "another weight format")

#define FMOE_ACTIVATION_KEY_TABLE(X)              \
  X(kNone, "16-bit activations")                  \
  X(kFp8TensorStatic, "fp8 per tensor, static")   \
  X(kFp8TensorDynamic, "fp8 per tensor, dynamic") \
  X(kFp8Token, "fp8 per token")                   \
  X(kFp8Group128, "fp8 per 128")                  \
  X(kInt8Tensor, "int8 per tensor")               \
  X(kInt8Token, "int8 per token")                 \
  X(kInt8Group, "int8 groups")                    \
  X(kNvfp4, "nvfp4")                              \
  X(kMxfp4, "mxfp4")                              \
  X(kMxfp6, "mxfp6")                              \
  X(kMxfp8, "mxfp8")                              \
  X(kOther, "another activation format")

/// One oracle of upstream each: enumerator, name.
#define FMOE_SCHEME_FAMILY_TABLE(X) \
  X(kUnquantized, "unquantized")    \
  X(kFp8, "FP8")                    \
  X(kNvfp4, "NVFP4")                \
  X(kMxfp4, "MXFP4")                \
  X(kMxfp4GptOss, "MXFP4 gpt-oss")  \
  X(kMxfp8, "MXFP8")                \
  X(kInt8, "INT8")                  \
  X(kWna16, "WNA16")                \
  X(kW4a8, "W4A8")                  \
  X(kOcpMx, "OCP-MX")

namespace fusedmoe {

#define FMOE_KEY_ENUMERATOR(id, name) id,
enum class WeightKey : uint8_t { FMOE_WEIGHT_KEY_TABLE(FMOE_KEY_ENUMERATOR) };
enum class ActivationKey : uint8_t { FMOE_ACTIVATION_KEY_TABLE(FMOE_KEY_ENUMERATOR) };
enum class SchemeFamily : uint8_t { FMOE_SCHEME_FAMILY_TABLE(FMOE_KEY_ENUMERATOR) };
#undef FMOE_KEY_ENUMERATOR

WeightKey WeightKeyOf(const WeightFormat& format);
ActivationKey ActivationKeyOf(const ActivationFormat& format);
/// Upstream keeps two lists for MXFP4: that of gpt-oss (SwigluOai) and that of all others.
SchemeFamily SchemeFamilyOf(const Scheme& scheme, bool swiglu_oai);

std::string_view Name(WeightKey key);
std::string_view Name(ActivationKey key);
std::string_view Name(SchemeFamily family);

}  // namespace fusedmoe
