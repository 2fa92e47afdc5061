"""C++ as clang-format 14 writes it; every text file with LF, without trailing blanks, with one last newline.

Drawings in comments are no business of clang-format (CommentPragmas in .clang-format), which would break their lines;
whether these are too long is seen here."""

import re
import shutil
import subprocess
from pathlib import Path

import source_tree

VERSION = "14"
COLUMNS = 110  # ColumnLimit
TEXT_SUFFIXES = (".py", ".md", ".txt", ".cmake", ".json", ".yml", ".toml", ".sh", *source_tree.CPP_SUFFIXES)


def formatter():
    """Path of a clang-format of the right version, or None: another version formats otherwise."""
    for name in (f"clang-format-{VERSION}", "clang-format"):
        path = shutil.which(name)
        if path:
            text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
            if re.search(rf"version {VERSION}\.", text):
                return path
    return None


def formatted_files(root):
    # .inc tables are laid out by hand; that is what they are for.
    return [name for name in source_tree.cpp_files(root) if not name.endswith(".inc")]


def _long_comments(name, text):
    return [f"{name}:{number}: comment of {len(line)} columns; {COLUMNS} are allowed"
            for number, line in enumerate(text.split("\n"), 1)
            if len(line) > COLUMNS and line.lstrip().startswith("//") and "://" not in line]


def _text_findings(root, name):
    data = (Path(root) / name).read_bytes()
    found = []
    if b"\r" in data:
        found.append(f"{name}: carriage return (lines end with LF)")
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.endswith((b" ", b"\t")):
            found.append(f"{name}:{number}: trailing blank")
    if data and not data.endswith(b"\n"):
        found.append(f"{name}: no newline at the end")
    if name.endswith(source_tree.CPP_SUFFIXES) and not name.endswith(".inc"):
        found += _long_comments(name, data.decode("utf-8", "replace"))
    return found


def check(root):
    found = []
    for name in source_tree.files(root):
        if name.endswith(TEXT_SUFFIXES) and not name.startswith(source_tree.DATA_FOLDERS):
            found += _text_findings(root, name)
    names = formatted_files(root)
    program = formatter()
    if program is None:
        return found + ([f"clang-format {VERSION} is not installed (tools/setup installs it)"] if names else [])
    style = Path(root) / ".clang-format"
    style_text = style.read_bytes() if style.exists() else b""
    passed = source_tree.Passed(root, "format")

    def one(name):
        data = (Path(root) / name).read_bytes()
        key = passed.key(style_text, data)
        if key in passed:
            return None
        wanted = subprocess.run([program, f"--style=file:{style}", f"--assume-filename={name}"], input=data,
                                capture_output=True, check=False)
        if wanted.returncode != 0:
            return f"{name}: clang-format: {wanted.stderr.decode().strip()}"
        if wanted.stdout == data:
            passed.add(key)
            return None
        for number, (is_line, want) in enumerate(zip(data.split(b"\n"), wanted.stdout.split(b"\n")), 1):
            if is_line != want:
                return f"{name}:{number}: not as clang-format {VERSION} writes it (make format)"
        return f"{name}: not as clang-format {VERSION} writes it (make format)"

    found += [finding for finding in source_tree.parallel(one, names) if finding]
    passed.save()
    return found
