"""Ask the server over HTTP: does it say it is healthy, and does a real token come back?"""

from __future__ import annotations

from typing import Any

import requests

from sglang_spec_ext.ops.address import reachable, session

HEALTH_TIMEOUT = 25.0  # SGLang itself waits up to 20 s for a token before it answers 503
TOKEN_TIMEOUT = 60.0


class ServerProbe:
    """One server's HTTP side. Every call answers with words instead of raising."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = reachable(url)
        self._session = session(self.url, api_key)

    def health(self) -> str:
        """``ok``, ``starting``, ``refused``, ``slow``, or what else is wrong."""
        try:
            answer = self._session.get(f"{self.url}/health", timeout=(5, HEALTH_TIMEOUT))
        except requests.ConnectionError:
            return "refused"
        except requests.Timeout:
            return "slow"
        except requests.RequestException as error:
            return f"failed ({type(error).__name__})"
        if answer.status_code == 200:
            return "ok"
        return "starting" if answer.status_code == 503 else f"HTTP {answer.status_code}"

    def first_token(self, dp_ranks: int, disaggregated: bool) -> str:
        """Generate one token, on each data-parallel rank; the words of the first error, or empty.

        Half of a disaggregated pair cannot generate for us: there SGLang's own generating health
        check, which pretends to be the partner, has to do.
        """
        if disaggregated:
            return self._generating_health()
        info = self._describe()
        if dp_ranks == 1:
            dp_ranks = _positive(info.get("dp_size"))
        if info.get("is_embedding"):
            return self._ask("/encode", {"text": "ready?"}, "embedding")
        field = "data_parallel_rank" if str(info.get("version")) == "0.5.9" else "routed_dp_rank"
        for rank in range(dp_ranks):
            request: dict[str, Any] = {
                "input_ids": [0],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            }
            if dp_ranks > 1:
                request[field] = rank
            error = self._ask("/generate", request, "output_ids", "text", "meta_info")
            if error:
                return f"DP rank {rank}: {error}" if dp_ranks > 1 else error
        return ""

    def _generating_health(self) -> str:
        try:
            answer = self._session.get(f"{self.url}/health_generate", timeout=(5, HEALTH_TIMEOUT))
        except requests.RequestException as error:
            return f"failed ({type(error).__name__})"
        return "" if answer.status_code == 200 else f"HTTP {answer.status_code}"

    def _ask(self, path: str, request: dict[str, Any], *signs: str) -> str:
        """POST, and look for one of ``signs`` in the answer."""
        try:
            answer = self._session.post(f"{self.url}{path}", json=request, timeout=TOKEN_TIMEOUT)
        except requests.ConnectionError:
            return "refused"
        except requests.Timeout:
            return f"no answer within {TOKEN_TIMEOUT:.0f} s"
        except requests.RequestException as error:
            return f"failed ({type(error).__name__})"
        if answer.status_code in (401, 403):
            return f"HTTP {answer.status_code}: give the server's key with --api-key"
        if answer.status_code != 200:
            return f"HTTP {answer.status_code}: {answer.text[:200]}"
        try:
            found = answer.json()
        except ValueError:
            return "the answer is no JSON: is this an SGLang server?"
        tokens = _tokens(found, signs)
        return "" if tokens else "answered without a token"

    def _describe(self) -> dict[str, Any]:
        try:
            answer = self._session.get(f"{self.url}/server_info", timeout=10)
            found = answer.json() if answer.status_code == 200 else {}
        except (requests.RequestException, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _tokens(answer: Any, signs: tuple[str, ...]) -> bool:
    if isinstance(answer, list):
        return bool(answer) and all(_tokens(each, signs) for each in answer)
    if not isinstance(answer, dict):
        return False
    completed = (answer.get("meta_info") or {}).get("completion_tokens")
    if completed is not None and "embedding" not in signs:
        return bool(completed)
    return any(answer.get(sign) for sign in signs)


def _positive(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 1
