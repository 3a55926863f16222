"""Our Prometheus series, on metric classes that remember what they are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="prometheus_client comes with SGLang")

from sglang_spec_ext.args import Settings
from sglang_spec_ext.counts import Counts
from sglang_spec_ext.policy import BatchThresholdPolicy, Mode
from sglang_spec_ext.prometheus import Series
from sglang_spec_ext.runtime_state import RuntimeState

LABELS = {"model_name": "m", "tp_rank": 0}
VALUES: dict[str, Any] = {}
"""Every child by `name{label=value of those that are not SGLang's own}`."""


class Metric:
    """Stands for Counter, Gauge and Histogram."""

    def __init__(self, name: str, documentation: str, labelnames: list[str], **more: Any) -> None:
        assert documentation
        self.name, self.labelnames, self.more = name, labelnames, more

    def labels(self, **labels: Any) -> Child:
        assert list(labels) == self.labelnames
        assert LABELS.items() <= labels.items()
        own = ",".join(f"{k}={v}" for k, v in labels.items() if k not in LABELS)
        return Child(self.name.removeprefix("sglang:spec_ext_") + (f"{{{own}}}" if own else ""))


class Child:
    def __init__(self, key: str) -> None:
        self.key = key
        VALUES[key] = 0

    def inc(self, value: float = 1) -> None:
        VALUES[self.key] += value

    def set(self, value: float) -> None:
        VALUES[self.key] = value

    def observe(self, value: float) -> None:
        VALUES[self.key] = [*(VALUES[self.key] or []), value]


def collector() -> Any:
    VALUES.clear()
    return SimpleNamespace(
        labels=LABELS, _counter_cls=Metric, _gauge_cls=Metric, _histogram_cls=Metric
    )


def test_all_series_are_there_from_the_start() -> None:
    Series(collector())
    assert set(VALUES.values()) == {0}
    assert sorted(VALUES) == [
        "draft_tokens_warmed_total",
        "resume_threshold",
        "resumes_total",
        "switch_batch_size{to=speculating}",
        "switch_batch_size{to=target-only}",
        "switches_total{to=speculating}",
        "switches_total{to=target-only}",
        "target_only",
        "threshold",
        "tokens_total{mode=speculating}",
        "tokens_total{mode=target-only}",
    ]


def step() -> Any:
    counts = Counts()
    policy = BatchThresholdPolicy(Settings(4, 3, 1), counts.step)
    return SimpleNamespace(policy=policy, counts=counts)


def test_the_series_say_what_the_counts_say() -> None:
    this = step()
    RuntimeState(this, collector())
    assert (VALUES["threshold"], VALUES["resume_threshold"]) == (4, 3)
    seen = []
    for batch in (1, 6, 7, 2, 5):
        this.policy.step(batch)
        seen.append(VALUES["target_only"])
    assert seen == [0, 1, 1, 0, 1]
    this.counts.committed(Mode.SPECULATING, 2, 7)
    this.counts.committed(Mode.TARGET_ONLY, 6, 6)
    this.counts.warmed(6)
    counts = this.counts
    assert [VALUES[f"switches_total{{to={m.value}}}"] for m in Mode] == [*counts.switches.values()]
    assert [VALUES[f"tokens_total{{mode={m.value}}}"] for m in Mode] == [*counts.tokens.values()]
    assert VALUES["resumes_total"] == counts.resumes == 1
    assert VALUES["draft_tokens_warmed_total"] == counts.draft_tokens_warmed == 6
    assert VALUES["switch_batch_size{to=target-only}"] == [6, 5]
    assert VALUES["switch_batch_size{to=speculating}"] == [2]


def test_a_process_that_reports_no_metrics_makes_no_series() -> None:
    VALUES.clear()
    this = step()
    RuntimeState(this, None)
    this.policy.step(6)
    this.counts.committed(Mode.TARGET_ONLY, 6, 6)
    assert VALUES == {}


def test_without_classes_of_an_embedder_they_are_those_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import prometheus_client

    VALUES.clear()
    for name in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(prometheus_client, name, Metric)
    Series(SimpleNamespace(labels=LABELS, _counter_cls=None, _gauge_cls=None))
    assert "tokens_total{mode=speculating}" in VALUES


# ---------------------------------------------------------------------------- the dashboard

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "spec_ext.json"


def series() -> set[str]:
    """Names as /metrics has them."""
    Series(collector())
    names = {key.partition("{")[0] for key in VALUES}
    return names | {f"switch_batch_size_{end}" for end in ("bucket", "sum", "count")}


def test_the_dashboard_shows_series_that_are_there_and_leaves_none_out() -> None:
    text = DASHBOARD.read_text()
    shown = set(re.findall(r"sglang:spec_ext_(\w+)", text))
    assert shown <= series()
    parts = {"switch_batch_size"}  # a histogram is shown by its parts
    assert series() - shown == parts


def test_the_panels_of_the_dashboard_are_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    variables = {each["name"] for each in dashboard["templating"]["list"]}
    for variable in dashboard["templating"]["list"][1:]:
        assert variable["query"]["query"] == variable["definition"]
        assert '{__name__=~"sglang[:_]spec_ext_target_only"' in variable["definition"]
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in dashboard["panels"]:
        assert panel["title"]
        assert panel["description"]
        for target in panel["targets"]:
            # As they are exported, and as prometheus_client tells them to a Prometheus 2.
            exported, escaped = (
                re.findall(rf"sglang{mark}(\w+\{{[^}}]*\}})", target["expr"]) for mark in ":_"
            )
            assert exported
            assert exported == escaped
            assert target["expr"].count("(") == target["expr"].count(")")
            assert target["expr"].count("{") == target["expr"].count("}")
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= variables | {"__rate_interval", "__range"}
    modes = {mode.value for mode in Mode}
    assert set(re.findall(r'(?:to|mode)=\\"([^\\]+)', DASHBOARD.read_text())) <= modes
