"""Accept length stays a statement about verifies, in every place where SGLang reports it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from click.testing import CliRunner
from crossing import ACCEPTED, Crossing, ask_all, cross, language_bodies, need
from probing import M, N, change, our_state, scheduler_state, verifies
from sglang_servers import Server

from sglang_spec_ext.compat import workers
from sglang_spec_ext.compat.contracts import in_use
from sglang_spec_ext.ops.cli import main
from testbed import engine
from testbed.demo.server_log import SPECULATING, TARGET_ONLY, DecodeStep, Switch, parse

SHORT = 60
HISTOGRAM = "spec_correct_drafts_histogram"
WITH_A_DRAFT = (
    "resolve_spec_tokens", "process_decode",
    "device_graphs", "target_embeds", "draft_embeds", "draft_positions",
)  # fmt: skip
"""Touch points of the threshold that a server with a draft has hooked without it, too."""


def cross_with_ids(server: Server, seed: int) -> Crossing:
    long = language_bodies(2, 300, first_seed=seed, name="metrics")
    return cross(server, long, language_bodies(6, SHORT, first_seed=seed + 10))


def test_decode_lines_have_an_accept_length_only_while_speculating(
    crossing_server: Server,
) -> None:
    crossing = cross_with_ids(crossing_server, 600)
    steps = {
        mode: [e for e in map(parse, crossing.lines(mode)) if isinstance(e, DecodeStep)]
        for mode in (SPECULATING, TARGET_ONLY)
    }
    assert len(steps[TARGET_ONLY]) >= SHORT - 5
    # a line is about the step before it, so the first after a switch may be about the other mode
    assert all(step.accept_length is None for step in steps[TARGET_ONLY][1:])
    speculating = [step.accept_length for step in steps[SPECULATING]]
    assert speculating.count(None) <= 2
    measured = [length for length in speculating if length is not None]
    assert sum(measured) / len(measured) > ACCEPTED


def test_accept_length_of_a_request_counts_its_verifies_only(crossing_server: Server) -> None:
    crossing = cross_with_ids(crossing_server, 620)
    for stream in crossing.long:
        meta = stream.answer()["meta_info"]
        lengths = [length for _, length in verifies(crossing.log, stream.body["rid"])]
        assert meta["spec_verify_ct"] == len(lengths)
        # the last verify may accept more than the request may still say
        assert meta["spec_accept_length"] == pytest.approx(sum(lengths) / len(lengths), abs=0.05)
        histogram = "spec_accept_histogram" if engine.FIRST_RELEASE else HISTOGRAM
        assert sum(meta[histogram]) == len(lengths)
    alone = [stream.answer()["meta_info"] for stream in crossing.burst]
    never_verified = [meta for meta in alone if not meta.get("spec_verify_ct")]
    need(len(never_verified) >= 4, f"{len(never_verified)} requests came and went while off")
    assert not any("spec_accept_length" in meta for meta in never_verified)


def test_accept_length_of_the_server_counts_verifies_only(crossing_server: Server) -> None:
    crossing = cross_with_ids(crossing_server, 640)
    seen = re.findall(r"probe: verify .* accepted=(\d+)", "\n".join(crossing.log))
    lengths = [int(length) for length in seen]
    response = crossing_server.client.get("/server_info").json()
    reported = response["internal_states"][0]["avg_spec_accept_length"]
    assert reported == pytest.approx(sum(lengths) / len(lengths), abs=0.1)
    assert reported > ACCEPTED


def test_prometheus_reports_no_accept_length_while_off(crossing_server: Server) -> None:
    def gauge() -> float:
        text = crossing_server.client.get("/metrics").text
        return float(re.findall(r"^sglang:spec_accept_length\{.*\} (\S+)$", text, re.M)[-1])

    off: list[float] = []

    def ask(crossing: Crossing) -> None:
        crossing.wait_for_burst(SHORT // 4)
        off.append(gauge())
        need(len(crossing.burst[0].chunks) < SHORT, "asked when the burst had ended")

    long = language_bodies(2, 500, first_seed=660)
    cross(crossing_server, long, language_bodies(6, 3 * SHORT, first_seed=670), during=ask)
    assert off == [0.0]
    # 0.5.9's is that of the last verify alone, which the end of its request cuts short
    assert gauge() >= (1.0 if engine.FIRST_RELEASE else 2.0)


def test_hooks_are_bound_as_declared(
    crossing_server: Server, static_server: Server, plain_server: Server
) -> None:
    """In the scheduler process: with the threshold, with a draft alone, and with neither."""
    replaced = scheduler_state(crossing_server)["replaced"]
    expected = in_use(workers.contract().scheduler)
    assert sorted(replaced) == sorted(point.target for point in expected)
    with_a_draft = [point.target for point in expected if point.name in WITH_A_DRAFT]
    assert sorted(scheduler_state(static_server)["replaced"]) == sorted(with_a_draft)
    assert scheduler_state(plain_server)["replaced"] == []


# ---------------------------------------------------------------------------- the plugin's own


def our_series(server: Server) -> dict[str, float]:
    """Value by name and by what labels it has beside SGLang's own."""
    found = {}
    text = server.client.get("/metrics").text
    for name, labels, value in re.findall(r"^sglang:spec_ext_(\w+)\{(.*)\} (\S+)$", text, re.M):
        pairs = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert pairs["tp_rank"] == "0"
        assert pairs["model_name"]
        own = pairs.get("mode") or pairs.get("to")
        if "le" not in pairs:
            found[f"{name}/{own}" if own else name] = float(value)
    return found


