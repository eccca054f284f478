"""Helpers that tests of any subject use; Learners are in `laws/small_learners.py`.

- Choosing cases: `run_all_cases`, `pick_cases`
- Data and losses: `learnable_data`, `with_float32_inputs`, `in_chunks`, `trim_padding`, `nt_xent`, `batch_dice_loss`
- Loaders with given batches: `BatchListLoader`, `BatchSizesLoader`, `EpochCycle`
- Callbacks that act at an event: `CallAt`, `RecordAt`, `RaiseAt`
- Mixed precision on a CPU: `CpuMixedPrecision`, `CpuLossScaling`, `overflow_at_step`, `overflow_on_sample`
- Memory that runs out: `raise_oom_above`, `CheckInBackward`, `LimitedMemory`, `runs_out_above`, `runs_out_on_attempts`
- Looking at a Learner: `grads`, `weights`, `weights_unchanged`
- Warnings, and the files of the repository: `collect_warnings`, `copy_folder`, `git`, `files_of_git`
- Code that gives a message: `called`, `message_calls`
"""
import ast, os, pytest, shutil, subprocess, torch, warnings
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from random import Random
from torch.nn import functional as F
from fastai.vision.all import AMPMode, Callback, MixedPrecision, Module
from torch.amp import GradScaler, autocast
from torch.utils.data import TensorDataset
from fastaccum.base.messages import catalogue
from fastaccum.testing import toy_data

# Choosing cases

# `make test-all` sets TESTS=all and runs every case of a test; `make test` runs some of the cases, and with TESTS=few,
# as with the second Python in .ci/run, it runs a third of them
run_all_cases = os.environ.get('TESTS')=='all'
run_few_cases = os.environ.get('TESTS')=='few'

