"Means over tokens, class weights, samples or a user's own number are those of full batches."
import pytest, torch
from functools import partial
from torch import nn, tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fastai.vision.all import (Adam, Callback, CrossEntropyLossFlat, GradientAccumulation as FastaiGradientAccumulation,
    TerminateOnNaNCallback, params)
from fastaccum import GradientAccumulation
from fastaccum.testing import CrossEntropy, assert_same_run, deviation, one_cycle, toy, toy_data, both_runs
from common import CallAt, RecordAt, grads, weights
from test_warned import Masked, fit_small_rate, warnings_and_runs

w = tensor([0.2,1.,5.], dtype=torch.float64)
gen = torch.Generator().manual_seed(0)
def rand(*size): return torch.rand(*size, generator=gen, dtype=torch.float64)

class WithIgnoreIndex(Masked):
    """A user's loss with an `ignore_index`

    If all targets are ignored, the loss is 0/0 and its gradients are NaN.
    """
    ignore_index = -100

class ReplacesLoss(Callback):
    "Replaces the loss function during training, as fastai's MixUp does"
    order = 90
    def before_train(self): self.old,self.learn.loss_func = self.learn.loss_func,CrossEntropy(weight=w)
    def after_train(self): self.learn.loss_func = self.old

losses = dict(plain=CrossEntropy(), weighted=CrossEntropy(weight=w), smoothed=CrossEntropy(label_smoothing=0.1),
    weighted_smoothed=CrossEntropy(weight=w, label_smoothing=0.1), own=WithIgnoreIndex(),
    summed=CrossEntropy(reduction='sum'))
of_classes = dict(index=CrossEntropy(ignore_index=2), both=nn.CrossEntropyLoss(ignore_index=0, weight=w),
    functional=F.cross_entropy, partial_index=partial(F.cross_entropy, ignore_index=1),
    partial_weight=partial(F.cross_entropy, weight=w))
x,mixed,masks = toy_data(70).tensors[0],rand(70, 3)+torch.eye(3)[torch.arange(70)%3],(150+10*rand(70)).byte()
cases = {**{f'{k} over tokens':dict(tokens=True, loss_func=f, fit=fit_small_rate) for k,f in losses.items()},
    **{f'{k} over classes':dict(loss_func=f) for k,f in of_classes.items()},
    'replaced':dict(tokens=True, cbs=lambda: [ReplacesLoss()], fit=fit_small_rate),
    'log probabilities':dict(loss_func=nn.NLLLoss(weight=w, ignore_index=1), splitter=params,
        model=lambda: nn.Sequential(nn.Linear(5,3), nn.LogSoftmax(-1)).double()),
    # if targets are probabilities, torch divides by the number of samples, even with class weights
    'probabilities':dict(data=TensorDataset(x, mixed), loss_func=nn.CrossEntropyLoss()),
    'weighted probabilities':dict(data=TensorDataset(x, mixed), loss_func=nn.CrossEntropyLoss(w)),
    # targets of 8 bits, as in masks of images: in 8 bits, the `ignore_index` of -100 would be class 156
    **{f'8 bits {i}':dict(data=TensorDataset(x, masks), model=lambda: nn.Linear(5,160).double(), splitter=params,
        loss_func=nn.CrossEntropyLoss(o)) for i,o in enumerate((None,rand(160)))}}

# PyTorch's functions ignore targets of -100 by default
ignored = toy_data(70)
ignored.tensors[1][::3] = -100
for f in (F.cross_entropy,nn.CrossEntropyLoss(),partial(F.cross_entropy, label_smoothing=0.1)):
    cases[f'ignored by default {len(cases)}'] = dict(data=ignored, loss_func=f)

# All targets of some micro-batches have a class of weight 0, so their loss is 0/0; the full batch has
# other classes too
rare = toy_data(70)
rare.tensors[1][4:8] = rare.tensors[1][32:40] = 0
cases['class without weight'] = dict(data=rare, loss_func=CrossEntropy(weight=tensor([0.,1.,1.], dtype=torch.float64)))

# `n_items` returns the number by which the loss divides, here a sum of weights, which is 0 in some
# micro-batches
def per_weight(p, y): return (F.mse_loss(p[...,0], y[...,0], reduction='none')*y[...,1]).sum()/y[...,1].sum()
with_weights = TensorDataset(x, rand(70, 2))
with_weights.tensors[1][8:12,1] = with_weights.tensors[1][20:24,1] = 0
for f in (lambda l: l.y[...,1].sum(),lambda l: l.y[...,1].sum().item()):
    cases[f'own size {len(cases)}'] = dict(data=with_weights, loss_func=per_weight, acc=dict(n_items=f))

