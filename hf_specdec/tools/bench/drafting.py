"""Cost of drafting a step on the host: prompt lookup as the context grows, and `auto` next to a model's forwards.

The context of prompt lookup is made up: tokens by Zipf's law, with passages copied from before, as in text. `auto`
decodes real prompts with fixed numbers of nodes, since it drafts from the model's logits.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.auto.config import AutoSpecConfig
from hf_specdec.methods.auto.drafter import AutoDrafter
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult
from hf_specdec.methods.common.node_logits import NodeLogits, read_logits
from hf_specdec.methods.prompt_lookup.config import PromptLookupConfig
from hf_specdec.methods.prompt_lookup.drafter import PromptLookupDrafter
from hf_specdec.tools.bench.conversation import encode, fitting
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.transformers_lookup import transformers_generator

NUM_NODES = (8, 16, 32, 64)
VOCAB_SIZE = 32_000
COPY_SHARE, COPY_LENGTH = 0.02, 12  # one token in fifty starts a passage that stood in the text before


CONTEXT_COLUMNS = {
    "context": "{context_length}",
    "a step": "{microseconds:.1f} us",
    "transformers": "{transformers_microseconds:.1f} us",
}
AUTO_COLUMNS = {
    "nodes": "{num_nodes}",
    "draft": "{draft_ms:.2f} ms",
    "observe": "{observe_ms:.2f} ms",
    "read logits": "{reduce_ms:.2f} ms",
    "tokens a step": "{tokens_per_step:.3f}",
}


def made_up_text(length: int) -> list[int]:
    """`length` tokens that repeat themselves about as much as written text does."""
    generator = random.Random(0)
    weights = list(accumulate(1 / rank for rank in range(1, VOCAB_SIZE + 1)))
    drawn = generator.choices(range(VOCAB_SIZE), cum_weights=weights, k=length)
    text: list[int] = []
    while len(text) < length:
        if len(text) > COPY_LENGTH and generator.random() < COPY_SHARE:
            start = generator.randrange(len(text) - COPY_LENGTH)
            text += text[start : start + COPY_LENGTH]
        else:
            text.append(drawn[len(text)])
    return text[:length]


def prompt_lookup_points(
    config: PromptLookupConfig, context_lengths: Sequence[int], num_steps: int = 200
) -> Iterator[dict[str, float]]:
    """Median seconds a step, one token accepted each: `draft_for` and `learn_from`, and transformers' `get_candidates`.

    Returns:
        `Iterator[dict]`: for each length `context_length`, `seconds`, `transformers_seconds`, and `begin_seconds`,
        which is spent once on indexing the prompt.
    """
    for length in context_lengths:
        text = made_up_text(length + num_steps)
        drafter = PromptLookupDrafter(config)
        start = time.perf_counter()
        drafter.begin(text[:length])
        begin_seconds = time.perf_counter() - start
        ours = statistics.median(_timed(_our_steps(drafter, config.node_budget, text[length:])))
        theirs = statistics.median(_timed(_transformers_steps(config, text, length)))
        yield {
            "context_length": length,
            "microseconds": 1e6 * ours,
            "transformers_microseconds": 1e6 * theirs,
            "begin_microseconds": 1e6 * begin_seconds,
        }


def _timed(steps: Iterator[Callable[[], Any]]) -> Iterator[float]:
    for step in steps:
        start = time.perf_counter()
        step()
        yield time.perf_counter() - start


def _our_steps(drafter: BaseDrafter, budget: int, tokens: Sequence[int]) -> Iterator[Callable[[], Any]]:
    request = DraftRequest(budget)
    for token in tokens:
        yield lambda token=token: drafter.learn_from(DraftResult(drafter.draft_for(request), [token]))  # type: ignore[misc]


def _transformers_steps(config: PromptLookupConfig, text: list[int], length: int) -> Iterator[Callable[[], Any]]:
    generator = transformers_generator(config.max_draft_len, config.max_matching_ngram_size)
    ids = torch.tensor([text])
    for end in range(length, len(text)):
        yield lambda end=end: generator.get_candidates(ids[:, :end])  # type: ignore[misc]


class TimedDrafter(BaseDrafter):
    """An `AutoDrafter` whose `draft_for` and `learn_from` are timed, in seconds of this thread.

    Attributes:
        seconds (`dict[str, float]`): of `"draft"`, of `"reduce"`, which is reading rows of logits as wide as the
            vocabulary, and of `"observe"` after that.
    """

    needs_logits = True

    def __init__(self, drafter: AutoDrafter) -> None:
        self.drafter = drafter
        self.seconds = {"draft": 0.0, "observe": 0.0, "reduce": 0.0}
        self.num_steps = self.num_tokens = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """See `BaseDrafter.begin`."""
        self.drafter.begin(prompt_ids)

    def draft_for(self, request: DraftRequest) -> DraftTree:
        """See `BaseDrafter.draft_for`."""
        start = time.thread_time()
        tree = self.drafter.draft_for(request)
        self.seconds["draft"] += time.thread_time() - start
        return tree

    def learn_from(self, result: DraftResult) -> None:
        """See `BaseDrafter.learn_from`."""
        assert result.logits is not None
        start, logits = time.thread_time(), result.logits.logits
        read = NodeLogits(logits, read_logits(logits, self.drafter.num_top_logits))
        reduced = time.thread_time()
        self.drafter.learn_from(replace(result, logits=read))
        if len(result.tree) > 1:  # not the prompt's
            self.seconds["reduce"] += reduced - start
            self.seconds["observe"] += time.thread_time() - reduced
            self.num_steps += 1
            self.num_tokens += len(result.accepted)

    def end(self) -> None:
        """See `BaseDrafter.end`."""
        self.drafter.end()


def auto_points(
    loaded: LoadedModel, prompts: Sequence[Prompt], *, max_new_tokens: int = 64
) -> Iterator[dict[str, float]]:
    """Milliseconds of thread time a step of `auto` with fixed numbers of nodes: drafting, observing, reading logits.

    Every second prompt is decoded first and fills the memory, one for each number of nodes; the others are counted.

    Returns:
        `Iterator[dict]`: for each number `num_nodes`, `draft_ms`, `observe_ms` without `reduce_ms`, and
        `tokens_per_step`.
    """
    known, _ = fitting(loaded, prompts, max_new_tokens)
    inputs = [encode(loaded, prompt) for prompt in [*known[::2], *known[1::2]]]
    num_fillers = len(known[::2]) if len(known) > 1 else 0
    for nodes in NUM_NODES:
        memory, config = SpecMemory(), AutoSpecConfig(num_nodes=nodes)
        drafters = []
        for own in inputs:
            drafters.append(TimedDrafter(AutoDrafter(config, memory)))
            loaded.model.generate(**own, max_new_tokens=max_new_tokens, do_sample=False, spec_method=drafters[-1])
        counted = drafters[num_fillers:]
        steps = max(sum(drafter.num_steps for drafter in counted), 1)
        per_step = {name: 1e3 * sum(d.seconds[name] for d in counted) / steps for name in counted[0].seconds}
        yield {
            "num_nodes": nodes,
            "draft_ms": per_step["draft"],
            "observe_ms": per_step["observe"],
            "reduce_ms": per_step["reduce"],
            "tokens_per_step": sum(drafter.num_tokens for drafter in counted) / steps,
        }
