"""Precisions side by side: bytes, seconds a step, distance of the logits, and whether speculation keeps plain's tokens.

    python -m hf_specdec.bench.precisions --prompts humaneval.jsonl --widen 768x12 --limit 8 --json

Steps of all precisions take turns over the same context. Tokens are compared with plain `generate`'s at the same
precision; the logits with those of the checkpoint in fp32.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from hf_specdec.bench.batches import arguments_of
from hf_specdec.bench.header import header, subject_facts
from hf_specdec.bench.prompts import load_prompts
from hf_specdec.bench.subject import Subject, load_subject
from hf_specdec.bench.widen import read_size
from hf_specdec.errors import SpecError
from hf_specdec.quantization.precision import PRECISIONS
from hf_specdec.quantization.report import FIXED_TEXT, loaded_weights, logit_error

__all__ = ["compare_tokens", "measure_precisions", "step_seconds"]

REFERENCE, BASELINE = "fp32", "bf16"
NUM_TOKENS = (1, 8)  # of a timed step: plain decoding's, and a verify step's


def step_seconds(
    models: dict[str, PreTrainedModel], token_ids: torch.Tensor, num_tokens: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """One forward of `num_tokens` tokens after `token_ids` (1, length); the models take turns.

    Returns:
        `dict[str, tuple[float, float]]`: median seconds by the clock, and of the process's processor time, which a busy
        machine blurs less.
    """
    caches = {name: DynamicCache(config=model.config) for name, model in models.items()}
    step = token_ids[:, :num_tokens]
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    with torch.no_grad():
        for name, model in models.items():
            model(token_ids, past_key_values=caches[name])
        for round_ in range(rounds + 1):  # the first warms up
            for name, model in models.items():
                clock, processor = time.perf_counter(), time.process_time()
                model(step, past_key_values=caches[name])
                took = time.perf_counter() - clock, time.process_time() - processor
                caches[name].crop(-num_tokens)
                seconds[name] += [took] if round_ else []
    medians = {name: tuple(map(statistics.median, zip(*taken, strict=True))) for name, taken in seconds.items()}
    return {name: (clock, processor) for name, (clock, processor) in medians.items()}


def compare_tokens(subject: Subject, prompts: Sequence[list[int]], method: str, new_tokens: int) -> dict[str, Any]:
    """How many texts a method shares with plain `generate`, and how many tokens until they part.

    Returns:
        `dict`: `equal` texts of `prompts`; `match_rate`, the share of tokens before the first that differs.
    """
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    equal, same, total = 0, 0, 0
    for prompt in prompts:
        ids = torch.tensor([prompt], device=subject.model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
        expected = GenerationMixin.generate(subject.model, **inputs)[0, len(prompt) :].tolist()
        found = subject.model.generate(**inputs, **arguments_of(method, subject))[0, len(prompt) :].tolist()
        pairs = zip(expected, found, strict=False)
        same += next((i for i, (own, other) in enumerate(pairs) if own != other), min(len(expected), len(found)))
        total += len(expected)
        equal += int(expected == found)
    return {"method": method, "equal": equal, "prompts": len(prompts), "match_rate": same / total}


def measure_precisions(
    precisions: Sequence[str],
    prompts: Sequence[str],
    methods: Sequence[str],
    *,
    model: str | None = None,
    size: tuple[int, int] | None = None,
    new_tokens: int = 32,
    rounds: int = 9,
) -> list[dict[str, Any]]:
    """One row a precision; one that does not load has its error instead of figures."""
    subjects: dict[str, Subject] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys((REFERENCE, BASELINE, *precisions)):
        started = time.perf_counter()
        try:
            subjects[name] = load_subject(model, dtype=name, device="cpu" if size else None, widen_to=size)
        except SpecError as error:
            rows[name] = {"precision": name, "loads": False, "error": str(error)}
            continue
        found = loaded_weights(subjects[name].model)
        rows[name] = {
            "precision": name,
            "loads": True,
            "load_seconds": time.perf_counter() - started,
            "weights_bytes": found.parameter_bytes,
            "linear_bytes": sum(group.bytes for group in found.layers if "Linear" in group.kind),
            "facts": subject_facts(subjects[name]),
        }
    tokenizer = subjects[REFERENCE].tokenizer
    text = tokenizer(FIXED_TEXT, return_tensors="pt").input_ids
    models = {name: subject.model for name, subject in subjects.items()}
    for num_tokens in NUM_TOKENS:
        taken = step_seconds(models, text, num_tokens, rounds)
        for name, (clock, processor) in taken.items():
            rows[name][f"seconds_{num_tokens}"] = clock
            rows[name][f"over_{BASELINE}_{num_tokens}"] = clock / taken[BASELINE][0]
            rows[name][f"by_cpu_time_{num_tokens}"] = processor / taken[BASELINE][1]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for name, subject in subjects.items():
        rows[name]["weights_over_bf16"] = rows[name]["weights_bytes"] / rows[BASELINE]["weights_bytes"]
        away = logit_error(subject.model, models[REFERENCE], text)
        rows[name] |= {"max_abs_logit": away.max_abs, "mean_kl": away.mean_kl, "same_argmax": away.same_argmax}
        rows[name]["tokens"] = [compare_tokens(subject, ids, method, new_tokens) for method in methods]
        typer.echo(_line(rows[name]), err=True)
    return list(rows.values())


def _line(row: dict[str, Any]) -> str:
    tokens = "; ".join(f"{found['method']} {found['equal']} of {found['prompts']}" for found in row["tokens"])
    return (
        f"{row['precision']:>5}: {row['weights_bytes'] / 1e6:7.1f} MB ({row['weights_over_bf16']:.2f}), "
        f"a step {row['seconds_1'] * 1e3:.1f} ms "
        f"({row['over_bf16_1']:.2f} of bf16, of 8 tokens {row['over_bf16_8']:.2f}; "
        f"by CPU time {row['by_cpu_time_1']:.2f} and {row['by_cpu_time_8']:.2f}), "
        f"logits {row['max_abs_logit']:.2f}, KL {row['mean_kl']:.5f}, equal to plain: {tokens}"
    )


def main(
    prompts: Annotated[list[Path] | None, typer.Option(help="Prompt files, as for bench.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help="Repeat for more. Default: all.")] = None,
    row: Annotated[list[str] | None, typer.Option(help="Methods, as for bench. Default: prompt_lookup.")] = None,
    model: Annotated[str | None, typer.Option(help="Default: the embedded target.")] = None,
    widen: Annotated[str | None, typer.Option(help="HIDDENxLAYERS, as for bench.")] = None,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    limit: Annotated[int | None, typer.Option(min=1)] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each length.")] = 9,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Every precision of one model beside bf16."""
    try:
        torch.set_num_threads(threads)
        texts = [prompt.turns[0] for prompt in load_prompts(prompts or [], limit=limit)]
        rows = measure_precisions(
            precision or [name for name in PRECISIONS if name != "auto"],
            texts,
            row or ["prompt_lookup"],
            model=model,
            size=None if widen is None else read_size(widen),
            new_tokens=max_new_tokens,
            rounds=rounds,
        )
    except SpecError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps({**header(torch.device("cpu")), "rows": rows}))


if __name__ == "__main__":
    typer.run(main)
