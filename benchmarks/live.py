"""How much memory the tensors of a computation hold, counted on a CPU, where the allocator does not tell.

Counted are the storages that are made, as they come and go: activations, gradients, temporary tensors. What was there
before (weights, the batch) is not in it, nor is what a kernel allocates inside.
"""
import torch, weakref
from functools import partial
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

class LiveTensors(TorchDispatchMode):
    "Counts the bytes of the storages that are made while it is on"
    def __init__(self):
        super().__init__()
        self.now,self.peak = 0,0   # bytes alive now, and the most that were alive at a time
        self.sizes = {}            # of each storage alive, by `id`: a weak reference and its bytes

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
    "The most bytes that the function `f` holds while it runs, beyond what was there before; on a GPU torch counts them"
    if device is None or device.type=='cpu':
        with LiveTensors() as live: f()
        return live.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    f()
    return torch.cuda.max_memory_allocated()-before
