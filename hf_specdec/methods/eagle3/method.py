"""The registry's entry of EAGLE-3 heads."""

from functools import partial

from hf_specdec.methods.common.entry import HeadKind, Method, Source
from hf_specdec.methods.draft_model.method import drafter_of
from hf_specdec.methods.eagle3.config import Eagle3Config
from hf_specdec.methods.eagle3.head_config import Eagle3HeadConfig
from hf_specdec.methods.eagle3.network import Eagle3Head

METHOD = Method(
    name="eagle3",
    aliases=("eagle",),
    config_class=Eagle3Config,
    config_arguments=("eagle3_config",),
    summary="drafts with a head that reads the target's hidden states",
    make=partial(drafter_of, "eagle3"),
    needs_draft_head=True,
    takes_draft_head=True,
    head=HeadKind(is_config=Eagle3HeadConfig.describes, load=Eagle3Head.read),
    sources=(Source("eagle3", "EAGLE-3 head", "written by a head on the model's hidden states"),),
)
