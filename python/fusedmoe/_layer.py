"""Checkpoints and layers."""

import ctypes
import dataclasses
import os
import threading

from . import _c, _tensors

_threads_lock = threading.Lock()
_threads = {"count": 0, "pool": None}


def set_num_threads(count):
    """Threads of the layers on CPUs, of all in this process; 0: one for each core. To be called between forwards."""
    with _threads_lock:
        old, _threads["pool"] = _threads["pool"], None
        _threads["count"] = count
        if old is not None:
            _c.lib.fmoe_thread_pool_release(old)


def _executor():
    with _threads_lock:
        if _threads["pool"] is None:
            _threads["pool"] = _c.made(_c.lib.fmoe_thread_pool_create, _threads["count"])
        return _c.lib.fmoe_thread_pool_executor(_threads["pool"])


@dataclasses.dataclass(frozen=True)
class LayerInfo:
    """What a layer is: sizes of this rank, names of scheme and backend ("" before a layer is loaded), bytes."""

    num_experts: int
    num_local_experts: int
    top_k: int
    hidden: int
    intermediate: int
    max_tokens: int
    dtype: str
    has_shared_experts: bool
    scheme: str
    on_device: bool
    backend: str
    isa: str
    mode: str
    weight_bytes: int
    workspace_bytes: int

    @classmethod
    def _of(cls, info):
        values = {}
        for field in dataclasses.fields(cls):
            value = getattr(info, field.name)
            values[field.name] = value.decode() if isinstance(value, bytes) else value
        values["dtype"] = _c.DTYPES[info.dtype]
        values["has_shared_experts"], values["on_device"] = bool(info.has_shared_experts), bool(info.on_device)
        return cls(**values)


class _Handle:
    """Owns a handle of the library."""

    def __init__(self, handle, release):
        self._handle, self._release = handle, release

    def __del__(self):
        if getattr(self, "_handle", None) is not None:
            self._release(self._handle)
            self._handle = None


class Checkpoint(_Handle):
    """A checkpoint in Hugging Face layout, or a GGUF file. Immutable; safe from many threads."""

    def __init__(self, path):
        super().__init__(_c.made(_c.lib.fmoe_checkpoint_open, os.fsencode(path)), _c.lib.fmoe_checkpoint_release)

    @property
    def family(self):
        return _c.lib.fmoe_checkpoint_family(self._handle).decode()

    @property
    def producer(self):
        return _c.lib.fmoe_checkpoint_producer(self._handle).decode()

    @property
    def moe_layers(self):
        """The numbers of the layers that hold routed experts."""
        count = ctypes.c_int64()
        first = _c.lib.fmoe_checkpoint_moe_layers(self._handle, ctypes.byref(count))
        return [first[i] for i in range(count.value)]

    def describe(self, layer):
        """LayerInfo of a layer, without reading its weights."""
        info = _c.initialised(_c.LayerInfo)
        _c.check(_c.lib.fmoe_checkpoint_describe(self._handle, layer, ctypes.byref(info)))
        return LayerInfo._of(info)

    def load_layer(self, layer, **options):
        """A Layer. Options are those of `fusedmoe run`: device ("cpu", "cuda"), backend, isa, mode, determinism,
        activation ("a8"), pack_cache, shared_experts (True), max_tokens (8192), plan_tokens (1)."""
        c_options, _alive = _options(options)
        return Layer(_c.made(_c.lib.fmoe_layer_load, self._handle, layer, ctypes.byref(c_options)))


def _options(given):
    options = _c.initialised(_c.LayerOptions)
    alive = []
    for name, value in given.items():
        if name not in ("device", "backend", "isa", "mode", "determinism", "activation", "pack_cache",
                        "shared_experts", "max_tokens", "plan_tokens"):
            raise TypeError(f"layers have no option '{name}'")
        if value is not None:
            text = isinstance(value, (str, os.PathLike))
            alive.append(os.fsencode(value) if text else int(value))
            setattr(options, name, alive[-1])
    options.executor = _executor()
    return options, alive


