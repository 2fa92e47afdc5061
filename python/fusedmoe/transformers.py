"""Layers in the models of transformers.

    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="fusedmoe")

runs the experts that the model has in memory (importing this module registers the name), and

    fusedmoe.transformers.replace_experts(model, "a quantized checkpoint of the same model")

takes the experts from a checkpoint in whatever format it has; those of the model are given up.
"""

from __future__ import annotations

import itertools
import os
import re
import threading
import weakref
from typing import Any, NamedTuple

import torch
from transformers.integrations import moe

from . import _tensors
from ._layer import Checkpoint, Layer
from .torch import Experts

# Names of ACT2FN that a gate with plain multiplication may have.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
               "gelu_new": "gelu_tanh", "relu": "relu", "relu2": "relu2"}
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class _Made(NamedTuple):
    """A layer, and the weights of a module that it was made of: how they were, and their memory, since an address that is
    free would come back with other weights."""

    state: list[Any]
    memory: list[torch.UntypedStorage]
    experts: Experts


# What was made of each module; no attribute of it: copies and files of a model neither need a layer nor can have it.
_made: weakref.WeakKeyDictionary[torch.nn.Module, _Made] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def _begin_in_child() -> None:
    """After a fork: whoever holds the lock stayed with the parent."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_in_child)


def replace_experts(model: torch.nn.Module, checkpoint: str | os.PathLike[str] | Checkpoint,
                    **options: Any) -> list[str]:
    """Puts the layers of `checkpoint` (a path or a Checkpoint) in the place of the routed experts of `model`; routers,
    shared experts and the projections of latent experts stay. Options: Checkpoint.load_layer; `device` is where the model
    lies. Returns the names of the modules that were replaced."""
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(checkpoint)
    layers = set(checkpoint.moe_layers)
    found = {}
    for name, module in model.named_modules():
        matched = LAYER.search(name)
        if name.endswith(".experts") and matched and int(matched.group(1)) in layers:
            found[int(matched.group(1))] = name
    if missing := sorted(layers - set(found)):
        raise ValueError(f"{type(model).__name__} has no module '...layers.{missing[0]}....experts', the checkpoint "
                         f"has experts there")
    asked = options.get("device") or "cpu"
    places = {}
    for number, name in sorted(found.items()):
        old = model.get_submodule(name)
        places[number] = _place_of(old)
        if places[number].type not in ("meta", asked):
            raise ValueError(f"{name} lies on {places[number]}, its layer would be on {asked}: give "
                             f"device='{places[number].type}', or move the model first")
        info = checkpoint.describe(number)
        sizes = {"num_experts": info.num_experts, "hidden_dim": info.hidden, "intermediate_dim": info.intermediate}
        for field, size in sizes.items():
            if getattr(old, field, size) != size:
                raise ValueError(f"{name}.{field} is {getattr(old, field)}, the checkpoint has {size}")
    for number, name in sorted(found.items()):
        with _tensors.on_card(places[number].index if asked == "cuda" else None):
            layer = checkpoint.load_layer(number, shared_experts=False, latent_projections=False, **options)
        setattr(model.get_submodule(name.rpartition(".")[0]), "experts", Experts(layer))
    return [found[number] for number in sorted(found)]


def _place_of(experts: torch.nn.Module) -> torch.device:
    """Where the tensors of a module lie: "meta" where it has none, or none in memory yet."""
    tensor = next(itertools.chain(experts.parameters(), experts.buffers()), None)
    return torch.device("meta") if tensor is None else tensor.device


def _layer_of(module: Any, top_k: int) -> Layer:
    """A layer of the weights of a transformers experts module."""
    kind = type(module).__name__
    plain_gate = getattr(type(module), "_apply_gate", None) is moe._default_apply_gate
    if not plain_gate or not module.has_gate or getattr(module, "has_post_expert_norm", False):
        raise NotImplementedError(f"{kind} has a gate, a norm or an activation of its own: use "
                                  f"replace_experts(model, checkpoint), which reads what its family does")
    name = next((key for key in (getattr(getattr(module, "config", None), field, None)
                                 for field in ("hidden_act", "hidden_activation")) if key), "silu")
    if name not in ACTIVATIONS:
        raise NotImplementedError(f"{kind} has the activation '{name}', known are {', '.join(ACTIVATIONS)}")
    gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
    if module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)

    # Weights are read from host memory, whatever card they lie on.
    def halves(rows: torch.Tensor) -> list[torch.Tensor]:
        rows = rows.cpu()
        both = rows.chunk(2) if module.is_concatenated else (rows[0::2], rows[1::2])
        return [half.contiguous() for half in both]

    experts = []
    for e in range(gate_up.shape[0]):
        gate, up = halves(gate_up[e])
        expert = {"gate": {"codes": gate}, "up": {"codes": up}, "down": {"codes": down[e].cpu().contiguous()}}
        if module.has_bias:
            expert["gate"]["bias"], expert["up"]["bias"] = halves(module.gate_up_proj_bias[e].detach().float())
            expert["down"]["bias"] = module.down_proj_bias[e].detach().float().cpu()
        experts.append(expert)
    dtype = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[gate_up.dtype]
    with _tensors.on_card(gate_up.device.index if gate_up.is_cuda else None):
        return Layer.create(experts, top_k=top_k, activation=ACTIVATIONS[name], dtype=dtype,
                            device=gate_up.device.type)


def experts_forward(module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                    top_k_weights: torch.Tensor) -> torch.Tensor:
    """What transformers calls for experts_implementation="fusedmoe". The layer is made of the module's weights at the
    first call, and made anew when they are other tensors or were written since, but for writes that torch does not count:
    those in place into `.data`, and into tensors of the inference mode."""
    weights = [module.gate_up_proj, module.down_proj]
    if module.has_bias:
        weights += [module.gate_up_proj_bias, module.down_proj_bias]
    top_k = top_k_index.shape[-1]
    state = [top_k, *((w.data_ptr(), None if w.is_inference() else w._version, w.dtype, w.shape, w.stride()) for w in weights)]
    with _lock:
        made = _made.get(module)
    if made is None or made.state != state:
        made = _Made(state, [w.untyped_storage() for w in weights], Experts(_layer_of(module, top_k)))
        with _lock:
            _made[module] = made
    return made.experts(hidden_states, top_k_index, top_k_weights)


moe.ALL_EXPERTS_FUNCTIONS.register("fusedmoe", experts_forward)
