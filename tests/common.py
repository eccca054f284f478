"Things several tests use."
import os, pytest, subprocess, torch, warnings
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from torch.nn import functional as F
from fastai.vision.all import AMPMode, Callback, MixedPrecision, Module
from torch.amp import GradScaler, autocast
from torch.utils.data import TensorDataset
from fastaccum.testing import toy_data

whole = os.environ.get('TESTS')=='all'   # `make test-all` runs whole grids; `make test` a sample of each

def some(n, cases):
    "`n` of `cases`, always the same ones; with `make test-all` all of them"
    cases = list(cases)
    if whole or n>=len(cases): return cases
    return [cases[i] for i in sorted(Random(n).sample(range(len(cases)), n))]

def files_of_git():
    "The names of the files that git has, or would have with `git add`"
    cmd = ['git','ls-files','-z','--cached','--others','--exclude-standard']
    root = Path(__file__).resolve().parent.parent
    res = subprocess.run(cmd, cwd=root, capture_output=True, text=True)
    if res.returncode: pytest.skip('not a git checkout')
    return [o for o in res.stdout.split('\0') if (root/o).is_file()]

class CpuMixedPrecision(MixedPrecision):
    """fastai's `MixedPrecision` with autocast and a GradScaler that work on the CPU; on a CPU fastai's own disables
    itself"""
    name = 'mixed_precision'
    def before_fit(self):
        dtype = torch.float16 if self.amp_mode==AMPMode.FP16 else torch.bfloat16
        self.kwargs['enabled'] = dtype==torch.float16
        self.autocast,self.learn.scaler,self.scales = autocast('cpu', dtype=dtype),GradScaler('cpu', **self.kwargs),[]

class Scaled(CpuMixedPrecision):
    "The GradScaler without the half precision, so that runs can be compared to the last digit"
    def before_fit(self):
        super().before_fit()
        self.autocast = autocast('cpu', enabled=False)
    def after_pred(self): pass   # fastai's makes single precision

def nt_xent(z, y=None):
    "A loss in which all samples of a batch see each other (Chen et al., 2020): of 2i and 2i+1, each finds the other"
    z = F.normalize(z.flatten(1))
    sim = (z@z.T/0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
    return F.cross_entropy(sim, (torch.arange(len(z))^1)%len(z))

def dice(p, y):
    "The mean over classes, with one coefficient for all samples of a batch together"
    p,y = p.softmax(1),F.one_hot(y, p.shape[1]).movedim(-1, 1)
    dims = [0,*range(2, p.ndim)]
    return 1-(2*(p*y).sum(dims)/(p+y).sum(dims)).mean()

def clear(*args):
    "Data with a signal: most of it is of one class"
    x,y = toy_data(*args).tensors
    return TensorDataset(x, torch.where(y<0, y, (x[...,0]<-1).long()))

class Event(Callback):
    "Call `f` with the Learner at `event`"
    def __init__(self, event, f, valid=False, order=1):
        self.run_valid,self.order = valid,order
        setattr(self, event, lambda: f(self.learn))

class Seen(Event):
    "Note what `f` returns for the Learner at `event`, in training"
    def __init__(self, event, f, order=0):
        self.values = []
        super().__init__(event, lambda learn: self.values.append(f(learn)), order=order)

class Raise(Callback):
    "Raise `exc` at the `at`th time that `event` comes"
    def __init__(self, event, exc, order, at=0):
        self.order,self.left = order,at
        setattr(self, event, lambda: self._raise(exc))
    def _raise(self, exc):
        self.left -= 1
        if self.left==-1: raise exc('planted')
    raised = property(lambda self: self.left<0)

def cut(idxs, n): return [idxs[i:i+n] for i in range(0, len(idxs), n)]

class Epochs:
    "For each epoch in turn, what it holds"
    def __init__(self, epochs): self.epochs,self.i = epochs,0
    def __call__(self):
        self.i += 1
        return self.epochs[(self.i-1)%len(self.epochs)]

class Batches:
    "A loader of given batches, each of its own size"
    device = torch.device('cpu')
    def __init__(self, dataset, epochs): self.dataset,self.order = dataset,Epochs(epochs)
    def __len__(self): return len(self.order.epochs[self.order.i%len(self.order.epochs)])
    def __iter__(self): return iter([self.dataset[o] for o in self.order()])

class StepsLoader(Batches):
    "A loader that yields the samples of `dl` in batches of the given sizes, epoch by epoch"
    def __init__(self, dl, sizes, epoch=0): super().__init__(dl.dataset, sizes); self.dl,self.order.i = dl,epoch
    def __iter__(self):
        idxs,ends = self.dl.get_idxs(),[0,*accumulate(self.order())]
        return iter([self.dataset[idxs[i:j]] for i,j in zip(ends, ends[1:])])

def grads(learn): return [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()]
def weights(learn): return torch.cat([p.detach().flatten().clone() for p in learn.model.parameters()])

@contextmanager
def unmoved(learn):
    "No weight moves"
    before = weights(learn)
    yield
    assert weights(learn).equal(before)

@contextmanager
def noted_warnings(action='always'):
    "A list of the warnings that come, with this filter"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter(action)
        yield said

def in_single(ds):
    "The same data with inputs in single precision"
    return TensorDataset(ds.tensors[0].float(), *ds.tensors[1:])

def trim(learn):
    "The batch is as long as its longest sequence"
    n = int((learn.y!=-100).any(0).nonzero().max())+1
    learn.xb,learn.yb = (learn.x[:,:n],),(learn.y[:,:n],)

def to_infinity(learn): learn.loss_grad = learn.loss_grad*float('inf')
def overflow(at):
    "The loss of a step is infinite, `at` steps after the first"
    return Event('before_backward', lambda learn: len(learn.recorder.lrs)==at and to_infinity(learn), order=9)
def overflows(i, learn):
    "The loss of the batch with sample `i` is infinite, in the first epoch"
    if learn.epoch==0 and (learn.x==learn.dls.valid_ds[i][0]).all(-1).any(): to_infinity(learn)

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

class Memory(Module):
    "Hands its input on; memory runs out where `short(where, n)` says so, for 'forward', 'backward' and 'validation'"
    def __init__(self, short=None): self.short = short
    def check(self, where, n):
        if self.short and self.short(where, n): short_of(0, where)(n)
    def forward(self, x):
        self.check('forward' if self.training else 'validation', len(x))
        return InBackward.apply(x, partial(self.check, 'backward')) if self.training else x

def above(cap, *wheres): return lambda where,n: where in wheres and n>cap

def at_times(times, where, cap=1):
    "Memory runs out at some of the attempts, counted from 0"
    tries = [-1]
    def short(at, n):
        tries[0] += at==where
        return at==where and n>cap and tries[0] in times
    return short
