"""Processes of a launch that share a target do not outlive one another; a command places its target."""

import json
import time
from pathlib import Path

import pytest

from hf_specdec import embedded
from tests.cli.conftest import Run
from tests.distributed.launch import launch

SHORT = ("--max-new-tokens", "12", "--dtype", "fp32", "--threads", "1")


@pytest.mark.wide
def test_a_process_that_dies_takes_the_others_with_it(tmp_path: Path) -> None:
    """In the middle of a forward no one can be told; torchrun ends those who wait."""
    script = tmp_path / "dies.py"
    script.write_text(
        f"""
import os, hf_specdec, torch
model = hf_specdec.AutoModelForCausalLM.from_pretrained({embedded.path("target")!r}, tp_plan="auto")
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, spec_method="prompt_lookup")
def die(*args):
    raise MemoryError("no room here")
if os.environ["RANK"] == "1":
    model.model.layers[2].register_forward_pre_hook(die)
model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, spec_method="prompt_lookup")
"""
    )
    began = time.monotonic()
    done = launch(str(script), timeout=240)
    assert done.returncode != 0
    assert "no room here" in done.stderr
    assert time.monotonic() - began < 200


def test_a_device_map_that_is_none_is_named(run: Run) -> None:
    done = run("generate", "x = 1", *SHORT, "--device-map", "somewhere")
    assert done.exit_code == 2
    assert "`device_map` must" in done.stderr and "Name one of them" in done.stderr


@pytest.mark.wide
def test_an_offloaded_target_gives_the_same_text(run: Run) -> None:
    how = ("def main(argv=None):\n", "--json", *SHORT, "--max-new-tokens", "5")
    offload = ("--device-map", "disk")
    ours, whole = (json.loads(run("generate", *how, *more).stdout) for more in (offload, ()))
    assert ours["token_ids"] == whole["token_ids"]
    facts = json.loads(run("info", "--json", "--dtype", "fp32", *offload).stdout)
    assert facts["model"]["devices"] == ["disk"]
