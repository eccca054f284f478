"""Cases that run on several processes, each beside the same on one process: launched by test_processes.py, as

`python -m torch.distributed.run --standalone --nproc-per-node 2 tests/processes.py OUT CASE ...`

Each process notes the cases it has passed in the folder OUT. Every process also runs the twin, by itself: fastai's
Recorder averages over processes whatever it records, so all must record something. `DEVICE=cuda` uses nccl and a GPU per process.
"""
import faulthandler, math, os, sys, time, traceback, warnings
from collections import Counter
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
warnings.filterwarnings('ignore')

import torch
from torch import distributed as dist, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from fastai.callback.core import (Callback, CancelBackwardException, CancelBatchException, CancelFitException,
    CancelTrainException)
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientClip, ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import AvgLoss, Recorder
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.core.macro_batch import Position
from fastaccum.processes.finder import rehearse
from fastaccum.testing import CrossEntropy, assert_twins, deviation, toy, toy_data
from common import CpuMixedPrecision, Raise, weights

device = torch.device(os.environ.get('DEVICE', 'cpu'))
rank,world = int(os.environ['RANK']),int(os.environ['WORLD_SIZE'])

# Data: which samples each process has, and in which order

class Batches:
    "A loader of given batches: for each epoch in turn, a list of lists of indices"
    def __init__(self, ds, epochs, bs):
        self.ds,self.epochs,self.bs,self.device,self.epoch = ds,epochs,bs,device,0
        self.n = sum(map(len, epochs[0]))
    def __len__(self): return len(self.epochs[self.epoch%len(self.epochs)])   # of the epoch to come
    def __iter__(self):
        self.epoch += 1
        for idxs in self.epochs[(self.epoch-1)%len(self.epochs)]: yield self.ds[idxs]

def cut(idxs, bs): return [idxs[i:i+bs] for i in range(0, len(idxs), bs)]

def orders(ns, n_epoch=3):
    "For each epoch, the samples of each process, shuffled anew"
    rng,res = Random(0),[]
    for _ in range(n_epoch):
        starts = [sum(ns[:r]) for r in range(len(ns))]
        res.append([rng.sample(range(s, s+n), n) for s,n in zip(starts, ns)])
    return res

def macro_batches(order, shares, drop_last):
    "The batches of one process that takes the same steps: what each process's share holds, one after the other"
    parts = [cut(o, s) for o,s in zip(order, shares)]
    steps = [[p[i] if i<len(p) else [] for p in parts] for i in range(max(map(len, parts)))]
    if drop_last: steps = [o for o in steps if [len(p) for p in o]==shares]
    return [sum(o, []) for o in steps]

# Learners

def splitter(m):
    ps = list(m.parameters())
    return [ps[:2],ps[2:]]

def learner(train, ds, **kwargs):
    learn = toy(4, data=ds, **{'splitter':splitter, **kwargs})
    learn.dls = DataLoaders(train, DataLoader(ds, bs=32), device=device)
    learn.model.to(device)
    return learn

class Steps(Callback):
    "Count optimizer steps, taken or skipped for an overflow"
    run_valid,n = False,0
    def after_step(self): self.n += 1

class Exchanges:
    "Count the exchanges of gradients: `buckets` has the step and the bucket of each"
    def __init__(self, ddp, acc):
        self.buckets,self.last,self.nbytes,self.acc,self.group = Counter(),0,0,acc,ddp.process_group
        ddp.register_comm_hook(self, Exchanges.hook)
    def hook(self, bucket:dist.GradBucket)->torch.futures.Future[torch.Tensor]:
        self.buckets[self.acc.step,bucket.index()] += 1
        self.last += bucket.is_last()
        self.nbytes += bucket.buffer().nbytes
        return allreduce_hook(self.group, bucket)

class small_sums:
    """Count the small tensors that are summed over processes; those of gradients are summed asynchronously, and processes
    in lockstep sum whole numbers"""
    def __enter__(self):
        self.n,self.old = 0,dist.all_reduce
        def f(t, *args, **kwargs):
            self.n += t.is_floating_point() and not kwargs.get('async_op')
            return self.old(t, *args, **kwargs)
        dist.all_reduce = f
        return self
    def __exit__(self, *_): dist.all_reduce = self.old

def one_cycle(learn, cbs): learn.fit_one_cycle(2, 0.1, cbs=cbs)

def together(train, ds, acc, fit, ddp=None, cbs=list, setup=None, **kwargs):
    "A fit on all processes"
    learn = learner(train, ds, **kwargs)
    learn.model = DDP(learn.model, **(ddp or {}))
    learn.exchanges = Exchanges(learn.model, acc)
    learn.add_cb(Steps())
    if setup: setup(learn)
    with small_sums() as sums: fit(learn, [acc]+cbs())
    learn.sums = sums.n
    clean(learn.model)
    return learn

def clean(ddp): assert ddp.require_backward_grad_sync and 'forward' not in vars(ddp)

def same_everywhere(t):
    "Fail if the processes do not hold the same"
    res = [torch.zeros_like(t) for _ in range(world)]
    dist.all_gather(res, t.contiguous())
    assert all(torch.equal(o, t) for o in res), 'the processes differ'

