"""What `quantize` and `convert` write, dequantized by the libraries whose formats these are.

The values to compare with are those of `fusedmoe convert --to f32`, which decodes by our own readers."""

import json
import unittest

from support import MISSING, ROOT, Case, config_of, modules_of, save_file, save_model, tensors_of

if not MISSING:
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
    from compressed_tensors.utils.match import match_name
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config, Qwen3MoeConfig

GOLDEN = ROOT / "tests" / "golden" / "checkpoints"
HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 4
COMPRESSED_TENSORS = [
    "nvfp4_w4a4", "nvfp4_w4a16", "mxfp4_w4a16", "mxfp4_w4a4", "mxfp8_w8a8", "mxfp8_w8a16", "fp8_w8a8:channel",
    "fp8_w8a8:tensor_static", "fp8_w8a8:tensor", "fp8_w8a8:tensor_token", "fp8_w8a8:block128", "fp8_w8a16:channel",
    "fp8_w8a16:tensor", "fp8_w8a16:block128", "int8_w8a8", "int8_w8a16:channel", "int8_w8a16:g128", "int8_w8a16:g64",
    "int8_w8a16:g32", "int4_w4a16:g128", "int4_w4a16:g64", "int4_w4a16:g32", "int4_w4a16:channel"]
MODELOPT = ["nvfp4_w4a4", "nvfp4_w4a16", "mxfp8_w8a8", "fp8_w8a8:channel", "fp8_w8a8:tensor_static"]


def qwen3(**more):
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 256, "moe_intermediate_size": INTERMEDIATE,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
             "num_experts": EXPERTS, "num_experts_per_tok": 2, "vocab_size": 64, "initializer_range": 0.1}
    return Qwen3MoeConfig(**{**sizes, **more})


