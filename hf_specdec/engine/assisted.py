"""Our drafters inside transformers' assisted decoding, with their drafts and acceptances counted."""

from typing import Any

import torch
from transformers.generation import CandidateGenerator

from hf_specdec.common.stats import SpecStats
from hf_specdec.common.tree import DraftTree
from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.methods.common.drafter import BaseDrafter


class CountedCandidates(CandidateGenerator):
    """Passes a drafter's candidates on and keeps the call's `SpecStats`.

    Args:
        reads_prompt_alone (`bool`, *optional*, defaults to `False`): whether the first forward, the prompt's, gets no
            candidates. It may read images, and has to find no more of their tokens than there are.
    """

    requires_model_outputs = False

    def __init__(
        self, drafter: BaseDrafter, stats: SpecStats, rank_sync: RankSync, *, reads_prompt_alone: bool = False
    ) -> None:
        self.drafter, self.stats, self.rank_sync = drafter, stats, rank_sync
        self._drafted = 0
        self._reads_prompt = reads_prompt_alone
        self.begun = False

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, Any]:
        """The text and a drafted chain after it, as the drafter gives them; where processes agree, the first's."""
        if self._reads_prompt:
            self._reads_prompt = False
            return input_ids, None
        self.begun = self.rank_sync.is_leader
        if self.rank_sync.is_alone:
            candidates, logits = self.drafter.get_candidates(input_ids, **kwargs)
            self._drafted = candidates.shape[1] - input_ids.shape[1]
            return candidates, logits
        (tree,) = self.rank_sync.trees(lambda: [self._drafted_after(input_ids)], None)
        self._drafted = tree.num_draft_tokens
        drafted = input_ids.new_tensor(tree.tokens[1:]).unsqueeze(0)
        return torch.cat([input_ids, drafted], dim=1), None  # type: ignore[return-value]

    def _drafted_after(self, input_ids: torch.LongTensor) -> DraftTree:
        candidates, _ = self.drafter.get_candidates(input_ids)
        text, drafted = candidates[0].tolist(), candidates.shape[1] - input_ids.shape[1]
        return DraftTree.chain(text[-drafted - 1], text[len(text) - drafted :])

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Count the step."""
        self.stats.record_step(self._drafted, int(num_matches))
        self.stats.num_tokens += int(num_matches) + 1
        self.drafter.update_candidate_strategy(input_ids, scores, num_matches)
