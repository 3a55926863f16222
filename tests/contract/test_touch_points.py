"""Every place in SGLang that we depend on, against the sources of each release that we claim."""

from __future__ import annotations

import ast
import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_spec_ext.compat import contracts, releases, workers
from sglang_spec_ext.compat.contracts import TOUCH_POINTS, TouchPoint

# Every release from OLDEST_RELEASE to NEWEST_RELEASE; on a new one, move NEWEST_RELEASE and add it.
RELEASES = (
    "0.5.11",
    "0.5.12.post1",
    "0.5.13.post1",
    "0.5.14",
    "0.5.15",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
TOO_OLD = ("0.5.10.post1", "0.5.9")


@pytest.fixture
def copied(tmp_path: Path, sources: Callable[[str], Path]) -> Path:
    """The newest release's modules, to be changed."""
    shutil.copytree(sources(contracts.NEWEST_RELEASE), tmp_path / "site")
    return tmp_path / "site"


def file_of(point: TouchPoint, site: Path) -> Path:
    path = site.joinpath(*point.module.split("."))
    return path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"


def edit(point: TouchPoint, site: Path, change: Callable[[ast.AST], None]) -> None:
    """Change the definition of one touch point in a copy."""
    file = file_of(point, site)
    tree = ast.parse(file.read_bytes())
    scope: Any = tree
    *owners, last = point.qualname.split(".")
    for name in owners:
        scope = next(node for node in scope.body if defines(node, name))
    if point.kind == "field":
        methods = [node for node in scope.body if isinstance(node, ast.FunctionDef)]
        for node in (node for method in methods for node in ast.walk(method)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == f"self.{last}":
                change(node)
    else:
        change(next(node for node in scope.body if defines(node, last)))
    file.write_text(ast.unparse(tree))


def defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.AnnAssign):
        return isinstance(node.target, ast.Name) and node.target.id == name
    if isinstance(node, ast.Assign):
        return any(isinstance(t, ast.Name) and t.id == name for t in node.targets)
    return getattr(node, "name", None) == name


def rename(node: Any) -> None:
    if isinstance(node, ast.AnnAssign):
        node.target = ast.Name("moved_away")
    elif isinstance(node, ast.Assign):
        node.targets = [ast.Name("moved_away")]
    elif isinstance(node, ast.Attribute):
        node.attr = "moved_away"
    else:
        node.name = "moved_away"


# ---------------------------------------------------------------------------- the real releases


@pytest.mark.skipif(contracts.site_dir() is None, reason="SGLang is not installed")
def test_everything_holds_in_the_installed_release() -> None:
    assert contracts.check() == []


def test_the_releases_are_those_that_we_claim() -> None:
    assert (RELEASES[0], RELEASES[-1]) == (contracts.OLDEST_RELEASE, contracts.NEWEST_RELEASE)
    assert set(contracts.TESTED_RELEASES) <= set(releases.RELEASES)


@pytest.mark.parametrize("release", RELEASES)
def test_everything_holds_in_every_release_that_we_claim(
    release: str, sources: Callable[[str], Path]
) -> None:
    assert contracts.check(sources(release)) == []


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_has_one_place_of_each_name(
    release: str, sources: Callable[[str], Path]
) -> None:
    """Else a place that a newer release moves away would fall back on one of another use."""
    for name in {point.name for point in TOUCH_POINTS}:
        held = [p.target for p in places(name) if contracts.gap(p, sources(release)) is None]
        assert len(held) == 1, (name, held)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("forward_batch_generation", "0.5.13.post1"),
        ("admission_cap", "0.5.13.post1"),
        ("resolve_spec_tokens", "0.5.13.post1"),
        ("update_spec_metrics", "0.5.13.post1"),
        ("report_decode_stats", "0.5.13.post1"),
        ("target_forward", "0.5.13.post1"),
        ("new_lengths", "0.5.13.post1"),
        ("graph_sizes", "0.5.14"),
        ("decode_graph_runner", "0.5.14"),
        ("relay", "0.5.14"),
        ("kv_write_location", "0.5.14"),
        ("recurrent_hidden_spec", "0.5.15"),
        ("graph_output", "0.5.15"),
        ("generated_sizes", "0.5.19"),
        ("bonus_tokens", "0.5.12.post1"),
        ("stride", "0.5.12.post1"),
        ("hidden_mode_of_forward", "0.5.16"),
        ("hidden_states_mode", "0.5.17"),
    ],
)
def test_where_a_place_is_the_one_of_today(
    name: str, first: str, sources: Callable[[str], Path]
) -> None:
    today = places(name)[0]
    held = {r for r in RELEASES if contracts.holding(name, sources(r)) == today}
    assert held == set(RELEASES[RELEASES.index(first) :])


