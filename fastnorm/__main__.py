"""`python -m fastnorm explain | doctor | build | bench`."""

from __future__ import annotations

import argparse
import importlib.util
import platform
import runpy
import sys

import torch

from fastnorm import __version__, device
from fastnorm.explainer import explain
from fastnorm.native import library, shortcut
from fastnorm.problem import ITEM_SIZE
from fastnorm.semantics import SEMANTICS


def main(argv: list[str] | None = None) -> int:
    """Parse and run one command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m fastnorm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_explain(commands)
    commands.add_parser("doctor", help="what of this machine fastnorm can use, and why not more")
    commands.add_parser(
        "build", help="compile the library that takes Python out of eager calls (half a minute)"
    )
    commands.add_parser(
        "bench",
        help="time norms on this GPU beside torch's and every installed peer's (from a checkout)",
        add_help=False,
    )
    known, rest = parser.parse_known_args(argv)
    if known.command == "bench":
        return _bench(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if known.command == "build":
        return _build()
    return _doctor() if known.command == "doctor" else _explain(known)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _add_explain(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "explain", help="what runs a norm on a GPU, with the figures behind it"
    )
    command.add_argument("--hidden", type=_positive, required=True, help="elements per row")
    command.add_argument("--dtype", choices=tuple(ITEM_SIZE), default="bf16")
    command.add_argument("--weight-dtype", choices=tuple(ITEM_SIZE), help="default: --dtype")
    command.add_argument("--norm", choices=tuple(SEMANTICS), default="layer")
    command.add_argument("--rows", type=_positive, help="for the size of the launch")
    command.add_argument(
        "--target", choices=device.known_targets(), help="default: this GPU, else sm_90"
    )
    command.add_argument("--json", action="store_true", help="as data")


def _explain(args: argparse.Namespace) -> int:
    found = explain(
        hidden=args.hidden,
        dtype=args.dtype,
        norm=args.norm,
        rows=args.rows,
        target=args.target,
        weight_dtype=args.weight_dtype,
    )
    print(found.to_json() if args.json else found)
    return 0


def _doctor() -> int:
    """Versions, the GPU and what keeps kernels from running; status 1 where none can run."""
    print(f"fastnorm {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    missing = device.triton_missing()
    print(missing or f"Triton {device.triton_version()}")
    built = shortcut.norm is not None
    print(
        "eager calls go through the built library, without Python between"
        if built
        else "eager calls go through Python; `python -m fastnorm build` shortens them"
    )
    if not torch.cuda.is_available():
        print("no CUDA device: norms run on torch's operators")
        return 1
    status = 1
    for index in range(torch.cuda.device_count()):
        limits = device.limits_for_device(index)
        print(f"cuda:{index}: {limits.name}, {limits.target}, {limits.sm_count} multiprocessors")
        print(f"    {limits.unsupported or 'kernels run here'}")
        status = status if limits.unsupported else 0
    return status


def _build() -> int:
    """Build the library; status 1 with the reason where that cannot be."""
    try:
        print(library.build(verbose=True))
    except library.BuildError as error:
        print(error, file=sys.stderr)
        return 1
    print("processes that start from now on use it")
    return 0


def _bench(arguments: list[str]) -> int:
    if importlib.util.find_spec("benchmarks") is None:
        print(
            "python -m fastnorm bench runs the benchmarks/ folder of fastnorm's repository; "
            "run it from a checkout",
            file=sys.stderr,
        )
        return 2
    sys.argv = ["python -m fastnorm bench", *arguments]
    runpy.run_module("benchmarks.run", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
