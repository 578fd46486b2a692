"""Prompts as token ids, and the texts that the target writes after them, with what it computed on the way.

A shard is one file: the ids of its texts, the hidden states that a head reads, and the target's likeliest next tokens
with their probabilities. What was written is not written again.
"""

import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import compat
from hf_specdec.common.files import replacing, saving_tensors
from hf_specdec.common.transfer import left_padded
from hf_specdec.errors import CheckpointError, ConfigError
from hf_specdec.forward.hidden_states import check_states
from hf_specdec.tools.train.batch import TENSORS, Texts
from hf_specdec.tools.train.chats import Chats
from hf_specdec.tools.train.config import Training

# of `generate`, whatever the target's generation configuration says: one text for a prompt, by itself
ONE: dict[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "return_dict_in_generate": False}
TOP = 64  # likeliest tokens that are kept of each distribution; the rest of it is little and trains nothing


def prompt_ids(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, length: int, config: Training
) -> list[list[int]]:
    """The prompts as token ids, each of at most `length`; longer ones are cut into several.

    Texts are taken in a seeded order until there are prompts for all that the target writes.

    Raises:
        ConfigError: there is no token in them.
    """
    pieces: list[list[int]] = []
    for text in random.Random(config.seed).sample(list(texts), len(texts)):
        if len(pieces) >= 2 * config.num_texts:
            break
        ids = tokenizer(text, verbose=False)["input_ids"]
        starts = range(0, max(len(ids) - length // 2, 1), length)
        pieces += [ids[start : start + length] for start in starts if ids]
    if not pieces:
        raise ConfigError("prompts", "must hold at least one token", list(texts)[:3], "Give longer prompts.")
    return pieces


def shard_path(folder: Path, index: int) -> Path:
    """Path of shard `index`."""
    return folder / f"shard-{index:05d}.safetensors"


def write_shard(
    folder: Path,
    index: int,
    target: PreTrainedModel,
    prompts: Chats | Mapping[int, Sequence[Sequence[int]]],
    layer_ids: Sequence[int],
    config: Training,
) -> None:
    """Let the target write one shard's texts; nothing where the file is there already.

    Args:
        prompts: chats, or the token ids of texts by their length.
    """
    path = shard_path(folder, index)
    if path.exists():
        return
    temperature = config.temperature_of(index)
    if isinstance(prompts, Chats):
        chosen: Sequence[Sequence[int]] = prompts.prompts_of(
            index, lambda ids: _answers(target, ids, temperature, config, index)
        )
    else:
        chosen = _chosen(prompts[config.prompt_length_of(index)], config, index)
    text, real, longest = _continued(target, chosen, temperature, config, index)
    with torch.no_grad():
        features, top = _computed(target, text, real, layer_ids)
    tensors = (text.int(), features, top.indices.int(), top.values.to(torch.bfloat16), real)
    about = {"num_prompt_tokens": str(longest), "temperature": str(temperature)}
    with saving_tensors(path), replacing(path) as temporary:
        kept = {name: tensor.cpu().contiguous() for name, tensor in zip(TENSORS, tensors, strict=True)}
        save_file(kept, temporary, metadata=about)


def read_shard(folder: Path, index: int) -> Texts:
    """Shard `index` as it was written.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = shard_path(folder, index)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            about = file.metadata()
    except SafetensorError as error:
        raise CheckpointError(
            f"{str(path)!r} cannot be read: {error}. Delete it, and the target writes it again."
        ) from error
    tensors |= {name: tensors[name].long() for name in ("ids", "top_ids")}
    return Texts(**tensors, num_prompt_tokens=int(about["num_prompt_tokens"]), temperature=float(about["temperature"]))


def _chosen(pieces: Sequence[Sequence[int]], config: Training, index: int) -> list[Sequence[int]]:
    """The prompts of shard `index`: each piece once where there are enough, drawn where there are not."""
    generator = torch.Generator().manual_seed(config.seed + index)
    chosen = torch.randint(len(pieces), (config.texts_per_shard,), generator=generator)
    if len(pieces) >= config.num_texts:
        chosen = torch.arange(config.texts_per_shard) + index * config.texts_per_shard
        order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(config.seed))
        chosen = order[chosen % len(pieces)]
    return [pieces[int(place)] for place in chosen]


def _answers(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], temperature: float, config: Training, index: int
) -> list[list[int]]:
    """Tokens that the target writes after each prompt."""
    text, real, longest = _continued(target, prompts, temperature, config, index)
    return [row[longest:][seen[longest:]].tolist() for row, seen in zip(text, real, strict=True)]


def _continued(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], temperature: float, config: Training, index: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Prompts and what the target writes after them, `(N, L)`; which of them are no padding; columns of the prompts."""
    device = compat.input_device(target)
    pad = target.generation_config.pad_token_id
    pad = pad if isinstance(pad, int) and pad >= 0 else 0
    ids, mask = left_padded(prompts, device, pad)
    longest = ids.shape[1]
    drawing: dict[str, Any] = {"do_sample": False}
    if temperature > 0.0:
        drawing = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(zlib.crc32(f"{config.seed} {index}".encode()))
        text = target.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=config.new_tokens, pad_token_id=pad, **drawing, **ONE
        )
    real = torch.nn.functional.pad(mask.bool(), (0, text.shape[1] - longest), value=True)
    return text, real & ~_behind_the_end(target, text, longest), longest


def _computed(
    target: PreTrainedModel, text: torch.Tensor, real: torch.Tensor, layer_ids: Sequence[int]
) -> tuple[torch.Tensor, Any]:
    """Hidden states and likeliest next tokens of whole texts, a few texts a forward."""
    features, values, indices = [], [], []
    for rows, seen in zip(torch.split(text, 8), torch.split(real, 8), strict=True):
        positions = (seen.long().cumsum(-1) - 1).clamp(min=0)
        outputs = target(
            input_ids=rows,
            attention_mask=seen.long(),
            position_ids=positions,
            output_hidden_states=list(layer_ids) or None,
            use_cache=False,
        )
        if layer_ids:
            check_states(target, outputs.hidden_states or (), layer_ids)
        states = [outputs.hidden_states[i].cpu().bfloat16() for i in layer_ids]
        features.append(torch.cat(states, dim=-1) if states else torch.empty((*rows.shape, 0), dtype=torch.bfloat16))
        top = outputs.logits.float().softmax(-1).topk(min(TOP, outputs.logits.shape[-1]), dim=-1)
        values.append(top.values.cpu())
        indices.append(top.indices.cpu())
    return torch.cat(features), torch.return_types.topk((torch.cat(values), torch.cat(indices)))


def _behind_the_end(target: PreTrainedModel, text: torch.Tensor, num_prompt_tokens: int) -> torch.Tensor:
    """`(N, L)` bool: what stands behind the token that ended a text."""
    ends = target.generation_config.eos_token_id
    if ends is None:
        return torch.zeros_like(text, dtype=torch.bool)
    ended = torch.isin(text, torch.tensor(ends, device=text.device))
    ended[:, :num_prompt_tokens] = False
    return (ended.long().cumsum(-1) - ended.long()) > 0
