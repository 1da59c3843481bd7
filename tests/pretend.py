"""A device that is none: tensors of its own that do not mix with the host's, and streams that run as late as they may.

`Pretend` is a device (engines.offload.device.protocol) on a CPU. What is asked of it is queued, in its stream, and
done when somebody waits for it or for what depends on it: so work that forgets to wait for a copy, or a copy that
forgets to wait for work, gets what is not yet there or no longer there, and the answer is wrong every time. Memory is
NaN before it is written. `syncs` counts what would have made the host wait for the device without saying so.
"""

import threading
import time
import types

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_iter, tree_map

from engines.common.work_memory import CONTEXT_BYTES
from harness.common.buffers import direct_buffer

backend_registration._setup_privateuseone_for_python_backend("pretend")
_WHERE = torch.device("pretend:0")
_lock = threading.RLock()  # of all queues
_here = threading.local()


class _Stream:
    """Work in order: what has not run yet, and how much has."""

    def __init__(self):
        self.work, self.done, self.asked = [], 0, 0

    def add(self, work):
        with _lock:
            self.work.append(work)
            self.asked += 1

    def run(self, until):
        with _lock, torch.inference_mode():
            while self.done < until:
                work = self.work.pop(0)
                self.done += 1
                work()


class _Event:
    def __init__(self, stream):
        self._stream, self._at = stream, stream.asked
        self._asked_s = time.perf_counter()

    def synchronize(self):
        self._stream.run(self._at)

    def __getitem__(self, first):  # as stamps have it
        return self._asked_s


class _Tensor(torch.Tensor):
    """What claims to be on the device, and lies in host memory as `held`."""

    @staticmethod
    def __new__(cls, real):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=_WHERE,
        )
        self.held = real
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


def _real(x):
    if isinstance(x, _Tensor):
        return x.held
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == _WHERE.type else x


def _meta(x):
    if isinstance(x, torch.Tensor):
        real = _real(x)
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


_UNKNOWN = object()
_results = {}


def _result(func, args, kwargs):
    """What an operation gives, on the meta device. Kept: there most take a hundred times as long as they do here."""
    key = (func, _key(args), _key(kwargs))
    if key not in _results:
        try:
            _results[key] = func(*_each(_meta, args), **{k: _meta(v) for k, v in kwargs.items()})
        except Exception:
            _results[key] = _UNKNOWN
    return _results[key]


def _key(x):
    """What the shapes of a result depend on. With the type: 1, 1.0 and True are equal."""
    if isinstance(x, torch.Tensor):
        real = _real(x)
        return real.shape, real.stride(), real.dtype
    if isinstance(x, dict):
        return tuple((name, _key(value)) for name, value in x.items())
    return tuple(map(_key, x)) if isinstance(x, list | tuple) else (type(x), x)


def _each(change, x):
    """As tree_map, of what operations take only, and several times as fast."""
    return [_each(change, value) for value in x] if isinstance(x, list | tuple) else change(x)


def _tensors(values):
    """The tensors in arguments of an operation."""
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


def _wrapped(out):
    if isinstance(out, torch.Tensor):  # as nearly always
        return _Tensor(out)
    return tree_map(lambda x: _Tensor(x) if isinstance(x, torch.Tensor) else x, out)


def _dispatch(func, args, kwargs):
    """One operation: views at once, all else queued, what the host must know after all that was asked before."""
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    ours = [x for x in tensors if isinstance(x, _Tensor)]
    name = func._schema.name
    if name == "aten::copy_" and len(ours) == 1:
        return _copied_between(args)
    if ours and any(not isinstance(x, _Tensor) and x.dim() for x in tensors):
        raise RuntimeError(f"{name} mixes tensors of the host and of the device")
    real_args, real_kwargs = _each(_real, args), {k: _each(_real, v) for k, v in kwargs.items()}
    asked = kwargs.get("device")
    if not ours and any(x.dim() for x in tensors):  # from the host, and not pinned
        pretend.device.syncs.append(name)
    if asked is not None and torch.device(asked).type == "cpu":
        return _told(func, real_args, real_kwargs)
    written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    aliases = any(r.alias_info is not None for r in func._schema.returns)
    with _lock, torch.inference_mode():
        if aliases and not written:
            found = func(*real_args, **real_kwargs)
            places = {x.held.untyped_storage().data_ptr() for x in ours}
            if all(x.untyped_storage().data_ptr() in places for x in tree_iter(found)):
                return _wrapped(found)  # `to` and `contiguous` copy where they must
        if written:
            pretend.device.stream.add(lambda: func(*real_args, **real_kwargs))
            named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
            found = [named[n] for n in written]
            return found[0] if len(found) == 1 else tuple(found)
        shapes = _result(func, args, kwargs)
        if shapes is _UNKNOWN:  # how much there will be only the device knows
            return _wrapped(_told(func, real_args, real_kwargs))
        if not any(isinstance(x, torch.Tensor) for x in tree_iter(shapes)):
            return _told(func, real_args, real_kwargs)
        rooms = (
            _room(shapes)
            if isinstance(shapes, torch.Tensor)
            else tree_map(lambda x: _room(x) if isinstance(x, torch.Tensor) else x, shapes)
        )
        if name not in ("aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty"):
            pretend.device.stream.add(lambda: _fill(rooms, func(*real_args, **real_kwargs)))
        return _wrapped(rooms)


