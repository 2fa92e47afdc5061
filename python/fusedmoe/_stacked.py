"""Experts as vLLM holds them: stacked tensors and a FusedMoEQuantConfig."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import _c, _tensors
from ._tensors import Tensor

_FIELDS = tuple(name for name, *_ in _c.StackedExperts._fields_ if name not in ("struct_size", "w1", "w2", "order"))
_NAMES = ("quant_dtype", "weight_quant_dtype")
_FLAGS = ("per_act_token_quant", "per_out_ch_quant")
_NUMBERS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
# Of a FusedMoEQuantConfig, beside those: what follows from them, and what speaks of activations in vLLM's kernels alone.
_NOT_READ = ("is_scale_swizzled", "mx_alignment")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # tensors compare by elements, and print them
class Stacked:
    """The experts of a layer, stacked, in host memory, as vLLM has loaded them and before a kernel shuffles them.

    `w13` [E, 2 * intermediate, hidden], without a gate [E, intermediate, hidden]; `w2` [E, hidden, intermediate]. Codes of
    4 and 6 bits come as bytes. `order`: gate and up in the rows of w13, "w13" (gate first), "w31" (up first) or
    "interleaved" (gpt-oss).

    `quant`: a FusedMoEQuantConfig, or a dict of what its accessors give: quant_dtype, weight_quant_dtype (names or dtypes
    of torch), per_act_token_quant, per_out_ch_quant, block_shape, w1_scale, w2_scale, w1_zp, w2_zp, w1_bias, w2_bias,
    g1_alphas, g2_alphas, a1_scale, a2_scale, a1_gscale, a2_gscale, gemm1_alpha, gemm1_beta, gemm1_clamp_limit. None:
    nothing is quantized. docs/vllm.md says what goes where."""

    w13: Tensor
    w2: Tensor
    quant: Any = None
    order: str = "w13"

    def _struct(self) -> tuple[_c.StackedExperts, list[Any]]:
        """As the library takes it, and what that points at."""
        given = _values(self.quant)
        experts = _c.initialized(_c.StackedExperts)
        alive: list[Any] = [_c.encoded(self.order, "order")]
        experts.order = alive[0]
        tensors = {"w1": self.w13, "w2": self.w2}
        for name, value in given.items():
            if value is None:
                continue
            if name in _NAMES:
                alive.append(_c.encoded(value if isinstance(value, (str, bytes)) else str(value).removeprefix("torch."), name))
                setattr(experts, name, alive[-1])
            elif name in _FLAGS:
                setattr(experts, name, bool(value))
            elif name in _NUMBERS:
                setattr(experts, name, float(value))
            elif name == "block_shape":
                rows, columns = value
                experts.block_shape[0], experts.block_shape[1] = _c.integer(rows, name), _c.integer(columns, name)
            else:
                tensors[name] = value
        for name, value in tensors.items():
            window, owner = _tensors.window(value, name, host=True)
            setattr(experts, name, window)
            alive.append(owner)
        return experts, alive


def _values(quant: Any) -> dict[str, Any]:
    if quant is None:
        return {}
    if isinstance(quant, Mapping):
        for name in quant:
            if name not in _FIELDS and name not in _NOT_READ:
                raise TypeError(f"quant has '{name}', there are {', '.join(_FIELDS)}")
        return {name: quant.get(name) for name in _FIELDS}
    if not hasattr(quant, "weight_quant_dtype"):
        raise TypeError(f"quant is {type(quant).__name__}, a FusedMoEQuantConfig or a dict of what its accessors give is "
                        f"required")
    values = {name: getattr(quant, name, None) for name in _FIELDS}
    # The accessor shows the blocks of activations alone, which those of fp8_w8a16 have not.
    shape = getattr(getattr(quant, "_w1", None), "shape", None)
    if values["block_shape"] is None and shape is not None and shape.row > 0 and shape.col > 0:
        values["block_shape"] = (shape.row, shape.col)
    return values
