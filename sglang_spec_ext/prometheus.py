"""Our series beside SGLang's own: in its registry, with its labels, only where it reports metrics.

A counter costs some 2 us per increment in Prometheus's multiprocess mode, which SGLang uses. A step
makes one increment, two while target-only; nothing asks the device.
"""

from __future__ import annotations

from typing import Any

from sglang_spec_ext.args import Settings
from sglang_spec_ext.policy import Mode, Switch

PREFIX = "sglang:spec_ext_"
BATCH_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


class Series:
    """What one scheduler process reports.

    Args:
        collector: SGLang's SchedulerMetricsCollector; it names the labels, and the classes to use
            where an embedder has replaced those of prometheus_client.
    """

    def __init__(self, collector: Any) -> None:
        # Only now: prometheus_client decides at import whether it serves several processes.
        import prometheus_client

        labels = dict(collector.labels)
        counter = getattr(collector, "_counter_cls", None) or prometheus_client.Counter
        gauge = getattr(collector, "_gauge_cls", None) or prometheus_client.Gauge
        histogram = getattr(collector, "_histogram_cls", None) or prometheus_client.Histogram

        def one(kind: Any, name: str, text: str, **more: Any) -> Any:
            made = kind(PREFIX + name, text, labelnames=list(labels), **more)
            return made.labels(**labels)

        def by_mode(kind: Any, name: str, label: str, text: str, **more: Any) -> dict[Mode, Any]:
            made = kind(PREFIX + name, text, labelnames=[*labels, label], **more)
            return {mode: made.labels(**labels, **{label: mode.value}) for mode in Mode}

        latest = {"multiprocess_mode": "mostrecent"}
        self._target_only = one(
            gauge,
            "target_only",
            "1 while decode steps run the target alone, 0 while they speculate.",
            **latest,
        )
        self._threshold = one(
            gauge, "threshold", "Decode requests above which only the target runs (N).", **latest
        )
        self._resume_threshold = one(
            gauge,
            "resume_threshold",
            "Decode requests at or below which speculation resumes (M).",
            **latest,
        )
        self._switches = by_mode(
            counter, "switches_total", "to", "Changes of mode, by the mode that they lead to."
        )
        self._resumes = one(
            counter, "resumes_total", "How often speculation went on after target-only steps."
        )
        self._switch_batch = by_mode(
            histogram,
            "switch_batch_size",
            "to",
            "Requests in the decode step that changed the mode.",
            buckets=BATCH_BUCKETS,
        )
        self._tokens = by_mode(
            counter, "tokens_total", "mode", "Tokens that decode steps committed, by mode."
        )
        self._warmed = one(
            counter,
            "draft_tokens_warmed_total",
            "Rows of draft K and V that target-only steps wrote to keep the draft warm.",
        )
        self._target_only.set(0)

    def settings(self, settings: Settings) -> None:
        """Show N and M, at start and when they change."""
        self._threshold.set(settings.threshold)
        self._resume_threshold.set(settings.resume_threshold)

    def switched(self, switch: Switch) -> None:
        self._target_only.set(int(switch.to is Mode.TARGET_ONLY))
        self._switches[switch.to].inc()
        self._switch_batch[switch.to].observe(switch.batch)
        if switch.to is Mode.SPECULATING:
            self._resumes.inc()

    def committed(self, mode: Mode, tokens: int) -> None:
        self._tokens[mode].inc(tokens)

    def warmed(self, tokens: int) -> None:
        self._warmed.inc(tokens)
