"""`sglang-spec-ext doctor`: known problems with a clean twin each, the page, a running server."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from http_answers import Answer, Serve
from rich.console import Console

from sglang_spec_ext import __version__
from sglang_spec_ext.ops.cli import main
from sglang_spec_ext.ops.doctor import command, installed, problems, report, server
from sglang_spec_ext.ops.doctor.facts import Facts
from sglang_spec_ext.ops.doctor.installed import Installed, Modified, Package
from sglang_spec_ext.ops.doctor.server import Server

STATE: dict[str, Any] = {
    "version": __version__,
    "mode": "speculating",
    "threshold": 24,
    "resume_threshold": 16,
    "min_steps": 4,
    "largest_threshold": 32,
    "steps_in_mode": 7,
    "switches": {"speculating": 2, "target-only": 2},
    "resumes": 2,
    "steps": {"speculating": 900, "target-only": 100},
    "tokens": {"speculating": 9000, "target-only": 3000},
    "accept_length": 3.1,
    "draft_tokens_warmed": 3000,
    "draft_kept_warm_by": "KV-only writes",
    "refused": None,
    "unbound": [],
}
INFO: dict[str, Any] = {
    "version": "0.5.23",
    "model_path": "some/target",
    "tp_size": 2,
    "dp_size": 1,
    "device": "cuda",
    "api_key": "sk-very-secret-key",
    "admin_api_key": "another",
    "attention_backend": "fa3",
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 3,
    "speculative_num_draft_tokens": 4,
    "speculative_adaptive": False,
    "max_running_requests": None,
    "enable_metrics": True,
    "sglang_spec_ext": True,
}
CLEAN = Installed(
    python="3.11.7, /venv/bin/python",
    system="Linux",
    packages=(
        Package("sglang", "0.5.23", "wheel"),
        Package("sglang-spec-ext", __version__, "wheel"),
        Package("torch", "2.14.1", "wheel"),
        Package("sglang-kernel", "0.4.10", "wheel"),
    ),
    plugin_system=True,
    loads_us=True,
    seams={"ServerArgs.add_cli_args": False, "ModelRunner.load_model": False},
    gaps=(),
    modified=(),
    gone=(),
    gpus=("GPU 0: H200",),
)


def running(states: tuple[Any, ...] = (STATE,), cap: int = 256, **info: Any) -> Server:
    """A server whose schedulers have these states of ours; None for one without the plugin."""
    schedulers = tuple(
        {"effective_max_running_requests_per_dp": cap, "avg_spec_accept_length": 3.0}
        | ({} if state is None else {"sglang_spec_ext": state})
        for state in states
    )
    return Server("http://127.0.0.1:30000", {**INFO, **info}, schedulers)


def with_state(**fields: Any) -> Server:
    return running(({**STATE, **fields},))


def versions(**found: str) -> tuple[Package, ...]:
    wanted = {package.name: package.version for package in CLEAN.packages}
    wanted |= {name.replace("_", "-"): version for name, version in found.items()}
    return tuple(Package(name, version, "wheel") for name, version in wanted.items())


def facts(
    here: Installed = CLEAN, there: Server | None = None, environment: dict[str, str] | None = None
) -> Facts:
    return Facts(here, environment or {}, there)


def ids(these: Facts) -> dict[str, str]:
    return {finding.id: finding.severity.word for finding in problems.find(these)}


OLD = replace(CLEAN, packages=versions(sglang="0.5.9"), plugin_system=False)
"""The first release: our .pth loads the plugin."""
PLAIN = running((None,), cap=48, sglang_spec_ext=False)
BROKEN: dict[str, tuple[str, Facts, Facts]] = {
    # id: severity, a case that has the problem, and its twin that has not
    "no-sglang": (
        "error",
        facts(replace(CLEAN, packages=CLEAN.packages[1:])),
        facts(replace(CLEAN, packages=CLEAN.packages[1:]), running()),
    ),
    "files-gone": ("error", facts(replace(CLEAN, gone=("sglang/a.py",))), facts()),
    "contract": ("warning", facts(replace(CLEAN, gaps=("x: not found in y",))), facts()),
    "plugin-invisible": (
        "warning",
        facts(replace(CLEAN, loads_us=False)),
        facts(replace(CLEAN, loads_us=False, seams=dict.fromkeys(CLEAN.seams, True))),
    ),
    "plugin-left-out": (
        "error",
        facts(environment={"SGLANG_PLUGINS": "other"}),
        facts(environment={"SGLANG_PLUGINS": "other, spec_ext"}),
    ),
    "patched-partly": (
        "warning",
        facts(replace(CLEAN, seams=CLEAN.seams | {"ModelRunner.load_model": True})),
        facts(replace(CLEAN, seams=dict.fromkeys(CLEAN.seams, True))),
    ),
    "hooks-lost": ("error", facts(there=with_state(unbound=["a.b"])), facts(there=running())),
    "plugin-partly": (
        "error",
        facts(there=running((STATE, None))),
        facts(there=running((STATE, STATE))),
    ),
    "asked-in-vain": (
        "error",
        facts(there=PLAIN, environment={"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "8"}),
        facts(there=running(), environment={"SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD": "8"}),
    ),
    "two-kernels": (
        "error",
        facts(replace(CLEAN, packages=versions(sgl_kernel="0.3.21"))),
        facts(),
    ),
    "torch-without-cuda": (
        "error",
        facts(replace(CLEAN, packages=versions(torch="2.14.1+cpu"))),
        facts(replace(CLEAN, packages=versions(torch="2.14.1+cpu"), gpus=())),
    ),
    "changed-by-others": (
        "warning",
        facts(replace(CLEAN, modified=(Modified("sglang/a.py", ""),))),
        facts(replace(CLEAN, modified=(Modified("sglang/a.py", "0.5.23/some_patch"),))),
    ),
    "hidden-cap": (
        "warning",
        facts(there=PLAIN),
        facts(there=running((None,), cap=64, sglang_spec_ext=False)),
    ),
    "low-accept-length": (
        "warning",
        facts(there=with_state(accept_length=1.12)),
        facts(there=with_state(accept_length=1.12, steps={"speculating": 9, "target-only": 999})),
    ),
    "flapping": (
        "warning",
        facts(there=with_state(switches={"speculating": 60, "target-only": 60})),
        facts(there=with_state(switches={"speculating": 20, "target-only": 20})),
    ),
    "other-version": ("warning", facts(there=running(version="0.5.22")), facts(there=running())),
    "untested": ("note", facts(replace(CLEAN, packages=versions(sglang="0.5.18"))), facts()),
    "kimi-hook": (
        "note",
        facts(replace(OLD, loads_us=False)),
        facts(
            replace(
                OLD,
                loads_us=False,
                modified=(Modified("sglang/srt/models/kimi_k25.py", "0.5.9/kimi_k25"),),
            )
        ),
    ),
    "own-extend": (
        "note",
        facts(there=with_state(draft_kept_warm_by="SGLang's draft extend on every step (why)")),
        facts(there=running()),
    ),
    "tokenizer-workers": (
        "note",
        facts(there=running(tokenizer_worker_num=2)),
        facts(there=running((None,), tokenizer_worker_num=2)),
    ),
    "no-metrics": ("note", facts(there=running(enable_metrics=False)), facts(there=running())),
    # preflight's rules, on the resolved arguments of a running server
    "tree-draft": (
        "error",
        facts(there=running(attention_backend="trtllm_mha", speculative_eagle_topk=4)),
        facts(there=running(attention_backend="fa3", speculative_eagle_topk=4)),
    ),
    "mixed-chunk": (
        "warning",
        facts(there=running(enable_mixed_chunk=True)),
        facts(there=running(enable_mixed_chunk=False)),
    ),
    "adaptive-off": (
        "warning",
        facts(there=running((None,), speculative_adaptive=True, speculative_eagle_topk=4)),
        facts(there=running((None,), speculative_adaptive=True)),
    ),
    "threshold-unreachable": (
        "warning",
        facts(there=running(cap=24)),
        facts(there=running(cap=25)),
    ),
    "no-graphs": (
        "warning",
        facts(there=running(disable_cuda_graph=True)),
        facts(there=running(disable_cuda_graph=True, device="cpu")),
    ),
    "variable-unread": (
        "warning",
        facts(environment={"SGLANG_ENABLE_SPEC_V2": "1"}),
        facts(
            replace(CLEAN, packages=versions(sglang="0.5.12.post1")),
            environment={"SGLANG_ENABLE_SPEC_V2": "1"},
        ),
    ),
}


@pytest.mark.parametrize("problem", BROKEN)
def test_a_problem_is_found_and_its_clean_twin_is_not(problem: str) -> None:
    severity, broken, clean = BROKEN[problem]
    assert ids(broken)[problem] == severity
    assert problem not in ids(clean)


def test_a_patched_sglang_needs_no_plugin_loader() -> None:
    partly = replace(CLEAN, seams=CLEAN.seams | {"ModelRunner.load_model": True})
    whole = replace(CLEAN, seams=dict.fromkeys(CLEAN.seams, True))
    hidden = {"SGLANG_PLUGINS": "other"}
    assert ids(facts(whole, environment=hidden)) == {}
    assert "plugin-left-out" in ids(facts(partly, environment=hidden))


def test_where_sglang_has_no_plugin_system_the_pth_counts() -> None:
    assert ids(facts(OLD)) == {}
    assert "plugin-left-out" not in ids(facts(OLD, environment={"SGLANG_PLUGINS": "other"}))
    missing = replace(OLD, loads_us=False)
    without = {"kimi-hook": "note"}
    assert ids(facts(missing)) == without | {"plugin-invisible": "warning"}
    off = {"SGLANG_SPEC_EXT_BOOTSTRAP": "0"}
    assert ids(facts(missing, environment=off)) == without | {"plugin-left-out": "error"}
    patched = replace(missing, seams=dict.fromkeys(CLEAN.seams, True))
    assert ids(facts(patched, environment=off)) == {}
    assert "plugin            loaded by its .pth, contract holds" in page(facts(OLD))
    assert "plugin            its .pth is not in effect" in page(facts(missing))


def test_every_row_has_a_case() -> None:
    assert {problem.id for problem in problems.PROBLEMS} <= set(BROKEN)
    assert len({problem.id for problem in problems.PROBLEMS}) == len(problems.PROBLEMS)


@pytest.mark.parametrize("there", [None, running()])
def test_nothing_is_wrong_with_what_is_right(there: Server | None) -> None:
    assert ids(facts(there=there)) == {}


def test_errors_come_first_and_a_link_stands_with_the_fix() -> None:
    broken = replace(CLEAN, gaps=("x",), packages=versions(torch="2.14.1+cpu"))
    found = problems.find(facts(broken, PLAIN))
    assert [f.severity for f in found] == sorted(f.severity for f in found)
    (cap,) = [f for f in found if f.id == "hidden-cap"]
    assert cap.message.startswith("at most 48 requests run at once:")
    assert cap.fix.endswith("; see https://github.com/sgl-project/sglang/pull/34290")


def test_a_server_of_an_unknown_release_is_still_shown() -> None:
    assert ids(facts(there=running(version="0.4.1"))) == {"other-version": "warning"}


# ---------------------------------------------------------------------------- the page


def page(these: Facts, width: int | None = None) -> str:
    terminal = width is not None
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    report.print_page(console, these, problems.find(these))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_the_page_of_a_running_server() -> None:
    lines = page(facts(there=running())).splitlines()
    for line in (
        "sglang            0.5.23, wheel",
        "sglang files      as in the wheel",
        "plugin            visible to SGLang, contract holds",
        "server            http://127.0.0.1:30000, SGLang 0.5.23",
        "running cap       256 requests per scheduler",
        f"scheduler         plugin {__version__}, hooks bound, confirmed at start by all 2 ranks",
        "mode              speculating for 7 decode steps",
        "threshold         N=24, M=16, K=4; N can be raised to 32",
        "switches          2 to target-only, 2 back (2 resumes)",
        "tokens            9000 speculating, 3000 target-only",
        "accept length     3.10 over all verifies",
        "draft             kept warm by KV-only writes",
        "0 errors, 0 warnings",
    ):
        assert line in lines, line


@pytest.mark.parametrize(("version", "shown"), [("0.5.23", False), ("0.4.1", True)])
def test_arguments_are_those_that_are_not_the_default_of_the_release(
    version: str, shown: bool
) -> None:
    flags = running(version=version, speculative_ngram_capacity=10000000).flags
    assert flags["attention_backend"] == "fa3"
    assert flags["speculative_num_steps"] == 3
    assert ("speculative_ngram_capacity" in flags, "dp_size" in flags) == (shown, shown)
    assert "speculative_adaptive" not in flags


def test_a_server_without_the_plugin_says_so() -> None:
    assert "plugin            not bound in this server" in page(facts(there=PLAIN))


def test_a_state_of_another_version_is_shown_as_it_came() -> None:
    text = page(facts(there=running(({"version": "9.9", "new": 1, "unbound": []},))))
    assert 'state             {"version": "9.9", "new": 1, "unbound": []}' in text


def test_changed_files_are_told_by_their_patch() -> None:
    patched = Modified("sglang/srt/models/kimi_k25.py", "0.5.9/kimi_k25")
    changed = replace(CLEAN, modified=(patched, Modified("sglang/a.py", "")))
    assert "sglang files      changed: 1 by 0.5.9/kimi_k25, 1 by unknown" in page(facts(changed))
    seams = CLEAN.seams | {"ModelRunner.load_model": True}
    assert "visible to SGLang, called by patches in 1 of 2 places, contract holds" in page(
        facts(replace(CLEAN, seams=seams))
    )
    assert "cannot be compared" in page(facts(replace(CLEAN, modified=None)))


SECRETS = {
    "SGLANG_API_KEY": "plainsecret1",
    "SGLANG_HF_TOKEN": "plainsecret2",
    "SGLANG_SOME_URL": "http://user:plainsecret3@host/x",
    "SGLANG_ADMIN_KEY": "24682468",
    "SGLANG_PREFILL_TOKENS": "4096",
    "UNRELATED": "plainsecret4",
}


def test_nothing_secret_is_printed() -> None:
    url = "git+https://user:plainsecret5@host/sglang.git"
    here = replace(CLEAN, packages=(Package("sglang", "0.5.23", f"built from {url}"),))
    these = facts(here, running(), SECRETS)
    for text in (page(these), json.dumps(report.as_json(these, problems.find(these)))):
        assert "plainsecret" not in text
        assert "sk-very-secret-key" not in text
        assert "another" not in text
        assert "24682468" not in text
        assert "user:***@host" in text
        assert "4096" in text


@pytest.mark.parametrize("width", [30, 40, 80])
def test_a_narrow_terminal_gets_wrapped_lines(width: int) -> None:
    text = page(facts(replace(CLEAN, gaps=("some.thing: not found",)), running()), width)
    assert max(map(len, text.splitlines())) <= width
    assert "".join(text.split()).endswith("0errors,1warnings")


# ---------------------------------------------------------------------------- this environment


def test_what_is_here_is_found_without_importing_it(tmp_path: Path) -> None:
    here = installed.look(None)
    assert here.version("sglang-spec-ext") is not None
    assert str(Path(installed.sys.executable)) in here.python


class FakeDistribution:
    """One installed package in ``site``."""

    def __init__(self, site: Path, url: dict[str, Any] | None = None) -> None:
        self.site, self.url = site, url
        self.version = "1.0"

    def read_text(self, name: str) -> str | None:
        return json.dumps(self.url) if name == "direct_url.json" and self.url else None

    def locate_file(self, path: Any) -> Path:
        return self.site / path

    @property
    def files(self) -> list[Any]:
        import importlib.metadata

        found = []
        for path in ("sglang/a.py", "sglang/b.py", "sglang/c.py", "sglang/data.json"):
            file = importlib.metadata.PackagePath(path)
            digest = hashlib.sha256(f"# {path}\n".encode()).digest()
            value = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
            file.hash = importlib.metadata.FileHash(f"sha256={value}")
            file.dist = self  # type: ignore[assignment]
            found.append(file)
        return found


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A site-packages with three files of SGLang as its wheel had them."""
    (tmp_path / "sglang").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "sglang" / f"{name}.py").write_text(f"# sglang/{name}.py\n")
    monkeypatch.setattr(installed.metadata, "distribution", lambda name: FakeDistribution(tmp_path))
    return tmp_path


