"""On several processes a run is that of one process on the whole effective batch, and gradients are exchanged once a
step, whatever each has: unequal samples, another micro-batch, less memory."""
import math, pytest, torch
from collections import Counter
from copy import deepcopy
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from itertools import product
from random import Random
from torch import distributed as dist, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from fastai.vision.all import (Adam, AvgLoss, CancelBatchException, CancelFitException, DataLoader, GradientClip,
    Module, OptimWrapper, SGD, SaveModelCallback, ShortEpochCallback, accuracy)
from fastaccum import (ActivationCheckpoint, GradientAccumulation, GradientAccumulationSchedule,
    FreezeBN, GradientAccumulationScheduler, GradientCache, NoiseScale, RecalibrateBN, ScaledLR)
from fastaccum.testing import CrossEntropy, assert_same_run, deviation, one_cycle, toy, toy_data
from common import (Batches, Event, Memory, Raise, Scaled, Seen, above, cut, noted_warnings, nt_xent, overflows, some,
    trim, unmoved, weights, whole)
import on_processes as here
from on_processes import (Traffic, assert_same, both, learner, loader, on, orders, own, rewind, same_everywhere, state,
    steps_of)
from small_learners import all_params
from test_noise_scale import by_hand, single_gradients

two_or_more = (2,3) if whole else (2,)
even,ragged,uneven,few = [32]*4,[35]*4,[40,25,18],[40,3,1]   # samples of each process; 16 make its share of a step
AdamW = partial(OptimWrapper, opt=torch.optim.AdamW)

def scaled(): return [Scaled(init_scale=2.**10, growth_interval=3),GradientClip(0.05)]
def clip(to=0.01): return [GradientClip(to)]

def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5,6), nn.Tanh(), *more, nn.Linear(6,3)).double()
def batchnorm(): return net(nn.BatchNorm1d(6))
class Branches(Module):
    "The first layer is for some samples only: there are micro-batches that do not use it"
    def __init__(self): self.net,self.first = net(),nn.Linear(5,5).double()
    def forward(self, x):
        some = x[:,:1]>1
        return self.net(torch.where(some, self.first(x), x) if some.any() else x)
def tied():
    m = net(nn.Linear(6,6), nn.Tanh(), nn.Linear(6,6))
    m[2].weight = m[4].weight
    return m
def unused():
    m = net(Memory())
    m[1].unused = nn.Linear(2, 2).double()
    return m

# The run of one process

def fits(l, cbs):
    "Several in a row, with a callback that stays, a validation between, and one of no epoch"
    for cb in cbs: l.add_cb(cb)
    l.fit(0, 0.05)
    l.fit(1, 0.05)
    l.validate()
    l.fit_flat_cos(1, 0.05)
def from_epoch_1(l, cbs): l.fit_one_cycle(3, 0.1, cbs=cbs, start_epoch=1)
def constant(l, cbs): l.fit(2, 0.1, cbs=cbs)
def decayed(l, cbs): l.fit_one_cycle(2, 0.01, wd=0.1, cbs=cbs)
def train_metrics(l): l.recorder.train_metrics = True
def leave_out(l):
    "The fifth micro-batch of an epoch, on all processes"
    if l.iter==4: raise CancelBatchException

def overflow(): return [Scaled(init_scale=2.**10),Event('after_loss', partial(overflows, 40))]   # on the second process

