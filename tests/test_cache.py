"""`GradientCache`: the model sees micro-batches, and the run is that of the whole batch.

The twin is the same run without the callback. With dropout, which draws its random numbers per micro-batch, it is a
run whose model applies itself to the same micro-batches, in one graph.
"""
import pytest, random
import torch
from collections import OrderedDict
from functools import partial
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException, CancelFitException
from fastai.callback.fp16 import AMPMode
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.rnn import RNNCallback, RNNRegularizer
from fastai.callback.training import GradientClip
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastaccum import GradientAccumulation, GradientCache, TwinWarning
from fastaccum.core.notices import BatchNormWarning
from fastaccum.testing import CrossEntropy, assert_twins, deviation, one_cycle, toy
from fastaccum.ways.cached import cuts
from common import CpuMixedPrecision, Raise, Seen, grads, weights
from test_precision import Scaled

# Losses in which all samples of a batch see each other

def nt_xent(z, y):
    "Chen et al., 2020: of samples 2i and 2i+1, each has to find the other"
    z = F.normalize(z.flatten(1))
    sim = (z@z.T/0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return F.cross_entropy(sim, (torch.arange(len(z))^1).clamp(max=len(z)-1))

def batch_dice(z, y):
    "One Dice coefficient for all samples of the batch together"
    p,t = z.softmax(-1),F.one_hot(y, 3)
    return (1-2*(p*t).sum(0)/(p.sum(0)+t.sum(0))).mean()

class Mixed(nn.Module):
    "A loss function that MixUp can take apart, in double precision"
    y_int,reduction = True,'mean'
    def forward(self, z, y): return F.cross_entropy(z, y, reduction=self.reduction)

def fit(cbs, bs=16, fit=one_cycle, seed=0, **kwargs):
    "A Learner that was fitted with the callbacks"
    learn = toy(bs, seed=seed, **kwargs)
    torch.manual_seed(seed)
    fit(learn, cbs)
    return learn

def pair(size, cbs=list, **kwargs):
    "The twin, and the run with a cache"
    return fit(cbs(), **kwargs),fit([GradientCache(size),*cbs()], **kwargs)

# The law

@pytest.mark.parametrize('loss_func', [nt_xent,batch_dice,CrossEntropy()], ids=['nt_xent','dice','mean'])
@pytest.mark.parametrize('kwargs', [dict(), dict(n=61), dict(shuffle=True, opt_func=Adam),
    dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), dict(cbs=lambda: [GradientClip(0.05)]),
    dict(cbs=lambda: [Scaled(init_scale=2.**10, growth_interval=3)]), dict(metrics=accuracy)], ids=str)
def test_twins(loss_func, kwargs):
    a,b = pair(5, loss_func=loss_func, **kwargs)
    assert_twins(a, b, tol=1e-12)
    assert b.recorder.losses==a.recorder.losses

@pytest.mark.parametrize('seed', range(20))
def test_random_sizes(seed):
    rng = random.Random(seed)
    a,b = pair(rng.randint(1, 40), bs=rng.randint(2, 40), n=rng.randint(40, 90), seed=seed,
        loss_func=rng.choice([nt_xent,batch_dice]))
    assert_twins(a, b, tol=1e-12)