@pytest.mark.parametrize("release", RELEASES)
def test_the_releases_with_a_spec_v1_worker_too(
    release: str, sources: Callable[[str], Path]
) -> None:
    kinds = [known.worker for known in workers.told(sources(release))]
    both = release in ("0.5.11", "0.5.12.post1")
    assert kinds == (["spec-v2", "spec-v1"] if both else ["spec-v2"])


@pytest.mark.parametrize("release", TOO_OLD)
def test_too_old_a_release_is_told_what_it_lacks(
    release: str, sources: Callable[[str], Path]
) -> None:
    problems = contracts.check(sources(release))
    text = "\n".join(problems)
    assert (
        "SchedulerMetricsReporter.update_spec_metrics: there is no module "
        "sglang.srt.managers.scheduler_components.metrics_reporter"
    ) in text
    for problem in problems:
        assert any(problem.startswith(f"{point.target}: ") for point in TOUCH_POINTS)


# ---------------------------------------------------------------------------- moved touch points


def places(name: str) -> list[TouchPoint]:
    return [point for point in TOUCH_POINTS if point.name == name]


def relying_on(held: TouchPoint, site: Path) -> set[str]:
    """Names of the touch points that are this definition or inside it."""
    inside = [p for p in TOUCH_POINTS if f"{p.target}.".startswith(f"{held.target}.")]
    return {p.name for p in inside if contracts.gap(p, site) is None}


@pytest.mark.parametrize("name", sorted({point.name for point in TOUCH_POINTS}))
def test_a_renamed_touch_point_is_named(name: str, copied: Path) -> None:
    (held,) = [p for p in places(name) if contracts.gap(p, copied) is None]
    with_it = relying_on(held, copied)
    edit(held, copied, rename)
    problems = contracts.check(copied)
    assert len(problems) == len(with_it)
    assert any(f"{held.target}: not found in {held.module}" in problem for problem in problems)


@pytest.mark.parametrize(
    "point", [p for p in TOUCH_POINTS if p.parameters], ids=lambda p: str(p.name)
)
def test_a_removed_parameter_is_named(point: TouchPoint, copied: Path) -> None:
    if contracts.gap(point, copied) is not None:
        pytest.skip("not the place of this release")
    assert point.parameters is not None
    gone = point.parameters[-1]

    def remove(node: Any) -> None:
        kept = [a for a in node.args.args if a.arg != gone]
        if len(kept) == len(node.args.args):
            at = next(i for i, a in enumerate(node.args.kwonlyargs) if a.arg == gone)
            del node.args.kwonlyargs[at], node.args.kw_defaults[at]
        node.args.args = kept
        node.args.defaults = node.args.defaults[-len(kept) :] if kept else []

    with_it = relying_on(point, copied)
    edit(point, copied, remove)
    problems = contracts.check(copied)
    assert len(problems) == len(with_it)
    expected = f"{point.target}: expected parameters ({', '.join(point.parameters)}), found"
    assert any(expected in problem for problem in problems)


@pytest.mark.parametrize("point", [p for p in TOUCH_POINTS if p.keywords], ids=lambda p: p.target)
def test_a_removed_keyword_is_named(point: TouchPoint, copied: Path) -> None:
    if contracts.gap(point, copied) is not None:
        pytest.skip("not the place of this release")
    (gone,) = point.keywords

    def rename_keyword(node: Any) -> None:
        for argument in node.args.args + node.args.kwonlyargs:
            if argument.arg == gone:
                argument.arg = "moved_away"

    edit(point, copied, rename_keyword)
    (problem,) = contracts.check(copied)
    assert f"{point.target}: no parameter {gone}, found (" in problem


