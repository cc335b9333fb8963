"""Triton kernels and their launchers. Nothing here decides anything; see plan.py."""
