"""A target captures its draft's layers, whoever asks for its default ones."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_spec_ext.eagle3_hooks import layers

DEFAULT, DRAFTS = [2, 30, 57], [1, 20, 40]


class Target:
    """As SGLang's models: None asks for the default layers."""

    captured: list[int] | None = None

    def set_eagle3_layers_to_capture(self, layer_ids: Sequence[int] | None = None) -> None:
        self.captured = list(DEFAULT if layer_ids is None else layer_ids)


def runner(ids: list[int] | None, uses: bool = True) -> Any:
    return SimpleNamespace(
        model=Target(), eagle_use_aux_hidden_state=uses, eagle_aux_hidden_state_layer_ids=ids
    )


def graphs(it: Any) -> list[int]:
    """What CUDA graphs capture: SGLang asks for the defaults first."""
    it.model.set_eagle3_layers_to_capture()
    captured: list[int] = it.model.captured
    return captured


def test_graphs_capture_the_drafts_layers() -> None:
    assert layers.init_device_graphs(graphs, runner(DRAFTS)) == DRAFTS


def test_a_later_request_for_defaults_changes_nothing() -> None:
    it = runner(DRAFTS)
    layers.init_device_graphs(graphs, it)
    it.model.set_eagle3_layers_to_capture(DRAFTS)
    it.model.set_eagle3_layers_to_capture()  # the dummy run of a piecewise graph
    assert it.model.captured == DRAFTS


def test_layers_that_are_named_are_captured() -> None:
    it = runner(DRAFTS)
    layers.init_device_graphs(graphs, it)
    it.model.set_eagle3_layers_to_capture([7])
    assert it.model.captured == [7]


@pytest.mark.parametrize(("ids", "uses"), [(None, True), (DRAFTS, False)])
def test_without_layers_of_its_own_a_draft_gets_the_defaults(
    ids: list[int] | None, uses: bool
) -> None:
    it = runner(ids, uses)
    assert layers.init_device_graphs(graphs, it) == DEFAULT
    assert "set_eagle3_layers_to_capture" not in vars(it.model)


def test_a_server_without_such_a_draft_is_left_alone() -> None:
    assert layers.init_device_graphs(lambda it: "captured", SimpleNamespace()) == "captured"
