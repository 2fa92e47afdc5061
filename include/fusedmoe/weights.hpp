#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <fusedmoe/quant.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// One projection of one expert in canonical form: [rows, cols] = [outputs, inputs], row-major codes,
/// real = (code - zero) * block_scale * channel_scale * tensor_scale.
///
/// Blocks of scales may start before the first row or column (a slice of a larger matrix, as tensor
/// parallelism makes them): element (r, c) uses block_scale[(scale_row_offset + r) / block.row,
/// (scale_col_offset + c) / block.col], or, with a group_index, column group_index[c].
struct CanonicalMatrix {
  int64_t rows = 0;
  int64_t cols = 0;
  WeightFormat format;
  Tensor codes;        ///< [rows, cols] of format.element
  Tensor block_scale;  ///< [row blocks, column blocks] of format.block_scale_dtype
  Tensor zero_point;   ///< of format.zero_point_dtype, shape of block_scale; empty: format.implied_zero()
  /// With format.super_cols or stored.super_cols: the unit of the scales of each super-block and, with zero
  /// points, that of its minima, F16 [row blocks, super-blocks]. Only layouts that pack scales as integers
  /// need them; the values are complete without.
  Tensor super_scale, super_minimum;
  StoredIntegers stored;  ///< as which type the same values were stored; bits 0: in this format, or not known
  Tensor channel_scale;   ///< F32 [rows]
  std::optional<float> tensor_scale;
  /// Decode multiplier of the input of this projection, where the checkpoint stores one.
  std::optional<float> input_tensor_scale;
  Tensor bias;             ///< F32 [rows]
  Tensor group_index;      ///< I32 [cols]: scale column of each input channel (activation order)
  Tensor pre_quant_scale;  ///< F32 [cols]: multiplies the input before it is quantized (AWQ smoothing)
  int64_t scale_row_offset = 0;
  int64_t scale_col_offset = 0;
  bool empty() const { return rows == 0; }
};

/// One expert. `gate` is empty when the activation is not gated. Gate and up keep their own scales.
struct CanonicalExpert {
  CanonicalMatrix gate;  ///< [I, H]
  CanonicalMatrix up;    ///< [I, H]
  CanonicalMatrix down;  ///< [H, I]
};

/// What plans ask of the weights of a layer besides their scheme; experts of a layer are alike.
struct WeightTraits {
  bool has_zero_points = false;
  /// How all matrices of each GEMM were stored, where the layer's format is wider (CanonicalMatrix::stored);
  /// bits 0: in the layer's format, in several ways, or not known.
  StoredIntegers gate_up_stored, down_stored;
  bool has_group_index = false;
  bool has_pre_quant_scale = false;  ///< factors that smooth the input of a projection
  bool cuts_stripes = false;  ///< block scales change inside 16 rows that follow each other in a matrix
};

/// The projections around routed experts that work on shorter rows than the model (Nemotron-3: latent
/// experts; Kimi-K3). Every token is projected before it is dispatched, every weighted sum of experts behind
/// it, divided by its root mean square before where there is a norm; the router and the shared experts see
/// the hidden states themselves.
struct LatentWeights {
  Tensor to_latent;         ///< [latent, H] BF16, F16 or F32
  Tensor to_latent_bias;    ///< F32 [latent]; empty: none
  Tensor from_latent;       ///< [H, latent] BF16, F16 or F32
  Tensor from_latent_bias;  ///< F32 [H]; empty: none
  Tensor norm;  ///< F32 [latent]: sum / sqrt(mean(sum^2) + config.latent_norm_epsilon) * norm; empty: none
};

/// Weights in the layout of a backend; what it is made of is the library's business.
struct PreparedWeights;

/// The experts of a layer, one at a time, so that preparing them needs the memory of one.
struct ExpertSource {
  int64_t num_local_experts = 0;
  Scheme scheme;
  /// Loads local expert e. Callable from several threads at once.
  std::function<Result<CanonicalExpert>(int64_t local_expert)> load;
  /// The same experts as a backend's layout, where somebody prepared them before (PreparedLayer): that
  /// backend takes them as they are, every other one is refused. Null: canonical only.
  std::shared_ptr<const PreparedWeights> prepared;
  /// What the weights are, as text: sources with equal texts load equal weights. Empty: not known, and
  /// nothing made from them is kept (LayerOptions::pack_cache).
  std::string identity = {};
  /// True: all experts have the optional tensors of expert 0 (zero points, activation order, smoothing
  /// factors, biases) and its dtype of scales. False: MoeLayer::Create loads every expert once more, and adds
  /// what some have and others lack.
  bool alike = false;
};

}  // namespace fusedmoe
