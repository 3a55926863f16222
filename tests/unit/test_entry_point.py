"""What keeps SGLang's plugin loader from us, as its own list of allowed names decides it."""

from __future__ import annotations

import pytest

from sglang_spec_ext.compat import entry_point


@pytest.mark.parametrize("value", ["spec_ext", "other, spec_ext ,third", ""])
def test_nothing_hides_us(value: str) -> None:
    assert entry_point.hidden_by({"SGLANG_PLUGINS": value}) == ""
    assert entry_point.hidden_by({}) == ""


@pytest.mark.parametrize("value", ["other", "spec_ext2", ",", " "])
def test_a_list_without_us_hides_us(value: str) -> None:
    assert entry_point.hidden_by({"SGLANG_PLUGINS": value}) == f"SGLANG_PLUGINS={value}"
