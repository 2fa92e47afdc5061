"""Checkpoints and layers."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import _c, _tensors
from ._handle import Handle
from ._ranks import Communicator
from ._stacked import Stacked
from ._tensors import Tensor
from ._threads import Pool, current_pool
from ._workspaces import Workspace, Workspaces

# routing(hidden, router_logits, top_k) -> (topk_ids [M, k], topk_weights [M, k] in float32), of the caller's tensors.
Routing = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


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
    latent: int  # width of the rows that routed experts read, behind projections; 0: hidden
    batch_scale: bool  # one activation scale over all rows of a call: no row is computed alone

    @classmethod
    def _of(cls, info: _c.LayerInfo) -> LayerInfo:
        values = _values(cls, info)
        values["dtype"] = _c.DTYPES[info.dtype]
        for name in ("has_shared_experts", "on_device", "batch_scale"):
            values[name] = bool(values[name])
        return cls(**values)


@dataclasses.dataclass(frozen=True)
class EplbStep:
    """What the end of a step did to the placement of experts; equal on all ranks, but for what was received. `kept` says
    why the old placement stayed, where a plan was not carried out; `balancedness` is the mean load of a rank over the largest,
    on the old placement and on the planned one."""

    epoch: int
    planned: bool
    switched: bool
    slots_changed: int
    experts_received: int
    bytes_received: int
    balancedness: float
    planned_balancedness: float
    kept: str

    @classmethod
    def _of(cls, step: _c.EplbStep) -> EplbStep:
        values = _values(cls, step)
        values["planned"], values["switched"] = bool(step.planned), bool(step.switched)
        return cls(**values)


def _values(kind: Any, struct: Any) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(kind):
        value = getattr(struct, field.name)
        # Texts are cut to their place, inside a character perhaps, and may hold paths of any bytes.
        values[field.name] = value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
    return values


class Checkpoint(Handle):
    """A checkpoint in Hugging Face layout, or a GGUF file. Immutable; safe from many threads.

    `io`: how files are read, "auto", "mmap" or "pread". `expert_layout`: axes of fused expert tensors where the family is
    not enough, "in_out" or "out_in", with ",interleaved" or ",chunked". `allow_partial`: accept an index that names
    tensors no shard holds."""

    def __init__(self, path: str | os.PathLike[str], *, io: str | None = None, expert_layout: str | None = None,
                 allow_partial: bool = False) -> None:
        options = _c.initialized(_c.CheckpointOptions)
        options.io = None if io is None else _c.encoded(io, "io")
        options.expert_layout = None if expert_layout is None else _c.encoded(expert_layout, "expert_layout")
        options.allow_partial = _flag(allow_partial, "allow_partial")
        super().__init__(_c.made(_c.lib.fmoe_checkpoint_open_with, _c.encoded(path, "path"), ctypes.byref(options)),
                         _c.lib.fmoe_checkpoint_release)
        self._path = os.fsdecode(path)

    def __repr__(self) -> str:
        return f"Checkpoint({self._path!r})"

    @property
    def family(self) -> str:
        return _c.text(_c.lib.fmoe_checkpoint_family, self._handle)

    @property
    def producer(self) -> str:
        return _c.text(_c.lib.fmoe_checkpoint_producer, self._handle)

    @property
    def moe_layers(self) -> list[int]:
        """The numbers of the layers that hold routed experts."""
        count = ctypes.c_int64()
        first = _c.lib.fmoe_checkpoint_moe_layers(self._handle, ctypes.byref(count))
        return [first[i] for i in range(count.value)]

    def describe(self, layer: int) -> LayerInfo:
        """LayerInfo of a layer, without reading its weights."""
        info = _c.initialized(_c.LayerInfo)
        _c.check(_c.lib.fmoe_checkpoint_describe(self._handle, _c.integer(layer, "layer"), ctypes.byref(info)))
        return LayerInfo._of(info)

    def load_layer(self, layer: int, *, routing: Routing | None = None, **options: Any) -> Layer:
        """A Layer. Options (docs/python.md has the table): device ("cpu", "cuda"), backend, isa, mode, determinism,
        activation_mode ("a8"; also as `activation`), activation_rule ("vllm_nvfp4"), activation_format ("batched"),
        pack_cache, shared_experts (True), latent_projections (True), max_tokens (8192: of one call; memory of calls grows
        with it), plan_tokens (1); on several ranks communicator, tp, pcp, dp, sp (sizes), ep, all2all, eplb,
        redundant_experts, eplb_window, eplb_interval. `routing` chooses the experts where a forward brings router_logits."""
        if "activation" in options:  # as the command and C call it
            if options.get("activation_mode") is not None:
                raise TypeError("activation and activation_mode are the same option of load_layer: give one")
            options["activation_mode"] = options.pop("activation")
        c_options, alive = _options(options)
        loaded = Layer(_c.made(_c.lib.fmoe_layer_load, self._handle, _c.integer(layer, "layer"),
                               ctypes.byref(c_options)), routing)
        loaded._alive = alive  # threads that place its experts anew
        loaded.is_spread = options.get("communicator") is not None
        return loaded


# Options as Python has them, and as the header calls them.
_OPTIONS = {name: name for name in ("device", "backend", "isa", "mode", "determinism", "activation_rule",
                                    "activation_format", "pack_cache", "shared_experts", "latent_projections",
                                    "max_tokens", "plan_tokens", "all2all", "redundant_experts")}
_OPTIONS |= {"activation_mode": "activation", "tp": "tensor_parallel", "pcp": "prefill_context_parallel",
             "dp": "data_parallel", "sp": "sequence_parallel", "ep": "expert_parallel",
             "eplb": "load_balancing", "eplb_window": "eplb_window_steps", "eplb_interval": "eplb_interval_steps"}
_FLAGS = ("shared_experts", "latent_projections", "ep", "eplb")
_WORDS = frozenset(field[0] for field in _c.LayerOptions._fields_ if field[1] is ctypes.c_char_p)


def _flag(value: Any, name: str) -> bool:
    if isinstance(value, str):  # "no" would count as yes
        raise TypeError(f"{name} is str, True or False is required")
    return bool(value)


def _options(given: dict[str, Any]) -> tuple[_c.LayerOptions, list[Any]]:
    """The struct of these options, and what it points at."""
    options = _c.initialized(_c.LayerOptions)
    pool = current_pool()
    options.executor = pool.executor
    alive: list[Any] = [pool]
    for name, value in given.items():
        if value is None:
            continue
        if name == "communicator":
            if not isinstance(value, Communicator):
                raise TypeError(f"communicator is {type(value).__name__}, fusedmoe.Communicator is required")
            alive.append(value)
            options.communicator = value._handle
        elif name not in _OPTIONS:
            raise TypeError(f"layers have no option '{name}'; there are communicator, {', '.join(_OPTIONS)}")
        elif _OPTIONS[name] in _WORDS:
            alive.append(_c.encoded(value, name))
            setattr(options, _OPTIONS[name], alive[-1])
        else:
            setattr(options, _OPTIONS[name], _flag(value, name) if name in _FLAGS else _c.integer(value, name))
    return options, alive


class Layer(Handle):
    """One layer of experts, loaded and planned: `Checkpoint.load_layer` or `Layer.create`. Immutable but for `end_step`;
    any number of threads may call it, on several ranks one at a time."""

    info: LayerInfo
    is_spread = False  # over ranks, which call it together

    def __init__(self, handle: ctypes.c_void_p, routing: Routing | None = None) -> None:
        super().__init__(handle, _c.lib.fmoe_layer_release)
        self._alive: Any = None
        if routing is not None and not callable(routing):
            raise TypeError(f"routing is {type(routing).__name__}, a function of hidden, router_logits and top_k is required")
        self._routing = routing
        info = _c.initialized(_c.LayerInfo)
        _c.check(_c.lib.fmoe_layer_get_info(self._handle, ctypes.byref(info)))
        self.info = LayerInfo._of(info)
        # Kernels of cards keep counters in theirs from one forward to the next, so that layers do not share them; forwards
        # of one stream follow each other there, and one workspace serves them all.
        self._workspaces = Workspaces() if self.info.on_device else Workspaces.of_cpus()
        self._card = _tensors.current_card() if self.info.on_device else None

    def __repr__(self) -> str:
        info = self.info
        return (f"Layer({info.scheme}, {info.num_experts} experts, top {info.top_k}, hidden {info.hidden}, "
                f"{info.backend})")

    @classmethod
    def create(cls, experts: Sequence[Mapping[str, Any]] | Stacked, *, top_k: int, scheme: str | None = None,
               activation: str = "silu", alpha: float | None = None, beta: float | None = None,
               limit: float | None = None, dtype: str = "BF16", apply_router_weight_on_input: bool = False,
               routing: Routing | str | None = None, renormalize: bool = True, num_groups: int = 1, topk_groups: int = 1,
               scaling_factor: float = 1.0, score: str | None = None, norm_epsilon: float = 0.0,
               logit_softcap: float = 0.0, num_zero_experts: int = 0, select_on_logits: bool = False,
               jitter: float = 0.01, simulation: str | None = None, simulation_seed: int = 0,
               router_weight: Tensor | None = None, router_bias: Tensor | None = None,
               correction_bias: Tensor | None = None, token_id_to_experts: Tensor | None = None,
               **options: Any) -> Layer:
        """A layer of weights that are in memory, on one rank.

        `experts`: one dict an expert with "gate" (absent where the activation is not gated), "up" and "down"; each the
        codes, [outputs, inputs], or a dict of "codes", "block_scale", "zero_point", "channel_scale", "bias",
        "group_index", "pre_quant_scale" (tensors) and "tensor_scale", "input_tensor_scale" (numbers). Packed codes
        come as bytes. Or all of them `Stacked`, which say their scheme. The layer has weights of its own afterwards,
        except in the reference backend, which reads these. `scheme`: "unquantized" unless it is given.

        `activation`: "silu", "gelu", "gelu_tanh", "swigluoai", "swiglustep", "relu", "relu2", "situ", or, without a
        gate, "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu_no_mul", "relu2_no_mul". `alpha` (slope of the
        sigmoid of swigluoai, bound of the gate of situ), `beta` (added to the up projection of swigluoai) and `limit`
        (the clamp of silu, swigluoai, swiglustep and situ; 0: none) are the activation's own unless they are given:
        1.702, 1, 7 of swigluoai, limit 7 of swiglustep, else 1, 0, 0. `activation_mode="a8"` is the option of load_layer.

        `routing`, for forwards without ids: the name of a method (docs/routing.md; "Renormalize" by default), which the
        arguments behind it describe and the tensors (in host memory) serve, or a function of the caller's that chooses.
        `norm_epsilon` is added to the sum that renormalization divides by, `logit_softcap` bounds logits by a tanh,
        `num_zero_experts` give back their input and have the ids behind the others, `jitter` is of "SparseMixer",
        `select_on_logits` of "Default", `simulation` ("uniform_random", "normal_routing") and its seed of "Simulated",
        `token_id_to_experts` [vocabulary, top_k] of "DeepseekV4", whose forwards bring token_ids."""
        if dtype not in _c.DTYPE:
            raise ValueError(f"dtype is {dtype!r}, it must be 'BF16', 'F16' or 'F32'")
        config = _c.initialized(_c.LayerConfig)
        source: _c.ExpertSource | _c.StackedExperts
        if isinstance(experts, Stacked):
            create, (source, held) = _c.lib.fmoe_layer_create_stacked, experts._struct()
        else:
            create = _c.lib.fmoe_layer_create
            source, held = _held(experts, "unquantized" if scheme is None else scheme, config)
        config.top_k = _c.integer(top_k, "top_k")
        config.dtype, config.scheme = _c.DTYPE[dtype], None if scheme is None else _c.encoded(scheme, "scheme")
        config.activation = _c.encoded(activation, "activation")
        for name, parameter in (("alpha", alpha), ("beta", beta), ("limit", limit)):
            if parameter is not None:  # else the library knows
                setattr(config, name, parameter)
        config.apply_router_weight_on_input = apply_router_weight_on_input
        if isinstance(routing, str):
            config.routing = _c.encoded(routing, "routing")
        config.score = None if score is None else _c.encoded(score, "score")
        config.renormalize, config.scaling_factor = renormalize, scaling_factor
        config.norm_epsilon, config.logit_softcap, config.jitter = norm_epsilon, logit_softcap, jitter
        config.num_zero_experts = _c.integer(num_zero_experts, "num_zero_experts")
        config.select_on_logits = _flag(select_on_logits, "select_on_logits")
        config.simulation = None if simulation is None else _c.encoded(simulation, "simulation")
        config.simulation_seed = _c.integer(simulation_seed, "simulation_seed")
        config.num_groups = _c.integer(num_groups, "num_groups")
        config.topk_groups = _c.integer(topk_groups, "topk_groups")
        router = {"router_weight": router_weight, "router_bias": router_bias, "correction_bias": correction_bias,
                  "token_id_to_experts": token_id_to_experts}
        owners = []
        for name, tensor in router.items():
            window, owner = _tensors.window(tensor, name, host=True)
            setattr(config, name, window)
            owners.append(owner)

        c_options, alive = _options(options)
        layer = cls(_c.made(create, ctypes.byref(config), ctypes.byref(source), ctypes.byref(c_options)),
                    None if isinstance(routing, str) else routing)
        layer._alive = (held, source, owners, alive)
        return layer

    @property
    def plan(self) -> str:
        """What runs, and what it is expected to cost."""
        return _c.text(_c.lib.fmoe_layer_plan_text, self._handle)

    def plan_json(self) -> dict[str, Any]:
        """The plan as a dict: the object `plan` of docs/cli.md."""
        plan: dict[str, Any] = json.loads(_c.text(_c.lib.fmoe_layer_plan_json, self._handle))
        return plan

    @property
    def selection(self) -> str:
        """The plan with every backend that does not run, and why."""
        return _c.text(_c.lib.fmoe_layer_selection_text, self._handle)

    @property
    def physical_to_logical(self) -> list[int]:
        """The expert of each slot, rank by rank, of the placement in force; `fusedmoe.eplb.maps` has the other two maps."""
        count = ctypes.c_int64()
        _c.check(_c.lib.fmoe_layer_physical_to_logical(self._handle, None, 0, ctypes.byref(count)))
        slots = (ctypes.c_int32 * count.value)()
        _c.check(_c.lib.fmoe_layer_physical_to_logical(self._handle, slots, count, ctypes.byref(count)))
        return list(slots)

    def end_step(self) -> EplbStep:
        """Ends a step of a layer with load balancing (eplb=True): all ranks call, in step, between forwards. At the end of
        an interval the experts move to where load is."""
        step = _c.initialized(_c.EplbStep)
        _c.check(_c.lib.fmoe_layer_end_step(self._handle, ctypes.byref(step)))
        return EplbStep._of(step)

    def __call__(self, hidden: Tensor, *, router_logits: Tensor | None = None, topk_ids: Tensor | None = None,
                 topk_weights: Tensor | None = None, token_ids: Tensor | None = None, out: Tensor | None = None,
                 return_routing: bool = False) -> Any:
        """The output, [M, H], of `hidden` [M, H]. Either router_logits [M, E], or topk_ids [M, k] (int32 or int64; -1
        skips a slot) with topk_weights [M, k], or neither, and the router of the layer decides. All but ids are
        bfloat16, float16 or float32. With `return_routing` also the ids (int32) and the weights (float32) that were
        chosen. On a card, tensors of the card that the layer was made on: the call launches on torch's current stream
        of it and does not wait."""
        if not _tensors.is_tensor(hidden):
            raise TypeError(f"hidden is {type(hidden).__name__}, a tensor, an array or a buffer of [tokens, hidden] is "
                            f"required")
        device = "cuda" if self.info.on_device else "cpu"
        if _tensors.device_of(hidden) != device:
            raise ValueError(f"hidden lies on {_tensors.device_of(hidden)}, the layer on {device}")
        if self._card is not None and hidden.device.index != self._card:
            raise ValueError(f"hidden lies on {_tensors.place_of(hidden)}, the layer on cuda:{self._card}, the card that "
                             f"was current when it was made")
        if self._routing is not None and router_logits is not None and topk_ids is None:
            chosen = self._routing(hidden, router_logits, self.info.top_k)
            if not isinstance(chosen, (tuple, list)) or len(chosen) != 2:
                raise TypeError(f"routing gave {type(chosen).__name__}, (topk_ids, topk_weights) is required")
            topk_ids, topk_weights = chosen
            router_logits = None
        if out is not None and not _tensors.is_writable(out):
            raise ValueError("out is read-only")
        if out is None:
            out = _tensors.empty_like(hidden, hidden.shape, None)
        values = {"hidden": hidden, "router_logits": router_logits, "topk_ids": topk_ids,
                  "topk_weights": topk_weights, "token_ids": token_ids, "output": out}
        if return_routing:
            shape = (hidden.shape[0], self.info.top_k)
            values["chosen_ids"] = _tensors.empty_like(hidden, shape, "int32")
            values["chosen_weights"] = _tensors.empty_like(hidden, shape, "float32")
        forward, alive = _c.Forward(), list[Any]()
        for name, value in values.items():
            if value is not None and _tensors.place_of(value) != _tensors.place_of(hidden):
                raise ValueError(f"{name} lies on {_tensors.place_of(value)}, hidden on {_tensors.place_of(hidden)}")
            window, owner = _tensors.window(value, name)
            setattr(forward, name, window)
            alive.append(owner)
        pool: Pool | None = None
        if self.info.on_device:
            executor = _c.Executor(stream=_tensors.stream_of(hidden), num_threads=1)
        else:
            pool = current_pool()  # held until the call returns, whatever set_num_threads does meanwhile
            executor = pool.executor
        with _tensors.on_card(self._card):
            workspace = self._workspaces.take(self.info.workspace_bytes)
            if workspace is None:
                workspace = Workspace(self._handle, self.info.workspace_bytes)
            try:
                _c.check(_c.lib.fmoe_layer_forward(self._handle, ctypes.byref(forward), workspace.handle,
                                                   ctypes.byref(executor)))
            finally:
                self._workspaces.give_back(workspace)
        return (out, values["chosen_ids"], values["chosen_weights"]) if return_routing else out


def _element(scheme: str) -> str | None:
    """The type of a scheme's codes; None for plain weights, which come in their own."""
    element = ctypes.c_int()
    _c.check(_c.lib.fmoe_scheme_element(_c.encoded(scheme, "scheme"), ctypes.byref(element)))
    name = _c.DTYPES[element.value]
    return None if name in ("BF16", "F16", "F32") else name


