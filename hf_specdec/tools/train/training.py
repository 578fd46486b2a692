"""Trains a draft of any kind: the target writes texts, the draft learns them, the best weights are saved."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specdec import compat
from hf_specdec.common.files import check_path
from hf_specdec.errors import ConfigError
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.tools.train.card import write_card
from hf_specdec.tools.train.config import HeadTraining, Training
from hf_specdec.tools.train.dflash import DFlashStudent
from hf_specdec.tools.train.draft import DraftStudent
from hf_specdec.tools.train.eagle3 import Eagle3Student
from hf_specdec.tools.train.loop import HeadReport, TrainingLoop, accelerator_for, frozen
from hf_specdec.tools.train.student import Student
from hf_specdec.tools.train.work import check_folder, held
from hf_specdec.tools.train.writing import Prompt, write_texts

STUDENTS: dict[type[Training], type[Student[Any, Any]]] = {
    student.config_class: student for student in (Eagle3Student, DFlashStudent, DraftStudent)
}


def train_draft(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt] | None,
    out: str | os.PathLike[str],
    config: Training | None = None,
    *,
    head: DraftHead | None = None,
    show_progress: bool = True,
) -> HeadReport:
    """Train a draft for `target` and save it, with a model card, to `out`.

    A `HeadTraining` trains an EAGLE-3 head, a `DFlashTraining` a DFlash or DSpark head, whose embeddings and output
    head are not trained; a `DraftTraining` distils a draft model of the target's architecture with fewer layers.

    Args:
        target (`PreTrainedModel`): the model to draft for; it is not changed.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer; a draft model is saved with it.
        prompts (`Sequence`, *optional*): what the target's texts begin with: texts, or chats, each a list of messages,
            which go through the tokenizer's chat template; between two user messages in a row the target answers.
            `None` lets it write from its first token on, never greedily.
        out (`str`): folder of the draft. Texts, hidden states and the state of training lie in `out`/work, which may be
            deleted afterwards.
        config (`Training`, *optional*): the kind of draft and the settings; by default `HeadTraining()`.
        head (`DraftHead`, *optional*): a head of this target and of the config's kind to begin with; its shape and the
            tokens that it drafts stay, of a DFlash head its form on disk too; it is not changed. `None` begins with a
            new one.
        show_progress (`bool`, *optional*, defaults to `True`): whether bars are shown where stderr is a terminal.

    Raises:
        ConfigError: an argument is of another type, a setting does not fit, `head` is for another target, `out` holds
            a model of another origin or work of other settings, cannot be written, or another training writes there.
        CheckpointError: a file in `out`/work is damaged.
        OSError: a file cannot be written, as on a full disk.
        UnsupportedModelError: no draft of this kind goes with the target, as no head does with an encoder-decoder.
    """
    config = _checked_config(target, tokenizer, prompts, out, config)
    kind = STUDENTS[type(config)]
    kind.check_head(head, config)
    check_folder(out, target, head)
    accelerator, work = accelerator_for(target, config), Path(out) / "work"
    is_shown = show_progress and accelerator.is_main_process
    student = kind(target, tokenizer, config, head)
    with frozen(target), held(work) if accelerator.is_main_process else nullcontext():
        write_texts(accelerator, target, tokenizer, prompts, work, config, student, is_shown=is_shown)
        torch.manual_seed(config.seed)
        draft = student.draft(work, range(config.num_held_out_shards, config.num_shards))
        report = TrainingLoop(accelerator, student, draft, work, config).run(is_shown)
        if accelerator.is_main_process:
            student.save(draft, out)
            write_card(Path(out), report, student, draft, None if prompts is None else len(prompts))
        accelerator.wait_for_everyone()
    return report


def _checked_config(
    target: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt] | None,
    out: str | os.PathLike[str],
    config: Training | None,
) -> Training:
    """The settings, next to arguments of the right types. Without prompts texts are drawn: greedily there is one alone.

    Raises:
        ConfigError: names the argument that is not.
    """
    if not isinstance(compat.generation_model(target), PreTrainedModel):
        remedy = "Load it with hf_specdec.AutoModelForCausalLM."
        raise ConfigError("target", "must be a transformers model", type(target).__name__, remedy)
    if prompts is not None and not callable(tokenizer):
        remedy = "Load it with transformers.AutoTokenizer."
        raise ConfigError("tokenizer", "must be a tokenizer, which encodes the prompts", tokenizer, remedy)
    is_listed = prompts is None or (isinstance(prompts, Sequence) and not isinstance(prompts, str | bytes))
    listed = list(prompts or ()) if is_listed else [None]
    if not all(isinstance(prompt, str) for prompt in listed) and not (listed and all(map(_is_chat, listed))):
        remedy = "Write [text] or [messages], also for one; None lets the target write from its first token."
        raise ConfigError("prompts", "must be a list of texts, or of chats", prompts, remedy)
    check_path("out", out, "a folder to write")
    config = HeadTraining() if config is None else config
    if type(config) not in STUDENTS:
        names = " or ".join(known.__name__ for known in STUDENTS)
        raise ConfigError("config", f"must be a {names}", config, "Import one from hf_specdec.tools.train.")
    if prompts is not None:
        return config
    return dataclasses.replace(config, temperatures=tuple(t for t in config.temperatures if t > 0.0) or (1.0,))


def _is_chat(prompt: Any) -> bool:
    """True for a list of messages with a role and a text each."""
    if isinstance(prompt, str | bytes) or not isinstance(prompt, Sequence) or not prompt:
        return False
    texts = [message.get(key) for message in prompt if isinstance(message, Mapping) for key in ("role", "content")]
    return len(texts) == 2 * len(prompt) and all(isinstance(text, str) for text in texts)
