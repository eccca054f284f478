"Means over tokens without padding, weights of classes, samples, or a number of the user, are those of full batches."
import pytest, torch
from functools import partial
from torch import nn, tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fastai.vision.all import (Adam, Callback, CrossEntropyLossFlat, GradientAccumulation as FastaiGradientAccumulation,
    TerminateOnNaNCallback, params)
from fastaccum import GradientAccumulation
from fastaccum.testing import CrossEntropy, assert_same_run, deviation, one_cycle, toy, toy_data, both_runs
from common import RecordAt, grads, weights
from test_warned import Masked, fit_small_rate, warnings_and_runs

w = tensor([0.2,1.,5.], dtype=torch.float64)
gen = torch.Generator().manual_seed(0)
def rand(*size): return torch.rand(*size, generator=gen, dtype=torch.float64)

class Known(Masked):
    "A user's loss with an `ignore_index`; if every target is ignored, it is 0/0 and its gradients are NaN"
    ignore_index = -100

class Replace(Callback):
    "Replaces the loss function during training, as fastai's MixUp does"
    order = 90
    def before_train(self): self.old,self.learn.loss_func = self.learn.loss_func,CrossEntropy(weight=w)
    def after_train(self): self.learn.loss_func = self.old

losses = dict(plain=CrossEntropy(), weighted=CrossEntropy(weight=w), smoothed=CrossEntropy(label_smoothing=0.1),
    weighted_smoothed=CrossEntropy(weight=w, label_smoothing=0.1), own=Known(), summed=CrossEntropy(reduction='sum'))
of_classes = dict(index=CrossEntropy(ignore_index=2), both=nn.CrossEntropyLoss(ignore_index=0, weight=w),
    functional=F.cross_entropy, partial_index=partial(F.cross_entropy, ignore_index=1),
    partial_weight=partial(F.cross_entropy, weight=w))
x,mixed,masks = toy_data(70).tensors[0],rand(70, 3)+torch.eye(3)[torch.arange(70)%3],(150+10*rand(70)).byte()
cases = {**{f'{k} over tokens':dict(tokens=True, loss_func=f, fit=fit_small_rate) for k,f in losses.items()},
    **{f'{k} over classes':dict(loss_func=f) for k,f in of_classes.items()},
    'replaced':dict(tokens=True, cbs=lambda: [Replace()], fit=fit_small_rate),
    'log probabilities':dict(loss_func=nn.NLLLoss(weight=w, ignore_index=1), splitter=params,
        model=lambda: nn.Sequential(nn.Linear(5,3), nn.LogSoftmax(-1)).double()),
    # for probabilities torch divides by the number of samples, even with class weights
    'probabilities':dict(data=TensorDataset(x, mixed), loss_func=nn.CrossEntropyLoss()),
    'weighted probabilities':dict(data=TensorDataset(x, mixed), loss_func=nn.CrossEntropyLoss(w)),
    # targets in 8 bits, as in masks, where the -100 of `ignore_index` would be class 156
    **{f'8 bits {i}':dict(data=TensorDataset(x, masks), model=lambda: nn.Linear(5,160).double(), splitter=params,
        loss_func=nn.CrossEntropyLoss(o)) for i,o in enumerate((None,rand(160)))}}

# If all targets of a micro-batch have classes of weight 0, its loss is 0/0; the full batch has other classes
rare = toy_data(70)
rare.tensors[1][4:8] = rare.tensors[1][32:40] = 0
cases['class without weight'] = dict(data=rare, loss_func=CrossEntropy(weight=tensor([0.,1.,1.], dtype=torch.float64)))

# `n_items` says what the loss divides by, and may be 0 for a micro-batch
def per_weight(p, y): return (F.mse_loss(p[...,0], y[...,0], reduction='none')*y[...,1]).sum()/y[...,1].sum()
with_weights = TensorDataset(x, rand(70, 2))
with_weights.tensors[1][8:12,1] = with_weights.tensors[1][20:24,1] = 0
for f in (lambda l: l.y[...,1].sum(),lambda l: l.y[...,1].sum().item()):
    cases[f'own size {len(cases)}'] = dict(data=with_weights, loss_func=per_weight, acc=dict(n_items=f))

