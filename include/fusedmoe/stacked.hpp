#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <fusedmoe/config.hpp>
#include <fusedmoe/quant_config.hpp>
#include <fusedmoe/weights.hpp>

/// From the experts as vLLM holds them, stacked and packed, with their FusedMoEQuantConfig, to the source
/// that MoeLayer::Create takes. docs/vllm.md says which attribute of a vLLM layer goes where.

/// How gate and up share the rows of w1, once: enumerator, name, the rows from the first on.
#define FMOE_GATE_UP_ORDER_TABLE(X)                   \
  X(kGateFirst, "w13", "all of gate, then all of up") \
  X(kUpFirst, "w31", "all of up, then all of gate")   \
  X(kInterleaved, "interleaved", "gate, up, gate, up, ... ")

namespace fusedmoe {

enum class GateUpOrder : uint8_t {
#define FMOE_GATE_UP_ORDER_ENUMERATOR(id, name, rows) id,
  FMOE_GATE_UP_ORDER_TABLE(FMOE_GATE_UP_ORDER_ENUMERATOR)
#undef FMOE_GATE_UP_ORDER_ENUMERATOR
};
std::string_view GateUpOrderName(GateUpOrder order);                 ///< as the table above spells it
std::optional<GateUpOrder> ParseGateUpOrder(std::string_view name);  ///< nothing for another name
std::string GateUpOrderNames();  ///< "w13, w31, interleaved", for messages

/// The weights of E experts (those of this rank) in host memory, row by row as a loader leaves them: before a
/// kernel's shuffle, tile or transposition. Not owned. Codes of 4 and 6 bits lie along the last axis, the
/// even one low, and come as bytes (U8) or as views of their own type.
struct StackedWeights {
  TensorView w1;  ///< [E, 2I, H]; [E, I, H] where the activation has no gate
  TensorView w2;  ///< [E, H, I]
  /// Of the rows of w1 and of all that stands beside them: scales, zero points, biases. Idle without a gate.
  GateUpOrder order = GateUpOrder::kGateFirst;
};

/// The experts, one at a time, and the scheme that `quant` describes. Nothing is copied before an expert is
/// loaded: all views, those of `quant` too, must stay valid and unchanged as long as the source, its copies
/// and every layer that was made of them (the reference backend reads them in each forward).
///
/// `quant` is read as vLLM's factories fill it. Shapes, E in front; [E, n, 1] is [E, n]:
///
///     weights                    scale                          beside it
///     FP8, INT8 (with INT8       F32 [E] or, of w1, [E, 2];
///       activations)             [E, rows]; blocks of FP8:
///                                [E, rows / R, cols / C]
///     INT8 (alone), INT4 (alone) 16 or 32 bits                  zp U8 [E, rows, groups]; of INT4 two rows
///                                [E, rows, groups]              a byte, [E, rows / 2, groups]
///     INT4 with FP8 activations  e4m3 [E, rows, groups]         g_alphas [E, rows]
///     NVFP4                      e4m3 [E, rows, cols / 16]      g_alphas [E] or, of w1, [E, 2]
///     MXFP4, MXFP6, MXFP8        e8m0 or U8 [E, rows, cols / 32]
///
/// [E, 2] are scales of the two halves of w1, in their order. a_scale and a_gscale hold one number, or E;
/// biases are [E, rows]. Floats for which no type stands here may be F32, BF16 or F16.
///
/// Products and reciprocals are taken apart: with NVFP4 activations the input scale is 1 / a_gscale and the
/// tensor scale g_alphas / input scale, each rounded once; without, g_alphas is the tensor scale. What FP8
/// repeats of its static scales (g_alphas, a_gscale) is not read. is_scale_swizzled and mx_alignment are of
/// activations as kernels of vLLM want them, say nothing about weights and are not read either: scales of
/// weights must lie row by row, whatever they say. gemm1_alpha, gemm1_beta and gemm1_clamp_limit belong to
/// the activation: ActivationOf.
///
/// Errors name the field, its value and what is required: kUsage for a field that is missing, one that the
/// scheme has no place for, and descriptors that contradict each other; kBadInput for types and shapes that
/// do not fit, layouts of kernels among them where their shapes or types show, and, when an expert is loaded,
/// for scales and biases that are not finite; kUnsupported for pairs of kinds that no scheme here describes.
Result<ExpertSource> SourceOfStacked(const StackedWeights& weights, const QuantConfig& quant);

/// The activation with its own parameters but where `quant` has others: gemm1_alpha and gemm1_beta of
/// swigluoai, gemm1_clamp_limit of silu, swigluoai and swiglustep. kUsage for a parameter that the kind does
/// not have, unless its value changes nothing (alpha 1, beta 0, limit 0).
Result<ActivationSpec> ActivationOf(const QuantConfig& quant, ActivationKind kind);

}  // namespace fusedmoe