def twins(ns, micro=4, macro=16, acc=None, acc_cls=GradientAccumulation, fit=one_cycle, tokens=False, cbs=list,
        setup=None, ddp=None, each=False, **kwargs):
    """A fit of one process on macro-batches, and one of all processes on micro-batches; the second exchanged once
    per step and bucket"""
    acc,micros = acc or {},micro if isinstance(micro, list) else [micro]*world
    ds,order = toy_data(sum(ns), tokens),orders(ns)
    size = acc.get('micro_batch_size')   # batches that are split by a number are cut at steps
    units = [1 if isinstance(size, int) and size<m else m for m in micros]
    shares = [-(-math.ceil(macro/world)//m)*m for m in units]
    a = learner(Batches(ds, [macro_batches(o, shares, acc.get('drop_last')) for o in order], sum(shares)), ds, **kwargs)
    if setup: setup(a)
    fit(a, cbs())
    cb = acc_cls(macro, **acc)
    b = together(Batches(ds, [cut(o[rank], micros[rank]) for o in order], micros[rank]), ds, cb, fit, ddp, cbs, setup,
        **kwargs)
    same_everywhere(weights(b))
    if not each:
        assert set(b.exchanges.buckets.values())=={1}, b.exchanges.buckets
        assert b.exchanges.last==b.steps.n
    return a,b

def even(n=32): return [n]*world
# 16 wanted of each: the third macro-batch has 8 samples, all of the first process
def uneven(): return [40,25,18][:world]

# Half precision

class Half(nn.Module):
    "With a layer that normalises, in single precision, and a buffer"
    def __init__(self):
        super().__init__()
        self.a,self.norm,self.b = nn.Linear(5, 6),nn.BatchNorm1d(6),nn.Linear(6, 3)
        self.bfloat16()
        self.norm.float()
    def forward(self, x): return self.b(self.norm(self.a(x.bfloat16()).float()).bfloat16()).float()

def half_precision(ns, micro, macro, **acc):
    "How far are the gradients of the steps from the mean in float32 over all processes, in units of the last place?"
    ds,order,got = toy_data(sum(ns)),orders(ns),[]
    class Grab(Callback):
        order,run_valid = 8,False
        def before_step(self): got.append([p.grad.clone() for p in self.learn.model.parameters()])
        def before_train(self): self.learn.model.module.norm.eval()   # statistics of others would be another model
    learn = together(Batches(ds, [cut(o[rank], micro) for o in order], micro), ds,
        GradientAccumulation(macro, drop_last=False, **acc), lambda l,cbs: l.fit(1, 0., cbs=cbs), cbs=lambda: [Grab()],
        model=Half, splitter=lambda m: [list(m.parameters())], loss_func=nn.CrossEntropyLoss())
    model,share = learn.model.module.eval(),-(-math.ceil(macro/world)//micro)*micro
    parts = [cut(o, share) for o in order[0]]
    assert len(got)==max(map(len, parts))
    res = []
    for i,gs in enumerate(got):
        idxs = [m for p in parts if i<len(p) for m in cut(p[i], micro)]
        mean = [torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()]
        for m in idxs:
            x,y = (o.to(device) for o in ds[m])
            for r,g in zip(mean, torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.parameters())):
                r += g.float()*len(m)/sum(map(len, idxs))
        for g,r in zip(gs, mean):
            if g.dtype==torch.bfloat16:
                last = 2.**(r.abs().clamp(min=2.**-10).log2().floor()-7)
                res.append(((g.float()-r).abs()/last).max().item())
        for g in gs: same_everywhere(g.float())
    assert learn.exchanges.last==0 or acc.get('sync_each')
    return max(res)

# Cases

def case_half():
    "One rounding, after the exchange"
    assert half_precision(even(64), 2, 64*world)<=1
    assert half_precision(even(35), 4, 16*world)<=1
    assert half_precision(uneven(), 4, 16*world)<=1
    assert half_precision([40,3,1][:world], 4, 16*world)<=1
def case_half_sync_each():
    "Each exchange rounds, but not the sum of what was exchanged"
    half_precision(even(64), 2, 64*world, sync_each=True)
def case_even(): assert_twins(*twins(even()))
def case_ragged(): assert_twins(*twins(even(35)))
def case_default_arguments():
    cb = GradientAccumulation()
    assert cb.accum_bs==32 and not cb.sync_each
    assert_twins(*twins(even(), macro=32, acc_cls=lambda macro: cb))
def case_uneven():
    a,b = twins(uneven(), macro=16*world)
    assert len(b.recorder.losses)==2*3
    assert_twins(a, b)
def case_hardly_any_samples_on_one(): assert_twins(*twins([40,3,1][:world], macro=16*world))
def case_micro_batches_of_different_sizes():
    assert_twins(*twins(even(48), micro=[4,8,16][:world], macro=16*world))
    assert_twins(*twins(even(50), micro=[4,8,3][:world], macro=16*world-1))
def case_every_micro_batch_steps(): assert_twins(*twins(even(), macro=2))
def case_clip():
    for opt_func in (Adam,partial(OptimWrapper, opt=torch.optim.AdamW)):
        assert_twins(*twins(uneven(), macro=16*world, opt_func=opt_func,
            fit=lambda l,cbs: l.fit_one_cycle(2, 0.01, wd=0.1, cbs=cbs), cbs=lambda: [GradientClip(0.01)]))
def case_fits():
    "Several fits in a row of a callback that stays, and a validation between (what DDP wraps cannot be frozen)"
    def fit(l, cbs):
        for cb in cbs: l.add_cb(cb)
        l.fit(1, 0.05)
        l.validate()
        l.fit_flat_cos(2, 0.05)
        l.fit_one_cycle(1, 0.05)
    a,b = twins(even(35), macro=16*world, fit=fit, each=True)
    assert b.exchanges.last==4*3
    assert_twins(a, b)
def case_tokens():
    for ns in (even(35),uneven()): assert_twins(*twins(ns, macro=16*world, tokens=True))
def case_tokens_with_class_weights():
    w = torch.tensor([0.2,1.,3.], dtype=torch.float64, device=device)
    assert_twins(*twins(uneven(), macro=16*world, tokens=True, loss_func=CrossEntropy(weight=w)))
def case_tokens_all_ignored_on_one():
    "A process with nothing but padding has no say, and is not NaN"
    class Ignore(Callback):
        def before_batch(self):
            if self.training: self.learn.yb = (torch.where((self.x[:,0,0]>0)[:,None], self.y, -100),)
    a,b = twins(even(9), macro=2*world, micro=1, tokens=True, cbs=lambda: [Ignore()])
    assert deviation(weights(a), weights(b))<1e-12
    assert torch.stack(list(b.recorder.losses)).isfinite().all()   # the twin's are NaN once a whole batch is padding
def case_tokens_all_ignored_on_one_in_an_epoch():
    class Ignore(Callback):
        run_valid = False
        def before_batch(self):   # the last process's samples are the last
            own = self.x[:,0,0,None]*0+torch.isin(self.x[:,0,0], theirs)[:,None]>0
            if self.epoch==0: self.learn.yb = (torch.where(own, -100, self.y),)
    for ns,macro in ((even(35),16*world), (uneven(),16*world)):
        theirs = toy_data(sum(ns), True).tensors[0][-ns[-1]:,0,0].to(device)
        assert_twins(*twins(ns, macro=macro, tokens=True, cbs=lambda: [Ignore()]))
def case_size_of_your_own():
    assert_twins(*twins(uneven(), macro=16*world, tokens=True, acc=dict(size=lambda l: int((l.y!=-100).sum()))))
def case_sum():
    assert_twins(*twins(uneven(), macro=16*world, loss_func=CrossEntropy(reduction='sum'),
        fit=lambda l,cbs: l.fit(2, 1e-3, cbs=cbs)))
def case_split():
    "Batches of the loaders are split on each process, whatever their sizes"
    for ns,micro,macro,n in ((even(36),12,12*world,4), (even(36),12,10*world,4), (uneven(),8,12*world,3),
                             (even(50),[8,12,5][:world],16*world-1,5)):
        for acc in (dict(),dict(drop_last=True)):
            assert_twins(*twins(ns, micro=micro, macro=macro, acc=dict(micro_batch_size=n, **acc)))
    assert_twins(*twins(uneven(), micro=8, macro=12*world, tokens=True, acc=dict(micro_batch_size=3)))
    a,b = twins(even(), micro=16, macro=16*world, acc=dict(micro_batch_size=4), setup=train_metrics, metrics=[accuracy])
    assert_twins(a, b)
def case_split_on_one_with_buffers():
    "One process splits its batches, and the other's loader has micro-batches"
    def model(): return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    ds,order = toy_data(32*world),orders(even())
    bs = 16 if rank==0 else 4
    b = together(Batches(ds, [cut(o[rank], bs) for o in order], bs), ds,
        GradientAccumulation(16*world, micro_batch_size=4), one_cycle, model=model)
    same_everywhere(weights(b))
    assert len(b.recorder.losses)==4
def case_split_in_schedules():
    "As with loaders of micro-batches"
    for acc in (lambda micro: GradientAccumulationSchedule(8*world, 24*world, micro_batch_size=micro),
                lambda micro: GradientAccumulationScheduler({1:3}, micro_batch_size=micro)):
        ds,order,learns = toy_data(48*world),orders(even(48)),[]
        for bs,micro in ((4,None),(16,4)):
            learns.append(together(Batches(ds, [cut(o[rank], bs) for o in order], bs), ds, acc(micro), one_cycle))
        assert_twins(*learns)
        assert learns[0].recorder.accum_bs==learns[1].recorder.accum_bs
def case_drop_last():
    for ns in (even(35),uneven()): assert_twins(*twins(ns, macro=16*world, acc=dict(drop_last=True)))
def case_start_epoch():
    for ns in (even(35),uneven()):
        assert_twins(*twins(ns, macro=16*world, fit=lambda l,cbs: l.fit_one_cycle(3, 0.1, cbs=cbs, start_epoch=1)))
def train_metrics(learn): learn.recorder.train_metrics = True
def case_train_metrics():
    setup = train_metrics
    a,b = twins(even(), setup=setup, metrics=[accuracy,AvgLoss()])
    assert len(b.recorder.values[0])==6
    assert_twins(a, b)
def case_recorded_loss_is_the_global_mean_on_every_process():
    class Losses(Callback):
        order,run_valid = 60,False
        def before_fit(self): self.losses = []
        def after_step(self): self.losses.append(self.learn.loss.item())
    made = []
    a,b = twins(uneven(), macro=16*world, cbs=lambda: made.append(Losses()) or made[-1:])
    same_everywhere(torch.stack(list(b.recorder.losses)).to(device))
    assert len(made[0].losses)==2*3 and deviation(made[0].losses, made[1].losses)<1e-6
def case_samples_of_a_step_are_those_of_all():
    seen = []
    class Sizes(Callback):
        order,run_valid = 60,False
        def after_step(self):
            if hasattr(self.learn, 'gradient_accumulation'): seen.append(self.gradient_accumulation.macro.samples)
    twins(uneven(), macro=16*world, cbs=lambda: [Sizes()])
    rest = sum(uneven())-16*world
    assert seen==2*[16*world,rest-8,8], seen
# a mean over samples; cross-entropy's is over targets that are not ignored
def squared(p, y): return (p.sum(-1)-y).pow(2).mean()
def case_one_small_sum_per_step():
    a,b = twins(even(35), macro=16*world, loss_func=squared)
    assert b.sums==2*(3+1), b.sums   # and one when an epoch has ended
    assert_twins(a, b)
    a,b = twins(uneven(), macro=16*world, tokens=True)
    assert b.sums==2*(3+1)+1, b.sums   # once per fit: how many tokens a sample has
def case_log_accum_batch_false():
    a,b = twins(even(35), macro=16*world, acc=dict(log_accum_batch=False), loss_func=squared)
    assert deviation(weights(a), weights(b))<1e-12
    assert len(b.recorder.losses)==2*9
    assert b.sums==2*(3+1), b.sums   # and one when an epoch has ended
    a,b = twins(even(35), macro=16*world, tokens=True, acc=dict(log_accum_batch=False))
    assert deviation(weights(a), weights(b))<1e-12 and b.sums==2*(3+1)+1
def case_sync_each():
    for tokens in (False,True):
        a,b = twins(even(35), macro=16*world, tokens=tokens, acc=dict(sync_each=True), each=True)
        assert b.exchanges.last==2*9, b.exchanges.last
        assert_twins(a, b)
def case_buckets():
    a,b = twins(even(35), macro=16*world, ddp=dict(bucket_cap_mb=1e-4))
    assert len({i for _,i in b.exchanges.buckets})>1
    assert_twins(a, b)
class Branches(nn.Sequential):
    "The first layer is used by some micro-batches only"
    def forward(self, x):
        for m in list(self)[0 if x[0,0]>0 else 2:]: x = m(x)
        return x
def case_find_unused_parameters():
    def model():
        torch.manual_seed(0)
        return Branches(nn.Linear(5,5), nn.Tanh(), nn.Linear(5,6), nn.Tanh(), nn.Linear(6,3)).double()
    def run(each):
        ds,order = toy_data(35*world),orders(even(35))
        return together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds,
                        GradientAccumulation(16*world, sync_each=each), one_cycle,
                        dict(find_unused_parameters=True), model=model)
    a,b = run(True),run(False)
    for o in (a,b): same_everywhere(weights(o))
    assert deviation(weights(a), weights(b))<1e-12
    assert (a.exchanges.last,b.exchanges.last)==(2*9,2*3)

def case_static_graph():
    "Refused on every process: PyTorch does not let the exchange wait; `sync_each=True` trains"
    fails(ValueError, 'static_graph', ns=even(35), macro=16*world, ddp=dict(static_graph=True))
    a,b = twins(even(35), macro=16*world, ddp=dict(static_graph=True), acc=dict(sync_each=True), each=True)
    assert b.exchanges.last==2*9, b.exchanges.last
    assert_twins(a, b)
def case_no_epoch():
    "`fit(0)` does nothing, and the next fit trains"
    for acc_cls in (GradientAccumulation,lambda macro: GradientAccumulationScheduler({0:4})):
        def fit(l, cbs):
            before = weights(l)
            l.fit(0, 0.1, cbs=cbs)
            assert torch.equal(weights(l), before)
            l.fit(1, 0.1, cbs=cbs)
        assert_twins(*twins(even(35), macro=16*world, acc_cls=acc_cls, fit=fit))
class Tied(nn.Module):
    "Two layers have one weight"
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a,self.b,self.c,self.d = nn.Linear(5,6),nn.Linear(6,6),nn.Linear(6,6),nn.Linear(6,3)
        self.c.weight = self.b.weight
        self.double()
    def forward(self, x):
        for m in (self.a,self.b,self.c): x = m(x).tanh()
        return self.d(x)
def case_tied_weights_and_parameters_outside_of_the_optimizer():
    "The first are in both groups, the second count for clipping"
    def tied(m): return [[*m.a.parameters(),*m.b.parameters()],[*m.c.parameters(),*m.d.parameters()]]
    def outside(m): return [[*m.a.parameters(),*m.b.parameters()],[m.c.bias]]
    for groups in (tied,outside):
        for tokens in (False,True):
            assert_twins(*twins(uneven(), macro=16*world, tokens=tokens, model=Tied,
                splitter=lambda m: groups(getattr(m, 'module', m)), cbs=lambda: [GradientClip(0.05)]))
class NoGradient(Callback):
    "The loss of some micro-batches of the last process needs no gradient, or has one of zero"
    run_valid = False
    def __init__(self, needs): self.needs = needs
    def after_loss(self):
        if rank==world-1 and self.iter in (0,3,7):
            self.learn.loss_grad = self.loss_grad*0 if self.needs else self.loss_grad.detach()
def case_one_needs_no_gradient():
    ds,order,res = toy_data(35*world),orders(even(35)),[]
    for needs in (True,False):
        res.append(together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, GradientAccumulation(16*world),
            one_cycle, cbs=lambda: [NoGradient(needs)]))
        same_everywhere(weights(res[-1]))
        assert res[-1].exchanges.last==2*3
    assert_twins(*res)

