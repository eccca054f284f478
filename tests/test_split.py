"""`micro_batch_size=<number>`: each batch of a loader with larger batches is split, and the run is the big batch's.

The twin is the loader with batches of `accum_bs` without a callback: the very same loader where that is its batch size.
"""
import pytest, random, warnings
import torch
from functools import partial
from torch import nn
from torch.distributions import Beta
from torch.utils.data import TensorDataset
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.training import GradientClip, ShortEpochCallback
from fastai.data.load import DataLoader
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.testing import assert_twins, deviation, one_cycle, toy
from common import CpuMixedPrecision, Raise, Seen, grads, weights
from test_auto import Buffered, Hidden, Norm, Sizes, items, kinds, left, make, tensors
from test_precision import Scaled

def with_train_metrics(*args, **kwargs):
    learn = toy(*args, metrics=accuracy, **kwargs)
    learn.recorder.train_metrics = True
    return learn

def pair(bs, accum, micro, acc=None, cbs=list, fit=one_cycle, whole=1, make=toy, seed=0, **kwargs):
    "The run on batches of `accum`, and the one whose batches of `bs` are split"
    acc = acc or {}
    def run(bs, whole, own):
        learn = make(bs, whole=whole, seed=seed, **kwargs)
        torch.manual_seed(seed)
        fit(learn, own+cbs())
        return learn
    own = [GradientAccumulation(accum, micro_batch_size=micro, **acc)]
    return run(accum, accum if acc.get('drop_last') else whole, []),run(bs, whole, own)

# The law

@pytest.mark.parametrize('seed', range(24))
def test_random_runs(seed):
    "Any batch size of the loader, any number, any `accum_bs`, in micro-batches that never reach across a step"
    rng = random.Random(seed)
    bs = rng.randint(2, 40)
    micro,accum,n = rng.randint(1, bs-1),rng.choice([bs,bs*2,rng.randint(2, 90)]),rng.randint(100, 200)
    opt = rng.choice([partial(SGD, mom=0.9),Adam,partial(OptimWrapper, opt=torch.optim.AdamW)])
    cbs = rng.choice([list,lambda: [GradientClip(0.05)],lambda: [Scaled(init_scale=2.**10, growth_interval=3)]])
    assert_twins(*pair(bs, accum, micro, dict(drop_last=rng.choice([None,True,False])), cbs, make=with_train_metrics,
        seed=seed, n=n, opt_func=opt, shuffle=rng.random()<0.5, tokens=rng.random()<0.3))

@pytest.mark.parametrize('bs,micro', [(16,4),(16,5),(16,15),(50,16)])
@pytest.mark.parametrize('n', [100,96])
def test_the_twin_is_the_very_loader(bs, micro, n):
    a,b = pair(bs, bs, micro, n=n)
    assert_twins(a, b)
    assert len(b.recorder.losses)==2*-(-n//bs)

def test_a_loader_that_drops_its_last_batch():
    assert_twins(*pair(16, 16, 4, whole=16, n=70))

def test_micro_batches_seen():
    "As even as can be, between where batches and steps end"
    def sizes(bs, accum, micro, n):
        seen = Seen('after_pred', lambda l: len(l.pred))
        toy(bs, n=n).fit(1, 0.1, cbs=[GradientAccumulation(accum, micro_batch_size=micro),seen])
        return seen.values
    assert sizes(50, 50, 16, 60)==[13,13,12,12,10]
    assert sizes(32, 8, 4, 32)==[4]*8 and sizes(32, 12, 8, 32)==[6,6,6,6,8]
    assert sizes(8, 12, 6, 24)==[4,4,4,4,4,4] and sizes(10, 14, 5, 20)==[5,5,4,3,3]
    assert sizes(16, 4, 8, 16)==[4]*4   # none is larger than the step it is for

def test_the_last_is_not_left_alone():
    "Of 17 samples with parts of 16 come 9 and 8: a single one would stop BatchNorm"
    learn = make(tensors, 34, 17, state=Norm)
    learn.fit(1, 0.05, cbs=GradientAccumulation(17, micro_batch_size=16))
    assert learn.model.state.seen==[9,8,9,8]

def test_dropped_samples_are_not_seen():
    seen = Seen('after_pred', lambda l: len(l.pred))
    toy(16, n=70).fit(1, 0.1, cbs=[GradientAccumulation(24, micro_batch_size=8, drop_last=True),seen])
    assert sum(seen.values)==48

@pytest.mark.parametrize('kind', kinds, ids=lambda o: o.__name__)
def test_batches_of_all_kinds(kind):
    for bs,accum in ((10,10),(10,4)):
        a,b = make(kind, 40, accum),make(kind, 40, bs)
        a.fit(1, 0.05)
        b.fit(1, 0.05, cbs=GradientAccumulation(accum, micro_batch_size=3, drop_last=False))
        assert_twins(a, b)

@pytest.mark.parametrize('log', [True,False])
def test_log_accum_batch(log):
    a,b = pair(16, 24, 4, dict(log_accum_batch=log), n=70)
    assert deviation(weights(a), weights(b))<1e-7
    assert len(b.recorder.losses)==(6 if log else 2*(4+2+2+4+4+2))

def scheduled(cls, *args, **kwargs): return lambda micro: cls(*args, micro_batch_size=micro, drop_last=False, **kwargs)

@pytest.mark.parametrize('acc', [scheduled(GradientAccumulationSchedule, 8, 40),
    scheduled(GradientAccumulationScheduler, {1:4,2:1}),
    scheduled(GradientAccumulationScheduler, {2:3,9:1,12:7}, mode='step')])
def test_schedules(acc):
    "A schedule is the same with a loader of micro-batches, and with one of large batches that are split"
    a,b = toy(4, n=90),toy(36, n=90)
    a.fit_one_cycle(3, 0.1, cbs=acc(None))
    b.fit_one_cycle(3, 0.1, cbs=acc(4))
    assert_twins(a, b)
    assert a.recorder.accum_bs==b.recorder.accum_bs and len(set(b.recorder.accum_bs))>1

def test_a_size_that_is_set_within_an_epoch():
    class Set(Callback):
        run_valid = False
        def after_step(self):
            if self.gradient_accumulation.step==2: self.gradient_accumulation.accum_bs = 24
    a,b = toy(4, n=96),toy(32, n=96)
    for l,micro in ((a,None),(b,4)):
        l.fit_one_cycle(2, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=micro, drop_last=False),Set()])
    assert_twins(a, b)

