"""The Learner's batch is the step, for callbacks that count, read `learn.iter` or cancel.

Each callback is written for plain fastai. Its run on micro-batches is the full-batch run, or a warning says why not.
"""
import pytest
from functools import partial
from fastai.callback.hook import ActivationStats
import fastai.vision.all   # gives the Learner its methods
from fastaccum import GradientAccumulation
from fastaccum.testing import assert_same_run, both_runs, deviation, toy
from common import collect_warnings, weights
from counting import (FactorOfProgress, MovingAverage, OwnSchedule, PenaltyInEverySecondBatch, RateByIter, Trains,
    cancels)

class FreezesByIter(Trains):
    def before_batch(self): self.model[0].requires_grad_(self.iter<2)

class FreezesAfterBatch(Trains):
    def before_fit(self): self.n = 0
    def after_batch(self):
        self.n += 1
        self.model[0].requires_grad_(self.n<3)

exact = [OwnSchedule,MovingAverage,PenaltyInEverySecondBatch,FactorOfProgress,RateByIter,FreezesByIter,
    FreezesAfterBatch,*(partial(cancels, o) for o in ('before_batch','after_pred','after_loss','before_backward'))]
# loaders of micro-batches, and a loader of steps whose batches are split
ways = dict(micro_batches=dict(micro=4), split=dict(micro=16, acc=dict(micro_batch_size=4)))
def name_of(o): return getattr(o, '__name__', 'cancels' if isinstance(o, partial) else None)

def fit(learn, cbs): learn.fit(2, 0.1, cbs=cbs)

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('cb', exact, ids=name_of)
def test_the_run_is_the_full_batch_run(cb, way):
    with collect_warnings() as collected: a,b = both_runs(n=70, cbs=lambda: [cb()], fit=fit, **ways[way])
    assert not collected
    assert_same_run(a, b)

@pytest.mark.parametrize('cb', exact, ids=name_of)
def test_the_weights_are_the_same_if_each_micro_batch_is_recorded(cb):
    a,b = both_runs(n=70, cbs=lambda: [cb()], fit=fit, acc=dict(log_accum_batch=False))
    assert deviation(weights(a), weights(b))<1e-9

@pytest.mark.parametrize('tokens', [False,True])
def test_a_cancelled_step_has_the_entries_of_the_full_batch_run(tokens):
    "Also with targets that are ignored, and if the step is cancelled after its loss was computed"
    for event in ('before_batch','after_loss'):
        a,b = both_runs(n=67, tokens=tokens, cbs=lambda: [cancels(event)], fit=fit)
        assert_same_run(a, b)
        assert a.train_iter==b.train_iter and a.recorder.iters==b.recorder.iters

@pytest.mark.parametrize('way', ways)
def test_a_cancelled_step_ends_with_the_events_of_a_cancelled_batch(way):
    class Hears(Trains):
        def before_fit(self): self.learn.heard = []
        def after_cancel_batch(self): self.learn.heard.append(('cancelled',self.iter))
        def after_batch(self): self.learn.heard.append(('ended',self.iter))
    a,b = both_runs(n=64, cbs=lambda: [Hears(),cancels('before_batch')], fit=fit, **ways[way])
    assert a.heard==b.heard and a.heard[:3]==[('ended',0),('cancelled',1),('ended',1)]

def test_hooks_of_activation_stats_are_removed_with_each_batch():
    "`ActivationStats` registers hooks in `before_batch` and removes them in `after_batch`"
    learn = toy(4, n=64, cbs=ActivationStats(every=1))
    learn.fit(1, 0.1, cbs=GradientAccumulation(16))
    assert len(learn.activation_stats.stats)==16
    assert not any(m._forward_hooks for m in learn.model.modules())

# What changes within a step is told

class CountsInBeforeBatch(Trains):
    "Sets the learning rate by the number of batches so far, which it counts in `before_batch`"
    def before_fit(self): self.n = 0
    def before_batch(self):
        self.n += 1
        self.opt.set_hyper('lr', 0.1/self.n)

class FreezesInBeforeBatch(CountsInBeforeBatch):
    def before_batch(self):
        self.n += 1
        self.model[0].requires_grad_(self.n<6)

@pytest.mark.parametrize('cb,words', [(CountsInBeforeBatch,'CountsInBeforeBatch changes `lr` between'),
    (FreezesInBeforeBatch,'FreezesInBeforeBatch changes which parameters are trained')])
def test_settings_that_change_within_a_step_are_told_with_the_callback(cb, words):
    with collect_warnings() as collected: a,b = both_runs(n=64, cbs=lambda: [cb()], fit=fit)
    message, = [str(o.message) for o in collected]
    assert words in message and 'self.train_iter' in message and message.endswith('#changes-within-a-step')
    assert deviation(weights(a), weights(b))>1e-3

def test_settings_that_change_between_steps_are_not_told():
    learn = toy(4, n=64)
    with collect_warnings() as collected:
        learn.fit_one_cycle(1, 0.1, cbs=GradientAccumulation(16))
        learn.fit_sgdr(1, 1, 0.1, cbs=GradientAccumulation(16))
        learn.add_cb(GradientAccumulation(16))
        learn.lr_find(num_it=10, show_plot=False)
    assert not [o for o in collected if issubclass(o.category, UserWarning)]
