"""Measurements as lines of CSV, and the table that compares them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.table import Table

from benchmarks.shapes import Case

OURS = "fastnorm"
BASE = "torch"


@dataclass(frozen=True)
class Measurement:
    """One line of the CSV; field names are its columns.

    Args:
        us: microseconds; None where nothing was timed.
        copy_pct: floor time / time x 100, with the copy bandwidth of the same run; None for host.
        correct: "1" the gate passed; "0" it did not, so nothing was timed; "error:TYPE" it raised.
    """

    gpu: str
    torch: str
    triton: str
    op: str
    norm: str
    dtype: str
    M: int
    N: int
    provider: str
    us: float | None
    copy_pct: float | None
    correct: str

    @property
    def case(self) -> Case:
        return Case(self.op, self.norm, self.dtype, self.M, self.N)

    def cells(self) -> dict[str, object]:
        """Column -> what the CSV says."""
        pct = rounded(self.copy_pct, ".1f")
        return {**asdict(self), "us": rounded(self.us, ".2f"), "copy_pct": pct}


def rounded(value: float | None, spec: str) -> str:
    """A number as a CSV has it; nothing where nothing was measured."""
    return "" if value is None else format(value, spec)


COLUMNS = tuple(field.name for field in fields(Measurement))


class Record(Protocol):
    """What `CsvWriter` writes."""

    def cells(self) -> Mapping[str, object]: ...


class CsvWriter:
    """Writes measurements as they come, so a run cut short keeps what it has measured.

    Args:
        path: of the CSV; its folder is made.
        overwrite: replace what is there.
        columns: of the records that `write` gets.

    Raises:
        FileExistsError: the file is there and `overwrite` is False.
    """

    def __init__(self, path: Path, overwrite: bool = False, columns: Sequence[str] = COLUMNS):
        if path.exists() and not overwrite:
            raise FileExistsError(f"{path} exists; give another --out, or --overwrite")
        self.path = path
        self._columns = columns

    def __enter__(self) -> CsvWriter:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, self._columns, lineterminator="\n")
        self._writer.writeheader()
        return self

    def write(self, record: Record) -> None:
        self._writer.writerow(record.cells())
        self._file.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read_csv(path: Path) -> list[Measurement]:
    """Read what `CsvWriter` wrote.

    Raises:
        ValueError: the columns are others than `COLUMNS`.
    """
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path} has columns {reader.fieldnames}, expected {','.join(COLUMNS)}; "
                "write it with python -m benchmarks.run"
            )
        return [_parse(row) for row in reader]


def _parse(row: dict[str, str]) -> Measurement:
    return Measurement(
        gpu=row["gpu"],
        torch=row["torch"],
        triton=row["triton"],
        op=row["op"],
        norm=row["norm"],
        dtype=row["dtype"],
        M=int(row["M"]),
        N=int(row["N"]),
        provider=row["provider"],
        us=float(row["us"]) if row["us"] else None,
        copy_pct=float(row["copy_pct"]) if row["copy_pct"] else None,
        correct=row["correct"],
    )


@dataclass(frozen=True)
class Comparison:
    """The times of one case by provider, in microseconds."""

    case: Case
    times: dict[str, float]
    copy_pct: dict[str, float]

    @property
    def best_peer(self) -> str | None:
        """The fastest provider that is not ours, torch included."""
        peers = [name for name in self.times if name != OURS]
        return min(peers, key=self.times.__getitem__, default=None)

    def ratio(self, peer: str | None) -> float | None:
        """Our time over a peer's; None where either was not timed."""
        if peer not in self.times or OURS not in self.times:
            return None
        return self.times[OURS] / self.times[peer]


def compare(measurements: Iterable[Measurement]) -> list[Comparison]:
    """Group timed measurements by case, in the order measured."""
    by_case: dict[Case, Comparison] = {}
    for m in measurements:
        entry = by_case.setdefault(m.case, Comparison(m.case, {}, {}))
        if m.us is not None:
            entry.times[m.provider] = m.us
            if m.copy_pct is not None:
                entry.copy_pct[m.provider] = m.copy_pct
    return list(by_case.values())


def summary_table(comparisons: Sequence[Comparison], title: str) -> Table:
    """Ours beside torch and the best peer, case by case."""
    table = Table(title=title)
    table.add_column("case", no_wrap=True)
    headers = ("torch us", f"{OURS} us", "% of copy", "/ torch", "best peer", "us", "/ best")
    for column in headers:
        table.add_column(column, justify="right", no_wrap=True)
    for c in comparisons:
        best = c.best_peer
        table.add_row(
            str(c.case),
            _number(c.times.get(BASE), ".1f"),
            _number(c.times.get(OURS), ".1f"),
            _number(c.copy_pct.get(OURS), ".0f"),
            _ratio(c.ratio(BASE)),
            best or "-",
            _number(c.times.get(best) if best else None, ".1f"),
            _ratio(c.ratio(best)),
        )
    return table


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"[{'green' if value < 1 else 'red'}]{value:.3f}[/]"
