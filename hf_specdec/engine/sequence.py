"""One sequence of a call while it is decoded: its text, and those who draft, choose and stop for it."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from hf_specdec.common.stats import DraftedNode, SpecStats
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.engine.sampling.constraint import constrained
from hf_specdec.engine.sampling.random_streams import SeparateDraws
from hf_specdec.engine.sampling.sampler import Sampler
from hf_specdec.engine.stopping import StopCheck
from hf_specdec.engine.verify import VerifyResult, verify_tree
from hf_specdec.errors import ConfigError
from hf_specdec.forward.node_outputs import NodeOutputs
from hf_specdec.forward.prompt import AskedRow
from hf_specdec.forward.text_rows import TokenBuffer
from hf_specdec.methods.common.drafter import BaseDrafter, DraftRequest, DraftResult

OnToken = Callable[["SequenceState", int, int], Any]


class SequenceState:
    """State of one sequence.

    Args:
        index (`int`): its place in the batch, or its prompt's number.
        prompt (`list[int]`): token ids of the prompt without padding; empty where embeddings were given.

    Attributes:
        tree (`DraftTree`): what is being verified.
        proposed (`DraftTree`): what its drafter proposed in this step.
        visited (`list[int]`): nodes whose logits have decided a token in this step.
        begun (`bool`): whether its drafter has begun.
        finished (`bool`): whether its text has ended; in a batch that it cannot leave, a forward computes its last
            token again and keeps nothing.
        length (`int`): tokens of the text, without the padding after its end.
        stats (`SpecStats`): its counters, or those of the whole call.
        isolates_errors (`bool`): whether an error of its processors or criteria ends this sequence alone.
        isolates_drafter (`bool`): the same for its drafter.
        error (`Exception | None`): what ended the sequence alone.
        draws: entered where its drafter is asked: a caller's takes no random number of the text's.
    """

    def __init__(
        self,
        index: int,
        text: TokenBuffer,
        prompt: list[int],
        drafter: BaseDrafter,
        sampler: Sampler,
        stop_check: StopCheck,
        stats: SpecStats,
    ) -> None:
        self.index, self.text, self.prompt = index, text, prompt
        self.drafter, self.sampler, self.stop_check = drafter, sampler, stop_check
        is_callers = not type(drafter).__module__.startswith("hf_specdec.")
        self.draws = isolated_rng(sampler) if is_callers else contextlib.nullcontext()
        self.tree = self.proposed = DraftTree.chain(prompt[-1] if prompt else 0)
        self.visited: list[int] = []
        self.begun = self.finished = False
        self.isolates_errors = self.isolates_drafter = False
        self.error: Exception | None = None
        self.stats = stats
        self.length = len(text)

    @property
    def emitted(self) -> list[int]:
        """The tokens after the prompt, padding left aside."""
        return self.text.tokens[self.text.prompt_length : self.length]

    @property
    def tokens_left(self) -> int:
        """Tokens that the text may still get; 0 where nothing bounds it."""
        most = self.stop_check.max_length
        return 0 if most is None else most - len(self.text)

    @property
    def num_top_logits(self) -> int | None:
        """Number of best tokens of each node to read from the next forward's logits; `None` for none."""
        drafter = self.drafter
        wanted = drafter.num_top_logits if drafter.needs_logits else None
        return 0 if wanted is None and not self.finished and not self.sampler.needs_rows else wanted

    @property
    def asked_of_prompt(self) -> AskedRow:
        """The end of the prompt after whose tokens the drafter asks for the likeliest next ones, and how many."""
        drafter, count = self.drafter, self.drafter.num_top_logits
        is_asked = drafter.num_prompt_logits and drafter.needs_logits and count
        return (self.prompt[-1 - drafter.num_prompt_logits :], count) if is_asked and count else ((), 0)

    def begin(self, token: int, outputs: NodeOutputs) -> None:
        """Hand the prompt, the first `token` and what the prompt's forward computed to the drafter."""
        self.begun = True
        with self.draws:
            self.drafter.begin(self.prompt or [token])
            if outputs.of_prompt is not None:
                self.drafter.learn_prompt(*outputs.of_prompt)
        if self.prompt:
            self._tell(DraftTree.chain(self.prompt[-1]), outputs, [token])

    def propose(self, request: DraftRequest) -> DraftTree:
        """Get the drafter's tree; the root alone after an error that ends this sequence alone."""
        with self._isolated(self.isolates_drafter), self.draws:
            return _checked(self.drafter.draft_for(request), self.text.tokens[-1])
        return DraftTree.chain(self.text.tokens[-1])

    def constrained(self, tree: DraftTree) -> DraftTree:
        """The drafter's tree as the constraint among its processors has it, if there is one."""
        self.proposed = tree
        if self.sampler.constraint is None or self.drafter.never_drafts:
            return tree
        with self._isolated(self.isolates_errors):
            return constrained(tree, self.sampler.constraint, self.text.tokens)
        return tree

    def own_nodes(self, tree: DraftTree) -> list[int]:
        """The nodes of a tree that its drafter proposed; the others are forced."""
        return [node for node, proposed in enumerate(tree.nodes_in(self.proposed)) if proposed is not None]

    def describe(self, tree: DraftTree) -> tuple[DraftedNode, ...]:
        """Describe where each drafted node came from; empty where the drafter does not say, or no longer knows."""
        if self.sampler.constraint is None:
            return self.drafter.describe(tree)
        drafted = self.own_nodes(tree)
        nodes = [DraftedNode("grammar", chance) for chance in tree.probabilities or [None] * len(tree)]
        if len(drafted) > 1:
            if not (described_nodes := self.drafter.describe(tree.with_nodes(drafted))):
                return ()
            for node, described in zip(drafted[1:], described_nodes, strict=True):
                nodes[node] = described
        return tuple(nodes[1:])

    def verify(self, tree: DraftTree, on_token: OnToken | None) -> VerifyResult:
        """Verify `tree`; `on_token` is called for each token chosen, after the stop check.

        The result has no tokens and no nodes after the text's end, and after an error that ends this sequence alone.
        """
        self.tree, self.visited = tree, []
        if self.finished:
            return VerifyResult([], [])
        with self._isolated(self.isolates_errors):
            return verify_tree(tree, functools.partial(self.emit, on_token=on_token))
        return VerifyResult([], [])

    def emit(self, node: int, on_token: OnToken | None) -> tuple[int, bool]:
        """Choose the token after `node`, add it to the text; returns it, and whether the text ends with it."""
        self.visited.append(node)
        token = self.sampler.choose(node, self.text)
        self._append(token)
        self.finished = self.stop_check(self.text, self.sampler.scores)
        if on_token is not None:  # after the criteria, as in plain decoding
            on_token(self, node, token)
        return token, self.finished

    def follow(self, result: VerifyResult, finished: bool, on_token: OnToken | None) -> None:
        """Take over tokens that another process has chosen, and whether the text ends with them."""
        for node, token in zip(result.path, result.tokens, strict=True):
            self._append(token)
            if on_token is not None:
                on_token(self, node, token)
        self.finished = finished

    def _append(self, token: int) -> None:
        self.text.append(token)
        self.length += 1
        self.stats.num_tokens += 1

    def observe(self, tree: DraftTree, outputs: NodeOutputs, accepted: list[int]) -> None:
        """Tell the drafter what became of its tree."""
        with self._isolated(self.isolates_drafter):
            self._tell(tree, outputs, accepted)

    def _tell(self, tree: DraftTree, outputs: NodeOutputs, accepted: list[int]) -> None:
        logits = outputs.logits if self.drafter.needs_logits else None
        with self.draws:
            self.drafter.learn_from(DraftResult(tree, accepted, logits))

    def pad(self, length: int, token: int) -> None:
        """Padding after the text, up to `length`."""
        for _ in range(length - len(self.text)):
            self.text.append(token)

    def end(self) -> None:
        """The text is finished or interrupted."""
        if self.begun:
            self.begun = False
            with self._isolated(self.isolates_errors), self.draws:
                self.drafter.end()

    def fail(self, error: Exception) -> None:
        """End this sequence with its first error."""
        self.error, self.finished = self.error or error, True

    @contextlib.contextmanager
    def _isolated(self, isolates: bool) -> Iterator[None]:
        """Errors in there end this sequence alone where it `isolates` them."""
        try:
            yield
        except Exception as error:
            if not isolates:
                raise
            self.fail(error)


