"""fusedmoe.h, declared for ctypes: the library, its structs, and failures as exceptions."""

from __future__ import annotations

import ctypes
import operator
import os
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

ABI_VERSION = 2
MAX_RANK = 6

# The enumerators of fmoe_dtype, in order.
DTYPES = ("BOOL", "F4_E2M1", "F6_E2M3", "F6_E3M2", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3_FNUZ",
          "F8_E5M2_FNUZ", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "C64", "F64", "I64", "U64", "U4", "I4")
DTYPE = {name: number for number, name in enumerate(DTYPES)}

PARALLEL = ctypes.CFUNCTYPE(None, c_void_p, c_int64, c_void_p, c_void_p)
LOAD = ctypes.CFUNCTYPE(c_int32, c_void_p, c_int64, c_void_p)
UNLOAD = ctypes.CFUNCTYPE(None, c_void_p, c_int64)


class ErrorInfo(Structure):
    _fields_ = [("code", ctypes.c_int), ("text", c_char_p), ("message", c_char_p), ("file", c_char_p),
                ("tensor", c_char_p), ("hint", c_char_p)]


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("dtype", ctypes.c_int), ("rank", c_int32), ("shape", c_int64 * MAX_RANK),
                ("stride_bytes", c_int64 * MAX_RANK)]


class Executor(Structure):
    _fields_ = [("self", c_void_p), ("num_threads", c_int32), ("parallel", c_void_p), ("stream", c_void_p)]


class CheckpointOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("io", c_char_p), ("expert_layout", c_char_p), ("allow_partial", c_int32)]


class LayerInfo(Structure):
    _fields_ = [("struct_size", c_size_t), ("num_experts", c_int64), ("num_local_experts", c_int64),
                ("top_k", c_int64), ("hidden", c_int64), ("intermediate", c_int64), ("max_tokens", c_int64),
                ("dtype", ctypes.c_int), ("has_shared_experts", c_int32), ("scheme", c_char * 64),
                ("on_device", c_int32), ("backend", c_char * 64), ("isa", c_char * 32), ("mode", c_char * 32),
                ("weight_bytes", c_int64), ("workspace_bytes", c_int64), ("latent", c_int64), ("batch_scale", c_int32)]


class LayerOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("device", c_char_p), ("backend", c_char_p), ("isa", c_char_p),
                ("mode", c_char_p), ("determinism", c_char_p), ("activation", c_char_p), ("pack_cache", c_char_p),
                ("shared_experts", c_int32), ("max_tokens", c_int64), ("plan_tokens", c_int64),
                ("executor", Executor), ("communicator", c_void_p), ("tensor_parallel", c_int64),
                ("prefill_context_parallel", c_int64), ("data_parallel", c_int64), ("sequence_parallel", c_int64),
                ("expert_parallel", c_int32), ("all2all", c_char_p), ("activation_format", c_char_p),
                ("load_balancing", c_int32), ("redundant_experts", c_int64), ("eplb_window_steps", c_int64),
                ("eplb_interval_steps", c_int64), ("latent_projections", c_int32),
                ("activation_rule", c_char_p)]


class Matrix(Structure):
    _fields_ = [("codes", Tensor), ("block_scale", Tensor), ("zero_point", Tensor), ("channel_scale", Tensor),
                ("bias", Tensor), ("group_index", Tensor), ("pre_quant_scale", Tensor),
                ("tensor_scale", POINTER(c_float)), ("input_tensor_scale", POINTER(c_float))]


class Expert(Structure):
    _fields_ = [("gate", Matrix), ("up", Matrix), ("down", Matrix)]


class ExpertSource(Structure):
    _fields_ = [("self", c_void_p), ("load", LOAD), ("unload", UNLOAD)]


