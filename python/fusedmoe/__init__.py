"""The quantized experts of Mixture-of-Experts models: checkpoints, layers, forwards.

    checkpoint = fusedmoe.Checkpoint("Qwen3-30B-A3B-NVFP4")
    layer = checkpoint.load_layer(checkpoint.moe_layers[0], max_tokens=4096)
    print(layer.plan)
    output = layer(hidden, topk_ids=ids, topk_weights=weights)   # torch tensors or NumPy arrays

`fusedmoe.torch` puts layers into torch modules, `fusedmoe.transformers` into the models of that library,
`fusedmoe.eplb` plans where experts go.
"""

import importlib

from ._c import Error, version
from ._layer import Checkpoint, EplbStep, Layer, LayerInfo, Routing
from ._ranks import Communicator
from ._stacked import Stacked
from ._threads import set_num_threads

__version__ = version()


def __getattr__(name):  # imported when they are asked for: they need torch, or transformers
    if name in ("torch", "transformers", "eplb"):
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


__all__ = ["Checkpoint", "Communicator", "EplbStep", "Error", "Layer", "LayerInfo", "Routing", "Stacked",
           "set_num_threads", "version"]
