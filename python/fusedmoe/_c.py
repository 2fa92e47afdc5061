"""fusedmoe.h, declared for ctypes: the library, its structs, and failures as exceptions."""

import ctypes
from ctypes import POINTER, Structure, c_char, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path

ABI_VERSION = 1
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


class LayerInfo(Structure):
    _fields_ = [("struct_size", c_size_t), ("num_experts", c_int64), ("num_local_experts", c_int64),
                ("top_k", c_int64), ("hidden", c_int64), ("intermediate", c_int64), ("max_tokens", c_int64),
                ("dtype", ctypes.c_int), ("has_shared_experts", c_int32), ("scheme", c_char * 64),
                ("on_device", c_int32), ("backend", c_char * 64), ("isa", c_char * 32), ("mode", c_char * 32),
                ("weight_bytes", c_int64), ("workspace_bytes", c_int64)]


class LayerOptions(Structure):
    _fields_ = [("struct_size", c_size_t), ("device", c_char_p), ("backend", c_char_p), ("isa", c_char_p),
                ("mode", c_char_p), ("determinism", c_char_p), ("activation", c_char_p), ("pack_cache", c_char_p),
                ("shared_experts", c_int32), ("max_tokens", c_int64), ("plan_tokens", c_int64),
                ("executor", Executor), ("communicator", c_void_p), ("tensor_parallel", c_int64),
                ("prefill_context_parallel", c_int64), ("data_parallel", c_int64), ("sequence_parallel", c_int64),
                ("expert_parallel", c_int32), ("all2all", c_char_p)]


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
                ("router_weight", Tensor), ("router_bias", Tensor), ("correction_bias", Tensor)]


class Forward(Structure):
    _fields_ = [("hidden", Tensor), ("router_logits", Tensor), ("topk_ids", Tensor), ("topk_weights", Tensor),
                ("token_ids", Tensor), ("output", Tensor), ("chosen_ids", Tensor), ("chosen_weights", Tensor)]


# Name, result, arguments. Handles are void pointers here.
PROTOTYPES = [
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
    ("fmoe_checkpoint_release", None, [c_void_p]),
    ("fmoe_checkpoint_family", c_char_p, [c_void_p]),
    ("fmoe_checkpoint_producer", c_char_p, [c_void_p]),
    ("fmoe_checkpoint_moe_layers", POINTER(c_int64), [c_void_p, POINTER(c_int64)]),
    ("fmoe_checkpoint_describe", ctypes.c_int, [c_void_p, c_int64, POINTER(LayerInfo)]),
    ("fmoe_layer_info_init", None, [POINTER(LayerInfo)]),
    ("fmoe_layer_options_init", None, [POINTER(LayerOptions)]),
    ("fmoe_layer_load", ctypes.c_int, [c_void_p, c_int64, POINTER(LayerOptions), POINTER(c_void_p)]),
    ("fmoe_layer_release", None, [c_void_p]),
    ("fmoe_layer_get_info", ctypes.c_int, [c_void_p, POINTER(LayerInfo)]),
    ("fmoe_layer_plan_text", c_char_p, [c_void_p]),
    ("fmoe_layer_selection_text", c_char_p, [c_void_p]),
    ("fmoe_scheme_element", ctypes.c_int, [c_char_p, POINTER(ctypes.c_int)]),
    ("fmoe_layer_config_init", None, [POINTER(LayerConfig)]),
    ("fmoe_layer_create", ctypes.c_int,
     [POINTER(LayerConfig), POINTER(ExpertSource), POINTER(LayerOptions), POINTER(c_void_p)]),
    ("fmoe_workspace_create", ctypes.c_int, [c_void_p, POINTER(c_void_p)]),
    ("fmoe_workspace_release", None, [c_void_p]),
    ("fmoe_layer_forward", ctypes.c_int, [c_void_p, POINTER(Forward), c_void_p, POINTER(Executor)]),
    ("fmoe_layer_forward_from_host", ctypes.c_int, [c_void_p, POINTER(Forward), c_void_p, POINTER(Executor)]),
]


class Error(RuntimeError):
    """What the library reports. `code` is "no", "usage", "bad_input", "unsupported" or "system"; `message`,
    `file`, `tensor` and `hint` are its parts, "" where they do not apply."""

    CODES = ("ok", "no", "usage", "bad_input", "unsupported", "system")

    def __init__(self, info):
        super().__init__(info.text.decode())
        self.code = self.CODES[info.code]
        self.message, self.file = info.message.decode(), info.file.decode()
        self.tensor, self.hint = info.tensor.decode(), info.hint.decode()


def _open():
    """The library that lies beside this file (a wheel), or the one that the loader finds (an installation)."""
    beside = Path(__file__).parent / "libfusedmoe_c.so"
    library = ctypes.CDLL(str(beside) if beside.exists() else "libfusedmoe_c.so.0")
    for name, result, arguments in PROTOTYPES:
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    if library.fmoe_abi_version() != ABI_VERSION:
        raise ImportError(f"libfusedmoe_c has ABI version {library.fmoe_abi_version()}, this package needs "
                          f"{ABI_VERSION}")
    return library


lib = _open()


def check(code):
    """Raises what failed, if it did."""
    if code != 0:
        raise Error(lib.fmoe_last_error().contents)


def initialised(struct):
    """A struct with the defaults of the library."""
    value = struct()
    name = {LayerInfo: "fmoe_layer_info_init", LayerOptions: "fmoe_layer_options_init",
            LayerConfig: "fmoe_layer_config_init"}[struct]
    getattr(lib, name)(ctypes.byref(value))
    if value.struct_size != ctypes.sizeof(struct):
        raise ImportError(f"{name[:-5]} has {value.struct_size} bytes in the library, {ctypes.sizeof(struct)} here")
    return value


def made(function, *arguments):
    """The handle that `function` puts where its last argument points."""
    handle = c_void_p()
    check(function(*arguments, ctypes.byref(handle)))
    return handle


def version():
    return lib.fmoe_version().decode()
