"""Which methods a target class is given, and that nothing else changes. Fake classes, no torch."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_spec_ext.compat import eagle3_models
from sglang_spec_ext.compat.eagle3_models import How, Row, row_of
from sglang_spec_ext.eagle3_hooks import delegation
from sglang_spec_ext.eagle3_hooks.delegation import MissingHooksError

NEWEST = "0.5.23"


class Module:
    """The part of torch.nn.Module that the hooks use."""

    def __init__(self) -> None:
        self.pre_hooks: list[Any] = []

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> None:
        self.pre_hooks.insert(0 if options.get("prepend") else len(self.pre_hooks), (hook, options))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook, options in self.pre_hooks:
            assert options["with_kwargs"]
            changed = hook(self, args, kwargs)
            args, kwargs = changed if changed is not None else (args, kwargs)
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Layers(Module):
    def __init__(self, count: int = 8, container: type = list) -> None:
        super().__init__()
        self.layers = [object()] * count
        self.layers_to_capture = container()
        self.embed_tokens = SimpleNamespace(weight="embedding")


class LanguageModel(Module):
    """What SGLang's own classes with the hooks look like."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.model = Layers()
        self.lm_head = self.model.embed_tokens if tied else SimpleNamespace(weight="head")

    def set_eagle3_layers_to_capture(self, layer_ids: Any = None) -> None:
        self.model.layers_to_capture = ["eagle3", layer_ids]

    def set_dflash_layers_to_capture(self, layer_ids: Any) -> None:
        self.model.layers_to_capture = ["dflash", layer_ids]

    def get_embed_and_head(self) -> tuple[Any, Any]:
        return self.model.embed_tokens.weight, self.lm_head.weight

    def set_embed_and_head(self, embed: Any, head: Any) -> None:
        self.model.embed_tokens.weight, self.lm_head.weight = embed, head


class WithoutHooks(Module):
    def __init__(self, layers: Layers | None = None, tied: bool = False) -> None:
        super().__init__()
        self.model = layers or Layers()
        self.lm_head = self.model.embed_tokens if tied else SimpleNamespace(weight="head")
        self.logits_processor = Module()
        self.capture_aux_hidden_states = False


Table = Callable[..., type]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Table:
    """``table(row fields, base)``: a new class, the only one in the table."""

    def make(base: type, how: How, inner: str = "", **fields: Any) -> type:
        made = type("Target", (base,), {})
        row = Row("Target", "target", how, inner, **fields)
        monkeypatch.setattr(eagle3_models, "ROWS", (row,))
        return made

    return make


class Wrapper(Module):
    def __init__(self, inner: Any = None) -> None:
        super().__init__()
        self.language_model = inner or LanguageModel()


# ---------------------------------------------------------------------------- delegation


def test_a_wrapper_asks_what_it_wraps(table: Table) -> None:
    target = table(Wrapper, How.DELEGATE, "language_model")()
    made = delegation.install(target, NEWEST)
    assert set(made) == {
        "set_eagle3_layers_to_capture", "set_dflash_layers_to_capture", "get_embed_and_head",
        "set_embed_and_head",
    }  # fmt: skip
    target.set_eagle3_layers_to_capture([1, 2])
    assert target.language_model.model.layers_to_capture == ["eagle3", [1, 2]]
    target.set_eagle3_layers_to_capture()
    assert target.language_model.model.layers_to_capture == ["eagle3", None]
    target.set_dflash_layers_to_capture([3])
    assert target.language_model.model.layers_to_capture == ["dflash", [3]]
    assert target.get_embed_and_head() == ("embedding", "head")
    target.set_embed_and_head("e", "h")
    assert target.language_model.get_embed_and_head() == ("e", "h")


def test_the_dflash_hook_only_where_the_inner_model_has_it(table: Table) -> None:
    class Older(LanguageModel):
        set_dflash_layers_to_capture = property()  # type: ignore[assignment]  # not an attribute

    target = table(Wrapper, How.DELEGATE, "language_model")(Older())
    assert "set_dflash_layers_to_capture" not in delegation.install(target, NEWEST)
    assert not hasattr(target, "set_dflash_layers_to_capture")
    with pytest.raises(MissingHooksError, match=r"DFLASH.*the Older that it wraps has no"):
        delegation.install(target, NEWEST, "DFLASH")


