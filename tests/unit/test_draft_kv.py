"""Which drafts are kept warm by KV-only writes, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the write works on tensors")

from sglang_spec_ext.target_only import draft_kv


class LlamaForCausalLMEagle3:
    """Stands for a draft; fields: those of its inner model."""

    def __init__(self, **fields: Any) -> None:
        self.model = SimpleNamespace(**fields)


class LlamaForCausalLMEagle(LlamaForCausalLMEagle3):
    """EAGLE-1: one layer as well, but another input path."""


class MHATokenToKVPool:
    pass


class SWAKVPool:
    pass


@pytest.fixture(autouse=True)
def plain_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_kv.sglang_api, "resolve", {"mha_pool": MHATokenToKVPool}.__getitem__)


def why_not(model: Any, pool: Any = None) -> str | None:
    runner = SimpleNamespace(model=model, token_to_kv_pool=pool or MHATokenToKVPool())
    return draft_kv.DraftKVWriter.why_not(runner)


@pytest.mark.parametrize("fields", [{"midlayer": "layer"}, {"layers": ["layer"]}], ids=str)
def test_a_one_layer_eagle3_draft_is_written(fields: dict[str, Any]) -> None:
    assert why_not(LlamaForCausalLMEagle3(**fields)) is None


@pytest.mark.parametrize(
    ("model", "pool", "reason"),
    [
        (
            LlamaForCausalLMEagle(layers=["layer"]),
            None,
            "LlamaForCausalLMEagle is not one of LlamaForCausalLMEagle3",
        ),
        (
            LlamaForCausalLMEagle3(layers=["first", "second"]),
            None,
            "LlamaForCausalLMEagle3 has 2 layers, and K/V of the later ones need attention",
        ),
        (
            LlamaForCausalLMEagle3(midlayer="layer", is_mrope_enabled=True),
            None,
            "LlamaForCausalLMEagle3 uses multimodal rotary positions",
        ),
        (
            LlamaForCausalLMEagle3(midlayer="layer"),
            SWAKVPool(),
            "the draft's KV pool is a SWAKVPool",
        ),
    ],
    ids=["another class", "two layers", "mrope", "pool"],
)
def test_every_other_draft_is_refused_with_its_reason(model: Any, pool: Any, reason: str) -> None:
    assert why_not(model, pool) == reason
