"""Measurements that a stranger can rerun: ways to generate, side by side on the same prompts.

models = [load_model(None, dtype="fp32"), load_model(None, dtype="fp32", widen_to=(768, 12))]
document = Bench(models, load_prompts(limit=6), BenchSettings(rounds=3), rows=["default"]).run()
print(markdown(document))
"""

from hf_specdec.tools.bench.document import write_document
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from hf_specdec.tools.bench.page import write_page
from hf_specdec.tools.bench.plan import BenchSettings
from hf_specdec.tools.bench.plots import plot_document
from hf_specdec.tools.bench.prompts import Prompt, default_prompts, load_prompts
from hf_specdec.tools.bench.rows import Row, default_rows, named_rows
from hf_specdec.tools.bench.run import Bench
from hf_specdec.tools.bench.speeds import Flag, flagged
from hf_specdec.tools.bench.tables import markdown, read_document
from hf_specdec.tools.bench.widen import check_widening, widen

__all__ = [
    "Bench",
    "BenchSettings",
    "Flag",
    "LoadedModel",
    "Prompt",
    "Row",
    "check_widening",
    "default_prompts",
    "default_rows",
    "flagged",
    "load_model",
    "load_prompts",
    "markdown",
    "named_rows",
    "plot_document",
    "read_document",
    "widen",
    "write_document",
    "write_page",
]
