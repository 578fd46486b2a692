"""`hf-specdec train`: make an EAGLE-3 head for any target, from texts that the target writes or that a file holds."""

import dataclasses
import logging
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_specdec.common.files import json_value, lines_of, read_text
from hf_specdec.errors import ConfigError
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.models import load
from hf_specdec.tools.cli.options import LoadOptions
from hf_specdec.tools.cli.processes import process_device
from hf_specdec.tools.cli.report import noting_interrupts, print_json
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.train import HeadTraining, train_head


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
    config: HeadTraining,
    trainer: TrainerOptions,
    loading: LoadOptions,
    json: options.Json = False,
) -> None:
    """Train an EAGLE-3 head for a target, by transformers' Trainer.

    The target continues prompts and answers chats that have no answer. Training ends when held-out acceptance rises no
    more. The head is saved in the speculators format. `accelerate launch -m hf_specdec train ...` shares the training
    between processes.
    """
    arguments = trainer.read()
    data = None if prompts is None else [item for path in prompts for item in _items(path)]
    loaded, _ = load(loading, device=process_device())
    logging.basicConfig(format="%(message)s")  # the measurements, on stderr
    logging.getLogger("hf_specdec").setLevel(logging.INFO)
    with noting_interrupts(f"{out} keeps what was done; the same command continues"):
        report = train_head(loaded.model, loaded.tokenizer, data, out, config, **arguments)
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