class LayerConfig(Structure):
    _fields_ = [("struct_size", c_size_t), ("num_experts", c_int64), ("top_k", c_int64), ("hidden", c_int64),
                ("intermediate", c_int64), ("dtype", ctypes.c_int), ("scheme", c_char_p), ("activation", c_char_p),
                ("alpha", c_float), ("beta", c_float), ("limit", c_float), ("has_bias", c_int32),
                ("routing", c_char_p), ("score", c_char_p), ("renormalize", c_int32), ("num_groups", c_int64),
                ("topk_groups", c_int64), ("scaling_factor", c_float), ("apply_router_weight_on_input", c_int32),
                ("router_weight", Tensor), ("router_bias", Tensor), ("correction_bias", Tensor),
                ("custom_routing", c_void_p), ("routing_self", c_void_p), ("norm_epsilon", c_float),
                ("logit_softcap", c_float), ("jitter", c_float), ("select_on_logits", c_int32),
                ("num_zero_experts", c_int64), ("token_id_to_experts", Tensor), ("simulation", c_char_p),
                ("simulation_seed", c_uint64)]


class StackedExperts(Structure):
    _fields_ = [("struct_size", c_size_t), ("w1", Tensor), ("w2", Tensor), ("order", c_char_p),
                ("quant_dtype", c_char_p), ("weight_quant_dtype", c_char_p), ("per_act_token_quant", c_int32),
                ("per_out_ch_quant", c_int32), ("block_shape", c_int64 * 2), ("w1_scale", Tensor), ("w2_scale", Tensor),
                ("w1_zp", Tensor), ("w2_zp", Tensor), ("w1_bias", Tensor), ("w2_bias", Tensor), ("g1_alphas", Tensor),
                ("g2_alphas", Tensor), ("a1_scale", Tensor), ("a2_scale", Tensor), ("a1_gscale", Tensor),
                ("a2_gscale", Tensor), ("gemm1_alpha", c_float), ("gemm1_beta", c_float),
                ("gemm1_clamp_limit", c_float)]


class Forward(Structure):
    _fields_ = [("hidden", Tensor), ("router_logits", Tensor), ("topk_ids", Tensor), ("topk_weights", Tensor),
                ("token_ids", Tensor), ("output", Tensor), ("chosen_ids", Tensor), ("chosen_weights", Tensor)]


class EplbStep(Structure):
    _fields_ = [("struct_size", c_size_t), ("epoch", c_int64), ("planned", c_int32), ("switched", c_int32),
                ("slots_changed", c_int64), ("experts_received", c_int64), ("bytes_received", c_int64),
                ("balancedness", c_double), ("planned_balancedness", c_double), ("kept", c_char * 256)]


class EplbShape(Structure):
    _fields_ = [("struct_size", c_size_t), ("num_experts", c_int64), ("num_physical", c_int64),
                ("num_groups", c_int64), ("num_nodes", c_int64), ("num_ranks", c_int64)]


