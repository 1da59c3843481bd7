"""Settings for all tests."""

from hypothesis import settings

# how long an example takes says nothing about whether it is right
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
