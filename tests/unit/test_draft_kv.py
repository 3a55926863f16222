"""Which drafts are kept warm by KV-only writes, and what is said of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: the write works on tensors")

from sglang_spec_ext.target_only import draft_kv  # noqa: E402


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


# ---------------------------------------------------------------------------- K and V alone
HEADS, KV_HEADS, HEAD, INPUT = 8, 2, 4, 6


class UnquantizedLinearMethod:
    pass


class Fp8LinearMethod:
    pass


class Attention:
    """SGLang's LlamaAttention as far as Q, K and V go; the rotation scales by the position."""

    head_dim, q_size, kv_size = HEAD, HEADS * HEAD, KV_HEADS * HEAD

    def __init__(self, method: Any, **fields: Any) -> None:
        weight = torch.randn((HEADS + 2 * KV_HEADS) * HEAD, INPUT)
        self.qkv_proj = Projection(weight, method)
        vars(self.qkv_proj).update(fields)

    @staticmethod
    def rotary_emb(positions: Any, q: Any, k: Any) -> tuple[Any, Any]:
        assert q.shape[-1] % k.shape[-1] == 0, "a kernel for grouped queries takes no other"
        return q * positions[:, None], k * positions[:, None]

    def forward_prepare_native(self, positions: Any, inputs: Any) -> tuple[Any, Any, Any]:
        qkv, _ = self.qkv_proj(inputs)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        return (*self.rotary_emb(positions, q, k), v)


class Projection(SimpleNamespace):
    def __init__(self, weight: Any, method: Any) -> None:
        super().__init__(weight=weight, quant_method=method, bias=None)

    def __call__(self, inputs: Any) -> tuple[Any, None]:
        return inputs @ self.weight.T, None


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"unquantized_linear": UnquantizedLinearMethod}
    monkeypatch.setattr(draft_kv.sglang_api, "resolve", names.__getitem__)


@pytest.mark.usefixtures("linear")
def test_k_and_v_without_most_queries_are_those_with_all() -> None:
    attention = Attention(UnquantizedLinearMethod())
    narrow = draft_kv._with_fewest_query_heads(attention)
    positions, inputs = torch.arange(1, 4), torch.randn(3, INPUT)
    _, k, v = attention.forward_prepare_native(positions, inputs)
    q_few, k_alone, v_alone = Attention.forward_prepare_native(narrow, positions, inputs)
    assert tuple(q_few.shape) == (3, KV_HEADS * HEAD)
    torch.testing.assert_close(k_alone, k)
    torch.testing.assert_close(v_alone, v)


@pytest.mark.usefixtures("linear")
def test_weights_loaded_later_are_used() -> None:
    attention = Attention(UnquantizedLinearMethod())
    narrow = draft_kv._with_fewest_query_heads(attention)
    attention.qkv_proj.weight = torch.zeros_like(attention.qkv_proj.weight)
    projected, _ = narrow.qkv_proj(torch.randn(3, INPUT))
    assert not projected.any()


@pytest.mark.usefixtures("linear")
@pytest.mark.parametrize(
    ("method", "fields"),
    [
        (Fp8LinearMethod(), {}),
        (UnquantizedLinearMethod(), {"bias": torch.zeros(1)}),
        (UnquantizedLinearMethod(), {"use_intel_amx_backend": True}),
    ],
    ids=["quantized", "bias", "packed"],
)
def test_other_projections_are_taken_whole(method: Any, fields: dict[str, Any]) -> None:
    attention = Attention(method, **fields)
    assert draft_kv._with_fewest_query_heads(attention) is attention
