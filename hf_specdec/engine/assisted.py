"""Our drafters inside transformers' assisted decoding, with their drafts and acceptances counted."""

from typing import Any

import torch
from transformers.generation import CandidateGenerator

from hf_specdec.common.stats import SpecStats
from hf_specdec.methods.common.drafter import BaseDrafter


class CountedCandidates(CandidateGenerator):
    """Passes a drafter's candidates on and keeps the call's `SpecStats`.

    Args:
        reads_prompt_alone (`bool`, *optional*, defaults to `False`): whether the first forward, the prompt's, gets no
            candidates. It may read images, and has to find no more of their tokens than there are.
    """

    requires_model_outputs = False

    def __init__(self, drafter: BaseDrafter, stats: SpecStats, *, reads_prompt_alone: bool = False) -> None:
        self.drafter, self.stats = drafter, stats
        self._num_drafted = 0
        self._reads_prompt = reads_prompt_alone
        self.begun = False

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, Any]:
        """The text and a drafted chain after it, as the drafter gives them."""
        if self._reads_prompt:
            self._reads_prompt = False
            return input_ids, None
        candidates, logits = self._drafted(input_ids, **kwargs)
        self._num_drafted = candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def _drafted(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, Any]:
        self.begun = True
        return self.drafter.get_candidates(input_ids, **kwargs)

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Count the step."""
        self.stats.record_step(self._num_drafted, int(num_matches))
        self.stats.num_tokens += int(num_matches) + 1
        self.drafter.update_candidate_strategy(input_ids, scores, num_matches)