@pytest.mark.parametrize('bs,accum', [(32,8),(16,16),(8,24)])
def test_lr_find(bs, accum):
    def fit(l, cbs):
        l.add_cbs(cbs)
        l.lr_find(num_it=20, show_plot=False)
    a,b = pair(bs, accum, 4, fit=fit, n=90)
    assert len(b.recorder.lrs)==20 and deviation(a.recorder.losses, b.recorder.losses)<2e-6
    assert deviation(a.recorder.lrs, b.recorder.lrs)<1e-9

def test_plan():
    dls = toy(32, n=100).dls
    for micro in (4,5):
        plan = GradientAccumulation(24, micro_batch_size=micro).plan(dls, 2)
        assert plan.sizes==[[24,24,24,24,4]]*2 and plan.micro_bs==micro and plan.bs==32
    axs = GradientAccumulationSchedule(8, 40, micro_batch_size=4).plot_sched(dls, 2)
    assert axs[1].lines[0].get_ydata()[-1]==sum(GradientAccumulationSchedule(8, 40).plan(toy(4, n=100).dls, 2).steps)

# Loaders that do not say their batch size, or another

def test_larger_batches_than_the_loader_says_are_split():
    "And the step is still a whole batch of the loader"
    def prebatched(bs):
        learn = toy(bs, n=64)
        learn.dls.loaders[0] = DataLoader(list(learn.dls.train), bs=None)
        return learn
    for learn in (prebatched(16),make(tensors, 64, sampler=Sizes([16]*4, 4))):
        seen = Seen('after_pred', lambda l: len(l.pred))
        with pytest.warns(UserWarning, match='a batch has 16 samples.*says 4'):
            learn.fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),seen])
        assert seen.values==[4]*16 and len(learn.recorder.losses)==4

def test_a_step_smaller_than_the_number_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        toy(16, n=64).fit(1, 0.1, cbs=GradientAccumulation(4, micro_batch_size=8))

# Callbacks

def test_events():
    "`before_batch` has the whole batch; parts end for who has no `before_batch`, the batch for who has one"
    told = []
    class Whole(Callback):
        run_valid = False
        def before_batch(self): told.append(('whole',len(self.x)))
        def after_batch(self): told.append(('end',self.iter))
    class Parts(Callback):
        run_valid = False
        def after_batch(self): told.append(('part',len(self.pred)))
    toy(16, n=32).fit(1, 0.1, cbs=[GradientAccumulation(8, micro_batch_size=4),Parts(),Whole()])
    assert told==[('whole',8),('part',4),('part',4),('end',0)]*2+[('whole',8),('part',4),('part',4),('end',1)]*2
    told.clear()
    toy(16, n=32).fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size=8),Parts(),Whole()])
    assert told==[('whole',16),('part',8),('part',8),('end',0),('whole',16),('part',8),('part',8),('end',1)]

