"""The text of one row while it grows: token ids as a list for drafters, as a tensor for everyone who wants one."""

import torch

MAX_UNWRITTEN = 32  # tokens that the tensor may lack where somebody brings them himself


class TokenBuffer:
    """Prompt and emitted tokens. The tensor is written only when somebody asks for it."""

    def __init__(self, input_ids: torch.Tensor, *, room: int) -> None:
        """`input_ids` is `(1, prompt_length)` of any integer type; `room` is the number of tokens expected."""
        self._buffer = torch.empty((1, input_ids.shape[1] + max(room, 1)), dtype=torch.long, device=input_ids.device)
        self._buffer[:, : input_ids.shape[1]] = input_ids
        self._written = input_ids.shape[1]
        self.tokens: list[int] = input_ids[0].tolist()
        self.prompt_length = len(self.tokens)

    def __len__(self) -> int:
        """Tokens so far, the prompt counted."""
        return len(self.tokens)

    def append(self, token: int) -> None:
        """Add an emitted token."""
        self.tokens.append(token)

    def ids(self) -> torch.Tensor:
        """The text as `(1, length)`: a view that later tokens do not change."""
        length = len(self.tokens)
        if length > self._buffer.shape[1]:
            grown = self._buffer.new_empty((1, 2 * length))
            grown[:, : self._written] = self._buffer[:, : self._written]
            self._buffer = grown
        if self._written < length:
            new = self.tokens[self._written :]
            if len(new) == 1:
                self._buffer[:, self._written : length].fill_(new[0])  # without a copy from the host
            else:
                self._buffer[0, self._written : length] = self._buffer.new_tensor(new)
            self._written = length
        return self._buffer[:, :length]

    def beginning(self, length: int) -> torch.Tensor:
        """`(1, length)`: its first tokens, and zeros after its last one."""
        ids = self.ids()[:, :length]
        return torch.nn.functional.pad(ids, (0, length - ids.shape[1]))

    def parts(self) -> tuple[torch.Tensor, list[int]]:
        """The text as `(1, L)` ids and the tokens after them, at most `MAX_UNWRITTEN`, for who brings those himself."""
        if len(self.tokens) - self._written > MAX_UNWRITTEN:
            return self.ids(), []
        return self._buffer[:, : self._written], self.tokens[self._written :]