@pytest.mark.parametrize('case', cases)
def test_a_loss_that_is_a_mean_or_a_sum_gives_the_full_batch_run(case):
    warned,a,b = warnings_and_runs(**dict(fit=one_cycle)|cases[case])
    assert not warned and assert_same_run(a, b)

@pytest.mark.parametrize('kwargs', [dict(), dict(weight=w.float()), dict(ignore_index=1)], ids=str)
def test_fastais_flat_losses_differ_from_the_full_batch_run_by_rounding(kwargs):
    "The losses cast to single precision, whose rounding is smaller than the error of a mean of means"
    runs = [both_runs(tokens='ignore_index' not in kwargs, loss_func=CrossEntropyLossFlat(**kwargs), acc_cls=o,
        fit=lambda l,cbs: l.fit(2, 0.1, cbs=cbs)) for o in (GradientAccumulation,FastaiGradientAccumulation)]
    ours,stock = (deviation(weights(a), weights(b)) for a,b in runs)
    assert ours<stock/300

# Micro-batches and steps in which every target is ignored

def data_with_padding(*which, n=64):
    "Return sequences with targets for tokens, in which the samples `which` have only padding"
    ds = toy_data(n, tokens=True)
    ds.tensors[1][list(which)] = -100
    return ds

@pytest.mark.parametrize('loss', ['plain','smoothed','own','weighted'])
@pytest.mark.parametrize('log', [True,False])
def test_micro_batches_of_padding_do_not_change_the_run(loss, log):
    """The first micro-batch and one in the middle have only padding

    No weight or loss becomes NaN, and the fit continues.
    """
    a,b = both_runs(data=data_with_padding(*range(4), *range(24,28)), loss_func=losses[loss],
        acc=dict(log_accum_batch=log), cbs=lambda: [TerminateOnNaNCallback()], fit=fit_small_rate)
    assert deviation(weights(a), weights(b))<1e-7
    if log: assert_same_run(a, b)
    assert len(b.recorder.losses)==(8 if log else 32) and not any(o.isnan() for o in b.recorder.losses)

@pytest.mark.parametrize('loss,step', [('plain',0), ('smoothed',1), ('own',3)])
def test_a_step_of_padding_has_no_gradient_and_a_loss(loss, step):
    seen = RecordAt('before_step', lambda l: max(g.abs().max().item() for g in grads(l)), order=12)
    learn = toy(4, data=data_with_padding(*range(16*step, 16*step+16)), loss_func=losses[loss])
    learn.fit_one_cycle(2, 0.1, cbs=[GradientAccumulation(16),seen])
    assert [o==0 for o in seen.values]==[i==step for i in range(4)]*2
    assert len(learn.recorder.losses)==8 and not any(o.isnan() for o in learn.recorder.losses)

def test_a_step_of_padding_applies_weight_decay_and_momentum_like_the_full_batch_run():
    a,b = both_runs(data=data_with_padding(*range(16,32)), opt_func=Adam, fit=fit_small_rate)
    assert deviation(weights(a), weights(b))<1e-7 and any(o.isnan() for o in a.recorder.losses)

# The size of gradients

@pytest.mark.parametrize('kwargs', [dict(tokens=True), dict(tokens=True, loss_func=CrossEntropy(weight=w/1000)),
    dict(data=TensorDataset(x[:64], mixed[:64]), loss_func=nn.CrossEntropyLoss(w))], ids=['tokens','weights','mixed'])
def test_gradients_stay_as_large_as_those_of_a_mean(kwargs):
    "Half precision could not hold sums over tokens, 384 times as large, or of small class weights"
    def run(cbs):
        norms,learn = [],toy(4, n=64, **kwargs)
        learn.model[0].weight.register_hook(lambda g: norms.append(g.norm().item()))
        learn.fit(1, 0., wd=0., cbs=cbs)
        return norms
    # each gradient in a step of 16 micro-batches, divided by the gradient of the same micro-batch by
    # itself
    ratios = [b/a for a,b in zip(run([]), run(GradientAccumulation(64)))]
    assert len(ratios)==16 and max(ratios)<=3/16 and min(ratios)>1/16/6/3
    if 'data' in kwargs: assert deviation(ratios, [1/16]*16)<1e-9

def test_settings_that_are_changed_in_a_fit_take_effect_in_the_next_epoch():
    acc,counted,sizes = GradientAccumulation(8),[],[]   # sizes: (epoch, samples in a micro-batch in training)
    def n_items(learn):
        counted.append(learn.epoch)
        return len(learn.yb[0])
    def change(learn): acc.n_items,acc.micro_batch_size = n_items,2
    def note(learn):
        if learn.training: sizes.append((learn.epoch,len(learn.yb[0])))
    learn = toy(4, n=16)
    learn.fit(2, .1, cbs=[acc,CallAt('after_epoch', change),CallAt('after_loss', note)])
    assert set(counted)=={1} and set(sizes)=={(0,4),(1,2)}
