"""Rows that are wrong on purpose, to be seen flagged: `tests.bench.wrong_rows:WrongContext`."""

from typing import Any

import torch
from transformers.generation import CandidateGenerator

from hf_specdec.common.tree import DraftTree
from hf_specdec.methods.common.drafter import DraftRequest
from hf_specdec.methods.plain.drafter import PlainDrafter


class HonestCandidates(CandidateGenerator):
    """Proposes one token that is hardly ever right, and leaves the text alone."""

    requires_model_outputs = False

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, None]:
        text = self.text(input_ids)
        return torch.cat([text, text[:, -1:]], dim=1), None  # type: ignore[return-value]

    def text(self, input_ids: torch.LongTensor) -> torch.Tensor:
        return input_ids

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        pass


class WrongContext(HonestCandidates):
    """Has its candidates verified behind another last token than the text's, so the target answers another text."""

    def text(self, input_ids: torch.LongTensor) -> torch.Tensor:
        text = input_ids.clone()
        text[:, -1] = (text[:, -1] + 1) % 1000
        return text


class WritesIntoTheText(HonestCandidates):
    """Changes the tensor that it was given to read."""

    def text(self, input_ids: torch.LongTensor) -> torch.Tensor:
        input_ids[:, -1] = (input_ids[:, -1] + 1) % 1000
        return input_ids


class GuessingDrafter(PlainDrafter):
    """Drafts one token that is hardly ever right; wrong only in an engine that believes it."""

    def draft_for(self, request: DraftRequest) -> DraftTree:
        return DraftTree.chain(self._last, [(self._last + 1) % 1000][: request.budget])


class NeedsArguments(HonestCandidates):
    """Cannot be made without an argument that no one knows."""

    def __init__(self, datastore: str) -> None:
        self.datastore = datastore


class Nothing:
    """Neither a drafter nor a candidate generator."""
