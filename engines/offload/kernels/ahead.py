"""`python -m engines.offload.kernels.ahead`: compiles kernels into the user's cache, before a load waits for them.

Needs torch and psutil, and nothing else that is installed. Says nothing: a load says what is missing, and compiles it.
"""

from contextlib import suppress

import torch

from engines.offload.kernels.kernel_sets import HostKernels
from engines.offload.memory.storage import Panels, Plain
from harness.api import HarnessError
from harness.common.files import default_cache


def main() -> None:
    """Builds what a model in 16 bits needs, with its weights kept in twelve."""
    with suppress(HarnessError, OSError):  # no cache can be written
        kernels = HostKernels(default_cache(), torch.get_num_threads())
        kernels.tile_pool()
        kernels.attention(Plain("bfloat16"))
        kernels.row_writer()
        kernels.weight_packer(Panels(exact12=True))
        kernels.gemm(Plain("bfloat16"))
        kernels.rms_norm()
        kernels.rotary()
        kernels.close()


if __name__ == "__main__":
    main()
