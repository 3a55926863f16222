"""All that the known problems are judged by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_spec_ext.compat.releases import nearest
from sglang_spec_ext.ops.doctor.installed import Installed
from sglang_spec_ext.ops.doctor.server import Server


@dataclass(frozen=True)
class Facts:
    """``environment`` is this process's; a running server may have another."""

    installed: Installed
    environment: Mapping[str, str]
    server: Server | None = None

    @property
    def version(self) -> str | None:
        """SGLang's version: the running server's, else the installed one's."""
        return self.server.version if self.server else self.installed.version("sglang")

    @property
    def release(self) -> str | None:
        """The known release by whose rules to judge; None for no SGLang, or one older than all."""
        try:
            return nearest(self.version or "")[0]
        except ValueError:
            return None

    def flag(self, name: str, default: Any = None) -> Any:
        """An effective argument of the running server."""
        value = self.server.info.get(name) if self.server else None
        return default if value is None else value

    @property
    def state(self) -> Mapping[str, Any] | None:
        """The plugin's state in the first scheduler of the running server that has it."""
        ours = self.server.ours if self.server else []
        return ours[0] if ours else None
