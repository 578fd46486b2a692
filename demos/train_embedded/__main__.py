"""Trains the embedded pair: ``python -m demos.train_embedded --work DIR --minutes 120 --export DIR``.

Four stages, each resumed from its checkpoint in `--work`: tokenizer, target, unlooping of the target, draft. With
`--start FOLDER` the models there are trained on, with `--stages draft` the draft alone.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from demos.train_embedded import corpus, evaluate, objectives
from demos.train_embedded.fit import fit
from demos.train_embedded.loop_free import LoopFreeText, stream_of_loop_free_texts
from demos.train_embedded.models import new_model
from demos.train_embedded.own_texts import own_texts
from hf_specdec.distributed.placement import read_device
from hf_specdec.errors import ConfigError
from hf_specdec.tools.command_errors import run_program

WINDOW, BATCH_SIZE = 512, 8
NUM_OWN_TEXTS = 6144
NUM_LOOP_FREE, LOOP_WEIGHT = 12, 1200.0  # texts next to each batch; weight of a place of theirs, a token's being 1
Batches = Iterator[torch.Tensor]
Wrap = Callable[[Any], Any]


class Stage(StrEnum):
    """What is trained, in this order."""

    TARGET = "target"
    UNLOOP = "unloop"
    DRAFT = "draft"


SHARES = {Stage.TARGET: 0.60, Stage.UNLOOP: 0.14, Stage.DRAFT: 0.26}


def main(
    work: Annotated[Path, typer.Option(help="Folder for tokenizer, token arrays and checkpoints.")],
    export: Annotated[Path, typer.Option(help="Folder to write `target/` and `draft/` to.")],
    minutes: Annotated[float, typer.Option(help="Time for all stages together.")] = 120.0,
    start: Annotated[
        Path | None, typer.Option(help="Folder with `target/` and `draft/` to train on. Default: new models.")
    ] = None,
    stages: Annotated[list[Stage] | None, typer.Option(help="What to train; repeat for more. Default: all.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, ...")] = "cpu",
    compile_model: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
) -> None:
    """Train (or go on training) the embedded pair and export it in bf16."""
    _check(export, minutes, start)
    where = read_device(device, "device")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer, train, held_out = _data(work, start)
    batches = _stream(train, seed)
    wrap = torch.compile if compile_model else (lambda function: function)
    target, draft = (_model(name, start, len(tokenizer)).to(where) for name in ("target", "draft"))
    chosen = stages or list(Stage)
    per_share = minutes / sum(SHARES[stage] for stage in chosen)
    if Stage.TARGET in chosen:
        _train_target(target, batches, held_out, work, per_share * SHARES[Stage.TARGET], wrap)
    if Stage.UNLOOP in chosen:
        texts = stream_of_loop_free_texts(target, train, rows=NUM_LOOP_FREE, seed=seed)
        _train_against_loops(target, batches, held_out, texts, work, per_share * SHARES[Stage.UNLOOP])
    if Stage.DRAFT in chosen:
        target.eval().requires_grad_(False)
        own = _stream(_own_texts(target, train, work, seed), seed)
        by_turns = chain.from_iterable(zip(batches, own, strict=True))
        _train_draft(draft, target, by_turns, held_out, work, per_share * SHARES[Stage.DRAFT], wrap)
    report = _report(target, draft, tokenizer, held_out)
    for name, model in (("target", target), ("draft", draft)):
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.to(torch.bfloat16).save_pretrained(export / name)
        tokenizer.save_pretrained(export / name)
    text = json.dumps(report, indent=2)
    (export / "report.json").write_text(text + "\n")
    typer.echo(text)


def _check(export: Path, minutes: float, start: Path | None) -> None:
    """Refuse what would only show after the training, or in words of torch."""
    if not minutes > 0:
        raise ConfigError("minutes", "must be above 0", minutes, "The default is 120.")
    if export.exists() and not export.is_dir():
        raise ConfigError("export", "must be a folder, or a name that is free", str(export), "Choose another name.")
    for name in ("target", "draft"):
        if start is not None and not (start / name / "config.json").is_file():
            raise ConfigError("start", f"must hold a model in {name}/", str(start), "Check the spelling.")


def _train_target(
    target: PreTrainedModel, batches: Batches, held_out: np.ndarray, work: Path, minutes: float, wrap: Wrap
) -> None:
    """Language modelling."""
    few = held_out[: 64 * WINDOW]
    fit(
        target,
        wrap(functools.partial(objectives.next_token, target)),
        batches,
        checkpoint=work / "target.pt",
        minutes=minutes,
        matrix_lr=0.02,
        other_lr=2e-3,
        evaluate=lambda: {"held-out": evaluate.held_out_loss(target, few)},
    )


def _train_against_loops(
    target: PreTrainedModel,
    batches: Batches,
    held_out: np.ndarray,
    texts: Iterator[list[LoopFreeText]],
    work: Path,
    minutes: float,
) -> None:
    """Language modelling, and one token of each loop that the target writes less likely than another."""
    few = held_out[: 64 * WINDOW]
    fit(
        target,
        lambda batch: objectives.unloop(target, batch, next(texts), weight=LOOP_WEIGHT),
        batches,
        checkpoint=work / "unloop.pt",
        minutes=minutes,
        matrix_lr=0.004,
        other_lr=4e-4,
        evaluate=lambda: {
            "held-out": evaluate.held_out_loss(target, few),
            "looping": evaluate.looping_share(target, held_out),
        },
    )


def _train_draft(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    batches: Batches,
    held_out: np.ndarray,
    work: Path,
    minutes: float,
    wrap: Wrap,
) -> None:
    """Distillation of the finished target, on training text and on the target's own text by turns."""
    few = held_out[: 64 * WINDOW]
    fit(
        draft,
        wrap(functools.partial(objectives.distil, draft, target)),
        batches,
        checkpoint=work / "draft.pt",
        minutes=minutes,
        matrix_lr=0.02,
        other_lr=2e-3,
        evaluate=lambda: {
            "agreement": evaluate.agreement(draft, target, few),
            "on greedy text": evaluate.greedy_agreement(draft, target, held_out),
        },
    )