# Schedules: the twin is one process whose micro-batches are as large as all of theirs together

def schedules(ns, acc, fit):
    ds,order = toy_data(sum(ns)),orders(ns)
    def micro_batches(o): return [sum(b, []) for b in zip(*(cut(p, 4) for p in o))]
    a = learner(Batches(ds, [micro_batches(o) for o in order], 4*world), ds)
    fit(a, [acc()])
    cb = acc()
    b = together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, cb, fit)
    assert set(b.exchanges.buckets.values())=={1} and b.exchanges.last==b.steps.n
    assert a.recorder.accum_bs==b.recorder.accum_bs and len(set(a.recorder.accum_bs))>1, (
        a.recorder.accum_bs, b.recorder.accum_bs)
    assert_twins(a, b)
def case_schedules():
    for fit in (one_cycle,lambda l,cbs: l.fit_one_cycle(3, 0.1, cbs=cbs, start_epoch=1)):
        for n in (64,35):
            schedules(even(n), lambda: GradientAccumulationSchedule(4*world, 16*world, finish=0.8), fit)
            schedules(even(n), lambda: GradientAccumulationSchedule(4*world, 16*world, start=1, finish=2,
                drop_last=True), fit)
            schedules(even(n), lambda: GradientAccumulationScheduler({1:4}), lambda l,cbs: l.fit(2, 0.1, cbs=cbs))
            schedules(even(n), lambda: GradientAccumulationScheduler({0:2,3:3,9:1}, mode='step'), fit)
