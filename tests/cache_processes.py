"""`GradientCache` on several processes, each case beside the same run without it: launched by test_cache_processes.py
as processes.py is."""
import sys, torch
import processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from fastai.callback.training import GradientClip
from fastai.optimizer import Adam
from fastaccum import GradientAccumulation, GradientCache
from fastaccum.testing import assert_twins, deviation, toy_data
from common import weights
from processes import (Batches, Exchanges, Steps, clean, cut, even, learner, one_cycle, orders, rank, same_everywhere,
    world)
from test_cache import Penalty, nt_xent
from test_precision import Scaled

def run(cbs, n=35, bs=10, ddp=None, fit=one_cycle, **kwargs):
    "A fit on all processes; the losses are of each process's samples, their gradients the mean over processes"
    ds,order = toy_data(sum(even(n))),orders(even(n))
    learn = learner(Batches(ds, [cut(o[rank], bs) for o in order], bs), ds, loss_func=nt_xent, **kwargs)
    learn.model = DDP(learn.model, **(ddp or {}))
    steps = Steps()
    class Now:
        step = property(lambda self: steps.n)
    learn.exchanges = Exchanges(learn.model, Now())
    torch.manual_seed(rank)
    fit(learn, [*cbs,steps])
    learn.steps_taken = steps.n
    clean(learn.model)
    return learn

def pair(size=3, cbs=list, **kwargs):
    a,b = run(cbs(), **kwargs),run([*cbs(),GradientCache(size)], **kwargs)
    same_everywhere(weights(b))
    assert_twins(a, b, tol=1e-12)
    assert b.exchanges.last==a.exchanges.last==b.steps_taken
    assert set(b.exchanges.buckets.values())=={1}, b.exchanges.buckets
    assert a.exchanges.nbytes==b.exchanges.nbytes
    return a,b

def case_one_exchange_per_step():
    for kwargs in (dict(), dict(n=33), dict(ddp=dict(bucket_cap_mb=1e-4)), dict(opt_func=Adam), dict(size=10),
            dict(ddp=dict(find_unused_parameters=True))): pair(**kwargs)

def case_sizes_of_their_own():
    "Processes need not have as many micro-batches"
    pair(size=2+rank)
    pair(size=3 if rank else 10)

def case_penalties_and_clipping():
    pair(cbs=lambda: [Penalty(),GradientClip(0.05)])
    pair(cbs=lambda: [Scaled(init_scale=2.**10, growth_interval=3)])

def case_random_numbers():
    "With dropout, the run can be repeated, and the processes draw what they would"
    def model(): return nn.Sequential(nn.Linear(5,6), nn.Dropout(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).double()
    a,b = (run([GradientCache(3)], model=model) for _ in range(2))
    assert torch.equal(weights(a), weights(b))
    same_everywhere(weights(b))
    assert b.exchanges.last==b.steps_taken

def case_accumulation():
    "Several batches of the loader per step: still one exchange"
    def both(more):
        acc = GradientAccumulation(20*world, drop_last=False)
        return run([*more,acc])
    a,b = both([]),both([GradientCache(3)])
    same_everywhere(weights(b))
    assert_twins(a, b, tol=1e-12)
    assert b.steps_taken==a.steps_taken==4 and b.exchanges.last==4, (a.steps_taken, b.exchanges.last)

def case_static_graph_is_refused():
    try: run([GradientCache(3)], ddp=dict(static_graph=True))
    except ValueError as e: assert 'static_graph' in str(e)
    else: raise AssertionError('it was not refused')

if __name__=='__main__':
    mine = {k:v for k,v in globals().items() if getattr(v, '__module__', '')==__name__}
    processes.main(*sys.argv[1:], cases=processes.cases_of(mine))
