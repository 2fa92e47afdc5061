#pragma once

#include <cstdint>
#include <memory>
#include <string_view>

#include <fusedmoe/routing.hpp>
#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

/// Routing on the card: the same ids and weights, bit for bit, as RouterGemm and Route give on the CPU. The
/// router's product has one order of additions everywhere (router_gemm.hpp), and everything behind it is
/// score_math.hpp.
namespace fusedmoe::cuda {

/// RouterGemm on the card: the weights of one product there. Immutable: any number of streams may use it.
class DeviceProduct {
 public:
  /// Copies weight [N, K] and bias [N] (may be empty) to the card; `what` stands in errors. kSystem when it
  /// has no memory.
  static Result<DeviceProduct> Create(TensorView weight, TensorView bias, std::string_view what);
  /// sums [M, N] F32 from rows [M, K] on the card, in the order of `stream`.
  Status Run(TensorView rows, float* sums, void* stream) const;
  bool empty() const { return weight_ == nullptr; }

 private:
  std::shared_ptr<std::byte> weight_, bias_;
  TensorView weight_view_, bias_view_;
};

/// What a layer's router brings, on the host; any of them may be empty.
struct RouterTables {
  TensorView weight;               ///< [E, H]
  TensorView bias;                 ///< [E]
  TensorView correction_bias;      ///< [E]
  TensorView token_id_to_experts;  ///< [vocabulary, k]
};

/// The router of one layer, its tables on the card. Immutable: any number of streams may use it at once. All
/// pointers and views that its calls take lie on the card; nothing is allocated, nobody waits, and a CUDA
/// graph can hold the calls.
class DeviceRouter {
 public:
  /// `num_logits` counts identity experts. kUsage as ValidateRouting says; kSystem when the card has no
  /// memory.
  static Result<std::unique_ptr<DeviceRouter>> Create(const RoutingConfig& config, int64_t num_logits,
                                                      int64_t max_tokens, const RouterTables& tables);
  ~DeviceRouter();

  /// logits [M, E] F32 from hidden [M, H].
  Status Logits(TensorView hidden, float* logits, void* stream) const;
  /// ids and weights [M, k], dense. `token_ids` [M], I32 or I64, only for hash routing; a token outside of
  /// its table gets ids of -1, since nobody here can refuse it. kUnsupported for Custom, whose callback runs
  /// on the host.
  Status Choose(int64_t num_tokens, TensorView router_logits, TensorView token_ids, int32_t* topk_ids,
                float* topk_weights, void* stream) const;

 private:
  DeviceRouter();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Ids (I32 or I64) and weights (F32, F16 or BF16) [M, k] of a caller, rows with gaps or without, as dense
/// I32 and F32. Ids outside of [0, num_experts) become -1.
Status TakeChoice(TensorView ids, TensorView weights, int64_t num_experts, int32_t* topk_ids,
                  float* topk_weights, void* stream);

/// SplitIdentity of topk_ids.hpp, on a card.
Status SplitIdentity(int64_t num_tokens, int64_t top_k, int64_t num_real_experts, const int32_t* topk_ids,
                     const float* topk_weights, int32_t* kept, float* identity_weights, void* stream);

}  // namespace fusedmoe::cuda
