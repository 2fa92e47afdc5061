"""What the tests of this folder share: the command as a process, tiny models, tensors of a checkpoint."""

import json
import os
import shutil
import subprocess
import tempfile
import unittest
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = Path(os.environ.get("FMOE_CLI", ROOT / "build" / "release" / "fusedmoe"))

# Everything is made here; nothing is looked up elsewhere.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
warnings.filterwarnings("ignore")

try:
    import torch
    import transformers
    from safetensors import safe_open
    from safetensors.torch import save_file

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(2)
    MISSING = "" if COMMAND.exists() else f"{COMMAND} is not built"
except ImportError as error:
    MISSING = f"{error}; tools/setup interop installs it"


class Case(unittest.TestCase):
    """A test with a folder of its own for what it makes."""

    @classmethod
    def setUpClass(cls):
        if MISSING:
            raise unittest.SkipTest(MISSING)
        cls.folder = Path(tempfile.mkdtemp(prefix="fusedmoe-interop-"))

    @classmethod
    def tearDownClass(cls):
        shutil.rmtree(getattr(cls, "folder", ""), ignore_errors=True)

    def run_command(self, *arguments, expect=0):
        """The JSON document of a call of the command, which must end with that exit code."""
        words = [str(COMMAND), *map(str, arguments), "--json"]
        ran = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        self.assertEqual(ran.returncode, expect, f"{' '.join(words)}\n{ran.stderr}")
        return json.loads(ran.stdout)


def save_model(config, folder, seed=1, dtype=None, **options):
    """A model with random weights, as transformers saves it. Biases are random too: zeros would test nothing."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype or torch.bfloat16)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "correction_bias")) and tensor.is_floating_point():
                tensor.normal_(std=0.1)
    model.save_pretrained(folder, **options)
    return model


def tensors_of(folder):
    """All tensors of a checkpoint, opened as Hugging Face opens them: by the index where there is one."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    found = {}
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        for file in sorted(set(weight_map.values())):
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():
                    assert weight_map[name] == file, name
                    found[name] = opened.get_tensor(name)
        assert set(found) == set(weight_map)
        return found
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}


def modules_of(tensors, suffix):
    """Names of the expert projections that have a tensor with this suffix."""
    ending = "." + suffix
    return sorted(name[: -len(ending)] for name in tensors if name.endswith(ending) and ".experts." in name)


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())
