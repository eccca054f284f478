"accum_find finds the effective batch size that the noise of gradients asks for, and leaves everything as it was."
import random
import numpy as np, pytest, torch
from matplotlib import pyplot as plt
from torch import nn
from torch.utils.data import DataLoader as TorchDataLoader, TensorDataset
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastcore.basics import noop
from fastaccum import GradientAccumulation, NoiseScale
from fastaccum.testing import CrossEntropy, Float32Loss, toy, toy_data
from common import CpuMixedPrecision, Raise, some, weights
from test_check import everything, assert_same

def find(learn, **kwargs): return learn.accum_find(**dict(show_plot=False)|kwargs)

class Theta(nn.Module):
    def __init__(self, d): super().__init__(); self.theta = nn.Parameter(torch.full((d,), d**-.5, dtype=torch.float64))
    def forward(self, x): return self.theta-x
def half_square(pred, targ): return pred.square().sum(-1).mean()/2

def quadratic(scale, bs=4, seed=0, d=200, n=4096, cbs=()):
    "The gradient of a sample is θ-x, of length 1 in the mean, and `scale` is the variance of x: the noise scale"
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)*(scale/d)**.5
    ds = TensorDataset(x, torch.zeros(n))
    dls = DataLoaders(DataLoader(ds, bs=bs, shuffle=True, drop_last=True), DataLoader(ds, bs=bs))
    learn = Learner(dls, Theta(d), half_square, opt_func=SGD, wd=0., cbs=[Float32Loss(),*cbs])
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

def near(a, b): return b/1.5<int(a)<b*1.5

# What it finds

@pytest.mark.parametrize('scale', [16,64,256])
@pytest.mark.parametrize('lr', [0.,.002])
def test_it_finds_a_known_noise_scale(scale, lr):
    "...within its bounds, at a standstill and in training; in whole micro-batches"
    found = find(quadratic(scale), steps=40, lr=lr)
    assert near(found, scale) and int(found)%4==0 and found.low<found.scale<found.high
    assert found.low/1.2<scale<found.high*1.2 and near(found.scale, scale) and found.high<3*found.low
    assert list(range(10000))[found]==int(found)   # it may stand for a number

@pytest.mark.parametrize('accum_bs,kwargs', [(40,{}),(None,dict(accum_bs=40))])
def test_the_steps_that_are_measured_are_as_large_as_they_should_be(accum_bs, kwargs):
    "Those of the Learner's own accumulation, or of the size that is given"
    sizes = []
    class See(Callback):
        def after_loss(self): sizes.append(len(self.pred))
    learn = quadratic(64, cbs=[GradientAccumulation(accum_bs)] if accum_bs else [])
    found = find(learn, steps=30, lr=0., cbs=See(), **kwargs)
    assert near(found, 64) and sizes==[4]*300 and '30 steps of 40 samples' in repr(found)

@pytest.mark.parametrize('micro', [4,6,'auto'])
@pytest.mark.filterwarnings('ignore:memory ran out')
def test_batches_that_the_learner_splits_are_split(micro):
    "Memory runs out with more than 6 samples"
    learn = quadratic(16, 24, n=480, d=50, cbs=[GradientAccumulation(48, micro_batch_size=micro)])
    def full(m, x):
        if len(x[0])>6: raise torch.OutOfMemoryError('planted')
    learn.model.register_forward_pre_hook(full)
    before = everything(learn)
    found = find(learn, steps=60, lr=0.)
    assert near(found.scale, 16) and (micro=='auto' or int(found)%micro==0)
    assert_same(before, learn)

def test_where_targets_are_counted_the_suggestion_is_in_samples():
    "With the same number in each sample it is that of a loss that does not count them"
    ds = TensorDataset(*(o.repeat_interleave(6, 1).view(o.shape[0], 6, *o.shape[2:]) for o in
        (toy_data(64).tensors[0][:,None],toy_data(64).tensors[1][:,None])))
    ds.tensors[1][:] = (ds.tensors[0][...,0]<-1).long()
    def plain(p, y): return CrossEntropy()(p, y)
    random.seed(0)
    a,b = (find(toy(4, data=ds, loss_func=f), lr=0., steps=10) for f in (CrossEntropy(),plain))
    assert int(a)==int(b) and np.isfinite(a.scale)

def test_noise_that_hides_the_gradient_gives_a_lower_bound():
    found = find(quadratic(1e9), steps=4, lr=0.)
    assert found.high==np.inf and int(found)>100 and 'or more' in repr(found) and 'Measure more' in repr(found)

def test_no_more_than_an_epoch(): assert int(find(quadratic(1e4, n=300), steps=10, accum_bs=256, lr=0.))==300

def test_callbacks_of_the_planned_fit_take_part():
    "One that makes the gradient four times as long makes the noise scale a sixteenth"
    class Pull(Callback):
        def after_loss(self): self.learn.loss_grad = self.loss_grad+3*(self.learn.model.theta*200**-.5).sum()
    learn = quadratic(128)
    assert near(find(learn, lr=0., cbs=Pull()), 8) and near(find(learn, lr=0.), 128)

