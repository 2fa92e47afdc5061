#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include <fusedmoe/status.hpp>
#include <fusedmoe/tensor.hpp>

#include "checkpoint/files/tensor_store.hpp"

namespace fusedmoe::checkpoint {

/// Which matrix of which tensors.
struct MatrixPlace {
  std::string base;  ///< name up to the suffix
  std::string weight_suffix =
      ".weight";            ///< "" for parameters that are tensors themselves ("experts.gate_up_proj")
  int64_t item = -1;        ///< index in the first axis of stacks of experts; -1: the tensors hold one matrix
  int64_t spare_items = 0;  ///< more of them that some writers append for experts without weights
  int64_t num_items = 0;    ///< length of that axis
  bool in_out = false;      ///< the last two axes are [in, out]
  bool flattened = false;   ///< the stack is 2-D: [items * rows, cols]
  int part = 0, parts = 1;  ///< half of the output: 0 gate, 1 up
  bool interleaved = false;  ///< the halves alternate instead of following one another
  bool needs_bias = false;
};

/// Tensors that hold gate and up of an expert, by name, kept from the one matrix for the other: as they
/// stand, and with their axes exchanged.
struct JoinedTensors {
  std::map<std::string, Tensor, std::less<>> stored, transposed;
};

/// The tensor that has the role of `suffix` there; its preferred spelling when there is none.
std::string RoleName(const TensorStore& store, const MatrixPlace& place, std::string_view suffix);

/// The tensors of one matrix [rows, cols] as the files hold them, by their roles (".weight",
/// ".weight_scale"): found under the names that tools give them, and cut out of stacks of experts and of
/// fused gate and up.
struct MatrixTensors {
  const TensorStore& store;
  const MatrixPlace& place;
  int64_t rows, cols;
  JoinedTensors* joined = nullptr;  ///< null: nothing is kept
  BlockParts* beside = nullptr;     ///< where the codes of blocks leave their scales; null: nowhere

  std::string NameOf(std::string_view suffix) const { return RoleName(store, place, suffix); }
  bool Has(std::string_view suffix) const { return store.Has(NameOf(suffix)); }
  /// The tensor of this expert; one that all experts share as it stands.
  Result<Tensor> Load(std::string_view suffix) const;
  /// One number, finite and above zero.
  Result<float> LoadScale(std::string_view suffix) const;
  /// From a 2-D tensor over all outputs of the module to [outputs of this part, columns]; `block` outputs
  /// share a row.
  Result<Tensor> Part(Tensor tensor, const std::string& name, int64_t block) const;
  /// "BF16 [4, 8]; WANTED is needed", with the file and the name.
  Status Wrong(const std::string& name, const Tensor& tensor, std::string_view wanted) const;
};

/// A float tensor as F32, in its shape; shares memory when it is F32 already.
Result<Tensor> ToF32(const Tensor& tensor);

/// kBadInput, with the file and the name, when an element of a dense tensor is not finite.
Status CheckFinite(const TensorStore& store, const Tensor& tensor, const std::string& name);

}  // namespace fusedmoe::checkpoint
