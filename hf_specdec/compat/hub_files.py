"""transformers' look-up of files, and the hub's rule for names.

Names                              Why
`cached_file`                      what is ours is found where transformers finds models: folder, cache or hub
`validate_repo_id`                 a name that is none is refused before anything is written under it
"""

from huggingface_hub.utils import validate_repo_id as validate_repo_id  # type: ignore[attr-defined]
from transformers.utils import cached_file as cached_file
