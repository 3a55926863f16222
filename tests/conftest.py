"""How the tests spread over processes when `tests/run` uses pytest-xdist.

Tests of one group stay in one process: those that share engines, and those that fetch wheels into
the same folder. All others go wherever there is time.
"""

from __future__ import annotations

import os
import signal
from pathlib import PurePosixPath
from typing import Any

import pytest

ENGINES = "engines shared by configuration"
PROGRAMS = "engines and programs of one test file"
WHEELS = "wheels"
GROUPS = {
    "tests/engine": ENGINES,
    "tests/engine/test_doors.py": PROGRAMS,
    "tests/engine/test_eagle3_families.py": PROGRAMS,
    "tests/engine/test_failing_loudly.py": PROGRAMS,
    "tests/engine/test_latent_attention.py": PROGRAMS,
    "tests/engine/test_operator_tools.py": PROGRAMS,
    "tests/engine/test_other_configurations.py": PROGRAMS,
    "tests/engine/test_patched.py": PROGRAMS,
    "tests/engine/test_stand_ins.py": PROGRAMS,
    "tests/engine/test_two_ranks.py": PROGRAMS,
    "tests/contract": WHEELS,
}
"""By folder or file; the file counts where both are there."""


# A run behind nohup or in a shell's background ignores these, and so would all that the tests start
# in order to interrupt it.
for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.SIG_DFL)

# What `timeout` and CI send ends a run as Ctrl-C does, so that fixtures stop the servers they have.
signal.signal(signal.SIGTERM, signal.default_int_handler)
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def group(nodeid: str) -> str:
    file = PurePosixPath(nodeid.partition("::")[0])
    return GROUPS.get(str(file)) or GROUPS.get(str(file.parent)) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    # Not its own `--dist loadgroup`, whose marks pytest 9.2 no longer hands on.
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    return ByGroup(config, log)
