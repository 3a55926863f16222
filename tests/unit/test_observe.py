"""SGLang's own figures while target-only, and the log lines, against stand-ins for its objects."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from sglang_spec_ext import observe
from sglang_spec_ext.args import Settings
from sglang_spec_ext.counts import Counts
from sglang_spec_ext.policy import Mode, Switch


class Algorithm(enum.Enum):
    NONE = "NONE"
    EAGLE3 = "EAGLE3"


class Request:
    """Counts as SGLang's Req does."""

    def __init__(self, *, retracted: bool = False, done: bool = False) -> None:
        self.is_retracted = retracted
        self.done = done
        self.spec_verify_ct = 3
        self.spec_num_correct_drafts = 4
        self.spec_correct_drafts_histogram = [1, 0, 2]

    def finished(self) -> bool:
        return self.done

    def figures(self) -> tuple[int, int, list[int]]:
        return (
            self.spec_verify_ct,
            self.spec_num_correct_drafts,
            self.spec_correct_drafts_histogram,
        )


def resolve(processor: Any, result: Any, batch: Any) -> list[list[int]]:
    """What SGLang's `_resolve_spec_v2_tokens` counts for a step, one bonus token per request."""
    for request in batch.reqs:
        if not (request.is_retracted or request.finished()):
            request.spec_verify_ct += 1
            correct = result.correct
            request.spec_num_correct_drafts += correct
            request.spec_correct_drafts_histogram[correct] += 1
    return [[7] for _ in batch.reqs]


def result(*, target_only: bool, correct: int = 0) -> SimpleNamespace:
    made = SimpleNamespace(correct=correct)
    if target_only:
        observe.mark_target_only(made)
    return made


def test_only_a_marked_result_is_target_only() -> None:
    assert observe.is_target_only(result(target_only=True))
    assert not observe.is_target_only(result(target_only=False))


def test_a_target_only_step_is_no_verify_of_a_request() -> None:
    requests = [Request(), Request()]
    tokens = observe.SpecMetrics().resolve_spec_tokens(
        resolve, None, result(target_only=True), SimpleNamespace(reqs=requests)
    )
    assert tokens == [[7], [7]]
    assert [r.figures() for r in requests] == [Request().figures()] * 2


@pytest.mark.parametrize("out", [{"retracted": True}, {"done": True}])
def test_what_sglang_did_not_count_is_not_taken_back(out: dict[str, bool]) -> None:
    request = Request(**out)
    observe.SpecMetrics().resolve_spec_tokens(
        resolve, None, result(target_only=True), SimpleNamespace(reqs=[request])
    )
    assert request.figures() == Request().figures()


class EarlierRequest(Request):
    """Of a release with another name for the histogram."""

    def __init__(self) -> None:
        super().__init__(done=True)
        self.spec_acceptance_histogram = self.spec_correct_drafts_histogram
        del self.spec_correct_drafts_histogram


def test_what_sglang_counted_of_an_ended_request_is_taken_back() -> None:
    def resolve_all(processor: Any, result: Any, batch: Any) -> list[list[int]]:
        for request in batch.reqs:
            request.spec_verify_ct += 1
            request.spec_acceptance_histogram[0] += 1
        return [[7] for _ in batch.reqs]

    request = EarlierRequest()
    observe.SpecMetrics().resolve_spec_tokens(
        resolve_all, None, result(target_only=True), SimpleNamespace(reqs=[request])
    )
    assert request.spec_verify_ct == Request().spec_verify_ct
    assert request.spec_acceptance_histogram == Request().spec_correct_drafts_histogram


def test_a_verify_counts_as_before() -> None:
    request = Request()
    tokens = observe.SpecMetrics().resolve_spec_tokens(
        resolve, None, result(target_only=False, correct=2), SimpleNamespace(reqs=[request])
    )
    assert tokens == [[7]]
    assert request.figures() == (4, 6, [1, 0, 3])


def test_the_server_counts_verifies_only(mocker: MockerFixture) -> None:
    metrics, original, batch = observe.SpecMetrics(), mocker.Mock(), SimpleNamespace(reqs=[])
    for target_only in (False, True, True, False):
        metrics.resolve_spec_tokens(resolve, None, result(target_only=target_only), batch)
        metrics.update_spec_metrics(original, "reporter", 4, num_correct_drafts=2, num_cap_tokens=0)
    assert original.mock_calls == [mocker.call("reporter", 4, 2, num_cap_tokens=0)] * 2


