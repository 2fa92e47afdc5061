"""GGUF files as the gguf package writes them, run here; the values to compare with are those of its own decoder."""

import unittest

from support import MISSING, Case, save_file

if not MISSING:
    import gguf
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType as Type
    from safetensors.torch import load_file

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYER, TOKENS = 256, 512, 4, 2, 1, 9
QUANTIZED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
             "IQ4_NL", "IQ4_XS", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
             "MXFP4", "NVFP4"]
REFUSED = ["Q8_K"]


def encode(generator, shape, kind):
    """Random weights as (array for the writer, values). Where the package only decodes, random codes get small scales."""
    values = (generator.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
    try:
        data = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        data = generator.integers(0, 256, (*shape[:-1], shape[-1] // elements, size), dtype=np.uint8)
        scales = {Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,),
                  Type.IQ4_NL: (0,), Type.IQ4_XS: (0,), Type.IQ1_S: (0,), Type.IQ2_XXS: (0,), Type.IQ2_XS: (0,),
                  Type.IQ2_S: (0,), Type.IQ3_XXS: (0,), Type.IQ3_S: (0,)}.get(kind, ())
        for at in scales:
            small = generator.uniform(1e-4, 4e-4, data.shape[:-1]).astype(np.float16)
            data[..., at:at + 2] = small[..., None].view(np.uint8)
        if kind == Type.IQ1_M:  # the scale lies in the upper nibbles of four words
            small = generator.uniform(1e-4, 4e-4, data.shape[:-1]).astype(np.float16).view(np.uint16)
            for word in range(4):
                data[..., 49 + 2 * word] = data[..., 49 + 2 * word] & 15 | (small >> 4 * word & 15) << 4
        if kind == Type.MXFP4:
            data[..., 0] = generator.integers(118, 124, data.shape[:-1])
        if kind == Type.NVFP4:
            data[..., :4] = generator.integers(8, 40, (*data.shape[:-1], 4))
        data = data.reshape(*shape[:-1], -1)
    return data, gguf.quants.dequantize(data, kind).reshape(shape) if kind.name not in REFUSED else values


class Model:
    """One layer of a GGUF model: tensors by name, as they decode."""

    def __init__(self, path, arch, keys, seed=1):
        self.generator = np.random.default_rng(seed)
        self.path, self.values = path, {}
        self.writer = gguf.GGUFWriter(path, arch)
        self.writer.add_block_count(LAYER + 1)
        self.writer.add_embedding_length(HIDDEN)
        self.writer.add_expert_count(EXPERTS)
        self.writer.add_expert_used_count(TOP_K)
        self.writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(300)])
        for key, value in keys.items():
            getattr(self.writer, f"add_{key}")(value)
        self.add("token_embd.weight", (8, HIDDEN), "F16")

    def add(self, name, shape, kind="F32"):
        data, values = encode(self.generator, shape, Type[kind])
        self.values[name] = values
        # F32 and F16 lie as numbers, all else as bytes.
        self.writer.add_tensor(name, data, raw_dtype=None if kind in ("F32", "F16") else Type[kind])

    def constant(self, name, values):
        self.values[name] = np.asarray(values, np.float32)
        self.writer.add_tensor(name, self.values[name])

    def write(self):
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()

    def __getitem__(self, name):
        return self.values[f"blk.{LAYER}.{name}"].astype(np.float64)


def silu(x):
    return x / (1 + np.exp(-x))


