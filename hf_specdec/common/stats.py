"""Plan of a call, its counters and seconds by vLLM's names and rules, and records of its steps for an observer.

out = model.generate(..., return_dict_in_generate=True, spec_method="prompt_lookup")
print(out.spec_stats.plan)
out.spec_stats.mean_acceptance_length

def show(step):
    for token, node in zip(step.tree.tokens[1:], step.nodes):
        print(token, node.source, node.probability)

model.generate(**inputs, spec_method="auto", spec_observer=show)
"""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self

import torch

from hf_specdec.common.tree import DraftTree

LOOPS = {
    "spec": "this package's loop",
    "assisted": "transformers' assisted decoding",
    "transformers": "transformers' own loop",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """Plan of one call: the way it is decoded, with the reason; made once, before its first forward.

    Attributes:
        way (`str`): what a forward of the target verifies: `"tree"`, `"chain"`, or `"plain"` for one token.
        reason (`str`): why it is this way.
        method (`str`): the method's name; empty for a drafter of the user's own.
        loop (`str`): `"spec"` is this package's, `"assisted"` transformers' assisted decoding, `"transformers"` its own
            greedy search, sampling or `generate`.
        network (`str | None`): class of the draft model or head; `None` without one.
        budget (`int`): most drafted tokens of a row and step.
        budget_reason (`str`): why as many.
        num_rows (`int`): sequences of the call.
        shares_batch (`bool`): whether it is a prompt of `generate_many` that shares a batch with others.
        cache (`str`): `"dynamic"`, `"static"`, or the class of another cache.
        widths (`tuple[int, ...]`): tokens of each row that forwards after the prompt have, over a static cache.
        capacity (`int`): columns of its buffers.
        is_compiled (`bool`): whether these forwards are compiled.
        is_head_compiled (`bool`): whether those of the draft head are, too.
        rounding_reason (`str | None`): why a token's logits may be rounded otherwise beside other tokens than alone, so
            that another token may be chosen where two are nearly alike; `None` where they are the same bits in every
            forward after the prompt's, and so is the text of every method.
        notes (`tuple[str, ...]`): what the log says once of the model in such a call.
    """

    way: Literal["tree", "chain", "plain"]
    reason: str
    method: str = ""
    loop: Literal["spec", "assisted", "transformers"] = "spec"
    network: str | None = None
    budget: int = 0
    budget_reason: str = ""
    num_rows: int = 1
    shares_batch: bool = False
    cache: str = "dynamic"
    widths: tuple[int, ...] = ()
    capacity: int = 0
    is_compiled: bool = False
    is_head_compiled: bool = False
    rounding_reason: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def plain_reason(self) -> str | None:
        """Reason to decode the call without this package's speculation; `None` where it speculates."""
        return self.reason if self.loop == "transformers" else None

    def lines(self) -> dict[str, str]:
        """Lines that `print` shows, by their names."""
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        if self.shares_batch:
            rows = "1 row of a shared batch"
        lines = {
            "way": f"{self.way}: {self.reason}",
            "method": f"{self.method or 'a drafter of your own'}, in {LOOPS[self.loop]}",
        }
        if self.loop != "transformers":
            lines["budget"] = f"{self.budget} drafted tokens a row and step: {self.budget_reason}"
            lines["network"] = f"{self.network or 'none'}{', compiled' if self.is_head_compiled else ''}"
            lines["rounding"] = self.rounding_reason or "the same bits for any number of tokens in a forward"
        lines["shapes"] = f"{self.cache} cache, {rows}"
        if self.widths:
            widths = ", ".join(map(str, self.widths))
            kind = "compiled" if self.is_compiled else "not compiled"
            lines["shapes"] += f"; forwards of {widths} tokens a row over {self.capacity} columns, {kind}"
        return lines

    def __str__(self) -> str:
        return "\n".join(f"{name:10}{text}" for name, text in self.lines().items())

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


@dataclass(slots=True)
class SpecStats:
    """Counters of one `generate` call.

    Attributes:
        method (`str`): the method's name.
        tier (`str`): how the model was driven: `"tree"`, `"chain"` or `"plain"`.
        num_cached_tokens (`int`): tokens of the prompt whose keys and values were kept of another text.
        num_tokens (`int`): tokens emitted; in a batch that is decoded plainly, the padding of finished rows too.
        num_drafts (`int`): verify steps, the prompt's forward not counted; in a batch, those of all rows.
        num_forwards (`int`): the target's forwards, the prompt's not counted: in a batch, one for all rows.
        num_draft_tokens (`int`): tokens drafted.
        num_accepted_tokens (`int`): drafted tokens that were emitted.
        num_forced_tokens, num_accepted_forced_tokens (`int`): of these, tokens that a grammar forced and the method had
            not drafted itself.
        accepted_per_position (`list[int]`): how many steps accepted a draft token at depth 1, 2, ...
        prefill_seconds, draft_seconds, verify_seconds, commit_seconds (`float`):
            time in the prompt's forward, in the drafter, in the target's forwards, and in choosing tokens and
            moving the cache. Seconds are of the host; on a GPU the forward's own time shows up where the host waits.
        peak_tree_size (`int`): most nodes verified at once, the root counted.
        seeds (`list[int] | None`): of a sampled batch: row r draws what plain generation of its prompt alone draws
            after `torch.manual_seed(seeds[r])`.
        num_graphs (`int`): graphs that torch has made for the model and its draft model or head, in earlier calls too;
            0 where nothing is compiled.
        compile_seconds (`float`): what this call spent on forwards that compile, and on accelerators on the first two
            of each shape, in which CUDA graphs are recorded.
        num_replayed (`int`): forwards after the prompt's that the core replayed from a record, on CPUs.
        record_reason (`str | None`): why the model's own code computed the others, where they cannot be recorded.
        plain_reason (`str | None`): why the engine decoded without speculation, if it did.
        plan (`CallPlan | None`): how the call was decoded, and why; `None` where nothing was decoded.
    """

    method: str = "plain"
    tier: str = "plain"
    num_cached_tokens: int = 0
    num_tokens: int = 0
    num_drafts: int = 0
    num_forwards: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    num_accepted_forced_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0
    peak_tree_size: int = 0
    seeds: list[int] | None = None
    num_graphs: int = 0
    compile_seconds: float = 0.0
    num_replayed: int = 0
    record_reason: str | None = None
    plain_reason: str | None = None
    plan: CallPlan | None = None

    @classmethod
    def of(cls, plan: CallPlan) -> Self:
        """Counters of a call that has this plan, all at 0."""
        return cls(method=plan.method, tier=plan.way, plain_reason=plan.plain_reason, plan=plan)

    def record_step(self, num_drafted: int, num_accepted: int) -> None:
        """Count one verify step that drafted `num_drafted` tokens, `num_accepted` of which were emitted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        self.peak_tree_size = max(self.peak_tree_size, num_drafted + 1)
        while len(self.accepted_per_position) < num_accepted:
            self.accepted_per_position.append(0)
        for depth in range(num_accepted):
            self.accepted_per_position[depth] += 1

    def record_forced(self, num_drafted: int, num_accepted: int) -> None:
        """Count the tokens of a step that a grammar drafted."""
        self.num_forced_tokens += num_drafted
        self.num_accepted_forced_tokens += num_accepted

    @property
    def acceptance_rate(self) -> float:
        """Accepted draft tokens over drafted ones; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_rate_per_position(self) -> list[float]:
        """Share of verify steps that accepted a draft token at depth 1, 2, ..."""
        return [count / self.num_drafts for count in self.accepted_per_position] if self.num_drafts else []

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a verify step, 1 + accepted / drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    def to_dict(self) -> dict[str, Any]:
        """All counters and rates as JSON values."""
        names = (*self.__slots__, "acceptance_rate", "acceptance_rate_per_position", "mean_acceptance_length")
        values = {name: getattr(self, name) for name in names}
        return values | {"plan": None if self.plan is None else self.plan.to_dict()}


class SpecOutput(Protocol):
    """Output of `generate(..., return_dict_in_generate=True)`: transformers' output with `spec_stats`, for types.

    The other fields are those of transformers' `GenerateDecoderOnlyOutput` or `GenerateEncoderDecoderOutput`.

    Attributes:
        sequences (`torch.LongTensor` of shape `(batch_size, length)`): prompts and new tokens.
        cache (`Cache`): from transformers 5.24 on.
        past_key_values (`Cache`): the same, and its only name before.
        spec_stats (`SpecStats`): what was drafted and accepted.
    """

    sequences: torch.Tensor
    scores: tuple[torch.Tensor, ...] | None
    logits: tuple[torch.Tensor, ...] | None
    cache: Any
    past_key_values: Any
    spec_stats: SpecStats


@dataclass(frozen=True, slots=True)
class SourceVote:
    """Prediction of one source for a drafted token, where a method blends several.

    Attributes:
        source (`str`): which.
        probability (`float`): of the token after its parent, by this source alone.
        weight (`float`): log odds that it added to the blend.
    """

    source: str
    probability: float
    weight: float


@dataclass(frozen=True, slots=True)
class DraftedNode:
    """Origin of one drafted node.

    Attributes:
        source (`str`): `"text"`, `"earlier_texts"`, `"recycled_logits"`, `"window"`, `"draft_model"`, `"grammar"` for
            forced tokens, or the head's
            method: `"eagle3"`, `"mtp"` or `"dflash"`; of a blend, the source that added most.
        probability (`float | None`): that the target accepts the node and all before it, as its drafter estimated;
            `None` where it estimates nothing.
        votes (`tuple[SourceVote, ...]`): what each source of a blend said of it.
    """

    source: str
    probability: float | None = None
    votes: tuple[SourceVote, ...] = ()


@dataclass(frozen=True, slots=True)
class SpecStep:
    """One verify step of one row, as `spec_observer` sees it.

    Attributes:
        index (`int`): number of the step, from 0.
        tree (`DraftTree`): what was drafted; `tree.tokens[0]` was the last token of the text.
        accepted (`tuple[int, ...]`): the tokens that the step added to the text.
        path (`tuple[int, ...]`): nodes of the tree that are part of the text now, the root first.
        draft_seconds, verify_seconds, commit_seconds (`float`): where the step's time went, all rows together.
        row (`int`): row of the batch.
        nodes (`tuple[DraftedNode, ...]`): where each drafted node of `tree` came from, node 1 first; empty where the
            drafter does not say.
        observer_seconds (`float`): time that observing took in the steps before this one, for clocks to leave out.
    """

    index: int
    tree: DraftTree
    accepted: tuple[int, ...]
    path: tuple[int, ...]
    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    row: int = 0
    nodes: tuple[DraftedNode, ...] = ()
    observer_seconds: float = 0.0