def _held(experts: Sequence[Mapping[str, Any]], scheme: str, config: _c.LayerConfig) -> tuple[_c.ExpertSource, list[Any]]:
    """A source of experts one by one, whose sizes go into `config`, and what it points at."""
    element = _element(scheme)
    built = [_expert(expert, number, element) for number, expert in enumerate(experts)]
    if not built:
        raise ValueError("a layer needs at least one expert")
    up = built[0][0].up.codes
    if up.rank != 2:
        raise ValueError(f"expert 0, up has shape {up.shape[:up.rank]}, [intermediate, hidden] is required")
    config.num_experts, config.intermediate, config.hidden = len(built), up.shape[0], up.shape[1]
    config.has_bias = bool(built[0][0].down.bias.data)

    def load(_self: int | None, expert: int, out: int) -> int:
        ctypes.memmove(out, ctypes.byref(built[expert][0]), ctypes.sizeof(_c.Expert))
        return 0

    return _c.ExpertSource(None, _c.LOAD(load), _c.UNLOAD()), built


_MATRIX_FIELDS = frozenset(field[0] for field in _c.Matrix._fields_)


def _expert(given: Mapping[str, Any], number: int, element: str | None) -> tuple[_c.Expert, list[Any]]:
    """The struct of one expert, and what it points at."""
    if not isinstance(given, Mapping):
        raise TypeError(f"expert {number} is {type(given).__name__}, a dict of gate, up and down is required")
    expert, alive = _c.Expert(), list[Any]()
    for part in given:
        if part not in ("gate", "up", "down"):
            raise TypeError(f"expert {number} has '{part}', experts have gate, up and down")
        matrix = given[part] if isinstance(given[part], Mapping) else {"codes": given[part]}
        target = getattr(expert, part)
        for name, value in matrix.items():
            if name in ("tensor_scale", "input_tensor_scale"):
                alive.append(ctypes.c_float(float(value)))
                setattr(target, name, ctypes.pointer(alive[-1]))
            elif name in _MATRIX_FIELDS:
                window, owner = _tensors.window(value, f"expert {number}, {part}.{name}",
                                                element if name == "codes" else None, host=True)
                setattr(target, name, window)
                alive.append(owner)
            else:
                raise TypeError(f"expert {number}, {part} has '{name}', which no matrix has")
        if "codes" not in matrix:
            raise TypeError(f"expert {number}, {part} has no 'codes'")
    for part in ("up", "down"):  # the gate goes with some activations
        if part not in given:
            raise TypeError(f"expert {number} has no '{part}'")
    return expert, alive
