"""Eager calls without Python between them and the launch, where their library has been built."""
