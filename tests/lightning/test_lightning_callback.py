"""What FastNormCallback promises: every norm, every stage, nothing left behind."""

from __future__ import annotations

import logging
import pickle

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning_models import (
    ADVICE_IGNORED,
    ALL_NORMS,
    WIDTH,
    Staged,
    batches,
    make_trainer,
    patched_names,
    staged,
)
from torch import Tensor, nn

import fastnorm
from fastnorm.lightning import FastNormCallback

pytestmark = ADVICE_IGNORED


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_norms_made_at_any_moment_run_patched(stage: str) -> None:
    model = staged()
    getattr(make_trainer(FastNormCallback()), stage)(model, batches())
    assert model.patched_while_running[stage] == ALL_NORMS


def test_every_stage_of_one_trainer_runs_patched() -> None:
    model = staged()
    trainer = make_trainer(FastNormCallback(undo=True))
    for stage in ("fit", "validate", "test", "predict"):
        getattr(trainer, stage)(model, batches())
        assert model.patched_while_running[stage] == ALL_NORMS
        assert patched_names(model) == []


def test_losses_are_bitwise_those_of_torch_on_a_cpu() -> None:
    plain = staged()
    make_trainer().fit(plain, batches())
    fastnorm.reset_stats()
    patched = staged()
    make_trainer(FastNormCallback()).fit(patched, batches())
    assert sum(fastnorm.stats().forward.values()) == 3 * len(patched.losses)
    assert patched.losses == plain.losses


def test_training_works_after_sanity_validation_in_inference_mode() -> None:
    model = staged()
    make_trainer(FastNormCallback(), num_sanity_val_steps=2).fit(model, batches(), batches())
    assert len(model.losses) == 3
    for norm in (model.first[1], model.second[1], model.third[0]):
        assert not torch.equal(norm.weight, torch.ones(WIDTH))


