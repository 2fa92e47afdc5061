"""Files stay small, and every module says what it is for in at most 40 lines."""

from pathlib import Path

import check_layers
import source_tree

MOST_LINES = 800
MOST_README_LINES = 40
CAPPED = (*source_tree.CPP_SUFFIXES, ".py", ".cmake", ".sh", "CMakeLists.txt", "Makefile")


def check(root):
    found = []
    for name in source_tree.files(root):
        if name.endswith(CAPPED) and not name.startswith(source_tree.DATA_FOLDERS):
            lines = source_tree.read(root, name).count("\n")
            if lines > MOST_LINES:
                found.append(f"{name}: {lines} lines (at most {MOST_LINES}; split it by what its parts do)")
    table = Path(root) / "tools" / "layers.txt"
    layers = check_layers.Table(table.read_text() if table.exists() else "")
    modules = {layers.module_of(name[len("src/"):]) for name in source_tree.cpp_files(root, ("src",))} - {None}
    for name in source_tree.files(root):
        if name.startswith("src/") and name.endswith("/README.md"):
            lines = source_tree.read(root, name).count("\n")
            if lines > MOST_README_LINES:
                found.append(f"{name}: {lines} lines (at most {MOST_README_LINES})")
    for module in sorted(modules):
        # Ways of the same thing (prepare_finalize/no_ep, /batched) may share the page above them.
        above = [Path(root) / "src" / "/".join(module.split("/")[:length]) for length in range(1, module.count("/") + 2)]
        if not any((folder / "README.md").exists() for folder in above):
            found.append(f"src/{module}: no README.md (purpose, what it may include, where to enter, how to extend)")
    return found