class Quantized(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.source = cls.folder / "source"
        save_model(qwen3(), cls.source)
        torch.manual_seed(2)
        hidden = torch.randn(64, HIDDEN)
        save_file({"hidden_states": hidden.bfloat16()}, cls.folder / "hidden.safetensors")
        cls.made = {}

    def statistics(self):
        file = self.folder / "stats.safetensors"
        if not file.exists():
            for layer in (0, 1):
                self.run_command("calibrate", self.source, "--layer", layer, "--input",
                                 self.folder / "hidden.safetensors", "--output", file,
                                 *(["--merge"] if layer else []))
        return file

    def quantize(self, scheme, form):
        """The folder of the quantized checkpoint and its values by our own readers."""
        key = f"{form}-{scheme}".replace(":", "_")
        if key not in self.made:
            target, plain = self.folder / key, self.folder / f"{key}-f32"
            stored = scheme in ("nvfp4_w4a4", "fp8_w8a8:tensor_static")
            self.run_command("quantize", self.source, "--scheme", scheme, "--format", form, "--output", target,
                             *(["--act-stats", self.statistics()] if stored else []))
            self.run_command("convert", target, "--to", "f32", "--output", plain)
            self.made[key] = (target, tensors_of(plain))
        return self.made[key]

    def assert_same(self, decoded, ours, what, bound=0.0):
        """Equal after rounding to the type that the library computes in, or within `bound` of the value. Products of
        a code and two scales round twice there and once here; another code would differ by a fifteenth or more."""
        self.assertEqual(decoded.shape, ours.shape)
        wanted = ours.to(decoded.dtype)
        wrong = (decoded.double() - wanted.double()).abs() > bound * wanted.double().abs()
        self.assertFalse(wrong.any().item(), f"{what}: {wrong.sum().item()} of {wanted.numel()} values, first "
                         f"{decoded[wrong][:1].tolist()} for {wanted[wrong][:1].tolist()}")

    def assert_compressed_tensors(self, folder, ours):
        """Every expert through the decompressor that the configuration names."""
        config = self.configuration(folder)
        scheme = next(iter(config.config_groups.values()))
        compressor = BaseCompressor.get_value_from_registry(scheme.format or config.format)
        tensors = tensors_of(folder)
        modules = modules_of(tensors, "weight_scale")
        self.assertEqual(len(modules), sum(name.endswith(".weight") and ".experts." in name for name in ours))
        for module in modules:
            state = {name[len(module) + 1:]: tensor for name, tensor in tensors.items()
                     if name.startswith(module + ".")}
            expected = set(compressor.compression_param_names(scheme)) | {"input_scale", "input_global_scale", "bias"}
            self.assertLessEqual(set(state), expected | {"weight"}, "a tensor that the library does not know")
            # The library computes in the type of the scales; F32 ones keep every bit.
            if state["weight_scale"].dtype == torch.bfloat16:
                self.assertTrue(torch.equal(state["weight_scale"], state["weight_scale"].float().bfloat16()))
                state["weight_scale"] = state["weight_scale"].float()
            decoded = compressor.decompress(state, scheme)["weight"]
            two_levels = "weight_global_scale" in state  # their quotient rounds to BF16 too
            self.assert_same(decoded, ours[module + ".weight"], module, bound=2**-7 if two_levels else 0.0)
            if two_levels:
                rows, columns = state["weight_packed"].shape
                decoded = dequantize(unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * columns).float(),
                                     scale=state["weight_scale"].float(), args=scheme.weights,
                                     global_scale=state["weight_global_scale"], dtype=torch.float32)
                self.assert_same(decoded, ours[module + ".weight"], module, bound=2**-22)

    def assert_modelopt(self, folder, ours):
        tensors = tensors_of(folder)
        algorithm = config_of(folder)["quantization_config"]["quant_algo"]
        modules = modules_of(tensors, "weight_scale")
        self.assertEqual(len(modules), 2 * EXPERTS * 3)
        for module in modules:
            weight, scale = tensors[module + ".weight"], tensors[module + ".weight_scale"]
            wanted = ours[module + ".weight"]
            if "NVFP4" in algorithm:
                self.assertEqual(module + ".input_scale" in tensors, algorithm == "NVFP4")
                packed = NVFP4QTensor(wanted.shape, torch.float32, weight)
                decoded = packed.dequantize(torch.float32, scale=scale, block_sizes={-1: 16},
                                            double_scale=tensors[module + ".weight_scale_2"])
            elif algorithm == "MXFP8":
                decoded = MXFP8QTensor(wanted.shape, torch.float32, weight).dequantize(
                    torch.float32, scale=scale, block_sizes={-1: 32})
            else:  # ModelOpt has no class for these: the product is the whole rule
                decoded = weight.float() * (scale[:, None] if scale.dim() == 1 else scale)
            self.assert_same(decoded, wanted, module, bound=2**-22 if "NVFP4" in algorithm else 0.0)

    def assert_transformers(self, folder, ours, config):
        """The fused experts of the model that transformers makes of it."""
        model, info = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32,
                                                           output_loading_info=True)
        self.assertFalse(info["missing_keys"])
        self.assertFalse(info["unexpected_keys"])
        self.assertFalse(info["mismatched_keys"])
        for number, layer in enumerate(model.model.layers):
            for expert in range(EXPERTS):
                stem = f"model.layers.{number}.mlp.experts.{expert}."
                both = torch.cat([ours[stem + "gate_proj.weight"], ours[stem + "up_proj.weight"]])
                for decoded, wanted in ((layer.mlp.experts.gate_up_proj[expert], both),
                                        (layer.mlp.experts.down_proj[expert], ours[stem + "down_proj.weight"])):
                    self.assert_same(decoded.detach(), wanted, stem)


    def test_transformers_loads_block_fp8(self):
        folder, ours = self.quantize("fp8_w8a8:block128", "deepseek")
        self.assert_transformers(folder, ours, FineGrainedFP8Config(dequantize=True))

    def test_modelopt_nvfp4_has_the_bytes_of_its_quantizer(self):
        folder, _ = self.quantize("nvfp4_w4a16", "modelopt")
        source, tensors = tensors_of(self.source), tensors_of(folder)
        for module in modules_of(tensors, "weight_scale"):
            parts = [module]
            if not module.endswith("down_proj"):  # one amax for gate and up
                stem = module.rsplit(".", 1)[0]
                parts = [stem + ".gate_proj", stem + ".up_proj"]
            amax = max(source[part + ".weight"].float().abs().max() for part in parts)
            packed, scale, second = NVFP4QTensor.quantize(
                source[module + ".weight"].float(), 16, weights_scaling_factor_2=amax / (6.0 * 448.0), try_tensorrt=False)
            self.assertTrue(torch.equal(second, tensors[module + ".weight_scale_2"]))
            self.assertTrue(torch.equal(scale.view(torch.uint8), tensors[module + ".weight_scale"].view(torch.uint8)))
            self.assertTrue(torch.equal(packed._quantized_data, tensors[module + ".weight"]))

    def test_compressed_tensors_bytes(self):
        """Codes and scales as the library computes them from the same weights, in F32 as observers do."""
        source = tensors_of(self.source)
        for scheme in ("mxfp4_w4a16", "mxfp8_w8a8", "fp8_w8a8:channel", "fp8_w8a8:block128", "int8_w8a8", "nvfp4_w4a16", "int4_w4a16:g32",
                       "int4_w4a16:g64", "int4_w4a16:g128", "int4_w4a16:channel", "int8_w8a16:g64", "int8_w8a16:channel"):
            folder, _ = self.quantize(scheme, "compressed-tensors")
            tensors, config = tensors_of(folder), self.configuration(folder)
            arguments = next(iter(config.config_groups.values())).weights
            compressor = BaseCompressor.get_value_from_registry(config.format)
            for module in modules_of(tensors, "weight_scale"):
                weight = source[module + ".weight"].float()
                state = {"weight": weight}
                packed = config.format == "pack-quantized"  # scales in the type of the weights
                scaled = source[module + ".weight"] if packed else weight
                if arguments.strategy == "tensor_group":  # block scales in the type of the weights, the rest in F32
                    stem = module.rsplit(".", 1)[0]
                    fused = [module] if module.endswith("down_proj") else [stem + ".gate_proj", stem + ".up_proj"]
                    parts = [source[part + ".weight"].float() for part in fused]
                    # torch divides a number by a tensor by way of the reciprocal: two roundings instead of one.
                    theirs = generate_gparam(min(part.min() for part in parts), max(part.max() for part in parts))
                    ours = tensors[module + ".weight_global_scale"]
                    self.assertLess((theirs / ours - 1).abs().item(), 2**-22)
                    state["weight_global_scale"] = ours
                    groups = source[module + ".weight"].reshape(weight.shape[0], -1, arguments.group_size)
                    low, high = groups.amin(-1), groups.amax(-1)
                elif arguments.strategy == "group":
                    groups = scaled.reshape(weight.shape[0], -1, arguments.group_size)
                    low, high = groups.amin(-1), groups.amax(-1)
                elif arguments.strategy == "channel":
                    low, high = scaled.amin(1, keepdim=True), scaled.amax(1, keepdim=True)
                else:
                    rows, columns = arguments.block_structure
                    blocks = weight.reshape(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
                    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
                state["weight_scale"], state["weight_zero_point"] = calculate_qparams(
                    low, high, arguments, global_scale=state.get("weight_global_scale"))
                made = compressor.compress(state, next(iter(config.config_groups.values())))
                for suffix in ("weight", "weight_packed", "weight_scale", "weight_shape"):
                    if suffix == "weight_packed" and "weight_global_scale" in state:
                        continue  # its quotients depend on the device there
                    if suffix in made:
                        ours = tensors[f"{module}.{suffix}"]
                        self.assertEqual(ours.dtype, made[suffix].dtype, suffix)
                        self.assertTrue(torch.equal(ours.contiguous().view(torch.uint8),
                                                    made[suffix].contiguous().view(torch.uint8)),
                                        f"{scheme} {module}.{suffix}")

    def mixed(self, *schemes):
        """A layer of each scheme, one config group a layer; and their values."""
        folder, values = self.folder / ("mixed-" + "-".join(schemes)).replace(":", "_"), {}
        folder.mkdir(exist_ok=True)
        groups, tensors = {}, {}
        for number, scheme in enumerate(schemes):
            made, ours = self.quantize(scheme, "compressed-tensors")
            config = config_of(made)
            group = next(iter(config["quantization_config"]["config_groups"].values()))
            groups[f"group_{number}"] = {**group, "targets": [f"re:.*layers\\.{number}\\.mlp\\.experts\\..*"]}
            # What belongs to no layer comes with the first.
            tensors |= {name: tensor for name, tensor in tensors_of(made).items()
                        if f".layers.{number}." in name or (number == 0 and ".layers." not in name)}
            values |= {name: tensor for name, tensor in ours.items() if f".layers.{number}." in name}
        config["quantization_config"].update(config_groups=groups, format="mixed-precision")
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors")
        return folder, values

    def test_layers_of_different_schemes(self):
        """One config group a layer, each with a format of its own."""
        folder, _ = self.mixed("int4_w4a16:g32", "fp8_w8a8:channel")
        layers = self.run_command("inspect", folder)["layers"]
        self.assertEqual([layer["scheme"] for layer in layers], ["int4_w4a16:g32", "fp8_w8a8"])
        for layer in (0, 1):
            self.run_command("run", folder, "--layer", layer, "--input", self.folder / "hidden.safetensors", "--output",
                             self.folder / "mixed.safetensors", "--check")

    def test_convert_keeps_schemes_apart(self):
        """To ModelOpt's MIXED_PRECISION and back; the library finds each module in the group that decodes it."""
        folder, ours = self.mixed("nvfp4_w4a16", "fp8_w8a8:channel")
        modelopt, _ = self.convert(folder, "modelopt")
        theirs = convert_hf_quant_config_format(json.loads((modelopt / "hf_quant_config.json").read_text()))
        written = config_of(modelopt)["quantization_config"]
        self.assertEqual(written["quantized_layers"], theirs["quantized_layers"])
        self.assertEqual(sorted(sorted(group["targets"]) for group in written["config_groups"].values()),
                         sorted(sorted(group["targets"]) for group in theirs["config_groups"].values()))
        back, _ = self.convert(modelopt, "compressed-tensors")
        config, tensors = self.configuration(back), tensors_of(back)
        self.assertEqual(len(config.config_groups), 2)
        decoded = 0
        for module in modules_of(tensors, "weight_scale"):
            [scheme] = [scheme for scheme in config.config_groups.values()
                        if any(match_name(module, target) for target in scheme.targets)]
            self.assertFalse(any(match_name(module, name) for name in config.ignore))
            state = {name[len(module) + 1:]: tensor for name, tensor in tensors.items() if name.startswith(module + ".")}
            if scheme.format == "nvfp4-pack-quantized":
                rows, columns = state["weight_packed"].shape
                found = dequantize(unpack_fp4_from_uint8(state["weight_packed"], rows, 2 * columns).float(),
                                   scale=state["weight_scale"].float(), args=scheme.weights,
                                   global_scale=state["weight_global_scale"], dtype=torch.float32)
                self.assert_same(found, ours[module + ".weight"], module, bound=2**-21)
            else:
                found = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
                self.assert_same(found, ours[module + ".weight"], module)
            decoded += 1
        self.assertEqual(decoded, 2 * EXPERTS * 3)

    def test_convert_smoothed_modelopt(self):
        """NVFP4_AWQ: factors stay with ModelOpt, and are part of plain weights."""
        folder, ours = self.quantize("nvfp4_w4a4", "modelopt")
        source = self.folder / "awq"
        source.mkdir(exist_ok=True)
        tensors, factors = tensors_of(folder), {}
        torch.manual_seed(5)
        for module in modules_of(tensors, "weight_scale"):
            factors[module] = torch.rand(2 * tensors[module + ".weight"].shape[1]) + 0.5
            tensors[module + ".pre_quant_scale"] = factors[module]
        config = config_of(folder)
        config["quantization_config"]["quant_algo"] = "NVFP4_AWQ"
        (source / "config.json").write_text(json.dumps(config))
        save_file(tensors, source / "model.safetensors")
        kept, plain = self.convert(source, "modelopt")
        side = json.loads((kept / "hf_quant_config.json").read_text())
        self.assertEqual(side["quantization"]["quant_algo"], "NVFP4_AWQ")
        after = tensors_of(kept)
        for module, factor in factors.items():
            self.assertTrue(torch.equal(after[module + ".pre_quant_scale"], factor))
            self.assertTrue(torch.equal(after[module + ".weight"], tensors[module + ".weight"]))
            self.assertTrue(torch.equal(plain[module + ".weight"], ours[module + ".weight"] * factor), module)

    def test_convert_gpt_oss_form(self):
        """From compressed-tensors back to the bytes of the released layout, which transformers dequantizes."""
        original = GOLDEN / "gpt_oss-mxfp4"
        there, plain = self.convert(original, "compressed-tensors")
        back, _ = self.convert(there, "gpt-oss")
        before, after = tensors_of(original), tensors_of(back)
        for name in before:
            if ".experts." in name:
                self.assertTrue(torch.equal(before[name], after[name]), name)
        model, info = AutoModelForCausalLM.from_pretrained(back, quantization_config=Mxfp4Config(dequantize=True),
                                                           dtype=torch.float32, output_loading_info=True)
        self.assertFalse(info["missing_keys"])
        experts = model.model.layers[0].mlp.experts
        stem = "model.layers.0.mlp.experts.{}.{}.weight"
        for expert in range(experts.gate_up_proj.shape[0]):
            self.assert_same(experts.gate_up_proj[expert, :, 0::2].T.detach(), plain[stem.format(expert, "gate_proj")], "gate")
            self.assert_same(experts.gate_up_proj[expert, :, 1::2].T.detach(), plain[stem.format(expert, "up_proj")], "up")
            self.assert_same(experts.down_proj[expert].T.detach(), plain[stem.format(expert, "down_proj")], "down")

    def test_convert_refuses_negative_scales(self):
        source = GOLDEN / "qwen3_moe-autoround-w4a16"
        error = self.run_command("convert", source, "--to", "compressed-tensors", "--output", self.folder / "no", expect=4)
        self.assertIn("negative", error["error"]["message"])
        self.run_command("convert", source, "--to", "f32", "--output", self.folder / "yes")

    def configuration(self, folder):
        return QuantizationConfig.model_validate(
            {key: value for key, value in config_of(folder)["quantization_config"].items() if key != "quant_method"})

    def convert(self, source, form, *more):
        """The folder of the converted checkpoint and the values of its source."""
        target, plain = self.folder / f"{source.name}-to-{form}", self.folder / f"{source.name}-plain"
        self.run_command("convert", source, "--to", form, "--output", target, "--force", *more)
        self.run_command("convert", source, "--to", "f32", "--output", plain, "--force")
        return target, tensors_of(plain)

    def test_convert_nvfp4_there_and_back(self):
        folder, ours = self.quantize("nvfp4_w4a4", "modelopt")
        there, _ = self.convert(folder, "compressed-tensors")
        self.assert_compressed_tensors(there, ours)
        back, _ = self.convert(there, "modelopt")
        self.assert_modelopt(back, ours)
        before, after = tensors_of(folder), tensors_of(back)
        for name, tensor in before.items():
            if name.endswith(("weight", "weight_scale")):
                self.assertTrue(torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name)

    def test_convert_plain_loads_in_transformers(self):
        folder, ours = self.quantize("mxfp4_w4a16", "compressed-tensors")
        plain, _ = self.convert(folder, "bf16")
        self.assert_transformers(plain, ours, None)


def add_scheme_tests():
    def compressed_tensors(scheme):
        def test(self):
            self.assert_compressed_tensors(*self.quantize(scheme, "compressed-tensors"))
        return test

    def modelopt(scheme):
        def test(self):
            self.assert_modelopt(*self.quantize(scheme, "modelopt"))
        return test

    for scheme in COMPRESSED_TENSORS:
        setattr(Quantized, f"test_compressed_tensors_{scheme.replace(':', '_')}", compressed_tensors(scheme))
    for scheme in MODELOPT:
        setattr(Quantized, f"test_modelopt_{scheme.replace(':', '_')}", modelopt(scheme))


def add_transformers_tests():
    def loads(scheme):
        def test(self):
            folder, ours = self.quantize(scheme, "compressed-tensors")
            self.assert_transformers(folder, ours, CompressedTensorsConfig(dequantize=True))
        return test

    # What transformers 5.23 can load of fused experts: it drops the global scale of NVFP4 and knows no unpacked INT8.
    for scheme in ("fp8_w8a8:channel", "fp8_w8a8:tensor", "fp8_w8a16:channel", "mxfp4_w4a16", "int8_w8a16:channel",
                   "int8_w8a16:g64", "int4_w4a16:g32", "int4_w4a16:g128", "int4_w4a16:channel"):
        setattr(Quantized, f"test_transformers_loads_{scheme.replace(':', '_')}", loads(scheme))


def add_convert_tests():
    def converted(name):
        def test(self):
            self.assert_compressed_tensors(*self.convert(GOLDEN / name, "compressed-tensors"))
        return test

    for name in ("mixtral-awq-g32", "qwen3_moe-gptq-g32", "qwen3_moe-quark-mxfp4", "gpt_oss-mxfp4",
                 "deepseek_v3-fp8-block", "mixtral-quark-fp8", "mixtral-modelopt-nvfp4", "qwen3_moe-modelopt-fp8"):
        setattr(Quantized, f"test_convert_{name.replace('-', '_')}", converted(name))


add_scheme_tests()
add_transformers_tests()
add_convert_tests()

if __name__ == "__main__":
    unittest.main()
