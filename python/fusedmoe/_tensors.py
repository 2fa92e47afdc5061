"""Tensors of others as windows of the library: torch tensors, NumPy arrays, and whatever has a buffer."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from typing import Any

from . import _c

# A torch.Tensor, a numpy.ndarray, or anything with a writable buffer: none of their libraries is needed here.
Tensor = Any

# Element types by the names that torch and NumPy (with ml_dtypes) give them.
NAMES = {"bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
         "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
         "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
         "float8_e4m3fnuz": "F8_E4M3_FNUZ", "float8_e5m2fnuz": "F8_E5M2_FNUZ"}
FORMATS = {"e": "F16", "f": "F32", "d": "F64", "?": "BOOL"}
# Where tensors without elements lie: torch gives them no address, and for the library that means no tensor.
_NOTHING = ctypes.create_string_buffer(64)
PACKED = {"F4_E2M1": (2, 1), "U4": (2, 1), "I4": (2, 1), "F6_E2M3": (4, 3), "F6_E3M2": (4, 3)}  # elements in bytes


def is_torch(value: Tensor) -> bool:
    return type(value).__module__.split(".")[0] == "torch" and hasattr(value, "data_ptr")


def is_numpy(value: Tensor) -> bool:
    return hasattr(value, "__array_interface__")


def is_tensor(value: Tensor) -> bool:
    """Whether it has rows to lend at all."""
    if is_torch(value) or is_numpy(value):
        return True
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def is_writable(value: Tensor) -> bool:
    """False for arrays of NumPy that must not be written; other read-only buffers cannot be lent at all."""
    return not is_numpy(value) or bool(value.flags.writeable)


def device_of(value: Tensor) -> str:
    """Where torch says that it lies: "cpu" and "cuda" are what the library computes on."""
    return str(value.device.type) if is_torch(value) else "cpu"


def place_of(value: Tensor) -> str:
    """The same with the number of the card: "cuda:1"."""
    return str(value.device) if is_torch(value) else "cpu"


def current_card() -> int | None:
    """The number of the card that is current; None where nobody has imported torch, which counts them."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_device()) if torch is not None and torch.cuda.is_available() else None


def on_card(card: int | None) -> contextlib.AbstractContextManager[Any]:
    """Makes a card the current one; None: nothing."""
    torch = sys.modules.get("torch")
    if card is None or torch is None or torch.cuda.current_device() == card:
        return contextlib.nullcontext()
    return torch.cuda.device(card)


def stream_of(value: Tensor) -> int:
    """The current stream of the card that a torch tensor lies on."""
    import torch
    return int(torch.cuda.current_stream(value.device).cuda_stream)


def _element(view: memoryview) -> str:
    """The type that the format of a buffer names. Words of C are as wide as they are here, whatever the format says of
    their size: ctypes calls its longs "<l"."""
    kind = view.format.lstrip("@=<")
    if len(kind) == 1 and kind in "bhilqBHILQ":
        return f"{'I' if kind.islower() else 'U'}{8 * view.itemsize}"
    return FORMATS.get(kind, view.format)


def _parts(value: Tensor, name: str) -> tuple[int, str, Sequence[int], Sequence[int], Any]:
    """Address, dtype name, shape and strides in bytes; and what must live as long as the address."""
    if is_torch(value):
        kind = str(value.dtype).removeprefix("torch.")
        return value.data_ptr(), NAMES.get(kind, kind), value.shape, [s * value.element_size() for s in value.stride()], value
    if is_numpy(value):
        kind = value.dtype.name if value.dtype.isnative else f"{value.dtype.name} of the other byte order"
        return value.ctypes.data, NAMES.get(kind, kind), value.shape, value.strides, value
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{name} is {type(value).__name__}, a tensor, an array or a writable buffer is required") from None
    if view.readonly or view.shape is None or view.strides is None:
        raise TypeError("a read-only buffer has no address to lend: give a writable one, a NumPy array or a tensor")
    holder = (ctypes.c_char * 0).from_buffer(view)
    return ctypes.addressof(holder), _element(view), view.shape, view.strides, (view, holder)


def window(value: Tensor | None, name: str, element: str | None = None, *, host: bool = False) -> tuple[_c.Tensor, Any]:
    """`value` as a tensor of the library, and what keeps it alive. None: absent. `element`: codes of that type, as
    bytes along the last axis. `host`: one of a layer's weights, which no card reads."""
    tensor = _c.Tensor()
    if value is None:
        return tensor, None
    if host and device_of(value) != "cpu":
        raise ValueError(f"{name} lies on {place_of(value)}; weights are read from host memory (use .cpu())")
    if is_torch(value) and value.is_neg():  # the sign is no part of the memory
        raise ValueError(f"{name} is a view that negates its memory: give its resolve_neg()")
    address, dtype, shape, strides, owner = _parts(value, name)
    shape, strides = list(shape), list(strides)
    if element is not None and dtype != element:
        if dtype not in ("U8", "I8", element):
            raise TypeError(f"{name} is {dtype}, codes of {element} come as that type or as bytes")
        elements, size = PACKED.get(element, (1, 1))
        if shape[-1] % size:
            raise ValueError(f"{name} has rows of {shape[-1]} bytes, {element} comes in {size}")
        shape[-1] = shape[-1] // size * elements
        dtype = element
    if dtype not in _c.DTYPE:
        raise TypeError(f"{name} has elements of type {dtype}, which the library does not know")
    if len(shape) > _c.MAX_RANK:
        raise ValueError(f"{name} has {len(shape)} axes, the library knows {_c.MAX_RANK}")
    digits = "".join(filter(str.isdigit, dtype.split("_")[0]))
    size = 1 if element in PACKED or not digits else int(digits) // 8
    if 0 not in shape and shape and shape[-1] > 1 and strides[-1] != size:
        raise ValueError(f"{name} has gaps between the elements of a row (stride {strides[-1]} bytes): make it contiguous")
    # Rows that are one row over and over, of broadcast_to and expand: strides of 0 say "dense" to the library.
    if 0 not in shape and any(extent > 1 and not stride for extent, stride in zip(shape[:-1], strides)):
        raise ValueError(f"{name} has the same memory for several of its rows (stride 0): make it contiguous")
    if not address and 0 not in shape:
        raise ValueError(f"{name} has no memory")
    tensor.data, tensor.dtype, tensor.rank = address or ctypes.addressof(_NOTHING), _c.DTYPE[dtype], len(shape)
    for axis, extent in enumerate(shape):
        tensor.shape[axis] = extent
        tensor.stride_bytes[axis] = strides[axis] if axis + 1 < len(shape) else 0
    return tensor, owner


def empty_like(value: Tensor, shape: Sequence[int], kind: str | None) -> Tensor:
    """A new tensor of the library that `value` belongs to. `kind`: None (its type), "int32" or "float32"."""
    if is_torch(value):
        import torch
        return torch.empty(tuple(shape), dtype=value.dtype if kind is None else getattr(torch, kind),
                           device=value.device)
    if is_numpy(value):
        import numpy
        return numpy.empty(tuple(shape), dtype=value.dtype if kind is None else kind)
    raise TypeError("give out=: only torch tensors and NumPy arrays have results made for them")
