"""Record of a race, as plain data: lanes of tokens with their times, and steps with their trees.

Knows neither models nor pages; `to_dict` is JSON.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hf_specdec.common.observer import SourceVote

PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Token:
    """One new token.

    Attributes:
        text (`str`): what it adds to the text.
        seconds (`float`): when it was there, from the start of the call.
        source (`str`): `"target"` for the target's own choice, else where the accepted draft came from.
        step (`int`): the verify step that brought it; -1 for the prompt's forward. Plain generate has one a token.
    """

    text: str
    seconds: float
    source: str
    step: int


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a draft tree.

    Attributes:
        parent (`int`): its parent's place; -1 for the root.
        text (`str`): its token.
        source (`str`): where it came from; empty for the root.
        probability (`float | None`): that it would be accepted with all before it, as estimated when it was drafted.
        is_accepted (`bool`): whether it is part of the text now.
        votes (`tuple[SourceVote, ...]`): what each source of a blend said of it.
    """

    parent: int
    text: str
    source: str = ""
    probability: float | None = None
    is_accepted: bool = False
    votes: tuple[SourceVote, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One verify step.

    Attributes:
        nodes (`tuple[Node, ...]`): the verified tree, the root first.
        tokens (`tuple[str, ...]`): what the step added; the last one is the target's own choice.
        num_columns (`int`): tokens of the forward: nodes, and those of a window.
        num_before (`int`): new tokens that were there before the step.
        draft_seconds, verify_seconds, commit_seconds (`float`): where its time went.
        window (`tuple[tuple[str, ...], ...]`): lookahead's window after the step, level by level.
        pool (`tuple[tuple[str, tuple[tuple[str, ...], ...]], ...]`): n-grams of the window's first level in the pool:
            the first token, and the tails.
    """

    nodes: tuple[Node, ...]
    tokens: tuple[str, ...]
    num_columns: int
    num_before: int
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    window: tuple[tuple[str, ...], ...] = ()
    pool: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = ()

    @property
    def seconds(self) -> float:
        """All of the step."""
        return self.draft_seconds + self.verify_seconds + self.commit_seconds


@dataclass(frozen=True, slots=True)
class Lane:
    """One way to continue the prompt.

    Attributes:
        method (`str`): `"plain"` or a method.
        label (`str`): its name for people.
        token_ids (`tuple[int, ...]`): the new tokens.
        is_stopped (`bool`): whether it was stopped, or ran out of time, before its end.
        num_equal (`int | None`): tokens at its start that are plain's; `None` where there is nothing to compare with.
        note (`str`): what else there is to know, such as why nothing was drafted.
    """

    method: str
    label: str
    tokens: tuple[Token, ...]
    token_ids: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    is_stopped: bool = False
    num_equal: int | None = None
    note: str = ""

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return self.tokens[-1].seconds if self.tokens else 0.0

    @property
    def num_forwards(self) -> int:
        """The target's forwards, the prompt's counted."""
        return len({token.step for token in self.tokens})

    @property
    def tokens_per_second(self) -> float:
        """New tokens over the time they took, the prompt's forward included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_step(self) -> float:
        """New tokens a forward of the target."""
        return len(self.tokens) / self.num_forwards if self.tokens else 0.0

    def accepted_by_position(self) -> list[tuple[int, int]]:
        """For draft depth 1, 2, ...: steps that drafted so deep, and steps that accepted a token there."""
        counts: list[list[int]] = []
        for step in self.steps:
            depths = [0]
            for node in step.nodes[1:]:
                depths.append(depths[node.parent] + 1)
            for depth in range(1, max(depths) + 1):
                if len(counts) < depth:
                    counts.append([0, 0])
                counts[depth - 1][0] += 1
                counts[depth - 1][1] += len(step.tokens) > depth
        return [(drafted, accepted) for drafted, accepted in counts]


@dataclass(frozen=True, slots=True)
class Race:
    """Plain generate's lane and those of the methods.

    Attributes:
        prompt (`str`): the prompt's text.
        model (`dict[str, Any]`): facts about model and machine.
        settings (`dict[str, Any]`): what was asked for.
        is_exact (`bool`): whether the methods' tokens have to be plain's: weights in fp32.
    """

    prompt: str
    lanes: tuple[Lane, ...]
    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = True

    @property
    def plain(self) -> Lane:
        """Lane that the others are compared with."""
        return self.lanes[0]

    def ratio(self, lane: Lane) -> float | None:
        """The lane's tokens a second over plain's; `None` where one of them was stopped."""
        if lane.is_stopped or self.plain.is_stopped or not self.plain.tokens_per_second:
            return None
        return lane.tokens_per_second / self.plain.tokens_per_second

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values."""
        document = dataclasses.asdict(self)
        for lane, own in zip(self.lanes, document["lanes"], strict=True):
            own |= {
                "seconds": lane.seconds,
                "num_forwards": lane.num_forwards,
                "tokens_per_second": lane.tokens_per_second,
                "tokens_per_step": lane.tokens_per_step,
                "ratio_to_plain": self.ratio(lane),
            }
        return document
