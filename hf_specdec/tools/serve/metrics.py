"""Counters and times of a server for Prometheus, under vLLM's names with a prefix of their own."""

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hf_specdec.api.many_prompts.job import ManyResult
from hf_specdec.api.many_prompts.shared_batch import SharedBatch

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
COUNTERS = {  # their labels next to the model's name, and what they count
    "prompt_tokens": ((), "Tokens of prompts."),
    "generation_tokens": ((), "Tokens of answers."),
    "request_success": (("finished_reason",), "Texts that have ended, by the reason."),
    "request_failure": (("status",), "Requests that were refused or have failed, by the status."),
    "spec_decode_num_drafts": ((), "Verify steps."),
    "spec_decode_num_draft_tokens": ((), "Tokens drafted."),
    "spec_decode_num_accepted_tokens": ((), "Drafted tokens accepted."),
    "spec_decode_num_accepted_tokens_per_pos": (("position",), "Steps that accepted a token at a position, from 0."),
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From the request to the first token.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a text.",
    "e2e_request_latency_seconds": "From the request to the end of the text.",
}


class Metrics:
    """Counters and times since the server started; the model's name labels each value."""

    def __init__(self, model: str, batch: SharedBatch) -> None:
        self._model, self.registry = model, CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        for name, (labels, text) in COUNTERS.items():
            self._metrics[name] = self._made(Counter, name, text, labels)
        for name, text in HISTOGRAMS.items():
            self._metrics[name] = self._made(Histogram, name, text, buckets=BUCKETS)
        for name, value in (("running", lambda: batch.num_running), ("waiting", lambda: batch.num_waiting)):
            self._made(Gauge, f"num_requests_{name}", f"Texts {name}.").labels(model).set_function(value)

    def _made(self, kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
        return kind(f"hf_specdec:{name}", text, ("model_name", *labels), registry=self.registry, **options)

    def add(self, name: str, value: int = 1, *labels: object) -> None:
        """Add to a counter."""
        self._metrics[name].labels(self._model, *labels).inc(value)

    def add_answer(self, result: ManyResult, reason: str, started: float, first: float) -> None:
        """Add a text that has ended, whose request and first token were at these times."""
        now, num_tokens, stats = time.perf_counter(), len(result.token_ids), result.stats
        self.add("request_success", 1, reason)
        self.add("generation_tokens", num_tokens)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            self.add(f"spec_decode_{name}", getattr(stats, name))
        for position, count in enumerate(stats.accepted_per_position):
            self.add("spec_decode_num_accepted_tokens_per_pos", count, position)
        per_token = (now - first) / (num_tokens - 1) if num_tokens > 1 else None
        for name, seconds in zip(HISTOGRAMS, (first - started, per_token, now - started), strict=True):
            if seconds is not None:
                self._metrics[name].labels(self._model).observe(seconds)
