#pragma once

#include <cstdint>
#include <string>

#include <fusedmoe/status.hpp>
#include <fusedmoe/weights.hpp>

#include "checkpoint/families.hpp"
#include "checkpoint/linear_format.hpp"
#include "checkpoint/tensor_store.hpp"

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

/// The tensor that has the role of `suffix` there; its preferred spelling when there is none.
std::string RoleName(const TensorStore& store, const MatrixPlace& place, std::string_view suffix);

/// Reads one matrix [rows, cols] into canonical form and checks it, scales included; errors name the tensor.
Result<CanonicalMatrix> ReadMatrix(const TensorStore& store, const LinearFormat& format,
                                   const MatrixPlace& place, int64_t rows, int64_t cols);

/// A float tensor as F32, in its shape; shares memory when it is F32 already.
Result<Tensor> ToF32(const Tensor& tensor);

}  // namespace fusedmoe::checkpoint