def test_tied_embeddings(table: Table) -> None:
    target = table(Wrapper, How.DELEGATE, "language_model")(LanguageModel(tied=True))
    delegation.install(target, NEWEST)
    assert target.get_embed_and_head() == ("embedding", "embedding")


def test_an_inner_model_without_the_weights_method_is_looked_into(table: Table) -> None:
    class NoWeights(LanguageModel):
        get_embed_and_head = property()  # type: ignore[assignment]
        set_embed_and_head = property()  # type: ignore[assignment]

    target = table(Wrapper, How.DELEGATE, "language_model")(NoWeights())
    delegation.install(target, NEWEST)
    assert target.get_embed_and_head() == ("embedding", "head")
    target.set_embed_and_head("e", "h")
    assert target.get_embed_and_head() == ("e", "h")


def test_what_the_class_has_itself_stays(table: Table) -> None:
    class Own(Wrapper):
        def get_embed_and_head(self) -> str:
            return "own"

        def set_eagle3_layers_to_capture(self, layer_ids: Any = None) -> str:
            return "own"

    target = table(Own, How.DELEGATE, "language_model")()
    made = delegation.install(target, NEWEST)
    assert set(made) == {"set_dflash_layers_to_capture", "set_embed_and_head"}
    assert target.get_embed_and_head() == target.set_eagle3_layers_to_capture() == "own"


def test_a_method_that_looks_in_the_wrong_place_is_replaced(table: Table) -> None:
    class Wrong(Wrapper):
        def get_embed_and_head(self) -> Any:
            return self.language_model.embed_tokens.weight  # type: ignore[attr-defined]

    target = table(Wrong, How.DELEGATE, "language_model")()
    assert "get_embed_and_head" in delegation.install(target, NEWEST)
    assert target.get_embed_and_head() == ("embedding", "head")


def test_a_class_that_lacks_nothing_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(LanguageModel))
    assert delegation.install(LanguageModel(), NEWEST) == []
    assert delegation.install(LanguageModel(), NEWEST, "DFLASH") == []
    assert dict(vars(LanguageModel)) == before


def test_only_the_class_of_the_target_changes(table: Table) -> None:
    cls = table(Wrapper, How.DELEGATE, "language_model")
    sibling = type("Sibling", (Wrapper,), {})
    before = {c: dict(vars(c)) for c in (Wrapper, LanguageModel, Layers, sibling)}
    delegation.install(cls(), NEWEST)
    assert {c: dict(vars(c)) for c in before} == before
    assert "forward" not in vars(cls)  # the plain path is SGLang's own


def test_twice_is_once(table: Table) -> None:
    target = table(Wrapper, How.DELEGATE, "language_model")()
    delegation.install(target, NEWEST)
    assert delegation.install(target, NEWEST) == []


def test_an_object_that_forwards_every_attribute(table: Table) -> None:
    class Facade:
        def __init__(self) -> None:
            self.inner = Wrapper()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    target = table(Facade, How.DELEGATE, "language_model")()
    delegation.install(target, NEWEST)
    target.set_eagle3_layers_to_capture([5])
    assert target.inner.language_model.model.layers_to_capture == ["eagle3", [5]]
    assert target.get_embed_and_head() == ("embedding", "head")


def test_a_wrapped_class_may_be_in_the_table_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = type("Inner", (WithoutHooks,), {})
    outer = type("Outer", (Wrapper,), {})
    rows = (
        Row("Inner", "inner", How.UNPACK, "model"),
        Row("Outer", "outer", How.DELEGATE, "language_model"),
    )
    monkeypatch.setattr(eagle3_models, "ROWS", rows)
    target = outer(inner())
    delegation.install(target, NEWEST)
    target.set_eagle3_layers_to_capture([0])
    assert target.language_model.model.layers_to_capture == [1]


# ---------------------------------------------------------------------------- setters


