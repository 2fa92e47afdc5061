"""The Python package under torch and transformers: tensors of torch and NumPy, the operator, whole models."""

import copy
import os
import re
import signal
import subprocess
import sys
import unittest
from types import SimpleNamespace

from support import MISSING, ROOT, Case, save_model

sys.path.insert(0, str(ROOT / "python"))
if not MISSING:
    import numpy
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import moe

    import fusedmoe
    import fusedmoe.torch
    import fusedmoe.transformers

SIZES = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "num_experts": 8,
         "num_local_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "initializer_range": 0.2, "norm_topk_prob": True}


def small(model_type, **more):
    defaults = AutoConfig.for_model(model_type)
    return AutoConfig.for_model(model_type, **{k: v for k, v in {**SIZES, **more}.items() if hasattr(defaults, k)})


def relative(value, expected):
    return ((value.float() - expected.float()).norm() / expected.float().norm()).item()


class Python(Case):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        fusedmoe.set_num_threads(2)
        cls.source = cls.folder / "qwen3"
        cls.model = save_model(small("qwen3_moe"), cls.source, dtype=torch.float32).eval()
        cls.tokens = torch.arange(12).reshape(2, 6)
        with torch.no_grad():
            cls.logits = cls.model(cls.tokens).logits

    def fresh(self, **options):
        return AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32, **options).eval()

    def test_tensors_that_memory_does_not_say_are_refused(self):
        layer = fusedmoe.Checkpoint(self.source).load_layer(0, max_tokens=32)
        hidden = torch.randn(3, 64)
        with self.assertRaisesRegex(ValueError, r"hidden is a view that negates its memory: give its resolve_neg\(\)"):
            layer(torch._neg_view(hidden))
        self.assertTrue(torch.equal(layer(torch._neg_view(hidden).resolve_neg()), layer(-hidden)))
        with self.assertRaisesRegex(fusedmoe.Error, "output is BF16, the layer takes F32$"):
            layer(hidden, out=torch.empty(3, 64, dtype=torch.bfloat16))
        for wrong in (hidden > 0, (hidden > 0).numpy()):
            with self.assertRaisesRegex(fusedmoe.Error, "hidden is BOOL, the layer takes"):
                layer(wrong)

    def test_children_forked_while_a_lock_is_held_compute(self):
        """torch's own kernels are no part of it: its threads do not survive a fork."""
        experts = self.fresh(experts_implementation="fusedmoe").model.layers[0].mlp.experts
        hidden, ids, weights = torch.randn(1, 64), torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]])
        with torch.no_grad():
            expected = fusedmoe.transformers.experts_forward(experts, hidden, ids, weights)
            with fusedmoe.transformers._lock:  # as another thread would hold it
                child = os.fork()
                if child == 0:
                    signal.alarm(30)
                    found = fusedmoe.transformers.experts_forward(experts, hidden, ids, weights)
                    os._exit(0 if torch.equal(found, expected) else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_torch_and_numpy_give_the_same_bits(self):
        layer = fusedmoe.Checkpoint(self.source).load_layer(0, max_tokens=32)
        hidden = torch.randn(7, 64)
        expected, ids, weights = layer(hidden, return_routing=True)
        self.assertEqual((expected.dtype, ids.dtype, tuple(weights.shape)), (torch.float32, torch.int32, (7, 2)))
        self.assertTrue(numpy.array_equal(layer(hidden.numpy()), expected.numpy()))
        self.assertTrue(torch.equal(layer(hidden, topk_ids=ids.long(), topk_weights=weights), expected))
        wide = torch.zeros(7, 128)
        wide[:, :64] = hidden
        self.assertTrue(torch.equal(layer(wide[:, :64]), expected))  # rows with gaps between them
        with self.assertRaisesRegex(ValueError, "contiguous"):
            layer(wide[:, ::2])
        self.assertEqual(layer(torch.empty(0, 64)).shape, (0, 64))
        self.assertEqual(layer(numpy.empty((0, 64), numpy.float32)).shape, (0, 64))
        half = layer(hidden.bfloat16())
        self.assertEqual(half.dtype, torch.bfloat16)
        self.assertLess(relative(half, expected), 2**-7)

    def test_tensors_that_would_be_misread_are_refused(self):
        layer = fusedmoe.Checkpoint(self.source).load_layer(0, max_tokens=32)
        hidden = numpy.ones((3, 64), numpy.float32)
        with self.assertRaisesRegex(TypeError, "other byte order"):
            layer(hidden.astype(hidden.dtype.newbyteorder()))
        kept = hidden.copy()
        kept.setflags(write=False)
        with self.assertRaisesRegex(ValueError, "out is read-only"):
            layer(hidden, out=kept)
        self.assertEqual(layer(kept).shape, (3, 64))
        with self.assertRaisesRegex(ValueError, "hidden lies on meta, the layer on cpu"):
            layer(torch.empty(3, 64, device="meta"))
        for flat in (hidden[0], hidden[None]):
            with self.assertRaisesRegex(fusedmoe.Error, r"the layer needs \[tokens, 64\]"):
                layer(flat)

    def test_rows_that_share_memory_are_refused(self):
        layer = fusedmoe.Checkpoint(self.source).load_layer(0, max_tokens=32)
        hidden, ids, halves = torch.randn(8, 64), torch.ones(8, 2, dtype=torch.int32), torch.full((1, 2), 0.5)
        expected = layer(hidden, topk_ids=ids, topk_weights=halves.repeat(8, 1))
        self.assertTrue(torch.isfinite(expected).all())
        for arguments in ({"hidden": hidden, "topk_ids": ids, "topk_weights": halves.expand(8, 2)},
                          {"hidden": numpy.broadcast_to(numpy.ones(64, numpy.float32), (8, 64))},
                          {"hidden": hidden, "out": torch.zeros(1, 64).expand(8, 64)}):
            with self.assertRaisesRegex(ValueError, "stride 0"):
                layer(**arguments)
        with self.assertRaisesRegex(ValueError, "expert 0, up.codes has the same memory"):
            fusedmoe.Layer.create([{"up": torch.zeros(1, 64).expand(32, 64), "down": torch.zeros(64, 32)}], top_k=1)

    def experts_on(self, device):
        """Two experts, and one whose tensor of that name lies elsewhere."""
        def expert():
            return {"up": {"codes": torch.randn(32, 64).bfloat16(), "bias": torch.randn(32)},
                    "down": {"codes": torch.randn(64, 32).bfloat16(), "bias": torch.randn(64)}}

        for part, name in (("up", "codes"), ("down", "bias")):
            away = expert()
            away[part][name] = away[part][name].to(device)
            yield f"expert 1, {part}.{name}", [expert(), away]

    def check_weights_elsewhere(self, device):
        options = {"top_k": 1, "activation": "relu_no_mul", "max_tokens": 8}
        where = rf"lies on {device}; weights are read from host memory \(use \.cpu\(\)\)$"
        for name, experts in self.experts_on(device):
            with self.assertRaisesRegex(ValueError, f"^{name} {where}"):
                fusedmoe.Layer.create(experts, **options)
        fine = next(self.experts_on("cpu"))[1]
        for name in ("router_weight", "router_bias"):
            with self.assertRaisesRegex(ValueError, f"^{name} {where}"):
                fusedmoe.Layer.create(fine, **{name: torch.randn(2, 64).to(device)}, **options)
        w13, w2 = torch.randn(2, 64, 64), torch.randn(2, 64, 32)
        for w13_device, w2_device, bias_device, name in ((device, "cpu", "cpu", "w1"), ("cpu", device, "cpu", "w2"),
                                                         ("cpu", "cpu", device, "w2_bias")):
            stacked = fusedmoe.Stacked(w13.to(w13_device), w2.to(w2_device), {"w1_bias": torch.zeros(2, 64),
                                                                              "w2_bias": torch.zeros(2, 64).to(bias_device)})
            with self.assertRaisesRegex(ValueError, f"^{name} {where}"):
                fusedmoe.Layer.create(stacked, top_k=1, dtype="F32", max_tokens=8)

    def test_weights_that_have_no_memory_are_refused(self):
        self.check_weights_elsewhere("meta")

    def test_weights_on_a_card_are_refused(self):
        if not torch.cuda.is_available():
            self.skipTest("no card")
        self.check_weights_elsewhere("cuda:0")

    def test_models_on_a_card(self):
        if not torch.cuda.is_available():
            self.skipTest("no card")
        with torch.no_grad():
            ours = self.fresh(experts_implementation="fusedmoe").cuda()
            self.assertLess(relative(ours(self.tokens.cuda()).logits.cpu(), self.logits), 1e-2)
        with self.assertRaisesRegex(ValueError, r"experts lies on cuda:0, its layer would be on cpu: give device='cuda'"):
            fusedmoe.transformers.replace_experts(ours, self.source)
        fusedmoe.transformers.replace_experts(ours, self.source, device="cuda", max_tokens=64)
        with torch.no_grad():
            self.assertLess(relative(ours(self.tokens.cuda()).logits.cpu(), self.logits), 1e-2)

    def test_nothing_is_replaced_in_models_that_do_not_fit(self):
        model = self.fresh()
        kinds = {name: type(module) for name, module in model.named_modules()}
        with self.assertRaisesRegex(ValueError, "mlp.experts lies on cpu, its layer would be on cuda: give device='cpu'"):
            fusedmoe.transformers.replace_experts(model, self.source, device="cuda")
        model.model.layers[1].mlp.experts.num_experts = 4
        with self.assertRaisesRegex(ValueError, "layers.1.mlp.experts.num_experts is 4"):
            fusedmoe.transformers.replace_experts(model, self.source, max_tokens=64)
        self.assertEqual({name: type(module) for name, module in model.named_modules()}, kinds)
        with torch.device("meta"):  # memory for experts that are not kept is not needed
            empty = AutoModelForCausalLM.from_config(small("qwen3_moe"), dtype=torch.float32)
        self.assertEqual(len(fusedmoe.transformers.replace_experts(empty, self.source, max_tokens=64)), 2)

    def test_more_tokens_than_a_call_takes(self):
        checkpoint = fusedmoe.Checkpoint(self.source)
        whole, small_one = (checkpoint.load_layer(0, max_tokens=size, determinism="batch_invariant") for size in (64, 7))
        hidden = torch.randn(20, 64)
        expected, ids, weights = whole(hidden, return_routing=True)
        experts = fusedmoe.torch.Experts(small_one)
        for rows in (20, 14, 8, 7, 0):
            found = experts(hidden[:rows].reshape(-1, 1, 64), ids[:rows], weights[:rows])
            self.assertTrue(torch.equal(found.reshape(-1, 64), expected[:rows]), rows)
        compiled = torch.compile(experts, fullgraph=True, backend="eager")
        self.assertTrue(torch.equal(compiled(hidden, ids, weights), expected))
        with self.assertRaisesRegex(fusedmoe.Error, "20"):
            small_one(hidden, topk_ids=ids, topk_weights=weights)

        matrix = {"codes": torch.ones(64, 64).to(torch.float8_e4m3fn), "tensor_scale": 1.0}
        batch = fusedmoe.Layer.create([{"up": matrix, "down": matrix}] * 2, top_k=2, scheme="fp8_w8a8:tensor",
                                      activation="relu_no_mul", max_tokens=7)
        self.assertTrue(batch.info.batch_scale)
        with self.assertRaisesRegex(fusedmoe.Error, "20"):  # pieces would have scales of their own
            fusedmoe.torch.Experts(batch)(hidden, ids % 2, weights)

    def test_models_of_many_tokens(self):
        ours = self.fresh(experts_implementation="fusedmoe")
        experts = ours.model.layers[0].mlp.experts
        tokens = 8192 + 5
        hidden, ids, weights = torch.randn(tokens, 64), torch.randint(0, 8, (tokens, 2)), torch.rand(tokens, 2)
        with torch.no_grad():
            found = fusedmoe.transformers.experts_forward(experts, hidden, ids, weights)
            last = fusedmoe.transformers.experts_forward(experts, hidden[-5:], ids[-5:], weights[-5:])
        self.assertEqual(found.shape, hidden.shape)
        self.assertLess(relative(found[-5:], last), 1e-3)

    def test_example_of_the_documentation(self):
        page = (ROOT / "docs" / "python.md").read_text()
        example = re.search(r"<!-- run by tests/interop/python_test.py -->\n```python\n(.*?)```", page, re.S).group(1)
        names = {"CHECKPOINT": self.source}
        exec(compile(example, "docs/python.md", "exec"), names)
        self.assertEqual(names["output"].dtype, torch.bfloat16)
        self.assertFalse(torch.equal(names["output"], names["again"]))  # random logits choose others

    def test_types(self):
        try:
            import mypy  # noqa: F401
        except ImportError:
            self.skipTest("needs mypy")
        checked = subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(self.folder / "mypy")],
                                 cwd=ROOT / "python", capture_output=True, text=True, timeout=300)
        self.assertEqual(checked.returncode, 0, checked.stdout)

    def test_routing_of_the_caller(self):
        def route(hidden, logits, top_k):
            weights, ids = torch.topk(torch.sigmoid(logits), top_k)
            return ids, weights

        layer = fusedmoe.Checkpoint(self.source).load_layer(0, max_tokens=32, routing=route)
        hidden, logits = torch.randn(7, 64), torch.randn(7, 8)
        ids, weights = route(hidden, logits, 2)
        self.assertTrue(torch.equal(layer(hidden, router_logits=logits),
                                    layer(hidden, topk_ids=ids, topk_weights=weights)))

    def test_on_a_card(self):
        if not torch.cuda.is_available():
            self.skipTest("needs a card")
        checkpoint = fusedmoe.Checkpoint(self.source)
        try:
            layer = checkpoint.load_layer(0, device="cuda", max_tokens=32)
        except fusedmoe.Error as error:
            self.skipTest(str(error))
        hidden, ids, weights = torch.randn(7, 64).bfloat16(), torch.randint(0, 8, (7, 2)), torch.rand(7, 2)
        expected = checkpoint.load_layer(0, max_tokens=32)(hidden, topk_ids=ids, topk_weights=weights)
        moved = hidden.cuda(), ids.cuda(), weights.cuda()
        output = layer(moved[0], topk_ids=moved[1], topk_weights=moved[2])
        self.assertEqual(output.device.type, "cuda")
        self.assertLess(relative(output.cpu(), expected), 2**-6)
        with self.assertRaisesRegex(ValueError, "hidden lies on cpu, the layer on cuda"):
            layer(hidden)
        with self.assertRaisesRegex(ValueError, "topk_ids lies on cpu"):
            layer(moved[0], topk_ids=ids, topk_weights=weights)

        experts = fusedmoe.torch.Experts(layer)
        self.assertTrue(torch.equal(experts(*moved), output))
        compiled = torch.compile(experts, fullgraph=True, backend="eager")
        self.assertTrue(torch.equal(compiled(*moved), output))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            beside = experts(*moved)
        torch.cuda.current_stream().wait_stream(stream)
        self.assertTrue(torch.equal(beside, output))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts(*moved)
        moved[0].copy_(torch.randn(7, 64).bfloat16())
        graph.replay()
        self.assertTrue(torch.equal(captured, experts(*moved)))

        def route(rows, logits, top_k):
            chosen, order = torch.topk(torch.sigmoid(logits), top_k)
            return order, chosen

        logits = torch.randn(7, 8, device="cuda")
        routed = checkpoint.load_layer(0, device="cuda", max_tokens=32, routing=route)
        by_hand = route(moved[0], logits, 2)
        self.assertTrue(torch.equal(routed(moved[0], router_logits=logits),
                                    layer(moved[0], topk_ids=by_hand[0], topk_weights=by_hand[1])))

    def test_operator_is_one_node(self):
        experts = fusedmoe.torch.Experts(fusedmoe.Checkpoint(self.source).load_layer(0, max_tokens=32))
        hidden, ids = torch.randn(2, 3, 64), torch.randint(0, 8, (6, 2))
        weights = torch.rand(6, 2)
        expected = experts(hidden, ids, weights)
        self.assertEqual(expected.shape, hidden.shape)
        compiled = torch.compile(experts, fullgraph=True, backend="eager")
        self.assertTrue(torch.equal(compiled(hidden, ids, weights), expected))
        torch.library.opcheck(torch.ops.fusedmoe.experts.default,
                              (hidden.reshape(-1, 64), ids.int(), weights, experts._number))
        beyond = ids.clone()
        beyond[:, 1] = 8  # what transformers writes for an expert of another rank
        alone = weights * torch.tensor([1.0, 0.0])
        self.assertLess(relative(experts(hidden, beyond, weights), experts(hidden, ids, alone)), 1e-6)

    def test_experts_of_the_model_in_memory(self):
        for model_type in ("qwen3_moe", "mixtral", "gpt_oss"):
            with self.subTest(model_type):
                folder = self.folder / f"memory-{model_type}"
                model = save_model(small(model_type, intermediate_size=48), folder, dtype=torch.float32).eval()
                ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                            experts_implementation="fusedmoe").eval()
                with torch.no_grad():
                    if model_type == "gpt_oss":
                        with self.assertRaisesRegex(NotImplementedError, "replace_experts"):
                            ours(self.tokens)
                        continue
                    self.assertLess(relative(ours(self.tokens).logits, model(self.tokens).logits), 1e-3)

    def test_weights_that_change_are_taken_again(self):
        ours = self.fresh(experts_implementation="fusedmoe")
        with torch.no_grad():
            before = ours(self.tokens).logits
            ours.model.layers[0].mlp.experts.down_proj.mul_(-1.5)
            self.model.model.layers[0].mlp.experts.down_proj.mul_(-1.5)
            try:
                expected = self.model(self.tokens).logits
            finally:
                self.model.model.layers[0].mlp.experts.down_proj.div_(-1.5)
            after = ours(self.tokens).logits
        self.assertGreater(relative(after, before), 1e-2)
        self.assertLess(relative(after, expected), 1e-3)

    def test_weights_with_other_memory_are_taken_again(self):
        class Experts(torch.nn.Module):  # of no model that transformers has: biases and a plain gate
            has_gate = has_bias = is_concatenated = True
            is_transposed = False
            _apply_gate = moe._default_apply_gate
            config = SimpleNamespace(hidden_act="silu")

            def __init__(self):
                super().__init__()
                shapes = {"gate_up_proj": (4, 64, 64), "down_proj": (4, 64, 32), "gate_up_proj_bias": (4, 64), "down_proj_bias": (4, 64)}
                for name, shape in shapes.items():
                    setattr(self, name, torch.nn.Parameter(0.1 * torch.randn(shape)))

        torch.manual_seed(3)
        experts, routed = Experts(), (torch.randn(5, 64), torch.randint(0, 4, (5, 2)), torch.rand(5, 2))
        forward = fusedmoe.transformers.experts_forward
        with torch.no_grad():
            before = forward(experts, *routed)
            for name, parameter in experts.named_parameters():
                for change in (lambda: setattr(parameter, "data", parameter.data * -1.5), lambda: parameter.mul_(0.5)):
                    change()
                    after = forward(experts, *routed)
                    self.assertGreater(relative(after, before), 1e-3, name)
                    self.assertTrue(torch.equal(after, forward(copy.deepcopy(experts), *routed)), name)
                    before = after

    def test_models_that_ran_can_be_copied_and_saved(self):
        ours = self.fresh(experts_implementation="fusedmoe")
        with torch.no_grad():
            expected = ours(self.tokens).logits
            twin = copy.deepcopy(ours)
            torch.save(ours, self.folder / "model.pt")
            read = torch.load(self.folder / "model.pt", weights_only=False)
            ours.model.layers[0].mlp.experts.down_proj.zero_()
            for model in (twin, read):
                self.assertTrue(torch.equal(model(self.tokens).logits, expected))
            self.assertFalse(torch.equal(ours(self.tokens).logits, expected))
        fusedmoe.transformers.replace_experts(ours, self.source, max_tokens=64)
        with self.assertRaisesRegex(TypeError, "a Layer cannot be copied"):
            copy.deepcopy(ours)

    def test_experts_of_a_checkpoint(self):
        for model_type in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
            with self.subTest(model_type):
                folder = self.folder / f"replaced-{model_type}"
                more = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                        "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
                        "v_head_dim": 16, "num_key_value_heads": 4} if model_type == "deepseek_v3" else {}
                model = save_model(small(model_type, **more), folder, dtype=torch.float32).eval()
                with torch.no_grad():
                    expected = model(self.tokens).logits
                    replaced = fusedmoe.transformers.replace_experts(model, folder, max_tokens=64)
                    self.assertEqual(len(replaced), 1 if model_type == "deepseek_v3" else 2)
                    self.assertLess(relative(model(self.tokens).logits, expected), 1e-3)

    def test_experts_of_a_quantized_checkpoint(self):
        quantized = self.folder / "int8"
        self.run_command("quantize", self.source, "--scheme", "int8_w8a16", "--output", quantized)
        model = self.fresh()
        names = fusedmoe.transformers.replace_experts(model, quantized)
        self.assertEqual(names, ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"])
        self.assertIn("int8_w8a16", repr(model))
        with torch.no_grad():
            # Each weight moves by at most half a step of its channel, 1/254 of the largest: about 1 % of a layer.
            error = relative(model(self.tokens).logits, self.logits)
        self.assertLess(error, 0.03)
        self.assertGreater(error, 1e-5)
        with self.assertRaisesRegex(ValueError, "num_experts is 4"):
            other = AutoModelForCausalLM.from_config(small("qwen3_moe", num_experts=4, num_local_experts=4), dtype=torch.float32)
            fusedmoe.transformers.replace_experts(other, quantized)

    def test_quantized_weights_in_memory(self):
        layer = fusedmoe.Checkpoint(self.source).load_layer(0, max_tokens=32)
        state = self.model.state_dict()
        gate_up, down = (state[f"model.layers.0.mlp.experts.{name}"] for name in ("gate_up_proj", "down_proj"))

        def fp8(matrix):
            scale = matrix.abs().amax(1) / 448
            return {"codes": (matrix / scale[:, None]).to(torch.float8_e4m3fn), "channel_scale": scale.contiguous()}

        experts = [{"gate": fp8(gate_up[e, :48]), "up": fp8(gate_up[e, 48:]), "down": fp8(down[e])} for e in range(8)]
        made = fusedmoe.Layer.create(experts, top_k=2, scheme="fp8_w8a16", max_tokens=32)
        hidden = torch.randn(9, 64)
        expected, ids, weights = layer(hidden, return_routing=True)
        # e4m3 rounds each weight by at most 2^-4 of itself, some 2.6 % root mean square in each of two products.
        self.assertLess(relative(made(hidden, topk_ids=ids, topk_weights=weights), expected), 0.06)
        again = {name: value.view(torch.uint8) if name == "codes" else value for name, value in experts[0]["up"].items()}
        bytes_too = [{**experts[0], "up": again}, *experts[1:]]
        same = fusedmoe.Layer.create(bytes_too, top_k=2, scheme="fp8_w8a16", max_tokens=32)
        self.assertTrue(torch.equal(same(hidden, topk_ids=ids, topk_weights=weights),
                                    made(hidden, topk_ids=ids, topk_weights=weights)))

    def test_stacked_experts_of_torch(self):
        # FP8 weights in blocks, beside which a FusedMoEQuantConfig shows no block_shape; and MXFP4 as gpt-oss has it.
        experts, hidden, inner = 4, 256, 128
        w13, w2 = (torch.randn(experts, *shape).to(torch.float8_e4m3fn) for shape in ((2 * inner, hidden), (hidden, inner)))
        s13, s2 = (torch.rand(experts, w.shape[1] // 128, w.shape[2] // 128) / 64 for w in (w13, w2))
        quant = SimpleNamespace(quant_dtype=None, weight_quant_dtype=torch.float8_e4m3fn, block_shape=None, w1_scale=s13,
                                w2_scale=s2, _w1=SimpleNamespace(shape=SimpleNamespace(row=128, col=128)))
        x, logits = torch.randn(5, hidden, dtype=torch.bfloat16), torch.randn(5, experts)
        stacked = fusedmoe.Layer.create(fusedmoe.Stacked(w13, w2, quant), top_k=2, max_tokens=8)
        self.assertEqual(stacked.info.scheme, "fp8_w8a16:block128")
        single = [{name: {"codes": codes[e], "block_scale": scale[e]} for name, codes, scale in (
            ("gate", w13[:, :inner], s13[:, :1]), ("up", w13[:, inner:], s13[:, 1:]), ("down", w2, s2))} for e in range(experts)]
        one_by_one = fusedmoe.Layer.create(single, top_k=2, scheme="fp8_w8a16:block128", max_tokens=8)
        self.assertTrue(torch.equal(stacked(x, router_logits=logits), one_by_one(x, router_logits=logits)))

        w13, w2 = (torch.randint(0, 256, (experts, *shape), dtype=torch.uint8) for shape in ((2 * inner, 128), (hidden, 64)))
        s13, s2 = (torch.randint(115, 122, (experts, w.shape[1], w.shape[2] // 16), dtype=torch.uint8) for w in (w13, w2))
        b13, b2 = (torch.randn(experts, w.shape[1], dtype=torch.bfloat16) for w in (w13, w2))
        quant = {"weight_quant_dtype": "mxfp4", "w1_scale": s13, "w2_scale": s2, "w1_bias": b13, "w2_bias": b2,
                 "gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}
        options = {"top_k": 2, "activation": "swigluoai", "max_tokens": 8}
        stacked = fusedmoe.Layer.create(fusedmoe.Stacked(w13, w2, quant, order="interleaved"), **options)
        e8m0 = torch.float8_e8m0fnu
        single = [{name: {"codes": codes[e], "block_scale": scale[e].view(e8m0), "bias": bias[e].float().contiguous()}
                   for name, codes, scale, bias in (("gate", w13[:, ::2], s13[:, ::2], b13[:, ::2]),
                                                    ("up", w13[:, 1::2], s13[:, 1::2], b13[:, 1::2]), ("down", w2, s2, b2))}
                  for e in range(experts)]
        one_by_one = fusedmoe.Layer.create(single, scheme="mxfp4_w4a16", **options)
        self.assertTrue(torch.equal(stacked(x, router_logits=logits), one_by_one(x, router_logits=logits)))
        with self.assertRaisesRegex(ValueError, r"w1 lies on meta; weights are read from host memory \(use \.cpu\(\)\)"):
            fusedmoe.Layer.create(fusedmoe.Stacked(w13.to("meta"), w2, quant), **options)

    def test_layer_on_a_card(self):
        if not torch.cuda.is_available():
            self.skipTest("no card")
        checkpoint = fusedmoe.Checkpoint(ROOT / "tests/golden/checkpoints/qwen3_moe-modelopt-w4a16_nvfp4")
        number = checkpoint.moe_layers[0]
        on_cpu = checkpoint.load_layer(number, max_tokens=32)
        try:
            on_card = checkpoint.load_layer(number, max_tokens=32, device="cuda")
        except fusedmoe.Error as error:
            if "were left out of this build" not in error.message:
                raise
            self.skipTest("the kernels for nvfp4 were left out of this build (FMOE_CUDA_FORMATS)")
        hidden = torch.randn(9, on_cpu.info.hidden).bfloat16()
        expected, ids, weights = on_cpu(hidden, return_routing=True)
        card_hidden = hidden.cuda()
        output, card_ids, _ = on_card(card_hidden, return_routing=True)
        self.assertTrue(torch.equal(card_ids.cpu(), ids))
        # Weights rounded alike, sums in another order, the output in BF16: steps of 2^-8 at most.
        self.assertLess(relative(output.cpu(), expected), 2**-7)
        with self.assertRaisesRegex(ValueError, "lies on cpu"):
            on_card(hidden)
        with self.assertRaisesRegex(ValueError, "topk_ids lies on cpu, hidden on cuda:0"):
            on_card(card_hidden, topk_ids=ids, topk_weights=weights)
        if torch.cuda.device_count() > 1:
            with self.assertRaisesRegex(ValueError, "lies on cuda:1, the layer on cuda:0"):
                on_card(card_hidden.to("cuda:1"))
            with torch.cuda.device(1):
                self.assertTrue(torch.equal(on_card(card_hidden), output))
        experts = fusedmoe.torch.Experts(on_card)
        card_ids, card_weights = ids.cuda(), weights.cuda()
        experts(card_hidden, card_ids, card_weights)
        graph, static = torch.cuda.CUDAGraph(), card_hidden.clone()
        with torch.cuda.graph(graph):
            captured = experts(static, card_ids, card_weights)
        static.copy_(card_hidden * 0.5)
        graph.replay()
        torch.cuda.synchronize()
        self.assertTrue(torch.equal(captured, experts(card_hidden * 0.5, card_ids, card_weights)))


if __name__ == "__main__":
    unittest.main()
