"""The series that the Grafana dashboard takes from SGLang itself, in every release's wheel."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest
from test_touch_points import RELEASES, ROOT, load_generator

DASHBOARD = ROOT / "docs" / "grafana" / "spec_ext.json"
OF_SGLANG = sorted(set(re.findall(r"sglang:(?!spec_ext_)\w+", DASHBOARD.read_text())))


@pytest.mark.parametrize("release", RELEASES)
def test_sglang_exports_the_series_that_the_dashboard_shows(release: str) -> None:
    assert OF_SGLANG == ["sglang:num_running_reqs", "sglang:spec_accept_length"]
    generator = load_generator()
    cache = ROOT / ".cache" / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        wheel: Path = generator.find_wheel(release, cache)
    except generator.SourceError as problem:
        pytest.skip(str(problem))
    with zipfile.ZipFile(wheel) as archive:
        sources = [
            archive.read(name).decode()
            for name in archive.namelist()
            if re.fullmatch(r"sglang/srt/.*metrics\w*\.py", name)
        ]
    for series in OF_SGLANG:
        declared = re.compile(rf'name="{series}",')
        assert any(declared.search(text) for text in sources), series
    assert any('"model_name": ' in text for text in sources), "the dashboard selects by it"
