"""Callbacks and losses of other projects give the full-batch run, or the fit warns."""
import pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from fastai.vision.all import (Callback, CancelBatchException, CancelTrainException, CancelValidException, Learner,
    OptimWrapper, SGD, to_device)
from fastaccum import AccumulationWarning, GradientAccumulation, GradientCache
from fastaccum.testing import assert_same_run, deviation, toy, both_runs
from common import RaiseAt, RecordAt, collect_warnings, weights
from test_warned import count_warnings, fit

# Targets and losses that callbacks set

class GivesTargetsLate(Callback):
    "Removes the targets, and sets them, or with `loss=True` also the loss, at `event`"
    run_valid = False
    def __init__(self, event, loss=False, order=0):
        self.order,self.loss = order,loss
        setattr(self, event, self.give)
        if event!='before_batch': self.before_batch = self.take
    def take(self): self.kept,self.learn.yb = self.yb,()
    def give(self):
        if not hasattr(self, 'kept'): self.kept = self.yb
        self.learn.yb = self.kept
        if self.loss:
            self.learn.loss_grad = self.learn.loss_func(self.pred, *self.yb)
            self.learn.loss = self.learn.loss_grad.detach().float()
        del self.kept

@pytest.mark.parametrize('event,loss,order', [('after_pred',False,0), ('after_loss',True,0), ('after_loss',True,70),
    ('before_batch',False,-50), ('before_batch',False,90)])
def test_targets_and_losses_that_callbacks_set_late_are_counted(event, loss, order):
    with collect_warnings() as collected: a,b = both_runs(fit=fit, cbs=lambda: [GivesTargetsLate(event, loss, order)])
    assert_same_run(a, b)
    assert not [o for o in collected if issubclass(o.category, AccumulationWarning)]
    assert len(b.recorder.losses)==10

# Callbacks that count steps and do not know of accumulation

class Average(Callback):
    "Updates a moving average of the weights and sets the learning rate in `after_batch`"
    order,run_valid = 55,False
    def before_fit(self): self.w = weights(self.learn)
    def after_batch(self):
        self.w = 0.9*self.w+0.1*weights(self.learn)
        self.opt.set_hyper('lr', 0.01*(1+self.train_iter))

def test_a_callback_without_before_batch_gets_after_batch_once_a_step():
    def run(bs, *acc):
        learn,cb = toy(bs, n=64),Average()
        learn.fit(2, 0.01, cbs=[cb,*acc])
        return cb.w,weights(learn)
    assert deviation(run(16), run(4, GradientAccumulation(16)))<1e-12

# Patches of fastai

def test_the_one_batch_of_tsai_is_accepted(monkeypatch):
    "tsai replaces `one_batch` by a function that only moves the batch to its device in another way"
    def one_batch(self, i, b):
        self.iter = i
        self._split(to_device(b, device=self.dls.device) if self.dls.device is not None else b)
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)
    one_batch.__module__ = 'tsai.learner'
    monkeypatch.setattr(Learner, 'one_batch', one_batch)
    assert_same_run(*both_runs(fit=fit))

# Fits that are not the full-batch run warn

# some losses below fail in validation
without_validation = partial(RaiseAt, 'before_validate', CancelValidException, 0)
def views():
    "Return a callback that makes two views of each sample for the loss to compare, as in SimCLR"
    return RecordAt('before_batch', lambda l: setattr(l, 'xb', (torch.cat([l.x, l.x+0.1]),)))
def pairs(p, y):
    if len(p)%4: raise ValueError('pairs of parts')   # some losses assert their batch size
    a,b = p.chunk(2)
    return F.cross_entropy(F.normalize(a)@F.normalize(b).T, torch.arange(len(a)))

def test_two_views_of_each_sample_are_warned_of_and_the_cache_is_exact():
    learn = toy(6, n=48, loss_func=pairs, cbs=without_validation())
    warned = count_warnings(lambda: learn.fit(1, 0.05, cbs=[views(),GradientAccumulation(24)]))
    assert {k for _,k in warned}<={'loss-not-tried','loss-not-a-mean'} and warned
    a,b = (toy(24, n=48, loss_func=pairs, cbs=without_validation()) for _ in range(2))
    for o,cbs in ((a,[]), (b,[GradientCache(micro_batch_size=6)])): o.fit(1, 0.05, cbs=[views(),*cbs])
    assert deviation(weights(a), weights(b))<1e-12

def test_a_callback_that_makes_more_rows_is_not_taken_for_a_loader_with_a_wrong_batch_size():
    "Each sample comes twice, with its target, so the loss is still a mean over samples"
    def twice(l): l.xb,l.yb = (l.x.repeat(2, 1),),(l.y.repeat(2),)
    a,b = toy(16, n=64),toy(4, n=64)
    a.fit(1, 0.05, cbs=RecordAt('before_batch', twice))
    warned = count_warnings(lambda: b.fit(1, 0.05, cbs=[RecordAt('before_batch', twice),GradientAccumulation(16)]))
    assert not warned and deviation(weights(a), weights(b))<1e-12

