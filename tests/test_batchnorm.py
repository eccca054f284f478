"BatchNorm's running statistics: what they are estimated from, that nothing else changes, and a freeze that holds."
import os, random, subprocess, sys, warnings
from functools import partial
from pathlib import Path
import numpy as np, pytest, torch
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset
from torchvision.models import resnet18
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.callback.progress import ProgressCallback
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import BnFreeze
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from fastai.vision.learner import vision_learner
from fastcore.basics import noop
from fastaccum import (ActivationCheckpoint, FreezeBN, GradientAccumulation, GradientAccumulationScheduler,
    GradientCache, RecalibrateBN)
from fastaccum.batchnorm import Recalibration
from fastaccum.testing import CrossEntropy, Float32Loss, assert_twins, deviation, toy, toy_data, twins
from fastaccum.ways.statistics import bn_layers
from common import CpuMixedPrecision, Raise

def body(): return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)).double()
def one_group(m): return [list(m.parameters())]
def make(bs=4, **kwargs): return toy(bs, **dict(dict(model=body, splitter=one_group), **kwargs))
def inputs(learn): return torch.stack([x for x,_ in learn.dls.train.dataset])
def stats(learn): return torch.cat([t.flatten().double() for m in bn_layers(learn.model) for t in m.buffers()])

def by_hand(learn, bs, k, x=None):
    "Mean and variance of the first layer's outputs, as a mean over `k` batches of `bs`"
    with torch.no_grad(): batches = learn.model[0](inputs(learn) if x is None else x)[:k*bs].split(bs)
    return [torch.stack([f(o) for o in batches]).mean(0) for f in (lambda o: o.mean(0),lambda o: o.var(0))]

def is_mean_of(learn, bs, k, x=None):
    bn = learn.model[1]
    apart = deviation(by_hand(learn, bs, k, x), [bn.running_mean,bn.running_var])
    return apart<1e-12 and bn.num_batches_tracked==k

# What the statistics are

@pytest.mark.parametrize('seed', range(8))
def test_statistics_are_the_mean_over_whole_batches(seed):
    rng = random.Random(seed)
    n,bs,micro = rng.randint(2, 90),rng.randint(2, 40),rng.randint(1, 8)
    limit = rng.choice([None,rng.randint(1, 90)])
    learn = make(micro, n=n)
    learn.fit(1, 0.1, cbs=GradientAccumulation(8)) if micro>1 and n%micro!=1 else None
    learn.recalibrate_bn(bs, limit)
    bs = min(bs, n)
    assert is_mean_of(learn, bs, max(1, min(limit or n, n)//bs)), (n, bs, limit)

@pytest.mark.parametrize('n,k', [(15,1), (16,1), (47,2), (48,3), (1000,4)])
def test_samples_looked_at(n, k):
    learn = make(n=70)
    learn.recalibrate_bn(16, n)
    assert is_mean_of(learn, 16, k)

def test_sizes_by_default():
    def size(bs, *cbs): return Recalibration(make(bs, n=400, cbs=cbs)).bs
    assert size(4)==64 and size(100)==100
    assert size(4, GradientAccumulation(16))==16 and size(32, GradientAccumulation(16))==32
    assert size(4, GradientAccumulation(1000))==400   # there are no more
    learn = make(4, n=64, cbs=GradientAccumulationScheduler({0:2, 1:8}))
    learn.fit(2, 0.1)
    assert Recalibration(learn).bs==32

@pytest.mark.parametrize('kw', [{}, dict(drop_last=True)], ids=str)
def test_torch_loader(kw):
    learn = make(n=70)
    learn.dls.train = TorchDataLoader(toy_data(70), 4, **kw)
    learn.recalibrate_bn(16)
    assert is_mean_of(learn, 16, 4) and learn.dls.train.batch_size==4
    learn.dls.train = TorchDataLoader(toy_data(10), 4, **kw)
    learn.recalibrate_bn(64)
    assert is_mean_of(learn, 10, 1)

def test_ready_made_batches():
    learn = make(n=64)
    x,y = toy_data(64).tensors
    learn.dls.train = list(zip(x.split(8), y.split(8)))
    learn.recalibrate_bn()
    assert is_mean_of(learn, 8, 8, x)
    with pytest.raises(ValueError, match='`bs=16`, but the batches of the training list come ready-made'):
        learn.recalibrate_bn(16)
    class Own(list): bs = 8
    learn.dls.train = Own(learn.dls.train)
    learn.recalibrate_bn(8)   # as they come
    assert is_mean_of(learn, 8, 8, x)
    learn.dls.train = []
    before = stats(learn)
    with pytest.raises(ValueError, match='no batch'): learn.recalibrate_bn()
    assert torch.equal(stats(learn), before)

def test_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.bn,self.lin = nn.BatchNorm1d(5),nn.Linear(5, 3)
        def forward(self, a, b): return self.lin(self.bn(a+b))
    x,y = toy_data(32).tensors
    ds = TensorDataset(x, 3*x, y)
    learn = Learner(DataLoaders(DataLoader(ds, bs=4), DataLoader(ds, bs=4)), Two().double(), CrossEntropy())
    learn.recalibrate_bn(32)
    assert deviation(learn.model.bn.running_mean, 4*x.mean(0))<1e-12

def test_cumulative_layers_and_layers_without_statistics():
    def model():
        bns = nn.BatchNorm1d(5, momentum=None, affine=False),nn.BatchNorm1d(5, track_running_stats=False)
        return nn.Sequential(*bns, nn.Linear(5, 3)).double()
    learn = make(n=32, model=model)
    learn.recalibrate_bn(8)
    bn = learn.model[0]
    assert bn.momentum is None and bn.num_batches_tracked==4
    assert deviation(bn.running_mean, inputs(learn).mean(0))<1e-12

def test_no_dropout():
    def model(): return nn.Sequential(nn.Dropout(), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)).double()
    learn = make(n=32, model=model)
    learn.recalibrate_bn(32)
    assert deviation(inputs(learn).var(0), learn.model[1].running_var)<1e-12

@pytest.mark.parametrize('in_fit', [False,True])
def test_mixed_precision(in_fit):
    "The model runs in it, in a fit and outside, and callbacks hear nothing"
    seen = []
    class Look(nn.Module):
        def forward(self, x):
            seen.append((torch.is_autocast_enabled('cpu'), x.dtype, torch.is_grad_enabled(), len(x)))
            return x
    class Deaf(Callback):
        heard = 0
        def before_batch(self): self.heard += self.training
    def model(): return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), Look(), nn.Linear(6, 3))
    ds = TensorDataset(toy_data(32).tensors[0].float(), toy_data(32).tensors[1])
    deaf = Deaf()
    learn = make(n=32, data=ds, model=model, cbs=[CpuMixedPrecision('bf16'),deaf])
    if in_fit: learn.fit(1, 0.1, cbs=[GradientAccumulation(16),RecalibrateBN(16)])
    else: learn.recalibrate_bn(16)
    assert [o for o in seen if o[3]==16]==[(True,torch.bfloat16,False,16)]*2
    assert not torch.is_autocast_enabled('cpu') and deaf.heard==(8 if in_fit else 0)

