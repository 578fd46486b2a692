"""What a model can do, found by trying: a few tokens as a tree against the same tokens in sequence, then a rollback.

Never a list of model names. The reference is the model as plain `generate` drives it: a prompt, then token by token.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from hf_specdec import compat
from hf_specdec.common.tree import DraftTree, TreeBuilder
from hf_specdec.compat.masks import has_table_with_window
from hf_specdec.errors import UnsupportedModelError
from hf_specdec.forward.capabilities.probe_rows import probe_rows
from hf_specdec.forward.capabilities.reference import (
    REFUSALS,
    ProbeFailed,
    arguments,
    compare,
    encoded,
    reference,
    sentence,
    tokens_of,
    tolerance_of,
    tried,
)
from hf_specdec.forward.target.adapters import adapter_of, lacks_hooks, takes_positions
from hf_specdec.forward.target.model_runner import ModelRunner, Tier
from hf_specdec.forward.target.token_buffer import TokenBuffer
from hf_specdec.forward.target.tree_mask import TreeMasks


@dataclass(frozen=True, slots=True)
class Capability:
    """How a model can be driven.

    Attributes:
        tier (`str`): `"tree"`: any tree is verified in one forward. `"chain"`: several tokens in sequence are.
            `"plain"`: one token a forward.
        reason (`str`): what was found, in a sentence.
        attention (`str | None`): the attention implementation it was found with.
        dtype (`str`): the dtype it was found with.
        error (`float`): largest difference of a logit from the reference, over the largest logit; NaN where nothing
            was compared.
    """

    tier: Tier
    reason: str
    attention: str | None
    dtype: str
    error: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; no error where nothing was compared."""
        return {**asdict(self), "error": None if math.isnan(self.error) else self.error}


@torch.no_grad()
def probe(model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None = None) -> Capability:
    """Find the tier of `model`. Uses no random numbers and leaves the model as it is.

    Args:
        encoder_kwargs: for encoder-decoder models, `encoder_outputs` and `attention_mask` of one row; by default a
            few tokens are encoded.

    Raises:
        ProbeFailed: a fault that may pass; it says nothing of the model.
    """
    if _forgets_what_it_sees(model):
        reason = "several tokens in one forward do not work: its cache has a window that its mask does not have"
        return _found(model, "plain", reason)
    why_not_tree = _known_reason(model)
    try:
        if model.config.is_encoder_decoder:
            encoder_kwargs = encoder_kwargs or tried(lambda _: encoded(model))
        if why_not_tree is None:
            try:
                error = tried(lambda attempt: _try_tree(model, encoder_kwargs or {}, attempt))
                _check_rows(model, encoder_kwargs)
                return verifies_trees(model, error)
            except REFUSALS as exception:
                why_not_tree = sentence(exception)
        if compat.counts_padding_out(model):
            reason = "its positions count a token of padding in a text otherwise than plain decoding"
            raise UnsupportedModelError(reason)
        error = tried(lambda attempt: _try_chain(model, encoder_kwargs or {}, attempt))
        return _found(model, "chain", f"several tokens in sequence work; no tree: {why_not_tree}", error)
    except REFUSALS as exception:
        reason = f"several tokens in one forward do not work: {sentence(exception)}"
        if model.training:
            reason += " (it is in train mode; call its eval() for forwards without dropout)"
        elif compat.rounds_tokens_together(model):
            reason += " (its int8 layers round a token by the outliers of others; llm_int8_threshold=0.0 does not)"
        return _found(model, "plain", reason)


def verifies_trees(model: PreTrainedModel, error: float) -> Capability:
    """What holds for a model whose trees were right, but for `error`."""
    return _found(model, "tree", "a tree of tokens gives the logits of the same tokens in sequence", error)


def untried(model: PreTrainedModel, error: ProbeFailed) -> Capability:
    """What holds for a call whose probe failed."""
    return _found(model, "plain", f"several tokens in one forward could not be tried: {error}")


def _found(model: PreTrainedModel, tier: Tier, reason: str, error: float = math.nan) -> Capability:
    attention, dtype = compat.attention_implementation(model.config), str(model.dtype).removeprefix("torch.")
    return Capability(tier, reason, attention, dtype, error)


def _forgets_what_it_sees(model: PreTrainedModel) -> bool:
    """Whether a window is in the cache alone: then what a token sees depends on how many are computed at once."""
    is_sliding = getattr(compat.fresh_cache(model).get(compat.CACHE), "is_sliding", [])
    return any(is_sliding) and not compat.knows_windows(model)


