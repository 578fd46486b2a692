"""Many prompts, one model: `generate_many` keeps a batch full, whatever the prompts' lengths.

for result in hf_specdec.generate_many(model, prompts, tokenizer=tokenizer, max_new_tokens=64):
    print(result.index, result.text)
"""

from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import Any

from hf_specdec.api.enable import enable
from hf_specdec.api.many_prompts.job import Job, ManyResult
from hf_specdec.api.many_prompts.prompt_inputs import (
    check_all,
    check_names,
    checked_seed,
    each_prompt,
    numbered,
)
from hf_specdec.cache.prefix_cache import PrefixCache
from hf_specdec.call.arguments import AUTO
from hf_specdec.call.checks import check_settings
from hf_specdec.call.request import Request
from hf_specdec.common.progress import with_bar
from hf_specdec.compat.models import generation_model
from hf_specdec.engine.shared_processes import agreed_seed
from hf_specdec.methods.common.config import check_positive

MAX_CACHE_TOKENS = 1 << 18


def generate_many(
    model: Any,
    prompts: Iterable[Any],
    *,
    max_batch_size: int = 8,
    tokenizer: Any = None,
    seed: int | None = None,
    max_cache_tokens: int = MAX_CACHE_TOKENS,
    prefix_cache: PrefixCache | None = None,
    spec_method: Any = AUTO,
    indices: Iterable[int] | None = None,
    progress: bool = False,
    **generate_kwargs: Any,
) -> Iterator[ManyResult]:
    """Generate for many prompts, yielding results as they finish.

    A row of the batch whose text ends goes to the next prompt at once. Each result is what `model.generate` gives for
    its prompt alone (in fp32; half precisions may differ in near ties), whatever the order of the prompts and the
    size of the batch. The beginning that a prompt shares with the text of an earlier one is not computed again.

    Args:
        model (`PreTrainedModel`): a transformers model; it is enabled if it is not.
        prompts (`Iterable`): read as rows get free: strings (with `tokenizer`), lists of chat messages (with a
            `tokenizer` that has a chat template), lists of token ids, tensors `(length,)` or `(1, length)`, or dicts of
            `generate`'s inputs and settings for one sequence (ids and mask as tensors or lists), which may hold its
            `seed`, and a `cache_salt`: texts of one salt begin no prompt of another. Method, draft and observer are the
            same for all. `many_prompts.job.NOT_YET` among them says that none is waiting: the next is asked for after a
            step, and all ends where nothing is being decoded.
        max_batch_size (`int`, *optional*, defaults to `8`): rows decoded together.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): encodes strings, decodes results, and serves `stop_strings`.
        seed (`int`, *optional*): when sampling, prompt i draws from `seed + i`; by default a seed is drawn.
        max_cache_tokens (`int`, *optional*, defaults to `262144`): bound on rows x longest text, in tokens, which is
            what the key/value cache allocates. A prompt that alone needs more is decoded alone.
        prefix_cache (`PrefixCache`, *optional*): keeps keys and values of texts for prompts that begin alike, of later
            calls too; by default one of this call, of 1 GiB. `PrefixCache(0)` keeps nothing.
        spec_method (`str`, *optional*): as for `generate`; `"plain"` and `"none"` draft nothing. By default the method
            whose argument is given, such as `prompt_lookup_config`, or that of the generation configuration, or
            `"auto"`.
        indices (`Iterable[int]`, *optional*): the prompts' numbers, where they are part of a larger job; by default
            they are counted from 0.
        progress (`bool`, *optional*, defaults to `False`): show a bar on stderr, if that is a terminal.
        generate_kwargs: as for `generate`, the same for all prompts: `max_new_tokens`, `do_sample`, `spec_config`,
            `spec_observer` (a step's `row` is its prompt's index)...

    Raises:
        ConfigError: a setting that is wrong for every prompt. What is wrong with one prompt is its result's `error`.
    """
    check_positive("max_batch_size", max_batch_size, "Usual values are 4 to 32.")
    check_positive("max_cache_tokens", max_cache_tokens, "The default is 262144.")
    prompts = each_prompt(prompts)
    inner = generation_model(enable(model))
    request = Request.of(inner, generate_kwargs)
    check_names(inner, generate_kwargs, also=("max_batch_size", "max_cache_tokens", "prefix_cache"))
    check_settings(request)
    check_all(request, tokenizer)
    kwargs = {**generate_kwargs, "spec_method": spec_method}
    job = Job(model, tokenizer, _seed_of(request, seed), prefix_cache or PrefixCache(), kwargs)
    results = job.run(numbered(prompts, indices), max_batch_size, max_cache_tokens)
    return with_bar(results, total=length_hint(prompts) or None) if progress else results


def _seed_of(request: Request, seed: int | None) -> int | None:
    """A given seed, once it is one, or one that all processes draw where the call samples."""
    if (seed := checked_seed(seed)) is None and request.setting("do_sample"):
        return agreed_seed(request.model)
    return seed
