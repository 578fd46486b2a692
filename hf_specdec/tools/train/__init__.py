"""Training drafts of one's own: `train_draft`, which `hf-specdec train` calls.

from hf_specdec.tools.train import HeadTraining, train_draft
report = train_draft(target, tokenizer, prompts, "head", HeadTraining(num_texts=2000, minutes=20))
report.measured[0].tokens_per_step
"""

from hf_specdec.tools.train.config import DFlashTraining, DraftTraining, HeadTraining, Training
from hf_specdec.tools.train.loop import HeadReport, Measured
from hf_specdec.tools.train.training import train_draft

__all__ = [
    "DFlashTraining",
    "DraftTraining",
    "HeadReport",
    "HeadTraining",
    "Measured",
    "Training",
    "train_draft",
]
