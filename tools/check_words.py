"""The project speaks only of itself: no paths of somebody's machine, no words about how it was made; links, and pages
that sources name, lead somewhere, down to the section; sources, classes and functions that a page names are there."""

import re
from pathlib import Path

import source_tree

MACHINE_PATHS = re.compile(r"(?<![\w.$}])/(?:work|root|home/\w+|Users|mnt|scratch)/")
MAKING = re.compile(r"\b(?:sessions?|helpers?|agents?|prompts?|claude|anthropic|chatgpt|copilot)\b", re.I)
KEPT = re.compile(r"\bkept back\b|\bheld[- ]out tests?\b", re.I)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.S | re.M)
HEADING = re.compile(r"^#+ +(.*)$", re.M)
# In comments, which may break anywhere: docs/page.md, or docs/page.md, "Section".
PAGE = re.compile(r"\b(docs/[\w./-]+\.md)\b(?:,\s+(?:///? ?)?\"([^\"]+)\")?")
SOURCE = re.compile(r"`([\w./-]+\.(?:cpp|hpp|inc|cu|cuh))`")
# Classes and functions: `GateUpTasks`, of which a page may name a part (`HalfAway` of several functions).
NAME = re.compile(r"`([A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+)`")
# Of vLLM, the last of transformers.
OF_OTHERS = ("DeepGemmFP4Experts", "FlashinferMoeBackend", "NvFp4MoeBackend", "Qwen3MoeSparseMoeBlock", "RoutingMethodType",
             "ScaleDesc")
BINARY = (".safetensors", ".bin", ".png", ".npz", ".npy", ".gz")
# These hold the patterns, or examples of what they find.
OWN = ("tools/check_words.py", "tools/check_names.py", "tests/tools/check_test.py")


def _headings(page):
    """The headings of a page, as they stand but for marks of code and links."""
    text = FENCED.sub("", page.read_text(encoding="utf-8", errors="replace"))
    return [LINK.sub(lambda match: match.group(0)[1:].split("]")[0], heading).replace("`", "").strip()
            for heading in HEADING.findall(text)]


def _anchor(heading):
    """What a link calls a heading: lower case, blanks as hyphens, nothing else but letters, digits and those."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _links(root, name, text):
    for match in LINK.finditer(text):
        target, _, section = match.group(1).partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        page = (Path(root) / name).parent / target if target else Path(root) / name
        line = source_tree.line_of(text, match.start())
        if not page.exists():
            yield f"{name}:{line}: link to '{target}', which does not exist"
        elif section and page.suffix == ".md" and section not in map(_anchor, _headings(page)):
            yield f"{name}:{line}: link to '{match.group(1)}', a section that does not exist"


def _pages(root, name, text):
    for match in PAGE.finditer(text):
        page, line = Path(root) / match.group(1), source_tree.line_of(text, match.start())
        section = re.sub(r"\s+(?:///? ?)?", " ", match.group(2) or "")
        if not page.exists():
            yield f"{name}:{line}: names '{match.group(1)}', which does not exist"
        elif section and not any(heading.startswith(section) for heading in _headings(page)):
            yield f"{name}:{line}: names '{match.group(1)}, \"{section}\"', a section that does not exist"


def _sources(name, text, files):
    for match in SOURCE.finditer(text):
        if not any(file == match.group(1) or file.endswith("/" + match.group(1)) for file in files):
            yield f"{name}:{source_tree.line_of(text, match.start())}: names '{match.group(1)}', which does not exist"


def _words_of_sources(root, files):
    words = set()
    for name in files:
        if name.endswith(source_tree.CPP_SUFFIXES + (".c", ".py")) and not name.startswith(source_tree.DATA_FOLDERS):
            words.update(re.findall(r"\w+", source_tree.read(root, name)))
    return "\n".join(sorted(words))


def _names(name, text, words):
    for match in NAME.finditer(text):
        if match.group(1) not in words and match.group(1) not in OF_OTHERS:
            yield f"{name}:{source_tree.line_of(text, match.start())}: names '{match.group(1)}', which no source has"


def check(root):
    found = []
    files = source_tree.files(root)
    words = _words_of_sources(root, files)
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
            if not name.startswith(source_tree.DATA_FOLDERS):
                found += _names(name, text, words)
        elif name.endswith(source_tree.CPP_SUFFIXES):
            found += _pages(root, name, text)
    return found