class Noise(Callback):
    "Changes the batch, in another way for each sample and for the batch as a whole"
    run_valid = False
    def __init__(self, order): self.order = order
    def before_batch(self):
        x = self.x+torch.randn_like(self.x)
        self.learn.xb = ((x-x.mean(0))/x.std(0),)

class Rate(Callback):
    "Another learning rate for a batch, as fastai's `GANDiscriminativeLR`"
    order,run_valid = 70,False   # after the scheduler
    def before_batch(self): self.opt.set_hyper('lr', float(self.opt.hypers[0]['lr']*3))
    def after_batch(self): self.opt.set_hyper('lr', float(self.opt.hypers[0]['lr']/3))

@pytest.mark.parametrize('cb', [partial(Noise, 0),partial(Noise, 20),Rate], ids=['early','late','pair'])
@pytest.mark.parametrize('bs', [16,32])
def test_callbacks_see_what_they_would_see_in_the_twin(cb, bs):
    "The whole batch, or as much of it as is for one step"
    assert_twins(*pair(bs, 16, 4, dict(drop_last=False), lambda: [cb()], n=96))

def test_pairs_of_events_where_steps_are_in_two_batches():
    assert_twins(*pair(40, 16, 4, dict(drop_last=False), lambda: [Rate()], n=96))

def test_short_epochs():
    a,b = pair(16, 16, 4, dict(drop_last=False), lambda: [ShortEpochCallback(0.5)], n=96)
    assert_twins(a, b)
    assert len(b.recorder.losses)==2*3 and b.train_iter==a.train_iter

class CE(nn.CrossEntropyLoss): y_int = True

class Double:
    "fastai's draw in single precision"
    def before_fit(self):
        o = torch.tensor(0.4, dtype=torch.float64)
        self.distrib = Beta(o, o)
    def before_batch(self):
        super().before_batch()
        self.lam = self.lam.double()
class DoubleMixUp(Double, MixUp): pass
class DoubleCutMix(Double, CutMix): pass

class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv,self.lin = nn.Conv2d(3, 4, 3),nn.Linear(4, 3)
    def forward(self, x): return self.lin(self.conv(x).tanh().mean((2,3)))

def images(n):
    gen = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n, 3, 8, 8, generator=gen, dtype=torch.float64),
        torch.randint(0, 3, (n,), generator=gen))

@pytest.mark.parametrize('bs,micro', [(16,4),(16,5),(48,4)])
@pytest.mark.parametrize('mix', [DoubleMixUp,DoubleCutMix])
def test_mixup(mix, bs, micro):
    "Their whole batch is mixed, and what they keep of it for the loss is split with it"
    a,b = pair(bs, 16, micro, dict(drop_last=False), lambda: [mix()], data=images(96), model=lambda: Conv().double(),
        loss_func=CE(), splitter=lambda m: [list(m.parameters())])
    assert deviation(weights(a), weights(b))<1e-12 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

def test_what_callbacks_keep_is_theirs_again():
    mix,seen = DoubleMixUp(),[]
    class See(Callback):
        run_valid,order = False,70
        def before_batch(self): self.lam = mix.lam
        def after_batch(self): seen.append(mix.lam is self.lam)
    toy(16, data=images(32), model=lambda: Conv().double(), loss_func=CE(), splitter=lambda m: [list(m.parameters())],
        ).fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),mix,See()])
    assert seen==[True]*2

@pytest.mark.parametrize('mode', ['fp16','bf16'])
def test_autocast_is_on_for_each_part(mode):
    "And left after each; the loss is scaled as without parts"
    def run(*acc):
        learn = toy(16, n=64, data=TensorDataset(*(o.float() if o.is_floating_point() else o
            for o in toy(16, n=64).dls.train_ds.tensors)), model=lambda: nn.Sequential(nn.Linear(5,6), nn.Tanh(),
            nn.Linear(6,3)), splitter=lambda m: [list(m.parameters())])
        learn.fit_one_cycle(2, 0.1, cbs=[CpuMixedPrecision(mode),*acc,ends,during])
        return learn
    def depth(l):
        res = torch.is_autocast_enabled('cpu'),torch.autocast_increment_nesting()-1
        torch.autocast_decrement_nesting()
        return res
    during,ends = Seen('after_pred', depth, order=20),Seen('after_loss', depth, order=20)
    a,b = run(),run(GradientAccumulation(16, micro_batch_size=4))
    assert len(during.values)==8+32 and set(during.values)=={(True,1)} and set(ends.values)=={(False,0)}
    assert deviation(weights(a), weights(b))<2e-3   # half precision

