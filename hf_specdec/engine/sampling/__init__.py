"""The choice of the next token: logits processors, random numbers, draws, and the rejection of drawn drafts."""