def case_schedule_on_uneven_processes():
    "The processes anneal together, and take the same steps"
    ns = uneven()
    ds,order,cb = toy_data(sum(ns)),orders(ns),GradientAccumulationSchedule(4*world, 16*world, finish=0.8)
    b = together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, cb, one_cycle)
    same_everywhere(weights(b))
    same_everywhere(torch.tensor(b.recorder.accum_bs, device=device))
    assert b.exchanges.last==b.steps.n==len(b.recorder.accum_bs) and b.recorder.accum_bs[-1]==16*world

# lr_find, and what was saved

class Rehearse(Callback):
    "fastai's own `lr_find` waits for a process that does not come"
    order = 5
    def before_fit(self):
        if hasattr(self.learn, 'lr_finder'): rehearse(self.lr_finder)
def case_lr_find():
    "A point per step, the same suggestion on all, weights and optimizer as before"
    def fit(l, cbs):
        for cb in cbs or [Rehearse()]: l.add_cb(cb)
        l.fit(1, 0.05)
        before = weights(l),deepcopy(l.opt.state_dict()['state'])
        l.found = l.lr_find(num_it=30, show_plot=False).valley
        assert torch.equal(weights(l), before[0])
        assert deviation(l.opt.state_dict()['state'], before[1])==0
        l.points = len(l.recorder.lrs)
        l.dls.train.epoch = 0   # where it stopped depends on the rest of the loader
        l.fit(1, 0.05)
    for ns in (even(35),uneven()):
        a,b = twins(ns, macro=16*world, fit=fit, each=True, opt_func=Adam)
        assert b.points==a.points and b.points>15, (a.points, b.points)
        assert math.isclose(a.found, b.found, rel_tol=1e-9), (a.found, b.found)
        same_everywhere(torch.tensor([b.found], device=device))
        assert_twins(a, b)
def case_resume():
    "From what SaveModelCallback saved in the epoch before the one that failed, by a Learner that knows nothing else"
    def fit(l, cbs, **kwargs): l.fit_one_cycle(4, 0.1, wd=0.1, cbs=cbs, **kwargs)
    for acc_cls in (partial(GradientAccumulation, 16*world), partial(GradientAccumulationSchedule, 8*world, 24*world)):
        ds,order = toy_data(35*world),orders(even(35), 4)
        def run(fit): return together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, acc_cls(), fit, opt_func=Adam,
            path=Path(folder), cbs=lambda: [SaveModelCallback(every_epoch=True, with_opt=True)])
        whole = run(fit)
        def dies(l, cbs):
            try: fit(l, [*cbs,Raise('after_backward', RuntimeError, 5, at=9*2+5)])
            except RuntimeError: pass
        run(dies)
        def resumes(l, cbs):
            l.load('model_1', with_opt=True)
            l.dls.train.epoch = 2
            fit(l, cbs, start_epoch=2)
        b = run(resumes)
        same_everywhere(weights(b))
        # on two to the bit; on three, the first exchange adds in another order
        assert max(deviation(weights(whole), weights(b)), deviation(whole.opt.state_dict(), b.opt.state_dict()))<=1e-14*(world-2)
        assert list(whole.recorder.lrs)[-len(b.recorder.lrs):]==list(b.recorder.lrs)

# Random runs: loaders of any length, micro-batches of any size

def planned(order, micros, wanted, drop_last):
    "For each epoch, the samples of each step, from the words of the promise"
    res,step = [],0
    for epoch,o in enumerate(order):
        ns,done,steps = [len(p) for p in o],[0]*world,[]
        while sum(done)<sum(ns):
            pos = Position(epoch, step+len(steps), (epoch+sum(done)/sum(ns))/len(order))
            w = wanted(pos) if callable(wanted) else wanted
            full = [math.ceil(math.ceil(w/world)/m)*m for m in micros]
            got = [p[d:d+f] for p,d,f in zip(o, done, full)]
            if drop_last and [len(g) for g in got]!=full: break
            steps.append(sum(got, []))
            done = [d+len(g) for d,g in zip(done, got)]
        res.append(steps)
        step += len(steps)
    return res