class Critic(Callback):
    "Trains its own model with its own optimizer, as trainers of GANs do"
    run_valid = False
    def __init__(self, opt_func):
        self.critic = nn.Linear(5, 1).double()
        self.opt_d = opt_func(list(self.critic.parameters()), lr=0.1)
    def after_pred(self):
        if self.opt_d is None: return
        self.critic(self.x).mean().backward()
        self.opt_d.step()
        self.opt_d.zero_grad()
class CriticPerStep(Critic): per_step = True
class NoCritic(Critic):
    "Trains nothing, but keeps the optimizer of the Learner in attributes"
    def before_fit(self): self.opt_d,self.opt_a,self.opt_b = None,self.learn.opt,self.learn.opt.opt

@pytest.mark.parametrize('cb,micro,n', [(Critic,4,1), (Critic,16,0), (CriticPerStep,4,0), (NoCritic,4,0)])
@pytest.mark.parametrize('opt_func', [SGD,torch.optim.SGD])
def test_an_optimizer_of_a_callback_is_warned_of_if_steps_have_several_micro_batches(opt_func, cb, micro, n):
    learn = toy(micro, n=64, cbs=cb(opt_func), opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
    warned = count_warnings(lambda: learn.fit(1, 0.05, cbs=GradientAccumulation(16)))
    assert warned==({('AccumulationWarning','second-optimizer'):1} if n else {})

class WeightsSamples(nn.Module):
    "A loss with a weight for each sample; a callback sets the weights `w` of a whole batch"
    def forward(self, p, y): return (F.cross_entropy(p, y, reduction='none')*self.w).mean()

def test_the_error_of_a_loss_that_keeps_the_whole_batch_gets_a_remedy():
    "The named remedy works. If no batch is split, the message of the user's error does not change"
    def train(acc, fails=0):
        weighs = RecordAt('before_batch', lambda l: setattr(l.loss_func, 'w', torch.linspace(0, 1, len(l.y)+fails)))
        toy(16, n=48, loss_func=WeightsSamples(), cbs=without_validation()).fit(1, 0.05, cbs=[weighs,acc])
    with pytest.raises(RuntimeError, match=
            r'(?s)a \(4\) must.*batch of 16 .*of 4\..*size=4.*#code-that-stores-a-whole-batch$'):
        train(GradientAccumulation(16, micro_batch_size=4))
    train(GradientCache(micro_batch_size=4))
    with pytest.raises(RuntimeError, match=r'dimension 0$'): train(GradientAccumulation(16, micro_batch_size='auto'), 1)

def clips(learn): nn.utils.clip_grad_norm_(learn.model.parameters(), 1e-3)
def second_pass(learn):
    "Make a second backward pass, as sharpness-aware minimization does"
    learn.opt.zero_grad()
    learn.loss_func(learn.model(*learn.xb), *learn.yb).backward()

def ends_epoch(learn):
    if (learn.epoch,learn.iter)==(0,1): raise CancelTrainException

@pytest.mark.parametrize('event,f,n', [('before_batch',lambda l: l.opt.zero_grad(),1), ('after_backward',clips,1),
    ('after_backward',second_pass,1), ('before_step',clips,0), ('before_batch',ends_epoch,0)])
def test_gradients_that_a_callback_changes_within_a_step_are_warned_of(event, f, n):
    warned = count_warnings(lambda: toy(4, n=64).fit(2, 0.05, cbs=[GradientAccumulation(16),RecordAt(event, f)]))
    assert warned[('AccumulationWarning','gradients-changed')]==n and len(warned)<=1

def test_trying_a_loss_on_parts_of_a_batch_gives_no_warning_of_pytorch():
    "The loss compares predictions of parts with whole targets, so PyTorch would warn of target sizes"
    keeps = RecordAt('after_pred', lambda l: setattr(l.loss_func, 'y', l.y))
    class Mse(nn.Module):
        y = None
        def forward(self, p, y): return F.mse_loss(p.sum(1), self.y.to(p))
    learn = toy(4, n=64, loss_func=Mse(), cbs=without_validation())
    # warnings are not errors here, because errors of a loss are caught
    with collect_warnings() as collected:
        learn.fit(1, 1e-3, cbs=[keeps,GradientAccumulation(16)])
    assert not [o for o in collected if 'target size' in str(o.message)]

def test_memory_that_runs_out_in_the_optimizers_step_is_an_error_with_the_remedy():
    learn = toy(8, n=32)
    learn.create_opt()
    learn.opt.step = lambda *args: (_ for _ in ()).throw(torch.OutOfMemoryError('planted'))
    with pytest.raises(torch.OutOfMemoryError, match="planted(?s:.*)optimizer's step"):
        learn.fit(1, cbs=GradientAccumulation(16, micro_batch_size='auto'))
