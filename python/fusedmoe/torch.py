"""Layers in torch: an operator that torch.compile sees as one node, and a module."""

import itertools
import weakref

import torch

from ._layer import Layer

_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


@torch.library.custom_op("fusedmoe::experts", mutates_args=())
def _experts(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int) -> torch.Tensor:
    made = _layers[layer]
    size = made.info.max_tokens
    # Not where rows depend on each other, nor on ranks, which call as often as one another.
    if hidden.shape[0] <= size or made.info.batch_scale or made.is_spread:
        size = max(hidden.shape[0], 1)
    pieces = zip(hidden.split(size), topk_ids.split(size), topk_weights.split(size), strict=True)
    outputs = [made(rows, topk_ids=ids, topk_weights=weights) for rows, ids, weights in pieces]
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


@_experts.register_fake
def _(hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, layer: int) -> torch.Tensor:
    return torch.empty_like(hidden)


class Experts(torch.nn.Module):
    """The experts of one layer as a module: forward(hidden [..., H], topk_ids [M, k], topk_weights [M, k]) gives
    [..., H] in the dtype of hidden. Ids outside the layer's experts skip their slot. More rows than the layer's max_tokens
    are computed in several calls, but where one activation scale spans the call and on ranks: there they are refused. For
    inference: no gradients."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer
        # Without a lock, which a fork could leave closed: each of the two is atomic, and no number comes twice.
        self._number = next(_numbers)
        _layers[self._number] = layer

    def forward(self, hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        known = (topk_ids >= 0) & (topk_ids < self.layer.info.num_experts)
        ids = torch.where(known, topk_ids, -1).to(torch.int32).contiguous()
        weights = topk_weights.to(torch.float32).contiguous()
        output: torch.Tensor = torch.ops.fusedmoe.experts(rows, ids, weights, self._number)
        return output.reshape(hidden.shape)

    def extra_repr(self) -> str:
        info = self.layer.info
        return (f"num_experts={info.num_experts}, hidden={info.hidden}, intermediate={info.intermediate}, "
                f"scheme={info.scheme}, backend={info.backend}")
