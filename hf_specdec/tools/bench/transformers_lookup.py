"""transformers' own prompt lookup as a drafter, to replay and time it next to ours.

Every draft comes from transformers' `PromptLookupCandidateGenerator`; nothing of its rule is written here. Knows
nothing about models.
"""

from collections.abc import Sequence

import torch
from transformers.generation import PromptLookupCandidateGenerator

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.drafter import Drafter

NO_LIMIT = 2**31 - 1  # `max_length`: generation ends where the recorded answer does


def transformers_generator(num_output_tokens: int, max_matching_ngram_size: int) -> PromptLookupCandidateGenerator:
    """transformers' generator without a limit of length and without a token that ends drafts."""
    return PromptLookupCandidateGenerator(
        num_output_tokens=num_output_tokens, max_matching_ngram_size=max_matching_ngram_size, max_length=NO_LIMIT
    )


class TransformersPromptLookup(Drafter):
    """Drafts what transformers would.

    Args:
        num_output_tokens (`int`, *optional*, defaults to `10`): transformers' `prompt_lookup_num_tokens`.
        max_matching_ngram_size (`int`, *optional*, defaults to `2`): as in transformers, with its default.
    """

    def __init__(self, num_output_tokens: int = 10, max_matching_ngram_size: int = 2) -> None:
        self.generator = transformers_generator(num_output_tokens, max_matching_ngram_size)
        self.text = torch.empty(1, 0, dtype=torch.long)

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Start a new text."""
        self.text = torch.tensor([list(prompt_ids)], dtype=torch.long)

    def propose(self, budget: int) -> DraftTree:
        """The generator's candidate, cut to `budget`."""
        candidates, _ = self.generator.get_candidates(self.text)
        drafted = candidates[0, self.text.shape[1] :].tolist()
        return DraftTree.chain(int(self.text[0, -1]), drafted[:budget])

    def observe(self, tree: DraftTree, logits: torch.Tensor | None, accepted: Sequence[int]) -> None:
        """Add the accepted tokens to the text."""
        self.text = torch.cat([self.text, torch.tensor([list(accepted)], dtype=torch.long)], dim=1)