# Name, result, arguments. Handles are void pointers here.
PROTOTYPES: list[tuple[str, Any, list[Any]]] = [
    ("fmoe_last_error", POINTER(ErrorInfo), []),
    ("fmoe_version", c_char_p, []),
    ("fmoe_abi_version", c_int32, []),
    ("fmoe_thread_pool_create", ctypes.c_int, [c_int32, POINTER(c_void_p)]),
    ("fmoe_thread_pool_release", None, [c_void_p]),
    ("fmoe_thread_pool_executor", Executor, [c_void_p]),
    ("fmoe_communicator_mpi", ctypes.c_int, [c_char_p, c_double, POINTER(c_void_p)]),
    ("fmoe_communicator_nccl", ctypes.c_int, [c_void_p, c_char_p, c_double, c_int64, c_void_p, POINTER(c_void_p)]),
    ("fmoe_communicator_finish", ctypes.c_int, [c_void_p, c_void_p]),
    ("fmoe_communicator_rank", c_int64, [c_void_p]),
    ("fmoe_communicator_size", c_int64, [c_void_p]),
    ("fmoe_communicator_release", None, [c_void_p]),
    ("fmoe_checkpoint_open", ctypes.c_int, [c_char_p, POINTER(c_void_p)]),
    ("fmoe_checkpoint_options_init_sized", None, [POINTER(CheckpointOptions), c_size_t]),
    ("fmoe_checkpoint_open_with", ctypes.c_int, [c_char_p, POINTER(CheckpointOptions), POINTER(c_void_p)]),
    ("fmoe_checkpoint_release", None, [c_void_p]),
    ("fmoe_checkpoint_family", c_char_p, [c_void_p]),
    ("fmoe_checkpoint_producer", c_char_p, [c_void_p]),
    ("fmoe_checkpoint_moe_layers", POINTER(c_int64), [c_void_p, POINTER(c_int64)]),
    ("fmoe_checkpoint_describe", ctypes.c_int, [c_void_p, c_int64, POINTER(LayerInfo)]),
    ("fmoe_layer_info_init_sized", None, [POINTER(LayerInfo), c_size_t]),
    ("fmoe_layer_options_init_sized", None, [POINTER(LayerOptions), c_size_t]),
    ("fmoe_layer_load", ctypes.c_int, [c_void_p, c_int64, POINTER(LayerOptions), POINTER(c_void_p)]),
    ("fmoe_layer_release", None, [c_void_p]),
    ("fmoe_layer_get_info", ctypes.c_int, [c_void_p, POINTER(LayerInfo)]),
    ("fmoe_layer_plan_text", c_char_p, [c_void_p]),
    ("fmoe_layer_selection_text", c_char_p, [c_void_p]),
    ("fmoe_layer_plan_json", c_char_p, [c_void_p]),
    ("fmoe_scheme_element", ctypes.c_int, [c_char_p, POINTER(ctypes.c_int)]),
    ("fmoe_layer_config_init_sized", None, [POINTER(LayerConfig), c_size_t]),
    ("fmoe_layer_create", ctypes.c_int,
     [POINTER(LayerConfig), POINTER(ExpertSource), POINTER(LayerOptions), POINTER(c_void_p)]),
    ("fmoe_stacked_experts_init_sized", None, [POINTER(StackedExperts), c_size_t]),
    ("fmoe_layer_create_stacked", ctypes.c_int,
     [POINTER(LayerConfig), POINTER(StackedExperts), POINTER(LayerOptions), POINTER(c_void_p)]),
    ("fmoe_workspace_create", ctypes.c_int, [c_void_p, POINTER(c_void_p)]),
    ("fmoe_workspace_release", None, [c_void_p]),
    ("fmoe_layer_forward", ctypes.c_int, [c_void_p, POINTER(Forward), c_void_p, POINTER(Executor)]),
    ("fmoe_layer_forward_from_host", ctypes.c_int, [c_void_p, POINTER(Forward), c_void_p, POINTER(Executor)]),
    ("fmoe_eplb_step_init_sized", None, [POINTER(EplbStep), c_size_t]),
    ("fmoe_layer_end_step", ctypes.c_int, [c_void_p, POINTER(EplbStep)]),
    ("fmoe_layer_physical_to_logical", ctypes.c_int, [c_void_p, POINTER(c_int32), c_int64, POINTER(c_int64)]),
    ("fmoe_eplb_shape_init_sized", None, [POINTER(EplbShape), c_size_t]),
    ("fmoe_eplb_rebalance", ctypes.c_int,
     [POINTER(EplbShape), POINTER(c_double), POINTER(c_int32), POINTER(c_int32)]),
    ("fmoe_eplb_maps", ctypes.c_int,
     [POINTER(c_int32), c_int64, c_int64, c_int64, POINTER(c_int32), POINTER(c_int32)]),
]


