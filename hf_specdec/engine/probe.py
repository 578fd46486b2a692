"""What a model can do, found by trying: a few tokens as a tree against the same tokens in sequence, then a rollback.

Never a list of model names. The reference is the model as plain `generate` drives it: a prompt, then token by token.

    capability = probe(model)
    capability.tier, capability.reason
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.attention import TreeMasks
from hf_specdec.engine.inputs import rows_of
from hf_specdec.engine.target import Target, Tier
from hf_specdec.engine.text import Text
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.tree import DraftTree, TreeBuilder

__all__ = ["Capability", "probe"]

PROMPT_LENGTH, LONGEST_PROMPT = 9, 1024
ATTEMPTS = 2
EXACT, LEAST_INEXACT, MOST_INEXACT, NOISE_FACTOR = 1e-4, 0.01, 0.1, 3.0  # tolerances, relative to the largest logit
OWN_WINDOWS = ("window", "local", "chunk", "block")
MASKED_WINDOWS = ("sliding_window", "attention_chunk_size")  # read by transformers' mask functions


@dataclass(frozen=True, slots=True)
class Capability:
    """How a model can be driven.

    Attributes:
        tier (`str`): `"tree"`: any tree is verified in one forward. `"chain"`: several tokens in sequence are.
            `"plain"`: one token a forward.
        reason (`str`): what was found, in a sentence.
        attention (`str | None`): the attention implementation it was found with.
        dtype (`str`): the dtype it was found with.
        error (`float`): largest difference of a logit from the reference, over the largest logit.
    """

    tier: Tier
    reason: str
    attention: str | None
    dtype: str
    error: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


class _Mismatch(Exception):
    """A forward gave other logits than the reference."""


@torch.no_grad()
def probe(model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None = None) -> Capability:
    """Find the tier of `model`. Uses no random numbers and leaves the model as it is.

    Args:
        encoder_kwargs: for encoder-decoder models, `encoder_outputs` and `attention_mask` of one row; by default a
            few tokens are encoded.
    """
    attention, dtype = compat.attention_implementation(model.config), str(model.dtype).removeprefix("torch.")
    why_not_tree = _known_reason(model)
    if why_not_tree is None:
        try:
            error = _attempt(model, {}, _try_tree)
            reason = "a tree of tokens gives the logits of the same tokens in sequence"
            return Capability("tree", reason, attention, dtype, error)
        except Exception as exception:
            why_not_tree = _sentence(exception)
    try:
        if model.config.is_encoder_decoder:
            encoder_kwargs = encoder_kwargs or _encode(model)
        error = _attempt(model, encoder_kwargs or {}, _try_chain)
        return Capability("chain", f"several tokens in sequence work; no tree: {why_not_tree}", attention, dtype, error)
    except Exception as exception:
        reason = f"several tokens in one forward do not work: {_sentence(exception)}"
        return Capability("plain", reason, attention, dtype, float("nan"))


def _known_reason(model: PreTrainedModel) -> str | None:
    """Why there is no use in trying a tree, where that can be seen without trying."""
    if model.config.is_encoder_decoder:
        return "its decoder takes positions from the cache"
    if not TreeMasks(model).supported:
        return f"{compat.attention_implementation(model.config)!r} attention takes no mask of ours"
    if not _accepts(model, "position_ids"):
        return "its forward takes no position_ids"
    return None


def _attempt(model: PreTrainedModel, encoder_kwargs: dict[str, Any], trial: Callable[..., float]) -> float:
    """Try more than once: what a model cannot do fails each time, a mishap or an expert's near tie does not."""
    for attempt in range(ATTEMPTS):
        try:
            return trial(model, encoder_kwargs, attempt)
        except UnsupportedModelError:
            raise
        except Exception:
            if attempt == ATTEMPTS - 1:
                raise
    raise AssertionError


