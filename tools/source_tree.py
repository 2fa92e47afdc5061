"""What the checks share: the files of the project, C++ text without comments, results kept by content."""

import hashlib
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CPP_SUFFIXES = (".hpp", ".cpp", ".h", ".inc", ".cu", ".cuh")
DATA_FOLDERS = ("tests/golden/", "tests/fuzz/seeds/")  # not ours to format or name
SOURCE_FOLDERS = ("include", "src", "apps", "examples", "python", "tests", "bench")


def files(root):
    """Tracked files and new ones that git does not ignore; outside a repository all that lie there. Sorted."""
    listed = subprocess.run(
        ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"],
        capture_output=True, check=False)
    top = subprocess.run(["git", "-C", str(root), "rev-parse", "--show-prefix"], capture_output=True, check=False)
    if listed.returncode == 0 and top.stdout.strip() == b"":
        names = [name for name in listed.stdout.decode().split("\0") if name]
    else:
        names = [str(path.relative_to(root)) for path in Path(root).rglob("*")]
    return sorted(name for name in names
                  if (Path(root) / name).is_file() and not name.startswith(("build/", ".git/"))
                  and "__pycache__" not in name)


def cpp_files(root, folders=SOURCE_FOLDERS, suffixes=CPP_SUFFIXES):
    return [name for name in files(root)
            if name.endswith(suffixes) and name.split("/")[0] in folders and not name.startswith(DATA_FOLDERS)]


def read(root, name):
    return (Path(root) / name).read_text(encoding="utf-8", errors="replace")


_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<tag>[^()\\\s]{0,16})\(.*?\)(?P=tag)"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'", re.S)


def _blank(text):
    return re.sub(r"[^\n]", " ", text)


def code_only(text, keep_strings=False):
    """The text with comments, and string literals unless kept, as blanks; line numbers stay."""
    def replace(match):
        token = match.group(0)
        if token.startswith(("//", "/*")):
            return _blank(token)
        return token if keep_strings else _blank(token)
    return _TOKEN.sub(replace, text)


def comments_only(text):
    """The text with everything but comments as blanks."""
    out, position = [], 0
    for match in _TOKEN.finditer(text):
        out.append(_blank(text[position:match.start()]))
        token = match.group(0)
        out.append(token if token.startswith(("//", "/*")) else _blank(token))
        position = match.end()
    out.append(_blank(text[position:]))
    return "".join(out)


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def parallel(function, items):
    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2)) as pool:
        return list(pool.map(function, items))


class Passed:
    """Remembers, below build/, which contents a slow check has passed already."""

    def __init__(self, root, name):
        self._path = Path(root) / "build" / "check" / name
        self._known = set(self._path.read_text().split()) if self._path.exists() else set()
        self._used = set()

    @staticmethod
    def key(*parts):
        digest = hashlib.sha256()
        for part in parts:
            data = part if isinstance(part, bytes) else part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.hexdigest()[:32]

    def __contains__(self, key):
        if key in self._known:
            self._used.add(key)
            return True
        return False

    def add(self, key):
        self._used.add(key)

    def save(self):
        """Keeps only what this run has used, so that the file does not grow."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(f".{os.getpid()}")
            temporary.write_text("\n".join(sorted(self._used)))
            temporary.replace(self._path)
        except OSError:
            pass  # a read-only tree is checked without memory
