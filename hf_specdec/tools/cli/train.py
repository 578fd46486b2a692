"""`hf-specdec train`: make a draft head or a draft model for any target, from text that the target writes."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

from hf_specdec.common.files import is_utf8, read_text
from hf_specdec.compat import computes_bf16, input_device, text_config
from hf_specdec.errors import ConfigError, counted
from hf_specdec.methods.common.draft_head import DraftHead
from hf_specdec.methods.dflash.checkpoint import load_head as load_dflash_head
from hf_specdec.methods.eagle3.checkpoint import load_head
from hf_specdec.tools.bench.table import Table
from hf_specdec.tools.cli import options
from hf_specdec.tools.cli.options import LoadOptions, ModelOptions
from hf_specdec.tools.cli.prompts_file import own_device
from hf_specdec.tools.cli.report import noting_interrupts, print_json, print_table
from hf_specdec.tools.cli.spread import spread
from hf_specdec.tools.command_errors import note
from hf_specdec.tools.prompt_lines import BadLine, PromptLine, read_file
from hf_specdec.tools.train import DFlashTraining, DraftTraining, HeadReport, HeadTraining, Training, train_draft
from hf_specdec.tools.train.dflash import BLOCK_SIZE
from hf_specdec.tools.train.writing import Prompt

DEFAULT = HeadTraining()
Kind = Literal["head", "dflash", "draft"]
KINDS: dict[str, type[Training]] = {kind.kind: kind for kind in (HeadTraining, DFlashTraining, DraftTraining)}
HEADS: dict[str, Callable[[Path], DraftHead]] = {"head": load_head, "dflash": load_dflash_head}  # to train on
NAMES = {"layers": "layer_ids", "max_new_tokens": "new_tokens"}  # of settings whose options are named otherwise


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Settings of the training."""

    kind: Annotated[
        Kind,
        typer.Option(
            help="head: an EAGLE-3 head on the target's hidden states; dflash: one that drafts a block in one forward; "
            "draft: a draft model of fewer layers."
        ),
    ] = "head"

    num_texts: Annotated[int, typer.Option(help="Texts that the target writes.")] = DEFAULT.num_texts
    prompt_tokens: Annotated[
        str | None,
        typer.Option(
            help='Tokens of a prompt; of several lengths, "64,512", files take turns. Longer chats are left out. '
            "Default: 64, of chats 512."
        ),
    ] = None
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that the target writes after each prompt.")] = (
        DEFAULT.new_tokens
    )
    head: Annotated[Path | None, typer.Option(help="Folder of a head to train on. Default: a new one.")] = None
    layers: Annotated[
        str | None,
        typer.Option(
            help='Hidden states that the head reads, "2,16,29": 0 the embeddings, the number of layers the last one. '
            "Default: a low, a middle and a high one."
        ),
    ] = None
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Most tokens that the head can draft. Default: 32,000.")
    ] = None
    draft_layers: Annotated[
        int | None,
        typer.Option(
            help="Layers of a draft model or a DFlash head. Default: a quarter of the target's, or a sixth and at most "
            "five."
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(help=f"Tokens of a DFlash block, the last one of the text among them. Default: {BLOCK_SIZE}."),
    ] = None
    markov_rank: Annotated[
        int | None,
        typer.Option(help="Makes a DFlash head a DSpark head: width of what it adds by the token before, such as 256."),
    ] = None
    epochs: Annotated[float, typer.Option(help="Most passes over the texts.")] = DEFAULT.epochs
    minutes: Annotated[float | None, typer.Option(help="Most minutes of training. Default: no bound.")] = None
    batch_size: Annotated[
        int, typer.Option(help=f"Texts a step, of one process; at most {DEFAULT.texts_per_shard}.")
    ] = DEFAULT.batch_size
    rollout_steps: Annotated[int, typer.Option(help="Draft steps that are measured; a head is trained on them.")] = (
        DEFAULT.rollout_steps
    )
    learning_rate: Annotated[float | None, typer.Option(help="Default: 0.4 / hidden_size.")] = None
    mixed_precision: Annotated[str, typer.Option(help="Of training: no, bf16, fp16.")] = DEFAULT.mixed_precision
    seed: Annotated[int, typer.Option(help="Seed of prompts, texts and training.")] = DEFAULT.seed

    def read(self) -> Training:
        """The same, checked."""
        values = {NAMES.get(name, name): value for name, value in dataclasses.asdict(self).items()}
        takes = {kind: {field.name for field in dataclasses.fields(config)} for kind, config in KINDS.items()}
        for kind in HEADS:
            takes[kind].add("head")
        for name in set().union(*takes.values()) - takes.pop(values.pop("kind")):
            if (value := values.pop(name, None)) is not None:
                kinds = " or ".join(kind for kind, taken in takes.items() if name in taken)
                given = str(value) if name == "head" else value
                raise ConfigError(name, f"must come with --kind {kinds}", given, "Leave it out.")
        values.pop("head", None)
        if self.prompt_tokens is not None:
            values["prompt_tokens"] = _numbers("--prompt-tokens", self.prompt_tokens, "Write 64, or 64,512.")
        if self.layers is not None:
            values["layer_ids"] = _numbers("--layers", self.layers, "Write 2,16,29.")
        return KINDS[self.kind](**values)


@spread
def train(
    *,
    out: Annotated[Path, typer.Option(help="Folder of the draft; an interrupted training there goes on.")],
    model: ModelOptions,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="A .jsonl file (.gz too) of prompts or chats, a text file, or a folder of text files; repeat for "
            "more. Texts are cut into prompts, chats go through the chat template. Default: the target writes from its "
            "first token on."
        ),
    ] = None,
    training: TrainingOptions,
    dtype: options.Dtype = "auto",
    loading: LoadOptions,
    json: options.Json = False,
) -> None:
    """Train a draft for a target, from texts that the target writes: an EAGLE-3 or DFlash head, or a model.

    Training ends when held-out acceptance rises no more. An EAGLE-3 head is saved in the speculators format, a DFlash
    head as its authors save it, a draft model as transformers saves models, all with a model card.
    `accelerate launch -m hf_specdec train ...` shares the work between processes.
    """
    config = training.read()
    lines = None if prompts is None else [line for path in prompts for line in _lines_of(path)]
    loaded = loading.load(model.chosen, dtype)
    texts = None if lines is None else [_asked(line, loaded.tokenizer) for line in lines]
    target, device = loaded.model, own_device()
    if device is not None and loading.device_map is None:
        target.to(device)
    if target.dtype == torch.bfloat16 and not computes_bf16(input_device(target)):
        note("hint: this CPU computes bf16 slowly; --dtype fp32 writes the texts several times as fast", "cyan")
    _note_vocabulary(training.draft_vocab_size, text_config(target.config).vocab_size)
    _show_log()
    with noting_interrupts(f"{out} keeps what was done; the same command continues"):
        head = None if training.head is None else HEADS[training.kind](training.head)
        report = train_draft(target, loaded.tokenizer, texts, out, config, head=head)
    if json:
        print_json({"out": str(out), **dataclasses.asdict(report)})
    else:
        steps = f"{counted(report.num_steps, 'step')}, the best after {report.best_step}"
        print_table(_table(report), f"{steps}, {report.minutes:.1f} minutes")
    note(f"wrote {out}", "dim")


