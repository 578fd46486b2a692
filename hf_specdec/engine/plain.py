"""Decoding with transformers' own loops: greedy search and sampling, or assisted decoding with one of our drafters."""

from typing import Any

import torch

from hf_specdec import compat
from hf_specdec.common.stats import SpecStats
from hf_specdec.distributed.rank_sync import RankSync
from hf_specdec.engine.call import Call, with_stats
from hf_specdec.engine.shared_processes import agreed_criteria, candidates_of
from hf_specdec.forward.forward_arguments import tensors_of
from hf_specdec.methods.common.drafter import BaseDrafter

OF_TEXT = {"attention_mask", "position_ids"}


def decode_assisted(call: Call, drafter: BaseDrafter, *, stats: SpecStats, rank_sync: RankSync | None) -> Any:
    """Decode with transformers' assisted loop and our drafter as its candidate generator."""
    is_alone = not call.model.config.is_encoder_decoder and bool(tensors_of(call.model_kwargs).keys() - OF_TEXT)
    candidates = candidates_of(rank_sync, drafter, stats, reads_prompt_alone=is_alone)
    recorded = compat.recorded(call.cache)
    stats.method = stats.method or type(drafter).__name__
    try:
        output = compat.assisted_decoding(call.model, candidates, call.input_ids, **_loop_arguments(call, rank_sync))
    finally:
        compat.record_as(recorded)
        if candidates.begun:
            drafter.end()
    return with_stats(output, stats)


def decode_plain(call: Call, *, stats: SpecStats, rank_sync: RankSync | None) -> Any:
    """Decode with transformers' own greedy search or sampling."""
    output = compat.sample(call.model, call.input_ids, **_loop_arguments(call, rank_sync))
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    new_tokens = sequences[:, call.input_ids.shape[1] :]
    stats.num_tokens = new_tokens.numel()
    eos = compat.end_tokens(call.generation_config)
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