def _report(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, held_out: np.ndarray
) -> dict[str, float]:
    """What the model card says, over all held-out files."""
    return {
        "held_out_characters_per_token": len(tokenizer.decode(held_out.tolist())) / len(held_out),
        "target_held_out_nats_per_token": evaluate.held_out_loss(target, held_out),
        "draft_held_out_nats_per_token": evaluate.held_out_loss(draft, held_out),
        "draft_agreement": evaluate.agreement(draft, target, held_out),
        "draft_agreement_on_greedy_text": evaluate.greedy_agreement(draft, target, held_out),
        "target_looping_share": evaluate.looping_share(target, held_out),
    }


def _stream(tokens: np.ndarray, seed: int) -> Batches:
    return iter(corpus.TokenStream(tokens, window=WINDOW, batch_size=BATCH_SIZE, seed=seed))


def _own_texts(target: PreTrainedModel, train: np.ndarray, work: Path, seed: int) -> np.ndarray:
    """What the target writes after pieces of the training text, made once and kept in `work`."""
    path = work / "own_texts.npy"
    if not path.exists():
        np.save(path, own_texts(target, train, num_texts=NUM_OWN_TEXTS, seed=seed))
    texts: np.ndarray = np.load(path)
    return texts


def _model(name: str, start: Path | None, vocab_size: int) -> PreTrainedModel:
    """In fp32, to be trained."""
    if start is None:
        return new_model(name, vocab_size=vocab_size)
    return LlamaForCausalLM.from_pretrained(start / name, dtype=torch.float32)


def _data(work: Path, start: Path | None) -> tuple[PreTrainedTokenizerFast, np.ndarray, np.ndarray]:
    """Tokenizer, training tokens and held-out tokens, made once and kept in `work`."""
    if not (work / "held_out.npy").exists():
        train, held_out = corpus.split_files(corpus.stdlib_files())
        work.mkdir(parents=True, exist_ok=True)
        if start is None:
            tokenizer = corpus.train_tokenizer(train)
        else:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(start / "target")
        tokenizer.save_pretrained(work / "tokenizer")
        np.save(work / "train.npy", corpus.encode(train, tokenizer))
        np.save(work / "held_out.npy", corpus.encode(held_out, tokenizer))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    return tokenizer, np.load(work / "train.npy"), np.load(work / "held_out.npy")


if __name__ == "__main__":
    run_program(main)
