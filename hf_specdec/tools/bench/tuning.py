"""Measures what a model's forwards of T tokens cost, longer and steadier than `auto` does at its first call.

tuned = measure_costs(model, batch_sizes=(1, 8), context_length=512)
tuned.costs.save("costs.json", tuned.facts)
model.generate(**inputs, spec_method="auto", auto_config={"costs": "costs.json"})
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.api.enable import disable, enable
from hf_specdec.api.enabled_model import EnabledGenerationMixin
from hf_specdec.distributed.rank_sync import rank_sync_of
from hf_specdec.engine.call import Call
from hf_specdec.engine.cost.cost_facts import facts_of
from hf_specdec.engine.cost.cost_model import StepCosts
from hf_specdec.engine.model_state import state_of
from hf_specdec.errors import ConfigError, UnsupportedModelError
from hf_specdec.forward.target.model_runner import ModelRunner
from hf_specdec.forward.target.token_buffer import TokenBuffer
from hf_specdec.generation.generate import prepared_call
from hf_specdec.methods.common.config import check_positive
from hf_specdec.tools.bench.forward_times import time_forwards

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_bos_token_id")
MOST_TOKENS = 65  # a root and 64 drafted tokens


@dataclass(frozen=True, slots=True)
class Tuned:
    """What was measured.

    Attributes:
        costs: the curves.
        facts: what they hold for.
        seconds (`dict[int, dict[int, float]]`): median seconds of a forward, by batch size and tokens a row.
    """

    costs: StepCosts
    facts: dict[str, Any]
    seconds: dict[int, dict[int, float]]


def measure_costs(
    model: Any,
    *,
    batch_sizes: Sequence[int] = (1,),
    context_length: int = 512,
    seconds: float = 20.0,
    rounds: int = 15,
    save: Callable[[Tuned], None] | None = None,
) -> Tuned:
    """Time forwards of 1 to 64 tokens a row behind a real cache of `context_length` tokens.

    Args:
        batch_sizes: rows, each size a curve of its own; sizes are rounded up to powers of two when they are used.
        seconds: when to stop, for each batch size.
        rounds: times that each number of tokens is tried; the medians count.
        save (*optional*): gets what was measured so far after each batch size.

    Raises:
        ConfigError: a number below 1, a context that the model has no positions for, or too few `seconds` for forwards
            of more than one token.
        UnsupportedModelError: the model decodes without speculation.
    """
    inner: PreTrainedModel = compat.generation_model(model)
    for size in batch_sizes:
        check_positive("batch_sizes", size, "Usual values are 1 to 32.")
    check_positive("context_length", context_length, "Usual values are 128 to 4096.")
    positions = compat.max_positions(inner.config)
    if positions is not None and context_length + MOST_TOKENS > positions:
        rule = f"must leave room for {MOST_TOKENS} tokens in the model's {positions} positions"
        raise ConfigError("context_length", rule, context_length, f"Use at most {positions - MOST_TOKENS}.")
    device = compat.input_device(inner)
    costs = StepCosts.of_device(device)
    tuned = Tuned(costs, {**facts_of(inner, device), "context_length": context_length}, {})
    with _prepared(inner):
        for rows in sorted(set(batch_sizes)):
            tuned.seconds[rows] = _measured(inner, costs, rows, context_length, seconds, rounds)
            if save is not None:
                save(tuned)
    return tuned


@contextlib.contextmanager
def _prepared(model: PreTrainedModel) -> Iterator[None]:
    """A block in which the model is enabled, and its generation configuration names tokens alone."""
    kept, was_enabled = model.generation_config, isinstance(model, EnabledGenerationMixin)
    enable(model)
    model.generation_config = GenerationConfig(**{name: getattr(kept, name, None) for name in TOKENS})
    try:
        yield
    finally:
        model.generation_config = kept
        if not was_enabled:
            disable(model)


@torch.no_grad()
def _measured(
    model: PreTrainedModel, costs: StepCosts, rows: int, length: int, seconds: float, rounds: int
) -> dict[int, float]:
    """Measure one curve; returns the seconds by tokens a row."""
    vocab_size = getattr(compat.text_config(model.config), "vocab_size", None) or 1
    ids = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    ids = ids.to(compat.input_device(model))
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids
    call, _ = prepared_call(
        model,
        {**inputs, "max_new_tokens": MOST_TOKENS, "do_sample": False, "pad_token_id": 0, "spec_method": "auto"},
    )
    texts = [TokenBuffer(call.input_ids[row : row + 1], room=1) for row in range(rows)]
    target = _target(call, texts)
    try:
        last = target.prefill().logits[:, -1].argmax(-1).tolist()
        for text, token in zip(texts, last, strict=True):
            text.append(token)
        curve = costs.curve(rows)
        found = time_forwards(
            target,
            curve,
            last,
            vocab_size=vocab_size,
            largest=MOST_TOKENS - 1,
            seconds=seconds,
            rounds=rounds,
            rank_sync=rank_sync_of(model),
        )
    finally:
        target.close()
    if not curve.is_measured:
        rule = "must leave time for forwards of one token and of more, for each batch size"
        raise ConfigError("seconds", rule, seconds, "The default is 20.")
    curve.seconds_of_one = found[1]
    return found


def _target(call: Call, texts: list[TokenBuffer]) -> ModelRunner:
    """What computes the call's forwards."""
    encoder = call.model_kwargs.get("encoder_outputs")
    kwargs = None if encoder is None else {name: call.model_kwargs[name] for name in ("encoder_outputs",)}
    found = state_of(call.model).findings.of(call.model, kwargs)
    tier = found.capability.tier
    reason = found.capability.reason if tier == "plain" else None
    if reason is None and len(texts) > 1:
        reason = found.batch_fallback_reason(call.model, kwargs)
    if reason is not None:
        raise UnsupportedModelError(f"{type(call.model).__name__} decodes without speculation: {reason}")
    return ModelRunner(
        call.model, call.input_ids, call.generation_config, call.model_kwargs, texts, tier=tier, keep_cache=False
    )
