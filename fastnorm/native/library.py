"""The compiled half of the shortcut: built on demand, once per version of torch and Python."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

#: Where built libraries are kept.
CACHE = Path("~/.cache/fastnorm/native")
SOURCE = Path(__file__).with_name("norm.cpp")
_NAME = "fastnorm_native"


class BuildError(RuntimeError):
    """The library cannot be built here; the message says what is missing."""


def folder(cache: Path = CACHE) -> Path:
    """Where this source's library for this torch, Python and machine is, or would be."""
    made_from = SOURCE.read_bytes() + str(torch.version.git_version).encode()
    digest = hashlib.sha256(made_from).hexdigest()[:12]
    python = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    return cache.expanduser() / f"torch-{torch.__version__}-{python}-{digest}"


def build(cache: Path = CACHE, *, verbose: bool = False) -> Path:
    """Compile the library, if there is none yet that loads: about half a minute.

    Args:
        cache: where to keep it.
        verbose: show the compiler's commands.

    Returns:
        The library's file. Processes that start from now on use it; this one does after
        `shortcut.connect()`.

    Raises:
        BuildError: this is not Linux, there is no C++ compiler or no ninja, the compiler fails, or
            the cache cannot be written to.
    """
    from torch.utils import cpp_extension

    if sys.platform != "linux":
        raise BuildError("the library is for Linux only, as the kernels are")
    compiler = cpp_extension.get_cxx_compiler().split()[0]
    if shutil.which("ninja") is None or shutil.which(compiler) is None:
        raise BuildError(
            f"building needs a C++ compiler ({compiler}) and ninja on the PATH: install your "
            "system's g++, and ninja with `pip install ninja` (then activate that environment)"
        )
    try:
        if _tried(cache)[0] is not None:
            return next(_files(cache))
        place = folder(cache)
        place.mkdir(parents=True, exist_ok=True)
        # Apart from what other processes build and load, then there at once and whole.
        with tempfile.TemporaryDirectory(prefix="building-", dir=place) as room:
            cpp_extension.load(
                _NAME,
                [str(SOURCE)],
                build_directory=room,
                extra_cflags=["-O2"],
                with_cuda=False,
                verbose=verbose,
                is_python_module=False,
            )
            # torch numbers the file where a process builds twice.
            (built,) = Path(room).glob(f"{_NAME}*.so")
            file = place / _file_name(built)
            os.replace(built, file)
        for other in _files(cache):
            if other != file:
                other.unlink(missing_ok=True)
    except RuntimeError as error:
        raise BuildError(f"the C++ compiler failed: {error}") from error
    except OSError as error:
        raise BuildError(f"nothing can be kept in {cache}: {error}") from error
    return file


def load(cache: Path = CACHE) -> ModuleType | None:
    """The built library as a module; None where there is none for these versions, or none that
    loads (with a warning)."""
    module, problem = _tried(cache)
    if problem:
        warnings.warn(
            f"fastnorm: {problem}; eager calls go through Python. `python -m fastnorm build` "
            "builds it anew.",
            stacklevel=3,
        )
    return module


def _tried(cache: Path) -> tuple[ModuleType | None, str]:
    """The library, if it loads; else what is wrong with it, or "" where there is none."""
    try:
        file = next(_files(cache), None)
        whole = file is not None and file.name == _file_name(file)
    except (OSError, RuntimeError):  # no home folder, or one that is not ours to read
        return None, ""
    if file is None:
        return None, ""
    if not whole:  # loading it could end the process
        return None, f"{file} is damaged"
    try:
        return _imported(file), ""
    except ImportError as error:
        return None, f"{file} does not load ({error})"


def _files(cache: Path) -> Iterator[Path]:
    return folder(cache).glob(f"{_NAME}-*.so")


def _file_name(file: Path) -> str:
    """A library's name holds a digest of it, which tells whether all of it is there."""
    return f"{_NAME}-{hashlib.sha256(file.read_bytes()).hexdigest()[:16]}.so"


def _imported(file: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
