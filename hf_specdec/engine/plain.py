"""Decoding with transformers' own loops: greedy search and sampling, or assisted decoding with one of our drafters."""

from typing import Any

import torch
from transformers.generation import CandidateGenerator

from hf_specdec.common.stats import SpecStats
from hf_specdec.compat import caches
from hf_specdec.compat.caches import record_as
from hf_specdec.compat.generation import assisted_decoding, end_tokens, sample
from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.call import Call, with_stats
from hf_specdec.engine.shared_processes import agreed_criteria
from hf_specdec.methods.common.drafter import BaseDrafter


class _CountedCandidates(CandidateGenerator):
    """Passes a drafter's candidates on and keeps the call's `SpecStats`."""

    requires_model_outputs = False

    def __init__(self, drafter: BaseDrafter, stats: SpecStats) -> None:
        self.drafter, self.stats = drafter, stats
        self._num_drafted = 0
        self.begun = False

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs: Any) -> tuple[torch.LongTensor, Any]:
        """The text and a drafted chain after it, as the drafter gives them."""
        self.begun = True
        candidates, logits = self.drafter.get_candidates(input_ids, **kwargs)
        self._num_drafted = candidates.shape[1] - input_ids.shape[1]
        return candidates, logits

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Count the step."""
        self.stats.record_step(self._num_drafted, int(num_matches))
        self.stats.num_tokens += int(num_matches) + 1
        self.drafter.update_candidate_strategy(input_ids, scores, num_matches)


def decode_assisted(call: Call, drafter: BaseDrafter, *, stats: SpecStats) -> Any:
    """Decode with transformers' assisted loop and our drafter as its candidate generator."""
    candidates = _CountedCandidates(drafter, stats)
    recorded = caches.recorded(call.cache)
    stats.method = stats.method or type(drafter).__name__
    try:
        output = assisted_decoding(call.model, candidates, call.input_ids, **call.decoding_arguments())
    finally:
        record_as(recorded)
        if candidates.begun:
            drafter.end()
    return with_stats(output, stats)


def decode_plain(call: Call, *, stats: SpecStats, rank_sync: RankSync | None) -> Any:
    """Decode with transformers' own greedy search or sampling."""
    output = sample(call.model, call.input_ids, **_loop_arguments(call, rank_sync))
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    new_tokens = sequences[:, call.input_ids.shape[1] :]
    stats.num_tokens = new_tokens.numel()
    eos = end_tokens(call.generation_config)
    if eos is not None and len(new_tokens) > 1:  # after a row's end stands padding
        ends = torch.isin(new_tokens, eos.to(new_tokens.device)).long()
        stats.num_tokens = int((ends.cumsum(dim=1) - ends == 0).sum())
    return with_stats(output, stats)


def _loop_arguments(call: Call, rank_sync: RankSync | None) -> dict[str, Any]:
    """Arguments of transformers' loops, which decide in every process: from one random state, and by one clock."""
    if call.generation_config.do_sample and rank_sync is not None:
        rank_sync.share_random_state()
    arguments = call.decoding_arguments()
    arguments["stopping_criteria"] = agreed_criteria(call.stopping_criteria, rank_sync)
    return arguments
