"""One process of a tensor-parallel model that drafts with heads: does every case and writes what came of it.

python -m torch.distributed.run --nproc-per-node 2 -m tests.distributed.head_worker FOLDER
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers as tf

import hf_specdec
from tests.distributed.worker import outcome
from tests.helpers.head_models import random_dflash
from tests.helpers.heads import random_head
from tests.helpers.mtp import random_mtp
from tests.helpers.support import MASK, PADDED, PROMPT

__all__ = ["CASES", "head_arguments", "target_of"]

CONFIG = {"confidence_threshold": 0.0, "num_branches": 2, "draft_len": 3, "max_nodes": 6}
CASES = [f"{method}, {mode}" for method in ("eagle3", "dflash", "mtp") for mode in ("greedy", "sampled batch")]
HEADS = {"eagle3": random_head, "dflash": random_dflash, "mtp": random_mtp}


def target_of(case: str) -> str:
    """The folder of a case's target: one that announces MTP layers where they draft."""
    return "glm" if case.startswith("mtp") else "llama"


def head_arguments(case: str, model: Any) -> dict[str, Any]:
    """Arguments of `generate`, with a head that is the same in every process."""
    method, mode = case.split(", ")
    head = HEADS[method](model)
    inputs: dict[str, Any] = {"input_ids": PROMPT, "do_sample": False}
    if mode != "greedy":
        inputs = {"input_ids": PADDED, "attention_mask": MASK, "do_sample": True}
    return {"max_new_tokens": 16, "spec_method": method, "spec_config": CONFIG, "assistant_model": head, **inputs}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    tf.logging.set_verbosity_error()
    tf.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    models = {
        name: hf_specdec.AutoModelForCausalLM.from_pretrained(folder / name, tp_plan="auto")
        for name in ("llama", "glm")
    }
    rank = dist.get_rank()
    results = {}
    for case in CASES:
        model = models[target_of(case)]
        results[case] = outcome(model, rank, head_arguments(case, model))
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
