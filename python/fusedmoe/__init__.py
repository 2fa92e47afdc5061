"""The quantized experts of Mixture-of-Experts models: checkpoints, layers, forwards.

    checkpoint = fusedmoe.Checkpoint("Qwen3-30B-A3B-NVFP4")
    layer = checkpoint.load_layer(checkpoint.moe_layers[0], max_tokens=4096)
    print(layer.plan)
    output = layer(hidden, topk_ids=ids, topk_weights=weights)   # torch tensors or NumPy arrays

`fusedmoe.torch` puts layers into torch modules, `fusedmoe.transformers` into the models of that library.
"""

from ._c import Error, version
from ._layer import Checkpoint, Layer, LayerInfo, set_num_threads

__all__ = ["Checkpoint", "Error", "Layer", "LayerInfo", "set_num_threads", "version"]
