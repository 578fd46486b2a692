"""transformers' trainer that predicts with `generate`: plain generation's predictions, drafted."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of the trainer's imports


def test_predictions_are_plain_generation_s_and_drafted(zoo: Any, tmp_path: Path) -> None:
    model = zoo("bart")
    articles = [{"input_ids": torch.arange(5, 15) + row % 2, "labels": torch.arange(5, 9)} for row in range(4)]
    arguments = tf.Seq2SeqTrainingArguments(
        str(tmp_path), predict_with_generate=True, use_cpu=True, report_to="none", per_device_eval_batch_size=1
    )
    trainer = tf.Seq2SeqTrainer(model, arguments, eval_dataset=articles)
    options: dict[str, Any] = {"max_new_tokens": 12, "num_beams": 1, "do_sample": False}
    expected = trainer.predict(articles, **options).predictions
    rows: list[int] = []
    ours = trainer.predict(
        articles, **options, spec_method="prompt_lookup", spec_observer=lambda step: rows.append(step.row)
    ).predictions
    assert ours.tolist() == expected.tolist()
    assert rows, "the prompts were decoded in this package's loop"
