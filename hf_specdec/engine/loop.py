"""The decoding loop of every method: propose, forward, verify, commit, stop check.

Knows neither methods nor models: a `Drafter` proposes, a `Target` computes, a `Chooser` and a `StopCheck` decide.

    loop = SpecLoop(target, drafter, chooser, stop_check, text, budget=10)
    loop.run()
    text.emitted, loop.stats
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from hf_specdec.drafters.base import Drafter
from hf_specdec.engine.choose import Chooser, StopCheck
from hf_specdec.engine.step import SpecStep
from hf_specdec.engine.target import Target
from hf_specdec.engine.text import Text
from hf_specdec.errors import ConfigError
from hf_specdec.stats import SpecStats
from hf_specdec.tree import DraftTree
from hf_specdec.verify import Verdict, walk

__all__ = ["SpecLoop"]


class SpecLoop:
    """Decodes one row to its end.

    Args:
        budget (`int`): most drafted tokens a step.
        max_positions (`int`, *optional*): positions the model has; drafts never reach beyond them.
        vocab_size (`int`, *optional*): tokens the model knows; drafted ids beyond them are left out.
        streamer: a transformers streamer that has seen the prompt already.
        observer: called with a `SpecStep` after every verify step.
        keep_hidden_states (`bool`): collect the hidden states of every emitted token.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        chooser: Chooser,
        stop_check: StopCheck,
        text: Text,
        *,
        budget: int,
        stats: SpecStats,
        max_positions: int | None = None,
        vocab_size: int | None = None,
        streamer: Any = None,
        observer: Callable[[SpecStep], None] | None = None,
        keep_hidden_states: bool = False,
    ) -> None:
        self.target, self.drafter, self.chooser, self.stop_check = target, drafter, chooser, stop_check
        self.text, self.budget, self.stats = text, budget, stats
        self.max_positions, self.vocab_size = max_positions, vocab_size
        self.streamer, self.observer = streamer, observer
        self.hidden_states: list[tuple[torch.Tensor, ...]] | None = [] if keep_hidden_states else None
        self._outputs: Any = None
        self._visited: list[int] = []
        self._begun = self._finished = self._stopped = False

    def run(self) -> None:
        """Prompt, then steps until the text ends. Whatever happens, the cache is left holding the text."""
        try:
            self._prompt()
            while not self._finished:
                self._step()
        finally:
            try:
                if self._begun:
                    self.drafter.end()
            finally:
                self.target.close()

    def _prompt(self) -> None:
        start = time.perf_counter()
        prompt = list(self.text.tokens)
        outputs = self.target.prefill()
        row = outputs.logits[0, -1:]
        self._outputs = outputs
        self.chooser.load(row)
        self.stats.prefill_seconds = time.perf_counter() - start
        token, self._finished = self._emit(0, whole_prompt=True)
        start = time.perf_counter()
        self._begun = True
        self.drafter.begin(prompt or [token])
        if prompt:
            logits = row if self.drafter.needs_logits else None
            self.drafter.observe(DraftTree.chain(prompt[-1]), logits, [token])
        self.stats.draft_seconds += time.perf_counter() - start

    def _step(self) -> None:
        began = time.perf_counter()
        tree = self._draft()
        drafted = time.perf_counter()
        self._outputs = self.target.forward(tree, self.text)
        rows = self._outputs.logits[0]
        self.chooser.load(rows)
        verified = time.perf_counter()
        verdict = self._verify(tree)
        committed = time.perf_counter()
        self.drafter.observe(tree, rows if self.drafter.needs_logits else None, verdict.tokens)
        observed = time.perf_counter()
        self.stats.draft_seconds += drafted - began + observed - committed
        self.stats.verify_seconds += verified - drafted
        self.stats.commit_seconds += committed - verified
        self.stats.record_step(tree.num_draft_tokens, verdict.num_accepted)
        if self.observer is not None:
            self.observer(
                SpecStep(
                    index=self.stats.num_drafts - 1,
                    tree=tree,
                    accepted=tuple(verdict.tokens),
                    path=tuple(verdict.path),
                    draft_seconds=drafted - began + observed - committed,
                    verify_seconds=verified - drafted,
                    commit_seconds=committed - verified,
                )
            )

    def _draft(self) -> DraftTree:
        """The drafter's tree, cut to what the model can verify and what the text has room for."""
        depth = self._room()
        tree = self.drafter.propose(min(self.budget, depth) if self.target.tier == "chain" else self.budget)
        if tree.tokens[0] != self.text.tokens[-1]:
            raise ConfigError(
                "tree.tokens[0]", "must be the last token of the text", tree.tokens[0], "Build the tree on that root."
            )
        if not tree.is_chain and self.target.tier == "chain":
            tree = DraftTree.chain(tree.tokens[0], tree.first_branch())
        return tree.truncated(max_depth=depth, max_nodes=self.budget, vocab_size=self.vocab_size)

    def _room(self) -> int:
        """Most tokens worth drafting one under the other: the one after the last of them must still fit."""
        room = self.budget
        if self.stop_check.max_length is not None:
            room = min(room, self.stop_check.max_length - len(self.text) - 1)
        if self.max_positions is not None:
            room = min(room, self.max_positions - 1 - self.target.position)
        return max(room, 0)

    def _verify(self, tree: DraftTree) -> Verdict:
        self._visited = []
        try:
            verdict = walk(tree, self._emit)
        except BaseException:
            self.target.commit(self._visited, len(tree))
            raise
        self.target.commit(verdict.path, len(tree))
        self._finished = self._stopped
        return verdict

    def _emit(self, node: int, whole_prompt: bool = False) -> tuple[int, bool]:
        """Choose the token after `node`, add it to the text and tell everyone who listens."""
        self._visited.append(node)
        token = self.chooser.choose(node, self.text)
        if self.hidden_states is not None:
            self.hidden_states.append(self._hidden_states(node, whole_prompt))
        self.text.append(token)
        self._stopped = self.stop_check(self.text, self.chooser.scores)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        self.stats.num_tokens += 1
        return token, self._stopped

    def _hidden_states(self, node: int, whole_prompt: bool) -> tuple[torch.Tensor, ...]:
        states = self._outputs.get("decoder_hidden_states") or self._outputs.hidden_states
        return tuple(states) if whole_prompt else tuple(layer[:, node : node + 1] for layer in states)
