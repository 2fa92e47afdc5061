#!/usr/bin/env python3
"""Each check of tools/check finds what it is for in a small tree made for it, and nothing in a clean one."""

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))

LAYERS = """
core :
platform : core
experts/a : core platform
experts/b : core platform
capi : core
header status : core
header machine : platform
"""
CLEAN_HEADER = "#pragma once\n\n#include <cstdint>\n\nint64_t Answer();\n"


class CheckTest(unittest.TestCase):
    def setUp(self):
        self.root = Path(tempfile.mkdtemp(prefix="fusedmoe_check_"))
        self.addCleanup(shutil.rmtree, self.root)
        shutil.copy(ROOT / ".clang-format", self.root)
        self.write("tools/layers.txt", LAYERS)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    def found(self, check, *arguments):
        return importlib.import_module(f"check_{check}").check(self.root, *arguments)

    def expect(self, check, word, *arguments):
        findings = self.found(check, *arguments)
        self.assertTrue(any(word in finding for finding in findings), f"no finding with '{word}' in {findings}")

    def expect_clean(self, check, *arguments):
        self.assertEqual(self.found(check, *arguments), [])


class Braces(CheckTest):
    def test_bodies(self):
        self.write("src/core/a.cpp", "void F() {\n  if (G(1)) {\n    do {\n    } while (H());\n  } else if (I()) {\n  }\n"
                   "  const char* text = \"if (x) y\";  // else z\n}\n#if A\n#else\n#endif\n")
        self.expect_clean("braces")
        for body in ("if (G(\n    1))\n  return;", "if (a) {\n} else\n  b();", "for (;;)\n  a();", "while (a)\n  b();"):
            self.write("src/core/a.cpp", f"void F() {{\n{body}\n}}\n")
            self.expect("braces", "a body without braces")


class Format(CheckTest):
    def test_clean(self):
        self.write("src/core/a.cpp", "int F();\n")
        self.expect_clean("format")
        self.expect_clean("format")  # from memory

    def test_layout_of_code(self):
        self.write("src/core/a.cpp", "int F( ){return 1;}\n")
        self.expect("format", "src/core/a.cpp:1: not as clang-format")
        self.expect("format", "src/core/a.cpp:1: not as clang-format")  # a failure is not remembered as passed

    def test_drawings(self):
        drawing = "//     row  " + "| one " * 16
        self.write("src/core/a.hpp", drawing + "|\nint a;\n")
        self.expect_clean("format")  # 109 columns
        self.write("src/core/a.hpp", drawing + "| two |\nint a;\n")
        self.expect("format", "src/core/a.hpp:1: comment of 115 columns; 110 are allowed")

    def test_text(self):
        self.write("docs/a.md", "word \n")
        self.expect("format", "docs/a.md:1: trailing blank")
        self.write("docs/a.md", "word")
        self.expect("format", "no newline")
        self.write("docs/a.md", "word\r\n")
        self.expect("format", "carriage return")


