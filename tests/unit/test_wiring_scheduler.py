"""A scheduler process with the threshold: its steps, its handshake, what it answers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture
from wiring_stand_ins import SETTINGS

from sglang_spec_ext import observe
from sglang_spec_ext.args import SettingsError
from sglang_spec_ext.compat import workers
from sglang_spec_ext.wiring import scheduler

pytestmark = pytest.mark.usefixtures("bindings")


def test_the_step_commits_what_it_has_decoded(mocker: MockerFixture) -> None:
    step_of = mocker.patch.object(scheduler, "_step_of")
    process = step_of.return_value.process_decode
    process.return_value = "done"
    served = SimpleNamespace(draft_worker="worker")
    assert scheduler.process_decode("original", served, "batch", "result") == "done"  # type: ignore[arg-type]
    step_of.assert_called_once_with("worker")
    process.assert_called_once_with("original", served, "batch", "result")


@pytest.mark.usefixtures("api")
def test_the_scheduler_confirms_once_its_step_exists(mocker: MockerFixture) -> None:
    step_of = mocker.patch.object(scheduler, "_step_of")
    info = scheduler.init_info(lambda scheduler: {"max": 1}, SimpleNamespace(draft_worker="worker"))
    assert info == {"max": 1, observe.CONFIRMATION: True}
    step_of.assert_called_once_with("worker")


@pytest.mark.usefixtures("api")
def test_the_state_is_added_to_what_sglang_tells(mocker: MockerFixture) -> None:
    step = mocker.patch.object(scheduler, "_step_of").return_value
    scheduler.init_info(lambda scheduler: {}, SimpleNamespace(draft_worker="worker"))
    mocker.patch.object(scheduler.RuntimeState, "describe", return_value={"mode": "speculating"})
    mocker.patch.object(scheduler, "unbound", return_value=["a.target"])
    answer = SimpleNamespace(internal_state={"tp_size": 1})
    assert scheduler.get_internal_state(lambda *asked: answer, "scheduler", "request") is answer
    assert answer.internal_state == {
        "tp_size": 1,
        "sglang_spec_ext": {"mode": "speculating", "unbound": ["a.target"]},
    }
    assert scheduler._metrics.counts is step.counts


@pytest.mark.usefixtures("api")
def test_a_step_that_cannot_be_built_is_not_confirmed(mocker: MockerFixture) -> None:
    mocker.patch.object(scheduler, "_step_of", side_effect=RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.init_info(lambda scheduler: {}, SimpleNamespace(draft_worker="worker"))


def test_the_first_handshake_is_confirmed_through_its_pipe(mocker: MockerFixture) -> None:
    pipe = mocker.Mock()

    def run(server_args: Any, tp_rank: int, pipe_writer: Any) -> str:
        pipe_writer.send({"status": "ready", "max": tp_rank})
        pipe_writer.close()
        return "ended"

    assert scheduler.scheduler_process(run, "arguments", 3, pipe) == "ended"
    pipe.send.assert_called_once_with({"status": "ready", "max": 3, observe.CONFIRMATION: True})
    pipe.close.assert_called_once_with()
    assert scheduler.scheduler_process(run, "arguments", tp_rank=3, pipe_writer=pipe) == "ended"


@pytest.mark.usefixtures("api")
def test_the_step_exists_before_the_first_handshake(mocker: MockerFixture) -> None:
    step_of = mocker.patch.object(scheduler, "_step_of")
    built = scheduler.init_model_worker(
        lambda scheduler: "built", SimpleNamespace(draft_worker="w")
    )
    assert built == "built"
    step_of.assert_called_once_with("w")
    assert scheduler._metrics.counts is step_of.return_value.counts
    step_of.side_effect = SettingsError("not this target")
    with pytest.raises(SettingsError, match="not this target"):
        scheduler.init_model_worker(lambda scheduler: "built", SimpleNamespace(draft_worker="w"))


@pytest.mark.parametrize(("contract", "module"), [(workers.V1, "v1"), (workers.V2, "v2")])
def test_the_step_is_that_of_the_worker_in_use(
    contract: workers.Contract, module: str, mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = ModuleType(f"sglang_spec_ext.target_only.{module}")
    fake.TargetOnlyStep = mocker.Mock(return_value="step")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(scheduler, "_settings", SETTINGS)
    monkeypatch.setattr(workers, "contract", lambda site=None: contract)
    assert scheduler._step_of(SimpleNamespace()) == "step"


def test_one_step_per_worker(mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang_spec_ext.target_only.v2")
    made = module.TargetOnlyStep = mocker.Mock(  # type: ignore[attr-defined]
        side_effect=lambda worker, settings: mocker.Mock()
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(scheduler, "_settings", SETTINGS)
    one, two = SimpleNamespace(), SimpleNamespace()
    for worker in (one, two, one):
        scheduler.forward_batch_generation("original", worker, "batch", on_publish="p")  # type: ignore[arg-type]
    assert made.call_args_list == [mocker.call(one, SETTINGS), mocker.call(two, SETTINGS)]
    step: Any = getattr(one, scheduler._STEP)
    assert step.forward.call_args_list == [mocker.call("original", "batch", on_publish="p")] * 2
