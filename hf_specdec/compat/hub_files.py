"""transformers' look-up of files.

Names                              Why
`cached_file`                      what is ours is found where transformers finds models: folder, cache or hub
"""

from transformers.utils import cached_file

__all__ = ["cached_file"]