# Nothing else changes

def shuffled(kind):
    ds = toy_data(70)
    if kind=='torch': return TorchDataLoader(ds, 4, shuffle=True, generator=torch.Generator().manual_seed(1))
    random.seed(0)
    def noise(b): return b[0]+torch.randn_like(b[0])+random.random()+np.random.rand(),b[1]
    return DataLoader(ds, bs=4, shuffle=True, after_batch=noise)

@pytest.mark.parametrize('kind', ['fastai','torch'])
@pytest.mark.parametrize('how', ['call','callback'])
def test_training_goes_on_as_if_nothing_had_happened(kind, how):
    def run(recalibrate):
        learn = make(cbs=[GradientAccumulation(16)])
        learn.dls.train = shuffled(kind)
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        cbs = [RecalibrateBN()] if recalibrate and how=='callback' else []
        learn.fit(2, 0.1, cbs=cbs)
        flags = [m.training for m in learn.model.modules()]
        if recalibrate and how=='call': learn.recalibrate_bn()
        assert flags==[m.training for m in learn.model.modules()] and learn.model[1].momentum==0.1
        learn.fit(2, 0.1, cbs=cbs)
        return learn
    a,b = run(False),run(True)
    assert all(torch.equal(p, q) for p,q in zip(a.model.parameters(), b.model.parameters()))
    assert a.recorder.losses==b.recorder.losses and not torch.equal(stats(a), stats(b))
    assert [o.grad for o in b.model.parameters()] and getattr(b.dls.train, 'bs', 4)==4

class Fails(nn.Module):
    "Raises `exc` at the `at`th forward pass without gradients on a batch of `bs`"
    def __init__(self, at, bs, exc):
        super().__init__()
        self.left,self.bs,self.exc = at,bs,exc
    def forward(self, x):
        if not torch.is_grad_enabled() and len(x)==self.bs:
            self.left -= 1
            if self.left==-1: raise self.exc('planted')
        return x