@pytest.mark.parametrize("container", [list, set, tuple])
def test_a_setter_counts_outputs_as_the_next_layers_inputs(table: Table, container: type) -> None:
    target = table(WithoutHooks, How.SETTER, "model")(Layers(8, container))
    delegation.install(target, NEWEST)
    target.set_eagle3_layers_to_capture([0, 3, 6])
    assert target.model.layers_to_capture == container([1, 4, 7])
    assert target.capture_aux_hidden_states is True
    target.set_eagle3_layers_to_capture()
    assert target.model.layers_to_capture == container([2, 4, 5])
    target.set_dflash_layers_to_capture([2])
    assert target.model.layers_to_capture == container([3])
    with pytest.raises(ValueError, match="DFLASH requires explicit layer_ids"):
        target.set_dflash_layers_to_capture(None)


def test_only_the_last_pipeline_stage_captures(table: Table) -> None:
    target = table(WithoutHooks, How.SETTER, "model")()
    target.pp_group = SimpleNamespace(is_last_rank=False)
    delegation.install(target, NEWEST)
    target.set_eagle3_layers_to_capture([1])
    assert target.model.layers_to_capture == []
    assert target.capture_aux_hidden_states is False


def test_a_pair_is_unpacked_before_the_logits_processor(table: Table) -> None:
    target = table(WithoutHooks, How.UNPACK, "model")()
    delegation.install(target, NEWEST)
    assert target.logits_processor.pre_hooks == []  # until somebody asks for states
    seen: list[Any] = []  # by a hook that was there first, as the check of the capture is
    target.logits_processor.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[1]), with_kwargs=True
    )
    target.set_eagle3_layers_to_capture([1])
    target.set_eagle3_layers_to_capture([1])
    assert len(target.logits_processor.pre_hooks) == 2
    assert target.capture_aux_hidden_states is False
    assert target.logits_processor("ids", ("hidden", ["state"]), "head", "batch") == (
        ("ids", "hidden", "head", "batch"),
        {"aux_hidden_states": ["state"]},
    )
    assert seen == ["hidden"]
    # an idle batch has no pair
    assert target.logits_processor("ids", "hidden", "head") == (("ids", "hidden", "head"), {})


@pytest.mark.parametrize("tied", [False, True])
def test_a_setter_class_lends_its_own_weights(table: Table, tied: bool) -> None:
    target = table(WithoutHooks, How.SETTER, "model")(tied=tied)
    delegation.install(target, NEWEST)
    assert target.get_embed_and_head() == ("embedding", "embedding" if tied else "head")


def test_the_dflash_setter_serves_eagle3_too(table: Table) -> None:
    class Dflash(WithoutHooks):
        def set_dflash_layers_to_capture(self, layer_ids: Any) -> None:
            self.told = layer_ids

    target = table(Dflash, How.DFLASH)()
    assert "set_dflash_layers_to_capture" not in delegation.install(target, NEWEST)
    target.set_eagle3_layers_to_capture([1, 3])
    assert target.told == [1, 3]
    target.set_eagle3_layers_to_capture()
    assert target.told == [1, 3, 4]  # the outputs before the inputs 2, 4, 5


# ---------------------------------------------------------------------------- own forward


class Embeds(list[str]):
    """The part of a tensor that the hooks use."""

    clone = list[str].copy


class OwnForward(Wrapper):
    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            raise AssertionError("a verify is no prefill")
        embeds = Embeds(["embeds"])
        handed = self.language_model(input_ids, positions, forward_batch, input_embeds=embeds)
        embeds[0] = "residual"  # as the target's norms do to them on a GPU
        return handed


def batch(*, verify: bool, images: bool) -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_target_verify=lambda: verify),
        contains_mm_inputs=lambda: images,
        mm_input_embeds=None,
    )


def test_a_forward_of_its_own_is_kept_from_verify(table: Table) -> None:
    target = table(OwnForward, How.DELEGATE, "language_model", own_forward=True)()
    delegation.install(target, NEWEST)
    delegation.install(target, NEWEST)
    verify = batch(verify=True, images=True)
    assert target("ids", "at", verify) == (("ids", "at", verify), {})
    assert verify.mm_input_embeds is None


