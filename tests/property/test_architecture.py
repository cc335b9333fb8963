"""How the package is cut: which room may import which, and how large its parts are.

The table below is the one that docs/design.md, "Rooms" explains.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

import fastnorm

PACKAGE = Path(fastnorm.__file__).parent
When = Literal["import", "call", "types"]

#: What each room imports of the others when it is imported. A room stands below all that it
#: imports: a new one gets a row, and imports only rows above its own.
ROOMS: dict[str, set[str]] = {
    "semantics": set(),
    "device": set(),
    "problem": {"semantics"},
    "budget": {"device", "problem"},
    "candidates": {"budget", "device", "problem"},
    "plan": {"budget", "candidates", "device", "problem"},
    "kernels": set(),
    "routing": {"budget", "device", "plan", "problem"},
    "offline": {"device", "plan", "problem", "routing"},
    "operands": {"problem"},
    "reference": {"semantics"},
    "ops": {"operands", "reference", "routing", "semantics"},
    "autocast": {"reference", "semantics"},
    "sharding": set(),
    "autograd": {"operands", "ops", "reference", "semantics", "sharding"},
    "validation": {"semantics"},
    "native": {
        *("autocast", "autograd", "operands", "ops", "problem", "routing", "semantics"),
        "validation",
    },
    "functional": {
        *("autocast", "autograd", "native", "ops", "reference", "routing", "semantics"),
        "validation",
    },
    "modules": {"autocast", "functional", "sharding"},
    "patching": {"autocast", "functional", "modules", "reference", "semantics", "sharding"},
    "lightning": {"autocast", "patching", "routing"},
    "tuning": {"operands", "ops", "plan", "problem", "routing"},
    "explanation": {"routing"},
    "explainer": {
        *("autocast", "device", "explanation", "modules", "offline", "operands", "ops"),
        *("patching", "plan", "problem", "reference", "routing", "semantics"),
    },
    "__init__": {
        *("explainer", "explanation", "functional", "modules", "patching", "routing", "tuning")
    },
    "__main__": {"__init__", "device", "explainer", "native", "problem", "semantics"},
}
#: What rooms import when a function of theirs is called: all that needs Triton.
AT_A_CALL: dict[str, set[str]] = {"routing": {"kernels"}, "native": {"kernels"}}
#: What only the type checker imports.
FOR_TYPES: dict[str, set[str]] = {"kernels": {"operands", "plan"}}

#: Third parties imported by a room's import; torch alone where there is no row.
THIRD_PARTIES: dict[str, set[str]] = {
    **dict.fromkeys(("semantics", "device", "problem", "budget", "candidates", "plan"), set()),
    "kernels": {"torch", "triton"},
    "lightning": {"lightning_utilities", "torch"},
}

#: Lines of a file, and of a function less its signature and docstring.
LONGEST_FILE, LONGEST_FUNCTION = 320, 95
#: What is longer, and may only get shorter: the body of one loop over one protocol.
LONGER = {"norm_backward_split": 109}


def sources() -> dict[str, ast.Module]:
    """Every file of the package, parsed, by its path in it."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


SOURCES = sources()
FILES = pytest.mark.parametrize("file", SOURCES)


def room_of(file: str) -> str:
    """The folder of a file within the package, or the file itself."""
    return file.partition("/")[0].removesuffix(".py")


