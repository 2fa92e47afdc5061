#include <fmt/format.h>
#include <fusedmoe/config.hpp>

namespace fusedmoe {
namespace {

// Sizes beyond these do not occur; they keep every product of two of them and a slot index within range.
constexpr int64_t kMaxSize = int64_t{1} << 24;
constexpr int64_t kMaxExperts = 1 << 16;
constexpr int64_t kMaxSlots = int64_t{1} << 31;

Status Within(std::string_view field, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) {
    return Status::Ok();
  }
  return Status::Usage(fmt::format("{}={} is outside {}..{}", field, value, least, most));
}

}  // namespace

Status Validate(const MoeConfig& config) {
  FMOE_RETURN_IF_ERROR(Within("num_experts", config.num_experts, 1, kMaxExperts));
  // More than num_experts: redundant copies of experts under load balancing.
  FMOE_RETURN_IF_ERROR(Within("num_local_experts", config.num_local_experts, 0, kMaxExperts));
  FMOE_RETURN_IF_ERROR(Within("hidden", config.hidden, 1, kMaxSize));
  FMOE_RETURN_IF_ERROR(Within("intermediate", config.intermediate, 1, kMaxSize));
  FMOE_RETURN_IF_ERROR(Within("max_tokens", config.max_tokens, 1, kMaxSlots - 1));
  const int64_t choices = config.num_experts + config.routing.num_zero_experts;
  FMOE_RETURN_IF_ERROR(Within("top_k", config.top_k(), 1, choices));
  if (config.max_tokens * config.top_k() >= kMaxSlots) {
    return Status::Usage(fmt::format("max_tokens={} times top_k={} slots cannot be indexed; the limit is {}",
                                     config.max_tokens, config.top_k(), kMaxSlots - 1));
  }
  if (config.apply_router_weight_on_input && config.top_k() != 1) {
    return Status::Usage(
        fmt::format("router weights on the input need one expert per token, but top_k={}", config.top_k()));
  }
  if (config.shared.intermediate < 0 || config.shared.intermediate > kMaxSize) {
    return Within("shared.intermediate", config.shared.intermediate, 0, kMaxSize);
  }
  if (config.dtype != DType::kBF16 && config.dtype != DType::kF16 && config.dtype != DType::kF32) {
    return Status::Usage(fmt::format("dtype={} is none of BF16, F16, F32", DTypeName(config.dtype)));
  }
  return Status::Ok();
}

}  // namespace fusedmoe