@pytest.mark.parametrize('state', [Hidden,Buffered])
@pytest.mark.parametrize('micro', [3,4])
def test_a_model_that_remembers(state, micro):
    a,b = (make(tensors, 64, 8, state=state) for _ in range(2))
    a.fit_one_cycle(2, 0.05)
    b.fit_one_cycle(2, 0.05, cbs=GradientAccumulation(8, micro_batch_size=micro, drop_last=False))
    assert_twins(a, b)

def test_a_part_that_is_cancelled_is_left_out():
    class Cancel(Callback):
        run_valid = False
        def after_pred(self):
            if self.at==1: raise CancelBatchException
        at = property(lambda self: [o.tolist() for o in starts].index(self.x[0].tolist()))
    class Without(Callback):
        run_valid = False
        def before_batch(self): self.learn.xb,self.learn.yb = (self.x[kept],),(self.y[kept],)
    ds = toy(16, n=16).dls.train_ds
    starts,kept = [ds[i][0] for i in (0,4,8,12)],[*range(4),*range(8, 16)]
    a,b = toy(16, n=16),toy(16, n=16)
    a.fit(2, 0.1, cbs=Without())
    b.fit(2, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),Cancel()])
    assert deviation(weights(a), weights(b))<1e-12

def test_a_step_that_lost_a_part_goes_on_with_the_rest_of_the_batch():
    "Also in the last batch of an epoch: a step is as large as it should be while there are samples"
    class Cancel(Callback):
        run_valid,n = False,0
        def after_pred(self):
            self.n += 1
            if self.n==1: raise CancelBatchException
    steps = Seen('before_step', lambda l: l.gradient_accumulation.macro.samples, order=7)
    toy(32, n=32).fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=8),Cancel(),steps])
    assert steps.values==[16,8]

def test_the_end_of_training_waits_for_the_whole_batch():
    "A callback that ends the fit after a part ends it after the step that the part is for"
    class Stop(Callback):
        run_valid,n = False,0
        def after_batch(self):
            self.n += 1
            if self.n==2: raise CancelFitException
    b = toy(16, n=64)
    b.fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),stop := Stop()])
    assert stop.n==4 and len(b.recorder.losses)==1

# What it does not do

def test_validation_stays_whole():
    "Nothing is kept for gradients there, and its averages are the loader's"
    sizes = []
    class Valid(Callback):
        run_train = False
        def after_pred(self): sizes.append(len(self.pred))
    learn = toy(16, n=64)
    learn.fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),Valid()])
    assert sizes==[32,32]

def test_memory_that_runs_out_is_not_recovered():
    learn = toy(16, n=64)
    before = weights(learn)
    with pytest.raises(torch.OutOfMemoryError, match='planted'):
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),
            Raise('after_pred', torch.OutOfMemoryError, 0, at=2)])
    assert weights(learn).equal(before) and not left(learn)
    assert not any(g is not None and g.any() for g in grads(learn))

@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','before_backward','after_backward',
    'after_batch'])
@pytest.mark.parametrize('exc', [KeyboardInterrupt,RuntimeError])
def test_an_interrupt_leaves_nothing(event, exc):
    a,b = toy(16, n=64),toy(16, n=64)
    with pytest.raises(exc): b.fit(1, 0., cbs=[GradientAccumulation(8, micro_batch_size=3),Raise(event, exc, 0, at=2)])
    assert not left(b) and not any('after_batch' in vars(o) for o in b.cbs)
    for o in (a,b): o.opt = None
    for o in (a,b): o.fit(1, 0.1)
    assert_twins(a, b)

def test_what_cannot_be_split_is_refused_before_a_weight_moves():
    class Graph:
        def __init__(self, x): self.x = x
    def graphs(its): return Graph(torch.stack([x for x,_ in its])),torch.stack([y for _,y in its])
    learn = make(graphs, 20, 10)
    before = weights(learn)
    with pytest.raises(TypeError, match='a Graph in a batch of 10 samples cannot be split'):
        learn.fit(1, 0.1, cbs=GradientAccumulation(10, micro_batch_size=5))
    assert weights(learn).equal(before) and not left(learn)
