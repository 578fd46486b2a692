"""Records of a race: lanes of tokens with their times and steps, and what watches a call of `generate` for them."""

import operator
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from hf_specdec.common.stats import SpecStep
from hf_specdec.tools.bench.measure import digest_of
from hf_specdec.tools.bench.rows import PLAIN, TRANSFORMERS
from hf_specdec.tools.bench.table import OVERALL, speed_table

COLUMNS = {OVERALL: "speed", "tokens/s": "tokens/s", "tokens/step": "tokens/step", "equal": "equal"}
NUM_CONTEXT = 8  # tokens of the prompt that decide how the first new ones are spelled
INCOMPLETE = "\ufffd"  # what a decoder writes for a part of a character


class Stop(threading.Event, StoppingCriteria):
    """An event that ends texts at their next token."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor, **kwargs: Any) -> torch.BoolTensor:
        """`(batch,)`: whether each text ends."""
        return torch.full((input_ids.shape[0],), self.is_set(), device=input_ids.device)  # type: ignore[return-value]


class Recorder:
    """Takes the time of every token, in seconds from the start without what observing takes, and keeps the steps."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self.token_ids: list[int] = []
        self.times: list[float] = []
        self.steps: list[SpecStep] = []
        self._observing = 0.0
        self._has_prompt = False
        self._start = time.perf_counter()

    def kwargs(self, *, observes: bool) -> dict[str, Any]:
        """Arguments of `generate`; the clock starts here."""
        kwargs: dict[str, Any] = {"streamer": self, "stopping_criteria": StoppingCriteriaList([self.stop])}
        if observes:
            kwargs["spec_observer"] = self.observe
        self._start = time.perf_counter()
        return kwargs

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then the tokens."""
        now = time.perf_counter()
        if self._has_prompt:
            self.times += [now - self._start - self._observing] * value.numel()
            self.token_ids += value.reshape(-1).tolist()
        self._has_prompt = True

    def end(self) -> None:
        """The text has ended."""

    def observe(self, step: SpecStep) -> None:
        """Keep a step, and leave the time of the earlier ones' observing out of the clock from here on."""
        began = time.perf_counter()
        self.steps.append(step)
        self._observing = step.observer_seconds + time.perf_counter() - began


class Words:
    """Texts of the tokens of one call, which continue the tokens of a prompt."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.context = list(prompt_ids[-NUM_CONTEXT:])

    def word(self, token: int) -> str:
        """Text of one token alone."""
        return self.decode([token])

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Text that each token adds; a character of several tokens belongs to the last of them."""
        ids, pieces = [*self.context, *tokens], list[str]()
        start, end = 0, len(self.context)  # the last complete piece, which decides how the next one is spelled
        for place in range(len(self.context), len(ids)):
            before, now = self.decode(ids[start:end]), self.decode(ids[start : place + 1])
            is_last = place == len(ids) - 1
            if now.endswith(INCOMPLETE) and not is_last and place - end < 4:
                pieces.append("")
                continue
            pieces.append(now[len(before) :])
            start, end = max(start, end - 1), place + 1
        return pieces

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones too."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


@dataclass(frozen=True, slots=True)
class Token:
    """One new token.

    Attributes:
        text (`str`): what it adds to the text.
        seconds (`float`): when it was there, from the start of the call.
        source (`str`): `"target"` for the target's choice, else where the accepted draft came from.
        step (`int`): number of the forward that brought it; 0 is the prompt's.
    """

    text: str
    seconds: float
    source: str
    step: int


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to continue the prompt.

    Attributes:
        label (`str`): its name.
        is_stopped (`bool`): whether it was stopped, or ran out of time, before its end.
        note (`str`): what else there is to know, such as why nothing was drafted.
    """

    label: str
    tokens: tuple[Token, ...]
    token_ids: tuple[int, ...]
    steps: tuple[SpecStep, ...] = ()
    is_stopped: bool = False
    note: str = ""

    @property
    def seconds(self) -> float:
        """Time of the last token."""
        return self.tokens[-1].seconds if self.tokens else 0.0

    @property
    def num_steps(self) -> int:
        """Forwards after the prompt's."""
        return self.tokens[-1].step if self.tokens else 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens over the time they took, the prompt's forward included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens of each forward after the prompt's, as `bench` counts them."""
        return (len(self.tokens) - 1) / self.num_steps if self.num_steps else 0.0

    @property
    def seconds_per_step(self) -> float:
        """Time of each forward after the prompt's."""
        return (self.seconds - self.tokens[0].seconds) / self.num_steps if self.num_steps else 0.0

    def num_before(self, number: int) -> int:
        """New tokens before step `number`, counted from 0."""
        return 1 + sum([len(step.accepted) for step in self.steps[:number]])


@dataclass(slots=True)
class Race:
    """Lanes of one prompt, which are added while the race runs.

    Attributes:
        labels (`tuple[str, ...]`): names of all lanes, in the order in which they run.
        facts (`dict[str, Any]`): model and machine, as in a header of `bench`.
        words (`Words`): spells the tokens.
        future: ends with the race; its `result` raises a `SpecError` where the model cannot do what is wanted.
        recorder: of the lane that runs now.
    """

    prompt: str
    is_chat: bool
    labels: tuple[str, ...]
    facts: dict[str, Any]
    words: Words
    lanes: list[Lane] = field(default_factory=list)
    future: "Future[None]" = field(default_factory=Future)
    recorder: Recorder | None = None

    def lane(self, label: str | None) -> Lane | None:
        """The lane of a name, if there is one."""
        return next((lane for lane in self.lanes if lane.label == label), None)

    @property
    def is_cut(self) -> bool:
        """True where the race was stopped before its end."""
        return len(self.lanes) < len(self.labels) or any(lane.is_stopped for lane in self.lanes)

    def ratio(self, lane: Lane) -> float | None:
        """Speed of a lane over that of transformers' `generate`; `None` where one of them was stopped."""
        baseline = self.lane(TRANSFORMERS)
        if baseline is None or lane.is_stopped or baseline.is_stopped or not baseline.seconds:
            return None
        return lane.tokens_per_second / baseline.tokens_per_second

    def num_equal(self, lane: Lane) -> int | None:
        """Tokens at the start of a lane that are those of plain decoding; `None` where that lane is missing."""
        plain = self.lane(PLAIN)
        if plain is None:
            return None
        return len(list(takewhile(bool, map(operator.eq, plain.token_ids, lane.token_ids))))

    def records(self) -> Iterator[dict[str, Any]]:
        """Records of the lanes that ended, as `bench` writes them: each call was watched and timed."""
        for lane in self.lanes:
            record = {
                "row": lane.label,
                "task": "prompt",
                "prompt": "prompt",
                "seconds": lane.seconds,
                "num_tokens": len(lane.tokens),
                "digest": digest_of([lane.token_ids]),
                "num_steps": lane.num_steps,
                "num_step_tokens": len(lane.tokens) - 1,
                "first_token_seconds": lane.tokens[0].seconds if lane.tokens else 0.0,
            }
            if not lane.is_stopped:
                yield from ({**record, "round": number} for number in (0, 1))

    def table(self) -> Any:
        """`pandas.DataFrame`: the table of speeds that `bench` prints; `None` before transformers' lane has ended."""
        records = list(self.records())
        if not records or records[0]["row"] != TRANSFORMERS:
            return None
        table = speed_table(records)
        table = table[[name for name in COLUMNS if name in table]].rename(columns=COLUMNS).round(2)
        return table.rename_axis("lane").reset_index()
