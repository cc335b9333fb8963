"""FastNormCallback: `fastnorm.patch` at the moments when a Lightning run makes its layers.

The Trainer builds a model in three steps: whatever exists when `fit` is called, what
`LightningModule.setup` and `configure_model` add, and what the precision plugin converts just
before the strategy wraps the model and makes the optimizers. A callback's `setup` hook comes
before the second step and `on_fit_start` after the third, so neither alone is enough: the callback
patches in `setup` and again when the strategy calls the plugin's `convert_module`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from fastnorm.autocast import AutocastOutput
from fastnorm.patching import Report, patch
from fastnorm.patching.selection import Selectors
from fastnorm.routing import Stats, stats

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    _FRAMEWORKS = ("lightning.pytorch", "pytorch_lightning")

    def _callback_base() -> type:
        """The Callback class of the framework in use; of both when both are loaded.

        `lightning.pytorch` and `pytorch_lightning` are two copies of one library. Their Trainers
        take any object with the hooks, but their command lines check the class.
        """
        loaded = [name for name in _FRAMEWORKS if name in sys.modules]
        if loaded:
            bases = tuple(sys.modules[name].Callback for name in loaded)
            return bases[0] if len(bases) == 1 else type("Callback", bases, {})
        for name in _FRAMEWORKS:
            try:
                return importlib.import_module(name).Callback
            except ModuleNotFoundError as error:
                if error.name not in (name, name.partition(".")[0]):
                    raise
        raise ModuleNotFoundError(
            "fastnorm.lightning needs Lightning: pip install 'fastnorm-torch[lightning]'"
        )

    Callback = _callback_base()


class FastNormCallback(Callback):
    """Replaces the norms of a LightningModule, for fit, validate, test and predict.

    Works with every strategy, because the strategy itself calls `convert_module`, and leaves
    checkpoints as they are: no callback state, the same parameter names and hyper-parameters.

    Args:
        include: as for `fastnorm.patch`; names start at the LightningModule.
        exclude: as for `fastnorm.patch`.
        filter_fn: as for `fastnorm.patch`.
        strict: as for `fastnorm.patch`, checked once the whole model exists.
        undo: put the original classes back when the run ends.
        table: log the full report before the run, and which routes ran how often after it.
        autocast_output: as for `fastnorm.patch`.

    Attributes:
        reports: what was replaced and skipped, one report for each time at which the model was
            looked at and norms were replaced.
    """

    def __init__(
        self,
        include: Selectors = None,
        exclude: Selectors = None,
        filter_fn: Callable[[str, nn.Module], bool] | None = None,
        strict: bool = False,
        undo: bool = False,
        table: bool = False,
        autocast_output: AutocastOutput = "torch",
    ) -> None:
        super().__init__()
        self.include = include
        self.exclude = exclude
        self.filter_fn = filter_fn
        self.strict = strict
        self.undo = undo
        self.table = table
        self.autocast_output = autocast_output
        self.reports: list[Report] = []
        self._reports_before_run = 0
        self._announced = False
        self._complete = False
        self._stats_before: Stats | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Patches what exists already, so that `configure_model` wraps patched norms."""
        self._complete = False
        self._reports_before_run = len(self.reports)
        self._stats_before = stats()
        with warnings.catch_warnings():
            # That nothing is there yet, or that no name fits, is no news before `configure_model`.
            warnings.filterwarnings("ignore", message="fastnorm.patch")
            self._patch(pl_module, strict=False)
        _ConvertAndPatch.install(trainer.precision_plugin, self)

    def complete(self, module: nn.Module) -> None:
        """Patches what `setup` and `configure_model` added; logs once for each model."""
        self._complete = True
        last = self._patch(module, strict=self.strict)
        run = self.reports[self._reports_before_run :]
        if run or not self._announced:
            self._announced = True
            rank_zero_info(_summary(run, last))
            if self.table:
                rank_zero_info("\n".join(str(report) for report in run))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """For a strategy that never calls `convert_module`; likewise the three hooks below."""
        self._complete_late(pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_fit_start`."""
        self._complete_late(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_fit_start`."""
        self._complete_late(pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As `on_fit_start`."""
        self._complete_late(pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives the precision plugin its own `convert_module` back; undoes the patch if asked."""
        if self.table and self._stats_before is not None:
            rank_zero_info(_routes_since(self._stats_before))
        self._finish(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """As `teardown`, which the Trainer leaves out when a run fails."""
        self._finish(trainer)

    def _patch(self, module: nn.Module, strict: bool) -> Report:
        report = patch(
            module,
            include=self.include,
            exclude=self.exclude,
            filter_fn=self.filter_fn,
            strict=strict,
            autocast_output=self.autocast_output,
        )
        if len(report):
            self.reports.append(report)
        return report

    def _complete_late(self, module: nn.Module) -> None:
        if not self._complete:
            self.complete(module)

    def _finish(self, trainer: Trainer) -> None:
        _ConvertAndPatch.remove(trainer.precision_plugin, self)
        self._stats_before = None
        if not self.undo:
            return
        while self.reports:
            try:
                self.reports.pop().undo()
            except RuntimeError as error:
                # The run itself is over and fine: its results must not be lost over this.
                rank_zero_warn(f"FastNormCallback(undo=True): {error}")
        self._announced = False


class _ConvertAndPatch:
    """Stands in for a precision plugin's `convert_module` while callbacks wait for the model.

    One of these serves all callbacks of a Trainer, so that the order in which they come and go
    does not matter.
    """

    def __init__(self, plugin: Any) -> None:
        self.own_attribute = vars(plugin).get("convert_module")
        self.convert_module = plugin.convert_module
        self.callbacks: list[FastNormCallback] = []

    def __call__(self, module: nn.Module) -> nn.Module:
        converted = self.convert_module(module)
        for callback in self.callbacks:
            callback.complete(converted)
        return converted

    @classmethod
    def install(cls, plugin: Any, callback: FastNormCallback) -> None:
        if not isinstance(plugin.convert_module, cls):
            plugin.convert_module = cls(plugin)
        if callback not in plugin.convert_module.callbacks:
            plugin.convert_module.callbacks.append(callback)

    @classmethod
    def remove(cls, plugin: Any, callback: FastNormCallback) -> None:
        current = plugin.convert_module
        if not isinstance(current, cls) or callback not in current.callbacks:
            return
        current.callbacks.remove(callback)
        if current.callbacks:
            return
        if current.own_attribute is None:
            del plugin.convert_module  # the class's own method shows again
        else:
            plugin.convert_module = current.own_attribute


def _summary(run: list[Report], last: Report) -> str:
    """One line: how many norms of which kind a run replaced, and which it left and why."""
    counts: Counter[str] = Counter()
    for report in run:
        counts.update(report.counts())
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "none"
    replaced = {entry.name for report in run for entry in report.patched}
    left = Counter(entry.reason for entry in last.skipped if entry.name not in replaced)
    reasons = "; ".join(f"{count} ({reason})" for reason, count in left.items())
    return f"fastnorm: norms replaced: {kinds}" + (f"; left: {reasons}" if reasons else "")


def _routes_since(before: Stats) -> str:
    """Which routes ran how often since `before`, one line for each pass and route."""
    now = stats()
    lines = ["fastnorm: calls by route"]
    for direction in ("forward", "backward"):
        earlier = getattr(before, direction)
        for route, count in sorted(getattr(now, direction).items()):
            if count > earlier.get(route, 0):
                lines.append(f"  {direction:<9}{route:<28}{count - earlier.get(route, 0):>10,}")
    if len(lines) == 1:
        lines.append("  none: what torch.compile makes of norms is not counted")
    return "\n".join(lines)