@pytest.mark.parametrize('case', cases)
def test_means_and_sums(case):
    said,a,b = warnings_and_runs(**dict(fit=one_cycle)|cases[case])
    assert not said and assert_same_run(a, b)

@pytest.mark.parametrize('kwargs', [dict(), dict(weight=w.float()), dict(ignore_index=1)], ids=str)
def test_fastais_flat_losses(kwargs):
    "These losses cast to single precision, whose rounding is much smaller than the error of a mean of means"
    runs = [both_runs(tokens='ignore_index' not in kwargs, loss_func=CrossEntropyLossFlat(**kwargs), acc_cls=o,
        fit=lambda l,cbs: l.fit(2, 0.1, cbs=cbs)) for o in (GradientAccumulation,FastaiGradientAccumulation)]
    ours,stock = (deviation(weights(a), weights(b)) for a,b in runs)
    assert ours<stock/300

# Micro-batches and steps in which every target is ignored

def ignored(*which, n=64):
    "Return token data in which the samples `which` are all padding"
    ds = toy_data(n, tokens=True)
    ds.tensors[1][list(which)] = -100
    return ds

@pytest.mark.parametrize('loss', ['plain','smoothed','own','weighted'])
@pytest.mark.parametrize('log', [True,False])
def test_micro_batches_of_padding_do_nothing(loss, log):
    "At the start of an epoch or in its middle, no weight and no loss becomes NaN, and the fit continues"
    a,b = both_runs(data=ignored(*range(4), *range(24,28)), loss_func=losses[loss], acc=dict(log_accum_batch=log),
        cbs=lambda: [TerminateOnNaNCallback()], fit=fit_small_rate)
    assert deviation(weights(a), weights(b))<1e-7
    if log: assert_same_run(a, b)
    assert len(b.recorder.losses)==(8 if log else 32) and not any(o.isnan() for o in b.recorder.losses)

@pytest.mark.parametrize('loss,step', [('plain',0), ('smoothed',1), ('own',3)])
def test_a_step_of_padding_has_no_gradient_and_a_loss(loss, step):
    seen = RecordAt('before_step', lambda l: max(g.abs().max().item() for g in grads(l)), order=12)
    learn = toy(4, data=ignored(*range(16*step, 16*step+16)), loss_func=losses[loss])
    learn.fit_one_cycle(2, 0.1, cbs=[GradientAccumulation(16),seen])
    assert [o==0 for o in seen.values]==[i==step for i in range(4)]*2
    assert len(learn.recorder.losses)==8 and not any(o.isnan() for o in learn.recorder.losses)

def test_a_step_of_padding_applies_weight_decay_and_momentum_like_the_full_batch_run():
    a,b = both_runs(data=ignored(*range(16,32)), opt_func=Adam, fit=fit_small_rate)
    assert deviation(weights(a), weights(b))<1e-7 and any(o.isnan() for o in a.recorder.losses)

# The size of gradients

@pytest.mark.parametrize('kwargs', [dict(tokens=True), dict(tokens=True, loss_func=CrossEntropy(weight=w/1000)),
    dict(data=TensorDataset(x[:64], mixed[:64]), loss_func=nn.CrossEntropyLoss(w))], ids=['tokens','weights','mixed'])
def test_gradients_stay_as_large_as_those_of_a_mean(kwargs):
    "Half precision could not hold sums over tokens, 384 times as large, nor those of small class weights, near 0"
    def run(cbs):
        seen,learn = [],toy(4, n=64, **kwargs)
        learn.model[0].weight.register_hook(lambda g: seen.append(g.norm().item()))
        learn.fit(1, 0., wd=0., cbs=cbs)
        return seen
    shares = [b/a for a,b in zip(run([]), run(GradientAccumulation(64)))]
    assert len(shares)==16 and max(shares)<=3/16 and min(shares)>1/16/6/3
    if 'data' in kwargs: assert deviation(shares, [1/16]*16)<1e-9