def test_the_tokens_of_each_step_go_to_its_mode(mocker: MockerFixture) -> None:
    metrics, batch = observe.SpecMetrics(), SimpleNamespace(reqs=[])
    metrics.counts = Counts()
    for target_only, correct in ((False, 9), (True, 0), (False, 2)):
        metrics.resolve_spec_tokens(resolve, None, result(target_only=target_only), batch)
        metrics.update_spec_metrics(mocker.Mock(), "reporter", 4, correct)
    assert metrics.counts.tokens == {Mode.SPECULATING: 4 + 9 + 4 + 2, Mode.TARGET_ONLY: 4}
    assert metrics.counts.accept_length == (4 + 9 + 4 + 2) / 8


def reporter(verifies: int) -> SimpleNamespace:
    return SimpleNamespace(
        spec_num_forward_ct=verifies, scheduler=SimpleNamespace(spec_algorithm=Algorithm.EAGLE3)
    )


@pytest.mark.parametrize(("verifies", "seen"), [(0, Algorithm.NONE), (5, Algorithm.EAGLE3)])
def test_a_report_without_a_verify_is_that_of_a_plain_server(
    verifies: int, seen: Algorithm
) -> None:
    this = reporter(verifies)

    def original(it: Any, *args: Any, **kwargs: Any) -> Any:
        return it.scheduler.spec_algorithm, args, kwargs

    reported = observe.SpecMetrics().report_decode_stats(original, this, True, running_batch="b")
    assert reported == (seen, (True,), {"running_batch": "b"})
    assert this.scheduler.spec_algorithm is Algorithm.EAGLE3


def test_a_scheduler_that_reports_itself() -> None:
    this = SimpleNamespace(spec_num_forward_ct=0, spec_algorithm=Algorithm.EAGLE3)
    seen = observe.SpecMetrics().report_decode_stats(lambda it: it.spec_algorithm, this)
    assert seen is Algorithm.NONE
    assert this.spec_algorithm is Algorithm.EAGLE3


def test_a_report_that_fails_leaves_the_scheduler_speculative() -> None:
    this = reporter(0)

    def original(it: Any) -> None:
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        observe.SpecMetrics().report_decode_stats(original, this)
    assert this.scheduler.spec_algorithm is Algorithm.EAGLE3


# ---------------------------------------------------------------------------- per request


def per_request(fields: dict[str, Any]) -> dict[str, Any]:
    meta: dict[str, Any] = {"id": "r"}

    def original(manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
        assert (manager, recv_obj, i) == ("manager", "received", 1)
        meta_info.update(fields)

    observe.request_spec_metrics(original, "manager", meta, "received", 1)
    return meta


@pytest.mark.parametrize(
    "name", ["spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num"]
)
def test_accept_length_of_a_request_is_over_its_verifies(name: str) -> None:
    # 100 tokens, 90 of them target-only: SGLang itself divides all of them by the verifies
    fields = {"spec_verify_ct": 4, name: 6, "spec_accept_length": 25.0}
    assert per_request(fields)["spec_accept_length"] == 1 + 6 / 4


def test_accept_length_of_a_request_with_no_accepted_draft_is_one() -> None:
    fields = {"spec_verify_ct": 4, "spec_num_correct_drafts": 0, "spec_accept_length": 3.0}
    assert per_request(fields)["spec_accept_length"] == 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"spec_verify_ct": 0},
        {"spec_verify_ct": 0, "spec_num_correct_drafts": 0},
        {"spec_verify_ct": 4, "spec_accept_length": 2.0},
    ],
    ids=["not speculative", "no verify", "no verify, all fields", "release without the field"],
)
def test_a_request_without_the_figures_is_left_alone(fields: dict[str, Any]) -> None:
    assert per_request(fields) == {"id": "r", **fields}


# ---------------------------------------------------------------------------- log lines


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was logged through SGLang's rank-0 logger: logger name and text."""
    logged: list[tuple[str, str]] = []
    common = ModuleType("sglang.srt.utils.common")
    common.log_info_on_rank0 = lambda logger, text: logged.append(  # type: ignore[attr-defined]
        (logger.name, text)
    )
    monkeypatch.setitem(sys.modules, common.__name__, common)
    return logged


@pytest.mark.parametrize(
    ("switch", "line"),
    [
        (
            Switch(Mode.TARGET_ONLY, batch=6, steps_since_last=37),
            "spec-ext switch: speculating -> target-only, batch=6, N=4, M=3, "
            "steps since last switch=37",
        ),
        (
            Switch(Mode.SPECULATING, batch=3, steps_since_last=12),
            "spec-ext switch: target-only -> speculating, batch=3, N=4, M=3, "
            "steps since last switch=12",
        ),
    ],
)
def test_switch_line(lines: list[tuple[str, str]], switch: Switch, line: str) -> None:
    observe.log_switch(switch, Settings(4, 3, 2))
    assert lines == [("sglang_spec_ext", line)]


