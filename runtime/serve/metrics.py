"""Prometheus metrics, by vLLM's names where they mean the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calls import ServedAnswer

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
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
    "inter_token_latency_seconds": "Seconds between two deliveries of an answer's tokens.",
    "e2e_request_latency_seconds": "Seconds of an answer.",
}


class Metrics:
    """Metrics of one server."""

    def __init__(self) -> None:
        from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

        self.registry, self.kind = CollectorRegistry(), CONTENT_TYPE_LATEST

    def begin(self, name: str, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Count from now on, for a model's name; ``running`` and ``waiting`` count answers when they are asked for."""
        from prometheus_client import Counter, Gauge, Histogram

        label: dict[str, Any] = {"labelnames": ("model_name",), "registry": self.registry}
        self._counters = {key: Counter(f"vllm:{key}", text, **label).labels(name) for key, text in _COUNTERS.items()}
        self._seconds = {
            key: Histogram(f"vllm:{key}", text, buckets=_SECONDS, **label).labels(name)
            for key, text in _HISTOGRAMS.items()
        }
        label["labelnames"] = ("model_name", "finished_reason")
        ended = Counter("vllm:request_success", "Answers by what ended them.", **label)
        self._ended, self._name = ended, name
        label["labelnames"] = ("model_name",)
        for key, count in (("running", running), ("waiting", waiting)):
            gauge: Any = Gauge(f"vllm:num_requests_{key}", f"Answers that are {key}.", **label).labels(name)
            gauge.set_function(count)

    def see(self, answer: ServedAnswer, num_new: int, reason: str | None, now: float) -> None:
        """Take new tokens of an answer, and why it ended if it did, before it is told of them."""
        request, began = answer.request, answer.call.began
        if num_new:
            self._counters["generation_tokens"].inc(num_new)
            key, since = ("inter_token_latency", answer.told_at) if answer.token_ids else ("time_to_first_token", began)
            self._seconds[f"{key}_seconds"].observe(now - since)
        if reason is None:
            return
        self._ended.labels(self._name, reason).inc()
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

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them; ``kind`` is the type of that text."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)
