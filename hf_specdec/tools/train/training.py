"""Trains an EAGLE-3 head: the target writes what texts lack, `Trainer` trains, the best weights are saved."""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_specdec.common.files import check_path
from hf_specdec.compat.attention import position_limit
from hf_specdec.compat.devices import input_device
from hf_specdec.compat.models import generation_model, text_config
from hf_specdec.errors import ConfigError
from hf_specdec.methods.eagle3.network import save_head
from hf_specdec.tools.train.config import HeadTraining
from hf_specdec.tools.train.examples import Entry, Example, ExampleReader, Item, Texts, collated, in_batches, measured
from hf_specdec.tools.train.new_head import chosen_layers, new_head
from hf_specdec.tools.train.rollout import HeadRollout
from hf_specdec.tools.train.writing import write_texts

logger = logging.getLogger("hf_specdec")
TOKENS = "tokens_per_step"


@dataclass(frozen=True, slots=True)
class HeadReport:
    """One training.

    Attributes:
        num_steps (`int`): steps trained.
        best_step (`int`): the step whose weights were kept.
        loss (`float`): of the kept weights on the held-out texts, in nats; the draft steps' weighted sum.
        accepted (`tuple[float, ...]`): share of the held-out positions at which the first drafted token was the
            text's, the first two, and so on.
        tokens_per_step (`float`): tokens that a verify step of such a chain brings, the target's own among them.
    """

    num_steps: int
    best_step: int
    loss: float
    accepted: tuple[float, ...]
    tokens_per_step: float


def train_head(
    target: PreTrainedModel,
    tokenizer: Any,
    data: Sequence[Item] | None,
    out: str | os.PathLike[str],
    config: HeadTraining | None = None,
    *,
    show_progress: bool = True,
    **training_arguments: Any,
) -> HeadReport:
    """Train an EAGLE-3 head for `target` and save it to `out` in the speculators format.

    The same call continues after an interruption, with the texts and from the last checkpoint in the folder `work` of
    `out`, which may be deleted afterwards.

    Args:
        target (`PreTrainedModel`): the model to draft for; its weights stay as they are. It is enabled if it is not.
        tokenizer (`PreTrainedTokenizerBase`): its tokenizer.
        data (`Sequence`, *optional*): prompts (`str`), which the target continues; chats, each a list of messages,
            whose answers are learned and where the target writes those that are missing; or mappings as in the lines of
            a `.jsonl` file, of which `{"text": ...}` is learned as it is. `None` lets the target write all of it: of a
            chat model the users' messages too.
        out (`str`): folder of the head.
        config (`HeadTraining`, *optional*): texts, shape and loss.
        show_progress (`bool`, *optional*, defaults to `True`): whether a bar is shown while texts are written, where
            stderr is a terminal.
        training_arguments (`Any`): of `transformers.TrainingArguments`, such as `num_train_epochs`, `max_steps`,
            `per_device_train_batch_size`, `learning_rate`, `eval_steps`, `seed` or `bf16`.

    Raises:
        ConfigError: an argument is of another type, a setting does not fit, or `out` holds a model or
            work of other settings.
        CheckpointError: the file of texts is damaged.
        UnsupportedModelError: no head goes with the target, as with an encoder-decoder.
    """
    config = HeadTraining() if config is None else config
    _check(target, tokenizer, data, out, config)
    layer_ids = chosen_layers(target, config.layer_ids)
    config = dataclasses.replace(config, max_length=min(config.max_length, position_limit(target) or config.max_length))
    work = Path(out) / "work"
    args = _arguments(target, work, training_arguments)
    reader = ExampleReader(tokenizer, target.generation_config.bos_token_id, config)
    entries = [reader.read(item) for item in ([None] * config.num_texts if data is None else data[: config.num_texts])]
    with args.main_process_first(desc="texts"):
        _begin(work, _settings(target, entries, config))
        is_shown = show_progress and args.process_index == 0
        texts = write_texts(target, reader, entries, work / "texts.jsonl", args.seed, is_shown=is_shown)
    learned, held_out = _split(texts, config, args)
    set_seed(args.seed)
    trained = new_head(target, layer_ids, _counts(target, learned.examples), config.draft_vocab_size).train()
    rollout = HeadRollout(trained, target, layer_ids, steps=config.rollout_steps, decay=config.step_decay)
    trainer = _trainer(rollout, args, learned, held_out, config.patience)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(work)))
    report = _report(trainer)
    if trainer.is_world_process_zero():
        save_head(trained.eval().requires_grad_(False).to(target.dtype), out)
    return report


def _report(trainer: Trainer) -> HeadReport:
    """Evaluate the head and return the report of its training."""
    metrics, best_step = trainer.evaluate(), trainer.state.best_global_step
    return HeadReport(
        num_steps=trainer.state.global_step,
        best_step=trainer.state.global_step if best_step is None else best_step,
        loss=metrics["eval_loss"],
        accepted=tuple(metrics["eval_accepted"]),
        tokens_per_step=metrics["eval_tokens_per_step"],
    )


