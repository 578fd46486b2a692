"""Our drafters inside transformers' assisted decoding, with their drafts and acceptances counted."""

from typing import Any

import torch
from transformers.generation import CandidateGenerator

from hf_specdec.drafters.base import Drafter
from hf_specdec.stats import SpecStats

__all__ = ["CountedCandidates"]


class CountedCandidates(CandidateGenerator):
    """Passes a drafter's candidates on and keeps the call's `SpecStats`."""

    requires_model_outputs = False

    def __init__(self, drafter: Drafter, stats: SpecStats) -> None:
        self.drafter, self.stats = drafter, stats
        self._drafted = 0
        self.begun = False

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, Any]:
        """The text and a drafted chain behind it."""
        self.begun = True
        candidates, logits = self.drafter.get_candidates(input_ids)
        self._drafted = candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Count the step."""
        self.stats.record_step(self._drafted, int(num_matches))
        self.stats.num_tokens += int(num_matches) + 1
        self.drafter.update_candidate_strategy(input_ids, scores, num_matches)
