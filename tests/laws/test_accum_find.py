"`accum_find` suggests the effective batch size at which the noise of gradients equals the signal."
import numpy as np, pytest, torch
from functools import partial
from torch import nn
from torch.utils.data import TensorDataset
from fastai.vision.all import CancelFitException, DataLoader, SGD
from fastaccum import GradientAccumulation, GradientAccumulationScheduler
from fastaccum.testing import CrossEntropy, toy, toy_data
from common import CallAt, CpuLossScaling, RaiseAt, raise_oom_above
from small_learners import all_params, with_loaders
from test_dry_runs import unchanged

class Theta(nn.Module):
    "A model that returns θ-x, where the parameter θ has `d` numbers"
    def __init__(self, d):
        super().__init__()
        self.theta = nn.Parameter(torch.full((d,), d**-.5).double())
    def forward(self, x): return self.theta-x

def quadratic(scale, bs=4, n=4096, d=200, **kwargs):
    """Return a Learner whose noise scale is `scale`

    The gradient of a sample is θ-x, where |θ|=1, and the variances of the numbers in x add up to
    `scale`.
    """
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)*(scale/d)**.5
    return toy(bs, data=TensorDataset(x, torch.zeros(n)), model=lambda: Theta(d), shuffle=True, opt_func=SGD,
        loss_func=lambda pred,targ: pred.square().sum(-1).mean()/2, splitter=all_params, **kwargs)

def find_accum_bs(learn, **kwargs): return learn.accum_find(**dict(show_plot=False)|kwargs)
def near(a, b): return b/1.5<float(a)<b*1.5   # the noise scale is estimated from random samples

@pytest.mark.parametrize('scale,lr', [(16,0.), (64,.002), (256,0.)])
def test_it_finds_a_known_noise_scale(scale, lr):
    "The learning rate is 0, or so large that the weights change during the search"
    # a list outside of the callback, because accum_find restores the attributes of callbacks
    rates = []
    found = find_accum_bs(quadratic(scale), steps=40, lr=lr,
        cbs=CallAt('before_step', lambda l: rates.append(l.opt.hypers[-1]['lr'])))
    assert near(int(found), scale) and int(found)%4==0 and near(found.scale, scale) and rates==[lr]*40
    assert len(found.scales)==40 and found.scales[-1]==found.scale
    assert list(range(10000))[found]==int(found)   # the result can be used as an integer

@pytest.mark.parametrize('acc,kwargs', [(partial(GradientAccumulation, 40),{}),
    (partial(GradientAccumulationScheduler, {0:10}),{}),(None,dict(accum_bs=40))])
def test_the_measured_steps_have_the_size_of_the_callback_or_of_the_argument(acc, kwargs):
    "The incomplete last batch of an epoch, of 3 samples, is left out"
    learn,sizes = quadratic(64, n=1003),[]
    if acc: learn.add_cb(acc())
    note = CallAt('after_loss', lambda l: sizes.append(len(l.pred)))
    found = find_accum_bs(learn, steps=30, lr=0., cbs=note, **kwargs)
    assert near(int(found), 64) and sizes==[4]*300 and '30 steps of 40 samples' in repr(found)

def test_a_step_that_overflows_is_not_measured_and_another_step_is():
    factors = iter([float('inf')]*20)   # for the micro-batches of the first two steps
    overflow = CallAt('before_backward', lambda l: setattr(l, 'loss_grad', l.loss_grad*next(factors, 1.)))
    found = find_accum_bs(quadratic(64), accum_bs=40, steps=30, lr=0., cbs=[CpuLossScaling(),overflow])
    assert near(found.scale, 64) and len(found.readings)==30

@pytest.mark.parametrize('micro', [4,6,'auto'])
@pytest.mark.filterwarnings('ignore:memory ran out')
def test_batches_that_the_learner_splits_are_split(micro):
    "Memory runs out with more than 6 samples"
    learn = quadratic(16, 24, n=480, d=50, cbs=GradientAccumulation(48, micro_batch_size=micro))
    learn.model.register_forward_pre_hook(lambda m,x: raise_oom_above(6)(len(x[0])))
    with unchanged(learn): found = find_accum_bs(learn, steps=60, lr=0.)
    assert near(found.scale, 16) and (micro=='auto' or int(found)%micro==0)

def test_with_a_loss_over_targets_the_suggestion_is_in_samples():
    "Samples have 6 targets each, so a loss that is a mean over samples gives the same suggestion"
    x = toy_data(64).tensors[0].unsqueeze(1).repeat(1, 6, 1)
    ds = TensorDataset(x, (x[...,0]<-1).long())
    over_targets,over_samples = CrossEntropy(),lambda p,y: CrossEntropy()(p, y)
    a,b = (find_accum_bs(toy(4, data=ds, loss_func=f), lr=0.) for f in (over_targets,over_samples))
    assert int(a)==int(b) and np.isfinite(a.scale)

@pytest.mark.parametrize('n,size', [(2048,32),(96,96),(96,128)])
def test_if_noise_hides_the_gradient_the_measured_size_is_suggested(n, size):
    """At most an epoch is suggested

    Steps of all samples have a gradient of 0 at the best weights, so the estimate of |G|² is below 0.
    """
    learn = quadratic(1e9, n=n)
    if size>=n: learn.model.theta.data = learn.dls.train.dataset.tensors[0].mean(0)
    # `accum_find` refuses an argument that exceeds an epoch, but the size of a callback may exceed it
    given = dict(cbs=GradientAccumulation(size)) if size>n else dict(accum_bs=size)
    found = find_accum_bs(learn, steps=6, lr=0., **given)
    assert found.scale==np.inf and int(found)==min(size, n)
    assert 'noise hides the gradient' in repr(found) and ('an epoch has no more' in repr(found))==(size>n)

def test_callbacks_of_the_planned_fit_take_part():
    "A callback makes the gradient four times as long but not the noise, so the scale is a sixteenth"
    def pull(l): l.loss_grad = l.loss_grad+3*(l.model.theta*200**-.5).sum()
    learn = quadratic(128)
    assert near(find_accum_bs(learn, lr=0., cbs=CallAt('after_loss', pull)).scale, 8)
    assert near(find_accum_bs(learn, lr=0.).scale, 128)

# Refused

@pytest.mark.parametrize('make,kwargs,exc,match', [
    *((lambda: toy(4),{nm:v},exc,f'`{nm}` must be .*got {v}') for nm,v,exc in (
        ('accum_bs',-4,ValueError), ('accum_bs',2.5,TypeError), ('show_plot',1,TypeError))),
    (lambda: with_loaders(toy(4), DataLoader(toy_data(8), bs=None)),{},ValueError,'many samples'),
    (lambda: with_loaders(toy(4), DataLoader(toy_data(3), bs=4)),{},RuntimeError,'no batch has 4 samples'),
    (lambda: toy(4, cbs=RaiseAt('after_step', CancelFitException, 0)),{},RuntimeError,'a callback ends the fit')],
    ids=lambda o: o if isinstance(o, str) else '')
def test_what_cannot_be_measured_is_refused(make, kwargs, exc, match):
    learn = make()
    with unchanged(learn), pytest.raises(exc, match=match): find_accum_bs(learn, **kwargs)
