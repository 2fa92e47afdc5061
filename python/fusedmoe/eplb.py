"""Expert load balancing, for engines that place experts themselves: DeepSeek's policy, ties to the lower index, so that all
ranks arrive at the same plan. Layers do it for themselves: `load_layer(..., eplb=True)` and `Layer.end_step`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

from . import _c

__all__ = ["Maps", "initial", "maps", "rebalance"]


class Maps(NamedTuple):
    """What a placement says the other way round: the slots of each expert, ascending, and how many it has."""

    logical_to_physical: list[list[int]]
    replica_count: list[int]


def initial(num_experts: int, num_redundant: int = 0) -> list[int]:
    """The placement that layers begin with: the experts themselves, then replicas of the first ones."""
    return [*range(num_experts), *(slot % num_experts for slot in range(num_redundant))]


def rebalance(load: Sequence[float], num_physical: int, *, num_ranks: int, num_groups: int = 1, num_nodes: int = 1,
              previous: Sequence[int] | None = None) -> list[int]:
    """The expert of each of `num_physical` slots, rank by rank, for the `load` of each expert. Experts that stay on their
    rank keep the slot that they had in `previous`."""
    shape = _c.initialized(_c.EplbShape)
    shape.num_experts, shape.num_physical = len(load), _c.integer(num_physical, "num_physical")
    shape.num_ranks, shape.num_groups = _c.integer(num_ranks, "num_ranks"), _c.integer(num_groups, "num_groups")
    shape.num_nodes = _c.integer(num_nodes, "num_nodes")
    if previous is not None and len(previous) != num_physical:
        raise ValueError(f"previous has {len(previous)} slots, num_physical is {num_physical}")
    slots = (ctypes.c_int32 * max(num_physical, 0))()
    old = None if previous is None else _c.integers(previous, "previous")
    loads = (ctypes.c_double * len(load))(*load)
    _c.check(_c.lib.fmoe_eplb_rebalance(ctypes.byref(shape), loads, old, slots))
    return list(slots)


def maps(physical_to_logical: Sequence[int], num_experts: int) -> Maps:
    """The other two maps of a placement."""
    num_physical = len(physical_to_logical)
    slots = _c.integers(physical_to_logical, "physical_to_logical")
    width = max((list(physical_to_logical).count(expert) for expert in set(physical_to_logical)), default=1)
    logical = (ctypes.c_int32 * (max(num_experts, 0) * width))()
    count = (ctypes.c_int32 * max(num_experts, 0))()
    _c.check(_c.lib.fmoe_eplb_maps(slots, num_physical, num_experts, width, logical, count))
    return Maps([list(logical[e * width:e * width + count[e]]) for e in range(num_experts)], list(count))
