"""One process of a tensor-parallel model: does every case and writes what came of it. Started by torchrun.

python -m torch.distributed.run --nproc-per-node 2 -m tests.parallel.worker FOLDER
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
from hf_specdec.state import state_of
from tests.parallel.cases import CASES, arguments, seed_of
from tests.support import PROMPT


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    shards = {"tp_plan": "auto"}

    @functools.cache
    def model(name: str, shared: bool = True) -> Any:
        return hf_specdec.AutoModelForCausalLM.from_pretrained(folder / name, **(shards if shared else {}))

    model("llama")
    rank = dist.get_rank()
    results = {}
    for case in CASES:
        family = "llama" if isinstance(case, str) else case[0]
        draft = "none" if isinstance(case, str) else case[-1]
        kwargs = arguments(case, rank)
        if draft != "none":
            kwargs["assistant_model"] = model(f"{family}_draft", draft == "shared")
        results[repr(case)] = outcome(model(family), rank, kwargs)
    results["many"] = many(model("llama"), rank)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def outcome(model: Any, rank: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Tokens, statistics and the random state of one call, or its error."""
    hook = kwargs.pop("hook", None)
    handle = model.lm_head.register_forward_hook(hook) if hook is not None else None
    kwargs = {name: value.to(model.device) if torch.is_tensor(value) else value for name, value in kwargs.items()}
    state_of(model).memory.pools.clear()  # what earlier calls have taught
    torch.manual_seed(seed_of(rank))
    try:
        output = model.generate(**kwargs, return_dict_in_generate=True)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        if handle is not None:
            handle.remove()
    stats = output.spec_stats
    return {
        "tokens": output.sequences.tolist(),
        "steps": [stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens],
        "random": torch.rand(2).tolist() if kwargs["do_sample"] else None,
        "reason": stats.plain_reason,
        "heads": output.past_key_values.layers[0].keys.shape[1],
    }


def many(model: Any, rank: int) -> list[Any]:
    """Results of a batch that is kept full, one prompt bad, each call with seeds of its own."""
    prompts: list[Any] = [PROMPT[0, start : start + 12 + start].tolist() for start in range(5)]
    prompts.insert(2, [500])
    torch.manual_seed(seed_of(rank))
    return [
        [result.index, result.token_ids, result.seed, result.error is None]
        for sampled in (False, True)
        for result in hf_specdec.generate_many(
            model, prompts, max_batch_size=3, max_new_tokens=12, do_sample=sampled, spec_method="prompt_lookup"
        )
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
