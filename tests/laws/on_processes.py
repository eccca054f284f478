"""Runs the body of a test in several processes, and makes data and Learners for such tests.

- Starting worker processes: `on_processes`, the decorator of a test; `this_process` tells a body its rank
- Data: `sample_orders`, `samples_of_steps`, `ordered_loader`, `restart_order`
- Learners: `make_learner`, `distributed_learner`, and the two runs of `fit_single_and_distributed`
- Comparing: `flat_state`, `assert_equal_on_all_ranks`, `assert_same_as_single_process`, `AllReduceBytes`

Each test starts its own worker processes, so a test that fails or hangs affects no other test. The
workers exchange tensors on the CPU through gloo. They are forks of the process that runs the test, which
has already imported fastai. Windows cannot fork: there each worker is a new Python process, which
imports the test's module by its name and therefore takes some seconds to start. That start method was
only tried on Linux.
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
from types import SimpleNamespace
from unittest.mock import patch
import pytest
from fastai.vision.all import DataLoader, DataLoaders, noop
from fastaccum import GradientAccumulation
from fastaccum.testing import assert_same_run, one_cycle, toy, toy_data
from common import BatchListLoader, EpochCycle, in_chunks

time_limit = 120   # seconds; a process that runs for longer prints its stack and ends
this_process = SimpleNamespace(rank=0, world_size=1)   # each worker process sets both numbers

# Starting worker processes

def launcher_variables(rank, world_size):
    "Return the environment variables that a launcher such as torchrun sets, and that fastai reads"
    return dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR='127.0.0.1',
        MASTER_PORT='0')

def as_single_process():
    "Return a context in which fastai sees a single process, so that its Recorder does not gather losses"
    return patch.dict(os.environ, RANK='0', LOCAL_RANK='0', WORLD_SIZE='1')

def run_worker(rank, module, test, world_size, folder, kwargs):
    "Run the body of a test in this worker process, and end the process"
    faulthandler.dump_traceback_later(time_limit, exit=True)
    os.chdir(folder)
    os.environ.update(launcher_variables(rank, world_size))
    torch.set_num_threads(1)
    this_process.rank,this_process.world_size = rank,world_size
    store = dist.FileStore(os.path.join(folder, 'store'), world_size)
    timeout = timedelta(seconds=time_limit)
    dist.init_process_group('gloo', store=store, rank=rank, world_size=world_size, timeout=timeout)
    getattr(import_module(module), test).body(**kwargs)
    dist.barrier()
    for o in (sys.stdout,sys.stderr): o.flush()
    os._exit(0)   # with PyTorch 2.6, `destroy_process_group` sometimes never returns

def run_workers(module, test, world_size, folder, kwargs):
    "Run the body of a test in `world_size` processes; if one fails, end the others and raise its error"
    start_method = 'spawn' if sys.platform=='win32' else 'fork'
    try: start_processes(run_worker, (module,test,world_size,str(folder),kwargs), world_size, start_method=start_method)
    except ProcessException as e: raise AssertionError(str(e).strip()) from None

def on_processes(*world_sizes, each_of=None):
    """Decorate a test: its body runs in several processes at once, for each of the given numbers

    Without numbers, the test takes the number of processes as an argument `n`. `each_of` is a dict from
    the name of a case to a list of dicts of arguments. The test then takes an argument `case`, and its
    body runs once with each dict of this case.
    """
    def decorate(body):
        def test(n, tmp_path, **kwargs): run_workers(body.__module__, body.__name__, n, tmp_path, kwargs)
        test.body,test.__name__,test.__doc__,test.__module__ = body,body.__name__,body.__doc__,body.__module__
        if each_of: test.body = lambda case: [body(**kwargs) for kwargs in each_of[case]]
        # pytest passes arguments of these names
        names = 'n','tmp_path',*(['case'] if each_of else signature(body).parameters)
        test.__signature__ = Signature([Parameter(o, Parameter.KEYWORD_ONLY) for o in names])
        test.pytestmark = getattr(body, 'pytestmark', [])
        return pytest.mark.parametrize('n', world_sizes)(test) if world_sizes else test
    return decorate

# Data: which samples each process has, and in which order. `ns` has the number of samples of each
# process

def sample_orders(ns, n_epoch=3):
    "Return `indices[epoch][rank]`: lists of the samples of a process, shuffled anew for each epoch"
    rng,starts = Random(0),[sum(ns[:r]) for r in range(len(ns))]
    return [[rng.sample(range(s, s+n), n) for s,n in zip(starts, ns)] for _ in range(n_epoch)]

def samples_of_steps(order, sizes, drop_last=False):
    """Return the indices of the samples of each step of an epoch

    A full step has `sizes[r]` samples of process `r`.
    """
    parts = [in_chunks(o, s) for o,s in zip(order, sizes)]
    steps = [[p[i] if i<len(p) else [] for p in parts] for i in range(max(map(len, parts)))]
    return [sum(o, []) for o in steps if not drop_last or [len(p) for p in o]==sizes]

def samples_of_all_micro_batches(order, micro):
    "Return the samples of an epoch: the first micro-batches of all processes, then the second ones, …"
    batches = zip(*(in_chunks(o, m) for o,m in zip(order, micro)))
    return [i for of_all in batches for batch in of_all for i in batch]

def ordered_loader(ds, epochs, bs):
    "Return a loader with batches of `bs` samples; `epochs` has the indices of the samples of each epoch"
    return DataLoader(ds, bs=bs, n=len(epochs[0]), get_idxs=EpochCycle(epochs))

def restart_order(learn, epoch=0):
    "Let the next epoch of the training loader have the samples of `epoch`"
    dl = learn.dls.train
    (dl.cycle if isinstance(dl, BatchListLoader) else dl.get_idxs).i = epoch

# Learners

def two_groups(m):
    ps = list(m.parameters())
    return [ps[:2],ps[2:]]

def make_learner(train, ds, ddp=None, **kwargs):
    """Return a Learner on the loader `train`

    `ddp` is a dict of arguments of `DistributedDataParallel`, or None for a model that is not wrapped.
    """
    learn = toy(4, data=ds, **{'splitter':two_groups, **kwargs})
    learn.dls = DataLoaders(train, DataLoader(ds, bs=32))
    if ddp is not None: learn.model = DDP(learn.model, **ddp)
    return learn

def distributed_learner(ns, micro=4, tokens=False, ddp=(), n_epoch=3, **kwargs):
    """Return the Learner of this process in a distributed run

    `micro` is the number of samples in a micro-batch, or a list with the number of each process.
    """
    ns = ns[:this_process.world_size]
    ds = toy_data(sum(ns), tokens)
    micro = micro[this_process.rank] if isinstance(micro, list) else micro
    train = ordered_loader(ds, [o[this_process.rank] for o in sample_orders(ns, n_epoch)], micro)
    return make_learner(train, ds, ddp=ddp if ddp is None else dict(ddp), **kwargs)

def flat_state(learn):
    "Return all parameters and buffers of the model as one vector in double precision"
    return torch.cat([o.detach().double().flatten() for o in learn.model.state_dict().values()])

def assert_equal_on_all_ranks(values):
    "Fail if the numbers in `values` differ between the processes"
    own = torch.as_tensor(values, dtype=torch.float64)
    gathered = [torch.zeros_like(own) for _ in range(this_process.world_size)]
    dist.all_gather(gathered, own.contiguous())
    assert all(torch.equal(o, own) for o in gathered), 'the processes differ'

def fit_single_and_distributed(
    ns, # The number of samples of each process
    micro=4, # Samples in a micro-batch, or a list with a number for each process
    per_process=16, # Samples of each process in a step
    # `cb(n, **acc)` makes the callback that accumulates; `n` samples of all processes are a step
    cb=GradientAccumulation,
    acc=None, # A dict of more arguments for `cb`
    fit=one_cycle, # `fit(learn, cbs)` trains
    tokens=False, # Whether samples are sequences with a target for each token, as in `toy_data`
    cbs=list, # `cbs()` makes more callbacks, for each of the two runs
    setup=noop, # `setup(learn)` is called with each Learner before its fit
    ddp=(), # Arguments of `DistributedDataParallel`
    # Whether the single process trains on full batches; if not, it accumulates the same micro-batches
    full_batch=True,
    **kwargs # Arguments of both Learners
):
    "Return the Learners of the same fit in a single process and in all processes"
    world_size = this_process.world_size
    ns,acc = ns[:world_size],acc or {}
    micro = micro[:world_size] if isinstance(micro, list) else [micro]*world_size
    ds,orders = toy_data(sum(ns), tokens),sample_orders(ns)
    def accumulation(): return cb(per_process*world_size, **acc)
    if full_batch:
        # a step has whole micro-batches; but if batches are split into a given size, a batch is also cut
        # where a step ends
        split_size = acc.get('micro_batch_size')
        units = [1 if isinstance(split_size, int) and split_size<m else m for m in micro]
        sizes = [math.ceil(per_process/unit)*unit for unit in units]
        train = BatchListLoader(ds, [samples_of_steps(o, sizes, acc.get('drop_last')) for o in orders])
    else: train = ordered_loader(ds, [samples_of_all_micro_batches(o, micro) for o in orders], sum(micro))
    single = make_learner(train, ds, **kwargs)
    distributed = distributed_learner(ns, micro, tokens, ddp, **kwargs)
    for learn in (single,distributed): setup(learn)
    with as_single_process(): fit(single, cbs() if full_batch else [accumulation(),*cbs()])
    fit(distributed, [accumulation(),*cbs()])
    assert_equal_on_all_ranks(flat_state(distributed))
    return single,distributed

def assert_same_as_single_process(*args, **kwargs):
    """Fail if the two runs of `fit_single_and_distributed` differ, and return their Learners

    The arguments are those of `fit_single_and_distributed`.
    """
    single,distributed = fit_single_and_distributed(*args, **kwargs)
    assert_same_run(single, distributed)
    assert_equal_on_all_ranks(list(distributed.recorder.losses))
    return single,distributed

class AllReduceBytes(TorchDispatchMode):
    "A context that counts, in `nbytes`, the bytes that this process passes to all-reduce"
    nbytes = 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if 'allreduce' in f.name(): self.nbytes += sum(o.nbytes for o in tree_leaves(args[0]))
        return f(*args, **(kwargs or {}))