def isolated_rng(sampler: Sampler) -> contextlib.AbstractContextManager[None]:
    """Context for a caller's code: its draws do not advance the text's generator where that is the global one."""
    return SeparateDraws(sampler.device) if sampler.draws_globally else contextlib.nullcontext()


def _checked(tree: object, root: int) -> DraftTree:
    """A drafter's tree, once it is one below `root` with whole numbers: a tensor's are found in no tree by their value.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(tree, DraftTree):
        remedy = "Return DraftTree.chain(last_token, draft); an empty draft is [], not None."
        if isinstance(tree, TreeBuilder):
            remedy = "Return builder.build()."
        raise ConfigError("propose", "must return a DraftTree", tree, remedy)
    for token in tree.tokens if set(map(type, tree.tokens)) != {int} else ():
        if not isinstance(token, int | np.integer):
            raise ConfigError("tree.tokens", "must be whole numbers", token, "Write tokens.tolist() for a tensor's.")
    if tree.tokens[0] != root:
        rule = "must be the last token of the text"
        raise ConfigError("tree.tokens[0]", rule, tree.tokens[0], "Build the tree on that root.")
    if min(tree.tokens) < 0:
        remedy = "Draft token ids of the target's vocabulary."
        raise ConfigError("tree.tokens", "must be at least 0", min(tree.tokens), remedy)
    return tree


def check_own_drafters(drafter: BaseDrafter, sequences: Iterable[SequenceState]) -> None:
    """Raise where a drafter, which reads one text, serves one of these sequences already."""
    if any(drafter is sequence.drafter for sequence in sequences):
        rule = "must make a drafter for each sequence of a batch"
        raise ConfigError("spec_method", rule, drafter, "Pass its class, or a function that makes one.")
