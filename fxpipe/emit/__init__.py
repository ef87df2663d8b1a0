"""Writes a pipeline down as scripts that run without the compiler."""
