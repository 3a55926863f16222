"""Accept length stays a statement about verifies, in every place where SGLang reports it."""

from __future__ import annotations

import re

import pytest
from crossing import Crossing, cross, language_bodies, need
from probing import scheduler_state, verifies
from sglang_servers import Server

from sglang_spec_ext.compat.contracts import SCHEDULER
from testbed.demo.server_log import SPECULATING, TARGET_ONLY, DecodeStep, parse

SHORT = 60


def cross_with_ids(server: Server, seed: int) -> Crossing:
    long = language_bodies(2, 300, first_seed=seed)
    for i, body in enumerate(long):
        body["rid"] = f"metrics-{seed}-{i}-{id(long)}"
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
    assert sum(measured) / len(measured) > 2.5


def test_accept_length_of_a_request_counts_its_verifies_only(crossing_server: Server) -> None:
    crossing = cross_with_ids(crossing_server, 620)
    for stream in crossing.long:
        meta = stream.answer()["meta_info"]
        lengths = [length for _, length in verifies(crossing.log, stream.body["rid"])]
        assert meta["spec_verify_ct"] == len(lengths)
        # the last verify may accept more than the request may still say
        assert meta["spec_accept_length"] == pytest.approx(sum(lengths) / len(lengths), abs=0.05)
        assert sum(meta["spec_correct_drafts_histogram"]) == len(lengths)
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
    assert reported > 2.5


def test_prometheus_reports_no_accept_length_while_off(crossing_server: Server) -> None:
    def gauge() -> float:
        text = crossing_server.client.get("/metrics").text
        return float(re.findall(r"^sglang:spec_accept_length\{.*\} (\S+)$", text, re.M)[-1])

    off: list[float] = []

    def ask(crossing: Crossing) -> None:
        crossing.burst[0].wait_for(SHORT // 4)
        off.append(gauge())
        need(len(crossing.burst[0].chunks) < SHORT, "asked when the burst had ended")

    long = language_bodies(2, 500, first_seed=660)
    cross(crossing_server, long, language_bodies(6, 3 * SHORT, first_seed=670), during=ask)
    assert off == [0.0]
    assert gauge() > 2.0


def test_hooks_are_bound_as_declared(crossing_server: Server, static_server: Server) -> None:
    """In the scheduler process; without the flag each function is still what was imported."""
    replaced = scheduler_state(crossing_server)["replaced"]
    assert sorted(replaced) == sorted(point.target for point in SCHEDULER)
    assert scheduler_state(static_server)["replaced"] == []
