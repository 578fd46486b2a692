"""Chats that a draft for SmolLM2-135M-Instruct is trained on."""
