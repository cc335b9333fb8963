"""The compiled half of the shortcut: built on demand, once per version of torch and Python."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import shutil
import sys
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
    """Where this source's library for this torch and this Python is, or would be."""
    source = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]
    return cache.expanduser() / f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{source}"


def build(cache: Path = CACHE, *, verbose: bool = False) -> Path:
    """Compile the library, if it is not there yet: about half a minute.

    Args:
        cache: where to keep it.
        verbose: show the compiler's commands.

    Returns:
        The library's file. Processes that start from now on use it; this one does after
        `shortcut.connect()`.

    Raises:
        BuildError: there is no C++ compiler or no ninja, or the compiler fails.
    """
    from torch.utils import cpp_extension

    if shutil.which("ninja") is None or not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise BuildError(
            "building needs a C++ compiler and ninja on the PATH: install your system's g++, and "
            "ninja with `pip install ninja`"
        )
    place = folder(cache)
    place.mkdir(parents=True, exist_ok=True)
    try:
        cpp_extension.load(
            _NAME,
            [str(SOURCE)],
            build_directory=str(place),
            extra_cflags=["-O2"],
            with_cuda=False,
            verbose=verbose,
            is_python_module=False,
        )
    except (RuntimeError, OSError) as error:
        raise BuildError(f"the C++ compiler failed: {error}") from error
    return place / f"{_NAME}.so"


def load(cache: Path = CACHE) -> ModuleType | None:
    """The built library as a module, or None where it has not been built for these versions."""
    file = folder(cache) / f"{_NAME}.so"
    if not file.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(file))
    spec = importlib.util.spec_from_file_location(_NAME, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