class Error(RuntimeError):
    """What the library reports. `code` is "no", "usage", "bad_input", "unsupported" or "system"; `message`,
    `file`, `tensor` and `hint` are its parts, "" where they do not apply."""

    CODES = ("ok", "no", "usage", "bad_input", "unsupported", "system")

    code: str
    message: str
    file: str
    tensor: str
    hint: str

    @classmethod
    def of(cls, info: ErrorInfo) -> Error:
        # Messages quote names of files and tensors, which need not be UTF-8; `file` can be opened again.
        whole, message, tensor, hint = (part.decode(errors="backslashreplace")
                                        for part in (info.text, info.message, info.tensor, info.hint))
        error = cls(whole)
        error.code, error.message, error.file = cls.CODES[info.code], message, os.fsdecode(info.file)
        error.tensor, error.hint = tensor, hint
        return error


def _open() -> ctypes.CDLL:
    """The library that lies beside this file (a wheel), or the one that the loader finds (an installation)."""
    beside = Path(__file__).parent / "libfusedmoe_c.so"
    name = str(beside) if beside.exists() else "libfusedmoe_c.so.0"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise ImportError(f"{error}; pip install ./python builds it, LD_LIBRARY_PATH says where an installed one "
                          f"is") from error
    library.fmoe_abi_version.restype, library.fmoe_abi_version.argtypes = c_int32, []
    if library.fmoe_abi_version() != ABI_VERSION:  # before its functions and structs are believed
        raise ImportError(f"{name} has ABI version {library.fmoe_abi_version()}, this package needs {ABI_VERSION}")
    for symbol, result, arguments in PROTOTYPES:
        function = getattr(library, symbol, None)
        if function is None:
            raise ImportError(f"{name} is older than this package: it lacks {symbol}")
        function.restype, function.argtypes = result, arguments
    return library


lib = _open()


def check(code: int) -> None:
    """Raises what failed, if it did."""
    if code != 0:
        raise Error.of(lib.fmoe_last_error().contents)


_Struct = TypeVar("_Struct", CheckpointOptions, LayerInfo, LayerOptions, LayerConfig, StackedExperts, EplbStep, EplbShape)
_INIT: dict[Any, Any] = {
    CheckpointOptions: lib.fmoe_checkpoint_options_init_sized,
    LayerInfo: lib.fmoe_layer_info_init_sized, LayerOptions: lib.fmoe_layer_options_init_sized,
    LayerConfig: lib.fmoe_layer_config_init_sized, StackedExperts: lib.fmoe_stacked_experts_init_sized,
    EplbStep: lib.fmoe_eplb_step_init_sized,
    EplbShape: lib.fmoe_eplb_shape_init_sized}


def initialized(struct: type[_Struct]) -> _Struct:
    """A struct with the defaults of the library. One that is longer than the library's is refused when it is used."""
    value = struct()
    _INIT[struct](ctypes.byref(value), ctypes.sizeof(struct))
    return value


def made(function: Any, *arguments: Any) -> c_void_p:
    """The handle that `function` puts where its last argument points."""
    handle = c_void_p()
    check(function(*arguments, ctypes.byref(handle)))
    return handle


def text(function: Any, *arguments: Any) -> str:
    """What a function that returns text says."""
    value: bytes = function(*arguments)
    return value.decode(errors="backslashreplace")


def integer(value: Any, name: str, bits: int = 64) -> int:
    """`value` as a signed integer of this width: ctypes would cut off what does not fit."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {type(value).__name__}, an integer is required") from None
    if not -(1 << (bits - 1)) <= number < 1 << (bits - 1):
        raise ValueError(f"{name} is {number}, which does not fit in {bits} bits")
    return number


def integers(values: Sequence[int], name: str) -> Any:
    """An array of int32."""
    return (c_int32 * len(values))(*(integer(value, f"{name}[{i}]", 32) for i, value in enumerate(values)))


def encoded(value: Any, name: str) -> bytes:
    """A path or a word as the library takes it: ctypes would take an int for its address, and end it at a null."""
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise TypeError(f"{name} is {type(value).__name__}, a string is required")
    data = os.fsencode(value)
    if b"\0" in data:
        raise ValueError(f"{name} holds a null character: {value!r}")
    return data


def version() -> str:
    """Of the library that is loaded: "0.1.0"."""
    return text(lib.fmoe_version)
