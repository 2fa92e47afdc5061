#pragma once

#include <cstdint>

#include <fusedmoe/dtype.hpp>
#include <fusedmoe/status.hpp>

#include "experts/cuda/launch.hpp"

/// Layers whose weights are F32: tensor cores round their operands to 11 bits or less, so these run on the
/// ordinary units, every product and sum in fp32. Checkpoints of this kind are references, not what anybody
/// serves: one kernel a GEMM for any token count, weights as they stand in the checkpoint.
///
///     ids ─ route map ─ routes by row ─ gate-up and activation ─► F32 rows ─ down ─► F32 rows ─ combine
namespace fusedmoe::cuda {

/// Offsets in the scratch of a call, each 256-byte aligned.
struct Float32Plan {
  int64_t panel_rows = 0;  ///< routes, and 8 for every expert
  int64_t map_offset = 0;
  int64_t routes_offset = 0;  ///< int32 [panel_rows]: the route of each row
  int64_t mid_offset = 0;     ///< F32 [panel_rows][intermediate]
  int64_t rows_offset = 0;    ///< F32 [panel_rows][hidden]
  int64_t scratch_bytes = 0;
};
/// `num_tokens` as for PlanDecode.
Float32Plan PlanFloat32(const LayerShape& shape, int64_t num_tokens);

struct Float32Weights {
  const float* gate_up = nullptr;  ///< [E][parts][intermediate][hidden], gate then up
  const float* down = nullptr;     ///< [E][hidden][intermediate]
  const float* gate_up_bias = nullptr;
  const float* down_bias = nullptr;
};

/// The rows of a call as they come.
struct Float32Rows {
  const void* values = nullptr;
  DType dtype = DType::kBF16;
  int64_t stride = 0;              ///< elements
  const float* weights = nullptr;  ///< F32 [routes]: multiply the input; null: 1
};

/// Enqueues the chain. call.hidden is not read. No allocation, no synchronization, capturable in a graph; a
/// token's bits do not depend on the others.
Status LaunchFloat32(const LayerShape& shape, const Float32Weights& weights, const Float32Rows& rows,
                     const ExpertsCall& call);

}  // namespace fusedmoe::cuda
