"""Settings for all tests."""

import os
from pathlib import Path

from hypothesis import settings

# kernels of a device run in Triton's interpreter where there is none; it must be told before anybody imports it
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# how long an example takes says nothing about whether it is right
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