def worker(cap: int | None) -> SimpleNamespace:
    return SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=SimpleNamespace(max_running_requests=cap)),
        speculative_algorithm=Algorithm.EAGLE3,
        topk=1,
    )


def test_start_line(lines: list[tuple[str, str]]) -> None:
    observe.log_start(worker(64), Settings(4, 3, 2), None)
    assert [text for _, text in lines] == [
        "spec-ext active: N=4, M=3, K=2, max_running_requests=64, algorithm=EAGLE3, topk=1, "
        "worker=SimpleNamespace, path=plain decode, draft kept warm by KV-only writes"
    ]


def test_start_line_says_why_a_draft_extends_on_every_step(lines: list[tuple[str, str]]) -> None:
    observe.log_start(worker(None), Settings(4, 3, 2), "it has 2 layers")
    ((_, text),) = lines
    assert text.endswith("SGLang's draft extend on every step (it has 2 layers)")


@pytest.mark.parametrize(("n", "warned"), [(7, False), (8, True), (9, True)])
def test_warns_of_a_threshold_that_the_cap_hides(
    lines: list[tuple[str, str]], n: int, warned: bool
) -> None:
    observe.log_start(worker(8), Settings(n, n, 1), None)
    warnings = [text for _, text in lines if "warning" in text]
    assert bool(warnings) is warned
    for text in warnings:
        assert f"--speculative-disable-batch-threshold {n} can never be exceeded" in text
        assert "at most 8 requests" in text
        assert "--max-running-requests" in text


# ---------------------------------------------------------------------------- no draft accepted


def watched(*accepted: int, top_k: int = 1, rounds: int = 1, **kind: bool) -> observe.AcceptWatch:
    """A watch after so many steps, each accepting these numbers of drafts, by request."""
    watch = observe.AcceptWatch()
    sampling = SimpleNamespace(top_k=top_k)
    batch = SimpleNamespace(reqs=[SimpleNamespace(sampling_params=sampling) for _ in accepted])
    step = SimpleNamespace(num_correct_drafts_per_req_cpu=list(accepted))
    if kind.get("target_only"):
        observe.mark_target_only(step)
    for _ in range(rounds):
        assert watch.resolve_spec_tokens(lambda *_: "tokens", None, step, batch) == "tokens"
    return watch


HALF = observe.AcceptWatch.WINDOW // 2


def test_accept_length_stuck_at_one_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watched(0, 0, rounds=HALF - 1)
    assert caplog.records == []
    watched(0, 0, rounds=3 * HALF)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "accept length is 1.00 over 256 verifies of greedy requests" in record.getMessage()
    assert "sglang-spec-ext check-draft" in record.getMessage()


def test_a_draft_that_is_accepted_now_and_then_is_not_mentioned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = watched(0, 0, rounds=HALF - 1)
    accepting = SimpleNamespace(num_correct_drafts_per_req_cpu=[2, 0])
    sampling = SimpleNamespace(top_k=1)
    batch = SimpleNamespace(reqs=[SimpleNamespace(sampling_params=sampling)] * 2)
    watch.resolve_spec_tokens(lambda *_: None, None, accepting, batch)
    assert caplog.records == []


@pytest.mark.parametrize(
    "name",
    [
        "num_correct_drafts_per_req_cpu",
        "num_accepted_drafts_per_req_cpu",
        "accept_length_per_req_cpu",
    ],
)
def test_the_spec_v1_worker_is_watched_too(name: str, caplog: pytest.LogCaptureFixture) -> None:
    watch = observe.AcceptWatch()
    batch = SimpleNamespace(reqs=[SimpleNamespace(sampling_params=SimpleNamespace(top_k=1))])
    step = SimpleNamespace(**{name: [0]})
    for _ in range(observe.AcceptWatch.WINDOW):
        assert watch.process_decode(lambda *_: "done", None, batch, step) == "done"
    assert "accept length is 1.00" in caplog.text


def test_a_step_without_counts_is_no_verify(caplog: pytest.LogCaptureFixture) -> None:
    watch = observe.AcceptWatch()
    batch = SimpleNamespace(reqs=[SimpleNamespace(sampling_params=SimpleNamespace(top_k=1))])
    for _ in range(observe.AcceptWatch.WINDOW):
        watch.process_decode(lambda *_: None, None, batch, SimpleNamespace())
    assert caplog.records == []


@pytest.mark.parametrize("kind", [{"top_k": 50}, {"target_only": True}])
def test_what_says_nothing_about_the_draft_does_not_count(
    kind: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    watched(0, 0, rounds=3 * HALF, **kind)
    assert caplog.records == []