@pytest.mark.parametrize('exc', [KeyboardInterrupt,torch.OutOfMemoryError])
@pytest.mark.parametrize('in_fit', [False,True])
def test_interrupts_leave_the_statistics_as_they_were(in_fit, exc):
    def model(fails): return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), fails, nn.Linear(6, 3)).double()
    noted = []
    def note(*_): noted.append(stats(learn))
    for at in range(2):
        learn = make(model=lambda: model(Fails(at, 24, exc)))
        run = partial(learn.fit, 2, 0.1, cbs=[RecalibrateBN(24),Callback(after_train=note)])
        if not in_fit:
            learn.fit(1, 0.1)
            run = partial(learn.recalibrate_bn, 24)
            note()
        rng = torch.get_rng_state()
        with pytest.raises(exc, match='planted' if exc is KeyboardInterrupt else 'a batch of 24 does not fit'): run()
        assert torch.equal(stats(learn), noted[-1]) and learn.dls.train.bs==4 and learn.model[1].momentum==0.1
        assert in_fit or torch.equal(rng, torch.get_rng_state()) and not any(m.training for m in learn.model.modules())

# The callback

def test_what_validates_and_saves_has_them(tmp_path):
    learn = make(n=64, path=tmp_path)
    learn.fit(3, 0.1, cbs=[GradientAccumulation(16),RecalibrateBN(),SaveModelCallback(every_epoch=True)])
    assert is_mean_of(learn, 16, 4)
    assert learn.recorder.values[-1][1]==pytest.approx(learn.validate()[0], abs=1e-6)
    learn.load('model_0')
    assert is_mean_of(learn, 16, 4)   # those of its weights

def test_only_where_somebody_trains(monkeypatch):
    learn = make(n=64, cbs=RecalibrateBN(16))
    before = stats(learn)
    learn.validate(), learn.get_preds()
    assert torch.equal(stats(learn), before)
    def run(self): raise RuntimeError('it runs')
    monkeypatch.setattr(Recalibration, 'run', run)
    learn.lr_find(num_it=20, show_plot=False)   # more than an epoch
    with pytest.raises(RuntimeError, match='it runs'): learn.fit(1, 0.1)

@pytest.mark.parametrize('way', [lambda _: GradientCache(4),lambda m: ActivationCheckpoint([m[1],m[3]])],
    ids=['cache','checkpoint'])
@pytest.mark.filterwarnings('ignore')   # the cache's, of BatchNorm
def test_with_the_other_ways(way):
    learn = make(16, n=64)
    learn.fit(2, 0.1, cbs=[RecalibrateBN(32),way(learn.model)])
    assert is_mean_of(learn, 32, 2)

def test_twins_with_the_callback():
    "With BatchNorm at the inputs, which do not depend on the weights, the twins have the same statistics"
    def model(): return nn.Sequential(nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)).double()
    a,b = twins(model=model, splitter=one_group, n=64, cbs=lambda: [RecalibrateBN(16)])
    assert torch.equal(stats(a), stats(b))

def test_mixup_is_not_heard():
    ds = TensorDataset(toy_data(64).tensors[0].float(), toy_data(64).tensors[1])
    def model(): return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    learn = make(n=64, data=ds, model=model, loss_func=nn.CrossEntropyLoss(), cbs=MixUp())
    learn.recalibrate_bn(64)
    assert deviation(by_hand(learn, 64, 1), [learn.model[1].running_mean,learn.model[1].running_var])<1e-6

def test_nothing_to_do():
    learn = toy(4)
    with learn.added_cbs(RecalibrateBN()), warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.bs_find(show_plot=False, max_trials=2)   # which leaves it out
    with pytest.raises(ValueError, match='no BatchNorm layer'): learn.recalibrate_bn()
    with pytest.warns(UserWarning, match='no BatchNorm layer') as said: learn.fit(2, 0.1, cbs=RecalibrateBN())
    assert len(said)==1
    with pytest.warns(UserWarning, match='nothing to freeze'): learn.fit(1, 0.1, cbs=FreezeBN())
    for nm in ('bs','n'):
        for f in (RecalibrateBN,make().recalibrate_bn):
            with pytest.raises(ValueError, match=f'`{nm}=0`'): f(**{nm:0})
            with pytest.raises(TypeError, match=f'`{nm}=True`'): f(**{nm:True})

# Frozen layers

def test_frozen_layers_are_left_alone():
    def model():
        layers = nn.Linear(5, 6),nn.BatchNorm1d(6),nn.Linear(6, 6),nn.BatchNorm1d(6),nn.Linear(6, 3)
        return nn.Sequential(*layers).double()
    learn = make(model=model)
    first,last = learn.model[1],learn.model[3]
    for p in first.parameters(): p.requires_grad_(False)
    learn.recalibrate_bn(16)
    assert first.num_batches_tracked==0 and last.num_batches_tracked==4
    learn.add_cb(FreezeBN(lambda m: m[2:]))
    with pytest.raises(ValueError, match='all BatchNorm layers are frozen'): learn.recalibrate_bn(16)
    with pytest.warns(UserWarning, match='all BatchNorm layers are frozen'): learn.fit(1, 0.1, cbs=RecalibrateBN())
    learn.freeze_bn.run = False   # then it freezes nothing
    learn.recalibrate_bn(8)
    assert last.num_batches_tracked==8

