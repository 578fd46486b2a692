"""Trains the embedded pair: ``python -m hf_specdec.training.embedded --work DIR --minutes 120 --export DIR``.

Four stages, each resumed from its checkpoint in `--work`: tokenizer, target, unlooping of the target, draft.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hf_specdec.training.embedded import corpus, evaluate, objectives
from hf_specdec.training.embedded.fit import fit
from hf_specdec.training.embedded.models import new_model

WINDOW, BATCH_SIZE = 512, 8
Batches = Iterator[torch.Tensor]
Wrap = Callable[[Any], Any]
SHARES = {"target": 0.70, "unloop": 0.16, "draft": 0.14}


def main(
    work: Annotated[Path, typer.Option(help="Folder for tokenizer, token arrays and checkpoints.")],
    export: Annotated[Path, typer.Option(help="Folder to write `target/` and `draft/` to.")],
    minutes: Annotated[float, typer.Option(help="Time for all stages together.")] = 120.0,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = 2,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, ...")] = "cpu",
    compile_model: Annotated[bool, typer.Option("--compile", help="Use torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
) -> None:
    """Train (or go on training) the embedded pair and export it in bf16."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer, train, held_out = _data(work)
    batches = iter(corpus.TokenStream(train, window=WINDOW, batch_size=BATCH_SIZE, seed=seed))
    wrap = torch.compile if compile_model else (lambda function: function)
    target = new_model("target", vocab_size=len(tokenizer)).to(device)
    draft = new_model("draft", vocab_size=len(tokenizer)).to(device)
    _train_target(target, batches, held_out, work, minutes, wrap)
    _train_draft(draft, target, batches, held_out, work, minutes, wrap)
    report = _report(target, draft, tokenizer, held_out)
    for name, model in (("target", target), ("draft", draft)):
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.to(torch.bfloat16).save_pretrained(export / name)
        tokenizer.save_pretrained(export / name)
    text = json.dumps(report, indent=2)
    (export / "report.json").write_text(text + "\n")
    typer.echo(text)


def _train_target(
    target: PreTrainedModel, batches: Batches, held_out: np.ndarray, work: Path, minutes: float, wrap: Wrap
) -> None:
    """Language modelling, then the same with a penalty on loops."""
    few = held_out[: 64 * WINDOW]
    fit(
        target,
        wrap(functools.partial(objectives.next_token, target)),
        batches,
        checkpoint=work / "target.pt",
        minutes=minutes * SHARES["target"],
        matrix_lr=0.02,
        other_lr=2e-3,
        evaluate=lambda: {"held-out": evaluate.held_out_loss(target, few)},
    )
    fit(
        target,
        functools.partial(
            objectives.unloop, target, prompt_length=64, new_tokens=128, rows=4 * BATCH_SIZE, weight=24.0
        ),
        batches,
        checkpoint=work / "unloop.pt",
        minutes=minutes * SHARES["unloop"],
        matrix_lr=0.002,
        other_lr=2e-4,
        evaluate=lambda: {
            "held-out": evaluate.held_out_loss(target, few),
            "looping": evaluate.looping_share(target, held_out),
        },
        report_every=120.0,
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
    """Distillation of the finished target."""
    few = held_out[: 64 * WINDOW]
    fit(
        draft,
        wrap(functools.partial(objectives.distil, draft, target)),
        batches,
        checkpoint=work / "draft.pt",
        minutes=minutes * SHARES["draft"],
        matrix_lr=0.02,
        other_lr=2e-3,
        evaluate=lambda: {"agreement": evaluate.agreement(draft, target, few)},
        report_every=120.0,
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


def _data(work: Path) -> tuple[PreTrainedTokenizerFast, np.ndarray, np.ndarray]:
    """Tokenizer, training tokens and held-out tokens, made once and kept in `work`."""
    files = corpus.split_files(corpus.stdlib_files())
    if not (work / "held_out.npy").exists():
        work.mkdir(parents=True, exist_ok=True)
        tokenizer = corpus.train_tokenizer(files.train)
        tokenizer.save_pretrained(work / "tokenizer")
        np.save(work / "train.npy", corpus.encode(files.train, tokenizer))
        np.save(work / "held_out.npy", corpus.encode(files.held_out, tokenizer))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    return tokenizer, np.load(work / "train.npy"), np.load(work / "held_out.npy")


if __name__ == "__main__":
    typer.run(main)