def _known_reason(model: PreTrainedModel) -> str | None:
    """Why there is no use in trying a tree, where that can be seen without trying."""
    if not TreeMasks(model).supported:
        name = compat.attention_implementation(model.config)
        return f'{name!r} attention takes no mask of a tree; attn_implementation="sdpa" does'
    if lacks_hooks(model):
        return "it is compiled, and a compiled forward leaves out the hooks that place a tree's tokens"
    if has_table_with_window(model):
        return "its windows are counted in columns of the cache, of which a tree has more than its text"
    if not takes_positions(model) and adapter_of(model) is None:
        of_cache = "its decoder takes positions from the cache"
        return of_cache if model.config.is_encoder_decoder else "its forward takes no position_ids"
    return None


def _check_rows(model: PreTrainedModel, encoder_kwargs: dict[str, Any] | None) -> None:
    """A model that counts positions by itself has to tell the rows of a batch apart, as it does with chains."""
    if takes_positions(model) and not model.config.is_encoder_decoder:
        return
    if (reason := probe_rows(model, "tree", encoder_kwargs)) is not None:
        raise UnsupportedModelError(reason)


def _try_tree(model: PreTrainedModel, encoder_kwargs: dict[str, Any], attempt: int) -> float:
    prompt, t = tokens_of(model, attempt)
    builder = TreeBuilder(t[0])
    a, b = builder.add(0, t[1]), builder.add(0, t[2])
    builder.add(a, t[3]), builder.add(a, t[4])
    young = builder.build()
    d = builder.add(b, t[5])
    paths = [[t[0], t[1], t[3]], [t[0], t[1], t[4]], [t[0], t[2], t[5]]]
    wanted = reference(model, encoder_kwargs, prompt, paths)
    target, text = runner_after(model, encoder_kwargs, prompt, "tree")
    if target.tier != "tree":
        raise UnsupportedModelError("its cache holds states beside keys and values")
    text.append(t[0])
    rows = target.forward([young])[0]
    rows = torch.cat([rows, target.forward([builder.build()])[0]]).float()  # some models drop the mask of one token
    order = [[0, a, 3], [0, a, 4], [0, b, d]]
    tolerance = tolerance_of(model, encoder_kwargs, prompt, t)
    error = compare(rows[torch.tensor(order, device=rows.device)], wanted, tolerance)
    target.commit([[0, b, d]])
    return max(error, _continue(model, encoder_kwargs, target, text, [t[2], t[5]], t[6:8], tolerance))


def _try_chain(model: PreTrainedModel, encoder_kwargs: dict[str, Any], attempt: int) -> float:
    prompt, t = tokens_of(model, attempt)
    wanted = reference(model, encoder_kwargs, prompt, [t[:6]])
    target, text = runner_after(model, encoder_kwargs, prompt, "chain")
    text.append(t[0])
    tolerance = tolerance_of(model, encoder_kwargs, prompt, t)
    error = compare(target.forward([DraftTree.chain(t[0], t[1:3])])[0][None].float(), wanted[:, :3], tolerance)
    target.commit([[0, 1, 2]])
    for token in t[1:4]:
        text.append(token)
    rows = target.forward([DraftTree.chain(t[3], [*t[4:6], t[0]])])[0][None].float()
    error = max(error, compare(rows[:, :3], wanted[:, 3:], tolerance))
    target.commit([[0, 1]])
    return max(error, _continue(model, encoder_kwargs, target, text, [t[4]], t[6:8], tolerance))


def _continue(
    model: PreTrainedModel,
    encoder_kwargs: dict[str, Any],
    target: ModelRunner,
    text: TokenBuffer,
    accepted: list[int],
    more: list[int],
    tolerance: float,
) -> float:
    """After a commit, two further tokens must come out as if nothing had ever been rejected."""
    for token in [*accepted, more[0]]:
        text.append(token)
    rows = target.forward([DraftTree.chain(more[0], more[1:])])[0][None].float()
    length = target.input_ids.shape[1]
    wanted = reference(model, encoder_kwargs, text.tokens[:length], [[*text.tokens[length:], *more[1:]]])
    return compare(rows, wanted[:, -2:], tolerance)


def runner_after(
    model: PreTrainedModel, encoder_kwargs: dict[str, Any], prompt: list[int], tier: Tier
) -> tuple[ModelRunner, TokenBuffer]:
    """What drives a model that has read all of `prompt`, and the text that goes with it."""
    ids = torch.tensor([prompt], device=compat.input_device(model))
    text = TokenBuffer(ids, room=16)
    target = ModelRunner(model, ids, GenerationConfig(), arguments(model, ids, encoder_kwargs), [text], tier=tier)
    target.prefill()
    return target, text