def grown(after: Any, before: Any) -> Any:
    if isinstance(after, dict):
        return {key: grown(after[key], before[key]) for key in after}
    return after - before


def test_state_and_series_follow_a_crossing(crossing_server: Server) -> None:
    during: list[tuple[str, float]] = []

    def ask(crossing: Crossing) -> None:
        crossing.wait_for_burst(SHORT // 4)
        target_only = our_series(crossing_server)["target_only"]
        during.append((our_state(crossing_server)["mode"], target_only))
        need(len(crossing.burst[0].chunks) < 2 * SHORT, "asked when the burst had ended")

    counters = ("switches", "steps", "tokens", "resumes", "draft_tokens_warmed")
    before, series_before = our_state(crossing_server), our_series(crossing_server)
    crossing = cross(
        crossing_server,
        language_bodies(2, 400, first_seed=680),
        language_bodies(6, 2 * SHORT, first_seed=690),
        during=ask,
    )
    state, series = our_state(crossing_server), our_series(crossing_server)
    assert during == [("target-only", 1.0)]
    assert (state["mode"], series["target_only"]) == ("speculating", 0.0)
    assert (state["threshold"], state["resume_threshold"], state["min_steps"]) == (4, 4, 4)
    assert state["draft_kept_warm_by"] == "KV-only writes"
    assert state["unbound"] == []

    since = {key: grown(state[key], before[key]) for key in counters}
    switches = [event for event in map(parse, crossing.log) if isinstance(event, Switch)]
    for mode in (SPECULATING, TARGET_ONLY):
        to_here = [switch.batch for switch in switches if switch.new_mode == mode]
        assert since["switches"][mode] == len(to_here)
        new = grown(series, series_before)
        assert new[f"switches_total/{mode}"] == len(to_here)
        assert new[f"switch_batch_size_count/{mode}"] == len(to_here)
        assert new[f"switch_batch_size_sum/{mode}"] == sum(to_here)
        assert new[f"tokens_total/{mode}"] == since["tokens"][mode]
        assert series[f"tokens_total/{mode}"] == state["tokens"][mode]
    assert since["resumes"] == new["resumes_total"] == since["switches"][SPECULATING]

    lengths = re.findall(r"probe: verify .* accepted=(\d+)", "\n".join(crossing.log))
    assert since["tokens"][SPECULATING] == sum(map(int, lengths))
    assert since["draft_tokens_warmed"] == since["tokens"][TARGET_ONLY]
    assert new["draft_tokens_warmed_total"] == since["tokens"][TARGET_ONLY]
    # all but the first of each answer, and what a last verify accepted beyond the end of one
    said = sum(answer["meta_info"]["completion_tokens"] - 1 for answer in crossing.answers)
    assert 0 <= sum(since["tokens"].values()) - said <= 3 * len(crossing.answers)
    earlier = before["tokens"][SPECULATING] / (before["accept_length"] or 1)
    verifies = earlier + len(lengths)
    assert state["accept_length"] == pytest.approx(state["tokens"][SPECULATING] / verifies)


def switches_with(server: Server, requests: int) -> list[Switch]:
    """What changes while so many requests decode together."""
    seen = len(server.log())
    ask_all(server, language_bodies(requests, SHORT, first_seed=700))
    log = server.log()[seen:]
    together = [int(n) for n in re.findall(r"#running-req: (\d+)", log)]
    need(max(together) == requests, f"{max(together)} of {requests} requests decoded together")
    return [event for event in map(parse, log.splitlines()) if isinstance(event, Switch)]


def test_the_threshold_of_a_running_server_moves(crossing_server: Server) -> None:
    seen = len(crossing_server.log())
    try:
        assert change(crossing_server, **{N: 7}).json() == [True]
        state = our_state(crossing_server)
        assert (state["threshold"], state["resume_threshold"]) == (7, 7)
        assert our_series(crossing_server)["threshold"] == 7
        assert switches_with(crossing_server, 6) == []
        # together with a value of SGLang's own
        both = {N: 2, M: 1, "pp_max_micro_batch_size": 8}
        assert change(crossing_server, **both).json() == [True]
        off, *_ = switches_with(crossing_server, 3)
        assert (off.new_mode, off.batch) == (TARGET_ONLY, 3)
    finally:
        assert change(crossing_server, **{N: 4, M: 4}).json() == [True]
    settings = re.findall(r"spec-ext settings: (.*) \(by", crossing_server.log()[seen:])
    assert settings == [
        "N=4, M=4, K=4 -> N=7, M=7, K=4",
        "N=7, M=7, K=4 -> N=2, M=1, K=4",
        "N=2, M=1, K=4 -> N=4, M=4, K=4",
    ]


def test_doctor_tells_what_the_running_server_does(crossing_server: Server) -> None:
    result = CliRunner().invoke(main, ["doctor", "--url", crossing_server.url, "--json"])
    found = json.loads(result.stdout)
    bad = [each for each in found["findings"] if each["severity"] != "note"]
    # of the test bed: its variables, and for 0.5.9 trees on a backend that it made able to
    expected = {"variable-unread"} | ({"tree-backend"} if engine.FIRST_RELEASE else set())
    assert [each for each in bad if each["id"] not in expected] == []
    assert found["server"]["launcher_confirmed"] is True
    assert found["server"]["arguments"]["speculative_algorithm"] == "EAGLE3"
    assert found["server"]["running_cap"] == 8
    (ours,) = found["server"]["plugin"]
    assert ours == our_state(crossing_server)
    lines = CliRunner().invoke(main, ["doctor", "--url", crossing_server.url]).stdout.splitlines()
    assert "threshold         N=4, M=4, K=4" in lines
    version = ours["version"]
    assert f"scheduler         plugin {version}, hooks bound, confirmed at start" in lines


def test_doctor_tells_that_a_server_runs_without_the_plugin(static_server: Server) -> None:
    result = CliRunner().invoke(main, ["doctor", "--url", static_server.url])
    assert "not bound in this server" in result.stdout


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({N: -1}, f"{N} -1 is not a whole number >= 0"),
        ({N: 2.5}, f"{N} 2.5 is not a whole number >= 0"),
        ({M: 9}, f"{M} 9 is above {N} 4"),
    ],
)
def test_a_threshold_that_cannot_be_is_refused_with_the_reason(
    crossing_server: Server, values: dict[str, Any], reason: str
) -> None:
    before = our_state(crossing_server)
    response = change(crossing_server, **values, pp_max_micro_batch_size=8)
    assert response.status_code == 400
    assert reason in response.text
    state = our_state(crossing_server)
    assert reason in state["refused"]
    assert {**state, "refused": before["refused"]} == before
