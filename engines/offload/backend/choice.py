"""Which backend serves a load: a CUDA device where the limits give memory of one, else the host."""

from contextlib import ExitStack

from engines.offload.backend.base import Backend, LoadRequest
from engines.offload.backend.cuda import CudaBackend
from engines.offload.backend.host import HostBackend
from engines.offload.device.cuda import opened
from engines.offload.device.host import HostDevice
from engines.offload.kernels import HostKernels
from harness.api import UnsupportedError


def backend_for(
    request: LoadRequest, host_kernels: HostKernels, resources: ExitStack, attention_units: int | None
) -> Backend:
    """The backend; `resources` end what it opens. `attention_units` as in OffloadEngine.

    Raises UnsupportedError where there is no such device.
    """
    accelerator = opened(request.limits, attention_units)
    if accelerator is not None:
        resources.callback(accelerator.close)
        return CudaBackend(request, host_kernels, accelerator)
    if attention_units is not None:
        raise UnsupportedError("options.attention_units: there is no device to part without limits.device_memory")
    host = HostDevice()
    resources.callback(host.close)
    return HostBackend(request, host_kernels, host)
