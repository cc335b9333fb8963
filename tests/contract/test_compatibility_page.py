"""docs/compatibility.md names tests that exist, and every public report that tests name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text()


def _tests() -> dict[str, str]:
    """Names of all test functions, with their docstrings."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found[node.name] = ast.get_docstring(node) or ""
    return found


def test_every_test_on_the_page_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named and named <= set(_tests()), named - set(_tests())


def test_every_row_of_the_matrix_names_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    headers = ("| feature |", "| promise |", "| case |", "| no. |")
    empty = [row for row in rows if "`test_" not in row and not row.startswith(headers)]
    assert not empty


def test_reports_on_the_page_are_in_the_tests_that_it_names() -> None:
    """Or in a range such as "B16 to B20", or covered by a sweep that needs no number."""
    tests = _tests()
    for number, names in re.findall(r"^\| (B\d+) \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE):
        told = []
        for name in re.findall(r"`(test_\w+)`", names):
            numbers = set(re.findall(r"\bB\d+\b", tests[name]))
            for first, last in re.findall(r"\bB(\d+) to B(\d+)\b", tests[name]):
                numbers |= {f"B{i:02}" for i in range(int(first), int(last) + 1)}
            told.append(number in numbers or name == "test_every_width_is_as_accurate_as_torch")
        assert told and all(told), number
