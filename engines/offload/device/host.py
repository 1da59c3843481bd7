"""The host's CPU as the device that computes: nothing is copied, and attention beside products has a thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from engines.offload.device.protocol import Event


class _Done:
    """The end of what a thread runs; raises what the thread raised."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def synchronize(self) -> None:
        self._future.result()


class HostDevice:
    """See Device."""

    where = torch.device("cpu")

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="attention")  # starts with its first work

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def record_stream(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def run_async(self, work: Callable[[], None]) -> Event:
        return _Done(self._thread.submit(torch.inference_mode()(work)))  # threads do not inherit the mode

    def wait_event(self, event: Event) -> None:
        event.synchronize()

    def memory(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._thread.shutdown()
