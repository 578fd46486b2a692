"""Times of verify steps of chosen sizes, by the engine's own loop: masks, positions and all rows included."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_specdec import compat
from hf_specdec.api.enable import capability
from hf_specdec.call.run import generate_once
from hf_specdec.common.observer import SpecStep
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.methods.common.drafter import Drafter


def time_steps(
    model: Any,
    sizes: Iterable[int],
    tell: Callable[[int, float], None],
    *,
    rows: int,
    length: int,
    most_tokens: int,
    seed: int = 0,
) -> None:
    """Decode random tokens by steps that verify chosen numbers of tokens a row.

    Steps verify trees of branches two tokens long where the model can, otherwise chains.

    Args:
        sizes: tokens a row of each step, the root counted; asked for as the steps come.
        tell: gets the tokens a row and the seconds of each step, sampling and commit left out.
        rows, length (`int`): of the batch, and of the text in its cache at first; each step adds a token at least.
        most_tokens (`int`): most tokens of all steps.
        seed (`int`): of the tokens.

    Raises:
        UnsupportedModelError: the model decodes without speculation.
    """
    inner, draws_trees = compat.generation_model(model), capability(model).tier == "tree"
    vocab_size = getattr(compat.text_config(model.config), "vocab_size", None) or 1
    ids = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    ids = ids.to(compat.input_device(model))
    schedule = _Schedule(iter(sizes))

    def observe(step: SpecStep) -> None:
        if step.row == 0 and not schedule.is_over:
            tell(len(step.tree), step.verify_seconds)

    output = generate_once(
        inner,
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}),
            "max_new_tokens": most_tokens,
            "do_sample": False,
            "eos_token_id": vocab_size,  # none ends a text; batches need one
            "pad_token_id": 0,
            "return_dict_in_generate": True,
            "stopping_criteria": StoppingCriteriaList([schedule]),
            "spec_method": lambda: _SizedDrafter(schedule, vocab_size, draws_trees),
            "spec_observer": observe,
        },
    )
    reason = output.spec_stats.plain_reason
    if reason is not None:
        raise UnsupportedModelError(f"{type(model).__name__} decodes without speculation: {reason}")


class _Schedule(StoppingCriteria):
    """Sizes of the steps, the same for all rows; ends the texts one step after the last of them."""

    row_safe = True

    def __init__(self, sizes: Iterator[int]) -> None:
        self._sizes, self._known, self.is_over = sizes, list[int](), False

    def size_of(self, step: int) -> int:
        """Tokens a row of a step."""
        if step == len(self._known):
            size = next(self._sizes, None)
            self.is_over = size is None
            self._known.append(size or 1)
        return self._known[step]

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self.is_over, dtype=torch.bool, device=input_ids.device)


class _SizedDrafter(Drafter):
    """Proposes chains or trees of arbitrary tokens, as large as the schedule says."""

    def __init__(self, schedule: _Schedule, vocab_size: int, draws_trees: bool) -> None:
        self._schedule, self._vocab_size, self._draws_trees = schedule, vocab_size, draws_trees
        self._step = 0

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Remember the last token."""
        self._last = prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        """The next size, at most two nodes for each token of the vocabulary in a tree."""
        size = self._schedule.size_of(self._step)
        self._step += 1
        if not self._draws_trees or size == 1:
            return DraftTree.chain(self._last, [place % self._vocab_size for place in range(size - 1)])
        builder, place = TreeBuilder(self._last), 0
        while len(builder) < min(size, 2 * self._vocab_size):
            node = builder.add(0, place)
            if len(builder) < size:
                builder.add(node, math.ceil(place / 2) % self._vocab_size)
            place += 1
        return builder.build()

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        """Remember the last token."""
        self._last = accepted[-1]
