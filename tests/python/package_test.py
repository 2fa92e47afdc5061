"""The Python package with nothing but Python: what it returns is what the command returns, bit by bit."""

import copy
import ctypes
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = Path(os.environ.get("FMOE_CLI", ROOT / "build" / "release" / "fusedmoe"))
CHECKPOINT = ROOT / "tests" / "golden" / "checkpoints" / "qwen3_moe-modelopt-nvfp4"
sys.path.insert(0, str(ROOT / "python"))

import fusedmoe  # noqa: E402
import fusedmoe.eplb  # noqa: E402


def read_safetensors(path):
    """Dtype, shape and bytes of each tensor."""
    data = Path(path).read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8:8 + size])
    return {name: (entry["dtype"], entry["shape"], data[8 + size:][slice(*entry["data_offsets"])])
            for name, entry in header.items() if name != "__metadata__"}


def matrix(data, shape, code="f"):
    """A writable matrix over a copy of these bytes."""
    return memoryview(bytearray(data)).cast(code, shape)


class Strided:
    """What the package reads of a NumPy array of float32, over a matrix of the test's."""

    __array_interface__ = flags = dtype = SimpleNamespace(name="float32", isnative=True, writeable=True)

    def __init__(self, memory, shape, strides, offset=0):
        self.memory, self.shape, self.strides = (ctypes.c_char * memory.nbytes).from_buffer(memory), shape, strides
        self.ctypes = SimpleNamespace(data=ctypes.addressof(self.memory) + offset)


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        fusedmoe.set_num_threads(2)
        cls.checkpoint = fusedmoe.Checkpoint(CHECKPOINT)
        cls.number = cls.checkpoint.moe_layers[-1]
        cls.layer = cls.checkpoint.load_layer(cls.number, max_tokens=16)
        info = cls.layer.info
        cls.values = [((i * 7919) % 1000 - 500) / 250 for i in range(5 * info.hidden)]
        cls.hidden = matrix(struct.pack(f"<{len(cls.values)}f", *cls.values), [5, info.hidden])

    def test_modules_come_when_they_are_asked_for(self):
        self.assertTrue(callable(fusedmoe.eplb.rebalance))
        with self.assertRaises(AttributeError):
            fusedmoe.nothing  # noqa: B018

    def test_what_a_layer_is(self):
        info = self.checkpoint.describe(self.number)
        self.assertEqual((self.checkpoint.family, self.checkpoint.producer), ("qwen3_moe", "modelopt"))
        self.assertEqual((info.scheme, info.backend), ("nvfp4_w4a4", ""))
        self.assertEqual(self.layer.info.backend, "CPU_FUSED")
        self.assertEqual(self.layer.info.max_tokens, 16)
        self.assertIn("CPU_FUSED", self.layer.plan)
        self.assertIn("REFERENCE", self.layer.selection)

    def test_output_has_the_bits_of_the_command(self):
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "in.safetensors", Path(folder) / "out.safetensors"
            data = bytes(self.hidden)
            header = json.dumps({"hidden_states": {"dtype": "F32", "shape": list(self.hidden.shape),
                                                   "data_offsets": [0, len(data)]}}).encode()
            source.write_bytes(struct.pack("<Q", len(header)) + header + data)
            subprocess.run([COMMAND, "run", CHECKPOINT, "--layer", str(self.number), "--input", source, "--output",
                            target], check=True, capture_output=True, timeout=60)
            expected = read_safetensors(target)
        out = matrix(bytes(len(bytes(self.hidden))), self.hidden.shape)
        self.assertIs(self.layer(self.hidden, out=out), out)
        self.assertEqual(bytes(out), expected["output"][2])
        again = matrix(bytes(out.nbytes), self.hidden.shape)
        ids = matrix(expected["topk_ids"][2], expected["topk_ids"][1], "i")
        weights = matrix(expected["topk_weights"][2], expected["topk_weights"][1])
        self.layer(self.hidden, topk_ids=ids, topk_weights=weights, out=again)
        self.assertEqual(bytes(again), bytes(out))

    def test_many_threads_share_a_layer(self):
        outputs = [matrix(bytes(self.hidden.nbytes), self.hidden.shape) for _ in range(8)]
        threads = [threading.Thread(target=self.layer, args=(self.hidden,), kwargs={"out": out}) for out in outputs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertTrue(any(bytes(outputs[0])))
        self.assertEqual({bytes(out) for out in outputs}, {bytes(outputs[0])})

    def test_failures_say_what_is_wrong(self):
        with self.assertRaisesRegex(fusedmoe.Error, "no-such-folder") as caught:
            fusedmoe.Checkpoint("no-such-folder")
        self.assertEqual(caught.exception.code, "bad_input")
        with self.assertRaisesRegex(fusedmoe.Error, "FASTEST"):
            self.checkpoint.load_layer(self.number, backend="FASTEST")
        with self.assertRaisesRegex(TypeError, "no option 'speed'; there are communicator, device, "):
            self.checkpoint.load_layer(self.number, speed=1)
        with self.assertRaisesRegex(TypeError, "give out="):
            self.layer(self.hidden)
        wrong = matrix(bytes(4 * 3 * 7), [3, 7])
        with self.assertRaisesRegex(fusedmoe.Error, r"\[3, 7\]"):
            self.layer(wrong, out=wrong)
        flat = memoryview(bytearray(self.hidden.nbytes)).cast("f")
        with self.assertRaisesRegex(fusedmoe.Error, rf"\[tokens, {self.layer.info.hidden}\]"):
            self.layer(flat, out=flat)
        with self.assertRaisesRegex(TypeError, "read-only"):
            self.layer(memoryview(bytes(self.hidden)).cast("B").cast("f", self.hidden.shape), out=wrong)

    def test_arrays_of_ctypes(self):
        expected = matrix(bytes(self.hidden.nbytes), self.hidden.shape)
        self.layer(self.hidden, out=expected)
        rows = (ctypes.c_float * self.hidden.shape[1]) * self.hidden.shape[0]
        hidden, out = rows.from_buffer_copy(bytes(self.hidden)), rows()
        self.layer(hidden, out=out)
        self.assertEqual(bytes(out), bytes(expected))
        longs = ((ctypes.c_long * self.hidden.shape[1]) * self.hidden.shape[0])()
        with self.assertRaisesRegex(fusedmoe.Error, "I64"):
            self.layer(longs, out=out)

    def test_rows_that_share_memory(self):
        tokens, width = self.hidden.shape
        row = 4 * width
        out, expected = (matrix(bytes(self.hidden.nbytes), self.hidden.shape) for _ in range(2))
        self.layer(self.hidden, out=expected)
        backwards = b"".join(bytes(self.hidden)[t * row:][:row] for t in reversed(range(tokens)))
        self.layer(Strided(matrix(backwards, self.hidden.shape), [tokens, width], [-row, 4], tokens * row - row), out=out)
        self.assertEqual(bytes(out), bytes(expected))  # these do not

        ids = matrix(bytes(4 * tokens), [tokens, 1], "i")
        memory = matrix(bytes(tokens * row), [tokens, width])
        once = Strided(memory, [tokens, width], [0, 4])  # to the library, strides of 0 are those of dense rows
        weights = Strided(memory, [tokens, 1], [0, 4])
        for name, arguments in [("output", {"hidden": self.hidden, "out": once}), ("hidden", {"hidden": once, "out": out}),
                                ("topk_weights", {"hidden": self.hidden, "topk_ids": ids, "topk_weights": weights, "out": out})]:
            with self.assertRaisesRegex(ValueError, f"^{name} has the same memory .*make it contiguous"):
                self.layer(**arguments)
        self.assertFalse(any(bytes(memory)))
        one = Strided(matrix(bytes(self.hidden)[:row], [1, width]), [1, width], [0, 4])
        self.layer(one, out=matrix(bytes(row), [1, width]))  # nothing to share

    def test_tensors_without_memory(self):
        rows = Strided(matrix(bytes(64 * 4), [1, 64]), [1, 64], [256, 4])
        rows.ctypes = SimpleNamespace(data=0)
        with self.assertRaisesRegex(ValueError, "^hidden has no memory$"):
            self.layer(rows, out=matrix(bytes(64 * 4), [1, 64]))

    def test_handles_have_one_owner(self):
        from fusedmoe._threads import current_pool
        for handle in (self.checkpoint, self.layer, current_pool()):
            for copied in (copy.copy, copy.deepcopy, pickle.dumps):
                with self.assertRaisesRegex(TypeError, f"a {type(handle).__name__} cannot be copied or pickled"):
                    copied(handle)

    def test_forked_children_compute_and_end(self):
        # A child that ends as every program does, with the objects of its parent.
        script = f"""if True:
            import array, os, sys
            sys.path.insert(0, {str(ROOT / "python")!r})
            import fusedmoe
            fusedmoe.set_num_threads(8)
            layer = fusedmoe.Checkpoint({str(CHECKPOINT)!r}).load_layer({self.number}, max_tokens=16)
            rows = memoryview(array.array("f", [i % 11 - 5 for i in range(5 * layer.info.hidden)])).cast("B")
            shape = [5, layer.info.hidden]
            outputs = [memoryview(bytearray(rows.nbytes)).cast("f", shape) for _ in range(2)]
            layer(rows.cast("f", shape), out=outputs[0])
            child = os.fork()
            layer(rows.cast("f", shape), out=outputs[1])
            assert bytes(outputs[0]) == bytes(outputs[1])
            if child:
                sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            """
        job = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, timeout=60)
        self.assertEqual(job.returncode, 0, job.stderr)

    def test_layer_of_weights_in_memory(self):
        hidden, inner, experts = 64, 32, 4
        weight = [matrix(struct.pack(f"<{inner * hidden}f", *(((i * (17 + e)) % 31 - 15) / 64 for i in range(inner * hidden))),
                         [inner, hidden]) for e in range(experts)]
        down = [matrix(bytes(w), [hidden, inner]) for w in weight]
        layer = fusedmoe.Layer.create([{"gate": w, "up": w, "down": d} for w, d in zip(weight, down)], top_k=1,
                                      dtype="F32", max_tokens=4, activation="relu2")
        rows = matrix(struct.pack("<64f", *([0.25] * hidden)), [1, hidden])
        out = matrix(bytes(rows.nbytes), [1, hidden])
        layer(rows, topk_ids=matrix(struct.pack("<i", 2), [1, 1], "i"),
              topk_weights=matrix(struct.pack("<f", 0.5), [1, 1]), out=out)
        w = [weight[2].tolist()[r] for r in range(inner)]
        d = down[2].tolist()
        gate = [sum(v) * 0.25 for v in w]
        mid = [max(g, 0.0) ** 2 * g for g in gate]
        for column in range(hidden):
            exact = 0.5 * sum(a * b for a, b in zip(d[column], mid))
            size = 0.5 * sum(abs(a * b) for a, b in zip(d[column], mid))
            self.assertAlmostEqual(out.tolist()[0][column], exact, delta=2e-5 * size + 1e-9)

    def test_experts_that_do_not_fit_are_refused(self):
        weight = matrix(bytes(4 * 32 * 64), [32, 64])
        with self.assertRaisesRegex(TypeError, "'middle'"):
            fusedmoe.Layer.create([{"middle": weight}], top_k=1)
        with self.assertRaisesRegex(fusedmoe.Error, "expert 0, down"):
            fusedmoe.Layer.create([{"gate": weight, "up": weight, "down": {"codes": weight, "block_scale": weight}}],
                                  top_k=1, scheme="unquantized", dtype="F32")
        with self.assertRaisesRegex(fusedmoe.Error, "nvfp5"):
            fusedmoe.Layer.create([{"gate": weight, "up": weight, "down": weight}], top_k=1, scheme="nvfp5")
        with self.assertRaisesRegex(TypeError, "F4_E2M1"):
            fusedmoe.Layer.create([{"gate": weight, "up": weight, "down": weight}], top_k=1, scheme="nvfp4_w4a16")

    def test_stacked_experts(self):
        # INT8 with a scale for each row, gate and up interleaved, as one stack and as experts one by one.
        hidden, inner, experts = 64, 32, 3
        w13 = [(i * 29 + i // 7) % 255 - 127 for i in range(experts * 2 * inner * hidden)]
        w2 = [(i * 31 + i // 5) % 255 - 127 for i in range(experts * hidden * inner)]
        s13 = [(1 + i % 5) / 4096 for i in range(experts * 2 * inner)]
        s2 = [(1 + i % 3) / 2048 for i in range(experts * hidden)]

        def rows(e, first, count=inner):
            at = [e * 2 * inner + first + 2 * r for r in range(count)]
            codes = [w13[r * hidden:][:hidden] for r in at]
            return {"codes": matrix(struct.pack(f"{inner * hidden}b", *sum(codes, [])), [inner, hidden], "b"),
                    "channel_scale": matrix(struct.pack(f"{inner}f", *(s13[r] for r in at)), [inner])}

        single = [{"gate": rows(e, 0), "up": rows(e, 1),
                   "down": {"codes": matrix(struct.pack(f"{hidden * inner}b", *w2[e * hidden * inner:][:hidden * inner]),
                                            [hidden, inner], "b"),
                            "channel_scale": matrix(struct.pack(f"{hidden}f", *s2[e * hidden:][:hidden]), [hidden])}}
                  for e in range(experts)]
        quant = {"quant_dtype": "int8", "weight_quant_dtype": "int8", "per_act_token_quant": True, "block_shape": None,
                 "w1_scale": matrix(struct.pack(f"{len(s13)}f", *s13), [experts, 2 * inner, 1]),
                 "w2_scale": matrix(struct.pack(f"{len(s2)}f", *s2), [experts, hidden]), "gemm1_clamp_limit": 2.0,
                 "is_scale_swizzled": True}
        stacks = [matrix(struct.pack(f"{len(w13)}b", *w13), [experts, 2 * inner, hidden], "b"),
                  matrix(struct.pack(f"{len(w2)}b", *w2), [experts, hidden, inner], "b")]

        def output(layer):
            self.assertEqual(layer.info.scheme, "int8_w8a8:channel")
            x = matrix(struct.pack(f"{2 * hidden}f", *((i * 13 % 17 - 8) / 8 for i in range(2 * hidden))), [2, hidden])
            out = matrix(bytes(x.nbytes), [2, hidden])
            layer(x, topk_ids=matrix(struct.pack("4i", 0, 2, 1, 0), [2, 2], "i"),
                  topk_weights=matrix(struct.pack("4f", 0.5, 1, 1, 0.25), [2, 2]), out=out)
            return bytes(out)

        options = {"top_k": 2, "dtype": "F32", "max_tokens": 4}
        expected = output(fusedmoe.Layer.create(single, scheme="int8_w8a8:channel", limit=2.0, **options))
        self.assertTrue(any(expected))
        accessors = SimpleNamespace(**quant, w1_zp=None)  # as a FusedMoEQuantConfig has them
        for given in (quant, accessors):
            stacked = fusedmoe.Stacked(*stacks, given, order="interleaved")
            self.assertEqual(output(fusedmoe.Layer.create(stacked, **options)), expected)
        plain = fusedmoe.Layer.create(fusedmoe.Stacked(*(matrix(bytes(4 * s.nbytes), s.shape) for s in stacks)), **options)
        self.assertEqual((plain.info.scheme, plain.info.intermediate), ("unquantized", inner))
        for arguments, more, kind, says in [
                ((*stacks, {**quant, "w3_scale": None}), {}, TypeError, "quant has 'w3_scale', there are quant_dtype, "),
                ((*stacks, 8), {}, TypeError, "quant is int, a FusedMoEQuantConfig or a dict"),
                ((*stacks, quant, 13), {}, TypeError, "order is int"),
                ((None, stacks[1], quant), {}, fusedmoe.Error, "w1 is missing"),
                ((*stacks, quant), {"scheme": "int8_w8a8"}, fusedmoe.Error, "scheme is 'int8_w8a8'; stacked experts say"),
                ((*stacks, quant), {"limit": 1.0}, fusedmoe.Error, "limit of the activation is 1 in the config and 2 as"),
                ((*reversed(stacks), quant), {}, fusedmoe.Error, "w1 has 32 columns and w2 64 rows")]:
            with self.assertRaisesRegex(kind, says):
                fusedmoe.Layer.create(fusedmoe.Stacked(*arguments), **options, **more)

    def test_mode_of_activations(self):
        part = {"codes": matrix(bytes(64 * 64), [64, 64], "B"), "block_scale": matrix(struct.pack("<64f", *([1.0] * 64)), [64, 1])}
        made = fusedmoe.Layer.create([{"up": part, "down": part}], top_k=1, scheme="int8_w8a16", activation="relu2_no_mul",
                                     activation_mode="a8", max_tokens=4)
        self.assertEqual(made.plan_json()["activation"], "a8")
        checkpoint = fusedmoe.Checkpoint(CHECKPOINT.parent / "qwen3_moe-modelopt-w4a16_nvfp4")
        for name in ("activation", "activation_mode"):
            layer = checkpoint.load_layer(checkpoint.moe_layers[0], max_tokens=4, **{name: "a8"})
            self.assertEqual(layer.plan_json()["activation"], "a8")
        with self.assertRaisesRegex(TypeError, "the same option"):
            checkpoint.load_layer(checkpoint.moe_layers[0], activation="a8", activation_mode="a8")

    def test_arguments_of_the_wrong_kind_never_reach_the_library(self):
        # ctypes cuts integers to the width of the argument, takes an int as the address of a text, and ends a text at
        # its first null: 2**70 was layer 0, mode=3 a crash, and "a\0b" the checkpoint "a".
        load = self.checkpoint.load_layer
        for call, kind, says in [
                (lambda: load(1 << 70), ValueError, "layer is 1180591620717411303424"),
                (lambda: load("0"), TypeError, "layer is str"),
                (lambda: self.checkpoint.describe(1 << 64), ValueError, "layer is"),
                (lambda: load(self.number, mode=3), TypeError, "mode is int"),
                (lambda: load(self.number, max_tokens="8"), TypeError, "max_tokens is str"),
                (lambda: load(self.number, max_tokens=8.5), TypeError, "max_tokens is float"),
                (lambda: load(self.number, max_tokens=(1 << 64) + 8), ValueError, "max_tokens is"),
                (lambda: load(self.number, shared_experts="no"), TypeError, "shared_experts is str"),
                (lambda: fusedmoe.set_num_threads(1 << 40), ValueError, "count is 1099511627776"),
                (lambda: fusedmoe.Checkpoint(f"{CHECKPOINT}\0suffix"), ValueError, "path holds a null"),
                (lambda: fusedmoe.eplb.maps([1 << 32, 1], 2), ValueError, r"physical_to_logical\[0\] is 4294967296"),
                (lambda: fusedmoe.eplb.rebalance([1.0] * 4, 4, num_ranks=(1 << 64) + 2), ValueError, "num_ranks is"),
                (lambda: self.layer([[1.0]]), TypeError, "hidden is list"),
                (lambda: self.layer(None), TypeError, "hidden is NoneType"),
                (lambda: self.layer(self.hidden, out=[1]), TypeError, "output is list"),
                (lambda: load(self.number, all2all="pigeon"), fusedmoe.Error, "unknown all2all 'pigeon'"),
                (lambda: load(self.number, routing=3), TypeError, "routing is int")]:
            with self.assertRaisesRegex(kind, says):
                call()

    def test_paths_that_are_no_utf8_are_named(self):
        path = "no-such-folder-\udcff"  # how Python spells the byte 0xff of a file name
        with self.assertRaisesRegex(fusedmoe.Error, "no-such-folder") as caught:
            fusedmoe.Checkpoint(path)
        self.assertEqual(caught.exception.file, path)
        str(caught.exception).encode()  # can be printed

    def test_experts_that_lack_something_are_refused(self):
        weight = matrix(bytes(4 * 32 * 64), [32, 64])
        for experts, says in [([{"gate": weight}], "expert 0 has no 'up'"), ([{"up": weight}], "expert 0 has no 'down'"),
                              ([[weight]], "expert 0 is list"),
                              ([{"up": {"bias": weight}, "down": weight}], "expert 0, up has no 'codes'")]:
            with self.assertRaisesRegex(TypeError, says):
                fusedmoe.Layer.create(experts, top_k=1)
        flat = memoryview(bytearray(256)).cast("f")
        with self.assertRaisesRegex(ValueError, r"expert 0, up has shape \[64\]"):
            fusedmoe.Layer.create([{"up": flat, "down": weight}], top_k=1)
        with self.assertRaisesRegex(ValueError, "dtype is 'bfloat16'"):
            fusedmoe.Layer.create([{"gate": weight, "up": weight, "down": weight}], top_k=1, dtype="bfloat16")

    def test_objects_say_what_they_are(self):
        self.assertEqual(repr(self.checkpoint), f"Checkpoint({str(CHECKPOINT)!r})")
        self.assertRegex(repr(self.layer), r"Layer\(nvfp4_w4a4, \d+ experts, top \d+, hidden \d+, CPU_FUSED\)")
        self.assertEqual(fusedmoe.__version__, fusedmoe.version())

    def test_threads_may_change_while_layers_run(self):
        out = [matrix(bytes(self.hidden.nbytes), self.hidden.shape) for _ in range(4)]
        done = threading.Event()

        def run(target):
            while not done.is_set():
                self.layer(self.hidden, out=target)

        threads = [threading.Thread(target=run, args=(target,)) for target in out]
        for thread in threads:
            thread.start()
        for count in (1, 3, 2, 1, 4, 2):
            fusedmoe.set_num_threads(count)
        done.set()
        for thread in threads:
            thread.join()
        self.assertEqual(len({bytes(target) for target in out}), 1)
        with self.assertRaises(fusedmoe.Error):
            fusedmoe.set_num_threads(-5)
        self.layer(self.hidden, out=out[0])

    def test_the_interpreters_lock_is_free_in_calls(self):
        from fusedmoe import _c
        self.assertIsInstance(_c.lib, ctypes.CDLL)
        self.assertNotIsInstance(_c.lib, ctypes.PyDLL)  # whose calls keep it

    def test_routing_of_the_caller(self):
        info = self.layer.info
        chosen = matrix(struct.pack("<5i", 3, 1, 0, 2, 3), [5, 1], "i")
        weight = matrix(struct.pack("<5f", 0.5, 1, 1, 1, 0.25), [5, 1])
        seen = []

        def route(hidden, logits, top_k):
            seen.append((hidden, logits, top_k))
            return chosen, weight

        cells = [((i * 37) % 19 - 9) / 32 for i in range(32 * info.hidden)]
        up, down = matrix(struct.pack(f"<{len(cells)}f", *cells), [32, info.hidden]), matrix(
            struct.pack(f"<{len(cells)}f", *cells), [info.hidden, 32])
        experts = [{"gate": up, "up": up, "down": down}] * 4
        layer = fusedmoe.Layer.create(experts, top_k=1, dtype="F32", max_tokens=8, routing=route)
        logits = matrix(bytes(4 * 5 * 4), [5, 4])
        routed, given = (matrix(bytes(self.hidden.nbytes), self.hidden.shape) for _ in range(2))
        layer(self.hidden, router_logits=logits, out=routed)
        layer(self.hidden, topk_ids=chosen, topk_weights=weight, out=given)
        self.assertTrue(any(bytes(routed)))
        self.assertEqual(bytes(routed), bytes(given))
        self.assertEqual([(len(seen), seen[0][1] is logits, seen[0][2])], [(1, True, 1)])

        def fails(hidden, logits, top_k):
            raise KeyError("no such expert")

        layer = fusedmoe.Layer.create(experts, top_k=1, dtype="F32", max_tokens=8, routing=fails)
        with self.assertRaisesRegex(KeyError, "no such expert"):
            layer(self.hidden, router_logits=logits, out=routed)
        layer = fusedmoe.Layer.create(experts, top_k=1, dtype="F32", max_tokens=8, routing=lambda *_: None)
        with self.assertRaisesRegex(TypeError, "routing gave NoneType"):
            layer(self.hidden, router_logits=logits, out=routed)

    def test_routing_by_name(self):
        info = self.layer.info
        cells = [((i * 37) % 19 - 9) / 32 for i in range(32 * info.hidden)]
        up, down = (matrix(struct.pack(f"<{len(cells)}f", *cells), shape) for shape in ([32, info.hidden], [info.hidden, 32]))
        layer = fusedmoe.Layer.create([{"gate": up, "up": up, "down": down}] * 4, top_k=1, dtype="F32", max_tokens=8,
                                      routing="TopK")
        logits = matrix(struct.pack("<20f", *([0, 0.5, -1, 0.25] * 5)), [5, 4])  # top-1 of x, weight x: expert 1, 0.5
        routed, given = (matrix(bytes(self.hidden.nbytes), self.hidden.shape) for _ in range(2))
        layer(self.hidden, router_logits=logits, out=routed)
        layer(self.hidden, topk_ids=matrix(struct.pack("<5i", *[1] * 5), [5, 1], "i"),
              topk_weights=matrix(struct.pack("<5f", *[0.5] * 5), [5, 1]), out=given)
        self.assertEqual(bytes(routed), bytes(given))
        with self.assertRaisesRegex(fusedmoe.Error, "^unknown routing 'Best'; known: Default, Renormalize, "):
            fusedmoe.Layer.create([{"gate": up, "up": up, "down": down}], top_k=1, routing="Best")
        with self.assertRaisesRegex(fusedmoe.Error, "^unknown activation 'tanh'; known: silu, gelu, "):
            fusedmoe.Layer.create([{"gate": up, "up": up, "down": down}], top_k=1, activation="tanh")

    def layer_of(self, **arguments):
        """Of four experts of random weights in F32."""
        width = self.layer.info.hidden
        cells = [((i * 37) % 19 - 9) / 32 for i in range(32 * width)]
        up, down = (matrix(struct.pack(f"<{len(cells)}f", *cells), shape) for shape in ([32, width], [width, 32]))
        return fusedmoe.Layer.create([{"gate": up, "up": up, "down": down}] * 4, **{"top_k": 1, "dtype": "F32", **arguments})

    def output_of(self, layer, **arguments):
        out = matrix(bytes(self.hidden.nbytes), self.hidden.shape)
        layer(self.hidden, out=out, **arguments)
        return bytes(out)

    def test_parameters_of_activations_are_their_own_unless_they_are_given(self):
        given = {"topk_ids": matrix(struct.pack("<5i", *range(4), 0), [5, 1], "i"),
                 "topk_weights": matrix(struct.pack("<5f", *[1] * 5), [5, 1])}
        run = lambda **arguments: self.output_of(self.layer_of(max_tokens=8, **arguments), **given)  # noqa: E731
        canonical = run(activation="swigluoai")
        self.assertEqual(canonical, run(activation="SwigluOAI", alpha=1.702, beta=1.0, limit=7.0))
        self.assertFalse(canonical == run(activation="swigluoai", limit=0.5))
        self.assertFalse(canonical == run(activation="silu"))
        step = run(activation="swiglustep")
        self.assertEqual(step, run(activation="swiglustep", limit=7.0))
        self.assertFalse(step == run(activation="swiglustep", limit=0.5))
        for unset in ({"activation": "swigluoai", "alpha": 1, "beta": 0, "limit": 0}, {"activation": "swiglustep", "limit": 0}):
            with self.assertRaisesRegex(fusedmoe.Error, "which make it silu"):
                run(**unset)

    def test_routing_takes_all_that_it_has(self):
        logits = matrix(struct.pack("<20f", *([0, 0.5, -1, 0.25] * 5)), [5, 4])
        run = lambda **arguments: self.output_of(self.layer_of(max_tokens=8, **arguments), router_logits=logits)  # noqa: E731
        plain = run(routing="SigmoidRenorm")
        self.assertFalse(plain == run(routing="sigmoidrenorm", norm_epsilon=0.5))
        self.assertFalse(run(routing="TopK") == run(routing="TopK", logit_softcap=0.25))
        self.assertEqual(run(routing="Simulated"), run(routing="Simulated", simulation="uniform_random"))
        with self.assertRaisesRegex(fusedmoe.Error, "uniform_random, normal_routing"):
            run(routing="Simulated", simulation="dice")
        wider = matrix(struct.pack("<25f", *([0, 0.5, -1, 0.25, 3] * 5)), [5, 5])  # the fifth gives back its input
        self.assertEqual(self.output_of(self.layer_of(max_tokens=8, num_zero_experts=1), router_logits=wider),
                         bytes(self.hidden))
        table = matrix(struct.pack("<2i", 3, 1), [2, 1], "i")
        hashed = self.layer_of(max_tokens=8, routing="DeepseekV4", token_id_to_experts=table)
        tokens = memoryview(bytearray(struct.pack("<5i", 0, 1, 0, 1, 1))).cast("i")
        self.assertTrue(any(self.output_of(hashed, router_logits=logits, token_ids=tokens)))

    def test_plan_as_json(self):
        plan = self.layer.plan_json()
        self.assertEqual((plan["backend"], plan["workspace_bytes"]), (self.layer.info.backend, self.layer.info.workspace_bytes))

    def test_options_of_checkpoints(self):
        checkpoint = fusedmoe.Checkpoint(CHECKPOINT, io="mmap", allow_partial=True)
        self.assertEqual(checkpoint.moe_layers, self.checkpoint.moe_layers)
        for arguments, kind, says in [({"io": "tape"}, fusedmoe.Error, "^unknown io 'tape'; known: auto, mmap, pread"),
                                      ({"expert_layout": "sideways"}, fusedmoe.Error, "sideways"),
                                      ({"allow_partial": "no"}, TypeError, "allow_partial is str")]:
            with self.assertRaisesRegex(kind, says):
                fusedmoe.Checkpoint(CHECKPOINT, **arguments)

    def test_layers_share_their_workspaces(self):
        from fusedmoe import _workspaces
        given = {"topk_ids": matrix(struct.pack("<5i", *range(4), 0), [5, 1], "i"),
                 "topk_weights": matrix(struct.pack("<5f", *[1] * 5), [5, 1])}
        layers = [self.layer_of(max_tokens=tokens) for tokens in (8, 512, 8, 64)]
        pool = layers[0]._workspaces
        self.assertTrue(all(layer._workspaces is pool for layer in [*layers, self.layer]))
        pool._free.clear()  # that of a layer of other tests may be larger (cores with a matrix unit)
        outputs = {self.output_of(layer, **given) for _ in range(2) for layer in layers}
        self.assertEqual(len(outputs), 1)
        self.assertEqual([workspace.size for workspace in pool._free], [max(layer.info.workspace_bytes for layer in layers)])
        results = []
        threads = [threading.Thread(target=lambda layer=layer: results.append(self.output_of(layer, **given)))
                   for layer in layers * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual((len(results), set(results)), (16, outputs))
        self.assertLessEqual(len(pool._free), 16)
        # They go with the last layer.
        script = f"""if True:
            import gc, sys
            sys.path.insert(0, {str(ROOT / "python")!r})
            import fusedmoe
            from fusedmoe import _workspaces
            layer = fusedmoe.Checkpoint({str(CHECKPOINT)!r}).load_layer({self.number}, max_tokens=16)
            assert _workspaces._of_cpus() is layer._workspaces
            del layer
            gc.collect()
            assert _workspaces._of_cpus() is None
            """
        job = subprocess.run([sys.executable, "-B", "-c", script], capture_output=True, text=True, timeout=60)
        self.assertEqual(job.returncode, 0, job.stderr)
        self.assertIsNotNone(_workspaces._of_cpus())

    def test_batched_rows_give_the_same_result(self):
        batched = self.checkpoint.load_layer(self.number, max_tokens=16, activation_format="batched", backend="REFERENCE")
        standard = self.checkpoint.load_layer(self.number, max_tokens=16, backend="REFERENCE")
        outputs = [matrix(bytes(self.hidden.nbytes), self.hidden.shape) for _ in range(2)]
        batched(self.hidden, out=outputs[0])
        standard(self.hidden, out=outputs[1])
        for one, other in zip(*(memoryview(bytes(out)).cast("f") for out in outputs)):
            self.assertAlmostEqual(one, other, delta=1e-5 * max(map(abs, memoryview(bytes(outputs[1])).cast("f"))))
        with self.assertRaisesRegex(fusedmoe.Error, "unknown activation rule 'vllm'.*vllm_nvfp4"):
            self.checkpoint.load_layer(self.number, activation_rule="vllm")
        with self.assertRaisesRegex(fusedmoe.Error, "activation_format 'sorted'"):
            self.checkpoint.load_layer(self.number, activation_format="sorted")

    def test_latent_experts(self):
        folder = ROOT / "tests" / "golden" / "families" / "nemotron_h_latent_bias-orig"
        case = read_safetensors(folder / "io" / "m5.safetensors")
        hidden, expected = (matrix(case[name][2], case[name][1]) for name in ("hidden_states", "expected_output"))
        checkpoint = fusedmoe.Checkpoint(folder)
        layer = checkpoint.load_layer(1, max_tokens=8)
        self.assertEqual((layer.info.hidden, layer.info.latent, checkpoint.describe(1).latent), (32, 16, 16))
        out = matrix(bytes(expected.nbytes), expected.shape)
        layer(hidden, out=out)
        largest = max(map(abs, memoryview(bytes(expected)).cast("f")))
        for one, other in zip(memoryview(bytes(out)).cast("f"), memoryview(bytes(expected)).cast("f")):
            self.assertAlmostEqual(one, other, delta=1e-4 * largest)  # F32 weights: sums in another order

        routed = checkpoint.load_layer(1, max_tokens=8, latent_projections=False, shared_experts=False)
        self.assertEqual((routed.info.hidden, routed.info.latent), (16, 0))
        ids = matrix(struct.pack("<15i", *[0, 1, 2] * 5), [5, 3], "i")
        weights = matrix(struct.pack("<15f", *[0.5, 0.25, 0.25] * 5), [5, 3])
        rows = matrix(bytes(hidden)[:5 * 16 * 4], [5, 16])
        inner = matrix(bytes(rows.nbytes), rows.shape)
        routed(rows, topk_ids=ids, topk_weights=weights, out=inner)
        self.assertTrue(any(bytes(inner)))
        with self.assertRaisesRegex(fusedmoe.Error, r"\[5, 32\]"):  # the caller projects
            routed(hidden, topk_ids=ids, topk_weights=weights, out=out)
        with self.assertRaisesRegex(fusedmoe.Error, "shared experts"):
            checkpoint.load_layer(1, latent_projections=False)

    def test_placement_is_that_of_the_policy(self):
        load = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
        placed = fusedmoe.eplb.rebalance(load, 16, num_ranks=8, num_groups=4, num_nodes=2)
        self.assertEqual(placed, [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1])
        slots, count = fusedmoe.eplb.maps(placed, 12)
        self.assertEqual((slots[5], slots[7], count[10]), ([0, 2], [3], 2))
        self.assertEqual(fusedmoe.eplb.initial(4, 2), [0, 1, 2, 3, 0, 1])
        self.assertEqual(self.layer.physical_to_logical, list(range(self.layer.info.num_experts)))
        with self.assertRaisesRegex(fusedmoe.Error, "shared equally by 5"):
            fusedmoe.eplb.rebalance(load, 16, num_ranks=5)
        with self.assertRaisesRegex(fusedmoe.Error, "without load balancing|load balancing"):
            self.layer.end_step()

    def test_ranks_share_a_layer_and_move_its_experts(self):
        library = Path(os.environ.get("LD_LIBRARY_PATH", "").split(":")[0]) / "libfusedmoe_mpi.so"
        if shutil.which("mpirun") is None or not library.exists():
            self.skipTest("needs Open MPI and libfusedmoe_mpi.so")
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        job = subprocess.run(["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", sys.executable, "-B",
                              Path(__file__).with_name("rank.py"), CHECKPOINT, library], env=environment,
                             capture_output=True, text=True, timeout=120)
        self.assertEqual(job.returncode, 0, job.stderr)
        self.assertEqual(sorted(job.stdout.split()), ["rank-0-ok", "rank-1-ok"])

    def test_example_of_the_documentation(self):
        page = (ROOT / "docs" / "python.md").read_text()
        example = re.search(r"<!-- run by tests/python/package_test.py -->\n```python\n(.*?)```", page, re.S).group(1)
        names = {}
        exec(compile(example, "docs/python.md", "exec"), names)
        self.assertTrue(any(memoryview(names["output"]).cast("B")))


if __name__ == "__main__":
    unittest.main()