class LeaveOut(Callback):
    "Leave out some micro-batches of this process"
    order,run_valid = 7,False   # after accumulation
    def __init__(self, event, iters):
        self.iters = iters
        setattr(self, event, self.maybe)
    def maybe(self):
        if self.iter in self.iters: raise CancelBatchException
def draw(seed):
    "Arguments of a random run, the same on all processes"
    rng = Random(seed)
    o = dict(tokens=rng.random()<0.4, log_accum_batch=rng.random()<0.75, sync_each=rng.random()<0.25,
        drop_last=rng.random()<0.3,
        kind=rng.choice(['plain','plain','left out','anneal','epoch','step']), clip=rng.random()<0.3,
        opt_func=rng.choice([SGD,Adam]), micros=[rng.choice([1,3,4,5])]*world)
    if o['kind']=='left out': o.update(log_accum_batch=True, sync_each=False, drop_last=False)
    if o['sync_each'] or not o['log_accum_batch']:   # these need as many micro-batches on each
        k = rng.randint(1, 9)
        o['ns'] = [rng.randint((k-1)*m+1, k*m) for m in o['micros']]
    else:
        if rng.random()<0.4: o['micros'] = [rng.choice([1,2,4]) for _ in range(world)]
        o['ns'] = [rng.choice([rng.randint(1, 4),rng.randint(20, 45)]) for _ in range(world)]
    o['macro'] = rng.randint(1, 14)*world+rng.choice([0,0,1])
    o['left'] = [rng.sample(range(math.ceil(n/m)), rng.randint(0, math.ceil(n/m))) if o['kind']=='left out' else []
        for n,m in zip(o['ns'], o['micros'])]
    o['event'] = rng.choice(['before_batch','after_pred','after_loss'])
    o['one_cycle'] = o['kind']!='left out' and rng.random()<0.7
    return o
def callback(o):
    args = dict(drop_last=o['drop_last'], log_accum_batch=o['log_accum_batch'], sync_each=o['sync_each'])
    if o['kind']=='anneal': return GradientAccumulationSchedule(world, o['macro'], finish=0.8, **args)
    if o['kind']=='epoch': return GradientAccumulationScheduler({0:1,1:3}, **args)
    if o['kind']=='step': return GradientAccumulationScheduler({0:2,3:1,5:4}, mode='step', **args)
    return GradientAccumulation(o['macro'], **args)
def random_run(o):
    "Whether there was a step in each epoch; else nothing is trained"
    n_epoch = 2
    ds,order,cb = toy_data(sum(o['ns']), o['tokens']),orders(o['ns'], n_epoch),callback(o)
    kept = [[sum((b for i,b in enumerate(cut(p, m)) if i not in out), [])
        for p,m,out in zip(e, o['micros'], o['left'])] for e in order]
    steps = planned(kept, o['micros'], cb.sizes(sum(o['micros']), n_epoch), o['drop_last'])
    if not all(steps): return False
    def fit(l, cbs):
        if o['clip']: cbs = cbs+[GradientClip(0.05)]
        l.fit_one_cycle(n_epoch, 0.02, cbs=cbs) if o['one_cycle'] else l.fit(n_epoch, 0.02, cbs=cbs)
    a = learner(Batches(ds, steps, max(map(len, steps[0]))), ds, opt_func=o['opt_func'])
    fit(a, [])
    b = together(Batches(ds, [cut(e[rank], o['micros'][rank]) for e in order], o['micros'][rank]), ds, cb, fit,
        opt_func=o['opt_func'],
        cbs=lambda: [LeaveOut(o['event'], o['left'][rank])] if o['left'][rank] else [])
    same_everywhere(weights(b))
    assert b.steps.n==sum(map(len, steps)), (b.steps.n, steps)
    # to hear that nobody has samples left takes another
    if not (o['sync_each'] or o['kind']=='left out'): assert set(b.exchanges.buckets.values())=={1}
    if o['log_accum_batch'] and o['kind']!='left out': assert_twins(a, b)
    else: assert deviation(weights(a), weights(b))<1e-7, deviation(weights(a), weights(b))
    return True
def case_random_runs():
    trained = 0
    for seed in range(int(os.environ.get('SEED', 0)), int(os.environ.get('SEED', 0))+int(os.environ.get('RUNS', 24))):
        faulthandler.dump_traceback_later(limit, exit=True)
        o = draw(seed)
        try: trained += random_run(o)
        except Exception as e: raise AssertionError(f'run {seed}: {o}') from e
    assert trained>10

# Loops that end sooner than announced, micro-batches left out

def case_short_epochs():
    "All processes end their epochs early, in the middle of a macro-batch"
    for pct,drop in ((0.2,False),(0.6,False),(0.6,True)):
        ns = even(35)
        ds,order,n = toy_data(sum(ns)),orders(ns),math.ceil(9*pct)+1   # micro-batches until it is done
        a = learner(Batches(ds, [macro_batches([p[:4*n] for p in o], [16]*world, drop) for o in order], 16*world), ds)
        a.fit(2, 0.1)
        acc = GradientAccumulation(16*world, drop_last=drop)
        b = together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, acc,
                     lambda l,cbs: l.fit(2, 0.1, cbs=[*cbs,ShortEpochCallback(pct)]))
        assert deviation(weights(a), weights(b))<1e-12, deviation(weights(a), weights(b))
        assert len(b.recorder.losses)==len(a.recorder.losses)
class OnOne(Callback):
    "Raise `exc` at some micro-batches of the last process, or at all of them (`None`), in some epochs"
    order,run_valid = 7,False   # after accumulation
    def __init__(self, event, exc, at, epochs=(0,1)):
        self.exc,self.at_iters,self.epochs = exc,at,epochs
        setattr(self, event, self.maybe)
    def maybe(self):
        if rank==world-1 and self.epoch in self.epochs and (self.at_iters is None or self.iter in self.at_iters):
            raise self.exc
class Buffered(nn.Module):
    "Keeps something, as BatchNorm does, which has no influence"
    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros(()))
    def forward(self, x):
        self.seen += 1
        return x
