"""`GradientCache` on several processes, each case beside the same run without it: launched by test_cache_processes.py
as processes.py is."""
import sys, torch
import processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from fastai.optimizer import Adam
from fastaccum import GradientAccumulation, GradientCache
from fastaccum.testing import assert_twins, deviation, toy_data
from common import InBackward, weights
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

failed = []   # what the model keeps is put back
class Plan:
    "Where memory runs out: at which stage, on which process, in which batch, above how many samples"
    def __init__(self, stage=None, r=0, at=None): self.stage,self.r,self.at,self.learn = stage,r,at,None
    def check(self, stage, n):
        if stage!=self.stage or rank!=self.r or n<=2 or self.at not in (None,self.learn.iter): return
        failed.append(n)
        raise torch.OutOfMemoryError('planted')
class Brittle(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan
        self.register_buffer('seen', torch.zeros((), dtype=torch.int64))
    def forward(self, x):
        if self.training: self.seen += len(x)
        self.plan.check('forward' if self.training else 'valid', len(x))
        return InBackward.apply(x, lambda n: self.plan.check('backward', n))
def brittle(plan):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5,6), nn.Tanh(), Brittle(plan), nn.Linear(6,3)).double()
    return model
class Tell(Callback):
    "Tell the plan which Learner it is"
    order = -5
    def before_fit(self): self.learn.model.module[2].plan.learn = self.learn

def auto(plan, cbs, **kwargs):
    "With memory that runs out, and without"
    failed.clear()
    a,b = (run([*cbs(),*more,Tell()], model=brittle(p), **kwargs)
        for p,more in ((Plan(),[]), (plan,[GradientCache('auto')])))
    assert bool(failed)==(rank==plan.r), (failed, plan.stage, plan.r)
    same_everywhere(weights(b))
    for o in (a,b):
        same_everywhere(o.model.module[2].seen[None])
        o.model.module[2].seen.zero_()
    assert_twins(a, b, tol=1e-12)
    assert b.exchanges.last==a.exchanges.last==b.steps_taken and set(b.exchanges.buckets.values())=={1}

def case_memory_runs_out_on_one():
    for r in range(world):
        for i,stage in enumerate(('forward','backward')): auto(Plan(stage, r, (0,1,3)[r+i-1]), list)
    auto(Plan('backward', world-1), lambda: [Penalty(),GradientClip(0.05)], opt_func=Adam)
    auto(Plan('valid', 0), list)
    auto(Plan('backward', 0), list, ddp=dict(find_unused_parameters=True))
def case_memory_runs_out_while_accumulating():
    for r in range(world):
        for i,stage in enumerate(('forward','backward')):
            auto(Plan(stage, r, (0,1,3)[r+i-1]), lambda: [GradientAccumulation(20*world, drop_last=False)])

class Net(nn.Module):
    "In half precision, but for its predictions"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(5,6),nn.Linear(6,3)
        self.bfloat16()
    def forward(self, x): return self.b(self.a(x.bfloat16()).tanh()).double()
def case_half_precision():
    "Gradients are added up in float32, over micro-batches and processes, and rounded once"
    for more in ([],[GradientAccumulation(20*world)]):
        got = []
        class Grab(Callback):
            order,run_valid = 8,False
            def before_step(self): got.append([p.grad.clone() for p in self.learn.model.parameters()])
        ds,order = toy_data(sum(even(20))),orders(even(20))
        learn = learner(Batches(ds, [cut(o[rank], 20) for o in order], 20), ds, model=Net, loss_func=nt_xent,
            splitter=lambda m: [list(m.parameters())])
        torch.manual_seed(0)
        learn.model = DDP(learn.model)
        learn.fit(1, 0., cbs=[GradientCache(1 if rank else 2),Grab(),*more])
        model,parts = learn.model.module,[]
        for r in range(world):
            x,y = ds[order[0][r]]
            micros = x.split(2 if r==0 else 1)
            pred = torch.cat([model(o) for o in micros]).detach().requires_grad_()
            nt_xent(pred, y).backward()
            gs = [torch.autograd.grad(model(o), list(model.parameters()), g)
                for o,g in zip(micros, pred.grad.split(2 if r==0 else 1))]
            parts.append([sum(o.float() for o in g)/world for g in zip(*gs)])
        for g,ps in zip(got[0], zip(*parts)):
            # a rounding is half of the last of 8 bits; accumulation takes what each process has rounded once
            off,once = (g.float()-sum(ps)).abs(),2.**-8*sum(ps).abs()+1e-6
            assert (off<=once+2.**-8*sum(p.abs() for p in ps)*bool(more)).all(), (off/once).max()
            same_everywhere(g.float())

if __name__=='__main__':
    mine = {k:v for k,v in globals().items() if getattr(v, '__module__', '')==__name__}
    processes.main(*sys.argv[1:], cases=processes.cases_of(mine))
