"""Precisions side by side: bytes, seconds a step, distance of the logits, and whether speculation keeps plain's tokens.

Steps of all precisions take turns over the same context. Tokens are compared with plain `generate`'s at the same
precision; the logits with those of the checkpoint in fp32.
"""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel

from hf_specdec.compat import CACHE
from hf_specdec.errors import SpecError
from hf_specdec.kernels.quantization.report import FIXED_TEXT, loaded_weights, logit_error
from hf_specdec.tools.bench.conversation import encode, fitting
from hf_specdec.tools.bench.document import Save, fill
from hf_specdec.tools.bench.header import model_facts, new_document
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.rows import own_rows

REFERENCE, BASELINE = "fp32", "bf16"
NUM_TOKENS = (1, 8)  # of a timed step: plain decoding's, and a verify step's
COLUMNS = {
    "": "{precision}",
    "MB": "{weights_mb:.1f}",
    "over bf16": "{weights_over_bf16:.2f}",
    "a step": "{step_ms_1:.1f} ms",
    "over bf16's": "{over_bf16_1:.2f}",
    "of 8 tokens": "{over_bf16_8:.2f}",
    "by CPU time": "{by_cpu_time_1:.2f}",
    "of 8 tokens, by CPU time": "{by_cpu_time_8:.2f}",
    "logits": "{max_abs_logit:.2f}",
    "KL": "{mean_kl:.5f}",
}
NOTE = (
    "A step: one forward of 1 and of 8 tokens; all precisions take turns. Logits and KL: largest and mean distance "
    "from fp32's. Equal: texts with the tokens of plain generate at the same precision."
)


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
            model(token_ids, **{CACHE: caches[name]})
        for round_ in range(rounds + 1):  # the first warms up
            for name, model in models.items():
                clock, processor = time.perf_counter(), time.process_time()
                model(step, **{CACHE: caches[name]})
                took = time.perf_counter() - clock, time.process_time() - processor
                caches[name].crop(-num_tokens)
                seconds[name] += [took] if round_ else []
    medians = {name: tuple(map(statistics.median, zip(*taken, strict=True))) for name, taken in seconds.items()}
    return {name: (clock, processor) for name, (clock, processor) in medians.items()}


def compare_tokens(
    loaded: LoadedModel, prompts: Sequence[Prompt], names: Sequence[str], max_new_tokens: int
) -> list[dict[str, Any]]:
    """For each method how many texts it shares with plain `generate`, and how many tokens until they part.

    Returns:
        `list[dict]`: `num_equal` texts of `num_prompts`; `match_rate`, the share of tokens before the first that
        differs.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": 0}
    rows = own_rows(names, loaded)
    same, equal = ({row.name: 0 for row in rows} for _ in range(2))
    total = 0
    known, _ = fitting(loaded, prompts, max_new_tokens)
    for prompt in known:
        inputs = {**encode(loaded, prompt), **options}
        length = inputs["input_ids"].shape[1]
        expected = GenerationMixin.generate(loaded.model, **inputs)[0, length:].tolist()
        total += len(expected)
        for row in rows:
            own = loaded.model.generate(**inputs, **row.arguments(None))[0, length:].tolist()
            pairs = enumerate(zip(expected, own, strict=False))
            same[row.name] += next((i for i, (one, other) in pairs if one != other), min(len(expected), len(own)))
            equal[row.name] += int(expected == own)
    return [
        {"method": name, "num_equal": equal[name], "num_prompts": len(known), "match_rate": same[name] / total}
        for name in same
    ]


def measure_precisions(
    precisions: Sequence[str],
    prompts: Sequence[Prompt],
    names: Sequence[str],
    *,
    path: str | None = None,
    device: str | torch.device | None = None,
    widen_to: tuple[int, int] | None = None,
    max_new_tokens: int = 32,
    rounds: int = 9,
    placement: Mapping[str, Any] | None = None,
    save: Save | None = None,
) -> dict[str, Any]:
    """Measure a row for each precision, fp32 and bf16 among them; those that do not load are named in the notes.

    Args:
        names: methods whose tokens are compared with plain `generate`'s.
        path: folder or hub name; `None` is the embedded target.
        device: of all precisions; a widened model is on the CPU by default, another one as `load_model` puts it.
        rounds: timed steps of each length.
        placement: see `load_model`.
        save (*optional*): gets the document so far after each row.
    """
    device = device or ("cpu" if widen_to and not placement else None)
    wanted = list(dict.fromkeys((REFERENCE, BASELINE, *precisions)))
    models, errors = _loaded(wanted, path, {"device": device, "widen_to": widen_to, "placement": placement})
    settings = {"max_new_tokens": max_new_tokens, "rounds": rounds, "num_prompts": len(prompts)}
    facts = model_facts(models[REFERENCE])
    document = new_document(
        "precisions", models[REFERENCE].device, settings=settings, models=[facts], notes=[NOTE, *errors]
    )
    rows = _rows(models, prompts, names, max_new_tokens, rounds)
    columns = COLUMNS | {
        f"equal, {name}": f"{{tokens[{place}][num_equal]}} of {{tokens[{place}][num_prompts]}}"
        for place, name in enumerate(names)
    }
    return fill(document, [("", columns, rows)], save)


def _loaded(
    precisions: Sequence[str], path: str | None, options: Mapping[str, Any]
) -> tuple[dict[str, LoadedModel], list[str]]:
    """Models by precision, and a line for each that does not load."""
    models, errors = dict[str, LoadedModel](), list[str]()
    for name in precisions:
        try:
            models[name] = load_model(path, dtype=name, **options)
        except SpecError as error:
            if name in (REFERENCE, BASELINE):
                raise
            errors.append(f"{name}: {error}")
    return models, errors


def _rows(
    models: Mapping[str, LoadedModel],
    prompts: Sequence[Prompt],
    names: Sequence[str],
    max_new_tokens: int,
    rounds: int,
) -> Iterator[dict[str, Any]]:
    text = models[REFERENCE].tokenizer(FIXED_TEXT, return_tensors="pt").input_ids
    targets = {name: loaded.model for name, loaded in models.items()}
    steps = {num_tokens: step_seconds(targets, text, num_tokens, rounds) for num_tokens in NUM_TOKENS}
    sizes = {name: loaded_weights(model) for name, model in targets.items()}
    for name, loaded in models.items():
        away = logit_error(loaded.model, models[REFERENCE].model, text)
        row: dict[str, Any] = {
            "precision": name,
            "weights_mb": sizes[name].parameter_bytes / 1e6,
            "weights_over_bf16": sizes[name].parameter_bytes / sizes[BASELINE].parameter_bytes,
            "linear_mb": sum(group.bytes for group in sizes[name].layers if "Linear" in group.kind) / 1e6,
            "max_abs_logit": away.max_abs,
            "mean_kl": away.mean_kl,
            "same_argmax": away.same_argmax,
        }
        for num_tokens, taken in steps.items():
            clock, processor = taken[name]
            row[f"step_ms_{num_tokens}"] = 1000 * clock
            row[f"over_{BASELINE}_{num_tokens}"] = clock / taken[BASELINE][0]
            row[f"by_cpu_time_{num_tokens}"] = processor / taken[BASELINE][1]
        row["tokens"] = compare_tokens(loaded, prompts, names, max_new_tokens)
        yield row
