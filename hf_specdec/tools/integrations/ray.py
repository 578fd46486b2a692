"""Prompts by the million on a Ray cluster: each actor of Ray Data holds a model and keeps its batch full.

dataset = ray.data.read_json("prompts.jsonl")
texts = generate_texts(dataset, "path/to/model", num_actors=8, max_new_tokens=64)
texts.write_parquet("texts")
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import torch

from hf_specdec.api.many_prompts.job import ManyResult
from hf_specdec.api.many_prompts.prompt_inputs import inputs_of
from hf_specdec.api.many_prompts.shared_batch import SharedBatch
from hf_specdec.call.request import Request
from hf_specdec.errors import ConfigError, import_extra
from hf_specdec.loading.auto import AutoModelForCausalLM
from hf_specdec.loading.checkpoints.tokenizers import draft_tokenizers, load_tokenizer
from hf_specdec.loading.drafts import load_draft
from hf_specdec.methods.common.config import check_positive

BATCHES_PER_CALL = 4  # rows of a call of the actor, in batches of the model
CALLS_AT_ONCE = 2  # of an actor: rows of the next fill the places of those that have ended


class SpecTextGenerator:
    """A class for `Dataset.map_batches`: adds a column of generated texts.

    All calls of an actor share one batch, so give the actor pool `max_concurrent_calls_per_actor=2`: rows of the next
    call take the places of those that have ended. `generate_texts` does so.

    Args:
        model (`str`): folder or name on the hub; each actor loads it.
        prompt_column (`str`, *optional*, defaults to `"prompt"`): text, token ids or chat messages.
        text_column (`str`, *optional*, defaults to `"generated_text"`): gets the new text.
        error_column (`str`, *optional*, defaults to `"error"`): gets what was wrong with a prompt; it is empty where
            nothing was.
        id_column (`str`, *optional*): whole numbers, one for each row. A sampled row draws from `seed` plus its number,
            whichever actor it comes to. Needed for sampling.
        seed (`int`, *optional*, defaults to `0`): see `id_column`.
        draft_model (`str`, *optional*): folder or name of a draft model or draft head. A draft model may have a
            tokenizer of its own.
        precision (`str`, *optional*): as for `AutoModelForCausalLM.from_pretrained`.
        model_kwargs (`dict`, *optional*): for `from_pretrained`; by default the model goes to the actor's GPU, if it
            has one.
        options: arguments of `generate_many`: `spec_method`, `max_batch_size`, `max_new_tokens`, `do_sample`...

    Raises:
        ConfigError: sampling without `id_column`, columns of one name, or a dataset that has a new column already.
        CheckpointError: the model's folder is missing or damaged.
    """

    def __init__(
        self,
        model: str,
        *,
        prompt_column: str = "prompt",
        text_column: str = "generated_text",
        error_column: str = "error",
        id_column: str | None = None,
        seed: int = 0,
        draft_model: str | None = None,
        precision: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if text_column in (prompt_column, id_column):
            raise ConfigError("text_column", "must be a column of its own", text_column, "Choose another name.")
        if error_column in (prompt_column, id_column, text_column):
            raise ConfigError("error_column", "must be a column of its own", error_column, "Choose another name.")
        self.prompt_column, self.id_column, self.seed = prompt_column, id_column, seed
        self.text_column, self.error_column = text_column, error_column
        place = {"device_map": {"": "cuda"}} if torch.cuda.is_available() else {}
        loaded = AutoModelForCausalLM.from_pretrained(model, precision=precision, **{**place, **(model_kwargs or {})})
        self.tokenizer = load_tokenizer(model)
        self.samples = bool(Request.of(loaded, options).setting("do_sample"))
        if self.samples and id_column is None:
            remedy = "Name a column of whole numbers, from which each row's seed follows."
            raise ConfigError("id_column", "must be given where texts are sampled", None, remedy)
        tokenizers = {"tokenizer": self.tokenizer}
        if draft_model is not None:
            options["assistant_model"] = draft = load_draft(draft_model, precision=precision, target=loaded, **place)
            tokenizers |= draft_tokenizers(draft, draft_model, self.tokenizer)
        self.batch = SharedBatch(loaded, **tokenizers, **options)

    async def __call__(self, rows: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Columns of rows, with the two new ones. Ray calls it again while earlier rows are decoded."""
        for field in ("text_column", "error_column"):
            if (name := getattr(self, field)) in rows:
                raise ConfigError(field, "must be no column that the dataset has", name, "Choose another name.")
        prompts = [value.tolist() if isinstance(value, np.ndarray) else value for value in self._column(rows)]
        ids = self._ids(rows)
        results = await asyncio.gather(*(self._generate(prompt, ids[row]) for row, prompt in enumerate(prompts)))
        texts = np.array([result.text or "" for result in results], dtype=object)
        errors = np.array([_error_text(result) for result in results], dtype=object)
        yield {**rows, self.text_column: texts, self.error_column: errors}

    async def _generate(self, prompt: Any, number: int) -> ManyResult:
        """One row's result; what stops the whole batch is raised, and Ray says what becomes of the job."""
        if self.samples:
            with contextlib.suppress(ConfigError):  # which comes back as the row's own
                prompt = {**inputs_of(prompt, self.tokenizer), "seed": self.seed + number}
        return await asyncio.wrap_future(self.batch.submit(prompt))

    def _column(self, rows: dict[str, Any]) -> Any:
        if self.prompt_column not in rows:
            remedy = f"The columns are {', '.join(rows)}."
            raise ConfigError("prompt_column", "must be a column of the dataset", self.prompt_column, remedy)
        return rows[self.prompt_column]

    def _ids(self, rows: dict[str, Any]) -> list[int]:
        """The rows' numbers; where nothing is sampled they are not needed."""
        if not self.samples:
            return [0] * len(rows[self.prompt_column])
        ids = np.asarray(rows.get(str(self.id_column), []))
        if ids.dtype.kind not in "iu" or len(ids) == 0:
            remedy = "Name a column of whole numbers."
            raise ConfigError("id_column", "must hold whole numbers where texts are sampled", self.id_column, remedy)
        return [int(number) for number in ids]


