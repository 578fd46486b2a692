"""A transformers `CandidateGenerator` of the user's own inside transformers' assisted loop, with its time counted."""

import time
from typing import Any

import torch

from hf_specdec import compat
from hf_specdec.common.stats import SpecStats
from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.assisted import CountedCandidates
from hf_specdec.engine.call import Call, with_stats


class DecodeWithCandidates:
    """A decoding method for `custom_generate`; good for one call.

    Args:
        candidates: the generator, made for this call.
        streamer: the call's streamer, which transformers drops on the way here.
    """

    def __init__(self, candidates: Any, streamer: Any) -> None:
        self.candidates, self.streamer = candidates, streamer

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode as transformers' assisted decoding does, with this generator's candidates."""
        call = Call(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, self.streamer
        )
        stats = SpecStats(method=type(self.candidates).__name__, tier="chain")
        timed = _TimedCandidates(self.candidates, stats, RankSync())
        return with_stats(compat.assisted_decoding(model, timed, input_ids, **call.decoding_arguments()), stats)


class _TimedCandidates(CountedCandidates):
    """Counts drafts and the seconds spent on them."""

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, Any]:
        """The text and a drafted chain behind it."""
        started = time.perf_counter()
        found = super().get_candidates(input_ids, **kwargs)
        self.stats.draft_seconds += time.perf_counter() - started
        return found
