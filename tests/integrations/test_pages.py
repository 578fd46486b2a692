"""Pages about other packages are true: all their blocks run, also those whose packages [dev] does not bring."""

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_specdec

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]  # those of their imports
GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def for_pipelines(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page leaves to its reader: a reward, prompts, and a GPU."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    monkeypatch.setattr(trl, "GRPOConfig", functools.partial(trl.GRPOConfig, use_cpu=True, bf16=False, report_to=[]))
    return {
        "reward": lambda completions, **kwargs: [float(len(text)) for text in completions],
        "dataset": datasets.Dataset.from_list([{"prompt": "import os\n"}] * 8),
    }


def for_grammars(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    path = hf_specdec.embedded.path("target")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    return {
        "hf_specdec": hf_specdec,
        "model": hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp32"),
        "tokenizer": tokenizer,
        "inputs": {"input_ids": tokenizer("x = ", return_tensors="pt").input_ids},
        "prompts": ["x = ", "y = "],
    }


@pytest.mark.parametrize(
    ("page", "packages", "given"),
    [
        ("pipeline.md", ("langchain_huggingface", "trl"), for_pipelines),
        ("outlines.md", ("xgrammar", "outlines"), for_grammars),
    ],
)
def test_every_block_runs(
    page: str,
    packages: tuple[str, ...],
    given: Callable[[pytest.MonkeyPatch], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in packages:
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "__docs__", **given(monkeypatch)}
    text = (GUIDES / page).read_text("utf-8")
    for match in BLOCK.finditer(text):
        lines_before = text.count("\n", 0, match.start("code"))
        exec(compile("\n" * lines_before + match["code"], page, "exec"), namespace)