equal = dict(
    few=[dict(ns=few)],
    the_default_size=[dict(ns=even, cb=lambda n: GradientAccumulation())],
    clipped=[dict(ns=uneven, opt_func=AdamW, cbs=clip, fit=decayed)],
    tied=[dict(ns=uneven, model=tied, splitter=all_params, cbs=clip)],
    scaled=[dict(ns=ragged, cbs=o) for o in (scaled,overflow)],
    fits=[dict(ns=ragged, fit=fits)],
    from_an_epoch=[dict(ns=o, fit=from_epoch_1) for o in (ragged,uneven)],
    trimmed=[dict(ns=uneven, micro=2, tokens=True, cbs=lambda: [Event('before_batch', trim, True)])],
    class_weights=[dict(ns=uneven, tokens=True, loss_func=CrossEntropy(weight=torch.tensor([0.2,1.,3.]).double()))],
    sums=[dict(ns=uneven, loss_func=CrossEntropy(reduction='sum'), fit=lambda l,cbs: l.fit(2, 1e-3, cbs=cbs))],
    split=[dict(ns=[36]*3, micro=12, each=12, acc=dict(micro_batch_size=4)),
        dict(ns=[50]*3, micro=[8,12,5], acc=dict(micro_batch_size=5)),
        dict(ns=uneven, micro=8, each=12, tokens=True, acc=dict(micro_batch_size=3)),
        dict(ns=even, micro=16, acc=dict(micro_batch_size=4), setup=train_metrics, metrics=[accuracy])],
    drop_last=[dict(ns=[40,28,28], full=False,   # where one has no more, all end
        cb=lambda n: GradientAccumulationScheduler({0:1,1:2}, drop_last=True))],
    train_metrics=[dict(ns=even, setup=train_metrics, metrics=[accuracy,AvgLoss()])],
    ways_to_wrap=[dict(ns=ragged, ddp=dict(bucket_cap_mb=1e-4)),
        dict(ns=uneven, ddp=dict(gradient_as_bucket_view=True), opt_func=AdamW),
        dict(ns=uneven, ddp=dict(find_unused_parameters=True), model=Branches, splitter=all_params),
        # weight decay does not touch what nobody uses
        dict(ns=ragged, ddp=dict(find_unused_parameters=True), model=unused, splitter=all_params, fit=decayed)],
    schedules=[dict(ns=ns, cb=cb, fit=fit, full=False) for cb,fit,ns in some(4, product((
            lambda n: GradientAccumulationSchedule(n//4, n, finish=0.8),
            lambda n: GradientAccumulationSchedule(n//4, n, start=1, finish=2, drop_last=True),
            lambda n: GradientAccumulationScheduler({1:4}),
            lambda n: GradientAccumulationScheduler({0:2,3:3,9:1}, mode='step')),
        (one_cycle,from_epoch_1), (ragged,[64]*3)))],
    short_epochs=[dict(ns=ragged, cbs=partial(lambda pct: [ShortEpochCallback(pct)], pct), fit=constant, full=False,
        acc=dict(drop_last=drop)) for pct,drop in ((0.2,False),(0.6,False),(0.6,True))],
    micro_batches_recorded_and_left_out=[dict(ns=ragged, full=False, acc=dict(log_accum_batch=False)),
        dict(ns=ragged, cbs=lambda: [Seen('after_loss', leave_out, 7)], fit=constant, full=False)])
on_three = ['few','drop_last','split','from_an_epoch']

def and_always(always, n, cases): return [*always,*some(n, [o for o in cases if o not in always])]

always = [(2,o) for o in ('schedules','class_weights','scaled','trimmed','short_epochs')]
@pytest.mark.parametrize('n,case', and_always(always, 7, [*product([2], equal), *product([3], on_three)]))
@on(each_of=equal)
def test_the_run_is_that_of_one_process(**kwargs): assert_same(**kwargs)

@on(2)
def test_only_padding_on_one_process():
    "It has no say, and nothing is NaN"
    def pads(out): return [Event('before_batch', lambda l: setattr(l, 'yb', (torch.where(out(l)[:,None], -100, l.y),)))]
    a,b = both([9,9], micro=1, each=2, tokens=True, cbs=lambda: pads(lambda l: l.x[:,0,0]>0))
    assert deviation(weights(a), weights(b))<1e-12
    assert torch.stack(list(b.recorder.losses)).isfinite().all()   # one process's are not, with nothing but padding
    for ns in ([35,35],[40,25]):
        theirs = toy_data(sum(ns), True).tensors[0][-ns[-1]:,0,0]
        assert_same(ns, tokens=True, cbs=lambda: pads(lambda l: torch.isin(l.x[:,0,0], theirs) & (l.epoch==0)))

def drawn(seed):
    "A random run, the same on all processes: loaders of any length, micro-batches and steps of any size"
    rng = Random(seed)
    ns = [rng.choice([rng.randint(1, 4),rng.randint(20, 45)]) for _ in range(here.world)]
    micro,each,drop_last = [rng.choice([1,2,3,5]) for _ in ns],rng.randint(1, 14),rng.random()<.3
    if not steps_of(orders(ns)[0], [math.ceil(each/m)*m for m in micro], drop_last): return drawn(seed+1000)
    return dict(ns=ns, micro=micro, each=each, tokens=rng.random()<.4, opt_func=rng.choice([SGD,Adam]),
        fit=rng.choice([one_cycle,constant]), cbs=rng.choice([list,clip]), acc=dict(drop_last=drop_last))

@on(2,3)
def test_random_runs():
    for seed in some(4, range(100)):
        try: assert_same(**drawn(seed))
        except Exception as e: raise AssertionError(f'run {seed}') from e

# What is exchanged

happened = Counter()
def short(ranks, stage='backward', after=0, cap=2):
    """To set up a Learner: after so many forward passes memory runs out on these processes; not where one process runs
    full batches"""
    def runs_out(where, n):
        happened['passes'] += where=='forward'
        fails = where==stage and n>cap and happened['passes']>after
        happened['failed'] += fails
        return fails
    def setup(learn):
        happened.clear()
        for m in learn.model.modules():
            if isinstance(learn.model, DDP) and here.rank in ranks and isinstance(m, Memory): m.short = runs_out
    return setup
def fragile(): return net(Memory())

traffic = dict(
    accumulated=[dict(), dict(ns=uneven), dict(ns=few), dict(tokens=True), dict(cbs=scaled),
        dict(micro=12, acc=dict(micro_batch_size=4))],
    ways_to_wrap=[dict(ddp=o) for o in (dict(bucket_cap_mb=1e-3), dict(find_unused_parameters=True))],
    recorded_and_measured=[dict(acc=dict(log_accum_batch=False)), dict(cbs=lambda: [NoiseScale(every=1)])],
    memory_runs_out=[dict(micro=8, acc=dict(micro_batch_size='auto'), setup=short((1,)))],
    annealed=[dict(ns=ns, cb=lambda n: GradientAccumulationSchedule(n//4, n)) for ns in (ragged,uneven)],
    cached=[dict(micro=16, cb=lambda n: GradientCache(micro_batch_size=3), loss_func=nt_xent),
        dict(micro=8, cbs=lambda: [GradientCache(micro_batch_size=3)], loss_func=nt_xent)])

@pytest.mark.parametrize('case', traffic)
@on(2, each_of=traffic)
def test_one_gradient_is_exchanged_a_step(ns=ragged, cb=GradientAccumulation, acc=None, cbs=list, setup=None, **kwargs):
    b = own(ns, model=lambda: nn.Sequential(nn.Linear(5,200), Memory(), nn.Linear(200,3)).double(), **kwargs)
    if setup: setup(b)
    steps,seen = Seen('after_step', lambda l: 1, order=60),Traffic()
    with seen: b.fit(1, 0.01, cbs=[cb(32, **(acc or {})),steps,*cbs()])
    for o in (state(b),b.recorder.lrs): same_everywhere(o)
    assert not setup or (happened['failed']>0)==(here.rank==1)
    size,n = sum(p.nbytes for p in b.model.parameters()),len(steps.values)
    assert n>=3 and n*size<=seen.nbytes<=1.1*n*size, (seen.nbytes/size, n)

@on(2)
def test_half_precision_gradients_are_rounded_once():
    "They are added up in single precision over micro-batches and processes"
    class Half(nn.Sequential):
        def forward(self, x): return super().forward(x.bfloat16()).float()
    def half(): return Half(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,3)).bfloat16()
    loss,ns,ds = nn.CrossEntropyLoss(),[64,64],toy_data(128)
    for micro,acc in ((2,{}), (8,dict(micro_batch_size=2)), (2,dict(micro_batch_size='auto'))):
        b,got = own(ns, micro, model=half, splitter=all_params, loss_func=loss),Seen('before_step', lambda l: [
            p.grad.clone() for p in l.model.parameters()])
        b.fit(1, 0., cbs=[GradientAccumulation(128, **acc),got])
        ps,model = list(b.model.parameters()),b.model.module
        parts = [torch.autograd.grad(loss(model(x), y), ps)
            for o in orders(ns)[0] for x,y in map(ds.__getitem__, cut(o, 2))]
        for g,*each in zip(got.values[0], *parts):
            same_everywhere(g.float())
            mean,size = torch.stack(each).float().mean(0),torch.stack(each).float().abs().mean(0)
            # half of the last of 8 bits, and what 64 sums in single precision may be off by
            assert ((g.float()-mean).abs()<=2.**-8*mean.abs()+2.**-18*size).all()

@on(2)
def test_buffers_are_those_of_the_first_process():
    "Also where processes have other numbers of micro-batches, and nobody waits for a broadcast that does not come"
    for ns,micro,acc in (([35,35],4,{}), ([40,24],4,{}), ([40,24],8,dict(micro_batch_size='auto')),
            ([35,35],8,dict(micro_batch_size='auto')), ([32,32],[16,4],dict(micro_batch_size=4))):
        b = own(ns, micro, model=batchnorm)
        after_each_step = Seen('after_step', lambda l: same_everywhere(state(l)), order=60)
        b.fit(2, 0.1, cbs=[GradientAccumulation(32, **acc),after_each_step])
        assert len(b.recorder.losses)==2*math.ceil(ns[0]/16)
        if ns[0]==35: b.fit(1, 0.1)   # a plain fit, as ever
        same_everywhere(state(b))

# Memory that runs out

auto = dict(
    nowhere=[dict(ranks=(), acc=dict(drop_last=o)) for o in (True,False)],
    on_each_at_each_place=[dict(stage=s, ranks=(r,), after=k)
        for s,r,k in some(4, product(('forward','backward'), (0,1), (0,1,3,7)))],
    on_all=[dict(stage='forward', ranks=(0,1,2), cap=3), dict(ranks=(0,1,2), ns=uneven, cap=3)],
    loaders_of_their_own=[dict(ranks=(0,), ns=few), dict(ranks=(0,), ns=[40,33,17], micro=[8,16,4], tokens=True)],
    ways_to_wrap=[dict(ranks=(1,), ddp=dict(gradient_as_bucket_view=True, bucket_cap_mb=1e-4), opt_func=AdamW),
        dict(ranks=(0,), ddp=dict(find_unused_parameters=True), model=unused, splitter=all_params, fit=decayed)],
    scaled_and_clipped=[dict(ranks=(1,), cbs=scaled)],
    fits=[dict(ranks=(1,), after=3, fit=fits)],
    schedules=[dict(ns=[48]*3, ranks=(0,), after=2, cb=cb, full=False) for cb in (
        partial(GradientAccumulationSchedule, 16),lambda n, **kwargs: GradientAccumulationScheduler({1:3}, **kwargs))])

@pytest.mark.parametrize('n,case', and_always([(2,'ways_to_wrap')], 4, [*product([2], auto),(3,'on_all'),
    (3,'loaders_of_their_own')]))
@on(each_of=auto)
def test_memory_runs_out_on_some(ranks, stage='backward', after=0, cap=2, ns=ragged, micro=8, acc=None, model=fragile,
        **kwargs):
    "The run is that of one process with memory enough"
    acc = dict(micro_batch_size='auto')|(acc or {})
    assert_same(ns, micro, model=model, setup=short(ranks, stage, after, cap), acc=acc, **kwargs)
    assert (happened['failed']>0)==(here.rank in ranks)

@pytest.mark.parametrize('how', some(2, ['memory','exception','interrupt']))
@on(2)
def test_one_process_fails_for_good(how):
    "It tells why, at once; no other waits longer than the time limit; and its model exchanges gradients as ever"
    b = own(ragged, 8, model=fragile)
    b.model = DDP(b.model.module, process_group=dist.new_group(timeout=timedelta(seconds=4)))
    exc = dict(exception=RuntimeError, interrupt=KeyboardInterrupt).get(how)
    if not exc: short((0,), 'forward', 0, 0)(b)
    cbs = [Raise('after_backward', exc, 5, at=2)] if exc and not here.rank else []
    with pytest.raises((RuntimeError,KeyboardInterrupt)) as e:
        b.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto'),*cbs])
    assert (('planted' if exc else 'a single sample') in str(e.value))==(not here.rank)
    assert b.model.require_backward_grad_sync

# A model as it was, searches for learning rates, and what was saved

@on(2)
def test_a_forward_of_its_own_is_kept():
    "As accelerate gives a model in mixed precision. And a plan of one process waits for no other"
    b,calls = own(ragged),[]
    stock = b.model.forward
    b.model.forward = mine = lambda *args: calls.append(b.model.training) or stock(*args)
    b.fit(1, 0.1, cbs=(acc:=GradientAccumulation(32)))
    assert vars(b.model)['forward'] is mine and calls.count(True)==9 and (here.rank or acc.plan(b.dls).steps==[2])

@on(2)
def test_lr_find():
    "A point a step, the same suggestion on all; weights and optimizer are as before"
    def fit(l, cbs):
        for cb in cbs: l.add_cb(cb)
        l.fit(1, 0.05)
        def now(): return deepcopy((l.model.state_dict(),l.opt.state_dict()['state']))
        before,l.found = now(),l.lr_find(num_it=30, show_plot=False).valley
        assert deviation(before, now())==0
        l.points = list(l.recorder.lrs),list(l.recorder.losses)
        rewind(l)   # where it stopped depends on the rest of the loader
        l.fit(1, 0.05)
    for ns in (ragged,uneven):
        a,b = assert_same(ns, fit=fit, opt_func=Adam)
        assert len(a.points[0])>15 and deviation(a.points, b.points)<2e-6
        same_everywhere(b.found)

@on(2)
def test_resumed():
    "From what `SaveModelCallback` has saved, as on one process: see the page on saving"
    for acc in (partial(GradientAccumulation, 32),partial(GradientAccumulationSchedule, 16, 48)):
        def fit(learn, *more, **kwargs):
            cbs = [acc(),SaveModelCallback(every_epoch=True, with_opt=True),*more]
            learn.fit_one_cycle(4, 0.1, wd=0.1, cbs=cbs, **kwargs)
        a,b,c = (own(ragged, n_epoch=4, opt_func=Adam) for _ in range(3))
        fit(a)
        with pytest.raises(RuntimeError, match='planted'): fit(b, Raise('after_backward', RuntimeError, 5, at=9*2+5))
        c.load('model_1', with_opt=True)
        rewind(c, epoch=2)
        fit(c, start_epoch=2)
        n = len(c.recorder.lrs)
        assert deviation(*((state(l),l.opt.state_dict(),list(l.recorder.lrs)[-n:]) for l in (a,c)))<1e-12

# fastai's own way: accelerate, and `DistributedDL`

accelerated = pytest.mark.skipif(find_spec('accelerate') is None, reason='fastai.distributed needs accelerate')
def distributed_on_cpu():
    "fastai's calls .cuda()"
    from fastai.distributed import DistributedDL
    def broadcast(self, t, r):
        t = torch.LongTensor(t)
        dist.broadcast(t, r)
        return t.tolist()
    DistributedDL._broadcast = broadcast

@accelerated
@pytest.mark.parametrize('case', range(3))
@on(2)
def test_distrib_ctx(case):
    distributed_on_cpu()
    n,tokens,of_loader,metrics = [(64,False,False,accuracy), (69,True,False,None), (66,False,True,None)][case]
    ds,rng,per = toy_data(n, tokens),Random(1),math.ceil(n/2)
    epochs = [rng.sample(range(n), n) for _ in range(2)]
    def parts(o):   # padded, that each process has as many; perhaps without the incomplete micro-batch of each
        return [p[:per//4*4 if of_loader else per] for p in cut(o+o[:1], per)[:2]]
    a = learner(Batches(ds, [steps_of(parts(o), [16,16]) for o in epochs]), ds, metrics=metrics)
    order = iter(epochs)
    b = learner(DataLoader(ds, bs=4, n=n, drop_last=of_loader, get_idxs=lambda: next(order)), ds, metrics=metrics)
    for o in (a,b): o.recorder.train_metrics = metrics is not None
    with here.alone(): one_cycle(a, [])
    with b.distrib_ctx(sync_bn=False, cpu=True): one_cycle(b, [GradientAccumulation(32, drop_last=False)])
    same_everywhere(state(b))
    assert not isinstance(b.model, DDP)
    # each validates on a part
    for o in (a,b): o.recorder.values = [v[:2 if metrics else 1] for v in o.recorder.values]
    assert_same_run(a, b)

@accelerated
@on(2)
def test_searches_in_distrib_ctx():
    distributed_on_cpu()
    order = Random(1).sample(range(64), 64)
    b = learner(loader(toy_data(64), [order], 4), toy_data(64), cbs=GradientAccumulation(32))
    with unmoved(b), b.distrib_ctx(sync_bn=False, cpu=True): found = b.lr_find(num_it=30, show_plot=False).valley
    same_everywhere([found,*b.recorder.lrs])
    assert len(b.recorder.lrs)>15
    b = capped(less(0), wrap=False)
    with b.distrib_ctx(sync_bn=False, cpu=True): res = b.bs_find('binsearch', show_plot=False)
    assert int(res)==9 and not isinstance(b.model, DDP)

# Refused

refused = dict(
    accum_bs=('accum_bs', dict(ns=even, cb=lambda n: GradientAccumulation(16+here.rank))),
    drop_last=('drop_last', dict(ns=even, cb=lambda n: GradientAccumulation(16, drop_last=here.rank>0))),
    epochs=('epochs', dict(ns=even, fit=lambda l,cbs: l.fit(1+(here.rank if cbs else 0), 0.1, cbs=cbs))),
    # batches are cut at the ends of steps: 22 samples are 8 micro-batches, and 23 are 9
    counts_split_and_recorded=('22 samples.*23 samples', dict(ns=[22,23],
        acc=dict(micro_batch_size=3, log_accum_batch=False))),
    counts_recorded=('micro-batches', dict(ns=uneven, acc=dict(log_accum_batch=False))),
    auto_recorded=('auto', dict(ns=even, acc=dict(micro_batch_size='auto', log_accum_batch=False))),
    counts_of_metrics=('micro-batches', dict(ns=uneven, setup=train_metrics, metrics=[accuracy])),
    no_step=('too few', dict(ns=even, each=64, acc=dict(drop_last=True), fit=lambda l,cbs: cbs and l.fit(1, cbs=cbs))),
    no_samples=('no samples.*35, 0', dict(ns=[35,0])),
    # these need one process
    find=('in 2 processes.*in a single process', dict(ns=ragged, fit=lambda l,cbs: cbs and l.accum_find())),
    check=('in 2 processes.*in a single process', dict(ns=ragged, fit=lambda l,cbs: cbs and l.accum_check())))

@pytest.mark.parametrize('case', refused)
@on(2)
def test_refused_on_all(case):
    said,kwargs = refused[case]
    with pytest.raises((ValueError,RuntimeError), match=said): both(**kwargs)

@on(2)
def test_what_is_told():
    "One process tells of a size that is rounded up, each of its communication hook, which is not used"
    b = own(even)
    b.model.register_comm_hook(None, lambda state,bucket: 1/0)
    with noted_warnings() as w: b.fit(1, cbs=GradientAccumulation(17))
    told = [any(words in str(o.message) for o in w) for words in ('a step takes 24 samples','communication hook')]
    assert told==[not here.rank,True]

@on(2)
def test_static_graph_is_right_or_refused():
    for cb,loss in ((GradientAccumulation,CrossEntropy()), (lambda n: GradientCache(micro_batch_size=3),nt_xent)):
        try: assert_same(ragged, cb=cb, ddp=dict(static_graph=True), loss_func=loss)
        except ValueError as e: assert 'static_graph' in str(e)

# The other ways to a large batch, searches and meters

def penalize(l): l.loss_grad = l.loss_grad+0.1*sum(p.pow(2).sum() for p in l.model.parameters())

cached = dict(
    sizes=[dict(ns=[n]*2, size=s) for n,s in ((35,3),(32,10),(33,2))], sizes_of_their_own=[dict(size=[2,3,10])],
    wrapped=[dict(ddp=dict(bucket_cap_mb=1e-4)), dict(ddp=dict(find_unused_parameters=True))],
    penalties=[dict(cbs=lambda: [Event('after_loss', penalize),*clip(0.05)]), dict(cbs=scaled, opt_func=Adam)],
    accumulated=[dict(cbs=lambda: [GradientAccumulation(20*here.world, drop_last=False)])],
    memory_runs_out=[dict(size='auto', short_on=r, stage=s) for r in (0,1) for s in ('forward','backward')])

@pytest.mark.parametrize('n,case', some(4, [*product([2], cached),(3,'sizes_of_their_own'),(3,'accumulated')]))
@on(each_of=cached)
def test_cached(ns=ragged, size=3, cbs=list, short_on=None, stage=None, **kwargs):
    "`GradientCache`: the run without it, where each process has a loss of its own batch"
    a,b = (own(ns, 10, loss_func=nt_xent, model=fragile, **kwargs) for _ in range(2))
    if short_on is not None: short((short_on,), stage, after=1)(b)
    one_cycle(a, cbs())
    one_cycle(b, [*cbs(),GradientCache(micro_batch_size=size[here.rank] if isinstance(size, list) else size)])
    assert_same_run(a, b)
    same_everywhere(state(b))
    assert (happened['failed']>0)==(here.rank==short_on)

@on(2)
def test_what_changes_nothing_to_the_bit():
    "`ActivationCheckpoint`, with dropout and BatchNorm, and `NoiseScale`"
    def drops(): return net(nn.BatchNorm1d(6), nn.Dropout())
    checkpoint,meter = partial(ActivationCheckpoint, nn.Linear),partial(NoiseScale, every=1)
    for cb,acc,kwargs in [(checkpoint,[],dict(model=drops)), (checkpoint,[32],dict(model=drops)),
            (checkpoint,[],dict(model=drops, ddp=dict(find_unused_parameters=True))),
            (checkpoint,[],dict(model=drops, ddp=dict(static_graph=True))),
            (meter,[32],dict()), (meter,[32],dict(ns=uneven, tokens=True))]:
        a,b = (own(**dict(ns=ragged)|kwargs) for _ in range(2))
        for o,more in ((a,[]), (b,[cb()])):
            torch.manual_seed(here.rank)
            one_cycle(o, [*map(GradientAccumulation, acc),*more])
        same_everywhere(weights(b))
        assert torch.equal(state(a), state(b)) and list(a.recorder.losses)==list(b.recorder.losses)

@on(2)
def test_recalibrated():
    "Statistics are those of all samples, on all processes"
    ds,order = toy_data(64),[list(range(48)),list(range(48, 64))]   # three batches, and one
    b = learner(loader(ds, [order[here.rank]], 4), ds, ddp={}, model=batchnorm, splitter=all_params)
    m = b.model.module
    b.recalibrate_bn(16)
    with torch.no_grad(): want = m[:2](ds.tensors[0])
    torch.testing.assert_close(m[2].running_mean, want.mean(0))
    torch.testing.assert_close(m[2].running_var, torch.stack([o.var(0) for o in want.split(16)]).mean(0))
    assert m[2].num_batches_tracked==4
    b.model.module = nn.SyncBatchNorm.convert_sync_batchnorm(m)   # DDP itself takes it on GPUs only
    for f in (lambda: b.recalibrate_bn(16),lambda: b.fit(1, cbs=RecalibrateBN()),lambda: b.bs_find(show_plot=False)):
        with pytest.raises(RuntimeError, match='SyncBatchNorm'): f()

@pytest.mark.parametrize('case', ['even','uneven','sums','scaled'])
@on(*two_or_more)
def test_noise_of_all_processes(case):
    "What is measured is worked out from the gradients of all micro-batches"
    ns,meter = dict(even=[16,16,16], uneven=[16,9,3]).get(case, [15]*3)[:here.world],NoiseScale(every=1)
    b = own(ns, loss_func=CrossEntropy(reduction='sum' if case=='sums' else 'mean'))
    b.fit(1, 0., cbs=[GradientAccumulation(16*here.world, drop_last=False),meter,*(scaled() if case=='scaled' else [])])
    micro,b.model = [o for p in orders(ns)[0] for o in cut(p, 4)],b.model.module
    want = by_hand(single_gradients(b)[sum(micro, [])], [len(o) for o in micro])
    assert deviation((meter.trace,meter.grad_sq), want)<1e-5
    assert len(b.recorder.noise_scale)==1

@on(2)
def test_scaled_lr_counts_all_processes():
    "Where nothing accumulates, what accumulation refuses is none of its business"
    for ddp in (dict(),dict(static_graph=True)):
        a,b = (own(ragged, ddp=ddp) for _ in range(2))
        a.fit(1, 0.2)
        b.fit(1, 0.1, cbs=ScaledLR(base_bs=2*here.world))   # batches of 4 on each process
        torch.testing.assert_close(state(b), state(a))
        assert list(b.recorder.lrs)==list(a.recorder.lrs)
    b = own(ragged)
    b.fit(1, 0.01, cbs=[GradientAccumulation(32),ScaledLR(base_bs=8)])
    assert deviation(list(b.recorder.lrs), [.01*4]*3)<1e-12

def capped(caps, stage='backward', wrap=True, n=70):
    "A Learner for `bs_find`: each process has memory for as many samples"
    def model(): return net(nn.BatchNorm1d(6), Memory(above(caps[here.rank], stage)))
    b = toy(4, data=toy_data(n), splitter=all_params, opt_func=Adam, model=model)
    if wrap: b.model = DDP(b.model)
    return b
def less(r, least=9): return [least if i==r else 50 for i in range(here.world)]

@on(*two_or_more)
def test_bs_find_finds_what_fits_on_all():
    "And leaves everything as it was"
    for r,stage in ((0,'forward'),(here.world-1,'backward')):
        b = capped(less(r), stage)
        if r: b.fit(1, 0.01)
        def now(): return deepcopy((b.model.state_dict(),b.opt.state_dict() if b.opt else 0,
            [p.grad for p in b.model.parameters()],torch.get_rng_state()))
        before,ddp,res = now(),b.model,b.bs_find('binsearch', show_plot=False)
        assert int(res)==9 and f'each of {here.world} processes' in repr(res)
        assert deviation(before, now())==0 and b.model is ddp and (b.opt is None)==(not r)

@on(2)
def test_bs_find_says_the_same_on_all():
    "What fits, and then trains; the fewest samples; that nothing fits, that processes differ, that another has failed"
    b = capped(less(1))
    assert int(b.bs_find(show_plot=False, apply=True))==8==b.dls.train.bs
    b.fit(1, 0.01, cbs=GradientAccumulation(64))
    same_everywhere(state(b))
    res = capped([50,50], n=40 if here.rank else 30).bs_find(show_plot=False)
    assert int(res)==30 and 'no more' in repr(res)
    with pytest.raises(torch.OutOfMemoryError, match='no batch fits'): capped(less(0, 0)).bs_find(show_plot=False)
    with pytest.raises(ValueError, match='init_val'): capped([50,50]).bs_find(init_val=2+here.rank, show_plot=False)
    b = capped([50,50])
    exc,said = [(RuntimeError,'failed on process 1'),(ZeroDivisionError,'zero')][here.rank]
    if here.rank: b.model.module[0].register_forward_hook(lambda *_: 1/0)
    with unmoved(b), pytest.raises(exc, match=said): b.bs_find(show_plot=False)
    assert isinstance(b.model, DDP)

@on(2)
def test_a_fit_that_is_cut_short_leaves_nothing():
    "The next fits, plain or not, are as if it had not been"
    def fit(acc, event=None, exc=None, **kwargs):
        b = own(ragged, opt_func=SGD)
        if event:
            cb = Raise(event, exc, 7, at=1 if event in ('after_backward','after_batch') else 5)
            try: b.fit(1, 0., cbs=[GradientAccumulation(32, **kwargs),cb])
            except (KeyboardInterrupt,RuntimeError): pass
            assert cb.raised
            rewind(b)
        b.fit(1, 0.1, cbs=GradientAccumulation(32) if acc else None)
        return state(b)
    want = [fit(o) for o in (False,True)]
    events = ('before_batch','after_pred','after_loss','before_backward','after_backward','after_batch')
    cuts = product(events, (KeyboardInterrupt,RuntimeError,CancelFitException), (None,'auto'))
    for event,exc,size in some(5, cuts):
        for acc in (False,True):
            assert deviation(fit(acc, event, exc, micro_batch_size=size), want[acc])<1e-12, (event,exc)

# Sharded models

def fsdp2(): return fully_shard(batchnorm(), mesh=init_device_mesh('cpu', (here.world,)))
def fsdp2_after_validation():
    model = fsdp2()
    model.unshard()   # as a forward pass leaves it: until it is sharded again, its parameters are plain tensors
    return model
def fsdp1(): return type('FullyShardedDataParallel', (nn.Sequential,), {})(batchnorm())
def one_dtensor():
    model = batchnorm()
    parallelize_module(model[0], init_device_mesh('cpu', (here.world,)), ColwiseParallel())
    return model

gathers_on_cpu = pytest.mark.skipif(not hasattr(torch.cpu.Stream, 'record_event'), reason='PyTorch 2.6 gathers on GPUs')

@pytest.mark.parametrize('model', [fsdp2,pytest.param(fsdp2_after_validation, marks=gathers_on_cpu),fsdp1,one_dtensor])
@on(2)
def test_sharded_models_are_refused(model):
    "Before a weight moves, by whatever would step with a part of each gradient, or wait for other processes forever"
    b = own(ragged, ddp=None, model=model, splitter=all_params)
    def fit(*cbs): return partial(b.fit, 1, 0.1, cbs=cbs)
    def whole_weights():
        return [(p.full_tensor() if hasattr(p, 'full_tensor') else p).detach().clone() for p in b.model.parameters()]
    before = whole_weights()
    for f in (b.recalibrate_bn, b.bs_find, fit(GradientAccumulation(32)), fit(GradientAccumulation(32),NoiseScale()),
            fit(GradientCache(micro_batch_size=2)), fit(ActivationCheckpoint()), fit(ScaledLR(base_bs=8)),
            fit(RecalibrateBN())):
        with pytest.raises(ValueError, match='sharded over processes.*use DistributedDataParallel'): f()
    assert all(map(torch.equal, before, whole_weights()))
