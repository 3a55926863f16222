"""Stand-ins for what the plugin binds its hooks to, and for what its hooks are called with."""

from __future__ import annotations

import argparse
from types import ModuleType, SimpleNamespace
from typing import Any

from sglang_spec_ext import args, observe
from sglang_spec_ext.args import Settings
from sglang_spec_ext.compat import hooks
from sglang_spec_ext.compat.contracts import LAUNCHER, LOADING, SCHEDULER, TouchPoint
from sglang_spec_ext.wiring import arguments

FLAG = "--speculative-disable-batch-threshold"
DOOR = "SGLANG_SPEC_EXT_DISABLE_BATCH_THRESHOLD"
SETTINGS = Settings(4, 3, 2)
SEAM = {"add_cli_args", "from_cli_args", "server_args_class"}
DRAFTING_LAUNCHER = {"check_server_args", "launch_subprocesses"}
LAUNCHER_NAMES = {point.name for point in LAUNCHER}
SCHEDULER_NAMES = {point.name for point in SCHEDULER}
LOADING_NAMES = {point.name for point in LOADING}
CONFIRMED = {observe.CONFIRMATION: True}


class Record:
    """Stands for ServerArgs."""

    created = 0

    def __init__(self, **kwargs: Any) -> None:
        type(self).created += 1
        self.kwargs = kwargs


class Bindings:
    """Stands for `hooks`: remembers what is bound, and fails where told to."""

    def __init__(self) -> None:
        self.bound: dict[str, hooks.Hook] = {}
        self.calls: list[set[str]] = []
        self.refuse: set[str] = set()
        self.gaps: list[str] = []

    def bind(self, asked: dict[TouchPoint, hooks.Hook]) -> list[str]:
        self.calls.append({point.name for point in asked})
        good = {p.name: h for p, h in asked.items() if p.name not in self.refuse}
        self.bound.update(good)
        return [p.target for p in asked if p.name in self.refuse]

    def is_bound(self, point: TouchPoint, hook: hooks.Hook) -> bool:
        return self.bound.get(point.name) is hook

    def check(self, *_: Any, **__: Any) -> list[str]:
        return self.gaps


class FakeAPI(ModuleType):
    """Stands for `compat.sglang_api`, which needs torch."""

    @staticmethod
    def resolved(record: Any) -> Any:
        return record

    @staticmethod
    def decide(record: Any, **fields: Any) -> None:
        vars(record).update(fields)

    @staticmethod
    def metrics_collector(scheduler: Any) -> None:
        return None


def parse(*line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()

    def original(parser: argparse.ArgumentParser) -> str:
        parser.add_argument("--model-path")
        parser.add_argument("--speculative-algorithm")
        return "returned"

    assert arguments.add_cli_args(original, parser) == "returned"
    return parser.parse_args(list(line))


def from_cli(*line: str) -> Any:
    return arguments.from_cli_args(lambda cls, namespace: cls(), Record, parse(*line))


def server(settings: Settings | None, **fields: Any) -> Any:
    record = SimpleNamespace(speculative_algorithm="EAGLE3", max_running_requests=None, **fields)
    if settings is not None:
        args.stamp(record, settings)
    return record


def launched(*infos: dict[str, Any]) -> tuple[Any, ...]:
    return ("tokenizer", "template", SimpleNamespace(scheduler_infos=list(infos)), None)
