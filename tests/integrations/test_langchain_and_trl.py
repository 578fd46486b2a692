"""LangChain and TRL call an enabled model, and get plain generation's text and drafts."""

from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_specdec
from tests.helpers.support import plain

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]  # those of their imports
PROMPT = "def main(argv=None):\n    "


def test_langchain_invokes_the_pipeline(tokenizer: Any) -> None:
    langchain = pytest.importorskip("langchain_huggingface")
    path = str(hf_specdec.embedded.path("target"))
    model = hf_specdec.AutoModelForCausalLM.from_pretrained(path, precision="fp32")
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "spec_method": "auto"}
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=path, **options)
    answer = langchain.HuggingFacePipeline(pipeline=pipe).invoke(PROMPT)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    expected = plain(pipe.model, ids, max_new_tokens=12, do_sample=False)[0]
    assert answer in (tokenizer.decode(expected), tokenizer.decode(expected[ids.shape[1] :]))


def test_grpo_writes_its_completions_with_drafts(tokenizer: Any, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    model = transformers.AutoModelForCausalLM.from_pretrained(hf_specdec.embedded.path("target"), dtype="float32")
    steps: list[Any] = []
    hf_specdec.enable(model)
    generate = model.generate
    seen: list[Any] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(getattr(kwargs.get("generation_config"), "spec_method", None))
        return generate(*args, **kwargs, spec_observer=steps.append)

    model.generate = watched
    config = trl.GRPOConfig(
        str(tmp_path),
        generation_kwargs={"spec_method": "prompt_lookup"},
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=8,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
    )
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **kwargs: [float(len(text)) for text in completions],
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": PROMPT}] * 2),
        processing_class=tokenizer,
    )
    trainer.train()
    assert seen and set(seen) == {"prompt_lookup"}
    assert steps
