"""Does an EAGLE draft checkpoint load into SGLang as its author meant it? No torch, no SGLang."""

from sglang_spec_ext.ops.check_draft.finding import Finding, FixBy, Severity, exit_code
from sglang_spec_ext.ops.check_draft.rules import check
from sglang_spec_ext.ops.check_draft.server import ServerOptions, parse_command_line
from sglang_spec_ext.ops.check_draft.tensors import CheckpointError

__all__ = [
    "CheckpointError",
    "Finding",
    "FixBy",
    "ServerOptions",
    "Severity",
    "check",
    "exit_code",
    "parse_command_line",
]
