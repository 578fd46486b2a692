"""The compiled core: look-ups, search and learning of `auto` and of the n-gram index, in C over their own arrays, and
the kernels that a CPU computes a few tokens with.

Optional: `pip install` builds it where there is a C compiler. Without it the same functions run in Python, on the same
arrays and with the same results, only slower, and layers by torch; `core` is `None` then.
"""

import logging

__all__ = ["core"]

INTERFACE = 12  # of the C sources; a library built from others, as after an update of a checkout, is not used

try:
    from hf_specdec.compiled import _core as core

    if core.INTERFACE != INTERFACE:
        raise ImportError("it was built from other sources: install hf_specdec again")
except ImportError as error:
    core = None  # type: ignore[assignment]
    logging.getLogger("hf_specdec").info(
        "Drafts are made in Python and layers are torch's, without the compiled core: %s", error
    )
