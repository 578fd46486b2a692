"""Batches: a method against plain `generate` on the same batches, and `generate_many` against plain batches one by one.

    python -m hf_specdec.bench.batches --prompts humaneval.jsonl --batch-size 1 --batch-size 8 --json

A batch's ratio is plain's seconds over the method's, both having run one after the other; a row is the median over
batches. Each method has a memory of its own, empty when a round begins. What is timed returns no cache, so rows leave
a batch when their texts end. Prompts are cut to the last `--max-prompt` tokens, so that padding does not decide.
"""

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import hf_specdec
from hf_specdec.bench.header import header, subject_facts
from hf_specdec.bench.naming import split_config, split_draft
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.statistics import median_with_interval
from hf_specdec.bench.subject import Subject, load_subject
from hf_specdec.bench.widen import read_size
from hf_specdec.engine.model_state import remembering
from hf_specdec.errors import SpecError
from hf_specdec.many_prompts import ManyResult
from hf_specdec.methods.method import MethodState

__all__ = ["measure_batches", "measure_many"]

Kwargs = dict[str, Any]


def measure_batches(
    subject: Subject, prompts: Sequence[list[int]], size: int, methods: Sequence[str], options: Kwargs, rounds: int
) -> list[dict[str, Any]]:
    """One row a method: `ratio` over plain batched `generate`, and how many batches gave plain's tokens."""
    ratios: dict[str, list[float]] = {name: [] for name in methods}
    equal = dict.fromkeys(methods, 0)
    steps: dict[str, list[float]] = {name: [] for name in methods}
    memories: dict[tuple[str | None, int], MethodState] = defaultdict(MethodState)
    for start in range(0, len(prompts) - size + 1, size):
        inputs = padded(subject, prompts[start : start + size])
        seconds: dict[str, float] = {}
        for round_ in range(rounds + 1):  # the first warms up, and shows statistics and tokens
            asked = options if round_ == 0 else {**options, "return_dict_in_generate": False}
            for name in (None, *methods):
                with remembering(subject.model, memories[name, round_]):
                    started = time.perf_counter()
                    output = subject.model.generate(**inputs, **asked, **arguments_of(name, subject))
                    took = time.perf_counter() - started
                key = name or "plain generate"
                seconds[key] = took if round_ < 2 else min(took, seconds[key])
                if round_:
                    continue
                if name is None:
                    expected = output.sequences
                else:
                    equal[name] += int(torch.equal(output.sequences, expected))
                    steps[name].append(output.spec_stats.mean_acceptance_length)
        for name in methods:
            ratios[name].append(seconds["plain generate"] / seconds[name])
    return [
        {
            "batch_size": size,
            "row": name,
            "ratio": median_with_interval(ratios[name]),
            "equal": equal[name],
            "batches": len(ratios[name]),
            "tokens_per_step": sum(steps[name]) / len(steps[name]),
        }
        for name in methods
        if ratios[name]
    ]


def measure_many(
    subject: Subject, prompts: Sequence[list[int]], size: int, method: str, options: Kwargs
) -> dict[str, Any]:
    """All prompts once: seconds of plain batches of `size`, and of `generate_many` with as many rows."""
    started = time.perf_counter()
    expected: list[list[int]] = []
    for start in range(0, len(prompts), size):
        inputs = padded(subject, prompts[start : start + size])
        output = subject.model.generate(**inputs, **options).sequences[:, inputs["input_ids"].shape[1] :]
        expected += output.tolist()
    plain_seconds = time.perf_counter() - started
    started = time.perf_counter()
    own = {name: value for name, value in options.items() if name != "return_dict_in_generate"}
    with remembering(subject.model, MethodState()):
        results = hf_specdec.generate_many(
            subject.model, prompts, max_batch_size=size, **own, **arguments_of(method, subject)
        )
        found = {result.index: result for result in results}
    seconds = time.perf_counter() - started
    failed = sum(result.error is not None for result in found.values())
    equal = sum(_is_equal(found[index], tokens, options["pad_token_id"]) for index, tokens in enumerate(expected))
    return {
        "row": method,
        "batch_size": size,
        "prompts": len(prompts),
        "plain_batches_seconds": plain_seconds,
        "seconds": seconds,
        "ratio": plain_seconds / seconds,
        "equal": equal,
        "failed": failed,
    }


def _is_equal(result: ManyResult, expected: list[int], pad_token_id: int) -> bool:
    """Whether a prompt has the tokens of its row in plain's batch, which is padded where the text ended early."""
    length = len(result.token_ids)
    same = result.token_ids == expected[:length]
    return result.error is None and same and all(token == pad_token_id for token in expected[length:])


def arguments_of(name: str | None, subject: Subject) -> Kwargs:
    """What `generate` gets for a row; nothing for plain."""
    if name is None:
        return {}
    spelled, config = split_config(name)
    method, wants_draft = split_draft(spelled)
    arguments: Kwargs = {"spec_method": method, "spec_config": config}
    if wants_draft or method == "draft_model":
        arguments["assistant_model"] = subject.assistant
    return arguments


def padded(subject: Subject, prompts: Sequence[list[int]]) -> Kwargs:
    """One batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.zeros((len(prompts), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    device = subject.model.device
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def _rows(
    subject: Subject, tokens: Sequence[list[int]], sizes: Sequence[int], methods: Sequence[str], options: Kwargs
) -> Iterator[dict[str, Any]]:
    for size in sizes:
        yield from measure_batches(subject, tokens, size, methods, options, rounds=1)
    for method in methods:
        yield {"many": True, **measure_many(subject, tokens, max(sizes), method, options)}


def main(
    prompts: Annotated[list[Path] | None, typer.Option(help="Prompt files, as for bench.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(min=1, help="Repeat for more.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Methods, as for bench. Default: prompt_lookup.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the embedded target.")] = None,
    widen: Annotated[str | None, typer.Option(help="HIDDENxLAYERS, as for bench.")] = None,
    dtype: Annotated[str, typer.Option(help="A precision, as for bench.")] = "fp32",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
    max_prompt: Annotated[int, typer.Option(min=1)] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Batched speculation against plain batched generate."""
    try:
        torch.set_num_threads(threads)
        size = None if widen is None else read_size(widen)
        subject = load_subject(model, dtype=dtype, widen_to=size)
        texts = [prompt.turns[0] for prompt in load_prompts(prompts or [], limit=limit)]
    except SpecError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    tokens = [subject.tokenizer(text)["input_ids"][-max_prompt:] for text in texts]
    options: Kwargs = {
        "max_new_tokens": max_new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
    }
    found = []
    for result in _rows(subject, tokens, batch_size or [1, 2, 4, 8, 16], row or ["prompt_lookup"], options):
        found.append(result)
        ratio = result["ratio"]["median"] if isinstance(result["ratio"], dict) else result["ratio"]
        what = "generate_many" if result.get("many") else "batch"
        typer.echo(f"{what} of {result['batch_size']:>2}, {result['row']}: {ratio:.2f} of plain", err=as_json)
    if as_json:
        facts = {**header(subject.model.device), "subject": subject_facts(subject)}
        typer.echo(json.dumps({**facts, "options": options, "rows": found}))


if __name__ == "__main__":
    typer.run(main)
