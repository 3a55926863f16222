"""The contracts of releases with SGLang's spec-v1 worker, against their real wheels."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_touch_points import edit, rename

from sglang_spec_ext.compat import contracts, contracts_v1, workers
from sglang_spec_ext.compat.contracts import TouchPoint
from sglang_spec_ext.compat.workers import EARLY_V1, FIRST_V1, V1, V2, Contract

OF_RELEASE = {
    "0.5.9": FIRST_V1,
    "0.5.10.post1": EARLY_V1,
    "0.5.11": EARLY_V1,
    "0.5.12.post1": V1,
}
V1_RELEASES = list(OF_RELEASE)


@pytest.fixture(params=["0.5.9", "0.5.11", "0.5.12.post1"])
def copied(request: pytest.FixtureRequest, tmp_path: Path, sources: Callable[[str], Path]) -> Path:
    """The modules of one release of each contract of this worker, to be changed."""
    shutil.copytree(sources(request.param), tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.parametrize("release", V1_RELEASES)
def test_a_release_is_told_by_what_it_has(release: str, sources: Callable[[str], Path]) -> None:
    assert workers.told(sources(release)) == (V2, OF_RELEASE[release])
    assert release in OF_RELEASE[release].releases


@pytest.mark.parametrize("release", V1_RELEASES)
def test_the_worker_that_would_do_until_it_is_known(
    release: str, sources: Callable[[str], Path]
) -> None:
    both = release in V2.releases
    assert workers.contract(sources(release)) is (V2 if both else OF_RELEASE[release])


@pytest.mark.parametrize(("kind", "expected"), [("spec-v1", V1), ("spec-v2", V2)])
def test_a_scheduler_process_is_told_its_worker(
    kind: str,
    expected: Contract,
    sources: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(workers.WORKER_KIND_ENV, kind)
    assert workers.contract(sources("0.5.12.post1")) is expected


@pytest.mark.parametrize(
    ("release", "overlap", "expected", "fits"),
    [
        ("0.5.9", False, FIRST_V1, True),
        ("0.5.9", True, V2, False),
        ("0.5.11", False, EARLY_V1, True),
        ("0.5.10.post1", True, V2, False),
        ("0.5.11", True, V2, True),
        ("0.5.12.post1", False, V1, True),
        ("0.5.12.post1", True, V2, True),
        ("0.5.23", False, V2, True),
        ("0.5.23", True, V2, True),
    ],
)
def test_the_worker_of_a_server_by_its_arguments(
    release: str,
    overlap: bool,
    expected: Contract,
    fits: bool,
    sources: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = sources(release)
    monkeypatch.setattr(contracts, "site_dir", lambda: site)
    arguments = SimpleNamespace(disable_overlap_schedule=not overlap)
    assert workers.of(arguments) is expected
    assert workers.unfit(arguments) is (None if fits else expected)
    assert workers.unfit_in(release, arguments) is workers.unfit(arguments)
    kinds = {} if release == "0.5.23" else {workers.WORKER_KIND_ENV: expected.worker}
    assert workers.to_env(arguments) == kinds


@pytest.mark.parametrize("release", V1_RELEASES)
def test_everything_holds(release: str, sources: Callable[[str], Path]) -> None:
    assert contracts.check(sources(release), OF_RELEASE[release].points) == []


def test_every_release_of_this_worker_is_checked() -> None:
    assert [*FIRST_V1.releases, *EARLY_V1.releases, *V1.releases] == V1_RELEASES


@pytest.mark.parametrize("release", V1_RELEASES)
def test_the_hook_for_the_drafts_layers_is_needed_up_to_0_5_10(
    release: str, sources: Callable[[str], Path]
) -> None:
    """When the last release that asks for default layers goes, `eagle3_hooks.layers` goes too."""
    graphs = sources(release) / "sglang" / "srt" / "model_executor" / "cuda_graph_runner.py"
    asks = "model.set_eagle3_layers_to_capture()" in graphs.read_text()
    assert asks is (release in ("0.5.9", "0.5.10.post1"))


@pytest.mark.parametrize("release", V1_RELEASES)
def test_the_hooks_for_the_drafts_embeddings_are_needed_in_every_release(
    release: str, sources: Callable[[str], Path]
) -> None:
    """When a worker moves them one token on itself, `eagle3_hooks.embeddings` must not."""
    srt = sources(release) / "sglang" / "srt"
    worker = (srt / "speculative" / "eagle_worker.py").read_text()
    handed = "forward_batch.mm_input_embeds = mm_input_embeds"
    assert worker.count("mm_input_embeds = ") == worker.count(handed) == 1  # as they came
    draft = (srt / "models" / "llama_eagle3.py").read_text()
    assert ("forward_batch.mm_input_embeds" in draft) is (release != "0.5.9")
    assert ("[embeds[:-1], self.embed_tokens(" in draft) is (release != "0.5.9")
    target = (srt / "managers" / "mm_utils.py").read_text()
    assert "forward_batch.mm_input_embeds = input_embeds\n" in target  # and no copy


@pytest.mark.parametrize("release", V1_RELEASES)
def test_the_hook_for_the_drafts_positions_is_bound_where_it_is_needed_only(
    release: str, sources: Callable[[str], Path]
) -> None:
    """It moves them back by one, which a worker that advances them after a step must not get."""
    worker = sources(release) / "sglang" / "srt" / "speculative" / "eagle_worker.py"
    loop = worker.read_text().partition("def draft_forward(")[2].partition("    def ")[0]
    assert loop.count("positions.add_(1)") == 1
    before = loop.index("positions.add_(1)") < loop.index("self.draft_model_runner.forward(")
    assert before is (release != "0.5.12.post1")
    bound = "draft_positions" in {point.name for point in OF_RELEASE[release].scheduler}
    assert bound is before


@pytest.mark.parametrize("release", V1_RELEASES)
def test_every_name_has_one_place(release: str, sources: Callable[[str], Path]) -> None:
    points = OF_RELEASE[release].points
    for name in {point.name for point in points}:
        held = [p for p in points if p.name == name and not contracts.gap(p, sources(release))]
        assert len(held) == 1, (name, held)


POINTS = dict.fromkeys((*FIRST_V1.points, *EARLY_V1.points, *V1.points))


@pytest.mark.parametrize("point", POINTS, ids=lambda p: f"{p.name} in {p.module}")
def test_a_renamed_touch_point_is_named(point: TouchPoint, copied: Path) -> None:
    (_, contract) = workers.told(copied)
    if point not in contract.points or contracts.gap(point, copied) is not None:
        pytest.skip("not the place of this release")
    edit(point, copied, rename)
    problems = contracts.check(copied, contract.points)
    gone = f"{point.target}: not found in {point.module}"
    # a class takes what is in it along
    assert any(gone in problem for problem in problems)
    assert all(point.target in problem for problem in problems)


def test_without_that_worker_there_is_the_newer_one_only(copied: Path) -> None:
    edit(contracts_v1.WORKER, copied, rename)
    assert workers.told(copied) == (V2,)
    assert workers.contract(copied) is V2


def test_no_sglang_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "site_dir", lambda: None)
    assert workers.check() == ["sglang is not installed in this environment"]
    assert workers.holding("draft_input") is None


def test_a_message_names_the_releases_by_worker() -> None:
    assert workers.supported() == (
        "0.5.9-0.5.12.post1 (spec-v1) and "
        f"{contracts.OLDEST_RELEASE}-{contracts.NEWEST_RELEASE} (spec-v2)"
    )