class Layers(CheckTest):
    def test_clean(self):
        self.write("include/fusedmoe/status.hpp", CLEAN_HEADER)
        self.write("include/fusedmoe/machine.hpp", "#include <fusedmoe/status.hpp>\n")
        self.write("src/core/a.hpp", "#include <vector>\n#include <fusedmoe/status.hpp>\n")
        self.write("src/platform/b.cpp", '#include <fmt/format.h>\n#include "core/a.hpp"\n// #include "experts/a/x.hpp"\n')
        self.write("apps/cli/main.cpp", "#include <CLI/CLI.hpp>\n#include <fusedmoe/status.hpp>\n")
        self.expect_clean("layers")

    def test_upward_include(self):
        self.write("src/platform/b.hpp", "")
        self.write("src/core/a.cpp", '\n#include "platform/b.hpp"\n')
        self.expect("layers", "src/core/a.cpp:2: core must not include platform")

    def test_upward_public_header(self):
        self.write("include/fusedmoe/machine.hpp", "")
        self.write("src/core/a.cpp", "#include <fusedmoe/machine.hpp>\n")
        self.expect("layers", "core must not include <fusedmoe/machine.hpp>")

    def test_public_header_upward(self):
        self.write("include/fusedmoe/machine.hpp", "")
        self.write("include/fusedmoe/status.hpp", "#include <fusedmoe/machine.hpp>\n")
        self.expect("layers", "belongs to platform, which core must not include")

    def test_siblings(self):
        self.write("src/experts/a/a.hpp", "")
        self.write("src/experts/b/b.cpp", '#include "experts/a/a.hpp"\n')
        self.expect("layers", "experts/b must not include experts/a")
        self.write("tools/layers.txt", LAYERS + "experts/c : experts/a\n")
        self.expect("layers", "lists its sibling")

    def test_table_is_ordered(self):
        self.write("tools/layers.txt", "core : platform\nplatform :\n")
        self.expect("layers", "does not stand above it")

    def test_unknown_folder_header_and_file(self):
        self.write("src/attic/a.cpp", "")
        self.expect("layers", "no module of tools/layers.txt")
        self.write("src/core/a.cpp", '#include "a.hpp"\n')
        self.expect("layers", "no file below src/")
        self.write("include/fusedmoe/stray.hpp", "")
        self.expect("layers", "does not say which module owns")

    def test_public_header_with_internal_or_foreign_header(self):
        for path in ('"core/a.hpp"', "<fmt/format.h>", "<nlohmann/json.hpp>", "<mpi.h>"):
            self.write("include/fusedmoe/status.hpp", f"#include {path}\n")
            self.expect("layers", "public headers see standard and public ones")

    def test_foreign_header_in_wrong_place(self):
        self.write("src/core/a.hpp", "#include <fmt/format.h>\n")
        self.expect("layers", "third-party headers stay in .cpp files")
        self.write("src/core/a.cpp", "#include <nlohmann/json.hpp>\n")
        self.expect("layers", "core may not include <nlohmann/json.hpp>")

    def test_application_sees_inside(self):
        self.write("src/core/a.hpp", "")
        for folder in ("apps/cli", "examples/one"):
            self.write(f"{folder}/main.cpp", '#include "core/a.hpp"\n')
            self.expect("layers", f"{folder}/main.cpp:1:")
        self.write("src/capi/c.cpp", '#include "core/a.hpp"\n')
        self.expect("layers", "capi must not include core")


class Names(CheckTest):
    def test_clean(self):
        self.write("src/core/a.cpp", '// cites g1_alphas\nvoid F(float alpha) { snprintf(b, "TODO printf("); }\n')
        self.write("apps/cli/a.cpp", "int main() { printf(); }\n")
        self.write("tests/core/a.cpp", "int weight_scale_2; // TODO(#12): more\n")
        self.expect_clean("names")

    def test_file_names(self):
        for name in ("src/core/CamelCase.cpp", "src/core/string_utils.hpp", "src/core/common.hpp", "tests/core/a-b.cpp"):
            self.write(name, "")
            self.expect("names", name)

    def test_calls(self):
        for code in ('printf("x");', "std::abort();", "throw 1;", 'getenv("X");', "std::cout << 1;", "std::cerr << 1;",
                     "exit(1);", "fmt::print(1);"):
            self.write("src/core/a.cpp", f"void F() {{ {code} }}\n")
            self.expect("names", "library code returns a Status")

    def test_words(self):
        for word in ("g1_alphas", "a1_gscale", "weight_scale_2", "weight_scale_inv", "g2_alpha"):
            self.write("src/core/a.cpp", f"float {word};\n")
            self.expect("names", word)
        for word in ("CudaHelper", "thread_manager", "StringUtils"):
            self.write("src/core/a.cpp", f"struct {word};\n")
            self.expect("names", word)

    def test_exceptions_have_reasons(self):
        self.write("src/core/a.cpp", "float a1_gscale;\n")
        self.write("tools/names_allowed.txt", "gscale src/core/* because it is a test\n")
        self.expect_clean("names")
        self.write("tools/names_allowed.txt", "gscale src/core/*\n")
        self.expect("names", "an exception is")

    def test_unfinished_work(self):
        for text in ("// TODO more", "// FIXME", "/* slow for now */", "// placeholder", "// a stub"):
            self.write("src/core/a.cpp", text + "\n")
            self.expect("names", "work that is left is an issue")


