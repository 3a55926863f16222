"""A patched SGLang with the plugin loaded too: prints what runs at each place, one JSON object."""

from __future__ import annotations

import argparse
import json
import os
import pkgutil
from typing import Any

import sglang.srt.entrypoints.engine
import sglang.srt.managers.scheduler  # noqa: F401
from sglang.srt.server_args import ServerArgs

from sglang_spec_ext import args, plugin, seams
from sglang_spec_ext.compat import contracts, hooks, workers


def places() -> dict[str, Any]:
    site = contracts.site_dir()
    assert site is not None
    found = {}
    for point in workers.hooked(site):
        owner, _, name = point.target.rpartition(".")
        raw = vars(pkgutil.resolve_name(owner))[name]
        slot = seams.slot_of(getattr(raw, "__func__", raw))
        filled = slot.hooks if slot else []
        found[point.target] = {
            "slot": [hook.__qualname__ for hook in filled],
            # in wrappers: of SGLang's registry, or ours where it has none
            "elsewhere": [hook.__qualname__ for hook in hooks._layers(raw) if hook in filled],
        }
    return found


def main() -> None:
    os.environ[args.ENV_NAMES["threshold"]] = "4"
    try:
        from sglang.srt.plugins import load_plugins
    except ModuleNotFoundError:
        plugin.register()  # again: our bootstrap has, at the imports above
    else:
        load_plugins()
    loaded = places()

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)  # argparse refuses a flag that is added twice
    os.environ |= args.build(threshold=4).to_env() | args.drafting_to_env(True, "stop")
    plugin.register()
    seams.ensure_registered("sglang.srt.managers.scheduler")
    told = {"loaded": loaded, "then": places(), "unbound": plugin.verify_bound()}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
