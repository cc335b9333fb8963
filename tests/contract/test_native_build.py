"""The compiled half of the shortcut: where it is kept, how it is built, what is not loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastnorm.__main__ import main
from fastnorm.native import library

ROOT = Path(__file__).parents[2]


def test_a_library_serves_the_versions_it_was_built_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = library.folder(tmp_path)
    assert library.load(tmp_path) is None
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    assert library.folder(tmp_path) != here
    monkeypatch.undo()
    changed = tmp_path / "norm.cpp"
    changed.write_bytes(library.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(library, "SOURCE", changed)
    assert library.folder(tmp_path) != here


def test_what_is_missing_for_a_build_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda _name: None)
    with pytest.raises(library.BuildError, match=r"g\+\+.*pip install ninja"):
        library.build()
    assert main(["build"]) == 1
    assert "pip install ninja" in capsys.readouterr().err


def test_a_compiler_that_fails_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = tmp_path / "norm.cpp"
    wrong.write_text("#error on purpose\n", encoding="utf-8")
    monkeypatch.setattr(library, "SOURCE", wrong)
    with pytest.raises(library.BuildError, match="C\\+\\+ compiler failed"):
        library.build(tmp_path)
    assert library.load(tmp_path) is None


def test_a_cache_that_cannot_be_written_to_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(library.BuildError, match="nothing can be kept in .*file"):
        library.build(tmp_path / "file")


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are Linux's")
@pytest.mark.parametrize("whole", [True, False])
def test_what_does_not_load_is_ignored_with_a_warning(whole: bool, tmp_path: Path) -> None:
    """Half of a library would end the process: it is not even tried."""
    place = library.folder(tmp_path)
    place.mkdir(parents=True)
    (place / "half").write_bytes(b"\x7fELF, and no more")
    name = library._file_name(place / "half") if whole else f"{library._NAME}-0123456789abcdef.so"
    (place / "half").rename(place / name)
    problem = "does not load" if whole else "is damaged"
    with pytest.warns(UserWarning, match=f"{problem}.*\n?.*python -m fastnorm build"):
        assert library.load(tmp_path) is None


def test_a_home_that_is_not_ours_to_read_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(_path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    def forbidden(_cache: Path) -> list[Path]:
        raise PermissionError

    monkeypatch.setattr(Path, "expanduser", nobody)
    assert library.load() is None
    monkeypatch.undo()
    monkeypatch.setattr(library, "_files", forbidden)
    assert library.load(tmp_path) is None
    monkeypatch.undo()
    monkeypatch.setattr(library, "SOURCE", tmp_path / "not there")
    assert library.load(tmp_path) is None


def test_builds_replace_what_is_broken_and_nothing_else(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also twice in one process, and beside the lock of a build that was killed."""
    if not request.config.getoption("--native"):
        pytest.skip("needs --native")
    caches = tmp_path / "one", tmp_path / "two"
    for cache in caches:
        place = library.folder(cache)
        place.mkdir(parents=True)
        (place / "lock").touch()
        (place / f"{library._NAME}-0123456789abcdef.so").write_bytes(b"half")
        built = library.build(cache)
        assert list(library._files(cache)) == [built]
        assert library.build(cache) == built
        assert library.load(cache) is not None
        assert sorted(p.name for p in place.iterdir()) == [built.name, "lock"]


def test_an_import_without_a_home(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path / "gone"), "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", "import fastnorm"], check=True, env=environment
    )