class Headers(CheckTest):
    def test_clean(self):
        self.write("include/fusedmoe/status.hpp", CLEAN_HEADER)
        self.write("src/core/a.hpp", '#pragma once\n#include <fusedmoe/status.hpp>\ninline auto F() { return Answer(); }\n')
        self.expect_clean("headers")
        self.expect_clean("headers")

    def test_missing_include(self):
        self.write("src/core/a.hpp", "#pragma once\nstd::string F();\n")
        self.expect("headers", "src/core/a.hpp: does not compile alone")
        self.expect("headers", "src/core/a.hpp: does not compile alone")

    def test_missing_guard(self):
        self.write("src/core/a.hpp", "struct A {};\n")
        self.expect("headers", "src/core/a.hpp: does not start with #pragma once")

    def test_header_that_the_build_tries_is_left_to_it(self):
        self.write("src/core/a.hpp", "#pragma once\nstd::string F();\n")
        self.write("src/core/b.cpp", '#include <string>\n#include "core/a.hpp"\n')
        self.expect("headers", "src/core/a.hpp: does not compile alone")
        self.write("src/core/a.cpp", '#include "core/a.hpp"\n')
        self.expect_clean("headers")

    def test_change_below_is_seen(self):
        self.write("src/core/a.hpp", "#pragma once\nusing Word = int;\n")
        self.write("src/core/b.hpp", '#pragma once\n#include "core/a.hpp"\nWord F();\n')
        self.expect_clean("headers")
        self.write("src/core/a.hpp", "#pragma once\n")
        self.expect("headers", "src/core/b.hpp")

    def test_c_header_is_c(self):
        self.write("include/fusedmoe/fusedmoe.h", "#pragma once\nclass A;\n")
        self.expect("headers", "include/fusedmoe/fusedmoe.h")


class Symbols(CheckTest):
    OBJECT = "build/release/CMakeFiles/x.dir/src/experts/a/kernels_avx2.cpp.o"

    def build(self, code):
        self.write("src/experts/a/kernels_avx2.cpp", code)
        (self.root / self.OBJECT).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["g++", "-std=c++20", "-O0", "-c", "src/experts/a/kernels_avx2.cpp", "-o", self.OBJECT],
                       cwd=self.root, check=True)

    def test_clean(self):
        self.build("static inline int F() { return 1; }\nint (*table)() = &F;\n")
        self.expect_clean("symbols")

    def test_weak_symbol(self):
        self.build("inline int Shared() { return 1; }\nint (*table)() = &Shared;\n")
        self.expect("symbols", "weak symbol Shared()")

    def test_object_of_a_deleted_source_is_ignored(self):
        self.build("inline int Shared() { return 1; }\nint (*table)() = &Shared;\n")
        os.remove(self.root / "src/experts/a/kernels_avx2.cpp")
        self.expect_clean("symbols")


class Tables(CheckTest):
    TABLE = [("docs/page.md", ["print.sh", "fresh"])]

    def setUp(self):
        super().setUp()
        self.write("print.sh", '#!/bin/sh\necho "$1"\n')
        os.chmod(self.root / "print.sh", 0o755)

    def test_clean(self):
        self.expect_clean("tables", self.TABLE)  # no page yet
        self.write("docs/page.md", "fresh\n")
        self.expect_clean("tables", self.TABLE)

    def test_stale_page(self):
        self.write("docs/page.md", "stale\n")
        self.expect("tables", "docs/page.md: is not what", self.TABLE)

    def test_generator_that_fails(self):
        self.write("docs/page.md", "fresh\n")
        self.write("print.sh", "#!/bin/sh\necho broken >&2\nexit 3\n")
        self.expect("tables", "broken", self.TABLE)


class Sizes(CheckTest):
    def test_clean(self):
        self.write("src/core/a.cpp", "\n" * 800)
        self.write("src/core/README.md", "\n" * 40)
        self.expect_clean("sizes")

    def test_long_file_and_readme(self):
        self.write("src/core/a.cpp", "\n" * 801)
        self.write("src/core/README.md", "\n" * 41)
        self.expect("sizes", "src/core/a.cpp: 801 lines")
        self.expect("sizes", "src/core/README.md: 41 lines")

    def test_module_without_readme(self):
        self.write("src/core/a.cpp", "")
        self.expect("sizes", "src/core: no README.md")