def test_files_as_in_the_wheel(site: Path) -> None:
    assert installed._files({}) == {"modified": (), "gone": ()}


def test_a_changed_file_is_a_patch_of_ours_or_somebody_elses(site: Path, tmp_path: Path) -> None:
    patched = b"# patched\n"
    (site / "sglang" / "a.py").write_bytes(patched)
    (site / "sglang" / "b.py").write_text("# by hand\n")
    (site / "sglang" / "c.py").unlink()
    folder = tmp_path / "patches" / "0.5.9"
    folder.mkdir(parents=True)
    digest = hashlib.sha256(patched).hexdigest()
    (folder / "fix.diff").write_text(f"Release: 0.5.9\nAfter: sha256:{digest} sglang/a.py\n")
    assert installed._files(installed.known_patches(tmp_path / "patches")) == {
        "modified": (Modified("sglang/a.py", "0.5.9/fix"), Modified("sglang/b.py", "")),
        "gone": ("sglang/c.py",),
    }


def test_the_patches_of_this_checkout_are_known() -> None:
    known = installed.known_patches(installed.default_patches())
    assert known["sglang/srt/models/kimi_k25.py", KIMI_AFTER] == "0.5.9/kimi_k25"
    assert installed.known_patches(None) == {}


KIMI_AFTER = "2b5b998f5a066fa7ef61b4aa3fadbe738a82f123a7241c3d769aa6aded18cfbf"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (None, "wheel"),
        ({"url": "file:///src", "dir_info": {}}, "built from /src"),
        (
            {"url": "https://x/y.git", "vcs_info": {"vcs": "git", "commit_id": "0123456789ab"}},
            "built from https://x/y.git at 012345678",
        ),
    ],
)
def test_where_a_package_comes_from(
    site: Path, monkeypatch: pytest.MonkeyPatch, url: dict[str, Any] | None, expected: str
) -> None:
    monkeypatch.setattr(installed, "_place", lambda module: site / "sglang")
    assert installed._origin(FakeDistribution(site, url), "sglang") in (  # type: ignore[arg-type]
        expected,
        f"{expected}, but imported from {site / 'sglang'}",
    )


