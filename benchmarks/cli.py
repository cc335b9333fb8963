"""What the command lines share: console, progress bar, errors, and where results go by default."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Piped into a file, rich takes 80 columns, too few for the tables.
console = Console(width=None if sys.stdout.isatty() else 140)


def fail(message: str) -> NoReturn:
    """Print an error and exit with 2, as for a usage error."""
    Console(stderr=True, soft_wrap=True).print(f"error: {message}", style="red", markup=False)
    sys.exit(2)


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def device_name() -> str:
    """Of the GPU, or "cpu"."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def default_out(prefix: str = "") -> Path:
    """benchmarks/results/[prefix]DEVICE-DATE.csv."""
    device = re.sub(r"[^a-z0-9]+", "-", device_name().lower().replace("nvidia", ""))
    return Path(__file__).parent / "results" / f"{prefix}{device.strip('-')}-{date.today()}.csv"


def write_about(csv: Path, facts: Mapping[str, object]) -> None:
    """Beside a CSV, as JSON: when and where it was measured, and what its columns have no room
    for."""
    where = {"date": str(date.today()), "gpu": device_name(), "cuda": torch.version.cuda}
    csv.with_suffix(".json").write_text(json.dumps({**where, **facts}, indent=2) + "\n")
