"""How the tests spread over processes: `tests/run` uses pytest-xdist with ``--dist loadgroup``.

Tests of one group stay in one process: those that share engines, and those that fetch wheels into
the same folder. All others go wherever there is time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENGINES = "engines shared by configuration"
PROGRAMS = "engines and programs of one test file"
WHEELS = "wheels"
GROUPS = {
    "engine": ENGINES,
    "engine/test_doors.py": PROGRAMS,
    "engine/test_failing_loudly.py": PROGRAMS,
    "engine/test_other_configurations.py": PROGRAMS,
    "engine/test_stand_ins.py": PROGRAMS,
    "contract": WHEELS,
    "unit/test_apply_patches_wheel.py": WHEELS,
}
"""By folder or file; the file counts where both are there."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(HERE)
        group = GROUPS.get(place.as_posix()) or GROUPS.get(place.parts[0])
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