def buffered():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), Buffered(), nn.Tanh(), nn.Linear(6, 3)).double()
def on_one(event, exc, at, kept, epochs=(0,1), tokens=False, recorded=True, model=None, **acc):
    ns,drop_last,log = even(35),acc.get('drop_last', False),acc.get('log_accum_batch', True)
    ds,order = toy_data(sum(ns), tokens),orders(ns)[:1]*2   # a loop that never begins asks for no epoch's order
    def left(o, epoch):
        "What is trained on: with `drop_last`, of what was planned"
        parts = [p[:32] if drop_last else p for p in o]
        return parts if epoch not in epochs else [*parts[:-1],
            sum((b for i,b in enumerate(cut(parts[-1], 4)) if kept(i)), [])]
    a = learner(Batches(ds, [macro_batches(left(o, i), [16]*world, False) for i,o in enumerate(order)], 16*world), ds,
        model=model)
    a.fit(2, 0.1)
    cb = GradientAccumulation(16*world, **acc)
    def setup(l):
        if not log: l.remove_cb(Recorder)   # fastai's exchanges each loss: of as many on each process
    b = together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, cb,
        lambda l,cbs: l.fit(2, 0.1, cbs=[*cbs,OnOne(event, exc, at, epochs)]), setup=setup, model=model)
    same_everywhere(weights(b))
    assert cb.step==b.exchanges.last==2*(2 if drop_last else 3), (cb.step, b.exchanges.last)
    assert deviation(weights(a), weights(b))<1e-12, deviation(weights(a), weights(b))
    if log and recorded and not drop_last: assert deviation(a.recorder.losses, b.recorder.losses)<1e-6
def case_one_ends_its_epoch_early():
    for acc in (dict(), dict(drop_last=True), dict(log_accum_batch=False)):
        on_one('after_batch', CancelTrainException, [4], lambda i: i<5, **acc)
        # at a step, of which its Recorder does not hear
        on_one('after_batch', CancelTrainException, [3], lambda i: i<4, recorded=False, **acc)
def fails_on_all(text, *args, metrics=False, model=None, **acc):
    "An error on all processes, at once, if one ends"
    ds,order = toy_data(35*world),orders(even(35))
    def setup(l): l.recorder.train_metrics = metrics
    start = time.time()
    try:
        together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, GradientAccumulation(16*world, **acc),
            lambda l,cbs: l.fit(2, 0.1, cbs=[*cbs,OnOne(*args)]), setup=setup, metrics=[accuracy],
            model=model)
    except RuntimeError as e: assert text in str(e), e
    else: raise AssertionError(f'{text!r} was not said')
    assert time.time()-start<60   # sooner than the timeout
def case_one_ends_its_fit():
    "Also before the forward passes in which DDP exchanges its buckets (of the second step) and buffers (of each)"
    for at in (0,3,4):
        for model in (None,buffered): fails_on_all('1 of', 'after_batch', CancelFitException, [at], model=model)
    fails_on_all('1 of', 'after_batch', CancelFitException, [8])   # the last micro-batch of an epoch
    for acc in (dict(sync_each=True), dict(log_accum_batch=False), dict(metrics=True)):
        fails_on_all('1 has ended its fit', 'after_batch', CancelFitException, [4], **acc)
def case_one_ends_where_each_micro_batch_is_exchanged():
    for acc in (dict(sync_each=True), dict(log_accum_batch=False), dict(metrics=True)):
        for drop_last in (True,False):
            for at in (3,4):
                fails_on_all('1 has ended its epoch', 'after_batch', CancelTrainException, [at], drop_last=drop_last, **acc)
    for acc in (dict(sync_each=True), dict(metrics=True)):
        for event in ('before_batch','after_loss'):
            fails_on_all('1 leaves a micro-batch out', event, CancelBatchException, [4], **acc)
def case_all_end_their_fit():
    "As `lr_find` does; the next fit is as if nothing had been"
    ds,order = toy_data(35*world),orders(even(35))
    for acc in (dict(), dict(sync_each=True), dict(log_accum_batch=False)):
        runs = []
        for at in (None,2,3):
            def fit(l, cbs):
                cancel = Callback(after_batch=lambda: None)
                def maybe():
                    if cancel.training and cancel.iter==at: raise CancelFitException
                cancel.after_batch = maybe
                if at is not None: l.fit(1, 0., cbs=[*cbs,cancel])
                l.dls.train.epoch = 0
                l.fit(1, 0.1, cbs=cbs)
            runs.append(weights(together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds,
                GradientAccumulation(16*world, **acc), fit, opt_func=SGD)))
            same_everywhere(runs[-1])
        assert all(deviation(o, runs[0])<1e-12 for o in runs)
def case_one_leaves_out_micro_batches():
    on_one('before_batch', CancelBatchException, [1,5], lambda i: i not in (1,5))
    on_one('after_loss', CancelBatchException, [2], lambda i: i!=2)
    for event in ('before_batch','after_pred','after_loss'):   # closing ones, with what DDP exchanges after a step
        on_one(event, CancelBatchException, [3,7], lambda i: i not in (3,7), model=buffered)
def case_one_has_no_backward_pass():
    "Not in its first epoch, nor in any: it steps with the others, and records the same"
    for tokens in (False,True):
        for event,exc in (('before_train',CancelTrainException), ('before_batch',CancelTrainException),
                          ('before_batch',CancelBatchException),
                          ('after_pred',CancelTrainException), ('after_loss',CancelBatchException)):
            for epochs in ((0,),(0,1)): on_one(event, exc, None, lambda i: False, epochs=epochs, tokens=tokens)
def case_one_has_no_backward_pass_in_fp16():
    "Its GradScaler has not scaled anything when it steps"
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5,6), nn.BatchNorm1d(6), nn.Linear(6,3))
    ds,order = toy_data(35*world),orders(even(35))
    ds.tensors = tuple(o.float() if o.is_floating_point() else o for o in ds.tensors)
    b = together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, GradientAccumulation(16*world),
                 lambda l,cbs: l.fit(2, 0.1, cbs=cbs), model=model,
                 cbs=lambda: [CpuMixedPrecision(init_scale=1024.),OnOne('before_batch', CancelBatchException, None)])
    same_everywhere(weights(b))
    assert b.exchanges.last==b.steps.n==2*3

def case_all_leave_out_the_closing_micro_batch():
    "The last of the epoch, when DDP is already waiting for its backward pass"
    ns = even(35)
    ds,order = toy_data(sum(ns)),orders(ns)
    for event,exc in (('before_backward',CancelBackwardException),('after_loss',CancelBatchException)):
        cb = Callback(**{event:lambda: None})
        def cancel():
            if cb.training and cb.iter==8: raise exc
        setattr(cb, event, cancel)
        a = learner(Batches(ds, [macro_batches([p[:32] for p in o], [12]*world, False) for o in order], 12*world), ds)
        a.fit(2, 0.1)
        b = together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, GradientAccumulation(12*world),
            lambda l,cbs: l.fit(2, 0.1, cbs=[*cbs,cb]))
        same_everywhere(weights(b))
        assert deviation(weights(a), weights(b))<1e-12 and b.exchanges.last==2*3

def case_batchnorm_does_not_hang():
    "DDP sends BatchNorm's statistics from the first process with the first forward pass after an exchange"
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5,6), nn.BatchNorm1d(6), nn.Linear(6,3)).double()
    for ns in (even(36),[40,24,16][:world]):
        ds,order = toy_data(sum(ns)),orders(ns)
        b = together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, GradientAccumulation(16*world), one_cycle,
            model=model)
        same_everywhere(weights(b))
        assert b.exchanges.last==2*3

