"""The picture of the dashboard, from the answers of a small HTTP server that stands for Prometheus.

It answers each query by the series that the query names, with three values that grow.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from http_answers import Serve

pytest.importorskip("matplotlib")

from benchmarks.dashboard_picture.__main__ import main
from sglang_spec_ext.ops.bench.server import free_port

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "docs" / "grafana" / "spec_ext.json").read_text())
TITLES = [panel["title"] for panel in DASHBOARD["panels"]]
START, END = 1_800_000_000, 1_800_000_240
EVERY = {"--start": str(START), "--end": "2027-01-15T08:04:00Z", "--scrape-interval": "1"}
COUNTS = {"le": ("1.0", "8.0", "+Inf"), "mode": ("speculating", "target-only")}
COUNTS["to"] = tuple(f"{mode}" for mode in COUNTS["mode"])

Answer = tuple[int, Any]


def matrix(query: str, times: list[float]) -> list[dict[str, Any]]:
    """A vector for each label that the query sums by, or one of a server."""
    by = next((label for label in COUNTS if f"sum by ({label})" in query), None)
    if by:
        labels = [{by: value} for value in COUNTS[by]]
    elif "sum(" in query or "max(" in query:
        labels = [{}]
    else:
        labels = [{"instance": "127.0.0.1:30000", "tp_rank": "0"}]
    values = ("0", "1", "1") if "target_only{" in query else ("0.25", "0.5", "0.75")
    return [
        {"metric": label, "values": [list(point) for point in zip(times, values, strict=True)]}
        for label in labels
    ]


class Prometheus:
    """values: of each label; answer: to a query, None for `matrix`."""

    def __init__(self) -> None:
        self.values = {"model_name": ["tiny"], "instance": ["127.0.0.1:30000"]}
        self.answer: Callable[[str], Answer | None] = lambda query: None
        self.asked: list[dict[str, str]] = []
        self.url = ""

    def handle(self, request: BaseHTTPRequestHandler) -> Answer:
        asked = urlsplit(request.path)
        each = {name: values[0] for name, values in parse_qs(asked.query).items()}
        status, body = self.reply(asked.path, each)
        return status, body.encode() if isinstance(body, str) else body

    def reply(self, path: str, parameters: dict[str, str]) -> Answer:
        self.asked.append(parameters)
        if path.startswith("/api/v1/label/"):
            return 200, {"status": "success", "data": self.values[path.split("/")[4]]}
        assert path == "/api/v1/query_range"
        query = parameters["query"]
        if (given := self.answer(query)) is not None:
            return given
        times = [START + 60 * n for n in (1, 2, 4)]
        return 200, {"status": "success", "data": {"result": matrix(query, times)}}

    def queries(self) -> list[str]:
        return [each["query"] for each in self.asked if "query" in each]


@pytest.fixture
def prometheus(serve: Serve) -> Prometheus:
    fake = Prometheus()
    fake.url = serve(fake.handle)
    return fake


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Everything written into the picture, once there is one."""
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    found: list[str] = []
    save = Figure.savefig

    def kept(figure: Figure, *arguments: Any, **more: Any) -> None:
        save(figure, *arguments, **more)
        found.extend(each.get_text() for each in figure.findobj(Text) if each.get_text())

    monkeypatch.setattr(Figure, "savefig", kept)
    return found


def run(url: str, out: Path, **more: str) -> int:
    options = {**EVERY, **{f"--{name}": value for name, value in more.items()}}
    flat = [word for pair in options.items() for word in pair]
    return main(["--prometheus", url, "--out", str(out), *flat])


