#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <fusedmoe/config.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/parallel.hpp>
#include <fusedmoe/routing.hpp>
#include <fusedmoe/tensor.hpp>
#include <fusedmoe/workspace.hpp>

namespace fusedmoe {

/// Workspace entry of the rows between the GEMMs of REFERENCE (ReferenceExperts), for callers that have only
/// the layer.
inline constexpr std::string_view kReferenceMidEntry = "reference.mid";

/// Activations as the prepare step hands them on: either plain rows, or codes with their scales.
struct ExpertRows {
  /// Plain rows in the dtype of the model, or codes of the scheme's activation element.
  /// Standard: [M, H]; BatchedExperts: [E_local, rows, H], where rows beyond the count of an expert are never
  /// read.
  TensorView values;
  TensorView block_scale;  ///< linear (never swizzled): [M, groups] or [E_local, rows, groups]; empty: none
  /// The second scale level, or the only one of per-tensor schemes. Null: none.
  const float* tensor_scale = nullptr;
  bool quantized = false;
};

/// What one call of an experts implementation reads.
struct ExpertsInput {
  int64_t num_tokens = 0;  ///< M of the Standard format
  ExpertRows rows;
  const int32_t* topk_ids = nullptr;           ///< [M, k] global ids; -1 is skipped
  const float* topk_weights = nullptr;         ///< [M, k]
  const int32_t* expert_num_tokens = nullptr;  ///< [E_local], BatchedExperts only
  const int32_t* expert_map = nullptr;         ///< [E] global -> local or -1; null: ids are local
  bool router_weight_on_input = false;         ///< the input already carries the weights: do not weight again
  const RoutingInputs* routing = nullptr;      ///< monolithic implementations route themselves
};

/// "Standard" or "BatchedExperts", as in vLLM.
std::string_view FormatName(ActivationFormatKind format);

/// Who weights and reduces what an experts implementation leaves behind.
enum class WeightAndReduceKind : uint8_t {
  kDelegate,     ///< the finalize step must (batched experts)
  kNoOp,         ///< done: output is [M, H]
  kContiguous,   ///< output is [M, k, H], unweighted
  kNaiveBatched  ///< output is [E_local, rows, H], unweighted
};

/// What the kernel must know of an experts implementation. Constant over its life.
struct ExpertsTraits {
  ActivationFormatKind activation_format = ActivationFormatKind::kStandard;
  bool monolithic = false;                  ///< takes router logits, routes itself
  bool expects_unquantized_inputs = false;  ///< quantization is deferred to it
  /// Reads codes as well, with the same results: one quantization of a row serves all local experts (by
  /// `input_tensor_scale` where the scheme stores one). Prepare steps that send rows to other ranks can then
  /// send codes.
  bool takes_codes = false;
  bool weights_own_input = false;  ///< multiplies its input by the router weights where the layer asks for it
  WeightAndReduceKind weight_and_reduce = WeightAndReduceKind::kNoOp;
  /// The stored input scale that all local experts share, for prepare steps that quantize by one.
  std::optional<float> input_tensor_scale;
};

/// The middle step: permute, GEMM1, activation, requantize, GEMM2, and what weight_and_reduce says.
/// Immutable after creation: Apply may run in several threads at once, each with a workspace of its own.
class Experts {
 public:
  virtual ~Experts() = default;
  virtual const ExpertsTraits& traits() const = 0;
  /// Writes every element of `output`: F32, or, with kNoOp, F32 or the dtype of the rows. Rows whose token
  /// has no local expert become zero. BatchedExperts: rows beyond the counts are left alone. Allocates
  /// nothing.
  virtual Status Apply(const ExpertsInput& input, MutableTensorView output, const Workspace& workspace,
                       const Executor& executor) const = 0;
};

}  // namespace fusedmoe
