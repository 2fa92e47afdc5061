"""Every body of if, else, for and while has braces, also where it is one statement; clang-format 14 cannot add them."""

import re

import source_tree

PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.M)
HEAD = re.compile(r"(?<![\w.])(?:(if|for|while)\b(?: constexpr)?\s*\(|else\b(?!\s*if\b))")


def _findings(name, text):
    code = PREPROCESSOR.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), source_tree.code_only(text))
    found = []
    for head in HEAD.finditer(code):
        at, depth = head.end(), 1 if head.group(1) else 0
        while depth and at < len(code):
            depth += {"(": 1, ")": -1}.get(code[at], 0)
            at += 1
        body = code[at:].lstrip()
        ends_do = head.group(1) == "while" and body.startswith(";")
        if not body.startswith("{") and not ends_do:
            found.append(f"{name}:{source_tree.line_of(code, head.start())}: a body without braces")
    return found


def check(root):
    return [finding for name in source_tree.cpp_files(root)
            for finding in _findings(name, source_tree.read(root, name))]