def test_an_editable_package_is_named_with_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git = tmp_path / "src" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs" / "heads" / "main").write_text("0123456789abcdef\n")
    url = {"url": f"file://{tmp_path / 'src'}", "dir_info": {"editable": True}}
    monkeypatch.setattr(installed, "_place", lambda module: tmp_path / "src" / "sglang")
    origin = installed._origin(FakeDistribution(tmp_path, url), "sglang")  # type: ignore[arg-type]
    assert origin == f"editable, {tmp_path / 'src'} at 012345678"


def test_a_copy_that_hides_the_installed_one_is_named(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed, "_place", lambda module: Path("/elsewhere/sglang"))
    origin = installed._origin(FakeDistribution(site), "sglang")  # type: ignore[arg-type]
    assert origin == "wheel, but imported from /elsewhere/sglang"


# ---------------------------------------------------------------------------- a running server


@pytest.fixture
def clean_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "look", lambda patches: CLEAN)
    monkeypatch.setattr(command.os, "environ", {})


def run(*options: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *options])


def info(**fields: Any) -> Answer:
    there = running(**fields)
    return lambda handler: (200, {**there.info, "internal_states": list(there.states)})


@pytest.mark.usefixtures("clean_box")
def test_exit_codes(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run().exit_code == 0
    assert run("--url", serve(info())).exit_code == 0
    assert run("--url", serve(info(cap=24))).exit_code == 1
    monkeypatch.setattr(installed, "look", lambda patches: replace(CLEAN, gone=("a.py",)))
    assert run().exit_code == 2
    assert run("--no-such-option").exit_code == 3
    assert run("--patches", "/no/such/folder").exit_code == 3
    assert run("--url", "http://[::1").exit_code == 3


@pytest.mark.usefixtures("clean_box")
def test_json_has_the_same(serve: Serve) -> None:
    url = serve(info(cap=24))
    result = run("--url", url, "--json")
    found = json.loads(result.stdout)
    assert found["exit_code"] == result.exit_code == 1
    assert [finding["id"] for finding in found["findings"]] == ["threshold-unreachable"]
    assert found["server"]["plugin"][0]["tokens"] == STATE["tokens"]
    assert (found["server"]["url"], found["server"]["running_cap"]) == (url, 24)
    assert found["environment"]["packages"][0]["name"] == "sglang"


@pytest.mark.usefixtures("clean_box")
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda handler: (401, {}), "wants a key: give it with --api-key"),
        (lambda handler: (200, b"<html>"), "answers HTTP 200: no SGLang server?"),
        (lambda handler: (200, [1, 2]), "no SGLang server?"),
        (lambda handler: (500, {"error": "x"}), "answers HTTP 500"),
    ],
)
def test_a_server_that_cannot_be_asked_is_an_error_with_the_rest_of_the_page(
    serve: Serve, answer: Answer, words: str
) -> None:
    result = run("--url", serve(answer))
    assert result.exit_code == 2
    assert words in result.stdout
    assert "sglang            0.5.23, wheel" in result.stdout


@pytest.mark.usefixtures("clean_box")
def test_a_server_that_is_not_there(serve: Serve) -> None:
    result = run("--url", "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert "nothing answers at http://127.0.0.1:9: is the server up?" in result.stdout


@pytest.mark.usefixtures("clean_box")
def test_the_key_is_sent_and_not_shown(serve: Serve) -> None:
    seen: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> tuple[int, Any]:
        seen.append(handler.headers["Authorization"])
        return info()(handler)

    result = run("--url", serve(answer), "--api-key", "abcdef")
    assert seen == ["Bearer abcdef"]
    assert "abcdef" not in result.stdout


def test_odd_states_are_left_out(serve: Serve) -> None:
    found = server.ask(
        serve(lambda handler: (200, {"version": "0.5.9", "internal_states": [None, {}]})), ""
    )
    assert (found.states, found.ours, found.cap, found.accept_length) == (({},), [], None, None)
