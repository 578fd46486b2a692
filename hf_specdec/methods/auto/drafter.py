"""Auto: one predictor over all training-free sources, and a draft model where one is given.

The tree grows best first, by the probability that the target accepts a node and all before it. How many nodes pay is
not decided here: nodes come in the order of their worth, with their probabilities, and whoever verifies them cuts.
A draft model is asked where the nodes that it adds are worth its forward, judged by what its forwards added before.
Knows neither clocks nor models.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, get_args

import torch

from hf_specdec.common.stats import DraftedNode
from hf_specdec.common.tree import DraftTree
from hf_specdec.errors import ConfigError
from hf_specdec.methods.auto.recycled_logits import MAX_KEY, NUM_KEPT, NUM_LIKELIEST
from hf_specdec.methods.auto.search import DraftSource, Likeliest, NoiseRow, Search, Sources
from hf_specdec.methods.auto.spec_memory import SpecMemory
from hf_specdec.methods.common.config import (
    MAX_STEP_TOKENS,
    Pool,
    SpecConfig,
    check_choice,
    check_devices,
    check_positive,
)
from hf_specdec.methods.common.draft_scorer import DraftRound, DraftScorer, RoundDrafter
from hf_specdec.methods.common.drafter import DraftCost, DraftRequest, DraftResult
from hf_specdec.methods.common.ngrams import NgramIndex
from hf_specdec.methods.common.node_logits import Array, NodeLogits
from hf_specdec.methods.common.sampling import LogitsProcessorFn

MAX_NGRAM = 4
SMALLEST = 1e-3  # nodes below this probability are never worth a look
TILE = 4  # tokens that a forward computes at once, the text's last among them
FIRST_LEVELS, MOST_LEVELS = 3, 16  # of draws whose noise is looked at; a row of a large vocabulary takes milliseconds
PROMPT_TOKENS = 1_024  # of a prompt whose logits are kept
RETRIED = 0.015  # tokens a step that asking the draft model where it does not pay may lose, to notice a change


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AutoSpecConfig(SpecConfig):
    """Auto: all training-free sources in one predictor, a draft model when given, and as many nodes as save time.

    Args:
        max_nodes (`int`, *optional*, defaults to `64`):
            Most drafted tokens a step, where `num_nodes` is not given.
        num_nodes (`int`, *optional*):
            Draft this many tokens every step, whatever they cost; fewer only where no more have a chance of one in a
            thousand. It takes the place of `max_nodes`. `None` drafts as many as save time, or none.
        pool (`str`, *optional*, defaults to `"shared"`):
            `"shared"` remembers texts, logits and what was learned for later calls on this model; `"request"` keeps
            nothing after a call. A `SpecMemory` that `enable` is given has its bounds.
        draft_len (`int`, *optional*, defaults to `6`):
            Most forwards of the draft model a step, where `assistant_model` is given; fewer where they save no time.
        deterministic (`bool`, *optional*):
            Whether the same call drafts the same tokens each time: sizes follow from what is assumed of the device,
            never from the clock, and nothing is remembered from call to call. `None` is `True` where
            `torch.use_deterministic_algorithms` is on.
        draft_model_device_list (`list[int | str]`, *optional*):
            Devices of the draft model, as for `spec_method="draft_model"`.
        target_model_device_list (`list[int | str]`, *optional*):
            Devices of the target.
    """

    max_nodes: int = 64
    num_nodes: int | None = None
    pool: Pool = "shared"
    draft_len: int = 6
    deterministic: bool | None = None
    draft_model_device_list: Sequence[int | str] | None = None
    target_model_device_list: Sequence[int | str] | None = None

    device_fields: ClassVar[Mapping[str, str]] = {
        "target": "target_model_device_list",
        "draft": "draft_model_device_list",
    }

    def __post_init__(self) -> None:
        SpecConfig.__post_init__(self)
        check_positive("max_nodes", self.max_nodes, "The default is 64.", most=MAX_STEP_TOKENS)
        if self.num_nodes is not None:
            check_positive("num_nodes", self.num_nodes, "Use `None` for as many as save time.", most=MAX_STEP_TOKENS)
        check_choice("pool", self.pool, get_args(Pool))
        check_positive("draft_len", self.draft_len, "Usual values are 2 to 8.", most=MAX_STEP_TOKENS)
        if self.deterministic is not None and not isinstance(self.deterministic, bool):
            remedy = "Leave it out to follow torch.use_deterministic_algorithms."
            raise ConfigError("deterministic", "must be True, False or None", self.deterministic, remedy)
        check_devices("draft_model_device_list", self.draft_model_device_list)
        check_devices("target_model_device_list", self.target_model_device_list)

    @property
    def node_budget(self) -> int:
        """Most drafted tokens a step, the root not counted."""
        return self.max_nodes if self.num_nodes is None else self.num_nodes

    @property
    def fits_costs(self) -> bool:
        """True if each step drafts as many tokens as pay, by what the target's forwards cost."""
        return self.num_nodes is None

    @property
    def is_deterministic(self) -> bool:
        """True if what is drafted follows from the call alone."""
        if self.deterministic is None:
            return torch.are_deterministic_algorithms_enabled()
        return self.deterministic


