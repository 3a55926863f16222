"""The series that the Grafana dashboard takes from SGLang itself, in every release's wheel."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from by_path import ROOT
from test_touch_points import RELEASES

DASHBOARD = ROOT / "docs" / "grafana" / "spec_ext.json"
OF_SGLANG = sorted(set(re.findall(r"sglang:(?!spec_ext_)\w+", DASHBOARD.read_text())))


@pytest.mark.parametrize("release", RELEASES)
def test_sglang_exports_the_series_that_the_dashboard_shows(
    release: str, wheel_of: Callable[[str], Path]
) -> None:
    assert OF_SGLANG == ["sglang:num_running_reqs", "sglang:spec_accept_length"]
    with zipfile.ZipFile(wheel_of(release)) as archive:
        sources = [
            archive.read(name).decode()
            for name in archive.namelist()
            if re.fullmatch(r"sglang/srt/.*metrics\w*\.py", name)
        ]
    for series in OF_SGLANG:
        declared = re.compile(rf'name="{series}",')
        assert any(declared.search(text) for text in sources), series
    assert any('"model_name": ' in text for text in sources), "the dashboard selects by it"