class Words(CheckTest):
    def test_clean(self):
        self.write("docs/a.md", "[b](b.md#a-part-of-it) and [web](https://example.org); build/mnt/x, $HOME/mnt/\n")
        self.write("docs/b.md", "# A `part`: [of](a.md) it\n\n[here](#a-part-of-it), [there](a.md)\n")
        self.write("docs/c.md", "[b](b.md#a-part-of-it)\n\n```\n# no heading\n```\n")
        self.write("src/core/a.cpp", '/// docs/b.md, "A part"; docs/c.md. (docs/b.md, "A\n/// part: of it")\n')
        self.expect_clean("words")

    def test_sections(self):
        self.write("docs/b.md", "# One\n\n```\n# Two\n```\n")
        for link in ("b.md#two", "b.md#One", "#one"):
            self.write("docs/a.md", f"[b]({link})\n")
            self.expect("words", f"docs/a.md:1: link to '{link}', a section that does not exist")
        self.write("docs/a.md", "[b](b.md#one)\n")
        self.write("src/core/a.cpp", '\n// docs/b.md, "Two"\n')
        self.expect("words", "src/core/a.cpp:2: names 'docs/b.md, \"Two\"', a section that does not exist")
        self.write("src/core/a.cpp", "// docs/gone.md\n")
        self.expect("words", "src/core/a.cpp:1: names 'docs/gone.md'")

    def test_paths_words_links(self):
        self.write("src/core/a.cpp", '// see /mnt/x/y\n')
        self.expect("words", "src/core/a.cpp:1: '/mnt/'")
        for word in ("session", "helper", "agents"):
            self.write("docs/a.md", f"made by a {word}\n")
            self.expect("words", f"docs/a.md:1: '{word}'")
        self.write("docs/a.md", "[gone](gone.md)\n")
        self.expect("words", "link to 'gone.md'")
        self.write("docs/a.md", "read `a.cpp`, `core/a.cpp`, then `core/gone.hpp`\n")
        self.expect("words", "docs/a.md:1: names 'core/gone.hpp'")
        self.write("docs/a.md", "a task of `GateTasks`\n")
        self.expect("words", "docs/a.md:1: names 'GateTasks', which no source has")
        self.write("src/core/b.hpp", "class GateTasks;\nvoid RoundHalfAway();\n")
        self.write("docs/a.md", "`GateTasks` round by `HalfAway`; read `a.cpp` and `core/a.cpp`\n")
        self.write("src/core/a.cpp", "int a;\n")
        self.expect_clean("words")


class Scripts(CheckTest):
    def test_clean(self):
        self.write("tools/a.py", "print(1)\n")
        self.write("tools/run", '#!/bin/sh\necho "$1"\n')
        self.expect_clean("scripts")

    def test_broken(self):
        self.write("tools/a.py", "def f(:\n")
        self.expect("scripts", "tools/a.py:1")
        self.write("tools/run", "#!/bin/bash\nif true; then\n")
        self.expect("scripts", "tools/run")

    @unittest.skipUnless(shutil.which("shellcheck"), "shellcheck is not installed")
    def test_shellcheck(self):
        self.write("tools/run", "#!/bin/sh\nrm $1\n")
        self.expect("scripts", "SC2086")


class Program(unittest.TestCase):
    def test_every_check_has_a_test(self):
        checks = {path.stem.removeprefix("check_") for path in (ROOT / "tools").glob("check_*.py")}
        tested = {name.lower() for name, value in globals().items()
                  if isinstance(value, type) and issubclass(value, CheckTest) and value is not CheckTest}
        self.assertEqual(checks, tested)

    def test_arguments_are_refused(self):
        ran = subprocess.run([str(ROOT / "tools" / "check"), "x"], capture_output=True, check=False)
        self.assertNotEqual(ran.returncode, 0)


if __name__ == "__main__":
    unittest.main()
