"""`python -m hf_specdec` is `hf-specdec`."""

from hf_specdec.tools.cli import app

if __name__ == "__main__":
    app(prog_name="hf-specdec")