def generate_texts(
    dataset: Any, model: str, *, num_actors: int = 1, ray_options: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """A dataset of Ray Data with generated texts; they are written where it is consumed.

    Args:
        dataset (`ray.data.Dataset`): rows with a column of prompts.
        model (`str`): folder or name on the hub, which every node can read.
        num_actors (`int`, *optional*, defaults to `1`): copies of the model.
        ray_options (`dict`, *optional*): of `map_batches` for each actor: `num_gpus`, `num_cpus`, `batch_size`...
        options: arguments of `SpecTextGenerator`.

    Returns:
        `ray.data.Dataset`: the rows, with the columns that `SpecTextGenerator` adds, in no order.

    Raises:
        MissingExtraError: Ray Data is not installed.
    """
    check_positive("num_actors", num_actors, "Use one for each GPU.")
    check_positive("max_batch_size", options.get("max_batch_size", 8), "Leave it out for 8.")
    ray_data = import_extra("ray.data", "ray", "generate_texts")
    rows = BATCHES_PER_CALL * options.get("max_batch_size", 8)
    arguments: dict[str, Any] = {"batch_size": rows, **(ray_options or {})}
    pool = ray_data.ActorPoolStrategy(size=num_actors, max_concurrent_calls_per_actor=CALLS_AT_ONCE)
    return dataset.map_batches(
        SpecTextGenerator, fn_constructor_args=(model,), fn_constructor_kwargs=options, compute=pool, **arguments
    )


def _error_text(result: ManyResult) -> str:
    """A row's error on one line."""
    error = result.error
    return "" if error is None else " ".join(str(error).split()) or type(error).__name__