class Gguf(Case):
    def check(self, model, hidden, expected, *more, bound=2e-6):
        """The reference backend is as near as sums in F32 are; the fast one within the bound that the command derives
        for the machine's kernels (AMX tiles round rows to BF16) around it."""
        save_file({"hidden_states": torch.from_numpy(hidden)}, self.folder / "in.safetensors")
        out = self.folder / "out.safetensors"
        for backend in ("REFERENCE", "CPU_FUSED"):
            document = self.run_command("run", model.path, "--layer", LAYER, "--input", self.folder / "in.safetensors",
                                        "--output", out, "--backend", backend, "--check", *more)
            output = load_file(out)["output"].double().numpy()
            error = np.linalg.norm(output - expected) / np.linalg.norm(expected)
            limit = bound if backend == "REFERENCE" else bound + document["check"]["bound"]
            self.assertLess(error, limit, backend)

    def softmax_model(self, name, kinds, fused=False, side=None):
        """A Qwen3 layer, its input and output."""
        model = Model(self.folder / f"{name}.gguf", "qwen3moe", {"expert_feed_forward_length": INTERMEDIATE})
        block = f"blk.{LAYER}."
        model.add(block + "ffn_gate_inp.weight", (EXPERTS, HIDDEN))
        if fused:
            model.add(block + "ffn_gate_up_exps.weight", (EXPERTS, 2 * INTERMEDIATE, HIDDEN), kinds[0])
        else:
            model.add(block + "ffn_gate_exps.weight", (EXPERTS, INTERMEDIATE, HIDDEN), kinds[0])
            model.add(block + "ffn_up_exps.weight", (EXPERTS, INTERMEDIATE, HIDDEN), kinds[0])
        model.add(block + "ffn_down_exps.weight", (EXPERTS, HIDDEN, INTERMEDIATE), kinds[1])
        if side:
            for projection in ("gate", "up", "down"):
                model.constant(f"{block}ffn_{projection}_exps.scale", side)
        model.write()
        hidden = model.generator.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        logits = hidden.astype(np.float64) @ model["ffn_gate_inp.weight"].T
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        expected = np.zeros((TOKENS, HIDDEN))
        for token in range(TOKENS):
            chosen = np.argsort(-scores[token])[:TOP_K]
            for expert in chosen:
                if fused:
                    both = model["ffn_gate_up_exps.weight"][expert]
                    gate, up = both[:INTERMEDIATE], both[INTERMEDIATE:]
                else:
                    gate, up = model["ffn_gate_exps.weight"][expert], model["ffn_up_exps.weight"][expert]
                factor = side[expert] if side else 1.0
                x = hidden[token].astype(np.float64)
                middle = silu(factor * (gate @ x)) * (factor * (up @ x))
                expected[token] += (scores[token, expert] / scores[token, chosen].sum() * factor
                                    * (model["ffn_down_exps.weight"][expert] @ middle))
        return model, hidden, expected

    def test_gate_and_up_in_one_tensor(self):
        self.check(*self.softmax_model("fused", ("Q8_0", "Q8_0"), fused=True))

    def test_mixture_of_k_types(self):
        self.check(*self.softmax_model("mixture", ("Q4_K", "Q6_K")))

    def test_a_type_for_each_matrix(self):
        """As quantizers choose where rows are no whole blocks of the type that was asked for."""
        for kinds in (("Q4_K", "Q8_0"), ("Q4_0", "Q4_1"), ("Q8_0", "Q4_0"), ("MXFP4", "Q8_0"), ("Q4_0", "BF16"), ("F16", "MXFP4")):
            self.check(*self.softmax_model("-".join(kinds), kinds))

    def test_nvfp4_side_scales(self):
        model, hidden, expected = self.softmax_model("side", ("NVFP4", "NVFP4"), side=[0.5, 1.5, 0.75, 3.0])
        self.check(model, hidden, expected)

    def test_inspect_lint_and_verify(self):
        model, _, _ = self.softmax_model("tools", ("MXFP4", "MXFP4"))
        document = self.run_command("inspect", model.path)
        self.assertEqual(document["producer"], "gguf")
        self.assertEqual(document["moe_layers"], [LAYER])
        self.run_command("lint", model.path)
        self.assertTrue(self.run_command("verify", model.path, "--layer", LAYER)["ok"])

    def assert_values(self, folder, model, bound=0.0):
        """Plain weights of a converted checkpoint against the values of the package's own decoder."""
        plain = self.folder / f"{folder.name}-plain"
        self.run_command("convert", folder, "--to", "f32", "--output", plain, "--force")
        tensors = load_file(plain / "model.safetensors")
        for projection in ("gate", "up", "down"):
            wanted = model.values[f"blk.{LAYER}.ffn_{projection}_exps.weight"]
            side = model.values.get(f"blk.{LAYER}.ffn_{projection}_exps.scale", np.ones(EXPERTS, np.float32))
            for expert in range(EXPERTS):
                found = tensors[f"model.layers.{LAYER}.mlp.experts.{expert}.{projection}_proj.weight"].numpy()
                exact = wanted[expert] * side[expert]
                self.assertLessEqual(np.abs(found - exact).max(), bound * np.abs(exact).max(), projection)

    def test_files_of_the_package_become_checkpoints(self):
        for kind, form, scheme in (("MXFP4", "compressed-tensors", "mxfp4_w4a16"), ("NVFP4", "modelopt", "nvfp4_w4a16"),
                                   ("Q8_0", "compressed-tensors", "int8_w8a16:g32")):
            side = [0.5, 1.5, 0.75, 3.0] if kind == "NVFP4" else None
            model, _, _ = self.softmax_model(f"out-{kind}", (kind, kind), side=side)
            target = self.folder / f"from-{kind}"
            report = self.run_command("convert", model.path, "--to", form, "--output", target)
            self.assertTrue(report["lossless"])
            self.assertEqual((report["from_scheme"], report["to_scheme"], report["left_out"]), (scheme, scheme, 1))
            # NVFP4: code, block scale and side scale are multiplied in another order here.
            self.assert_values(target, model, 2**-22 if kind == "NVFP4" else 0.0)
        model, _, _ = self.softmax_model("out-Q4_K", ("Q4_K", "Q6_K"))
        self.run_command("quantize", model.path, "--scheme", "nvfp4_w4a16", "--output", self.folder / "from-Q4_K")
        self.run_command("convert", model.path, "--to", "f32", "--output", self.folder / "plain-Q4_K")
        self.assert_values(self.folder / "plain-Q4_K", model, 2**-22)

    def test_files_written_here_read_back_in_the_package(self):
        """Names, shapes, metadata and values, as the package's own reader and decoder have them."""
        for scheme, kind in (("nvfp4_w4a4", Type.NVFP4), ("mxfp4_w4a16", Type.MXFP4), ("int4_w4a16:g128", Type.Q4_0),
                             ("int8_w8a16:g64", Type.Q8_0), ("unquantized", Type.BF16)):
            source, path = self.folder / f"sample-{kind.name}", self.folder / f"written-{kind.name}.gguf"
            self.run_command("sample", "--family", "deepseek_v3", "--scheme", scheme, "--output", source, "--hidden", 256,
                             "--intermediate", 128, "--experts", 8, "--top-k", 2, "--layers", 2)
            self.run_command("convert", source, "--to", "f32", "--output", self.folder / f"plain-{kind.name}")
            plain = load_file(self.folder / f"plain-{kind.name}" / "model.safetensors")
            self.assertTrue(self.run_command("convert", source, "--to", "gguf", "--output", path)["lossless"])
            reader = gguf.GGUFReader(path)
            field = {name: field.contents() for name, field in reader.fields.items()}
            self.assertEqual(field["general.architecture"], "deepseek2")
            self.assertEqual(field["deepseek2.expert_count"], 8)
            self.assertEqual(field["deepseek2.expert_used_count"], 2)
            self.assertEqual(field["deepseek2.expert_feed_forward_length"], 128)
            self.assertEqual(field["deepseek2.expert_gating_func"], gguf.ExpertGatingFuncType.SIGMOID)
            tensors = {tensor.name: tensor for tensor in reader.tensors}
            compared = 0
            for layer in (0, 1):
                if f"blk.{layer}.ffn_up_exps.weight" not in tensors:
                    continue
                self.assertEqual(list(tensors[f"blk.{layer}.ffn_gate_inp.weight"].shape), [256, 8])
                for projection in ("gate", "up", "down"):
                    stem = f"blk.{layer}.ffn_{projection}_exps."
                    tensor = tensors[stem + "weight"]
                    self.assertEqual(tensor.tensor_type, kind)
                    self.assertEqual(list(tensor.shape), [128, 256, 8] if projection == "down" else [256, 128, 8])
                    values = gguf.quants.dequantize(tensor.data, kind)
                    side = tensors[stem + "scale"].data if stem + "scale" in tensors else np.ones(8, np.float32)
                    self.assertEqual(stem + "scale" in tensors, kind == Type.NVFP4)
                    for expert in range(8):
                        wanted = plain[f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"].numpy()
                        found = values[expert] * side[expert]
                        limit = np.abs(wanted).max() * (2**-22 if kind == Type.NVFP4 else 0)
                        self.assertLessEqual(np.abs(found - wanted).max(), limit, stem)
                        compared += 1
            self.assertGreater(compared, 0)

    def test_deepseek_bias_groups_and_shared_experts(self):
        self.deepseek("named.gguf", {"expert_gating_func": gguf.ExpertGatingFuncType.SIGMOID})

    def test_deepseek_whose_scores_are_not_named(self):
        self.deepseek("unnamed.gguf", {})

    def deepseek(self, name, keys):
        model = Model(self.folder / name, "deepseek2", {
            "expert_feed_forward_length": INTERMEDIATE, "expert_weights_norm": True, "expert_weights_scale": 2.5,
            "expert_shared_count": 1, **keys})
        block = f"blk.{LAYER}."
        model.add(block + "ffn_gate_inp.weight", (EXPERTS, HIDDEN))
        model.constant(block + "exp_probs_b.bias", [0.3, -0.2, 0.1, 0.0])
        for projection, rows, columns in (("gate", INTERMEDIATE, HIDDEN), ("up", INTERMEDIATE, HIDDEN),
                                          ("down", HIDDEN, INTERMEDIATE)):
            model.add(f"{block}ffn_{projection}_exps.weight", (EXPERTS, rows, columns), "Q4_0")
            model.add(f"{block}ffn_{projection}_shexp.weight", (rows, columns), "Q8_0")
        model.write()
        hidden = model.generator.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        scores = 1 / (1 + np.exp(-(hidden.astype(np.float64) @ model["ffn_gate_inp.weight"].T)))
        expected = np.zeros((TOKENS, HIDDEN))
        for token in range(TOKENS):
            x = hidden[token].astype(np.float64)
            chosen = np.argsort(-(scores[token] + model["exp_probs_b.bias"]))[:TOP_K]

            def mlp(suffix, at):
                gate, up, down = (at(model[f"ffn_{projection}_{suffix}.weight"]) for projection in ("gate", "up", "down"))
                return down @ (silu(gate @ x) * (up @ x))

            for expert in chosen:
                weight = 2.5 * scores[token, expert] / scores[token, chosen].sum()
                expected[token] += weight * mlp("exps", lambda tensor, expert=expert: tensor[expert])
            expected[token] += mlp("shexp", lambda tensor: tensor)
        self.check(model, hidden, expected)

    def test_gpt_oss_biases(self):
        model = Model(self.folder / "oss.gguf", "gpt-oss", {"expert_feed_forward_length": INTERMEDIATE})
        block = f"blk.{LAYER}."
        model.add(block + "ffn_gate_inp.weight", (EXPERTS, HIDDEN))
        model.add(block + "ffn_gate_inp.bias", (EXPERTS,))
        for projection, rows, columns in (("gate", INTERMEDIATE, HIDDEN), ("up", INTERMEDIATE, HIDDEN),
                                          ("down", HIDDEN, INTERMEDIATE)):
            model.add(f"{block}ffn_{projection}_exps.weight", (EXPERTS, rows, columns), "MXFP4")
            model.add(f"{block}ffn_{projection}_exps.bias", (EXPERTS, rows))
        model.write()
        hidden = model.generator.standard_normal((TOKENS, HIDDEN)).astype(np.float32)
        logits = hidden.astype(np.float64) @ model["ffn_gate_inp.weight"].T + model["ffn_gate_inp.bias"]
        expected = np.zeros((TOKENS, HIDDEN))
        for token in range(TOKENS):
            x = hidden[token].astype(np.float64)
            chosen = np.argsort(-logits[token])[:TOP_K]
            weights = np.exp(logits[token, chosen] - logits[token, chosen].max())
            for weight, expert in zip(weights / weights.sum(), chosen):
                gate = model["ffn_gate_exps.weight"][expert] @ x + model["ffn_gate_exps.bias"][expert]
                up = model["ffn_up_exps.weight"][expert] @ x + model["ffn_up_exps.bias"][expert]
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                middle = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
                expected[token] += weight * (model["ffn_down_exps.weight"][expert] @ middle
                                             + model["ffn_down_exps.bias"][expert])
        self.check(model, hidden, expected)


def add_tests():
    def reads(kind):
        return lambda self: self.check(*self.softmax_model(kind, (kind, kind)))

    def refuses(kind):
        def test(self):
            model, _, _ = self.softmax_model(kind, (kind, kind))
            error = self.run_command("run", model.path, "--layer", LAYER, "--input", "none", "--output", "none", expect=4)
            self.assertIn(kind, error["error"]["message"])
        return test

    for kind in QUANTIZED:
        setattr(Gguf, f"test_reads_{kind}", reads(kind))
    for kind in REFUSED:
        setattr(Gguf, f"test_refuses_{kind}", refuses(kind))


add_tests()

if __name__ == "__main__":
    unittest.main()