def test_a_changed_kind_is_named(copied: Path) -> None:
    (point,) = places("add_cli_args")

    def to_classmethod(node: Any) -> None:
        node.decorator_list = [ast.Name("classmethod")]
        node.args.args.insert(0, ast.arg("cls"))

    edit(point, copied, to_classmethod)
    (problem,) = contracts.check(copied)
    assert problem == f"{point.target}: expected a staticmethod, found a classmethod"


def test_a_removed_module_is_named(copied: Path) -> None:
    (point,) = places("graph_capture")
    file_of(point, copied).unlink()
    (problem,) = contracts.check(copied)
    assert problem == f"{point.target}: there is no module {point.module}"


def test_several_gaps_are_several_sentences(copied: Path) -> None:
    for name in ("init_info", "graph_capture"):
        edit(places(name)[0], copied, rename)
    assert len(contracts.check(copied)) == 2


# ---------------------------------------------------------------------------- the rules


def made(tmp_path: Path, **modules: str) -> Path:
    (tmp_path / "pkg").mkdir()
    for name, text in modules.items():
        (tmp_path / "pkg" / f"{name}.py").write_text(text)
    return tmp_path


def point(
    module: str, qualname: str, parameters: tuple[str, ...] | None, **fields: Any
) -> TouchPoint:
    kind = fields.pop("kind", "function")
    return TouchPoint(
        fields.pop("name", "it"), module, qualname, kind, parameters, "launcher", "test", **fields
    )


OLD_PLACE, NEW_PLACE = point("pkg.old", "f", ("a",)), point("pkg.new", "f", ("a",))


def test_one_of_several_places_is_enough(tmp_path: Path) -> None:
    site = made(tmp_path, old="def f(a): ...\n")
    assert contracts.check(site, (NEW_PLACE, OLD_PLACE)) == []


def test_no_place_at_all_is_one_sentence_with_all_of_them(tmp_path: Path) -> None:
    site = made(tmp_path, old="def f(b): ...\n")
    assert contracts.check(site, (NEW_PLACE, OLD_PLACE)) == [
        "pkg.new.f: there is no module pkg.new; or pkg.old.f: expected parameters (a), found (b)"
    ]


