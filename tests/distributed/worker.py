"""One process of a tensor-parallel model: does each case of FOLDER/cases.json, writes what came of it.

python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.worker FOLDER
"""

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf

import hf_specdec
from hf_specdec import AutoModelForCausalLM
from hf_specdec.compat.caches import CACHE
from hf_specdec.engine.model_state import state_of
from tests.distributed.cases import HEADS, arguments, seed_of
from tests.helpers.support import PROMPT


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    shards = {"tp_plan": "auto"}

    @functools.cache
    def model(name: str, shared: bool = True) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / name, **(shards if shared else {}))

    model("llama")
    rank = dist.get_rank()
    results = {}
    cases = json.loads((folder / "cases.json").read_text())
    for case in [case if isinstance(case, str) else tuple(case) for case in cases]:
        family = "llama" if isinstance(case, str) else case[0]
        draft = "none" if isinstance(case, str) else case[-1]
        kwargs = arguments(case, rank)
        if draft == "head":
            kwargs["assistant_model"] = HEADS[case[1]](model(family))
        elif draft != "none":
            kwargs["assistant_model"] = model(f"{family}_draft", draft == "shared")
        results[repr(case)] = outcome(model(family), rank, kwargs)
    results["many"] = many(model("llama"), rank)
    results["stopped"] = stopped(model("llama"))
    results["turns"] = turns(model("llama"))
    results["refused"] = refused(model("llama"), model("llama", False), model("llama_draft"))
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def outcome(model: Any, rank: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Tokens, statistics and the random state of one call, or its error."""
    kwargs = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in kwargs.items()}
    state_of(model).method_state.by_name.clear()  # what earlier calls have taught
    torch.manual_seed(seed_of(rank))
    try:
        output = model.generate(**kwargs, return_dict_in_generate=True)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    stats = output.spec_stats
    return {
        "tokens": output.sequences.tolist(),
        "steps": [stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens],
        "random": torch.rand(2).tolist() if kwargs["do_sample"] else None,
        "reason": stats.plain_reason,
        "heads": output[CACHE].layers[0].keys.shape[1],
    }


def many(model: Any, rank: int) -> list[Any]:
    """Results of a job in the order of its prompts, one of them bad, each call with seeds of its own."""
    prompts: list[Any] = [PROMPT[0, start : start + 12 + start].tolist() for start in range(5)]
    prompts.insert(2, [500])
    torch.manual_seed(seed_of(rank))
    options: dict[str, Any] = {"max_batch_size": 3, "max_new_tokens": 12, "spec_method": "prompt_lookup"}
    return [
        [result.index, result.token_ids, result.error is None, result.error is None and result.seed]
        for sampled in (False, True)
        for result in sorted(
            hf_specdec.generate_many(model, prompts, do_sample=sampled, **options), key=lambda result: result.index
        )
    ]


def stopped(model: Any) -> list[int]:
    """A text after a job of many prompts that no one reads to its end."""
    prompts = [PROMPT[0, start : start + 12].tolist() for start in range(6)]
    for _ in hf_specdec.generate_many(model, prompts, max_batch_size=2, max_new_tokens=8, spec_method="prompt_lookup"):
        break
    ids: list[int] = model.generate(PROMPT.to(model.device), max_new_tokens=12, spec_method="lookahead")[0].tolist()
    return ids


def turns(model: Any) -> list[int]:
    """Two turns of a conversation over one cache."""
    ids, cache = PROMPT.to(model.device), tf.DynamicCache(config=model.config)
    for _ in range(2):
        output = model.generate(
            ids, max_new_tokens=8, **{CACHE: cache}, return_dict_in_generate=True, spec_method="prompt_lookup"
        )
        ids, cache = torch.cat([output.sequences, ids[:, :5]], dim=1), output[CACHE]
    tokens: list[int] = ids[0].tolist()
    return tokens


def refused(model: Any, whole: Any, draft: Any) -> list[str]:
    """What is wrong with device lists of a shared model, and with a shared draft of a model that is not."""
    calls = (
        lambda: model.generate(PROMPT, max_new_tokens=4, prompt_lookup_config=[4, 2, ["cpu"]]),
        lambda: whole.generate(PROMPT, max_new_tokens=4, spec_method="draft_model", assistant_model=draft),
    )
    fields = []
    for call in calls:
        try:
            call()
        except hf_specdec.ConfigError as error:
            fields.append(error.field)
    return fields


if __name__ == "__main__":
    main(Path(sys.argv[1]))
