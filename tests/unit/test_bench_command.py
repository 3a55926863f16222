"""The whole command against a fake server: what it writes, prints, returns, and leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from bench_levels import booted
from click.testing import CliRunner

from sglang_spec_ext.ops.bench.command import bench
from sglang_spec_ext.ops.bench.progress import Reporter
from sglang_spec_ext.ops.bench.results import Load, Plan, Results
from sglang_spec_ext.ops.bench.server import free_port
from sglang_spec_ext.ops.bench.server_log import BootLog
from sglang_spec_ext.ops.bench.sweep import Session, boot_notes, infer_label, sweep_running
from sglang_spec_ext.ops.bench.variants import Variant

FAKE = Path(__file__).with_name("bench_fake_server.py")
QUICK = [
    *("--output-tokens", "48", "--warmup-tokens", "4", "--requests-per-level", "4"),
    *("--input-ids-random", "8", "--vocab-size", "100"),
]
SERVER = [sys.executable, str(FAKE), "--decode-log-interval", "3"]
SPECULATIVE = ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"]


def measure(out: Path, *options: str, server: list[str] | None = None) -> tuple[int, str, Any]:
    """Exit code, everything printed, and bench.json (None if there is none)."""
    base = [] if server is None else ["--", *server]
    code, output = invoke(*QUICK, "--out", str(out), *options, *base)
    path = out / "bench.json"
    return code, output, json.loads(path.read_text()) if path.exists() else None


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(bench, list(arguments), catch_exceptions=False)
    return done.exit_code, done.output


def test_a_sweep_finds_the_crossover(tmp_path: Path) -> None:
    code, output, document = measure(
        tmp_path,
        *("--variants", "off,on,threshold=4", "--concurrency", "8,2", "--boots", "2"),
        *("--output-tokens", "96"),
        server=[*SERVER, *SPECULATIVE, "--api-key", "s3cret"],
    )
    assert code == 0, output
    assert [(run["variant"], run["boot"]) for run in document["runs"]] == [
        (variant, boot) for boot in (1, 2) for variant in ("off", "on", "threshold=4")
    ]
    for run in document["runs"]:
        assert run["failure"] is None and run["notes"] == []
        assert [level["concurrency"] for level in run["levels"]] == [2, 8]
        assert [level["requests"] for level in run["levels"]] == [4, 16]
        assert [level["output_tokens"] for level in run["levels"]] == [4 * 96, 16 * 96]
        assert [level["running_max"] for level in run["levels"]] == [2, 8]
        assert all(level["graph_share"] == 1.0 for level in run["levels"])
        assert all(level["steady_tok_s"] > 0 for level in run["levels"])
        assert run["environment"]["sglang"] == "0.0.fake"
        assert (run["capture_s"], run["capture_gb"]) == (1.5, 0.25)
        log = (tmp_path / run["log_file"]).read_text()
        assert log.count("fired up") == 1
        # alike for all variants: once, before anything is sent
        assert log.count("Freezing GC before request 1") == log.count("Freezing GC") == 1
        assert run["server"]["gc_frozen"] is True
    accept = {run["variant"]: [x["accept_len"] for x in run["levels"]] for run in document["runs"]}
    assert accept == {"off": [None, None], "on": [2.0, 2.0], "threshold=4": [2.0, None]}
    # interpolated between on/off = 2 at C=2 and 1/2 at C=8
    assert "Recommended N = 4" in output
    assert "compared by server's decode tok/s" in output
    assert "threshold=4: at worst 1.000 of the better of on and off" in output
    everything = output + json.dumps(document)
    assert "s3cret" not in everything


def test_a_variant_that_does_not_boot_is_recorded_and_the_rest_goes_on(tmp_path: Path) -> None:
    code, output, document = measure(
        tmp_path,
        *("--variants", "adaptive,off", "--concurrency", "1", "--boots", "1"),
        server=[*SERVER, *SPECULATIVE, "--fake-fault", "adaptive-crashes-at-boot"],
    )
    assert code == 3, output
    adaptive, off = document["runs"]
    assert "did not boot: ValueError: fake checkpoint is broken" in adaptive["failure"]
    assert adaptive["levels"] == [] and len(off["levels"]) == 1
    assert "adaptive, boot 1: did not boot" in output


def test_variants_that_boot_together_take_turns(tmp_path: Path) -> None:
    code, output, document = measure(
        tmp_path,
        *("--variants", "off,adaptive,on,threshold=4", "--concurrency", "1,2", "--boots", "2"),
        *("--together", "3"),
        server=[*SERVER, *SPECULATIVE, "--fake-fault", "adaptive-crashes-at-boot"],
    )
    assert code == 3, output
    runs = document["runs"]
    boots = [(run["variant"], run["boot"]) for run in runs]
    assert boots == [(v, b) for b in (1, 2) for v in ("off", "adaptive", "on", "threshold=4")]
    for run in runs:
        beside = any("booted beside others" in note for note in run["notes"])
        if run["variant"] == "adaptive":
            assert "fake checkpoint is broken" in run["failure"]
            continue
        assert len(run["levels"]) == 2 and run["failure"] is None
        # the fourth has no companion left
        assert beside == (run["variant"] != "threshold=4")
        assert (run["gpu_memory_used_mib"] is None) or not beside
        assert (run["capture_gb"] is None) == beside
    order = re.findall(r"(\S+), C=(\d+): \d+ tok/s", output)
    assert order == 2 * [
        *(("off", "1"), ("on", "1"), ("on", "2"), ("off", "2")),
        *(("threshold=4", "1"), ("threshold=4", "2")),
    ]


def test_rounds_walk_all_levels_again_with_another_server_first(tmp_path: Path) -> None:
    base = [*SERVER, *SPECULATIVE]
    once = ("--variants", "off,on", "--concurrency", "1,2", "--boots", "1", "--together", "2")
    code, output, document = measure(tmp_path, *once, server=base)
    assert code == 0, output

    code, output, document = measure(tmp_path, *once, "--rounds", "3", "--resume", server=base)
    assert code == 0, output
    order = re.findall(r"(\S+), C=(\d+): \d+ tok/s", output)
    assert order == [
        *(("on", "1"), ("off", "1"), ("off", "2"), ("on", "2")),
        *(("off", "1"), ("on", "1"), ("on", "2"), ("off", "2")),
    ]
    measured = [[level["concurrency"] for level in run["levels"]] for run in document["runs"]]
    assert measured == 2 * [[1, 2]] + 2 * [[1, 2, 1, 2]]
    assert "± is half the spread of 3 measurements, boots: 2" in output


def test_rounds_ask_with_prompts_that_no_round_before_has_cached(tmp_path: Path) -> None:
    seeds: list[int] = []

    class Recording:
        def for_level(self, count: int, seed: int) -> list[dict[str, Any]]:
            seeds.append(seed)
            return [{"input_ids": [1]}] * count

    port = free_port()
    server = [*SERVER, "--host", "127.0.0.1", "--port", str(port)]
    load = Load("recorded", 2, 1, 1, 1, 0)
    found = Results(Plan(["off"], 1, [1, 2], load, rounds=2))
    with booted(server, os.environ, port, tmp_path / "log", 60) as running, Reporter(4) as reporter:
        session = Session(found, lambda: None, lambda _: Recording(), reporter, None, 30)
        sweep_running(session, "off", running.url, None)
    assert [level.concurrency for level in found.runs[0].levels] == [1, 2, 1, 2]
    assert len(seeds) == len(set(seeds)) == 8


def test_a_server_that_does_not_freeze_its_gc_is_measured_and_noted(tmp_path: Path) -> None:
    code, output, document = measure(
        tmp_path,
        *("--variants", "off", "--concurrency", "1", "--boots", "1"),
        server=[*SERVER, "--fake-fault", "refuses-to-freeze"],
    )
    assert code == 0, output
    (run,) = document["runs"]
    assert run["server"]["gc_frozen"] is False and len(run["levels"]) == 1
    assert "off, boot 1: it refused /freeze_gc" in output


def test_nothing_boots(tmp_path: Path) -> None:
    code, output, document = measure(
        tmp_path,
        *("--concurrency", "1", "--boots", "1"),
        server=[*SERVER, *SPECULATIVE, "--fake-fault", "crashes-at-boot"],
    )
    assert code == 1, output
    assert [run["levels"] for run in document["runs"]] == [[], []]
    assert "No recommendation" in output


def test_a_server_that_dies_under_load(tmp_path: Path) -> None:
    code, output, document = measure(
        tmp_path,
        *("--variants", "off", "--concurrency", "1,2,4", "--boots", "1"),
        server=[*SERVER, "--fake-fault", "dies-under-load"],
    )
    assert code == 1, output
    (run,) = document["runs"]
    assert "RuntimeError: fake kernel failed" in run["failure"]
    assert list(run["failed_levels"]) == ["1"]  # the others had no server left


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("refuses-requests", "HTTP 400: .*no tokenizer"),
        ("stops-early", "ended after 3 of 4 output tokens .*context-length"),
    ],
)
def test_requests_that_fail_make_no_figures(tmp_path: Path, fault: str, why: str) -> None:
    code, output, document = measure(
        tmp_path,
        *("--variants", "off", "--concurrency", "1,2", "--boots", "1"),
        server=[*SERVER, "--fake-fault", fault],
    )
    assert code == 1, output
    (run,) = document["runs"]
    assert run["failure"] is None and run["levels"] == []
    assert [bool(re.search(why, text)) for text in run["failed_levels"].values()] == [True, True]


def test_levels_at_the_cap_and_without_graphs_are_not_used(tmp_path: Path) -> None:
    code, output, document = measure(
        tmp_path,
        *("--concurrency", "2,4,8", "--boots", "1"),
        server=[
            *(*SERVER, *SPECULATIVE, "--max-running-requests", "4", "--cuda-graph-max-bs", "2")
        ],
    )
    assert code == 0, output
    queued = [level["queued"] for level in document["runs"][0]["levels"]]
    assert queued[:2] == [0, 0] and queued[2] > 0
    assert "C=8 not used: `off` was queued at the admission cap: 4 of 8 requests ran" in output
    assert "C=4 not used: `off` ran only 0% of its steps on CUDA graphs" in output
    assert "speculation wins at every usable level (up to C=2)" in output


@contextmanager
def interruptible(out: Path, pids: Path, variants: str = "off") -> Iterator[subprocess.Popen[str]]:
    """A sweep whose second level never ends, handed over while that level runs."""
    server = [*SERVER, *SPECULATIVE, "--fake-fault", "hangs-at-two", "--fake-pids", str(pids)]
    options = ["--variants", variants, "--concurrency", "1,2", "--boots", "1", "--out", str(out)]
    options += ["--together", "2"]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "sglang_spec_ext.ops.bench", *QUICK, *options),
            *("--warmup-tokens", "0", "--", *server),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        while not any("#running-req: 2," in log.read_text() for log in out.glob("logs/*.log")):
            assert process.poll() is None
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_interrupted_in_a_level(tmp_path: Path, number: signal.Signals, code: int) -> None:
    pids = tmp_path / "pids"
    out = tmp_path / "out"
    with interruptible(out, pids) as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == code, output
    assert [is_alive(int(pid)) for pid in pids.read_text().split()] == [False, False]
    (run,) = json.loads((out / "bench.json").read_text())["runs"]
    assert run["failure"] == "interrupted"
    assert [level["concurrency"] for level in run["levels"]] == [1]
    assert "Output tokens per second" in output  # what there is, is shown
    assert f"--out {out} --resume continues" in output


def test_interrupted_while_others_wait_all_are_stopped(tmp_path: Path) -> None:
    pids, out = tmp_path / "pids", tmp_path / "out"
    with interruptible(out, pids, "off,on") as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    stopped = [is_alive(int(pid)) for pid in pids.read_text().split()]
    assert stopped == [False] * 4
    off, on = json.loads((out / "bench.json").read_text())["runs"]
    assert (off["failure"], len(off["levels"])) == ("interrupted", 1)
    assert (on["failure"], len(on["levels"])) == ("interrupted", 1)


def test_resumed_sweeps_measure_what_is_missing(tmp_path: Path) -> None:
    base = [*SERVER, *SPECULATIVE]
    first = ("--variants", "off", "--concurrency", "1", "--boots", "1")
    assert measure(tmp_path, *first, server=base)[0] == 0

    code, output, _ = measure(tmp_path, *first, server=base)
    assert code == 1 and "continue it with --resume" in output

    wider = ("--variants", "off,on", "--concurrency", "1,2", "--boots", "1", "--resume")
    code, output, document = measure(tmp_path, *wider, server=base)
    assert code == 0, output
    measured = [(run["variant"], [x["concurrency"] for x in run["levels"]])
                for run in document["runs"]]  # fmt: skip
    assert measured == [("off", [1]), ("off", [2]), ("on", [1, 2])]
    assert (tmp_path / "logs" / "off-boot1.2.log").exists()

    other = (*wider, "--output-tokens", "32")
    code, output, _ = measure(tmp_path, *other, server=base)
    assert code == 1 and "measured with another load" in output
    code, output, _ = measure(tmp_path, *wider, server=[*base, "--cuda-graph-max-bs", "3"])
    assert code == 1 and "measured with another base command" in output


def test_a_running_server(tmp_path: Path) -> None:
    port = free_port()
    server = [*SERVER, "--host", "127.0.0.1", "--port", str(port), *SPECULATIVE]
    log = tmp_path / "server.log"
    with booted(server, os.environ, port, log, 60) as running:
        options = ("--url", running.url + "/", "--concurrency", "2")
        code, output, with_log = measure(tmp_path / "a", *options, "--log", str(log))
        assert code == 0, output
        code, output, blind = measure(tmp_path / "b", *options, "--label", "mine")
        assert code == 0 and "no server log was read" in output
        code, output, _ = measure(tmp_path / "c", *options)
        assert code == 1 and "say by --label on or threshold=N" in output
        assert running.death() is None  # not ours, so it goes on
    (run,) = with_log["runs"]
    assert (run["variant"], run["command"]) == ("on", None)
    assert run["levels"][0]["server_tok_s"] == 2000
    (run,) = blind["runs"]
    assert run["variant"] == "mine"
    assert run["levels"][0]["server_tok_s"] is None
    assert run["levels"][0]["accept_len"] == pytest.approx(2.0, abs=0.1)


def test_no_server_there(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    code, output, document = measure(tmp_path, "--url", url)
    assert code == 1 and f"no healthy server answers at {url}/health" in output
    assert document is None


def test_dry_run_prints_and_runs_nothing(tmp_path: Path) -> None:
    code, output, document = measure(
        tmp_path,
        *("--variants", "off,threshold=8", "--concurrency", "4", "--dry-run"),
        server=[*SERVER, *SPECULATIVE],
    )
    assert code == 0 and document is None
    off, threshold = (line for line in output.splitlines() if "bench_fake_server" in line)
    assert "--speculative" not in off
    assert threshold.endswith(
        "--speculative-disable-batch-threshold 8 --host 127.0.0.1 --port PORT"
    )
    assert "C=4: 4 warm-up requests of 4 tokens, then 8 of 48 (random ids, 8 tokens)" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give either --url"),
        (["--url", "http://x", "--", "python"], "give either --url"),
        (["--url", "http://x", "--variants", "on"], "--variants needs a base command"),
        (["--label", "x", "--", "python"], "--label and --log belong to --url"),
        (["--concurrency", "1,x", "--", "python"], "no list of numbers"),
        (["--concurrency", "0", "--", "python"], "no list of numbers"),
        (["--concurrency", "", "--", "python"], "no list of numbers"),
        (["--variants", "fast", "--", "python"], "unknown variant 'fast'"),
        (["--variants", "on", "--", "python"], "has no --speculative-algorithm"),
        (["--variants", "off", "--", "no-such-program"], "'no-such-program', which is not exec"),
        (["--variants", "off", "--", "python", "--model-path", "org/m"], "give --vocab-size"),
        (["--prompts", "absent", "--", "python"], "cannot read prompts from absent"),
        (["--prompts", "p", "--input-ids-random", "8", "--", "python"], "not both"),
        (["--resume", "--", "python"], "--resume needs the --out folder"),
        (["--boots", "0", "--", "python"], "boots"),
        (["report"], "Missing argument"),
        (["report", "absent.json"], "does not exist"),
        (["report", __file__, __file__], "given twice"),
    ],
)
def test_wrong_usage_is_code_2_and_one_sentence(arguments: list[str], complaint: str) -> None:
    code, output = invoke(*arguments)
    assert code == 2
    assert complaint in " ".join(output.split()).replace("│ ", "")


def test_resuming_nothing(tmp_path: Path) -> None:
    code, output, _ = measure(tmp_path, "--resume", "--variants", "off", server=SERVER)
    assert code == 1 and "nothing to resume" in output


def test_report_of_several_files(tmp_path: Path) -> None:
    for variant in ("off", "on"):
        options = ("--variants", variant, "--concurrency", "2,8", "--boots", "1")
        assert measure(tmp_path / variant, *options, server=[*SERVER, *SPECULATIVE])[0] == 0
    files = [str(tmp_path / variant / "bench.json") for variant in ("off", "on")]
    code, output = invoke("report", *files, "--markdown")
    assert code == 0
    assert "| variant | 2 | 8 |" in output
    assert "Recommended N = 4" in output
    code, output = invoke("report", __file__)
    assert code == 1 and "is not JSON" in output


@pytest.mark.parametrize(
    ("info", "log", "label"),
    [
        ({}, None, "off"),
        ({"speculative_algorithm": None}, "spec-ext active: N=4, M=4", "off"),
        ({"speculative_algorithm": "EAGLE3", "speculative_adaptive": True}, None, "adaptive"),
        ({"speculative_algorithm": "EAGLE3"}, None, None),
        ({"speculative_algorithm": "EAGLE3"}, "server_args=S()", "on"),
        ({"speculative_algorithm": "EAGLE3"}, "[t] spec-ext active: N=0, M=0", "threshold=0"),
        # an earlier boot in the same log
        ({"speculative_algorithm": "EAGLE3"}, "spec-ext active: N=4\nserver_args=S()", "on"),
    ],
)
def test_label_of_a_running_server(
    tmp_path: Path, info: dict[str, Any], log: str | None, label: str | None
) -> None:
    path = None
    if log is not None:
        path = tmp_path / "server.log"
        path.write_text(log)
    assert infer_label(info, path) == label


@pytest.mark.parametrize(
    ("variant", "info", "line", "note"),
    [
        (Variant("off"), {"speculative_algorithm": None}, None, None),
        (Variant("off"), {}, None, None),
        (Variant("off"), {"speculative_algorithm": "EAGLE3"}, None, "speculative_algorithm=EAGLE3"),
        (Variant("on"), {"version": "1"}, None, "speculative_algorithm=None"),
        (Variant("on"), {}, "spec-ext active: N=4, M=4", "active though"),
        (Variant("adaptive"), {"speculative_algorithm": "EAGLE3"}, None, "adaptive mode off"),
        (Variant("threshold", 4), {}, "spec-ext active: N=4, M=4", None),
        (Variant("threshold", 4), {}, "spec-ext active: N=4", None),
        (Variant("threshold", 4), {}, "spec-ext active: N=44, M=4", "with N=4"),
        (Variant("threshold", 4), {}, None, "with N=4"),
    ],
)
def test_a_server_that_is_not_its_variant_is_noted(
    variant: Variant, info: dict[str, Any], line: str | None, note: str | None
) -> None:
    notes = boot_notes(variant, info, BootLog(plugin_line=line))
    assert len(notes) == (note is not None)
    assert note is None or note in notes[0]