def _note_vocabulary(asked: int | None, vocab_size: int) -> None:
    """Say so where the head can draft fewer tokens than were asked for."""
    if asked is not None and asked > vocab_size:
        note(f"note: the target has {vocab_size} tokens; the head drafts all of them, not {asked}", "yellow")


def _numbers(option: str, text: str, remedy: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(option, "must be whole numbers with commas between", text, remedy) from None


def _lines_of(path: Path) -> list[PromptLine]:
    """The texts of a file, or of all files below a folder; files that are no UTF-8 text are left out of folders."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and is_utf8(file))
        if not files:
            raise ConfigError("--prompts", "must hold text files", str(path), "Check the folder.")
        return [text for file in files for text in _lines_of(file)]
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        if not path.is_file():
            raise ConfigError("--prompts", "must be an existing text file", str(path), "Check the spelling.")
        return [PromptLine((read_text(path, "--prompts"),))]
    lines = read_file(path, "--prompts")
    for number, line in lines:
        if isinstance(line, BadLine):
            raise ConfigError(f"{path.name}:{number}", line.error, line.line, "Correct the line, or take it out.")
    return [line for _, line in lines if isinstance(line, PromptLine)]


def _asked(line: PromptLine, tokenizer: Any) -> Prompt:
    """A text, or the messages of a chat."""
    return line.chat if line.goes_through_template(tokenizer) else line.text


def _show_log() -> None:
    """The measurements while training, on stderr."""
    logger = logging.getLogger("hf_specdec")
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _table(report: HeadReport) -> Table:
    columns = {
        f"first {place + 1} accepted": f"{{rates[{place}]:.3f}}" for place in range(len(report.measured[0].rates))
    }
    columns = {"held-out texts of temperature": "{temperature:g}", **columns, "tokens a step": "{tokens_per_step:.2f}"}
    rows = [{**dataclasses.asdict(one), "tokens_per_step": one.tokens_per_step} for one in report.measured]
    return Table.of("", columns, rows)
