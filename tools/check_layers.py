"""Includes go downward only, as tools/layers.txt says; public headers see public headers; applications see the
public interface; third-party headers stay in the sources that may use them."""

import re
from pathlib import Path

import source_tree

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"\n]+)[>"]', re.M)
SIBLING_FOLDERS = ("experts", "prepare_finalize")
ONLY_PUBLIC = ("capi",)
# Third-party headers by the first part of their path, and the modules whose .cpp files may include them.
THIRD_PARTY = {
    "nlohmann": ("config", "checkpoint", "jobs"),  # config: problem descriptions
    "fmt": None,  # any module
    "mpi.h": ("parallel",),
    "CLI": (),
    "gtest": (),
    "rapidcheck": (),
    "benchmark": (),
}
ALLOWED_IN_HEADERS = ()


class Table:
    """The parsed table: allowed[module] is a set of modules, owner[header stem] the module of a public header."""

    def __init__(self, text):
        self.allowed, self.owner, self.findings = {}, {}, []
        for number, line in enumerate(text.splitlines(), 1):
            where = f"tools/layers.txt:{number}"
            line = line.split("#")[0].strip()
            if not line:
                continue
            left, colon, right = line.partition(":")
            words = left.split()
            if not colon or not words:
                self.findings.append(f"{where}: expected 'module : modules' or 'header names : module'")
            elif words[0] == "header":
                for stem in words[1:]:
                    self.owner[stem] = right.strip()
            else:
                self._module(where, words[0], right.split())
        for stem, module in self.owner.items():
            if module not in self.allowed:
                self.findings.append(f"tools/layers.txt: header {stem} belongs to unknown module '{module}'")

    def _module(self, where, module, below):
        for other in below:
            if other not in self.allowed:
                self.findings.append(f"{where}: {module} lists {other}, which does not stand above it in the table")
            top = module.split("/")[0]
            shared = other.endswith("/common")  # the room that some siblings share
            if top in SIBLING_FOLDERS and other.split("/")[0] in SIBLING_FOLDERS and not shared:
                self.findings.append(f"{where}: {module} lists its sibling {other}")
        if module in self.allowed:
            self.findings.append(f"{where}: {module} stands twice")
        self.allowed[module] = set(below)

    def module_of(self, path):
        """The module of a path below src/: the longest that is a folder of it; None when there is none."""
        parts = path.split("/")[:-1]
        for length in range(len(parts), 0, -1):
            module = "/".join(parts[:length])
            if module in self.allowed:
                return module
        return None


def includes(text):
    code = source_tree.code_only(text, keep_strings=True)
    for match in INCLUDE.finditer(code):
        yield source_tree.line_of(code, match.start()), match.group(1) == "<", match.group(2)


def _third_party(where, name, module, path):
    first = path.split("/")[0]
    if first not in THIRD_PARTY:
        return []
    modules = THIRD_PARTY[first]
    if name.endswith((".hpp", ".h", ".cuh")) and path not in ALLOWED_IN_HEADERS:
        return [f"{where}: <{path}> in a header (third-party headers stay in .cpp files)"]
    if modules is not None and module.split("/")[0] not in modules:
        return [f"{where}: {module} may not include <{path}> (allowed in: {', '.join(modules) or 'tests and apps'})"]
    return []


def _public_header(root, table, name):
    found = []
    stem = Path(name).stem
    owner = table.owner.get(stem)
    if name.endswith(".hpp") and owner is None:
        return [f"{name}: tools/layers.txt does not say which module owns this header"]
    for line, _, path in includes(source_tree.read(root, name)):
        where = f"{name}:{line}"
        if path.startswith("fusedmoe/"):
            other = table.owner.get(Path(path).stem)
            if owner and other and other != owner and other not in table.allowed[owner]:
                found.append(f"{where}: <{path}> belongs to {other}, which {owner} must not include")
        elif "/" in path or not re.fullmatch(r"[a-z_]+(\.h)?", path) or path in THIRD_PARTY:
            found.append(f"{where}: a public header includes '{path}' (public headers see standard and public ones)")
    return found


def _source(root, table, name):
    found = []
    inner = name[len("src/"):]
    module = table.module_of(inner)
    if module is None:
        return [f"{name}: its folder is no module of tools/layers.txt"]
    for line, angle, path in includes(source_tree.read(root, name)):
        where = f"{name}:{line}"
        if angle and path.startswith("fusedmoe/"):
            other = table.owner.get(Path(path).stem)
            if other is None and (Path(root) / "include" / path).suffix == ".hpp":
                found.append(f"{where}: <{path}> is no public header that tools/layers.txt knows")
            if other and other != module and other not in table.allowed[module] and module not in ONLY_PUBLIC:
                found.append(f"{where}: {module} must not include <{path}>, which belongs to {other}")
        elif angle:
            found += _third_party(where, name, module, path)
        elif not (Path(root) / "src" / path).is_file():
            if not (Path(root) / "build").exists() or path.endswith(".hpp"):
                found.append(f'{where}: "{path}" is no file below src/ (write "module/file.hpp")')
        else:
            other = table.module_of(path)
            if other != module and (module in ONLY_PUBLIC or other not in table.allowed[module]):
                found.append(f"{where}: {module} must not include {other} (\"{path}\")")
    return found


def _application(root, name):
    found = []
    for line, angle, path in includes(source_tree.read(root, name)):
        beside = (Path(root) / name).parent / path
        below_top = Path(root) / name.split("/")[0] / path
        if not angle and not beside.is_file() and not below_top.is_file() or ".." in path.split("/"):
            found.append(f"{name}:{line}: {name.split('/')[0]} sees only <fusedmoe/...>, not \"{path}\"")
    return found


def check(root):
    path = Path(root) / "tools" / "layers.txt"
    if not path.exists():
        return ["tools/layers.txt is missing"]
    table = Table(path.read_text())
    found = list(table.findings)
    if found:
        return found
    for name in source_tree.cpp_files(root, ("include", "src", "apps", "examples", "python")):
        top = name.split("/")[0]
        if top == "include":
            found += _public_header(root, table, name)
        elif top == "src":
            found += _source(root, table, name)
        else:
            found += _application(root, name)
    return found
