"""Models that transformers makes and saves, one layer of each run by `fusedmoe run` and by transformers itself."""

import unittest

from support import MISSING, Case, save_file, save_model

if not MISSING:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig

# What makes a model small, by any of the names that configurations have for it.
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_experts": 8,
    "n_routed_experts": 8, "num_local_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2, "moe_k": 2,
    "shared_expert_intermediate_size": 48, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "initializer_range": 0.2,
}
FAMILIES = {
    "qwen2_moe": {}, "qwen3_moe": {"norm_topk_prob": True}, "mixtral": {"intermediate_size": 48}, "olmoe": {},
    "deepseek_v2": {"first_k_dense_replace": 1}, "deepseek_v3": {"n_group": 4, "topk_group": 2},
    "glm4_moe": {}, "gpt_oss": {}, "granitemoe": {}, "phimoe": {}, "minimax_m2": {}, "dots1": {"n_shared_experts": 1}, "flex_olmo": {},
    "ernie4_5_moe": {"moe_layer_start_index": 0}, "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 96},
    "qwen3_next": {"layer_types": ["full_attention", "full_attention"]}, "jamba": {"num_hidden_layers": 8},
    "hunyuan_v1_moe": {},
}


def block_of(model):
    """Number and module of the last layer with a router and experts."""
    layers = model.model.layers
    for number in reversed(range(len(layers))):
        for name, module in layers[number].named_modules():
            if name and "." not in name and hasattr(module, "experts"):
                return number, module
    raise LookupError("no layer has experts")


class Families(Case):
    def compare(self, model_type, fused):
        defaults = AutoConfig.for_model(model_type)
        sizes = {**SMALL, **FAMILIES[model_type]}
        config = AutoConfig.for_model(model_type, **{key: value for key, value in sizes.items() if hasattr(defaults, key)})
        folder = self.folder / f"{model_type}-{'fused' if fused else 'original'}"
        model = save_model(config, folder, dtype=torch.float32, **({"save_original_format": False} if fused else {}))
        number, block = block_of(model)
        torch.manual_seed(3)
        hidden = torch.randn(1, 7, config.hidden_size)
        with torch.no_grad():
            expected = block(hidden)
        expected = (expected[0] if isinstance(expected, tuple) else expected).reshape(7, -1)
        save_file({"hidden_states": hidden[0]}, folder / "in.safetensors")
        for backend in ("REFERENCE", "CPU_FUSED"):
            self.run_command("run", folder, "--layer", number, "--input", folder / "in.safetensors", "--output",
                             folder / "out.safetensors", "--backend", backend)
            output = load_file(folder / "out.safetensors")["output"]
            error = ((output - expected).norm() / expected.norm()).item()
            # Activations at 15 bits and better, a few hundred products: far below one BF16 step, far above a wrong one.
            self.assertLess(error, 2e-5 if backend == "REFERENCE" else 2e-3, backend)


def add_tests():
    def test(model_type, fused):
        return lambda self: self.compare(model_type, fused)

    for model_type in FAMILIES:
        for fused in (False, True):
            setattr(Families, f"test_{model_type}_{'fused' if fused else 'original'}", test(model_type, fused))


add_tests()

if __name__ == "__main__":
    unittest.main()