def imported(tree: ast.AST, when: When = "import") -> Iterator[tuple[str, When]]:
    """Dotted names that a file imports, and when."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import hides which room it means"
            assert node.module is not None
            yield from ((f"{node.module}.{alias.name}", when) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for part in node.body:
                yield from imported(ast.Module([part], []), "types")
            for part in node.orelse:
                yield from imported(ast.Module([part], []), when)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported(node, "call" if when == "import" else when)
        else:
            yield from imported(node, when)


def edges(when: When) -> dict[str, set[str]]:
    """Which rooms import which others, at one time."""
    found: dict[str, set[str]] = defaultdict(set)
    for file, tree in SOURCES.items():
        room = room_of(file)
        for name, then in imported(tree):
            package, _, rest = name.partition(".")
            if package != "fastnorm" or then != when:
                continue
            target = rest.partition(".")[0]
            inside = (PACKAGE / target).is_dir() or (PACKAGE / f"{target}.py").exists()
            found[room].add(target if inside else "__init__")
            found[room].discard(room)
    return {room: targets for room, targets in found.items() if targets}


def third_parties(file: str) -> set[str]:
    """Packages outside the standard library that importing a file imports."""
    names = {name.partition(".")[0] for name, when in imported(SOURCES[file]) if when == "import"}
    return names - sys.stdlib_module_names - {"fastnorm"}


def test_the_parser_tells_when_something_is_imported() -> None:
    text = (
        "import a.b\n"
        "if TYPE_CHECKING:\n    from c import d\nelse:\n    import e\n"
        "try:\n    import f\nexcept ImportError:\n    pass\n"
        "class C:\n    def m(self):\n        from g import h\n"
    )
    assert dict(imported(ast.parse(text))) == {
        **{"a.b": "import", "e": "import", "f": "import"},
        **{"c.d": "types", "g.h": "call"},
    }


def test_rooms_import_what_the_table_says() -> None:
    present = {room_of(file) for file in SOURCES}
    assert present == set(ROOMS)
    assert edges("import") == {room: targets for room, targets in ROOMS.items() if targets}
    assert edges("call") == AT_A_CALL
    assert edges("types") == FOR_TYPES


def test_the_document_lists_the_rooms_in_this_order() -> None:
    page = PACKAGE.parent / "docs" / "design.md"
    if not page.exists():
        pytest.skip("documents come with a checkout only")
    listed = re.findall(r"^\| `(\w+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert listed == [room for room in ROOMS if room != "__init__"]


def test_imports_run_one_way() -> None:
    above: set[str] = set()
    for room, targets in ROOMS.items():
        assert targets | AT_A_CALL.get(room, set()) <= above, room
        above.add(room)


@FILES
def test_only_some_rooms_need_third_parties(file: str) -> None:
    """Plans are made without torch; Triton and Lightning stay in one room each."""
    assert third_parties(file) <= THIRD_PARTIES.get(room_of(file), {"torch"})


def test_importing_fastnorm_loads_neither_triton_nor_lightning_and_touches_no_gpu() -> None:
    unwanted = ("triton", "lightning", "pytorch_lightning", "transformers", "rich")
    code = (
        "import sys, fastnorm, torch\n"
        f"loaded = [m for m in {unwanted} if m in sys.modules]\n"
        "assert not loaded, loaded\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_no_public_function_has_the_name_of_a_module() -> None:
    assert not set(fastnorm.__all__) & {room_of(file) for file in SOURCES}


@FILES
def test_files_and_functions_are_short(file: str) -> None:
    tree = SOURCES[file]
    lines = len((PACKAGE / file).read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{lines} lines: cut it along its parts"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and node.body[1:] else node.body
            length = (node.end_lineno or 0) - body[0].lineno + 1
            assert length <= LONGER.get(node.name, LONGEST_FUNCTION), f"{node.name}: {length} lines"


@FILES
def test_errors_are_caught_by_name(file: str) -> None:
    """What is not known to be harmless propagates."""
    broad = {"Exception", "BaseException"}
    for node in ast.walk(SOURCES[file]):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            caught = {ast.unparse(n) for n in ast.walk(node.type) if isinstance(n, ast.expr)}
            assert not caught & broad, f"line {node.lineno}: {ast.unparse(node.type)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            assert not {ast.unparse(a) for a in node.args} & broad, f"line {node.lineno}"


@FILES
def test_no_environment_variables(file: str) -> None:
    """A forced path is an argument or a context manager."""
    for node in ast.walk(SOURCES[file]):
        if isinstance(node, ast.Attribute | ast.Name):
            name = ast.unparse(node).rpartition(".")[2]
            assert name not in ("environ", "getenv", "environb", "putenv"), f"line {node.lineno}"
