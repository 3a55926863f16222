"""The HTTP API of a Prometheus."""

from __future__ import annotations

from typing import Any

import requests

from benchmarks.dashboard_picture import PictureError
from sglang_spec_ext.ops import address

TIMEOUT_S = 30.0


class Prometheus:
    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._session = address.session(self.url)

    def get(self, what: str, path: str, **params: Any) -> Any:
        """The data of an answer of the HTTP API; what: that is asked for, to name in an error."""
        try:
            answer = self._session.get(f"{self.url}{path}", params=params, timeout=TIMEOUT_S)
        except requests.Timeout:
            raise PictureError(f"{self.url} did not answer within {TIMEOUT_S:.0f} s") from None
        except requests.ConnectionError:
            raise PictureError(f"no Prometheus answers at {self.url}") from None
        except requests.RequestException as error:
            raise PictureError(f"{self.url}: {error}") from None
        try:
            body = answer.json()
            if body["status"] == "success":
                return body["data"]
            reason = body["error"]
        except (ValueError, KeyError, TypeError):
            raise PictureError(
                f"{self.url} is no Prometheus: it answers {path} with {answer.status_code} and not "
                "as Prometheus's API does"
            ) from None
        raise PictureError(f"{what}: Prometheus refuses the query: {' '.join(reason.split())}")
