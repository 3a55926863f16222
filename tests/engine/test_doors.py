"""The ways in: ``--help``, ``sgl.Engine`` and what happens without the flag.

The command line starts the servers of test_crossing.py; the other two doors, ``sglang serve`` and
the environment variable, start servers of test_other_configurations.py.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from crossing import ACCEPTED
from safetensors.torch import load_file, save_file
from sglang_servers import Servers, server_environment

from sglang_spec_ext.args import CHECK_FLAG, FLAGS
from sglang_spec_ext.compat import workers
from sglang_spec_ext.compat.contracts import ARGUMENT_SEAM, in_use
from testbed import engine, prompts

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 400
TOKENS = 60

COMMANDS = {
    "help": ("-m", "sglang.launch_server", "--help"),
    "engine": (str(PROGRAMS / "engine_door.py"),),
    "functions": (str(PROGRAMS / "launcher_functions.py"),),
}
Result = subprocess.CompletedProcess[str]


def target_without_hooks(folder: Path) -> Path:
    """The test bed's target as a MiMo: the same layers, with biases, in a class without hooks."""
    shutil.copytree(engine.TARGET, folder, dirs_exist_ok=True)
    config = json.loads((engine.TARGET / "config.json").read_text())
    config |= {"model_type": "qwen2", "architectures": ["MiMoForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(engine.TARGET / "model.safetensors")
    for name, weight in list(weights.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.replace("weight", "bias")] = weight.new_zeros(weight.shape[0])
    save_file(weights, folder / "model.safetensors")
    return folder


def run(*command: str) -> Result:
    return subprocess.run(
        [sys.executable, *command],
        env=server_environment({}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Future[Result]]]:
    """What came of each of `COMMANDS`. Two run at a time, since each spends its time importing."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, *command) for name, command in COMMANDS.items()}


def test_help_shows_the_flags(results: dict[str, Future[Result]]) -> None:
    result = results["help"].result()
    assert result.returncode == 0
    for flag in (*FLAGS.values(), CHECK_FLAG):
        assert flag in result.stdout


def test_engine_door_with_no_cap_and_never_speculating(
    results: dict[str, Future[Result]],
) -> None:
    """Keyword arguments; threshold 0; and no --max-running-requests, which SGLang would make 48."""
    result = results["engine"].result()
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    assert "speculative_disable_batch_threshold" in told["refused"]
    assert told["right"] == [True, True]
    assert told["verifies"] == [0, 0]
    log = result.stdout + result.stderr
    (line,) = [x for x in log.splitlines() if "spec-ext active" in x]
    assert "N=0, M=0" in line
    cap = re.search(r"max_running_requests=(\d+)", line)
    assert cap and int(cap[1]) > 48
    assert told["max_running_requests"] == int(cap[1])


@pytest.mark.skipif(engine.FIRST_RELEASE, reason="binds at import: no before and after to compare")
def test_without_the_flag_the_launcher_has_no_more_than_it_says(
    results: dict[str, Future[Result]],
) -> None:
    result = results["functions"].result()
    assert result.returncode == 0, result.stderr[-3000:]
    told = json.loads(result.stdout.splitlines()[-1])
    seam = {point.target for point in in_use(ARGUMENT_SEAM)}
    launcher = in_use(workers.contract().launcher)
    drafting = {
        point.target
        for point in launcher
        if point.name in ("check_server_args", "launch_subprocesses")
    }
    assert set(told["without a draft"]) == seam
    assert set(told["without the flag"]) == seam | drafting
    assert set(told["with the flag"]) == seam | {point.target for point in launcher}


def test_without_the_flag_a_target_gets_the_hooks_that_its_class_lacks(
    engines: Servers, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From end to end, on weights that the test bed's draft was trained for."""
    target = target_without_hooks(tmp_path_factory.mktemp("target"))
    server = engines.get(1, model_path=str(target))
    (line,) = [x for x in server.log().splitlines() if "lacks EAGLE-3 hooks" in x]
    assert "MiMoForCausalLM" in line
    assert "set_eagle3_layers_to_capture" in line
    starts = [prompts.prompt_ids(seed) for seed in (710, 711)]
    for start, answer in zip(starts, server.greedy(starts, TOKENS), strict=True):
        assert answer["output_ids"] == prompts.continue_ids(start, TOKENS)
        assert answer["meta_info"]["spec_accept_length"] > ACCEPTED
