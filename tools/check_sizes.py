"""Files stay small, and every module says what it is for in at most 40 lines."""

from pathlib import Path

import source_tree

MOST_LINES = 800
MOST_README_LINES = 40
UNDESCRIBED = ("src/config", "src/parallel", "src/quant", "src/routing", "src/weights", "src/checkpoint", "src/layer",
               "src/prepare_finalize", "src/experts")
CAPPED = (*source_tree.CPP_SUFFIXES, ".py", ".cmake", ".sh", "CMakeLists.txt", "Makefile")


def check(root):
    found = []
    for name in source_tree.files(root):
        if name.endswith(CAPPED) and not name.startswith("tests/golden/"):
            lines = source_tree.read(root, name).count("\n")
            if lines > MOST_LINES:
                found.append(f"{name}: {lines} lines (at most {MOST_LINES}; split it by what its parts do)")
    modules = {"/".join(name.split("/")[:2]) for name in source_tree.cpp_files(root, ("src",)) if name.count("/") > 1}
    for name in source_tree.files(root):
        if name.startswith("src/") and name.endswith("/README.md"):
            lines = source_tree.read(root, name).count("\n")
            if lines > MOST_README_LINES:
                found.append(f"{name}: {lines} lines (at most {MOST_README_LINES})")
    for module in sorted(modules):
        if module not in UNDESCRIBED and not (Path(root) / module / "README.md").exists():
            found.append(f"{module}: no README.md (purpose, what it may include, where to enter, how to extend)")
    return found
