"""The demo: a race between plain generate and speculation, and a look inside every step.

`settings` holds what a visitor may change, `runner` runs and times it, `record` keeps it, `draw` makes HTML and SVG of
it, `figures` makes data frames, and `page` puts them together with Gradio and serves them.
"""
