"""The laws run without a time limit an example: a busy machine is no counterexample."""

from hypothesis import settings

settings.register_profile("laws", deadline=None)
settings.load_profile("laws")