# fp16

def overflow(at):
    "An infinite loss of one micro-batch on the last process"
    class Overflow(Callback):
        order,run_valid = 5,False   # before us and MixedPrecision
        def after_loss(self):
            if rank==world-1 and self.iter==at and self.epoch==0:
                self.learn.loss_grad = self.learn.loss_grad*float('inf')
    return Overflow()
def case_overflow_on_one_skips_the_step_on_all():
    # micro-batches of the first step: two whose gradients wait for the exchange, and the closing one
    for at in (0,2,3):
        ns = even(36)
        ds,order = toy_data(sum(ns)),orders(ns)
        ds.tensors = tuple(o.float() if o.is_floating_point() else o for o in ds.tensors)
        def model():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,3))
        seen,fp16 = [],CpuMixedPrecision(init_scale=1024.)
        class Look(Callback):
            order,run_valid = 60,False
            def after_batch(self):
                if self.gradient_accumulation.stepped: seen.append((weights(self.learn),self.learn.scaler.get_scale()))
        def fit(l, cbs):
            first.append(weights(l))
            l.fit(2, 0.1, cbs=[*cbs,fp16,overflow(at),Look()])
        first = []
        b = together(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, GradientAccumulation(16*world), fit,
            model=model)
        same_everywhere(weights(b))
        assert len(seen)==6 and [o[1] for o in seen]==[512.]*6
        assert torch.equal(seen[0][0], first[0]) and not torch.equal(seen[1][0], first[0])
        assert weights(b).isfinite().all()

# Faults, of all processes at once; a fault of one alone ends it, see `fault_on_one`

def case_faults_leave_the_flag_on():
    ns = even(35)
    ds,order = toy_data(sum(ns)),orders(ns)
    for exc in (KeyboardInterrupt,RuntimeError,CancelFitException):
        for event in ('before_batch','after_pred','after_loss','before_backward','after_backward','after_batch'):
            for permanent in (True,False):
                learn,cb = learner(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds),GradientAccumulation(16*world)
                learn.model = DDP(learn.model)
                if permanent: learn.add_cb(cb)
                try: learn.fit(1, 0.1, cbs=[*([] if permanent else [cb]),Raise(event, exc, 7, at=5)])
                except (KeyboardInterrupt,RuntimeError): pass
                assert learn.model.require_backward_grad_sync
                if not permanent: clean(learn.model)
                else:   # a plain loop exchanges again, though nobody took the callback off
                    seen = Exchanges(learn.model, cb)
                    x,y = (o.to(device) for o in ds[[0,1]])
                    learn.model.zero_grad()
                    learn.run = cb.run = False
                    learn.loss_func(learn.model(x), y).backward()
                    assert seen.last==1
                    cb.run = True
                    learn.fit(1, 0.1)
                    clean(learn.model)
def case_a_forward_of_its_own_is_given_back():
    "As accelerate gives a model in mixed precision"
    def setup(l):
        if not isinstance(l.model, DDP): return
        l.calls,stock = [],l.model.forward
        vars(l.model)['forward'] = l.own = lambda *args: l.calls.append(l.training) or stock(*args)
    def fit(l, cbs):
        one_cycle(l, cbs)
        if cbs: assert vars(l.model).pop('forward') is l.own and l.calls.count(True)==2*9
    assert_twins(*twins(even(35), macro=16*world, setup=setup, fit=fit))
class Interrupted(nn.Linear):
    left = -1
    def forward(self, x):
        self.left -= 1
        if self.left==-1: raise KeyboardInterrupt
        return super().forward(x)
def case_interrupt_within_a_forward_pass():
    ds,order,model = toy_data(35*world),orders(even(35)),nn.Sequential(Interrupted(5,3)).double()
    learn = learner(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds, model=lambda: model,
        splitter=lambda m: [list(m.parameters())])
    learn.model = DDP(learn.model)
    learn.add_cb(GradientAccumulation(16*world))
    model[0].left = 5
    try: learn.fit(1, 0.1)
    except KeyboardInterrupt: pass
    assert model[0].left==-1 and learn.model.require_backward_grad_sync

# Refused

def fails(exc, text, **kwargs):
    try: twins(**kwargs)
    except exc as e: assert text in str(e), e
    else: raise AssertionError(f'{text!r} was not refused')
def case_refused():
    fails(ValueError, '`accum_bs` is 16, 17', ns=even(), acc_cls=lambda macro: GradientAccumulation(16+rank))
    fails(ValueError, '`drop_last` is 0, 1', ns=even(),
        acc_cls=lambda macro: GradientAccumulation(16, drop_last=rank>0))
    fails(ValueError, 'the number of epochs is 1, 2', ns=even(),
        fit=lambda l,cbs: l.fit(1+(rank if cbs else 0), 0.1, cbs=cbs))
    def metrics(l): l.recorder.train_metrics = isinstance(l.model, DDP)
    for kwargs in (dict(acc=dict(log_accum_batch=False)), dict(acc=dict(sync_each=True)), dict(setup=metrics)):
        fails(ValueError, 'need the same on each', ns=uneven(), **kwargs)
        fails(ValueError, '12 micro-batches of 4, 12 micro-batches of 8', ns=[48,96,96][:world], micro=[4,8,8][:world],
            **kwargs)
    fails(ValueError, 'would hold no step', ns=even(20), macro=32*world, acc=dict(drop_last=True),
        fit=lambda l,cbs: l.fit(1, cbs=cbs) if cbs else None)
    with warnings.catch_warnings(record=True) as w:
        warnings.simplefilter('always')
        twins(even(), macro=17)
    assert any('a step takes' in str(o.message) for o in w)==(not rank)
def case_loader_that_yields_more_than_it_says():
    ds,order = toy_data(35*world),orders(even(35))
    def more(o): return cut(o, 4)+cut(o, 4)
    train = Batches(ds, [more(o[rank]) for o in order], 4)
    train.n = 35
    type(train).__len__,old = (lambda self: 9),type(train).__len__
    try: together(train, ds, GradientAccumulation(16*world), one_cycle)
    except RuntimeError as e: assert 'yields more' in str(e), e
    else: raise AssertionError('not refused')
    finally: type(train).__len__ = old
def case_one_has_no_samples():
    ds,order = toy_data(35*world),orders(even(35))
    own = [[] if rank==world-1 else cut(o[rank], 4) for o in order]
    try: together(Batches(ds, own, 4), ds, GradientAccumulation(16*world), one_cycle)
    except ValueError as e: assert f'{", ".join(["35"]*(world-1))}, 0 samples to train on' in str(e), e
    else: raise AssertionError('not refused')