class AutoDrafter(RoundDrafter):
    """Drafts with everything at hand.

    Args:
        config: see `AutoSpecConfig`.
        memory: what is remembered; `None` is a memory of this text alone.
        scorer: the draft model with this row's text, if there is one.
        logits_processor: the call's logits processors for the draft model, when sampling.
        is_sampled: whether tokens are drawn.
        takes_trees: whether the target verifies siblings; where not, a chain is grown.
    """

    num_top_logits: int
    num_prompt_logits = PROMPT_TOKENS
    index: NgramIndex
    _search: Search | None  # of the step under way
    _described: Search | None  # the last one, for observers
    _drafts: list[Likeliest | None]  # what would have been drafted before each forward of a step, and what was

    def __init__(
        self,
        config: AutoSpecConfig,
        memory: SpecMemory | None = None,
        *,
        scorer: DraftScorer | None = None,
        logits_processor: LogitsProcessorFn | None = None,
        is_sampled: bool = False,
        takes_trees: bool = True,
    ) -> None:
        super().__init__(scorer)
        self.draft = None if scorer is None else DraftSource(scorer, logits_processor)
        self.config, self.takes_trees, self.is_sampled = config, takes_trees, is_sampled
        self.num_top_logits = NUM_KEPT if is_sampled else NUM_LIKELIEST
        self.remembers = memory is not None
        self._request = DraftRequest(0)  # of the step under way
        self._start(SpecMemory(1) if memory is None else memory)

    @property
    def _cost(self) -> DraftCost:
        return self._request.cost

    @property
    def is_paused(self) -> bool:
        """True if no draft can gain its time now: then nothing is looked up and no logits are read."""
        return self._cost.of_node >= 1.0

    @property
    def needs_logits(self) -> bool:  # type: ignore[override]
        """True if the next step's logits are kept."""
        return not self.is_paused

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Index the prompt."""
        self._start(self.memory if self.remembers else SpecMemory(1))
        self.index.extend(prompt_ids)
        if self.draft is not None:
            self.draft.begin(prompt_ids)

    def learn_prompt(self, tokens: Array, log_probs: Array) -> None:
        """Keep the target's logits of the prompt's last tokens."""
        text, first = self.index.tokens, len(self.index) - 1 - len(tokens)
        before = text[max(first - MAX_KEY + 1, 0) : first]
        parents = list(range(-1, len(tokens) - 1))
        self.memory.recycled.put_nodes(text[first:-1], parents, before, tokens, log_probs)

    def grow(self, request: DraftRequest) -> DraftRound:
        """Grow a tree of the likeliest nodes; the draft model is asked as often as that pays."""
        self._request, budget = request, min(request.budget, self.config.node_budget)
        if budget < 1 or self.is_paused:
            self._search = None
            return DraftTree.chain(self.index.tokens[-1])
        max_depth, noise = request.max_depth, self._known_noise()
        search = Search(self.sources, self.index, takes_trees=self.takes_trees, max_depth=max_depth, noise=noise)
        self._search = self._described = search
        likeliest = search.likeliest(budget, self._floor)
        if self.draft is None:
            return self._tree_of(likeliest)
        self.draft.start(self.index.tokens, request.noise, max_depth)
        without: list[Likeliest | None] = []  # what would have been drafted without each forward; `None` for nothing
        while len(without) < self.config.draft_len:
            wanted = self.draft.request(search, likeliest) if self._pays(len(without)) else None
            if wanted is None:
                break
            without.append(likeliest if self._worth(search, likeliest)[0] > 0.0 else None)
            self.draft.read(search, (yield wanted))
            likeliest = search.likeliest(budget, self._floor)
        self._drafts = [*without, likeliest] if without else []
        return self._tree_of(likeliest)

    def learn_from(self, result: DraftResult) -> None:
        """Learn what the sources were worth, keep the logits, index the new tokens."""
        tree, accepted, logits = result.tree, result.accepted, result.logits
        self._learn(tree, accepted)
        if logits is not None:
            self._recycle(tree, logits)
        self.index.extend(accepted)
        if self.draft is not None:
            self.draft.keep(tree, accepted)

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """The source that made each node likeliest, and what each source said of it; empty after `begin`."""
        search, grown, described = self._described, [0], []
        if search is None:
            return ()
        for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
            node, votes = search.child(grown[parent], token), search.votes(grown[parent], token)
            grown.append(node)
            described.append(DraftedNode(votes[0].source, search.probability(node), votes))
        return tuple(described)

    def end(self) -> None:
        """Hand the text to the memory; a second call adds nothing."""
        if self.remembers and len(self.index):
            self.memory.pool.add(self.index.tokens)
            self.index = NgramIndex(MAX_NGRAM)

    def _start(self, memory: SpecMemory) -> None:
        """An index of an empty text and of what `memory` knows."""
        self.memory = memory
        self.sources = Sources(
            memory,
            is_sampled=self.is_sampled,
            uses_texts=self.remembers,
            draft_source="draft_model" if self.scorer is None else self.scorer.source,
        )
        self.index = NgramIndex(MAX_NGRAM)
        self._search = self._described = None
        self._drafts = []
        self._num_levels = FIRST_LEVELS

    def _known_noise(self) -> list[NoiseRow]:
        """The noise of the next draws, one level deeper than the last step drafted."""
        rows: list[NoiseRow] = []
        noise = self._request.noise
        num_levels = min(self._num_levels, self._request.max_depth + 1)  # no more tokens are drawn
        while noise is not None and len(rows) < num_levels:
            row = noise.on_host(len(rows))
            if row is None:
                break
            rows.append(row)
        return rows

    @property
    def _floor(self) -> float:
        """The least probability that a node is drafted with."""
        return max(SMALLEST, self._cost.of_node)

    def _tree_of(self, likeliest: Likeliest) -> DraftTree:
        """The tree of these nodes, numbered in their order, with their probabilities."""
        self._num_levels = min(max(likeliest.depths) + 2, MOST_LEVELS)
        return DraftTree.of_nodes(likeliest.tokens, likeliest.parents, likeliest.depths, likeliest.probabilities)

    def _worth(self, search: Search, likeliest: Likeliest) -> tuple[float, int, float]:
        """The beginning of a tree that is worth most by what is known now, as the step will be cut.

        Returns:
            Its expected accepted tokens less those that its forward has to gain, its nodes, and the former alone.
        """
        most = len(likeliest.nodes) - 1
        expected = {count: search.value(likeliest.nodes[: count + 1]) for count in (*range(TILE - 1, most, TILE), most)}
        return max((tokens - self._cost.of_nodes(count), count, tokens) for count, tokens in expected.items())

    @property
    def _forward_cost(self) -> float:
        """Tokens that a forward of the draft model has to gain."""
        assert self.scorer is not None
        return self.scorer.relative_cost * self._cost.of_forward

    def _pays(self, number: int) -> bool:
        """True if the draft model's forward of this number is worth its time, by what such forwards added before.

        What it has to read first, once, is shared out over the steps to come.
        """
        assert self.scorer is not None
        adaptive_weights, cost = self.sources.learned, self._forward_cost
        if not math.isfinite(cost):
            return False
        of_token = self.scorer.relative_cost * self._cost.of_reading
        reading, num_steps = of_token * self.scorer.num_unread, max(self._cost.num_steps, 1.0)
        return adaptive_weights.gain(number) >= cost + reading / num_steps or adaptive_weights.may_retry(
            RETRIED, cost + reading
        )

    def _judge(self, search: Search, accepted: Sequence[int]) -> None:
        """Learn what each forward of this step and those after it added, less the cost of those after it.

        Expectations err where little was learned of drafted contexts; what came of a tree does not err, and varies.
        """
        drafts, self._drafts = self._drafts, []
        values = [0.0 if draft is None else self._gained(search, draft, accepted) for draft in drafts]
        cost, num_forwards = self._forward_cost if drafts else 0.0, len(drafts) - 1
        for number, before in enumerate(values[:-1]):
            gain = max(0.0, values[-1]) - before
            self.sources.learned.gained(number, gain - cost * (num_forwards - 1 - number))

    def _gained(self, search: Search, draft: Likeliest, accepted: Sequence[int]) -> float:
        """Tokens gained where the text goes on with `accepted`: the mean of what is expected and of what came."""
        node, depth, (worth, count, expected) = 0, 0, self._worth(search, draft)
        while depth < len(accepted) and (child := draft.child(node, accepted[depth])) is not None and child <= count:
            node, depth = child, depth + 1
        return (depth - expected) / 2.0 + worth

    def _learn(self, tree: DraftTree, accepted: Sequence[int]) -> None:
        """Let the predictor see the token after every context that the text went through."""
        search, self._search = self._search, None
        if search is None:
            return
        self._judge(search, accepted)
        search.follow(tree, accepted)

    def _recycle(self, tree: DraftTree, logits: NodeLogits) -> None:
        """Keep what the target thought after every node, those that were rejected too."""
        tokens, log_probs = logits.top(self.num_top_logits, slice(0, len(tree)))
        self.memory.recycled.put_nodes(tree.tokens, tree.parents, self.index.tokens[-MAX_KEY:-1], tokens, log_probs)
