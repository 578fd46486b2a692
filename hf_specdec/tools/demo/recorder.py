"""Watches one call of `generate` and records it: a streamer for the times, an observer for the steps."""

import math
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from hf_specdec.common.observer import SpecStep
from hf_specdec.methods.lookahead.drafter import LookaheadView
from hf_specdec.tools.demo.record import Lane, Node, Step, Token

NUM_CONTEXT = 8  # tokens of the prompt that say how the first new ones are spelled
INCOMPLETE = "\ufffd"  # what a decoder writes for a part of a character


class Stop(StoppingCriteria):
    """Ends a text at the next token once it was asked to, or once its time is over."""

    def __init__(self) -> None:
        self._asked, self._deadline = threading.Event(), math.inf

    def begin(self, seconds: float) -> Self:
        """Let so much time be over from now on."""
        self._deadline = time.monotonic() + seconds
        return self

    def stop(self) -> None:
        """Ask for the end."""
        self._asked.set()

    @property
    def is_over(self) -> bool:
        """True where texts end now."""
        return self._asked.is_set() or time.monotonic() >= self._deadline

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any) -> torch.BoolTensor:
        """`(batch,)`: whether each text ends."""
        return torch.full((input_ids.shape[0],), self.is_over, device=input_ids.device)  # type: ignore[return-value]


class Words:
    """Texts of one call's tokens: each alone, and each as what it adds to a text.

    Args:
        tokenizer: of the model.
        prompt_ids: of the prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.context = list(prompt_ids[-NUM_CONTEXT:])
        self._known: dict[int, str] = {}

    def word(self, token: int) -> str:
        """The text of one token alone."""
        if token not in self._known:
            self._known[token] = self._decode([token])
        return self._known[token]

    def all(self, tokens: Iterable[int]) -> tuple[str, ...]:
        """The texts of several, each alone."""
        return tuple([self.word(token) for token in tokens])

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text that each token adds; a character of several tokens belongs to the last of them."""
        ids, pieces = [*self.context, *tokens], list[str]()
        start, end = 0, len(self.context)  # the last complete piece, which says how the next one is spelled
        for place in range(len(self.context), len(ids)):
            before, now = self._decode(ids[start:end]), self._decode(ids[start : place + 1])
            is_last = place == len(ids) - 1
            if now.endswith(INCOMPLETE) and not is_last and place - end < 4:
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            start, end = max(start, end - 1), place + 1
        return pieces

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


class Recorder:
    """Takes the time of every token, and keeps what the steps show; texts are made of it afterwards.

    The clock leaves out what observing takes, which plain generate has not.

    Args:
        tokenizer: of the model.
        prompt_ids: of the prompt.
        stop: ends the call early.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], stop: Stop) -> None:
        self.words, self.stop = Words(tokenizer, prompt_ids), stop
        self.token_ids: list[int] = []
        self._times: list[float] = []
        self._steps: list[SpecStep] = []
        self._observing = 0.0
        self._saw_prompt = False
        self._start = time.perf_counter()

    def arguments(self, *, observes: bool) -> dict[str, Any]:
        """Arguments of `generate`; the clock starts when they are asked for."""
        found: dict[str, Any] = {"streamer": self, "stopping_criteria": StoppingCriteriaList([self.stop])}
        if observes:
            found["spec_observer"] = self.observe
        self._start = time.perf_counter()
        return found

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then the tokens."""
        now = time.perf_counter()
        if not self._saw_prompt:
            self._saw_prompt = True
            return
        self._times.append(now - self._start - self._observing)
        self.token_ids += value.reshape(-1).tolist()

    def end(self) -> None:
        """Nothing more will come."""

    def observe(self, step: SpecStep) -> None:
        """Keep a step, and leave the time of the earlier ones' observing out of the clock from here on."""
        began = time.perf_counter()
        self._steps.append(step)
        self._observing = step.observer_seconds + time.perf_counter() - began

    def lane(self, method: str, label: str, *, is_cut: bool) -> Lane:
        """The record; `is_cut` says that the call was ended early."""
        sources, places = ["target"], [-1]
        if self._steps:
            for index, step in enumerate(self._steps):
                drafted = [step.nodes[node - 1].source if step.nodes else "draft" for node in step.path[1:]]
                sources += [*drafted, "target"]
                places += [index] * len(step.accepted)
        else:
            sources, places = ["target"] * len(self.token_ids), list(range(-1, len(self.token_ids) - 1))
        pieces = self.words.pieces(self.token_ids)
        tokens = [Token(*each) for each in zip(pieces, self._times, sources, places, strict=True)]
        return Lane(method, label, tuple(tokens), tuple(self.token_ids), self._recorded_steps(), is_stopped=is_cut)

    def _recorded_steps(self) -> tuple[Step, ...]:
        steps, num_before = [], 1
        for step in self._steps:
            steps.append(_recorded(step, self.words, num_before))
            num_before += len(step.accepted)
        return tuple(steps)


def _recorded(step: SpecStep, words: Words, num_before: int) -> Step:
    tree, path = step.tree, set(step.path)
    nodes = [Node(-1, words.word(tree.tokens[0]), is_accepted=True)]
    for number in range(1, len(tree)):
        place, text, is_accepted = tree.parents[number], words.word(tree.tokens[number]), number in path
        if not step.nodes:
            nodes.append(Node(place, text, "draft", is_accepted=is_accepted))
            continue
        described = step.nodes[number - 1]
        nodes.append(Node(place, text, described.source, described.probability, is_accepted, described.votes))
    window: tuple[tuple[str, ...], ...] = ()
    pool: list[tuple[str, tuple[tuple[str, ...], ...]]] = []
    if isinstance(step.view, LookaheadView):
        window = tuple(words.all(level) for level in step.view.window)
        pool = [(words.word(key), tuple(words.all(tail) for tail in tails)) for key, tails in step.view.pool.items()]
    return Step(
        nodes=tuple(nodes),
        tokens=words.all(step.accepted),
        num_columns=tree.num_columns,
        num_before=num_before,
        draft_seconds=step.draft_seconds,
        verify_seconds=step.verify_seconds,
        commit_seconds=step.commit_seconds,
        window=window,
        pool=tuple(pool),
    )