def _try_tree(model: PreTrainedModel, encoder_kwargs: dict[str, Any], attempt: int) -> float:
    prompt, t = _tokens(model, attempt)
    builder = TreeBuilder(t[0])
    a, b = builder.add(0, t[1]), builder.add(0, t[2])
    builder.add(a, t[3]), builder.add(a, t[4])
    d = builder.add(b, t[5])
    tree = builder.build()
    paths = [[t[0], t[1], t[3]], [t[0], t[1], t[4]], [t[0], t[2], t[5]]]
    wanted = _reference(model, encoder_kwargs, [prompt + path for path in paths], 3)
    target, text = _target(model, encoder_kwargs, prompt, "tree")
    if target.tier != "tree":
        raise UnsupportedModelError("its cache holds states beside keys and values")
    text.append(t[0])
    rows = target.forward([tree])[0].float()
    order = [[0, a, 3], [0, a, 4], [0, b, d]]
    tolerance = _tolerance(model, encoder_kwargs, prompt, t)
    error = _compare(rows[torch.tensor(order)], wanted, tolerance)
    target.commit([[0, b, d]])
    return max(error, _continue(model, encoder_kwargs, target, text, [t[2], t[5]], t[6:8], tolerance))


def _try_chain(model: PreTrainedModel, encoder_kwargs: dict[str, Any], attempt: int) -> float:
    prompt, t = _tokens(model, attempt)
    wanted = _reference(model, encoder_kwargs, [prompt + t[:6]], 6)
    target, text = _target(model, encoder_kwargs, prompt, "chain")
    text.append(t[0])
    tolerance = _tolerance(model, encoder_kwargs, prompt, t)
    error = _compare(target.forward([DraftTree.chain(t[0], t[1:3])])[0][None].float(), wanted[:, :3], tolerance)
    target.commit([[0, 1, 2]])
    for token in t[1:4]:
        text.append(token)
    rows = target.forward([DraftTree.chain(t[3], [*t[4:6], t[0]])])[0][None].float()
    error = max(error, _compare(rows[:, :3], wanted[:, 3:], tolerance))
    target.commit([[0, 1]])
    return max(error, _continue(model, encoder_kwargs, target, text, [t[4]], t[6:8], tolerance))


def _continue(
    model: PreTrainedModel,
    encoder_kwargs: dict[str, Any],
    target: Target,
    text: Text,
    accepted: list[int],
    more: list[int],
    tolerance: float,
) -> float:
    """After a commit, two further tokens must come out as if nothing had ever been rejected."""
    for token in [*accepted, more[0]]:
        text.append(token)
    rows = target.forward([DraftTree.chain(more[0], more[1:])])[0][None].float()
    wanted = _reference(model, encoder_kwargs, [[*text.tokens, *more[1:]]], 2)
    return _compare(rows, wanted, tolerance)


def _tolerance(model: PreTrainedModel, encoder_kwargs: dict[str, Any], prompt: list[int], t: list[int]) -> float:
    """What rounding can explain: in half precision, some times what another split of the text does to it."""
    if model.dtype in (torch.float32, torch.float64) and torch.get_float32_matmul_precision() == "highest":
        return EXACT
    by_token = _reference(model, encoder_kwargs, [prompt + t[:3]], 3)
    at_once = [_reference(model, encoder_kwargs, [prompt + t[:count]], 1) for count in (1, 2, 3)]
    noise = _error(torch.cat(at_once, dim=1), by_token)
    return min(max(NOISE_FACTOR * noise, LEAST_INEXACT), MOST_INEXACT)


