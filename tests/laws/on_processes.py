"""What test_processes.py has to run on several processes: how they are started, and data and Learners for them.

Processes are forks of this one, which has imported fastai, so that each test can have its own: one that fails or hangs
takes no other down. They speak gloo, on the CPU.
"""
import faulthandler, math, os, sys, torch
from datetime import timedelta
from importlib import import_module
from inspect import Parameter, Signature, signature
from random import Random
from torch import distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from unittest.mock import patch
import pytest
from fastai.vision.all import DataLoader, DataLoaders, noop
from fastaccum import GradientAccumulation
from fastaccum.testing import assert_same_run, one_cycle, toy, toy_data
from common import Batches, Epochs, cut

limit = 120   # seconds; a process that hangs for longer ends, and writes where it was
rank,world = 0,1   # of this process

# Starting

def launched(r, n):
    "What a launcher tells a process, and fastai asks"
    os.environ.update(RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE=str(n), MASTER_ADDR='127.0.0.1', MASTER_PORT='0')

def alone():
    "A context in which this process trains by itself, and its Recorder does not gather the losses of others"
    return patch.dict(os.environ, RANK='0', LOCAL_RANK='0', WORLD_SIZE='1')

def here(r, module, test, n, folder, kwargs):
    "In one of the processes: run the body of a test"
    global rank,world
    faulthandler.dump_traceback_later(limit, exit=True)
    os.chdir(folder)
    launched(r, n)
    torch.set_num_threads(1)
    rank,world = r,n
    dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=r, world_size=n,
        timeout=timedelta(seconds=limit))
    getattr(import_module(module), test).body(**kwargs)
    dist.barrier()
    for o in (sys.stdout,sys.stderr): o.flush()
    os._exit(0)   # `destroy_process_group` sometimes waits for ever with PyTorch 2.6

def together(module, test, n, folder, kwargs):
    "Run the body of a test on `n` processes; the first one that fails ends the others, and says why"
    try: start_processes(here, (module,test,n,str(folder),kwargs), n, start_method='fork')
    except ProcessException as e: raise AssertionError(str(e).strip()) from None

def on(*ns, each_of=None):
    """A test whose body runs on as many processes, at once; with none given, the number is its argument `n`. `each_of`:
    for each `case`, the arguments with which the body runs, one after the other"""
    def several(f):
        def test(n, tmp_path, **kwargs): together(f.__module__, f.__name__, n, tmp_path, kwargs)
        test.body,test.__name__,test.__doc__,test.__module__ = f,f.__name__,f.__doc__,f.__module__
        if each_of: test.body = lambda case: [f(**kwargs) for kwargs in each_of[case]]
        names = 'n','tmp_path',*(['case'] if each_of else signature(f).parameters)
        test.__signature__ = Signature([Parameter(o, Parameter.KEYWORD_ONLY) for o in names])
        test.pytestmark = getattr(f, 'pytestmark', [])
        return pytest.mark.parametrize('n', ns)(test) if ns else test
    return several

# Data: which samples each process has, and in which order

def orders(ns, n_epoch=3):
    "For each epoch, the samples of each process, shuffled anew"
    rng,starts = Random(0),[sum(ns[:r]) for r in range(len(ns))]
    return [[rng.sample(range(s, s+n), n) for s,n in zip(starts, ns)] for _ in range(n_epoch)]

def steps_of(order, shares, drop_last=False):
    "The samples of each step of an epoch, if each process has its share of it"
    parts = [cut(o, s) for o,s in zip(order, shares)]
    steps = [[p[i] if i<len(p) else [] for p in parts] for i in range(max(map(len, parts)))]
    return [sum(o, []) for o in steps if not drop_last or [len(p) for p in o]==shares]

def loader(ds, epochs, bs): return DataLoader(ds, bs=bs, n=len(epochs[0]), get_idxs=Epochs(epochs))
def rewind(learn, epoch=0):
    dl = learn.dls.train
    (dl.order if isinstance(dl, Batches) else dl.get_idxs).i = epoch

# Learners

def splitter(m):
    ps = list(m.parameters())
    return [ps[:2],ps[2:]]

def learner(train, ds, ddp=None, **kwargs):
    "Of this process alone, or of all, with these arguments of `DistributedDataParallel`"
    learn = toy(4, data=ds, **{'splitter':splitter, **kwargs})
    learn.dls = DataLoaders(train, DataLoader(ds, bs=32))
    if ddp is not None: learn.model = DDP(learn.model, **ddp)
    return learn

def own(ns, micro=4, tokens=False, ddp=(), n_epoch=3, **kwargs):
    "A Learner of all processes, of which each has its own samples"
    ns = ns[:world]
    ds = toy_data(sum(ns), tokens)
    micro = micro[rank] if isinstance(micro, list) else micro
    train = loader(ds, [o[rank] for o in orders(ns, n_epoch)], micro)
    return learner(train, ds, ddp=ddp if ddp is None else dict(ddp), **kwargs)

def state(learn): return torch.cat([o.detach().double().flatten() for o in learn.model.state_dict().values()])

def same_everywhere(t):
    "Fail if the processes do not hold the same"
    t = torch.as_tensor(t, dtype=torch.float64)
    res = [torch.zeros_like(t) for _ in range(world)]
    dist.all_gather(res, t.contiguous())
    assert all(torch.equal(o, t) for o in res), 'the processes differ'

def both(ns, micro=4, each=16, cb=GradientAccumulation, acc=None, fit=one_cycle, tokens=False, cbs=list, setup=noop,
        ddp=(), full=True, **kwargs):
    """The Learners after a fit of one process, on batches of whole steps, or, unless `full`, on micro-batches as large
    as those of all together; and after one of all processes, each on micro-batches of its own, with `each` samples in
    a step"""
    ns,micro,acc = ns[:world],micro[:world] if isinstance(micro, list) else [micro]*world,acc or {}
    ds,order = toy_data(sum(ns), tokens),orders(ns)
    def accumulation(): return cb(each*world, **acc)
    if full:
        size = acc.get('micro_batch_size')   # by a number, batches are cut at steps
        sizes = [1 if isinstance(size, int) and size<m else m for m in micro]
        shares = [math.ceil(each/m)*m for m in sizes]
        train = Batches(ds, [steps_of(o, shares, acc.get('drop_last')) for o in order])
    else:
        train = loader(ds, [sum((sum(b, []) for b in zip(*(cut(p, m) for p,m in zip(o, micro)))), []) for o in order],
            sum(micro))
    a = learner(train, ds, **kwargs)
    b = own(ns, micro, tokens, ddp, **kwargs)
    setup(a), setup(b)
    with alone(): fit(a, cbs() if full else [accumulation(),*cbs()])
    fit(b, [accumulation(),*cbs()])
    same_everywhere(state(b))
    return a,b

def assert_same(*args, **kwargs):
    a,b = both(*args, **kwargs)
    assert_same_run(a, b)
    same_everywhere(list(b.recorder.losses))
    return a,b

class Traffic(TorchDispatchMode):
    "How many bytes this process adds up with the others"
    nbytes = 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if 'allreduce' in f.name(): self.nbytes += sum(o.nbytes for o in tree_leaves(args[0]))
        return f(*args, **(kwargs or {}))
