#include "core/checked_math.hpp"
#include "experts/cuda/float32/float32.hpp"
#include "experts/cuda/prefill/prefill.hpp"

namespace fusedmoe::cuda {

Float32Plan PlanFloat32(const LayerShape& shape, int64_t num_tokens) {
  Float32Plan plan;
  const int64_t routes = num_tokens * (shape.batched ? 1 : shape.top_k);
  plan.panel_rows = routes + 8 * shape.num_local_experts;
  int64_t at = 0;
  const auto place = [&at](int64_t words) {
    const int64_t offset = at;
    at += RoundUp(4 * words, 256);
    return offset;
  };
  plan.map_offset = place(shape.num_local_experts * (2 + RouteChunks(routes)) + 2 * routes);
  plan.routes_offset = place(plan.panel_rows);
  plan.mid_offset = place(plan.panel_rows * shape.intermediate);
  plan.rows_offset = place(plan.panel_rows * RoundUp(shape.hidden, 8));
  plan.scratch_bytes = at;
  return plan;
}

}  // namespace fusedmoe::cuda
