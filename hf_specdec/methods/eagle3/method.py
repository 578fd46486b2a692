"""The registry's entry of EAGLE-3 heads."""

from functools import partial

from hf_specdec.methods.common.method import Method
from hf_specdec.methods.draft_model.method import drafter_of
from hf_specdec.methods.eagle3.config import Eagle3Config

EAGLE3 = Method(
    name="eagle3",
    aliases=("eagle",),
    config_class=Eagle3Config,
    config_arguments=("eagle3_config",),
    summary="drafts with a head that reads the target's hidden states",
    make=partial(drafter_of, "eagle3"),
    needs_draft_head=True,
    takes_draft_head=True,
)
