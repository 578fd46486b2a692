"""Training in two processes, which share the batches."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_specdec import AutoDraftHead
from tests.distributed.launch import launch_forked
from tests.distributed.training_worker import trained


def make_target(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=40, num_key_value_heads=2, bos_token_id=1, eos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder / "target")


def test_two_processes_train_one_head(tmp_path: Path) -> None:
    """Both report the same, and of the same held-out texts as one process alone."""
    for name in ("two", "one"):
        make_target(tmp_path / name)
    done = launch_forked("tests.distributed.training_worker", str(tmp_path / "two"), timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / "two" / f"{rank}.json").read_text()) for rank in range(2))
    alone = trained(tmp_path / "one")
    assert first == second
    assert first["num_steps"] == alone["num_steps"] == 4
    texts = [(tmp_path / name / "head" / "work" / "texts.jsonl").read_text() for name in ("one", "two")]
    assert texts[0] == texts[1]
    assert AutoDraftHead.from_pretrained(tmp_path / "two" / "head").config.layer_ids == (1, 2, 3)
