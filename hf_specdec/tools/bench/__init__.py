"""A measurement that a stranger can rerun: ways to generate, side by side on the same prompts.

loaded, settings = load_model(dtype="fp32"), BenchSettings(max_new_tokens=32)
records = Records(make_header(loaded, settings))
measure(loaded, load_prompts(limit=6), make_rows(["prompt_lookup", "auto"], loaded), settings, records)
print(speed_table(records.records))
"""

from hf_specdec.tools.bench.header import make_header
from hf_specdec.tools.bench.loaded_model import LoadedModel, load_model
from hf_specdec.tools.bench.page import draw_speeds, write_page
from hf_specdec.tools.bench.prompts import Prompt, default_prompts, load_prompts
from hf_specdec.tools.bench.records import Records, read_records
from hf_specdec.tools.bench.rows import Row, base_rows, make_rows
from hf_specdec.tools.bench.run import BenchSettings, measure
from hf_specdec.tools.bench.table import speed_table, speeds_by_prompt
from hf_specdec.tools.bench.widen import check_widening, widen, widen_head

__all__ = [
    "BenchSettings",
    "LoadedModel",
    "Prompt",
    "Records",
    "Row",
    "base_rows",
    "check_widening",
    "default_prompts",
    "draw_speeds",
    "load_model",
    "load_prompts",
    "make_header",
    "make_rows",
    "measure",
    "read_records",
    "speed_table",
    "speeds_by_prompt",
    "widen",
    "widen_head",
    "write_page",
]