@pytest.mark.parametrize('kwargs', [{},dict(shuffle=True, generator=torch.Generator().manual_seed(0))],
    ids=['order','shuffled'])
def test_pytorchs_loaders(kwargs):
    learn = quadratic(16)
    learn.dls = DataLoaders(TorchDataLoader(learn.dls.train_ds, 4, **kwargs), learn.dls.valid)
    before = [kwargs['generator'].get_state()] if kwargs else []
    assert near(find(learn, steps=30, lr=0.), 16) and all(kwargs['generator'].get_state().equal(o) for o in before)

# Everything is as it was

def small(fitted=False, cbs=(), **kwargs):
    net = lambda: nn.Sequential(nn.Linear(5, 6), nn.Dropout(.3), nn.Tanh(), nn.Linear(6, 3)).double()
    learn = toy(4, n=48, model=net, splitter=lambda m: [list(m.parameters())], opt_func=Adam, shuffle=True,
        cbs=list(cbs), **kwargs)
    if fitted:
        learn.add_cbs([GradientAccumulation(8),NoiseScale(every=1)])
        learn.fit(1)
    return learn

@pytest.mark.parametrize('fitted,cbs', [(False,list),(True,list),(True,lambda: [CpuMixedPrecision()])],
    ids=['fresh','fitted','mixed'])
def test_everything_is_as_before(fitted, cbs):
    "And the fit that follows is the one that would have been"
    learn,other = (small(fitted, cbs()) for _ in range(2))
    before = everything(learn)
    assert int(find(learn, steps=3))%4==0
    assert_same(before, learn)
    for o in (learn,other): torch.manual_seed(3); o.fit(1)
    assert weights(learn).equal(weights(other)) and learn.recorder.losses==other.recorder.losses

events = ('before_fit before_epoch before_train before_batch after_loss before_step after_step after_train '
    'after_fit').split()

@pytest.mark.parametrize('event,exc,fitted', some(12, [(e,x,f) for e in events
    for x in (KeyboardInterrupt,ZeroDivisionError) for f in (False,True)]))
def test_everything_is_as_before_after_an_interrupt(event, exc, fitted):
    learn = small(fitted)
    before = everything(learn)
    with pytest.raises(exc): find(learn, steps=2, cbs=Raise(event, exc, 20))
    assert_same(before, learn)

def test_nothing_is_validated_or_logged(capsys):
    heard = []
    class Hears(Callback):
        def before_validate(self): heard.append('validated')
    learn = small(cbs=[Hears()])
    learn.logger = lambda *o: heard.append('logged')
    find(learn, steps=2)
    assert heard==[] and capsys.readouterr().out=='' and not hasattr(learn.recorder, 'lrs')

# What it says, and what it refuses

def test_words_and_picture():
    n = len(plt.get_fignums())
    found = small().accum_find(steps=3)
    assert len(plt.get_fignums())==n+1
    assert f'accum_bs={int(found)}' in repr(found) and 'taken for granted' in repr(found)
    found.plot()
    ax = plt.gcf().axes[-1]
    assert any(f'accum_bs={int(found)}' in o.get_text() for o in ax.get_legend().get_texts())
    assert any(list(np.unique(o.get_xdata()))==[int(found)] for o in ax.lines)
    plt.close('all')
    find(small(), steps=2)
    assert not plt.get_fignums()

@pytest.mark.parametrize('kwargs,exc', [(dict(steps=0),ValueError),(dict(steps=2.5),TypeError),
    (dict(accum_bs=-4),ValueError),(dict(accum_bs=2.5),TypeError),(dict(show_plot=1),TypeError)], ids=str)
def test_bad_arguments(kwargs, exc):
    learn,(nm,val) = small(),next(iter(kwargs.items()))
    before = everything(learn)
    with pytest.raises(exc, match=f'{nm}={val}'): find(learn, **kwargs)
    assert_same(before, learn)

class Stop(Callback):
    def after_step(self): raise CancelFitException

def unknown_size():
    learn = small()
    learn.dls.train.bs = None
    return learn

def no_batch(drop_last):
    learn = toy(4, n=3)
    learn.dls.train = DataLoader(toy_data(3), bs=4, drop_last=drop_last)
    return learn

@pytest.mark.parametrize('make,exc,match', [(unknown_size,ValueError,'batch size'),
    (lambda: no_batch(True),ValueError,'no batch'), (lambda: no_batch(False),RuntimeError,'no full batch of 4'),
    (lambda: small(cbs=[Stop()]),RuntimeError,'a callback ends the fit')], ids=['size','none','no_full','ended'])
def test_what_cannot_be_measured_is_told(make, exc, match):
    learn = make()
    before = everything(learn)
    with pytest.raises(exc, match=match): find(learn)
    assert_same(before, learn)

def test_several_processes_are_refused(monkeypatch):
    from torch import distributed
    monkeypatch.setattr(distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(distributed, 'get_world_size', lambda *a: 2)
    with pytest.raises(RuntimeError, match='in 2 processes'): find(small())
