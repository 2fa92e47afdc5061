"""The project speaks only of itself: no paths of somebody's machine, no words about how it was made; links lead
somewhere, and sources that a page names are there."""

import re
from pathlib import Path

import source_tree

MACHINE_PATHS = re.compile(r"(?<![\w.$}])/(?:work|root|home/\w+|Users|mnt|scratch)/")
MAKING = re.compile(r"\b(?:sessions?|helpers?|agents?|prompts?|claude|anthropic|chatgpt|copilot)\b", re.I)
KEPT = re.compile(r"\bkept back\b|\bheld[- ]out tests?\b", re.I)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SOURCE = re.compile(r"`([\w./-]+\.(?:cpp|hpp|inc|cu|cuh))`")
BINARY = (".safetensors", ".bin", ".png", ".npz", ".npy", ".gz")
# These hold the patterns, or examples of what they find.
OWN = ("tools/check_words.py", "tools/check_names.py", "tests/tools/check_test.py")


def _links(root, name, text):
    for match in LINK.finditer(text):
        target = match.group(1).split("#")[0]
        if not target or re.match(r"[a-z]+:", target):
            continue
        if not ((Path(root) / name).parent / target).exists():
            yield f"{name}:{source_tree.line_of(text, match.start())}: link to '{target}', which does not exist"


def _sources(name, text, files):
    for match in SOURCE.finditer(text):
        if not any(file == match.group(1) or file.endswith("/" + match.group(1)) for file in files):
            yield f"{name}:{source_tree.line_of(text, match.start())}: names '{match.group(1)}', which does not exist"


def check(root):
    found = []
    files = source_tree.files(root)
    for name in files:
        if name in OWN or name.endswith(BINARY) or name.startswith("tests/fuzz/seeds/") or (Path(root) / name).stat().st_size > 1 << 20:
            continue
        text = source_tree.read(root, name)
        patterns = [(MACHINE_PATHS, "a path of some machine")]
        if name.endswith(".md") or name.split("/")[0] in ("docs", "tools"):
            patterns += [(MAKING, "the project speaks only of itself"), (KEPT, "the project speaks only of itself")]
        elif name.endswith(source_tree.CPP_SUFFIXES):
            patterns += [(re.compile(r"\b(?:claude|anthropic|AI agent)\b", re.I), "the project speaks only of itself")]
        for pattern, message in patterns:
            for match in pattern.finditer(text):
                found.append(f"{name}:{source_tree.line_of(text, match.start())}: '{match.group(0)}': {message}")
        if name.endswith(".md"):
            found += _links(root, name, text)
            found += _sources(name, text, files)
    return found
