"""Objects of one instruction set export no weak symbol: the linker may keep that copy for callers on lesser machines.

An inline function of a shared header, compiled with -mavx512f in one object and without in another, is emitted weak in
both; which one survives depends on the order of the link. Looks at build/release when it is there."""

import re
import shutil
import subprocess
from pathlib import Path

import source_tree

ISA_OBJECT = re.compile(r"kernels_(?:\w+_)?(?:avx2|avx2_vnni|avx512|avx512_vnni|avx512_bf16|avx512_fp16|amx|neon)\.cpp\.o$")


def check(root):
    build = Path(root) / "build" / "release"
    program = shutil.which("nm")
    if not build.exists() or program is None:
        return []
    objects = [path for path in build.rglob("kernels_*.o")
               if ISA_OBJECT.search(path.name)
               and (Path(root) / str(path.relative_to(build)).split(".dir/", 1)[-1][:-len(".o")]).exists()]

    def one(path):
        ran = subprocess.run([program, "-C", "--defined-only", str(path)], capture_output=True, text=True, check=False)
        name = str(path.relative_to(build))
        if ran.returncode != 0:
            return [f"{name}: nm: {ran.stderr.strip()}"]
        return [f"{name}: weak symbol {line.split(None, 2)[2]}" for line in ran.stdout.splitlines()
                if re.match(r"[0-9a-fA-F]+ [WVu] ", line)]

    return sum(source_tree.parallel(one, sorted(objects)), [])