def pick_cases(n, cases):
    "Return `n` of the `cases`, always the same; with `TESTS=all`, all of them, and with `TESTS=few`, a third of `n`"
    cases = list(cases)
    if run_few_cases: n = -(-n//3)
    if run_all_cases or n>=len(cases): return cases
    return [cases[i] for i in sorted(Random(n).sample(range(len(cases)), n))]

# Data and losses

def learnable_data(*args):
    "Return `toy_data(*args)` with targets that depend on the inputs; five of six targets are of class 0"
    x,y = toy_data(*args).tensors
    return TensorDataset(x, torch.where(y<0, y, (x[...,0]<-1).long()))

def with_float32_inputs(ds):
    "Return the dataset with its inputs in single precision"
    return TensorDataset(ds.tensors[0].float(), *ds.tensors[1:])

def in_chunks(items, n):
    "Split the list `items` into lists of `n`; the last one may be shorter"
    return [items[i:i+n] for i in range(0, len(items), n)]

def trim_padding(learn):
    "Cut the Learner's batch of token sequences to its longest sequence; the targets of padding are -100"
    longest = int((learn.y!=-100).any(0).nonzero().max())+1
    learn.xb,learn.yb = (learn.x[:,:longest],),(learn.y[:,:longest],)

def nt_xent(z, y=None):
    """Return the NT-Xent loss of SimCLR (Chen et al., 2020)

    Samples 2i and 2i+1 are a pair of views of one image. All other samples of the batch are negatives.
    """
    z = F.normalize(z.flatten(1))
    sim = (z@z.T/0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
    return F.cross_entropy(sim, (torch.arange(len(z))^1)%len(z))

def batch_dice_loss(p, y):
    "Return 1 minus the mean Dice coefficient of the classes, each computed over the whole batch"
    p,y = p.softmax(1),F.one_hot(y, p.shape[1]).movedim(-1, 1)
    dims = [0,*range(2, p.ndim)]
    return 1-(2*(p*y).sum(dims)/(p+y).sum(dims)).mean()

# Loaders with given batches, which take the place of a Learner's training loader

class EpochCycle:
    "A function that returns the next entry of `epochs` in each call, in a cycle"
    def __init__(self, epochs): self.epochs,self.i = epochs,0
    def __call__(self):
        self.i += 1
        return self.epochs[(self.i-1)%len(self.epochs)]

class BatchListLoader:
    "A loader of given batches: `epochs[i]` is a list of batches, each of which is a list of indices"
    device = torch.device('cpu')
    def __init__(self, dataset, epochs): self.dataset,self.cycle = dataset,EpochCycle(epochs)
    def __len__(self): return len(self.cycle.epochs[self.cycle.i%len(self.cycle.epochs)])
    def __iter__(self): return iter([self.dataset[idxs] for idxs in self.cycle()])

class BatchSizesLoader(BatchListLoader):
    """A loader of the samples of `dl` in their order, in batches of given sizes

    `sizes` has a list of batch sizes for each epoch. The first epoch is number `epoch`.
    """
    def __init__(self, dl, sizes, epoch=0):
        super().__init__(dl.dataset, sizes)
        self.dl,self.cycle.i = dl,epoch
    def __iter__(self):
        idxs,ends = self.dl.get_idxs(),[0,*accumulate(self.cycle())]
        return iter([self.dataset[idxs[i:j]] for i,j in zip(ends, ends[1:])])

# Callbacks that act at an event

class CallAt(Callback):
    "Calls `f(learn)` at `event` in training; with `run_valid=True` also in validation and prediction"
    def __init__(self, event, f, run_valid=False, order=1):
        self.run_valid,self.order = run_valid,order
        setattr(self, event, lambda: f(self.learn))

class RecordAt(CallAt):
    "Appends `f(learn)` to the list `values` at `event` in training"
    def __init__(self, event, f, order=0):
        self.values = []
        super().__init__(event, lambda learn: self.values.append(f(learn)), order=order)

raised = set()   # the `id` of each `RaiseAt` that has raised; not an attribute, because a trial restores those
class RaiseAt(Callback):
    "Raises `exc` once: at `event`, after `event` has passed `skip` times without an error"
    def __init__(self, event, exc, order, skip=0):
        self.order,self.exc,self.skip,self.n_heard = order,exc,skip,0
        setattr(self, event, lambda: self.hear())
    def hear(self):
        self.n_heard += 1
        if self.n_heard!=self.skip+1: return
        raised.add(id(self))
        raise self.exc('planted')
    @property
    def raised(self):
        "Whether the exception was raised"
        return id(self) in raised

# Mixed precision on a CPU; fastai's `MixedPrecision` does nothing on a CPU

class CpuMixedPrecision(MixedPrecision):
    "fastai's `MixedPrecision` with autocast and a GradScaler that work on a CPU"
    name = 'mixed_precision'
    def before_fit(self):
        dtype = torch.float16 if self.amp_mode==AMPMode.FP16 else torch.bfloat16
        self.kwargs['enabled'] = dtype==torch.float16
        self.autocast,self.learn.scaler,self.scales = autocast('cpu', dtype=dtype),GradScaler('cpu', **self.kwargs),[]

class CpuLossScaling(CpuMixedPrecision):
    "Mixed precision with a GradScaler and without autocast, which would cast double precision"
    def before_fit(self):
        super().before_fit()
        self.autocast = autocast('cpu', enabled=False)
    # do not cast the predictions to single precision, as `MixedPrecision.after_pred` does
    def after_pred(self): pass

def make_loss_infinite(learn): learn.loss_grad = learn.loss_grad*float('inf')

def overflow_at_step(i):
    "Return a callback that makes the loss infinite in step `i` (from 0), before the loss is scaled"
    return CallAt('before_backward', lambda learn: len(learn.recorder.lrs)==i and make_loss_infinite(learn), order=9)

def overflow_on_sample(i, learn):
    "In the first epoch, make the loss infinite if the batch contains sample `i` of the dataset"
    if learn.epoch==0 and (learn.x==learn.dls.valid_ds[i][0]).all(-1).any(): make_loss_infinite(learn)

# Memory that runs out, simulated with torch's out-of-memory error

def raise_oom_above(cap, stage='backward'):
    "Return a function `check(n)` that raises an out-of-memory error if `n` samples are more than `cap`"
    def check(n):
        if n>cap: raise torch.OutOfMemoryError(f'planted, {stage}')
    return check

class CheckInBackward(torch.autograd.Function):
    """The identity function, whose backward pass calls `check(number of samples)`

    `check` may raise an error.
    """
    @staticmethod
    def forward(ctx, x, check):
        ctx.check = check
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        ctx.check(len(g))
        return g,None

class LimitedMemory(Module):
    """A layer that returns its input, and runs out of memory where `runs_out(stage, n)` is true

    `stage` is 'forward', 'backward' or 'validation', and `n` is the number of samples.
    """
    def __init__(self, runs_out=None): self.runs_out = runs_out
    def check(self, stage, n):
        if self.runs_out and self.runs_out(stage, n): raise_oom_above(0, stage)(n)
    def forward(self, x):
        self.check('forward' if self.training else 'validation', len(x))
        return CheckInBackward.apply(x, partial(self.check, 'backward')) if self.training else x

def runs_out_above(cap, *stages):
    "Return a `runs_out` for `LimitedMemory`: memory runs out in `stages` with more than `cap` samples"
    return lambda stage,n: stage in stages and n>cap

def runs_out_on_attempts(attempts, stage, cap=1):
    """Return a `runs_out` for `LimitedMemory`: memory runs out in some passes of this `stage`

    `attempts` has the numbers of these passes, counted from 0. Passes of at most `cap` samples never run
    out.
    """
    n_attempts = 0
    def runs_out(this_stage, n):
        nonlocal n_attempts
        if this_stage!=stage: return False
        n_attempts += 1
        return n>cap and n_attempts-1 in attempts
    return runs_out

# Looking at a Learner, at warnings and at the repository

def grads(learn):
    "Return a copy of the gradient of each parameter, or None for a parameter without a gradient"
    return [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()]

def weights(learn):
    "Return a copy of all parameters as one vector"
    return torch.cat([p.detach().flatten().clone() for p in learn.model.parameters()])

@contextmanager
def weights_unchanged(learn):
    "Fail if a weight of the Learner changes in this context"
    before = weights(learn)
    yield
    assert weights(learn).equal(before)

@contextmanager
def collect_warnings(action='always'):
    "Collect the warnings of this context in a list; `action` is an action of Python's warnings filter"
    with warnings.catch_warnings(record=True) as collected:
        warnings.simplefilter(action)
        yield collected

def copy_folder(src, dst, **kwargs):
    "Copy a folder with `shutil.copytree`; the copy can be written into, even if `src` is read-only"
    shutil.copytree(src, dst, copy_function=shutil.copyfile, **kwargs)
    for o in (dst, *dst.rglob('*')):
        if o.is_dir(): o.chmod(0o755)

# git refuses a folder that belongs to another user, such as a mounted one, unless it is called safe
git = 'git','-c','safe.directory=*'

def files_of_git():
    "Return the names of the files that are committed, and of new files that git does not ignore"
    cmd = [*git,'ls-files','-z','--cached','--others','--exclude-standard']
    root = Path(__file__).resolve().parent.parent
    res = subprocess.run(cmd, cwd=root, capture_output=True, text=True)
    if res.returncode: pytest.skip('not a git checkout')
    return [name for name in res.stdout.split('\0') if (root/name).is_file()]

# Code that gives a message

givers = 'refuse','warn','warn_once','append_message','text_of'   # functions that get a key of the catalogue

def called(o):
    "Return the name of the function or method that the expression `o` calls, or an empty string"
    return getattr(o.func, 'attr', getattr(o.func, 'id', '')) if isinstance(o, ast.Call) else ''

def message_calls(tree):
    """Yield each call that gives a message, with the keys that it may have and the arguments after the key

    The key is a string, a string such as 'remedy/' to which the rest is added, or a name to which the function
    assigns strings. In base/messages.py, functions pass their
    own arguments on; these calls have a starred argument, and are left out.
    """
    def strings(o):
        found = {c.value for c in ast.walk(o) if isinstance(c, ast.Constant) and isinstance(c.value, str)}
        return {k for s in found for k in ([o for o in catalogue if o.startswith(s)] if s.endswith('/') else [s])}
    def chosen(o):
        "The strings that the expression may have as its value, without those of a condition"
        if isinstance(o, ast.IfExp): return chosen(o.body)|chosen(o.orelse)
        return strings(o)
    for f in ast.walk(tree):
        if not isinstance(f, (ast.Module,ast.FunctionDef,ast.Lambda)): continue
        inner = {id(c) for o in ast.walk(f) if isinstance(o, ast.FunctionDef) and o is not f for c in ast.walk(o)}
        own = [o for o in ast.walk(f) if id(o) not in inner]
        for o in own:
            if called(o) not in givers or any(isinstance(a, ast.Starred) for a in o.args): continue
            key,*args = o.args[called(o)=='append_message':]
            assigned = [a.value for a in own
                if isinstance(a, ast.Assign) and ast.unparse(a.targets[0])==ast.unparse(key)]
            yield o,set().union(*map(chosen, assigned if isinstance(key, ast.Name) else [key])),args