class BothRMSNorms(pl.LightningModule):
    def __init__(self, llama_class: type[nn.Module]) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.RMSNorm(WIDTH), llama_class(WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.norms(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_torch_and_llama_rms_norms_are_both_replaced() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    callback = FastNormCallback()
    make_trainer(callback).fit(BothRMSNorms(llama.LlamaRMSNorm), batches())
    (report,) = callback.reports
    assert report.counts() == {"rms": 1, "rms_rounded": 1}


class NeverConverts(SingleDeviceStrategy):
    """A strategy that leaves out the precision plugin's conversion."""

    def setup(self, trainer: pl.Trainer) -> None:
        convert, self.precision_plugin.convert_module = (
            self.precision_plugin.convert_module,
            lambda module: module,
        )
        super().setup(trainer)
        self.precision_plugin.convert_module = convert


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_strategy_that_never_converts_does_not_lose_norms(stage: str) -> None:
    model = staged()
    strategy = NeverConverts(device=torch.device("cpu"))
    trainer = make_trainer(FastNormCallback(), strategy=strategy, accelerator="auto")
    getattr(trainer, stage)(model, batches())
    assert model.patched_while_running[stage] == ALL_NORMS


@pytest.mark.parametrize("strategy", ["auto", "ddp"])
def test_strategies_replace_the_same_norms(strategy: str) -> None:
    model = staged()
    make_trainer(FastNormCallback(), strategy=strategy).fit(model, batches())
    assert model.patched_while_running["fit"] == ALL_NORMS
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


class Compiled(pl.LightningModule):
    """Asks for one graph over the whole body, norms included."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)])

        def forward(self, x: Tensor) -> Tensor:
            for norm in self.norms:
                x = norm(self.linear(x))
            return x

    def configure_model(self) -> None:
        torch.manual_seed(0)
        self.body = self.Body()
        self.body.compile(backend="eager", fullgraph=True)
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.body(batch[0]).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_model_compiled_in_configure_model_stays_one_graph() -> None:
    plain, patched = Compiled(), Compiled()
    make_trainer().fit(plain, batches())
    make_trainer(FastNormCallback()).fit(patched, batches())
    assert patched_names(patched) == ["body.norms.0", "body.norms.1"]
    assert patched.losses == pytest.approx(plain.losses, rel=1e-6)


def test_half_precision_is_converted_as_without_the_callback() -> None:
    model = staged()
    make_trainer(FastNormCallback(), precision="bf16-true").fit(model, batches())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.patched_while_running["fit"] == ALL_NORMS


@pytest.mark.parametrize(
    ("output", "dtype"), [("torch", torch.float32), ("autocast", torch.bfloat16)]
)
def test_the_dtype_under_mixed_precision_is_chosen_for_the_run(
    output: str, dtype: torch.dtype
) -> None:
    model = staged()
    seen: set[torch.dtype] = set()
    # Without the linear layer before it, the first norm sees the fp32 batch.
    model.first[1].register_forward_hook(lambda module, args, y: seen.add(y.dtype))
    model.first[0] = nn.Identity()
    callback = FastNormCallback(autocast_output=output)
    make_trainer(callback, precision="bf16-mixed").fit(model, batches())
    assert seen == {dtype}


def test_include_and_exclude_choose_by_the_names_in_the_lightning_module() -> None:
    model = staged()
    make_trainer(FastNormCallback(include=["second", "third"], exclude="third")).fit(
        model, batches()
    )
    assert model.patched_while_running["fit"] == ["second.1"]


def test_strict_refuses_an_unknown_norm_before_training_starts() -> None:
    class OddNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))
            self.eps = 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)

    model = staged()
    model.odd = OddNorm()
    trainer = make_trainer(FastNormCallback(strict=True))
    with pytest.raises(ValueError, match="OddNorm"):
        trainer.fit(model, batches())
    assert model.losses == []
    assert "convert_module" not in vars(trainer.precision_plugin)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    model = staged()
    classes = [type(module) for module in model.modules()]
    trainer = make_trainer(FastNormCallback(undo=True))
    if fails:
        model.training_step = _raises
        with pytest.raises(ArithmeticError):
            trainer.fit(model, batches())
    else:
        trainer.fit(model, batches())
    assert "convert_module" not in vars(trainer.precision_plugin)
    assert patched_names(model) == []
    assert [type(module) for module in model.modules()][: len(classes)] == classes


def _raises(batch: list[Tensor], batch_idx: int) -> Tensor:
    raise ArithmeticError("a step that fails")


def test_without_undo_the_model_stays_patched() -> None:
    model = staged()
    make_trainer(FastNormCallback()).fit(model, batches())
    assert patched_names(model) == ALL_NORMS


def test_undo_that_is_no_longer_possible_warns_and_keeps_the_run() -> None:
    class ChangesClass(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Staged) -> None:
            norm = pl_module.first[1]
            norm.__class__ = type("Other", (type(norm),), {})

    model = staged()
    with pytest.warns(UserWarning, match="undo=True"):
        make_trainer(FastNormCallback(undo=True), ChangesClass()).fit(model, batches())
    assert len(model.losses) == 3


def test_two_callbacks_come_and_go_in_any_order() -> None:
    model = staged()
    callbacks = FastNormCallback(include="first"), FastNormCallback(include="third")
    trainer = make_trainer(*callbacks)
    trainer.fit(model, batches())
    assert model.patched_while_running["fit"] == ["first.1", "third.0"]
    assert "convert_module" not in vars(trainer.precision_plugin)


def test_a_plugin_whose_conversion_was_set_on_the_instance_keeps_it() -> None:
    trainer = make_trainer(FastNormCallback())
    seen = []

    def own(module: nn.Module) -> nn.Module:
        seen.append(module)
        return module

    trainer.precision_plugin.convert_module = own
    model = staged()
    trainer.fit(model, batches())
    assert trainer.precision_plugin.convert_module is own
    assert seen == [model]
    assert model.patched_while_running["fit"] == ALL_NORMS


def test_one_line_is_logged_for_a_model(caplog: pytest.LogCaptureFixture) -> None:
    model = staged()
    trainer = make_trainer(FastNormCallback())
    with caplog.at_level(logging.INFO):
        trainer.fit(model, batches())
        trainer.test(model, batches(), verbose=False)
    lines = [r.getMessage() for r in caplog.records if "fastnorm" in r.getMessage()]
    assert lines == ["fastnorm: norms replaced: 2 layer, 1 rms"]


def test_the_line_says_what_was_left_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_trainer(FastNormCallback(exclude="second")).fit(staged(), batches())
    (line,) = [r.getMessage() for r in caplog.records if "fastnorm" in r.getMessage()]
    assert line == "fastnorm: norms replaced: 2 layer; left: 1 (excluded by 'second')"


def test_the_table_counts_the_routes_of_this_run_alone(caplog: pytest.LogCaptureFixture) -> None:
    fastnorm.layer_norm(torch.randn(2, WIDTH), (WIDTH,))
    with caplog.at_level(logging.INFO):
        make_trainer(FastNormCallback(table=True)).fit(staged(), batches())
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "1 x RMSNorm        rms [8] float32  (second.1)" in text
    assert "forward  torch                                9" in text


def test_a_used_callback_can_be_pickled() -> None:
    callback = FastNormCallback()
    make_trainer(callback).fit(staged(), batches())
    copy = pickle.loads(pickle.dumps(callback))
    assert [report.patched for report in copy.reports] == [r.patched for r in callback.reports]