@pytest.mark.parametrize("images", [True, False])
def test_the_draft_is_handed_the_embeddings_of_images(table: Table, images: bool) -> None:
    target = table(OwnForward, How.DELEGATE, "language_model", own_forward=True)()
    delegation.install(target, NEWEST)
    prefill = batch(verify=False, images=images)
    assert target("ids", "at", prefill)[1] == {"input_embeds": ["residual"]}
    assert prefill.mm_input_embeds == (["embeds"] if images else None)


# ---------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({}, "its layers do not collect them"),
        ({"set_dspark_layers_to_capture": print}, "for DSPARK only"),
    ],
)
def test_a_class_whose_loop_would_have_to_be_rewritten_is_refused(own: Any, why: str) -> None:
    cls = type("GemmaForCausalLM", (), own)
    text = delegation.refusal(cls, NEWEST, "EAGLE3")
    assert text is not None
    for part in ("GemmaForCausalLM", NEWEST, why, "would have to be rewritten", "STANDALONE"):
        assert part in text


def test_a_class_that_has_or_gets_the_hook_is_not_refused() -> None:
    assert delegation.refusal(LanguageModel, NEWEST, "EAGLE3") is None
    assert delegation.refusal(LanguageModel, NEWEST, "DFLASH") is None
    assert (
        delegation.refusal(type("KimiVLForConditionalGeneration", (), {}), NEWEST, "EAGLE3") is None
    )


def test_a_row_ends_where_the_class_has_become_native() -> None:
    name = "KimiK25ForConditionalGeneration"
    assert row_of(name, "0.5.9") is not None
    assert row_of(name, "0.5.10.post1") is None
    assert row_of(name, None) is None  # no metadata: judged as the newest


def test_a_wrapper_around_a_model_without_the_hook_is_refused(table: Table) -> None:
    target = table(Wrapper, How.DELEGATE, "language_model")(WithoutHooks())
    before = dict(vars(type(target)))
    with pytest.raises(MissingHooksError, match="the WithoutHooks that it wraps has no set_eagle3"):
        delegation.install(target, NEWEST)
    assert dict(vars(type(target))) == before


@pytest.mark.parametrize("how", [How.SETTER, How.UNPACK])
def test_what_a_wrapped_class_is_given_counts(how: How, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        Row("WithoutHooks", "inner", how, "model"),
        Row("Wrapper", "outer", How.DELEGATE, "language_model"),
    )
    monkeypatch.setattr(eagle3_models, "ROWS", rows)
    built = Wrapper(WithoutHooks())
    for algorithm in ("EAGLE3", "DFLASH"):
        assert delegation.obstacle(built, NEWEST, algorithm) is None
    assert not hasattr(built, "set_eagle3_layers_to_capture")  # nothing is set by asking


def test_a_class_that_has_been_patched_is_left_alone() -> None:
    """As `patches/0.5.9/kimi_k25.diff` or a later release has it, in the release of its row."""

    class KimiK25ForConditionalGeneration(Wrapper):
        def set_eagle3_layers_to_capture(self, layer_ids: Any = None) -> None:
            self.language_model.set_eagle3_layers_to_capture(layer_ids)

        def get_embed_and_head(self) -> tuple[Any, Any]:
            found: tuple[Any, Any] = self.language_model.get_embed_and_head()
            return found

        def set_embed_and_head(self, embed: Any, head: Any) -> None:
            self.language_model.set_embed_and_head(embed, head)

    class Older(LanguageModel):  # SGLang 0.5.9 knows no DFLASH
        set_dflash_layers_to_capture = property()  # type: ignore[assignment]

    target = KimiK25ForConditionalGeneration(Older())
    assert row_of(type(target).__name__, "0.5.9") is not None
    for cls in (KimiK25ForConditionalGeneration, Older):
        before = dict(vars(cls))
        assert delegation.install(target, "0.5.9") == []
        assert dict(vars(cls)) == before


def test_an_unknown_class_without_hooks_is_refused() -> None:
    with pytest.raises(MissingHooksError, match=r"Wrapper in SGLang .* it has no set_eagle3"):
        delegation.install(Wrapper(), NEWEST)
