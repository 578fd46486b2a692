"""Counters and times of a server in Prometheus's text format, under vLLM's names with a prefix of their own."""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from hf_specdec.common.observer import SpecStep
from hf_specdec.common.stats import SpecStats

PREFIX = "hf_specdec:"
# Upper bounds of a histogram's buckets, in seconds.
BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
GAUGES = {
    "num_requests_running": "Texts that are being decoded.",
    "num_requests_waiting": "Texts that wait for a place in the batch.",
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "generation_tokens": "Tokens of answers.",
    "request_success": "Texts that have ended, by the reason.",
    "request_failure": "Requests that were refused or have failed, by the status.",
    "spec_decode_num_drafts": "Verify steps.",
    "spec_decode_num_draft_tokens": "Tokens drafted.",
    "spec_decode_num_accepted_tokens": "Drafted tokens accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "Steps that accepted a drafted token at a position, counted from 0.",
    "spec_decode_num_draft_tokens_per_source": "Tokens drafted, by their source.",
    "spec_decode_num_accepted_tokens_per_source": "Drafted tokens accepted, by their source.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From the request to the first token of each text.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a text.",
    "e2e_request_latency_seconds": "From the request to the end of each text.",
}


class Metrics:
    """Counters and times of a server since it started.

    Args:
        model (`str`): its name, which labels each value.
    """

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self._counters: defaultdict[str, Counter[tuple[tuple[str, Any], ...]]] = defaultdict(Counter)
        self._times: dict[str, list[float]] = {name: [0.0] * (len(BUCKETS) + 1) for name in HISTOGRAMS}
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def add(self, name: str, value: int = 1, **labels: Any) -> None:
        """Add to a counter."""
        self._counters[name][tuple(labels.items())] += value

    def observe(self, name: str, seconds: float) -> None:
        """Add to a histogram."""
        self._times[name][next((place for place, most in enumerate(BUCKETS) if seconds <= most), -1)] += 1
        self._sums[name] += seconds

    def add_drafts(self, stats: SpecStats) -> None:
        """Add the drafts of a text."""
        self.add("spec_decode_num_drafts", stats.num_drafts)
        self.add("spec_decode_num_draft_tokens", stats.num_draft_tokens)
        self.add("spec_decode_num_accepted_tokens", stats.num_accepted_tokens)
        for position, count in enumerate(stats.accepted_per_position):
            self.add("spec_decode_num_accepted_tokens_per_pos", count, position=position)

    def add_step(self, step: SpecStep) -> None:
        """Add the sources of a step's drafts, as an observer of each text."""
        for node, drafted in enumerate(step.nodes, 1):
            self.add("spec_decode_num_draft_tokens_per_source", source=drafted.source)
            if node in step.path:
                self.add("spec_decode_num_accepted_tokens_per_source", source=drafted.source)

    def text(self, **gauges: int) -> str:
        """All values, with those of the gauges as they are now."""
        return "\n".join([*self._lines(gauges), ""])

    def _lines(self, gauges: dict[str, int]) -> Iterator[str]:
        for name, what in GAUGES.items():
            yield from self._head(name, what, "gauge")
            yield self._line(name, gauges[name])
        for name, what in COUNTERS.items():
            yield from self._head(f"{name}_total", what, "counter")
            for labels, value in sorted(self._counters[name].items()) or [((), 0)]:
                yield self._line(f"{name}_total", value, **dict(labels))
        for name, what in HISTOGRAMS.items():
            yield from self._head(name, what, "histogram")
            count = 0.0
            for most, found in zip([*map(str, BUCKETS), "+Inf"], self._times[name], strict=True):
                count += found
                yield self._line(f"{name}_bucket", count, le=most)
            yield self._line(f"{name}_sum", self._sums[name])
            yield self._line(f"{name}_count", count)

    @staticmethod
    def _head(name: str, what: str, kind: str) -> Iterator[str]:
        yield f"# HELP {PREFIX}{name} {what}"
        yield f"# TYPE {PREFIX}{name} {kind}"

    def _line(self, name: str, value: float, **labels: Any) -> str:
        told = {**self._labels, **labels}
        written = ",".join(f"{key}={json.dumps(str(one), ensure_ascii=False)}" for key, one in told.items())
        return f"{PREFIX}{name}{{{written}}} {float(value)}"


class RequestTimes:
    """Times of one request's texts, and what its line of the log tells.

    Attributes:
        told (`dict`): for the log.
    """

    def __init__(self, metrics: Metrics, told: dict[str, Any], started: float) -> None:
        self._metrics, self.told, self._started = metrics, told, started
        self._first: dict[int, float] = {}  # by text

    def add_tokens(self, index: int, count: int) -> None:
        """New tokens of a text."""
        self._metrics.add("generation_tokens", count)
        if index not in self._first:
            now = self._first[index] = time.perf_counter()
            self._metrics.observe("time_to_first_token_seconds", now - self._started)
            self.told.setdefault("seconds_to_first_token", round(now - self._started, 4))

    def end_text(self, index: int, stats: SpecStats, num_tokens: int, reason: str) -> None:
        """A text has ended."""
        now = time.perf_counter()
        self._metrics.add("request_success", finished_reason=reason)
        self._metrics.observe("e2e_request_latency_seconds", now - self._started)
        if num_tokens > 1:
            pause = (now - self._first[index]) / (num_tokens - 1)
            self._metrics.observe("request_time_per_output_token_seconds", pause)
        self._metrics.add_drafts(stats)
        self.told.setdefault("finish_reasons", []).append(reason)
        for name, count in (
            ("completion_tokens", num_tokens),
            ("draft_tokens", stats.num_draft_tokens),
            ("accepted_tokens", stats.num_accepted_tokens),
        ):
            self.told[name] = self.told.get(name, 0) + count
