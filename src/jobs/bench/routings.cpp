#include "jobs/bench/routings.hpp"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

#include <fmt/format.h>

#include "numerics/rows.hpp"

namespace fusedmoe::bench {
namespace {

constexpr float kHotShare = 0.9F;

void Count(int64_t num_experts, Routing& routing) {
  std::vector<char> seen(static_cast<size_t>(num_experts));
  for (const int32_t id : routing.ids) {
    if (id >= 0) {
      ++routing.slots;
      routing.experts += seen[static_cast<size_t>(id)] == 0 ? 1 : 0;
      seen[static_cast<size_t>(id)] = 1;
    }
  }
}

}  // namespace

Routing DrawRouting(const BenchOptions& options, int64_t num_tokens, int64_t top_k, int64_t num_experts,
                    int64_t index) {
  std::mt19937_64 random(options.seed * 1000003 + static_cast<uint64_t>(index));
  Routing routing;
  std::uniform_real_distribution<float> weight(0.2F, 1.8F), unit(0.0F, 1.0F);
  std::vector<int32_t> order(static_cast<size_t>(num_experts));
  std::iota(order.begin(), order.end(), 0);
  const auto hot = static_cast<int32_t>(index % num_experts);
  for (int64_t token = 0; token < num_tokens; ++token) {
    if (options.routing == BenchRouting::kGiven) {
      const int64_t row = (index * num_tokens + token) % options.topk_ids.dim(0);
      const auto* given = options.topk_ids.view().as<int32_t>() + row * top_k;
      routing.ids.insert(routing.ids.end(), given, given + top_k);
    } else {
      for (int64_t slot = 0; slot < top_k; ++slot) {
        std::uniform_int_distribution<int64_t> rest(slot, num_experts - 1);
        std::swap(order[static_cast<size_t>(slot)], order[static_cast<size_t>(rest(random))]);
      }
      if (options.routing == BenchRouting::kSkewed && unit(random) < kHotShare) {
        std::swap(order[0], *std::find(order.begin(), order.end(), hot));
      }
      routing.ids.insert(routing.ids.end(), order.begin(), order.begin() + top_k);
    }
    for (int64_t slot = 0; slot < top_k; ++slot) {
      routing.weights.push_back(weight(random) / static_cast<float>(top_k));
    }
  }
  Count(num_experts, routing);
  return routing;
}

Result<Tensor> DrawHidden(DType dtype, int64_t rows, int64_t cols, uint64_t seed) {
  FMOE_ASSIGN_OR_RETURN(Tensor hidden, Tensor::Allocate(dtype, {rows, cols}));
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(cols));
  for (int64_t row = 0; row < rows; ++row) {
    std::generate(values.begin(), values.end(), [&] { return normal(random); });
    EncodeRow(dtype, values.data(), cols, hidden.mutable_view().data() + row * hidden.view().row_bytes());
  }
  return hidden;
}

Status CheckGivenIds(const Tensor& topk_ids, int64_t top_k, int64_t num_experts) {
  const TensorView ids = topk_ids.view();
  if (ids.empty() || ids.dtype() != DType::kI32 || ids.rank() != 2 || ids.dim(1) != top_k || ids.dim(0) < 1 ||
      !ids.dense()) {
    return Status::BadInput(fmt::format("the given topk_ids are {} {}; I32 [tokens, {}] is required",
                                        ids.empty() ? "missing," : DTypeName(ids.dtype()),
                                        ids.empty() ? "" : ids.shape().ToString(), top_k))
        .WithTensor("topk_ids");
  }
  for (int64_t i = 0; i < ids.count(); ++i) {
    const int32_t id = ids.as<int32_t>()[i];
    if (id < -1 || id >= num_experts) {
      return Status::BadInput(fmt::format("topk_ids[{}, {}] is {}, experts are 0..{} (-1 skips a slot)",
                                          i / top_k, i % top_k, id, num_experts - 1))
          .WithTensor("topk_ids");
    }
  }
  return Status::Ok();
}

}  // namespace fusedmoe::bench
