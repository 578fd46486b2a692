"""The decoding loop: propose, forward, verify, commit, stop check."""
