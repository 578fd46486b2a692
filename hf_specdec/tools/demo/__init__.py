"""The demo: a race between plain generate and speculation, and a look inside every step.

`settings` says what a visitor may ask for, `runner` runs and times it, `record` is what was seen, `draw` makes HTML and
SVG of that, and `page` puts them together with Gradio. Only `page` and `serve` know Gradio.
"""
