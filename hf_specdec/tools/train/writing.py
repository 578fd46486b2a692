"""The texts that a head learns from, in one file next to it; the target writes those that are not there yet."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import hf_specdec
from hf_specdec.common.files import replacing
from hf_specdec.common.progress import with_bar
from hf_specdec.errors import CheckpointError
from hf_specdec.tools.train.examples import Entry, Example, ExampleReader, Request, examples_of_batch

BATCH_SIZE = 16  # prompts or chats that are written together


def write_texts(
    target: PreTrainedModel, reader: ExampleReader, entries: Sequence[Entry], path: Path, seed: int, *, is_shown: bool
) -> list[list[Example]]:
    """The examples of each entry. Those of `path` are read, the others are appended to it, in the order of the entries.

    Raises:
        CheckpointError: a line of the file is damaged.
    """
    written, temperatures = read_texts(path), reader.config.temperatures
    starts = range(len(written), len(entries), BATCH_SIZE)
    total = -(-len(entries) // BATCH_SIZE)
    for start in with_bar(starts, total=total, done=total - len(starts), label="writing texts", is_shown=is_shown):
        numbers = range(start, min(start + BATCH_SIZE, len(entries)))
        generators = [reader.examples(entries[n], temperatures[n % len(temperatures)]) for n in numbers]
        write = partial(_written, target, max_new_tokens=reader.config.max_new_tokens, seed=seed + start)
        batch = list(examples_of_batch(generators, write))
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(list(map(asdict, examples))) + "\n" for examples in batch)
        written += batch
    return written


def read_texts(path: Path) -> list[list[Example]]:
    """The examples of each entry that the file has; a line that a killed process left unfinished is taken out of it.

    Raises:
        CheckpointError: a line is damaged.
    """
    text = path.read_text("utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        with replacing(path) as temporary:
            temporary.write_text(whole, "utf-8")
    try:
        return [[Example(**example) for example in json.loads(line)] for line in whole.splitlines()]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{str(path)!r} cannot be read: {error}. Delete it, and it is written again.") from error


def _written(
    target: PreTrainedModel, requests: Sequence[Request], *, max_new_tokens: int, seed: int
) -> list[list[int]]:
    """Tokens that the target writes for each request."""
    prompts: list[dict[str, Any]] = []
    for number, request in enumerate(requests):
        prompts.append({"input_ids": request.ids, "seed": seed + number, "do_sample": request.temperature > 0.0})
        if request.temperature:
            prompts[-1] |= {"temperature": request.temperature, "top_k": 0, "top_p": 1.0}
    results = hf_specdec.generate_many(
        target, prompts, max_batch_size=BATCH_SIZE, max_new_tokens=max_new_tokens, num_beams=1
    )
    tokens: list[list[int]] = [[] for _ in prompts]
    for result in results:
        if result.error is not None:
            raise result.error
        tokens[result.index] = result.token_ids
    return tokens
