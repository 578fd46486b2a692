"""Training drafts of one's own: `train_head`, `train_dflash` and `train_draft`, which `hf-specdec train` calls.

from hf_specdec.tools.train import HeadTraining, train_head
report = train_head(target, tokenizer, prompts, "head", HeadTraining(num_texts=2000, minutes=20))
report.measured[0].tokens_per_step
"""

from hf_specdec.tools.train.config import DFlashTraining, DraftTraining, HeadTraining, Training
from hf_specdec.tools.train.dflash_trainer import train_dflash
from hf_specdec.tools.train.draft_trainer import train_draft
from hf_specdec.tools.train.head_trainer import train_head
from hf_specdec.tools.train.report import HeadReport, Measured

__all__ = [
    "DFlashTraining",
    "DraftTraining",
    "HeadReport",
    "HeadTraining",
    "Measured",
    "Training",
    "train_dflash",
    "train_draft",
    "train_head",
]
