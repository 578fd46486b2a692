"""`hf-specdec train`: make an EAGLE-3 head for any target, from texts that the target writes or that a file holds."""

import dataclasses
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.common.files import json_value, lines_of, read_text
from hf_specdec.errors import ConfigError
from hf_specdec.methods.eagle3.checkpoint import load_head
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.models import load, process_device
from hf_specdec.tools.cli.options import LoadOptions
from hf_specdec.tools.cli.report import noting_interrupts, print_json
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.train import HeadTraining, train_head

DEFAULT = HeadTraining()


@dataclasses.dataclass(frozen=True, slots=True)
class TextOptions:
    """Texts and shape of the head."""

    num_texts: Annotated[
        int, typer.Option(help="Most prompts, chats or texts; without --prompts, texts that the target writes.")
    ] = DEFAULT.num_texts
    max_length: Annotated[int, typer.Option(help="Most tokens of a text; longer prompts are left out.")] = (
        DEFAULT.max_length
    )
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that the target writes after each prompt.")] = (
        DEFAULT.max_new_tokens
    )
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Let the target write its own answers in place of the chats'.")
    ] = DEFAULT.regenerate
    layer_ids: Annotated[
        list[int] | None,
        typer.Option(
            help="A hidden state that the head reads, 0 the embeddings; repeat for more. Default: low, middle, high."
        ),
    ] = None
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Most tokens that the head can draft. Default: 32,000.")
    ] = None
    rollout_steps: Annotated[int, typer.Option(help="Draft steps that are trained and measured.")] = (
        DEFAULT.rollout_steps
    )

    def read(self) -> HeadTraining:
        """The same, checked."""
        layer_ids = tuple(self.layer_ids) if self.layer_ids else None
        return HeadTraining(**dataclasses.asdict(self) | {"layer_ids": layer_ids})


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Arguments of transformers' Trainer."""

    num_train_epochs: Annotated[float | None, typer.Option(help="Most passes over the texts. Default: 8.")] = None
    max_steps: Annotated[int | None, typer.Option(help="Most steps. Default: those of the passes.")] = None
    per_device_train_batch_size: Annotated[int | None, typer.Option(help="Texts a step. Default: 8.")] = None
    learning_rate: Annotated[float | None, typer.Option(help="Default: 0.4 / hidden_size.")] = None
    seed: Annotated[int | None, typer.Option(help="Of texts and training. Default: 42.")] = None
    training_arguments: Annotated[
        str | None, typer.Option(help="Others of transformers.TrainingArguments, as JSON: '{\"bf16\": true}'.")
    ] = None

    def read(self) -> dict[str, Any]:
        """The arguments that have a value."""
        values = dataclasses.asdict(self)
        text = values.pop("training_arguments")
        others = {} if text is None else json_value(text)
        if not isinstance(others, dict):
            remedy = "Write '{\"bf16\": true}', for example."
            raise ConfigError("training_arguments", "must be a JSON object", text, remedy)
        return {name: value for name, value in (values | others).items() if value is not None}


@spread
def train(
    *,
    out: Annotated[Path, typer.Option(help="Folder of the head; an interrupted training there goes on.")],
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="A .jsonl file (.gz too) of prompts, chats or texts; repeat for more. Default: the target writes all."
        ),
    ] = None,
    head: Annotated[Path | None, typer.Option(help="Folder of a head to train on. Default: a new one.")] = None,
    texts: TextOptions,
    trainer: TrainerOptions,
    loading: LoadOptions,
    json: options.Json = False,
) -> None:
    """Train an EAGLE-3 head for a target, by transformers' Trainer.

    The target continues prompts and answers chats that have no answer. Training ends when held-out acceptance rises no
    more. The head is saved in the speculators format. `accelerate launch -m hf_specdec train ...` shares the training
    between processes.
    """
    config, arguments = texts.read(), trainer.read()
    data = None if prompts is None else [item for path in prompts for item in _items(path)]
    start = None if head is None else load_head(head)
    loaded = load(loading)
    if (device := process_device()) is not None and loading.device_map is None:
        loaded.model.to(device)
    logging.basicConfig(format="%(message)s")  # the measurements, on stderr
    logging.getLogger("hf_specdec").setLevel(logging.INFO)
    with noting_interrupts(f"{out} keeps what was done; the same command continues"):
        report = train_head(loaded.model, loaded.tokenizer, data, out, config, head=start, **arguments)
    if json:
        print_json({"out": str(out), **dataclasses.asdict(report)})
    else:
        print(f"{report.tokens_per_step:.2f} tokens per step on held-out texts, after step {report.best_step}")
    note(f"wrote {out}", "dim")


def _items(path: Path) -> list[Any]:
    """The values of a file's lines; what is no JSON stands as `None` for a line that `train_head` refuses."""
    if not path.is_file():
        raise ConfigError("prompts", "must be an existing file", str(path), "Check the spelling.")
    return [json_value(line) or {"line": line[:200]} for _, line in lines_of(read_text(path, "prompts"))]
