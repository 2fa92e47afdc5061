"""Every header compiles alone and may be included twice, C headers also as C.

A header that some source includes before anything else is tried by the build. The others are tried here; results are kept
by the contents of the header and of all project headers below it, so that a second run takes no time."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import source_tree
from check_layers import includes

# Headers of kernels are compiled for the largest instruction set, in the namespace that the build would give them, on x86;
# those of registers of 256 bits without larger ones, those of AArch64 there or where a cross compiler is found.
AVX2_HEADERS = "_avx2_isa.hpp"  # how their names end
AVX2_KERNEL_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-DFMOE_ISA_NS=header_check"]
KERNEL_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl",
                "-mavx512vnni", "-mavx512vbmi", "-mavx512bf16", "-mavx512fp16", "-mamx-tile", "-mamx-int8",
                "-mamx-bf16", "-DFMOE_ISA_NS=header_check"]
ARM_KERNEL_FLAGS = ["-march=armv8.2-a+dotprod", "-DFMOE_ISA_NS=header_check"]
ARM_HEADERS = "_neon_isa.hpp"  # how their names end
GUARD = re.compile(r"^[ \t]*#[ \t]*(pragma once\b|ifndef \w+\s*\n[ \t]*#[ \t]*define )", re.M)


def _compiler():
    named = os.environ.get("CXX", "").split()
    for name in [named[0] if named else "", "g++", "c++", "clang++"]:
        if name and shutil.which(name):
            return name
    return None


def _kernel_compiler(name, compiler):
    """Of a header of kernels; None: nothing here compiles it."""
    on_arm = os.uname().machine == "aarch64"
    if name.endswith(ARM_HEADERS):
        return compiler if on_arm else shutil.which("aarch64-linux-gnu-g++")
    return None if on_arm else compiler


def _resolve(root, name, angle, path):
    bases = [Path(root) / "include"] if angle else [Path(root) / "src", (Path(root) / name).parent,
                                                    Path(root) / "tests", Path(root) / "apps"]
    for base in bases:
        candidate = base / path
        if candidate.is_file():
            return os.path.relpath(candidate, root)
    return None


def _closure(root, name, memory):
    """The header and all project files it includes, directly or not."""
    seen, todo = set(), [name]
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if current not in memory:
            text = source_tree.read(root, current)
            below = [_resolve(root, current, angle, path) for _, angle, path in includes(text)]
            memory[current] = ([path for path in below if path], text)
        todo += memory[current][0]
    return sorted(seen)


def _flags(root, name, text):
    flags = ["-I", str(Path(root) / "include"), "-I", str(Path(root) / "src"), "-I", str(Path(root) / "tests"),
             "-I", str(Path(root) / "apps")]
    if "<mpi.h>" in text:
        mpicxx = shutil.which("mpicxx")
        shown = subprocess.run([mpicxx, "--showme:compile"], capture_output=True, text=True,
                               check=False) if mpicxx else None
        flags += shlex.split(shown.stdout) if shown and shown.returncode == 0 else []
    if name.endswith(ARM_HEADERS):
        flags += ARM_KERNEL_FLAGS
    elif name.endswith(AVX2_HEADERS):
        flags += AVX2_KERNEL_FLAGS
    elif name.endswith("_isa.hpp") or "<immintrin.h>" in text and os.uname().machine == "x86_64":
        flags += KERNEL_FLAGS
    return flags


def _tried_by_the_build(root):
    """Headers that are the first include of a source."""
    found = set()
    for name in source_tree.cpp_files(root, ("src", "apps", "tests"), (".cpp",)):
        first = next(includes(source_tree.read(root, name)), None)
        if first:
            found.add(_resolve(root, name, first[1], first[2]))
    return found


def check(root):
    names = [name for name in source_tree.cpp_files(root, ("include", "src", "apps", "tests"), (".hpp", ".h"))]
    compiler = _compiler()
    if compiler is None:
        return ["no C++ compiler to try headers with (tools/setup installs one)"] if names else []
    memory = {}
    tried = _tried_by_the_build(root)
    passed = source_tree.Passed(root, "headers")

    def one(name):
        text = source_tree.read(root, name)
        if not GUARD.search(text):
            return [f"{name}: does not start with #pragma once"]
        if name in tried and not name.endswith(".h"):
            return []
        used = _kernel_compiler(name, compiler) if name.endswith("_isa.hpp") else compiler
        if used is None:
            return []
        closure = _closure(root, name, memory)
        whole = "\n".join(memory[part][1] for part in closure)
        key = passed.key(used, Path(__file__).read_bytes(), *(part for c in closure for part in (c, memory[c][1])))
        if key in passed:
            return []
        source = f'#include "{Path(root) / name}"\n'
        languages = [["-x", "c++", "-std=c++20"]]
        if name.endswith(".h") and name.startswith("include/"):
            languages.append(["-x", "c", "-std=c11", "-Wno-unknown-warning-option"])
        for language in languages:
            ran = subprocess.run(
                [used, *language, *_flags(root, name, whole), "-fsyntax-only", "-Wall", "-Wextra",
                 "-Wno-missing-field-initializers", "-Wno-unused", "-Wno-psabi", "-Werror", "-"],
                input=source, capture_output=True, text=True, check=False)
            if ran.returncode != 0:
                lines = [line for line in ran.stderr.splitlines() if re.search(r"error", line)]
                return [f"{name}: does not compile alone: {(lines or ran.stderr.splitlines() or ['?'])[0]}"]
        passed.add(key)
        return []

    for name in names:  # fills the memory before threads share it
        _closure(root, name, memory)
    found = sum(source_tree.parallel(one, names), [])
    passed.save()
    return found
