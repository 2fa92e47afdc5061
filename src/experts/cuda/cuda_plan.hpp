#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include <fusedmoe/machine.hpp>
#include <fusedmoe/plan.hpp>

#include "experts/cuda/launch.hpp"
#include "moe/backend.hpp"
#include "weights/fragment_pack.hpp"

namespace fusedmoe::cuda {

/// Which kernels compute a call, and why: few tokens are bound by reading the weights, many by arithmetic.
enum class Kernels : uint8_t { kDecode, kPrefill };

/// What follows from the problem and the card; chosen at plan time, tested without a card.
struct CudaPlan {
  LayerShape shape;
  FragmentSpec spec;
  /// Matrices go to the format that they were stored in (weights/narrow.hpp) before they are packed.
  bool narrow_gate_up = false, narrow_down = false;
  DeviceLimits limits;
  ActivationFormat activation;   ///< that counts: not quantized where only weights are
  DType element = DType::kBF16;  ///< of both token operands
  MidKind mid = MidKind::kRounded;
  std::optional<Kernels> forced;
  bool has_bias = false;
  bool float32 = false;         ///< F32 weights: kernels and layout of their own (float32.hpp)
  bool decoded = false;         ///< the same for integers that fragments do not hold, decoded to F32
  bool reordered = false;       ///< weights in activation order: the input is gathered
  bool short_scales = false;    ///< F32 scales beside zero points: they keep 15 bits of their mantissa
  bool weights_input = false;   ///< the router weight multiplies the input
  int64_t max_rows = 0;         ///< of a call: tokens; batched: rows of all experts
  int64_t rows_per_expert = 0;  ///< batched
};

/// How the weights are packed.
struct CudaLayout {
  FragmentSpec spec;
  bool narrow_gate_up = false, narrow_down = false;  ///< CudaPlan
};

/// The layout of the weights. Where they were stored in fewer bits than the layer's they go back to those:
/// all of them, or gate and up, down, or each to its own where kernels take both together.
Result<CudaLayout> LayoutOf(const MoeProblem& problem);

/// F32 weights, and integers that fragments do not hold, which are decoded to such: groups that are no
/// multiple of 16, zero points of channels that are no codes.
bool IsFloat32(const MoeProblem& problem);

/// The plan of a problem that CudaObjections does not refuse.
CudaPlan MakeCudaPlan(const MoeProblem& problem, const Machine& machine);

/// Everything that stands against running the problem.
std::vector<Verdict> CudaObjections(const MoeProblem& problem, const Machine& machine);

/// The kernels for a call of `num_rows` rows: those forced, else by rate, where the decode kernel fits.
Kernels ChooseKernels(const CudaPlan& plan, int64_t num_rows);

/// Whether a call of the layer may multiply codes on the 8-bit units: from a number of routes on.
bool MayMultiplyCodes(const CudaPlan& plan);

/// Whether a call of the layer may round the rows of its experts to BF16 before it adds them up.
bool MayRoundRows(const CudaPlan& plan);

/// The error that prefill adds to weights whose group scales it multiplies into them, in BF16: relative, root
/// mean square, of one rounding (2^-9.2, rounded up) or of two where the scales themselves are no BF16
/// numbers. 0 where scales act on sums or no call of the layer is prefilled. Of formats whose scales act on
/// weights in decode, too, that of every call.
double FoldedScaleError(const CudaPlan& plan, const WeightFormat& weight);

/// Decode takes at most this many rows; beyond, nothing is asked of its plan.
inline constexpr int64_t kMostDecodeRows = 512;

/// Bytes of the prepared weights on the card.
int64_t DeviceWeightBytes(const CudaPlan& plan);

/// Where the pieces of a workspace lie. Pieces that kernels want on 256 bytes are booked with room to align.
struct CudaSlots {
  WorkspaceSlot operand, operand_row_scale, operand_group_scale;
  WorkspaceSlot amax, counters, scratch;
  int64_t scratch_bytes = 0;
};
/// `input_by_route`: a row of operands for each slot, since its quantization depends on the expert.
CudaSlots BookCudaSlots(const CudaPlan& plan, bool input_by_route, WorkspaceBook& book);

/// The layout, in words of a recipe.
RecipeText CudaRecipe(const CudaPlan& plan);

/// "latency", "throughput" or "masked".
std::string_view ModeName(const CudaPlan& plan, int64_t num_rows);

}  // namespace fusedmoe::cuda