def _room(like):
    room = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    return room.fill_(torch.nan) if room.is_floating_point() else room.fill_(room.dtype != torch.bool)


def _fill(rooms, found):
    if isinstance(rooms, torch.Tensor):  # as nearly always
        rooms.copy_(found)
        return
    for room, value in zip(tree_iter(rooms), tree_iter(found), strict=True):
        if isinstance(room, torch.Tensor):
            room.copy_(value)


def _told(func, args, kwargs):
    """Something that the host must know."""
    device = pretend.device
    device.syncs.append(func._schema.name)
    device.stream.run(device.stream.asked)
    with torch.inference_mode():
        return func(*args, **kwargs)


def _copied_between(args):
    to, source = args[:2]
    device = pretend.device
    device.syncs.append("aten::copy_")
    if isinstance(to, _Tensor):  # from what is not pinned
        snapshot = source.clone()
        device.stream.add(lambda: to.held.copy_(snapshot))
        return to
    device.stream.run(device.stream.asked)
    with torch.inference_mode():
        return to.copy_(source.held)


class Pretend:
    """See Device."""

    where = _WHERE

    def __init__(self):
        self._compute, self._up, self._kv, self._down, self._side = (_Stream() for _ in range(5))
        self.syncs = []
        self.pinned_bytes = 0
        self.besides = 0
        self.partition = "pretend"
        self.context_bytes = CONTEXT_BYTES

    @property
    def stream(self):
        return getattr(_here, "stream", None) or self._compute

    def pinned(self, nbytes):
        assert nbytes & (nbytes - 1) == 0
        self.pinned_bytes += nbytes
        return torch.frombuffer(direct_buffer(nbytes), dtype=torch.uint8).fill_(255)

    def copy(self, pairs, after=(), kv=False):
        up = {isinstance(to, _Tensor) for to, _ in pairs}
        assert len(up) == 1
        assert all(isinstance(to, _Tensor) != isinstance(source, _Tensor) for to, source in pairs)
        assert all(to.shape == source.shape and to.dtype == source.dtype for to, source in pairs)
        stream = self._down if up == {False} else self._kv if kv else self._up
        with _lock:
            for event in after:
                stream.add(event.synchronize)
            for to, source in pairs:
                stream.add(lambda to=to, source=source: _real(to).copy_(_real(source)))
            return _Event(stream)

    def timed_copy(self, to, source, after=()):
        with _lock:
            began = _Event(self._up)
            return began, self.copy([(to, source)], after)

    def mark(self):
        return _Event(self.stream)

    def wait_event(self, event):
        self.stream.add(event.synchronize)

    def upload(self, tensor):
        assert not isinstance(tensor, _Tensor)
        return _Tensor(tensor.clone())

    def fetch(self, *tensors):
        found = [_room(tensor.held.contiguous()) for tensor in tensors]
        return found, self.copy(list(zip(found, tensors, strict=True)), (self.mark(),))

    def download(self, tensor):
        self.stream.run(self.stream.asked)
        return tensor.held.clone()

    def run_async(self, work):
        self.besides += 1
        before = self.mark()
        _here.stream = self._side
        try:
            self._side.add(before.synchronize)
            work()
            return self.mark()
        finally:
            _here.stream = None

    def record_stream(self, tensor):
        return tensor

    def stamp(self):
        return [time.perf_counter()]

    def seconds(self, stamps):
        return [stamp[0] for stamp in stamps]

    def close(self):
        self.closed = True

    def memory(self):
        return {"pinned_bytes": float(self.pinned_bytes)}


#: `device`: the one that tensors are on, one at a time.
pretend = types.SimpleNamespace(device=None)

#: Kept, or what is registered in it goes.
_library = torch.library.Library("_", "IMPL")
_library.fallback(lambda op, *args, **kwargs: _dispatch(op, args, kwargs), "PrivateUse1")


def _arange(*args, device=None, **kwargs):
    """Else torch would ask for no room first and resize it, which such tensors cannot be."""
    return _Tensor(torch.arange(*args, **kwargs))


_factories = torch.library.Library("aten", "IMPL")
for _overload in ("arange", "arange.start", "arange.start_step"):
    _factories.impl(_overload, _arange, "PrivateUse1")


def fresh():
    """The device that all tensors are on from now on."""
    pretend.device = Pretend()
    return pretend.device
