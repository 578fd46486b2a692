"""EAGLE-3 draft heads trained by `transformers.Trainer`: `train_head`, which `hf-specdec train` calls.

from hf_specdec.tools.train import HeadTraining, train_head
report = train_head(target, tokenizer, prompts, "head", HeadTraining(max_new_tokens=128), num_train_epochs=4)
report.tokens_per_step
"""

from hf_specdec.tools.train.config import HeadTraining
from hf_specdec.tools.train.training import HeadReport, train_head

__all__ = ["HeadReport", "HeadTraining", "train_head"]
