#include <cmath>

#include <fmt/format.h>
#include <fusedmoe/eplb.hpp>

#include "capi/handles.hpp"

using namespace fusedmoe;
using namespace fusedmoe::capi;

namespace {

/// Planning takes time with the product of slots and experts; more than this no layer has.
Status CheckCount(int64_t count, std::string_view name) {
  constexpr int64_t kMost = int64_t{1} << 16;
  return count >= 1 && count <= kMost
             ? Status::Ok()
             : Status::Usage(fmt::format("{} is {}, it must be between 1 and {}", name, count, kMost));
}

Result<EplbShape> ToShape(const fmoe_eplb_shape* given) {
  FMOE_RETURN_IF_ERROR(NotNull(given, "shape"));
  FMOE_ASSIGN_OR_RETURN(const fmoe_eplb_shape from, Whole(given, fmoe_eplb_shape_init, "fmoe_eplb_shape"));
  EplbShape shape;
  shape.num_experts = from.num_experts;
  shape.num_physical = from.num_physical;
  shape.num_groups = from.num_groups;
  shape.num_nodes = from.num_nodes;
  shape.num_ranks = from.num_ranks;
  FMOE_RETURN_IF_ERROR(CheckEplbShape(shape));
  FMOE_RETURN_IF_ERROR(CheckCount(shape.num_physical, "shape.num_physical"));
  return shape;
}

fmoe_eplb_step ToStep(const EplbStep& from) {
  fmoe_eplb_step step;
  fmoe_eplb_step_init(&step);
  step.epoch = from.epoch;
  step.planned = from.planned ? 1 : 0;
  step.switched = from.switched ? 1 : 0;
  step.slots_changed = from.slots_changed;
  step.experts_received = from.experts_received;
  step.bytes_received = from.bytes_received;
  step.balancedness = from.balancedness;
  step.planned_balancedness = from.planned_balancedness;
  CopyText(from.kept, step.kept);
  return step;
}

}  // namespace

void fmoe_eplb_step_init_sized(fmoe_eplb_step* step, size_t struct_size) {
  fmoe_eplb_step made{};
  made.balancedness = made.planned_balancedness = 1;
  Init(made, step, struct_size);
}

void fmoe_eplb_shape_init_sized(fmoe_eplb_shape* shape, size_t struct_size) {
  fmoe_eplb_shape made{};
  made.num_groups = made.num_nodes = made.num_ranks = 1;
  Init(made, shape, struct_size);
}

fmoe_code fmoe_layer_end_step(fmoe_layer* layer, fmoe_eplb_step* step) {
  return Guarded([&]() -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(layer, "layer"));
    if (step != nullptr) {  // before the ranks begin
      FMOE_RETURN_IF_ERROR(CheckStructSize(step->struct_size, sizeof(*step), "fmoe_eplb_step"));
    }
    FMOE_ASSIGN_OR_RETURN(const EplbStep ended, layer->layer->EndStep());
    return step == nullptr ? Status::Ok() : Show(ToStep(ended), *step, "fmoe_eplb_step");
  });
}

fmoe_code fmoe_layer_physical_to_logical(const fmoe_layer* layer, int32_t* map, int64_t capacity,
                                         int64_t* count) {
  return Guarded([&]() -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(layer, "layer"));
    FMOE_RETURN_IF_ERROR(NotNull(count, "count"));
    const std::vector<int32_t> slots = layer->layer->PhysicalToLogical();
    *count = static_cast<int64_t>(slots.size());
    if (map == nullptr) {
      return Status::Ok();
    }
    if (capacity < *count) {
      return Status::Usage(fmt::format("map holds {} slots, the layer has {}", capacity, *count));
    }
    std::copy(slots.begin(), slots.end(), map);
    return Status::Ok();
  });
}

fmoe_code fmoe_eplb_rebalance(const fmoe_eplb_shape* shape, const double* load, const int32_t* previous,
                              int32_t* physical_to_logical) {
  return Guarded([&]() -> Status {
    FMOE_ASSIGN_OR_RETURN(const EplbShape taken, ToShape(shape));
    FMOE_RETURN_IF_ERROR(NotNull(load, "load"));
    FMOE_RETURN_IF_ERROR(NotNull(physical_to_logical, "physical_to_logical"));
    const std::span<const double> loads(load, static_cast<size_t>(taken.num_experts));
    for (size_t expert = 0; expert < loads.size(); ++expert) {
      if (!std::isfinite(loads[expert]) || loads[expert] < 0) {
        return Status::Usage(
            fmt::format("load[{}] is {}, loads are finite and not negative", expert, loads[expert]));
      }
    }
    std::vector<int32_t> slots = RebalanceExperts(taken, loads);
    if (previous != nullptr) {
      slots = PreserveSlots(std::move(slots), {previous, static_cast<size_t>(taken.num_physical)},
                            taken.num_ranks);
    }
    std::copy(slots.begin(), slots.end(), physical_to_logical);
    return Status::Ok();
  });
}

fmoe_code fmoe_eplb_maps(const int32_t* physical_to_logical, int64_t num_physical, int64_t num_experts,
                         int64_t max_replicas, int32_t* logical_to_physical, int32_t* replica_count) {
  return Guarded([&]() -> Status {
    FMOE_RETURN_IF_ERROR(NotNull(physical_to_logical, "physical_to_logical"));
    FMOE_RETURN_IF_ERROR(NotNull(logical_to_physical, "logical_to_physical"));
    FMOE_RETURN_IF_ERROR(NotNull(replica_count, "replica_count"));
    FMOE_RETURN_IF_ERROR(CheckCount(num_physical, "num_physical"));
    FMOE_RETURN_IF_ERROR(CheckCount(num_experts, "num_experts"));
    FMOE_RETURN_IF_ERROR(CheckCount(max_replicas, "max_replicas"));
    FMOE_ASSIGN_OR_RETURN(
        const EplbMaps maps,
        MakeEplbMaps({physical_to_logical, physical_to_logical + num_physical}, num_experts, max_replicas));
    std::copy(maps.logical_to_physical.begin(), maps.logical_to_physical.end(), logical_to_physical);
    std::copy(maps.replica_count.begin(), maps.replica_count.end(), replica_count);
    return Status::Ok();
  });
}
