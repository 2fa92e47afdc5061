"""Python compiles; shell scripts parse, and please shellcheck where it is installed."""

import shutil
import subprocess
from pathlib import Path

import source_tree


def _is_shell(root, name):
    if name.endswith(".sh"):
        return True
    if "." in Path(name).name:
        return False
    with open(Path(root) / name, "rb") as file:
        first = file.readline(80)
    return first.startswith(b"#!") and (b"/sh" in first or b"bash" in first)


def _is_python(root, name):
    if name.endswith(".py"):
        return True
    if "." in Path(name).name:
        return False
    with open(Path(root) / name, "rb") as file:
        first = file.readline(80)
    return first.startswith(b"#!") and b"python" in first


def check(root):
    found = []
    names = [name for name in source_tree.files(root) if not name.startswith(source_tree.DATA_FOLDERS)]
    for name in names:
        if _is_python(root, name):
            try:
                compile(source_tree.read(root, name), name, "exec")
            except (SyntaxError, ValueError) as error:
                found.append(f"{name}:{getattr(error, 'lineno', 0)}: {error}")
    shell = [name for name in names if _is_shell(root, name)]
    for name in shell:
        parsed = subprocess.run(["bash", "-n", str(Path(root) / name)], capture_output=True, text=True, check=False)
        if parsed.returncode != 0:
            found.append(f"{name}: {parsed.stderr.strip()}")
    if shell and shutil.which("shellcheck"):
        ran = subprocess.run(["shellcheck", "-f", "gcc", *shell], cwd=root, capture_output=True, text=True, check=False)
        found += ran.stdout.splitlines()
    return found
