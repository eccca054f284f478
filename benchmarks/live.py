"""The peak memory of the tensors of a computation, also on a CPU, where torch does not measure it.

The count has the storages of tensors that the computation creates: activations, gradients and temporary tensors. It
does not have tensors that existed before, such as weights and the batch, nor memory that kernels use internally.
"""
import torch, weakref
from functools import partial
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

class LiveTensors(TorchDispatchMode):
    "A context that counts the bytes of the storages that are created in it"
    def __init__(self):
        super().__init__()
        self.now,self.peak = 0,0   # bytes of all storages alive now, and the peak
        self.sizes = {}            # of each storage alive, by `id`: a weak reference and the bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {id(o.untyped_storage()) for o in tree_leaves((args,kwargs or {})) if isinstance(o, Tensor)}
        res = func(*args, **(kwargs or {}))
        for o in tree_leaves(res):
            if isinstance(o, Tensor) and id(o.untyped_storage()) not in before: self._add(o.untyped_storage())
        return res

    def _add(self, storage):
        key = id(storage)
        if key in self.sizes: return
        n = storage.nbytes()
        self.sizes[key] = weakref.ref(storage, partial(self._remove, key)),n
        self.now += n
        self.peak = max(self.peak, self.now)

    def _remove(self, key, _): self.now -= self.sizes.pop(key)[1]

def peak_bytes(f, device=None):
    "Return the peak of bytes that `f()` uses in addition to those in use before; on a GPU, torch measures it"
    if device is None or device.type=='cpu':
        with LiveTensors() as live: f()
        return live.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    return torch.cuda.max_memory_allocated()-before
