"Things several tests use."
import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import AMPMode, MixedPrecision
from torch.amp import GradScaler, autocast

class CpuMixedPrecision(MixedPrecision):
    """fastai's `MixedPrecision` with autocast and a GradScaler that work on the CPU; on a CPU fastai's own disables
    itself"""
    def before_fit(self):
        dtype = torch.float16 if self.amp_mode==AMPMode.FP16 else torch.bfloat16
        self.kwargs['enabled'] = dtype==torch.float16
        self.autocast,self.learn.scaler,self.scales = autocast('cpu', dtype=dtype),GradScaler('cpu', **self.kwargs),[]
    @property
    def name(self): return 'mixed_precision'

class Seen(Callback):
    "Note what `f` returns for the Learner at `event`, in training"
    run_valid = False
    def __init__(self, event, f, order=0):
        self.values,self.order = [],order
        setattr(self, event, lambda: self.values.append(f(self.learn)))

class Raise(Callback):
    "Raise `exc` at the `at`th time that `event` comes"
    def __init__(self, event, exc, order, at=0, after=None):
        self.order,self.left,self.raised = order,at,False
        setattr(self, event, lambda: self._raise(exc))
    def _raise(self, exc):
        self.left -= 1
        if self.left==-1:
            self.raised = True
            raise exc('planted')

def grads(learn): return [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()]
def weights(learn): return torch.cat([p.detach().flatten().clone() for p in learn.model.parameters()])

class InBackward(torch.autograd.Function):
    "Hands `x` on; in the backward pass `check` is called with the number of samples, and may raise"
    @staticmethod
    def forward(ctx, x, check):
        ctx.check = check
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        ctx.check(len(g))
        return g,None

def short_of(cap, stage='backward'):
    "A check for `InBackward`: memory runs out with more than `cap` samples"
    def check(n):
        if n>cap: raise torch.OutOfMemoryError(f'planted, {stage}')
    return check
