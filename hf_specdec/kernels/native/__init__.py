"""The compiled core: look-ups, search and learning of `auto` and of the n-gram index, in C over their own arrays, and
the kernels that a CPU computes a few tokens with.

`pip install` builds it, unless HF_SPECDEC_NO_CORE=1 is set. Without it `auto` looks up n-grams alone, in Python, and
layers are torch's; `core` is `None` then.
"""

import logging
from pathlib import Path

from hf_specdec.kernels.native.sources import sources_number

logger = logging.getLogger("hf_specdec")

try:
    from hf_specdec.kernels.native import _core as core
except ImportError as error:
    core = None  # type: ignore[assignment]
    logger.warning(
        "The compiled core is not installed, so that drafts and layers take longer (%s). Install a C compiler "
        "(apt install gcc), then hf_specdec again with pip install --force-reinstall --no-deps --no-cache-dir.",
        error,
    )
else:
    if sources_number(Path(__file__).parent) not in (None, getattr(core, "SOURCES", None)):
        core = None  # type: ignore[assignment]
        logger.warning(
            "The compiled core was built from other sources and is not used: drafts are looked up in Python and "
            "layers are torch's. Install hf_specdec again, as after each update of a checkout."
        )