class Layer(_Handle):
    """One layer of experts, loaded and planned: `Checkpoint.load_layer` or `Layer.create`. Immutable; any number of
    threads may call it."""

    def __init__(self, handle):
        super().__init__(handle, _c.lib.fmoe_layer_release)
        info = _c.initialised(_c.LayerInfo)
        _c.check(_c.lib.fmoe_layer_get_info(self._handle, ctypes.byref(info)))
        self.info = LayerInfo._of(info)
        self._alive = None
        self._lock, self._workspaces = threading.Lock(), []
        self._release_workspace = _c.lib.fmoe_workspace_release  # the module may be gone when a layer ends

    def __del__(self):
        for workspace in getattr(self, "_workspaces", []):
            self._release_workspace(workspace)
        super().__del__()

    @classmethod
    def create(cls, experts, *, top_k, scheme="unquantized", activation="silu", alpha=1.0, beta=0.0, limit=0.0,
               dtype="BF16", apply_router_weight_on_input=False, **options):
        """A layer of weights that are in memory, for forwards with topk_ids and topk_weights.

        `experts`: one dict an expert with "gate" (absent where the activation is not gated), "up" and "down"; each the
        codes, [outputs, inputs], or a dict of "codes", "block_scale", "zero_point", "channel_scale", "bias",
        "group_index", "pre_quant_scale" (tensors) and "tensor_scale", "input_tensor_scale" (numbers). Packed codes
        come as bytes. The layer has weights of its own afterwards, except in the reference backend, which reads
        these."""
        element = _element(scheme)
        built = [_expert(expert, number, element) for number, expert in enumerate(experts)]
        if not built:
            raise ValueError("a layer needs at least one expert")
        config = _c.initialised(_c.LayerConfig)
        up = built[0][0].up.codes
        config.num_experts, config.top_k = len(built), top_k
        config.intermediate, config.hidden = up.shape[0], up.shape[1]
        config.dtype, config.scheme, config.activation = _c.DTYPE[dtype], scheme.encode(), activation.encode()
        config.alpha, config.beta, config.limit = alpha, beta, limit
        config.has_bias = bool(built[0][0].down.bias.data)
        config.apply_router_weight_on_input = apply_router_weight_on_input

        def load(_self, expert, out):
            ctypes.memmove(out, ctypes.byref(built[expert][0]), ctypes.sizeof(_c.Expert))
            return 0

        source = _c.ExpertSource(None, _c.LOAD(load), _c.UNLOAD())
        c_options, _alive = _options(options)
        layer = cls(_c.made(_c.lib.fmoe_layer_create, ctypes.byref(config), ctypes.byref(source),
                            ctypes.byref(c_options)))
        layer._alive = (built, source)
        return layer

    @property
    def plan(self):
        """What runs, and what it is expected to cost."""
        return _c.lib.fmoe_layer_plan_text(self._handle).decode()

    @property
    def selection(self):
        """The plan with every backend that does not run, and why."""
        return _c.lib.fmoe_layer_selection_text(self._handle).decode()

    def __call__(self, hidden, *, router_logits=None, topk_ids=None, topk_weights=None, token_ids=None, out=None,
                 return_routing=False):
        """The output, [M, H], of `hidden` [M, H] in bfloat16, float16 or float32. Either router_logits [M, E], or
        topk_ids [M, k] (int32, int64 on CPUs; -1 skips a slot) with topk_weights [M, k] (float32), or neither, and the
        router of the checkpoint decides. With `return_routing` also the ids and the weights that were chosen. On a
        card, tensors of the card: the call launches on torch's current stream and does not wait."""
        if (_tensors.device_of(hidden) == "cuda") != self.info.on_device:
            raise ValueError(f"hidden lies on {_tensors.device_of(hidden)}, the layer on "
                             f"{'cuda' if self.info.on_device else 'cpu'}")
        if out is None:
            out = _tensors.empty_like(hidden, hidden.shape, None)
        forward, alive = _c.Forward(), []
        values = {"hidden": hidden, "router_logits": router_logits, "topk_ids": topk_ids,
                  "topk_weights": topk_weights, "token_ids": token_ids, "output": out}
        if return_routing:
            shape = (hidden.shape[0], self.info.top_k)
            values["chosen_ids"] = _tensors.empty_like(hidden, shape, "int32")
            values["chosen_weights"] = _tensors.empty_like(hidden, shape, "float32")
        for name, value in values.items():
            if value is not None and _tensors.device_of(value) != _tensors.device_of(hidden):
                raise ValueError(f"{name} lies on {_tensors.device_of(value)}, hidden on {_tensors.device_of(hidden)}")
            window, owner = _tensors.window(value, name)
            setattr(forward, name, window)
            alive.append(owner)
        if self.info.on_device:
            import torch
            executor = _c.Executor(stream=torch.cuda.current_stream(hidden.device).cuda_stream, num_threads=1)
        else:
            executor = _executor()
        workspace = self._take_workspace()
        try:
            _c.check(_c.lib.fmoe_layer_forward(self._handle, ctypes.byref(forward), workspace, ctypes.byref(executor)))
        finally:
            with self._lock:
                self._workspaces.append(workspace)
        return (out, values["chosen_ids"], values["chosen_weights"]) if return_routing else out

    def _take_workspace(self):
        # On a card forwards of one stream follow each other, so that one workspace serves them all.
        with self._lock:
            if self._workspaces:
                return self._workspaces.pop()
        return _c.made(_c.lib.fmoe_workspace_create, self._handle)


def _element(scheme):
    """The type of a scheme's codes; None for plain weights, which come in their own."""
    element = ctypes.c_int()
    _c.check(_c.lib.fmoe_scheme_element(scheme.encode(), ctypes.byref(element)))
    name = _c.DTYPES[element.value]
    return None if name in ("BF16", "F16", "F32") else name


def _expert(given, number, element):
    """The struct of one expert, and what it points at."""
    expert, alive = _c.Expert(), []
    for part in given:
        if part not in ("gate", "up", "down"):
            raise TypeError(f"expert {number} has '{part}', experts have gate, up and down")
        matrix = given[part] if isinstance(given[part], dict) else {"codes": given[part]}
        target = getattr(expert, part)
        for name, value in matrix.items():
            if name in ("tensor_scale", "input_tensor_scale"):
                alive.append(ctypes.c_float(float(value)))
                setattr(target, name, ctypes.pointer(alive[-1]))
            elif name in dict(_c.Matrix._fields_):
                window, owner = _tensors.window(value, f"expert {number}, {part}.{name}",
                                                element if name == "codes" else None)
                setattr(target, name, window)
                alive.append(owner)
            else:
                raise TypeError(f"expert {number}, {part} has '{name}', which no matrix has")
    return expert, alive
