"""Draft heads on tiny targets, and the cases that every head has to pass."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config

from hf_specdec.methods.eagle3.network import Eagle3Head, Eagle3HeadConfig, default_layer_ids
from tests.helpers.head_models import HEADS, random_dflash, random_dflash_head
from tests.helpers.mtp import TARGETS, build_target, fitted_mtp, random_mtp_head
from tests.helpers.support import MASK, PADDED, PROMPT


def random_head(target: Any, *, seed: int = 5, layer_class: Any = LlamaConfig, **flags: Any) -> Eagle3Head:
    """A head with random weights whose shape fits `target`; it reads the target's embeddings.

    Args:
        flags: fields of `Eagle3HeadConfig`; a `draft_vocab_size` below the target's leaves every other token out.
    """
    config = target.config.get_text_config()
    inputs = {"layer_types": ["sliding_attention"]} if flags.get("sliding_window") else {}
    layer = layer_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=32,
        num_hidden_layers=flags.pop("num_hidden_layers", 1),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        **({"sliding_window": flags.pop("sliding_window"), "use_sliding_window": True} if inputs else {}),
        **inputs,
    )
    size = flags.pop("draft_vocab_size", config.vocab_size)
    shape = Eagle3HeadConfig(
        layer=layer,
        draft_vocab_size=size,
        target_hidden_size=config.hidden_size,
        layer_ids=flags.pop("layer_ids", default_layer_ids(config.num_hidden_layers)),
        **flags,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = Eagle3Head(shape)
        with torch.no_grad():
            for name, weight in head.named_parameters():
                if "norm" not in name:
                    weight.normal_(std=0.3)
    if size < config.vocab_size:
        head.set_target_ids(torch.arange(size) * (config.vocab_size // size))
    return head.eval().requires_grad_(False)


QWEN3 = Qwen3Config
Zoo = Callable[[str], Any]
SHAPES = {"chain": {"num_branches": 1, "draft_len": 5}, "tree": {"num_branches": 3, "draft_len": 4, "max_nodes": 9}}
INPUTS: dict[str, dict[str, Any]] = {
    "one prompt": {"input_ids": PROMPT},
    "padded batch": {"input_ids": PADDED, "attention_mask": MASK},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 30},
}
CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}


def always(method: str, config: dict[str, Any]) -> dict[str, Any]:
    """Drafts at every step, whatever was accepted before."""
    return {"spec_method": method, "spec_config": {"confidence_threshold": 0.0, **config}}


@dataclass(frozen=True)
class HeadCase:
    """One kind of head.

    Attributes:
        method: that drafts with it.
        target: makes the target, or takes one of the zoo's.
        head: makes the head for that target.
    """

    method: str
    target: Callable[[Zoo], Any]
    head: Callable[[Any], Any]


def _of_zoo(name: str) -> Callable[[Zoo], Any]:
    return lambda zoo: zoo(name)


EAGLE3: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"layer_class": QWEN3},
    "reduced vocabulary": {"draft_vocab_size": 64},
    "norms": {"fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two layers": {"num_hidden_layers": 2},
    "sliding": {"layer_class": QWEN3, "sliding_window": 6},
}
CASES: dict[str, HeadCase] = {
    **{
        f"eagle3, {name}": HeadCase("eagle3", _of_zoo("llama"), partial(random_head, **flags))
        for name, flags in EAGLE3.items()
    },
    **{f"mtp, {name}": HeadCase("mtp", lambda _, name=name: build_target(name), random_mtp_head) for name in TARGETS},
    **{f"dflash, {name}": HeadCase("dflash", _of_zoo(name), random_dflash) for name in ("llama", "gemma3", "qwen3")},
    **{
        f"dflash, a head of {kind}": HeadCase("dflash", _of_zoo("llama"), partial(random_dflash_head, kind=kind))
        for kind in HEADS
    },
}


@dataclass(frozen=True)
class Fitted:
    """A head that has learned by heart what its target writes, for transformers' own loop too.

    Attributes:
        case: the kind of head.
        fit: makes the head for a target and its text.
        length, num_tokens (`int`): of the prompt, and of what is written.
        theirs: arguments of transformers' `generate` for this head.
        config: ours, with as long drafts.
        most_forwards (`int`): that transformers' loop needs, so that it accepts drafts at all.
    """

    case: HeadCase
    fit: Callable[[Any, torch.Tensor], Any]
    length: int
    num_tokens: int
    theirs: Callable[[Any], dict[str, Any]]
    config: dict[str, Any]
    most_forwards: int


FITTED = {
    **{
        name: Fitted(
            CASES[name],
            fitted_mtp,
            length=PROMPT.shape[1],
            num_tokens=32,
            theirs=lambda _: {"use_mtp": True},
            config={"num_branches": 1, "draft_len": num_layers},
            most_forwards=24,
        )
        for name, num_layers in {"mtp, glm4_moe, 1 layer": 1, "mtp, glm4_moe, 3 layers": 3}.items()
    },
}
