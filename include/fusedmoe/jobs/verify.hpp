#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fusedmoe/checkpoint.hpp>
#include <fusedmoe/executor.hpp>
#include <fusedmoe/jobs/prepare.hpp>
#include <fusedmoe/layer.hpp>
#include <fusedmoe/plan.hpp>
#include <fusedmoe/quant.hpp>
#include <fusedmoe/tensor.hpp>

namespace fusedmoe {

/// How far two right evaluations of a layer may lie apart, as a relative L2 norm, and what that is made of.
/// Every term is an expected (root-mean-square) relative error; docs/accuracy.md derives them.
struct ErrorBound {
  double output_rounding = 0;  ///< the result, rounded once to its dtype, and to its smallest step
  double input_rounding = 0;   ///< hidden states where the kernel holds them in fewer bits than their dtype
  double mid_rounding = 0;     ///< the values between the GEMMs where they are held in 16 bits
  double accumulation = 0;     ///< fp32 sums over hidden and intermediate
  /// Values that fall on the other side of a rounding threshold of the second GEMM's input.
  double requantization = 0;
  double activation_rounding = 0;  ///< int8 activations that the scheme does not ask for (a8; measured: half
                                   ///< of what they change), or scales of whole rows taken over slices
  double layout = 0;               ///< weights that the layout changed (folded scales)
  double factor = 4;               ///< from the expected error to the bound
  /// Largest effect of one value of the second GEMM's input that rounds the other way; it shows only where
  /// few outputs are compared. A maximum, unlike the terms above.
  double one_event = 0;
  /// factor * sqrt(sum of squares), and one_event added as a square.
  double value() const;
};

/// Whether ranks quantize the activations between the GEMMs by other scales than one rank does: with tensor
/// parallelism each takes the scale of its part of a row or group, with expert parallelism a scale of the
/// whole batch over the slots of its own experts.
bool RanksScaleApart(int64_t intermediate, const ParallelConfig& parallel, const Scheme& scheme);

/// What is known of the values behind the outputs that are compared. Absent figures are taken from normal
/// numbers.
struct ComparedValues {
  /// Rows of experts that the outputs are made of, tokens * top_k; 0: so many that one event averages out.
  int64_t rows = 0;
  /// Ranks quantize the values between the GEMMs by scales of their own (RanksScaleApart).
  bool scales_apart = false;
  /// Peaks of the values between the GEMMs, relative to their root mean square: that of each group with a
  /// scale of its own (root mean square over all columns), and that of all.
  std::optional<double> group_peak, peak;
  /// What rounding activations to int8 (a8) changes in the reference, as a relative L2 norm.
  std::optional<double> a8;
};

/// The bound for a backend that runs by `plan` against the reference, which computes in fp32 and better and
/// returns F32. `output` is the dtype of the result that is compared.
ErrorBound BoundOf(const Plan& plan, const Scheme& scheme, DType output, int64_t hidden, int64_t intermediate,
                   const ComparedValues& values = {});

/// The same for a layer as it was loaded: on its rank, and with its shared expert, whose own plan and scheme
/// may have larger terms; of each the larger counts. `intermediate`: of the whole layer. So many `tokens` are
/// compared; what is known of the `routed` experts' values may be given, rows and scales follow from the
/// layer.
ErrorBound BoundOfLayer(const MoeLayer& layer, DType output, int64_t intermediate, int64_t tokens,
                        ComparedValues routed = {});

struct CheckOptions {
  /// Tokens compared, evenly spread; all, where the activation scale spans the whole batch.
  int64_t max_tokens = 16;
  bool shared_experts = true;
  std::string activation_rule;  ///< LayerOptions of the layer that is judged
  Executor executor;
};

struct CheckReport {
  std::string against;  ///< the backend compared with
  int64_t tokens = 0;
  double rel_l2 = 0;
  double max_row_error = 0;  ///< the largest relative L2 of one token; NaN counts as the largest
  /// Outputs that are NaN, or the same infinity, here and in the reference: no difference, and no number.
  int64_t not_finite = 0;
  /// Outputs that are infinite because their dtype ends before the value (65504 in F16): no difference.
  int64_t overflowed = 0;
  ErrorBound bound;
  bool ok = false;
};

/// Compares what `layer` computed with the reference backend, by the same experts and router weights. The
/// reference executes the scheme under the plan's rule for activations; int8 activations (a8) are compared
/// with the scheme itself, and the bound allows what their rounding costs. `hidden` and `output` are [M, H],
/// `topk_ids` I32 and `topk_weights` F32 [M, k], all dense, as Forward took and left them. Loads the layer a
/// second time. Errors: those of MoeLayer::Load and Forward; that the bound is exceeded is an answer (ok).
Result<CheckReport> CheckAgainstReference(const std::shared_ptr<const Checkpoint>& checkpoint,
                                          int64_t layer_index, const MoeLayer& layer, TensorView hidden,
                                          TensorView topk_ids, TensorView topk_weights, TensorView output,
                                          const CheckOptions& options = {});

/// Loads the layer that is compared with, by other options.
using LayerLoader = std::function<Result<std::unique_ptr<MoeLayer>>(const LayerOptions& options)>;
/// The same for a layer that comes from elsewhere (a prepared file): `load` gives the reference.
Result<CheckReport> CheckAgainstReference(const LayerLoader& load, const MoeLayer& layer, TensorView hidden,
                                          TensorView topk_ids, TensorView topk_weights, TensorView output,
                                          const CheckOptions& options = {});

struct VerifyOptions {
  /// The backend that is judged, and how it is to run. Executor included.
  LayerOptions layer;
  /// Absent: the checkpoint itself, through the reference backend. Else another checkpoint with the same
  /// sizes, through the reference backend: what quantization or conversion changed.
  std::shared_ptr<const Checkpoint> against;
  int64_t against_layer = -1;  ///< -1: the layer of the same number
  /// What the layer is run on; hidden empty: `tokens` rows of normal numbers from `seed`, in BF16.
  MoeLayer::Inputs inputs;
  int64_t tokens = 16;
  uint64_t seed = 0;
  /// Relative L2 that is still ok; absent: BoundOf, or with `against` QuantizationBound.
  std::optional<double> bound;
  int64_t worst_rows = 5;
};

/// What one expert contributed, over the tokens that chose it.
struct ExpertError {
  int64_t expert = 0;
  int64_t tokens = 0;
  double rel_l2 = 0;
};

/// A token and the experts that it went to.
struct RowError {
  int64_t token = 0;
  double rel_l2 = 0;
  std::vector<int32_t> experts;
};

struct VerifyReport {
  bool ok = false;
  int64_t rows = 0;          ///< tokens compared
  double rel_l2 = 0;         ///< relative L2 distance of all outputs
  double max_row_error = 0;  ///< the largest relative L2 of one token
  int64_t not_finite = 0;    ///< outputs that are NaN, or the same infinity, on both sides
  int64_t overflowed = 0;    ///< outputs beyond the largest number of their dtype, as in CheckReport
  double bound = 0;          ///< largest rel_l2 that is ok: VerifyOptions::bound, or the one derived
  std::string backend;
  std::string against;  ///< "REFERENCE", or the other checkpoint's directory
  std::string scheme, against_scheme;
  std::string costs;               ///< Plan::costs of the backend that is judged
  std::vector<std::string> notes;  ///< Selection::notes of its layer
  /// Prepared files only: tensors that are not what their digests, or the preparation of the original, make
  /// them. Not ok when there are any; when they keep the layer from running, rows is 0.
  std::vector<DamagedTensor> damaged;
  std::vector<ExpertError> experts;  ///< those that were visited, ascending
  std::vector<RowError> worst_rows;  ///< by falling error
  /// Relative error of each patch of the output, [map_rows, map_cols], against the norm of its row.
  int64_t map_rows = 0, map_cols = 0;
  std::vector<float> error_map;
};

/// How far the outputs of a layer in two formats may lie apart when both were quantized from the same weights
/// by rounding to nearest: the expected relative errors of weights and activations of both GEMMs, added up as
/// independent, times 2 (docs/accuracy.md).
double QuantizationBound(const Scheme& scheme, const Scheme& against);

/// Runs a layer by the backend that is judged and by the reference, on the same tokens with the same experts,
/// and says where they differ: as a whole, by token, by expert. Experts are judged by their own contribution:
/// the layer is run once for each slot with the other slots left out. Errors: kUsage when the checkpoints do
/// not have the same sizes; those of MoeLayer::Load and Forward. Beyond the bound is an answer (ok), and so
/// are outputs that are not finite.
Result<VerifyReport> VerifyLayer(const std::shared_ptr<const Checkpoint>& checkpoint, int64_t layer,
                                 const VerifyOptions& options = {});

/// Judges a prepared file: the digest of every tensor, every byte against a preparation anew, and what it
/// computes against the reference. With `options.against`, the checkpoint that it was made from, the
/// preparation and the reference start there; a checkpoint of another scheme is compared by its outputs only.
/// Without, both start from the canonical form that the file leads back to. Damage is an answer (ok) and
/// names expert and tensor.
Result<VerifyReport> VerifyPrepared(const std::shared_ptr<const PreparedLayer>& prepared,
                                    const VerifyOptions& options = {});

/// The error map as an SVG picture: a row for each token (or bundle of tokens), colors by the decimal
/// exponent of the error, and the bar of every visited expert.
std::string ErrorMapSvg(const VerifyReport& report);

}  // namespace fusedmoe
