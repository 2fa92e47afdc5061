#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <fusedmoe/status.hpp>

#include "checkpoint/files/tensor_store.hpp"
#include "checkpoint/layers/families.hpp"

/// Finds the tensors of a MoE layer. Families say where they put them, but the tools that rewrite checkpoints
/// rename as they like (reference: quantizers write Mixtral with gate_proj, under mlp, ...), so that the
/// names present decide among all spellings known, those of the family first.
namespace fusedmoe::checkpoint {

/// How the three projections of the experts are kept.
enum class ExpertForm : uint8_t {
  kPerExpert,        ///< experts.{e}.gate_proj, .up_proj, .down_proj, each with its own tensors
  kPerExpertGateUp,  ///< experts.{e}.gate_up_proj, .down_proj: the rows of gate and up in one matrix
  kFused,            ///< one gate_up and one down tensor for all experts
  kStacked           ///< gate, up and down tensors with all experts each
};

struct ExpertNames {
  ExpertForm form = ExpertForm::kPerExpert;
  /// Names up to the suffix that the quantization adds; {e} stands for the expert. `gate` is empty without
  /// gating and where gate and up are joined, when `up` names the tensor of both.
  std::string gate, up, down;
  /// Suffix of unquantized weights: ".weight", or "" for parameters that are tensors themselves.
  std::string weight_suffix = ".weight";
  /// kFused, kStacked: 2-D tensors [E * I, H], and whether down is stored as [E * I, H] too (DBRX).
  bool flattened = false;
  /// Whether each expert has tensors of its own.
  bool per_expert() const { return form == ExpertForm::kPerExpert || form == ExpertForm::kPerExpertGateUp; }
  /// Whether one tensor holds the rows of gate and up.
  bool joins_gate_up() const { return form == ExpertForm::kFused || form == ExpertForm::kPerExpertGateUp; }
  std::string Gate(int64_t expert) const;
  std::string Up(int64_t expert) const;
  std::string Down(int64_t expert) const;
};

/// Full tensor names of one layer; empty where the layer has no such tensor.
struct LayerNames {
  std::string prefix;  ///< "model.layers.3."
  std::string block;   ///< "model.layers.3.mlp."
  std::string router;  ///< weight
  std::string router_bias;
  std::string correction_bias;
  std::string hash_table;
  std::string output_bias;
  /// Weights of the projections around latent experts; empty where the layer has none.
  std::string to_latent, from_latent;
  std::string latent_norm;  ///< in front of from_latent; empty: none
  ExpertNames experts;
  /// Names up to the suffix; gate empty when not gated.
  std::string shared_gate_proj, shared_up, shared_down;
  bool shared_fused = false;  ///< shared_up holds gate and up rows (Granite: input_linear)
  std::string shared_gate;    ///< tensor of the sigmoid gate
  std::string widthless;      ///< down of shared experts without rows, as transformers writes them
  std::string missing;        ///< of the shared experts, a tensor that the others belong to
};

/// The block that a word of Family::blocks names, with the dot; ".": the layer itself.
std::string BlockName(const std::string& prefix, std::string_view word);

/// The names of a layer, or nothing when it has no routed experts.
std::optional<LayerNames> FindLayerNames(const TensorStore& store, const Family& family,
                                         const std::string& prefix);
/// Whether it would have names; far quicker.
bool HasExperts(const TensorStore& store, const Family& family, const std::string& prefix);

/// For a layer without names: a tensor that only layers with routed experts have (the router, the correction
/// bias, one below "experts."), so that the experts must have been lost; empty: a dense layer.
std::string RemainsOfExperts(const TensorStore& store, const Family& family, const std::string& prefix);

}  // namespace fusedmoe::checkpoint
