"""Counters and times of a server for Prometheus, under vLLM's names with a prefix of their own."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.api.many_prompts.shared_batch import SharedBatch

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens of answers.",
    "request_success": "Texts that have ended, by the reason.",
    "request_failure": "Requests that were refused or have failed, by the status.",
    "spec_decode_num_drafts": "Verify steps.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Steps that accepted a drafted token at a position, from 0.",
}
LABELS = {
    "request_success": "finished_reason",
    "request_failure": "status",
    "spec_decode_num_accepted_tokens_per_pos": "position",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From the request to the first token.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a text.",
    "e2e_request_latency_seconds": "From the request to the end of the text.",
}


class Metrics:
    """Counters and times of a server since it started.

    Args:
        model (`str`): its name, which labels each value.
        batch: tells the texts that run and wait.
    """

    def __init__(self, model: str, batch: SharedBatch) -> None:
        self._model, self._registry, prefix = model, CollectorRegistry(), "hf_specdec:"
        self._metrics: dict[str, Any] = {}
        for name, text in COUNTERS.items():
            labels = ("model_name", LABELS[name]) if name in LABELS else ("model_name",)
            self._metrics[name] = Counter(prefix + name, text, labels, registry=self._registry)
        for name, text in HISTOGRAMS.items():
            labels = ("model_name",)
            self._metrics[name] = Histogram(prefix + name, text, labels, registry=self._registry, buckets=BUCKETS)
        for name, value in (("running", lambda: batch.num_running), ("waiting", lambda: batch.num_waiting)):
            gauge = Gauge(f"{prefix}num_requests_{name}", f"Texts {name}.", ("model_name",), registry=self._registry)
            gauge.labels(model).set_function(value)

    def text(self) -> bytes:
        """Return all values in Prometheus's text format."""
        return generate_latest(self._registry)

    def add(self, name: str, value: int = 1, *labels: object) -> None:
        """Add to a counter."""
        self._metrics[name].labels(self._model, *labels).inc(value)

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram."""
        self._metrics[name].labels(self._model).observe(seconds)

    def add_answer(self, result: ManyResult, reason: str, started: float, first: float) -> None:
        """Add a text that has ended, whose request and first token were at these times."""
        now, num_tokens, stats = time.perf_counter(), len(result.token_ids), result.stats
        self.add("request_success", 1, reason)
        self.add("generation_tokens", num_tokens)
        self.observe("time_to_first_token_seconds", first - started)
        self.observe("e2e_request_latency_seconds", now - started)
        if num_tokens > 1:
            self.observe("request_time_per_output_token_seconds", (now - first) / (num_tokens - 1))
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            self.add(f"spec_decode_{name}", getattr(stats, name))
        for position, count in enumerate(stats.accepted_per_position):
            self.add("spec_decode_num_accepted_tokens_per_pos", count, position)
