"""`generate_many` against plain batches, one after the other: seconds for all prompts."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import hf_specdec
from hf_specdec.api.many_prompts.result import ManyResult
from hf_specdec.engine.model_state import using_method_state
from hf_specdec.methods.common.entry import MethodState
from hf_specdec.tools.bench.conversation import MOST_OF_A_BATCH, encode, padded
from hf_specdec.tools.bench.document import Save, fill
from hf_specdec.tools.bench.header import model_facts, new_document
from hf_specdec.tools.bench.loaded_model import LoadedModel
from hf_specdec.tools.bench.prompts import Prompt
from hf_specdec.tools.bench.rows import Row, own_rows

PAD = 0
COLUMNS = {
    "generate_many": "{row}",
    "rows": "{batch_size}",
    "over plain batches": "{ratio:.2f}",
    "seconds": "{seconds:.1f}",
    "equal": "{num_equal} of {num_prompts}",
    "failed": "{num_failed}",
}
NOTE = "Over plain batches: their seconds over those of generate_many. Equal: prompts with their tokens."


def measure_many(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    names: Sequence[str],
    *,
    batch_sizes: Sequence[int] = (8,),
    max_new_tokens: int = 128,
    save: Save | None = None,
) -> dict[str, Any]:
    """Measure, greedily, the ratio of plain batches' seconds to those of each method and size.

    Each begins with an empty memory. Prompts are cut to their last 256 tokens, so that padding does not decide.

    Args:
        save (*optional*): gets the document so far after each row.
    """
    rows = own_rows(names, loaded)
    tokens = [encode(loaded, prompt)["input_ids"][0, -MOST_OF_A_BATCH:].tolist() for prompt in prompts]
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": PAD}
    settings = {"max_new_tokens": max_new_tokens, "num_prompts": len(prompts)}
    document = new_document("many", loaded.device, settings=settings, models=[model_facts(loaded)], notes=[NOTE])
    jobs = itertools.product(batch_sizes, rows)
    return fill(document, [("", COLUMNS, (_measured(loaded, tokens, size, row, options) for size, row in jobs))], save)


def _measured(
    loaded: LoadedModel, prompts: Sequence[list[int]], size: int, row: Row, options: dict[str, Any]
) -> dict[str, Any]:
    """All prompts once, by plain batches of `size` and by `generate_many` with as many rows."""
    started = time.perf_counter()
    expected: list[list[int]] = []
    for start in range(0, len(prompts), size):
        inputs = padded(loaded, prompts[start : start + size])
        expected += loaded.model.generate(**inputs, **options)[:, inputs["input_ids"].shape[1] :].tolist()
    plain_seconds = time.perf_counter() - started
    started = time.perf_counter()
    with using_method_state(loaded.model, MethodState()):
        results = hf_specdec.generate_many(loaded.model, prompts, max_batch_size=size, **options, **row.arguments(None))
        found = {result.index: result for result in results}
    seconds = time.perf_counter() - started
    return {
        "row": row.name,
        "batch_size": size,
        "num_prompts": len(prompts),
        "plain_batches_seconds": plain_seconds,
        "seconds": seconds,
        "ratio": plain_seconds / seconds,
        "num_equal": sum(_is_equal(found[index], tokens) for index, tokens in enumerate(expected)),
        "num_failed": sum(result.error is not None for result in found.values()),
    }


def _is_equal(result: ManyResult, expected: list[int]) -> bool:
    """Compare a prompt's tokens with those of its row in plain's batch, which is padded where the text ended early."""
    length = len(result.token_ids)
    same = result.token_ids == expected[:length]
    return result.error is None and same and all(token == PAD for token in expected[length:])
