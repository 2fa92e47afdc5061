"""File names, words that hide meaning, and calls that library code does not make.

tools/names_allowed.txt lists exceptions: word, path pattern, reason."""

import fnmatch
import re
from pathlib import Path

import source_tree

FILE_NAME = re.compile(r"_{0,2}[a-z0-9][a-z0-9_]*(\.[a-z0-9_]+)+")
EMPTY_FILE_WORDS = re.compile(r"(^|_)(utils?|helpers?|common|misc|managers?)(_|$)")
# Words of other projects for scales: here decoding multiplies, and a name says operand, granularity, scale.
FOREIGN_SCALE_WORDS = re.compile(r"\b\w*(?:alphas|gscale|scale_inv)\w*\b|\b\w*scale_2(?![0-9a-z])|\bg[12]_alpha\w*", re.I)
EMPTY_WORDS = re.compile(r"\b\w*(?:[Hh]elper|[Mm]anager|[Uu]tils?(?![a-z]))\w*\b")
CALLS = re.compile(
    r"(?<![\w:.>])(?:std::|::)?(?:v?f?printf|puts|fputs|putchar|perror|abort|exit|_exit|quick_exit|terminate|getenv|"
    r"secure_getenv|setenv|putenv)\s*\(|(?<!\w)throw\b|std::(?:cout|cerr|clog)\b|\bfmt::print\b")
UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|\bfor now\b|\bplaceholder\b|\bstub(?:s|bed)?\b", re.I)
TODO_WITH_NUMBER = re.compile(r"TODO\(#\d+")


def _exceptions(root):
    path = Path(root) / "tools" / "names_allowed.txt"
    table, found = [], []
    if not path.exists():
        return table, found
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split(None, 2)
        if len(fields) < 3:
            found.append(f"tools/names_allowed.txt:{number}: an exception is 'word path reason'")
        else:
            table.append((fields[0].lower(), fields[1]))
    return table, found


def _allowed(table, word, name):
    return any((entry in word.lower()) and fnmatch.fnmatch(name, pattern) for entry, pattern in table)


def _matches(pattern, text, name, table, message):
    for match in pattern.finditer(text):
        word = match.group(0).strip()
        if not _allowed(table, word, name):
            yield f"{name}:{source_tree.line_of(text, match.start())}: {message.format(word)}"


def _file_name(name):
    base = Path(name).name
    if base in ("CMakeLists.txt", "README.md", "CMakePresets.json"):
        return []
    if not FILE_NAME.fullmatch(base):
        return [f"{name}: file names are snake_case"]
    if EMPTY_FILE_WORDS.search(Path(name).name.split(".")[0]):
        return [f"{name}: a file is named after what it holds (not utils, common, misc and the like)"]
    return []


def check(root):
    table, found = _exceptions(root)
    for name in source_tree.files(root):
        if name.split("/")[0] in source_tree.SOURCE_FOLDERS and not name.startswith(source_tree.DATA_FOLDERS):
            found += _file_name(name)
    for name in source_tree.cpp_files(root):
        top = name.split("/")[0]
        text = source_tree.read(root, name)
        for finding in _matches(UNFINISHED, source_tree.comments_only(text), name, table,
                                "'{}': work that is left is an issue, not a comment (TODO(#number) names one)"):
            line = int(finding.split(":")[1])
            if not TODO_WITH_NUMBER.search(text.splitlines()[line - 1]):
                found.append(finding)
        if top not in ("include", "src", "apps"):
            continue
        words = source_tree.code_only(text, keep_strings=True)
        found += _matches(FOREIGN_SCALE_WORDS, words, name, table, "'{}': a scale is <operand>_<granularity>_scale")
        code = source_tree.code_only(text)
        found += _matches(EMPTY_WORDS, code, name, table, "'{}' says nothing: name what it does")
        if top in ("include", "src"):
            found += _matches(CALLS, code, name, table, "'{}': library code returns a Status")
    return found
