"""Which functions of SGLang the plugin replaces in a launcher: prints one JSON object."""

from __future__ import annotations

import json
import pkgutil
from typing import Any

from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from sglang_spec_ext.compat.contracts import TOUCH_POINTS, in_use
from testbed import engine


def functions() -> dict[str, Any]:
    found = {}
    for point in in_use(TOUCH_POINTS):
        if point.hooked:
            owner, _, name = point.target.rpartition(".")
            found[point.target] = vars(pkgutil.resolve_name(owner))[name]
    return found


def arguments(topk: int | None = 1, **flags: Any) -> list[str]:
    return engine.command_line(topk, **flags)[3:]


def main() -> None:
    imported = functions()

    def replaced() -> list[str]:
        return [name for name, now in functions().items() if now is not imported[name]]

    load_plugins()
    told = {}
    for name, line in {
        "without a draft": arguments(topk=None),
        "without the flag": arguments(),
        "with the flag": arguments(speculative_disable_batch_threshold=4),
    }.items():
        prepare_server_args(line)
        told[name] = replaced()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
