"""DFlash: a block of tokens drafted in one forward."""