def _trainer(rollout: HeadRollout, args: TrainingArguments, learned: Texts, held_out: Texts, patience: int) -> Trainer:
    """The Trainer of a rollout, which measures acceptance and ends where it rises no more."""
    trainer = Trainer(
        rollout,
        args,
        data_collator=collated,
        train_dataset=learned,
        eval_dataset=held_out,
        compute_metrics=measured,
        callbacks=[EarlyStoppingCallback(patience), _LogMeasurements()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout
    return trainer


class _LogMeasurements(TrainerCallback):
    """Logs what is measured on the held-out texts."""

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, Any], **kwargs: Any) -> None:
        if state.is_world_process_zero:
            line = "step %d of at most %d: held-out loss %.3f, %.2f tokens per step"
            values = metrics["eval_loss"], metrics[f"eval_{TOKENS}"]
            logger.info(line, state.global_step, state.max_steps, *values)


def _arguments(target: PreTrainedModel, work: Path, values: dict[str, Any]) -> TrainingArguments:
    """The arguments of the training, ours where the caller gives none.

    Raises:
        ConfigError: transformers refuses one.
    """
    defaults: dict[str, Any] = {
        "output_dir": str(work),
        "num_train_epochs": 8.0,
        "learning_rate": 0.4 / text_config(target.config).hidden_size,  # 1e-4 at 4,096, as of published heads
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.03,
        "eval_steps": 100,
        "logging_steps": 100,
        "train_sampling_strategy": "sequential",
        "use_cpu": input_device(target).type == "cpu",
        "dataloader_pin_memory": input_device(target).type != "cpu",
        "report_to": [],
    }
    values = defaults | values
    fixed = {
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "save_steps": values["eval_steps"],
        "save_total_limit": 2,
        "load_best_model_at_end": True,
        "metric_for_best_model": TOKENS,
        "greater_is_better": True,
        "label_names": ["input_ids"],
        "remove_unused_columns": False,
        "disable_tqdm": True,
    }
    try:
        return TrainingArguments(**values | fixed)
    except (TypeError, ValueError) as error:
        rule = "must be what transformers.TrainingArguments takes"
        raise ConfigError("training_arguments", rule, values, str(error)) from error


def _check(target: Any, tokenizer: Any, data: Any, out: Any, config: Any) -> None:
    """Raise unless the arguments are of their types and fit each other."""
    if not isinstance(generation_model(target), PreTrainedModel):
        remedy = "Load it with hf_specdec.AutoModelForCausalLM."
        raise ConfigError("target", "must be a transformers model", type(target).__name__, remedy)
    if not callable(tokenizer):
        remedy = "Load it with transformers.AutoTokenizer."
        raise ConfigError("tokenizer", "must be a tokenizer", tokenizer, remedy)
    if data is not None and (not isinstance(data, Sequence) or isinstance(data, str | bytes) or len(data) < 2):
        rule, remedy = "must be a list of two prompts, chats or texts at least", "One of them is held out."
        raise ConfigError("data", rule, data, remedy)
    if not isinstance(config, HeadTraining):
        raise ConfigError("config", "must be a HeadTraining", config, "Import it from hf_specdec.tools.train.")
    check_path("out", out, "a folder to write")
    if (Path(out) / "config.json").exists() and not (Path(out) / "work" / "settings.json").exists():
        rule = "must be a new folder or that of an earlier training, and holds a model"
        raise ConfigError("out", rule, os.fspath(out), "Choose another folder.")


def _settings(target: PreTrainedModel, entries: Sequence[Entry], config: HeadTraining) -> dict[str, Any]:
    """Settings that determine the texts and the head's shape, as JSON values."""
    values: dict[str, Any] = {"target": str(target.config.name_or_path), "num_parameters": target.num_parameters()}
    values |= {"data": hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:16]}
    names = ("num_texts", "max_length", "max_new_tokens", "temperatures", "regenerate", "layer_ids", "draft_vocab_size")
    values |= {name: getattr(config, name) for name in (*names, "held_out")}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _begin(work: Path, settings: dict[str, Any]) -> None:
    """Note the settings, or check that the work there is of the same.

    Raises:
        ConfigError: it is of others.
    """
    file = work / "settings.json"
    work.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    earlier = json.loads(file.read_text("utf-8"))
    for name, value in settings.items():
        if earlier.get(name) != value:
            rule = f"must be {earlier.get(name)!r} to go on with the work in {str(work)!r}"
            raise ConfigError(name, rule, value, "Use another folder, or delete that one.")


def _split(texts: Sequence[Sequence[Example]], config: HeadTraining, args: TrainingArguments) -> tuple[Texts, Texts]:
    """The examples to learn, and those held out; the examples of one chat stay together.

    Raises:
        ConfigError: there are too few.
    """
    kept = [examples for examples in texts if any(len(e.ids) > e.num_prompt_tokens + 1 for e in examples)]
    num_held_out = max(1, round(len(kept) * config.held_out))
    if len(kept) < 2:
        rule = f"must have two texts at least, of {config.max_length} tokens at most, that go on after their prompts"
        raise ConfigError("data", rule, f"{len(kept)} of {len(texts)}", "Give shorter prompts, or others.")
    learned, held_out = list(chain(*kept[num_held_out:])), list(chain(*kept[:num_held_out]))
    return Texts(in_batches(learned, args.per_device_train_batch_size, args.seed)), Texts(held_out)


def _counts(target: PreTrainedModel, examples: Sequence[Example]) -> torch.Tensor:
    """`(vocab_size,)`: how often each token stands in the texts."""
    counts = torch.zeros(text_config(target.config).vocab_size, dtype=torch.long)
    for example in examples:
        counts += torch.bincount(torch.tensor(example.ids), minlength=len(counts))
    return counts
