"""Generated pages are what their generators write now. `python3 tools/check_tables.py --write` writes them."""

import subprocess
import sys
from pathlib import Path

# File, and the command below the root that prints it. A page joins the table as soon as its generator exists.
TABLES = [
    ("docs/support_matrix.md", ["build/release/fusedmoe", "backends", "--schemes", "--markdown"]),
]
SECONDS = 60


def _generate(root, command):
    """What the command prints, or None with the reason."""
    try:
        ran = subprocess.run([str(Path(root) / command[0]), *command[1:]], cwd=root, stdin=subprocess.DEVNULL,
                             capture_output=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    return (ran.stdout, "") if ran.returncode == 0 else (None, ran.stderr.decode(errors="replace").strip())


def check(root, tables=None):
    found = []
    for name, command in TABLES if tables is None else tables:
        page = Path(root) / name
        if not page.exists() or not (Path(root) / command[0]).exists():
            continue  # not written yet, or nothing built to ask
        text, reason = _generate(root, command)
        if text is None:
            found.append(f"{name}: '{' '.join(command)}' failed: {reason}")
        elif text != page.read_bytes():
            found.append(f"{name}: is not what '{' '.join(command)}' prints (make tables)")
    return found


def write(root):
    for name, command in TABLES:
        text, reason = _generate(root, command)
        if text is None:
            return f"{name}: '{' '.join(command)}' failed: {reason}"
        (Path(root) / name).write_bytes(text)
    return None


if __name__ == "__main__":
    top = Path(__file__).resolve().parent.parent
    if sys.argv[1:] == ["--write"]:
        sys.exit(write(top))
    sys.exit("usage: check_tables.py --write")