def vision(bs, cbs=(), seed=0, **kwargs):
    "A `vision_learner` in double precision, without dropout, whose statistics are as in a pretrained model: right"
    gen = torch.Generator().manual_seed(0)
    x,y = torch.randn(32, 3, 32, 32, generator=gen).double(),torch.randint(0, 3, (32,), generator=gen)
    torch.manual_seed(seed)
    dls = DataLoaders(DataLoader(TensorDataset(x, y), bs=bs), DataLoader(TensorDataset(x, y), bs=32))
    learn = vision_learner(dls, resnet18, n_out=3, pretrained=False, normalize=False, ps=0., opt_func=SGD,
        loss_func=nn.CrossEntropyLoss(), cbs=[Float32Loss(),*cbs], **kwargs)
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    learn.model.double()
    learn.recalibrate_bn(32)
    return learn

def moved(train, cbs, **kwargs):
    learn = vision(8, **kwargs)
    before = stats(learn)
    train(learn)
    learn.fit(1, 1e-3, cbs=[GradientAccumulation(16),*cbs])
    return (stats(learn)-before).abs().max().item()

def test_the_freeze_holds_on_a_vision_learner():
    assert moved(Learner.freeze, [FreezeBN()])==moved(Learner.unfreeze, [FreezeBN()])==0

@pytest.mark.parametrize('train,train_bn', [(Learner.freeze,True), (Learner.unfreeze,False)])
def test_fastai_freeze_does_not(train, train_bn):
    "A canary: once fastai's holds, say so"
    assert moved(train, [BnFreeze()], train_bn=train_bn)>0.1

def test_frozen_twins_on_a_vision_learner():
    def run(bs, *cbs):
        learn = vision(bs)
        learn.fine_tune(1, 1e-2, cbs=[FreezeBN(),*cbs])
        return learn
    start,a,b = vision(16),run(16),run(4, GradientAccumulation(16))
    assert_twins(a, b)
    assert deviation(*([*o.model.parameters()] for o in (start,a)))>1e-4   # all of it trains

def test_frozen_whoever_calls_train():
    learn = make(n=64)
    learn.recalibrate_bn(16)
    before = stats(learn)
    def again(_): learn.model.train()
    learn.fit(1, 0.1, cbs=[FreezeBN(),Callback(after_backward=again)])
    assert torch.equal(stats(learn), before)
    learn.fit(1, 0.1)   # without it, as ever
    assert not torch.equal(stats(learn), before)

@pytest.mark.parametrize('event', ['after_pred','after_train','after_epoch'])
def test_flags_after_an_interrupt(event):
    learn = make(n=64)
    cb = FreezeBN()
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 0.1, cbs=[cb,Raise(event, KeyboardInterrupt, 0)])
    assert learn.model[1].training==learn.model.training==(event!='after_epoch') and not cb.held

# Several processes

worker = '''
import os, sys, torch
from torch import distributed as dist, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from fastaccum.testing import toy, toy_data
from fastaccum import RecalibrateBN
dist.init_process_group('gloo', init_method='file://'+sys.argv[1], rank=int(sys.argv[2]), world_size=2)
rank = dist.get_rank()
class Part(torch.utils.data.Dataset):
    idxs = range(0, 48) if rank else range(48, 64)   # three batches, and one
    def __len__(self): return len(self.idxs)
    def __getitem__(self, i): return toy_data(64)[self.idxs[i]]
model = lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
learn = toy(4, data=Part(), model=model, splitter=lambda m: [list(m.parameters())])
net = learn.model
learn.model = DDP(net)
learn.recalibrate_bn(16)
x,bn = toy_data(64).tensors[0],net[1]
with torch.no_grad(): want = net[0](x)
torch.testing.assert_close(bn.running_mean, want.mean(0))
torch.testing.assert_close(bn.running_var, torch.stack([o.var(0) for o in want.split(16)]).mean(0))
assert bn.num_batches_tracked==4
learn.model.module = nn.SyncBatchNorm.convert_sync_batchnorm(net)   # DDP itself takes it on GPUs only
for f in (lambda: learn.recalibrate_bn(16),lambda: learn.fit(1, cbs=RecalibrateBN())):
    try: f()
    except RuntimeError as e: assert 'SyncBatchNorm exchanges' in str(e), e
    else: assert False
dist.destroy_process_group()
'''

def test_two_processes(tmp_path):
    env = dict(os.environ, OMP_NUM_THREADS='1')
    args = [sys.executable, '-W', 'ignore', '-c', worker, str(tmp_path/'store')]
    ps = [subprocess.Popen([*args, str(i)], env=env, stderr=subprocess.PIPE, text=True) for i in range(2)]
    for p in ps:
        err = p.communicate(timeout=300)[1]
        assert not p.returncode, err