@pytest.mark.parametrize("at", range(len(places("graph_sizes"))))
def test_holding_is_the_place_that_the_sources_have(tmp_path: Path, at: int) -> None:
    place = places("graph_sizes")[at]
    assert place.parameters is not None
    file = tmp_path.joinpath(*place.module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    name, signature = place.qualname, ", ".join(place.parameters)
    file.write_text(f"def {name}({signature}): ...\n")
    assert contracts.holding("graph_sizes", tmp_path) == place


def test_a_check_sets_off_no_garbage_collection(tmp_path: Path) -> None:
    """Beside all that a server has loaded by then a full one takes half a second."""
    site = made(tmp_path, old="def g(): ...\n" * 20_000 + "def f(a): ...\n", bad="def f(:\n")
    collected: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(info["generation"])

    gc.callbacks.append(note)
    try:
        assert contracts.check(site, (OLD_PLACE,)) == []
    finally:
        gc.callbacks.remove(note)
    assert 1 not in collected and 2 not in collected
    with pytest.raises(SyntaxError):
        contracts.check(site, (point("pkg.bad", "f", None),))
    assert gc.isenabled()
    gc.disable()
    try:
        contracts.check(site, (point("pkg.old", "g", ()),))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_holding_of_what_nobody_has_is_none(tmp_path: Path) -> None:
    assert contracts.holding("draft_input", made(tmp_path)) is None


@pytest.mark.parametrize(
    ("signature", "hooked", "called"),
    [
        ("a, b", True, True),
        ("a, b, c=1", True, True),
        ("a, b, *, c=1", True, True),
        ("a, b, **rest", True, True),
        ("a, b, c", True, False),  # a hook passes it on; a caller would have to give it
        ("a, b, *, c", True, False),
        ("b, a", False, False),
        ("a", False, False),
        ("c, a, b", False, False),
        ("a, *, b", True, True),
    ],
)
def test_what_a_signature_may_be(
    tmp_path: Path, signature: str, hooked: bool, called: bool
) -> None:
    site = made(tmp_path, m=f"def f({signature}): ...\n")
    for is_hook, fine in ((True, hooked), (False, called)):
        problem = contracts.gap(point("pkg.m", "f", ("a", "b"), hooked=is_hook), site)
        assert (problem is None) is fine, problem


def test_any_signature_will_do_where_none_is_named(tmp_path: Path) -> None:
    site = made(tmp_path, m="def f(x, y): ...\n")
    assert contracts.gap(point("pkg.m", "f", None, hooked=False), site) is None


@pytest.mark.parametrize(
    ("kind", "qualname", "parameters"),
    [
        ("class", "C", None),
        ("method", "C.method", ("a",)),
        ("method", "C.coroutine", ("a",)),
        ("classmethod", "C.made", ("a",)),
        ("staticmethod", "C.static", ("a",)),
        ("attribute", "C.annotated", None),
        ("attribute", "C.plain", None),
        ("function", "guarded", ("a",)),
        ("function", "fallback", ("a",)),
    ],
)
def test_kinds(
    tmp_path: Path, kind: str, qualname: str, parameters: tuple[str, ...] | None
) -> None:
    site = made(
        tmp_path,
        m="""
class C:
    annotated: int = 1
    plain = 2
    def method(self, a): ...
    async def coroutine(self, a): ...
    @classmethod
    def made(cls, a): ...
    @staticmethod
    def static(a): ...
if True:
    def guarded(a): ...
try:
    import nothing
except ImportError:
    pass
else:
    def fallback(a): ...
""",
    )
    assert contracts.gap(point("pkg.m", qualname, parameters, kind=kind), site) is None
    for other in {"class", "method", "classmethod", "staticmethod", "attribute"} - {kind}:
        problem = contracts.gap(point("pkg.m", qualname, parameters, kind=other), site)
        assert problem == f"pkg.m.{qualname}: expected a {other}, found a {kind}"


def test_a_package_is_a_module_too(tmp_path: Path) -> None:
    site = made(tmp_path, __init__="def f(a): ...\n")
    assert contracts.gap(point("pkg", "f", ("a",)), site) is None


def test_no_sglang_at_all_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contracts, "site_dir", lambda: None)
    assert contracts.check() == ["sglang is not installed in this environment"]
    assert contracts.holding("draft_input") is None


@pytest.mark.parametrize("this", TOUCH_POINTS, ids=lambda p: f"{p.name} in {p.module}")
def test_every_touch_point_says_what_for(this: TouchPoint) -> None:
    assert this.why.strip()


def test_names_are_of_one_use() -> None:
    for name in {p.name for p in TOUCH_POINTS}:
        assert len({(p.process, p.hooked) for p in places(name)}) == 1, name
    # places that `sglang_api` cannot tell apart are interchangeable for it
    for name, qualname in {(p.name, p.qualname) for p in TOUCH_POINTS}:
        alike = [p for p in places(name) if p.qualname == qualname]
        assert len({(p.kind, p.keywords) for p in alike}) == 1, (name, qualname)


def test_in_use_is_one_place_per_name(tmp_path: Path) -> None:
    nowhere = point("pkg.nowhere", "f", ("a",), name="none")
    site = made(tmp_path, old="def f(a): ...\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contracts, "TOUCH_POINTS", (NEW_PLACE, OLD_PLACE, nowhere))
        # who binds what has no place finds it missing
        assert contracts.in_use(contracts.TOUCH_POINTS, site) == (OLD_PLACE, nowhere)


def test_the_check_imports_nothing_of_sglang(sources: Callable[[str], Path]) -> None:
    site = sources(contracts.NEWEST_RELEASE)
    code = (
        "import json, sys; from pathlib import Path; from sglang_spec_ext.compat import contracts;"
        f"problems = contracts.check(Path({str(site)!r})); contracts.check();"
        "print(json.dumps([problems,"
        " [m for m in sys.modules if m.split('.')[0] in ('sglang', 'torch')]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [[], []]
