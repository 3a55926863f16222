"""The check that captured states arrive, and what happens around the load of a target."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from draft_checkpoints import eagle3

from sglang_spec_ext.compat import eagle3_models
from sglang_spec_ext.eagle3_hooks import capture, loading
from sglang_spec_ext.eagle3_hooks.capture import CaptureError, Expected
from sglang_spec_ext.eagle3_hooks.delegation import MissingHooksError

THREE = Expected(3, 8, [1, 4, 7], "Target")


class Tensor:
    def __init__(self, *shape: int) -> None:
        self.shape = shape


def states(*widths: int) -> list[Tensor]:
    return [Tensor(5, width) for width in widths]


@pytest.mark.parametrize(
    ("arrived", "expected"),
    [
        (states(8, 8, 8), THREE),
        (Tensor(5, 24), THREE),  # packed
        (states(6, 6), Expected(2, None, None, "Target")),  # as wide as the last hidden state
    ],
)
def test_what_was_asked_for_passes(arrived: Any, expected: Expected) -> None:
    assert capture.gap(arrived, 6, expected) is None


@pytest.mark.parametrize(
    ("arrived", "said"),
    [
        (None, "is none."),
        ([], "is none."),
        (states(8, 8), "is 2 of width 8, 8."),
        (states(8, 8, 6), "is 3 of width 8, 8, 6."),
        (states(8, 8, 8, 8), "is 4 of width 8, 8, 8, 8."),
        (Tensor(5, 16), "is one packed state of width 16."),
    ],
)
def test_what_is_missing_is_said(arrived: Any, said: str) -> None:
    text = capture.gap(arrived, 8, THREE)
    assert text is not None
    assert said in text
    for part in ("3 hidden states of width 8", "layers [1, 4, 7]", "Target", "check-draft"):
        assert part in text


class Processor:
    """A module with pre-hooks, as torch calls them."""

    def __init__(self) -> None:
        self.hooks: dict[int, Any] = {}

    def register_forward_pre_hook(self, hook: Any, *, with_kwargs: bool) -> Any:
        assert with_kwargs
        key = len(self.hooks)
        self.hooks[key] = hook
        return SimpleNamespace(remove=lambda: self.hooks.pop(key))

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        for hook in list(self.hooks.values()):
            assert hook(self, args, kwargs) is None


def test_the_first_forward_is_checked_and_no_later_one() -> None:
    used, unused = Processor(), Processor()
    capture.arm([used, unused], THREE)
    used("ids", Tensor(0, 8), "head", "batch")  # an idle rank
    assert used.hooks
    used("ids", Tensor(5, 8), "head", "batch", states(8, 8, 8))
    assert not used.hooks and not unused.hooks
    used("ids", Tensor(5, 8), "head", "batch")


@pytest.mark.parametrize("keyword", [True, False])
def test_a_forward_without_the_states_is_the_end(keyword: bool) -> None:
    processor = Processor()
    capture.arm([processor], THREE)
    arguments = ("ids", Tensor(5, 8), "head", "batch")
    with pytest.raises(CaptureError, match="is 1 of width 8"):
        if keyword:
            processor(*arguments, aux_hidden_states=states(8))
        else:
            processor(*arguments, states(8))


def test_nothing_to_check_is_an_error() -> None:
    with pytest.raises(CaptureError, match="Target has no logits processor"):
        capture.arm([], THREE)


# ---------------------------------------------------------------------------- load_model


class Native:
    def set_eagle3_layers_to_capture(self, layer_ids: Any = None) -> None: ...

    def get_embed_and_head(self) -> Any: ...


class Without:
    pass


class API(ModuleType):
    """Stands for `compat.sglang_api`, which needs torch."""

    wanted: Any = None
    model_class: type = Native

    def capture_request(self, runner: Any) -> Any:
        return self.wanted

    def target_class(self, runner: Any) -> type:
        return self.model_class

    def logits_processors(self, model: Any) -> list[Processor]:
        return [model.processor]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> API:
    from sglang_spec_ext import compat

    made = API("sglang_spec_ext.compat.sglang_api")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setattr(compat, "sglang_api", made, raising=False)
    return made


def request(**fields: Any) -> Any:
    given = {"algorithm": "EAGLE3", "captures": True, "layers": None, "draft": None, **fields}
    return SimpleNamespace(**given)


def load(api: API, model: Any = None) -> Any:
    """Runs the hook; returns the model, whose weights `original` "loads"."""
    runner = SimpleNamespace()
    model = model or api.model_class()
    model.processor = Processor()

    def original(given: Any) -> str:
        assert given is runner
        runner.model = model
        return "loaded"

    assert loading.load_model(original, runner) == "loaded"
    return model


def test_a_load_that_captures_nothing_is_left_alone(api: API) -> None:
    api.model_class = Without
    before = dict(vars(Without))
    assert not load(api).processor.hooks
    assert dict(vars(Without)) == before


def test_a_class_without_a_loop_that_collects_is_refused_before_its_weights(api: API) -> None:
    api.wanted, api.model_class = request(), Without

    def original(runner: Any) -> None:
        raise AssertionError("weights were loaded")

    with pytest.raises(MissingHooksError, match="Without in SGLang"):
        loading.load_model(original, SimpleNamespace())


class Wrapper:
    """A target of which only an instance can tell what it wraps."""

    def __init__(self, inner: Any) -> None:
        self.language_model = inner


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type:
    row = eagle3_models.Row("Wrapper", "w", eagle3_models.How.DELEGATE, "language_model")
    monkeypatch.setattr(eagle3_models, "ROWS", (row,))
    return Wrapper


@pytest.mark.parametrize(("captures", "refused"), [(True, True), (False, False)])
def test_what_a_target_wraps_is_judged_before_its_weights(
    api: API, wrapper: type, captures: bool, refused: bool
) -> None:
    api.wanted, api.model_class = request(captures=captures), wrapper
    loaded: list[str] = []

    def original(runner: Any) -> None:
        runner.model = loading.initialize_model(lambda config: wrapper(Without()), "config")
        runner.model.processor = Processor()
        loaded.append("weights")

    if refused:
        with pytest.raises(MissingHooksError, match="the Without that it wraps has no set_eagle3"):
            loading.load_model(original, SimpleNamespace())
    else:
        loading.load_model(original, SimpleNamespace())
    assert loaded == ([] if refused else ["weights"])
    # whatever became of it, the next model, which may be the draft, is no target
    assert loading.initialize_model(lambda config: "draft", "config") == "draft"


def test_a_draft_of_the_last_state_only_borrows_weights(api: API) -> None:
    api.wanted, api.model_class = request(captures=False), type("Plain", (), {})
    model = api.model_class()
    model.model = SimpleNamespace(embed_tokens=SimpleNamespace(weight="e"))
    model.lm_head = SimpleNamespace(weight="h")
    assert load(api, model).get_embed_and_head() == ("e", "h")
    assert not model.processor.hooks
    assert not hasattr(model, "set_eagle3_layers_to_capture")


def test_the_check_is_armed_on_the_last_pipeline_stage_only(api: API) -> None:
    api.wanted = request()
    assert load(api).processor.hooks
    first = Native()
    first.pp_group = SimpleNamespace(is_last_rank=False)  # type: ignore[attr-defined]
    assert not load(api, first).processor.hooks


def test_what_fc_takes_is_read_from_the_draft(tmp_path: Path) -> None:
    draft = eagle3()
    draft.config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3]}
    draft.config["target_hidden_size"] = 77
    (tmp_path / "config.json").write_text(json.dumps(draft.config))
    wanted = request(layers=[0, 1, 2, 3], draft=str(tmp_path))
    assert loading.expected(wanted, "T") == Expected(4, 77, [0, 1, 2, 3], "T")


def test_a_draft_that_cannot_be_read_leaves_sglangs_default(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = request(draft=str(tmp_path / "nowhere"))
    assert loading.expected(wanted, "T") == Expected(3, None, None, "T")
    assert "cannot tell what the draft's fc takes" in caplog.text
    dflash = request(algorithm="DFLASH", layers=[1, 2, 3, 4, 5], draft=str(tmp_path))
    assert loading.expected(dflash, "T") == Expected(5, None, [1, 2, 3, 4, 5], "T")