def the_error(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def dashboard_with(path: Path, **changes: Any) -> str:
    """A dashboard of one panel with changes; returns its path."""
    panel = {**DASHBOARD["panels"][1], **changes}
    path.write_text(json.dumps({**DASHBOARD, "panels": [panel]}))
    return str(path)


def lines(**overrides: dict[str, Any]) -> dict[str, Any]:
    """The part of a panel that says how series look, each with one override by its legend."""
    named = [
        {"matcher": {"id": "byName", "options": name}, "properties": [each]}
        for name, each in overrides.items()
    ]
    return {"defaults": {}, "overrides": named}


def test_every_panel_is_drawn_where_the_dashboard_has_it(
    prometheus: Prometheus,
    texts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "a.png"
    assert run(prometheus.url, out) == 0
    png = out.read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == 1200
    assert set(TITLES) <= set(texts)
    assert "no data" not in texts
    assert texts.count("75.0%") == 1  # the last value, in the panel's unit
    assert "running 127.0.0.1:30000" in texts
    assert {"N", "M", "to target-only", "rows"} <= set(texts)
    assert texts.count("speculating") == 2  # the legends of modes; the stretch has no room for it
    said = capsys.readouterr().out
    assert "$model_name = tiny\n$instance = 127.0.0.1:30000\n" in said

    targets = [target for panel in DASHBOARD["panels"] for target in panel["targets"]]
    assert len(prometheus.queries()) == len(targets)
    joined = "\n".join(prometheus.queries())
    assert "$" not in joined
    assert 'model_name=~"tiny",instance=~"127\\\\.0\\\\.0\\\\.1:30000"' in joined
    assert "[240s]" in joined
    # four scrapes, or a step and a scrape: the heatmap has 60 steps of 4 s
    assert {"[4s]", "[5s]"} <= {f"[{part.split(']')[0]}]" for part in joined.split("[")[1:]}
    times = [(each["start"], each["end"]) for each in prometheus.asked]
    assert {tuple(map(float, pair)) for pair in times} == {(START, END)}


def test_all_values_of_a_variable_are_asked_for(prometheus: Prometheus, tmp_path: Path) -> None:
    prometheus.values["instance"] = ["b:1", "a.c:1"]
    assert run(prometheus.url, tmp_path / "a.png") == 0
    assert all('instance=~"(a\\\\.c:1|b:1)"' in query for query in prometheus.queries())
    selectors = [each["match[]"] for each in prometheus.asked if "match[]" in each]
    assert 'model_name=~"tiny"' in selectors[1]


@pytest.mark.parametrize("result", [[], [{"metric": {}, "values": [[START, "NaN"]]}]])
def test_a_panel_without_data_is_named(
    prometheus: Prometheus,
    texts: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    result: list[Any],
) -> None:
    empty = 200, {"status": "success", "data": {"result": result}}
    prometheus.answer = lambda query: empty if "switch_batch_size_sum" in query else None
    out = tmp_path / "a.png"
    assert run(prometheus.url, out) == 1
    assert the_error(capsys) == "error: no data in 'Mean batch at resume'"
    assert out.exists()
    assert texts.count("no data") == 1
    assert set(TITLES) <= set(texts)


def test_a_query_that_prometheus_refuses(
    prometheus: Prometheus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = "1:5: parse error:\n unclosed left parenthesis"
    refusal = 400, {"status": "error", "errorType": "bad_data", "error": reason}
    prometheus.answer = lambda query: refusal if "accept_length" in query else None
    out = tmp_path / "a.png"
    assert run(prometheus.url, out) == 2
    assert the_error(capsys) == (
        "error: panel 'Accept length': Prometheus refuses the query: "
        "1:5: parse error: unclosed left parenthesis"
    )
    assert not out.exists()


def test_no_prometheus_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert run(url, tmp_path / "a.png") == 2
    assert the_error(capsys) == f"error: no Prometheus answers at {url}"


def test_a_prometheus_that_falls_silent(
    prometheus: Prometheus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended = threading.Event()

    def silent(query: str) -> Answer:
        ended.wait(60)
        return 503, ""

    prometheus.answer = silent
    monkeypatch.setattr("benchmarks.dashboard_picture.prometheus.TIMEOUT_S", 0.2)
    try:
        assert run(prometheus.url, tmp_path / "a.png") == 2
    finally:
        ended.set()
    assert "did not answer within" in the_error(capsys)


@pytest.mark.parametrize("body", ["<html>", ["success"], {"status": "error"}])
def test_another_server_is_not_taken_for_prometheus(
    prometheus: Prometheus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    body: Any,
) -> None:
    prometheus.answer = lambda query: (404, body)
    assert run(prometheus.url, tmp_path / "a.png") == 2
    assert f"{prometheus.url} is no Prometheus: it answers" in the_error(capsys)


def test_a_variable_without_values_tells_what_is_not_scraped(
    prometheus: Prometheus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prometheus.values["model_name"] = []
    assert run(prometheus.url, tmp_path / "a.png") == 2
    error = the_error(capsys)
    assert error.startswith("error: variable model_name: label_values(")
    assert "--enable-metrics" in error


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[]", "is no dashboard"),
        ('{"panels": [{}]}', "not as Grafana writes them, at 'title'"),
    ],
)
def test_a_file_that_is_no_dashboard(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str | None,
    says: str,
) -> None:
    path = tmp_path / "dashboard.json"
    if text is not None:
        path.write_text(text)
    assert run("http://127.0.0.1:9", tmp_path / "a.png", dashboard=str(path)) == 2
    error = the_error(capsys)
    assert str(path) in error
    assert says in error


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"type": "gauge"}, "cannot draw the type 'gauge'"),
        ({"fieldConfig": {"defaults": {"unit": "bytes"}}}, "does not know the unit 'bytes'"),
        ({"targets": [{"expr": "up[$__interval_ms]"}]}, "$__interval_ms has no value"),
        ({"targets": [{"expr": ""}]}, "a query is empty"),
        ({"type": "heatmap"}, "needs the buckets' label le"),
        ({"fieldConfig": lines(N={"id": "custom.width"})}, "the override 'custom.width'"),
        ({"fieldConfig": lines(N={"id": "color", "value": {}})}, "has no 'fixedColor'"),
        (
            {"fieldConfig": lines(N={"id": "color", "value": {"fixedColor": "mauve"}})},
            "does not know the colour 'mauve'",
        ),
        ({"type": "state-timeline"}, "no text for the value 0.25"),
    ],
)
def test_what_it_cannot_draw_is_refused(
    prometheus: Prometheus,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    says: str,
) -> None:
    path, out = dashboard_with(tmp_path / "dashboard.json", **changes), tmp_path / "a.png"
    assert run(prometheus.url, out, dashboard=path) == 2
    assert says in the_error(capsys)
    assert not out.exists()


@pytest.mark.parametrize("more", [{"end": str(START)}, {"scrape-interval": "0"}])
def test_no_time_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, str]
) -> None:
    assert run("http://127.0.0.1:9", tmp_path / "a.png", **more) == 2
    assert "--end must be after --start" in the_error(capsys)
