"""Which of the diffs of `patches/` the installed SGLang lacks, where they are the only way in.

Some may have been left out, and a reinstallation takes them back from the files that it replaces.
"""

from __future__ import annotations

import os
from pathlib import Path

from sglang_spec_ext.compat import bootstrap, contracts, entry_point, releases, workers

CONCERNS = {
    "server_args": ("add_cli_args", "from_cli_args", "check_server_args", "admission_cap"),
    "engine": ("server_args_class", "launch_subprocesses", "launch_subprocesses_function"),
    "scheduler": (
        "init_info",
        "init_model_worker",
        "scheduler_process",
        "get_internal_state",
        "set_internal_state",
        "relay_update",
    ),
    "worker": ("forward_batch_generation", "forward_batch_generation_v1"),
    "results": ("process_decode", "resolve_spec_tokens"),
    "model_runner": ("load_model", "initialize_model", "device_graphs", "graph_sizes"),
    "draft": ("target_embeds", "draft_embeds", "draft_positions"),
    "metrics": ("update_spec_metrics", "report_decode_stats", "request_spec_metrics"),
}
"""The touch points that a diff has seams for, by its name, as `patches/source` has them."""


def missing(*, patched: bool = False) -> list[str]:
    """A sentence for the operator if diffs are missing and nothing else would load the plugin.

    Args:
        patched: whether the caller is a patched SGLang. Otherwise that is so if it has any seam:
            without one, whoever asks was loaded in a way of their own.
    """
    site = contracts.site_dir()
    closed = site and _closed(site)
    if site is None or not closed:
        return []
    seamed = {point: contracts.seamed(point, site) for point in workers.hooked(site)}
    without = {point.name for point, there in seamed.items() if not there}
    if not without or not (patched or any(seamed.values())):
        return []
    names = [name for name, points in CONCERNS.items() if without & set(points)]
    return [
        f"of the diffs in patches/{releases.installed_version() or ''}, these are not applied: "
        f"{', '.join(names)}. Nothing else loads the plugin here ({closed}), so it takes all of "
        "them: python apply_patches.py apply"
    ]


def _closed(site: Path) -> str:
    """Why neither SGLang's plugin loader nor the `.pth` loads the plugin; empty if one does."""
    if not Path(site, "sglang", "srt", "plugins").is_dir():
        if bootstrap.installed():
            return ""
        off = os.environ.get(bootstrap.SWITCH) == "0"
        return f"{bootstrap.SWITCH}=0" if off else "our .pth is not in its site-packages"
    if not entry_point.installed():
        return f"there is no entry point {entry_point.NAME}"
    return entry_point.hidden_by(os.environ)
