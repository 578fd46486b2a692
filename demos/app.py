"""The demo as an application of its own: `python demos/app.py`, or a Hugging Face Space made from this folder.

The same as `hf-specdec demo`, whose options it takes.
"""

import sys

from hf_specdec.tools.cli import app

if __name__ == "__main__":
    app(["demo", *sys.argv[1:]], prog_name="hf-specdec")
