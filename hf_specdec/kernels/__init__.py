"""Attention kernels from outside torch, behind transformers' `attn_implementation`, and faster products on CPUs."""
