"""Prometheus metrics, by vLLM's names where they mean the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .protocol import ServedAnswer

_GAUGES = {"num_requests_running": "Answers that are running.", "num_requests_waiting": "Answers that are waiting."}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "New tokens.",
    "prefix_cache_queries": "Tokens of prompts, as asked of earlier sequences.",
    "prefix_cache_hits": "Tokens of prompts that were reused of earlier sequences.",
    "spec_decode_num_drafts": "Passes over an answer's drafted tokens.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that became text.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "Seconds from a call to an answer's first token.",
    "inter_token_latency_seconds": "Seconds to an answer's next token, in the mean of a delivery.",
    "e2e_request_latency_seconds": "Seconds of an answer.",
}
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Metrics of a model by its name; ``gauges`` count what runs and what waits, when they are asked for."""

    def __init__(self, registry: Any, name: str, *gauges: Callable[[], int]) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        def build(kind: Any, texts: Mapping[str, str], **more: Any) -> dict[str, Any]:
            more |= {"labelnames": ("model_name",), "registry": registry}
            return {key: kind(f"vllm:{key}", text, **more).labels(name) for key, text in texts.items()}

        self._counters, self._seconds = build(Counter, _COUNTERS), build(Histogram, _HISTOGRAMS, buckets=_SECONDS)
        for gauge, number in zip(build(Gauge, _GAUGES).values(), gauges, strict=True):
            gauge.set_function(number)
        labels = ("model_name", "finished_reason")
        ended = Counter("vllm:request_success", "Answers by what ended them.", labels, registry=registry)
        self._count_end: Callable[[str], None] = lambda reason: ended.labels(name, reason).inc()

    def see(self, answer: ServedAnswer, num_new: int, reason: str | None, now: float) -> None:
        """Take new tokens of an answer, and why it ended if it did, before it is told of them."""
        request, began = answer.request, answer.call.began
        if num_new:
            self._counters["generation_tokens"].inc(num_new)
            if answer.token_ids:
                self._seconds["inter_token_latency_seconds"].observe((now - answer.told_at) / num_new)
            else:
                self._seconds["time_to_first_token_seconds"].observe(now - began)
        if reason is None:
            return
        self._count_end(reason)
        self._seconds["e2e_request_latency_seconds"].observe(now - began)
        counts = {
            "prompt_tokens": len(request.prompt_ids),
            "prefix_cache_queries": len(request.prompt_ids),
            "prefix_cache_hits": request.num_reused,
            "spec_decode_num_drafts": sum(request.accepted_lengths.values()) if request.num_drafted else 0,
            "spec_decode_num_draft_tokens": request.num_drafted,
            "spec_decode_num_accepted_tokens": request.num_accepted,
        }
        for key, number in counts.items():
            self._counters[key].inc(number)