def _error(rows: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest logit."""
    return ((rows - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)).item()


def _compare(rows: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> float:
    """The error; raises where rounding cannot explain it."""
    if rows.shape != wanted.shape:
        raise _Mismatch(f"{tuple(rows.shape)} logits instead of {tuple(wanted.shape)}")
    error = _error(rows, wanted)
    if not error <= tolerance:
        raise _Mismatch(f"logits differ by {error:.1g} of the largest")
    return error


def _target(
    model: PreTrainedModel, encoder_kwargs: dict[str, Any], prompt: list[int], tier: Tier
) -> tuple[Target, Text]:
    """A target that has read all of `prompt`, and the text that goes with it."""
    ids = torch.tensor([prompt], device=_device(model))
    text = Text(ids, room=16)
    target = Target(model, ids, GenerationConfig(), _arguments(model, ids, encoder_kwargs), [text], tier=tier)
    target.prefill()
    return target, text


def _reference(
    model: PreTrainedModel, encoder_kwargs: dict[str, Any], rows: list[list[int]], count: int
) -> torch.Tensor:
    """`(rows, count, vocab_size)`: logits after each of the last `count` tokens, fed one by one behind the others."""
    ids = torch.tensor(rows, device=_device(model))
    first = ids.shape[1] - count + 1
    kwargs = _arguments(model, ids[:, :first], rows_of(encoder_kwargs, [0] * len(rows), 1))
    outputs = compat.prefill(model, ids[:, :first], GenerationConfig(), kwargs)
    logits = [outputs.logits[:, -1].float()]
    for length in range(first + 1, ids.shape[1] + 1):
        kwargs = compat.updated_kwargs(model, outputs, kwargs)
        inputs = model.prepare_inputs_for_generation(ids[:, :length], next_sequence_length=1, **kwargs)
        outputs = model(**inputs, return_dict=True)
        logits.append(outputs.logits[:, -1].float())
    return torch.stack(logits, dim=1)


def _arguments(model: PreTrainedModel, ids: torch.Tensor, encoder_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What `generate` hands to a decoding method for this prompt."""
    kwargs = {"use_cache": True, **encoder_kwargs, **compat.fresh_cache(model, len(ids))}
    if not model.config.is_encoder_decoder and _accepts(model, "position_ids"):
        kwargs["position_ids"] = compat.own_positions(model, ids, kwargs)
    return kwargs


def _encode(model: PreTrainedModel) -> dict[str, Any]:
    """A few encoded tokens, for models whose encoder reads text."""
    prompt, _ = _tokens(model, 0)
    encoder = model.get_encoder()
    return {"encoder_outputs": encoder(input_ids=torch.tensor([prompt], device=_device(model)), return_dict=True)}


def _tokens(model: PreTrainedModel, attempt: int) -> tuple[list[int], list[int]]:
    """A prompt and eight more tokens, spread over the vocabulary, no two neighbours alike where there is room."""
    vocab_size: int = compat.text_config(model.config).vocab_size
    step = max(vocab_size // 19, 1)
    length = _prompt_length(compat.text_config(model.config))
    tokens = [(7 + attempt + step * i) % vocab_size for i in range(length + 8)]
    return tokens[:length], tokens[length:]


def _prompt_length(config: Any) -> int:
    """Long enough to reach beyond a window that a model applies by itself, unseen by transformers' mask functions."""
    windows = [
        value
        for name, value in vars(config).items()
        if isinstance(value, int)
        and any(word in name for word in OWN_WINDOWS)
        and name not in MASKED_WINDOWS
        and value <= LONGEST_PROMPT
    ]
    positions = getattr(config, "max_position_embeddings", None) or LONGEST_PROMPT
    return max(PROMPT_LENGTH, min(max(windows, default=0) + 4, positions - 8))


def _device(model: PreTrainedModel) -> torch.device:
    """Where inputs go; the embeddings' execution device under accelerate's offloading."""
    hook = getattr(model, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    return torch.device(device) if device is not None else model.device


def _accepts(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters


def _sentence(exception: Exception) -> str:
    """What went wrong, for people who have not read the model's code."""
    if isinstance(exception, (_Mismatch, UnsupportedModelError)):
        return str(exception)
    return f"its forward does not allow for it ({type(exception).__name__})"