class Swap(Callback):
    "Train an epoch on another loader"
    order,run_valid = 7,False   # after accumulation
    def __init__(self, dl, epoch, on): self.other,self.at_epoch,self.on = dl,epoch,on
    def before_train(self):
        if self.epoch==self.at_epoch and rank in self.on: self.learn.dl = self.other
def case_loader_replaced_in_an_epoch():
    ds,order = toy_data(35*world),orders(even(35))
    def fit(other, epoch, on):
        batches = [cut(o[rank], 4) for o in order]
        return together(Batches(ds, batches, 4), ds, GradientAccumulation(16*world),
            lambda l,cbs: l.fit(2, 0.1, cbs=[*cbs,Swap(other, epoch, on)]))
    for epoch in (0,1):
        for n,bs in ((35,5),(20,4)):
            try: fit(Batches(ds, [cut(o[rank][:n], bs) for o in order], bs), epoch, range(world))
            except ValueError as e:
                assert f'micro-batches of {bs}, {n} samples' in str(e) and 'micro-batches of 4, 35 samples' in str(e), e
            else: raise AssertionError('not refused')
    other = Batches(ds, [cut(o[rank], 4) for o in order[1:]], 4)   # of the same sizes
    b = fit(other, 0, [world-1])
    same_everywhere(weights(b))
    assert other.epoch==(rank==world-1)
# fastai's own way: accelerate, `DistributedDL`

def distributed_on_cpu():
    "fastai's calls .cuda()"
    from fastai.distributed import DistributedDL
    def broadcast(self, t, r):
        t = torch.LongTensor(t)
        dist.broadcast(t, r)
        return t.tolist()
    if device.type=='cpu': DistributedDL._broadcast = broadcast
def case_lr_find_in_distrib_ctx():
    distributed_on_cpu()
    n,order = 32*world,Random(1).sample(range(32*world), 32*world)   # the same in each epoch
    ds,parts = toy_data(n),[order[r*32:(r+1)*32] for r in range(world)]
    a = learner(Batches(ds, [macro_batches(parts, [16]*world, False)], 16*world), ds)
    a.add_cb(Rehearse())
    b = learner(DataLoader(ds, bs=4, n=n, get_idxs=lambda: order), ds)
    b.add_cb(GradientAccumulation(16*world))
    before,found = weights(b),a.lr_find(num_it=30, show_plot=False).valley
    with b.distrib_ctx(sync_bn=False, cpu=device.type=='cpu'): mine = b.lr_find(num_it=30, show_plot=False).valley
    assert math.isclose(mine, found, rel_tol=1e-9) and len(a.recorder.lrs)==len(b.recorder.lrs)
    same_everywhere(weights(b))
    assert torch.equal(weights(b), before)
def case_distrib_ctx():
    from fastai.distributed import DistributedDL, DistributedTrainer
    distributed_on_cpu()
    class Hook(Callback):
        order,run_valid = DistributedTrainer.order+1,False
        def before_train(self):
            assert isinstance(self.dl, DistributedDL)
            if self.epoch==0: self.learn.exchanges = Exchanges(self.learn.model, self.gradient_accumulation)
        def after_train(self): self.learn.wrapped = self.learn.model
    def frozen_first(l, cbs):
        for o in (l.freeze,l.unfreeze):
            o()
            l.fit_one_cycle(1, 0.1, wd=0.1, cbs=cbs)
    for n,tokens,drop_last,metrics,fit in ((32*world,False,False,accuracy,one_cycle),
                                           (35*world-1,False,False,None,frozen_first),
                                           (70,True,False,None,one_cycle), (70,False,True,None,one_cycle)):
        ds,rng,acc = toy_data(n, tokens),Random(1),dict(drop_last=n==70 and not tokens)
        per = -(-n//world)
        all_epochs = [rng.sample(range(n), n) for _ in range(2)]
        def padded(o): return [(o+o)[r*per:(r+1)*per] for r in range(world)]
        def whole(o): return o[:len(o)//4*4] if drop_last else o   # each process leaves out its ragged micro-batch
        a = learner(Batches(ds, [macro_batches([whole(p) for p in padded(o)], [16]*world, acc['drop_last'])
            for o in all_epochs], 16*world), ds, metrics=metrics)
        if metrics: a.recorder.train_metrics = True
        fit(a, [])
        epochs = iter(all_epochs)
        b = learner(DataLoader(ds, bs=4, n=n, drop_last=drop_last, get_idxs=lambda: next(epochs)), ds, metrics=metrics)
        if metrics: b.recorder.train_metrics = True
        cb = GradientAccumulation(16*world, **acc)
        with b.distrib_ctx(sync_bn=False, cpu=device.type=='cpu'): fit(b, [cb,Hook()])
        clean(b.wrapped)
        same_everywhere(weights(b))
        assert set(b.exchanges.buckets.values())=={1} and b.exchanges.last==cb.step==len(b.recorder.losses)
        assert not isinstance(b.model, DDP)
        # the validation set is split
        assert deviation([o[:2] for o in a.recorder.values], [o[:2] for o in b.recorder.values])<1
        for o in (a,b): o.recorder.values = [list(v)[:1 if not metrics else 2] for v in o.recorder.values]
        assert_twins(a, b)

# Faults of one process alone: how it ended is printed, then the launcher ends the other

def fault_on_one(exc):
    ds,order = toy_data(35*world),orders(even(35))
    learn = learner(Batches(ds, [cut(o[rank], 4) for o in order], 4), ds)
    learn.model = DDP(learn.model)
    fault = [Raise('after_backward', exc, 5, at=5)] if rank==world-1 else []
    try: learn.fit(2, 0.1, cbs=[GradientAccumulation(16*world)]+fault)
    finally:
        clean(learn.model)
        if rank==world-1: print('the flag is on', flush=True)

folder = None   # where models are saved, the same on all processes
limit = 60   # seconds for a case, or a random run: a hang ends the process, which writes where it was

faults = dict(fault_exception=RuntimeError, fault_interrupt=KeyboardInterrupt)
def cases_of(names): return {k[5:]:v for k,v in names.items() if k.startswith('case_')}
cases = cases_of(globals())

def main(out, *names, cases=cases):
    global folder
    folder = out
    if device.type=='cuda': torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    torch.set_num_threads(1)
    dist.init_process_group('nccl' if device.type=='cuda' else 'gloo', timeout=timedelta(seconds=120))
    for nm in names or cases:
        if nm in faults: fault_on_one(faults[nm])
        faulthandler.dump_traceback_later(limit, exit=True)
        try: cases[nm]()
        except BaseException:
            with open(Path(out)/f'{rank}.failed', 'a') as f: f.write(f'{nm}\n{traceback.format_exc()}\n')
            raise
        with open(Path(out)/f'{rank}.passed', 'a') as f: f.write(f'{nm}\n')
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()

if __name__=='__main__': main(*sys.argv[1:])
