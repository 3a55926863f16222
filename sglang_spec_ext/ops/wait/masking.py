"""Keep keys and tokens out of what is printed: it ends up in bug reports and CI logs."""

from __future__ import annotations

import re

# SGLang counts TOKENS and has a TOKENIZER: those are no secrets.
SECRET_NAME = re.compile(r"key|token(?!s|izer)|passw|secret|credential|auth", re.I)
_SECRETS = (
    re.compile(r"(--[\w-]*(?:api-key|token|password|secret|credentials)[= ]+)([^\s'\",]+)"),
    re.compile(r"(\b\w*(?:api_key|password|secret)['\"]?(?:=|: ?)['\"]?)([^\s'\",)}]+)", re.I),
    re.compile(  # environment variables
        r"(\b[A-Z][A-Z0-9_]*(?:KEY|TOKEN(?!S|IZER)|PASSW|SECRET|CREDENTIAL)[A-Z0-9_]*=['\"]?)"
        r"([^\s'\",)}]+)"
    ),
    re.compile(r"(Bearer )(\S+)"),
    re.compile(r"(://[^/\s:@]*:)([^@/\s]+)(?=@)"),
    re.compile(r"()\b((?:hf|sk|ghp)[_-][A-Za-z0-9_-]{16,})"),
)
_PUBLIC_VALUES = ("None", "True", "False", "null", "***")


def mask(text: str) -> str:
    """``text`` with the values of known secrets replaced by ``***``."""
    for secret in _SECRETS:
        text = secret.sub(_masked, text)
    return text


def _masked(found: re.Match[str]) -> str:
    return found[0] if found[2] in _PUBLIC_VALUES else f"{found[1]}***"
