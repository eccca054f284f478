"""Callbacks that cancel a backward pass or a batch late, read parts of the loss, or begin to change something later.

Each callback is written for plain fastai. Its run on micro-batches is the full-batch run, or a warning says why not.
"""
import pytest, torch
from fastai.callback.core import (CancelBackwardException, CancelBatchException, CancelFitException,
    CancelStepException)
from fastai.callback.mixup import MixUp
from fastai.optimizer import Adam
from fastai.vision.all import Callback, CrossEntropyLossFlat
from torch import nn
from torch.utils.data import TensorDataset
from fastaccum import GradientAccumulation, GradientAccumulationScheduler, GradientCache
from fastaccum.testing import CrossEntropy, assert_same_run, both_runs, deviation, toy, toy_data
from common import CallAt, RecordAt, collect_warnings, weights
from counting import Trains

ways = dict(micro_batches=dict(micro=4), split=dict(micro=16, acc=dict(micro_batch_size=4)))
def fit(learn, cbs): learn.fit(3, 0.1, cbs=cbs)
def entries(collected): return {str(o.message).rpartition('#')[2] for o in collected if '#' in str(o.message)}

def raises_every_third(event, exc):
    "Return a callback that raises `exc` in every third batch"
    def cancel(learn):
        if learn.iter%3==1: raise exc
    return CallAt(event, cancel)

@pytest.mark.parametrize('way', ways)
@pytest.mark.parametrize('kwargs', [{},dict(opt_func=Adam),dict(tokens=True)], ids=['sgd','adam','tokens'])
@pytest.mark.parametrize('event,exc', [('before_backward',CancelBackwardException), ('before_step',CancelStepException),
    *((o,CancelBatchException) for o in ('after_backward','before_step','after_step'))])
def test_whatever_cancels_a_part_of_each_batch_the_run_is_the_full_batch_run(event, exc, kwargs, way):
    """Momentum goes on after a cancelled backward pass, and the gradients of a cancelled batch stay for the next

    A step is not divided evenly: its loss is a mean over labels, or its last micro-batch is smaller.
    """
    with collect_warnings() as collected:
        a,b = both_runs(n=70, cbs=lambda: [raises_every_third(event, exc)], fit=fit, **kwargs, **ways[way])
    assert not collected and deviation(weights(a), weights(b))<1e-9
    assert deviation(a.recorder.losses, b.recorder.losses)<2e-6 and a.train_iter==b.train_iter

@pytest.mark.parametrize('cache', [False,True])
def test_gradients_that_a_callback_sets_itself_are_those_of_the_step_if_it_has_one_micro_batch(cache):
    "With several micro-batches, the callback is refused before any weight changes"
    def own_gradients(learn):
        for p in learn.model.parameters(): p.grad = torch.ones_like(p)
        raise CancelBackwardException
    def run(bs, *cbs):
        learn = toy(bs, n=64)
        learn.fit(2, 0.1, cbs=[CallAt('before_backward', own_gradients),*cbs])
        return weights(learn)
    way = GradientCache(micro_batch_size=4) if cache else GradientAccumulation(16)
    assert deviation(run(16), run(16, way))<1e-12
    learn = toy(4, n=64)
    before = weights(learn)
    with pytest.raises(RuntimeError, match='ActivationCheckpoint'):
        learn.fit(1, 0.1, cbs=[CallAt('before_backward', own_gradients),GradientAccumulation(16)])
    assert weights(learn).equal(before)

@pytest.mark.parametrize('way', ways)
def test_micro_batches_that_are_cancelled_in_part_are_told(way):
    def cancel_large(learn):
        if learn.gradient_accumulation.current_step.micro.i==1: raise CancelBatchException
    for event in ('after_loss','after_backward'):
        learn = toy(ways[way]['micro'], n=64)
        with collect_warnings() as collected:
            learn.fit(1, cbs=[GradientAccumulation(16, **ways[way].get('acc', {})),CallAt(event, cancel_large)])
        assert entries(collected)=={'micro-batch-left-out'}

@pytest.mark.parametrize('name', ['__call__','__getattr__'])
def test_callbacks_that_find_their_methods_in_their_own_way_are_called(name):
    class Clips(Callback):
        def clip(self): nn.utils.clip_grad_norm_(self.learn.model.parameters(), .01)
    def call(self, event):
        if event=='before_step': self.clip()
    def getattr_(self, k):
        if k=='before_step': return self.clip
        return Callback.__getattr__(self, k)
    setattr(Clips, name, dict(__call__=call, __getattr__=getattr_)[name])
    a,b = both_runs(n=70, cbs=lambda: [Clips()], fit=fit)
    assert_same_run(a, b)
    plain,_ = both_runs(n=70, fit=fit)
    assert deviation(weights(a), weights(plain))>1e-2

# Parts of a loss

class TwoParts(CrossEntropy):
    "Keeps the parts of the loss in attributes, one of them as a plain number, and a factor that a callback may set"
    factor = .1
    def forward(self, pred, targ):
        self.ce = super().forward(pred, targ)
        self.size = pred.pow(2).mean()
        self.size_number = self.size.item()
        return self.ce+self.factor*self.size

@pytest.mark.parametrize('way', ways)
def test_parts_of_a_loss_are_those_of_the_step_in_after_batch(way):
    def parts(learn): return [float(getattr(learn.loss_func, k)) for k in ('ce','size','size_number')]
    def balance(learn): learn.loss_func.factor = float(learn.loss_func.ce/learn.loss_func.size)/10
    def run(micro, *cbs):
        note = RecordAt('after_batch', lambda l: (parts(l),balance(l))[0])
        learn = toy(micro, n=70, loss_func=TwoParts())
        learn.fit(2, 0.1, cbs=[note,*cbs])
        return learn,note.values
    micro,acc = ways[way]['micro'],ways[way].get('acc', {})
    (a,of_a),(b,of_b) = run(16),run(micro, GradientAccumulation(16, **acc))
    assert deviation(of_a, of_b)<1e-7 and deviation(weights(a), weights(b))<1e-9
    assert isinstance(b.loss_func.size_number, float)

def test_a_loss_goes_on_from_its_own_numbers():
    "A moving average that a loss keeps is not replaced by the mean over a step"
    class Averages(CrossEntropy):
        seen = ()
        def forward(self, pred, targ):
            before = getattr(self, 'average', torch.zeros((), dtype=pred.dtype))
            self.seen = [*self.seen,before.item()]
            self.average = before*.9+.1*super().forward(pred, targ).detach()
            return super().forward(pred, targ)
    plain,accumulated = (toy(4, n=64, loss_func=Averages()) for _ in range(2))
    with collect_warnings():
        plain.fit(1, 0., cbs=())
        accumulated.fit(1, 0., cbs=GradientAccumulation(16))
    assert deviation(plain.loss_func.seen, accumulated.loss_func.seen)<1e-9

# What changes within a step is told, whenever it begins

class CountsBatches(Trains):
    "Anneals a factor of the loss by a counter of batches, of which nobody else knows"
    def before_fit(self): self.n = 0
    def before_batch(self): self.n += 1
    def after_loss(self): self.learn.loss_grad = self.learn.loss_grad*(1/self.n)

class AveragesWeights(Trains):
    "Changes a layer in `before_batch`, as an encoder that follows another one"
    def before_batch(self):
        with torch.no_grad(): self.model[4].bias.mul_(.9)

class SecondPass(Trains):
    "Runs the model again in `before_step`, from a given epoch on"
    def __init__(self, epoch): self.first = epoch
    def before_step(self):
        if self.epoch>=self.first: self.learn.loss_func(self.model(self.x), self.y).backward()

class Clips(Trains):
    def after_backward(self): nn.utils.clip_grad_norm_(self.model.parameters(), .01)

class SwitchesOn(Callback):
    "Lets the callbacks `cbs` run from the second epoch on"
    def __init__(self, *cbs): self.cbs = cbs
    def before_epoch(self):
        for o in self.cbs: o.run = self.epoch>0

def mlp(dtype): return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)
def in_dtype(dtype):
    "Return arguments of `toy` for a model and inputs of the data type"
    x,y = toy_data(64).tensors
    return dict(model=lambda: mlp(dtype), splitter=lambda m: [list(m.parameters())], loss_func=CrossEntropyLossFlat(),
        data=TensorDataset(x.to(dtype), y))

@pytest.mark.parametrize('make,entry,kwargs', [
    (CountsBatches,'changes-within-a-step',{}), (AveragesWeights,'changes-within-a-step',{}),
    (lambda: SecondPass(0),'second-pass',{}), (lambda: SecondPass(1),'second-pass',{}),
    (Clips,'gradients-changed',{}), (Clips,'gradients-changed',in_dtype(torch.bfloat16)),
    (MixUp,'mixed-in-micro-batches',in_dtype(torch.float32))])
def test_what_changes_within_a_step_is_told_in_the_epoch_in_which_it_begins(make, entry, kwargs):
    learn = toy(4, n=64, **kwargs)
    cb = make()
    with collect_warnings() as collected: learn.fit(2, 0.01, cbs=[cb,SwitchesOn(cb),GradientAccumulation(16)])
    assert entry in entries(collected)

def test_a_second_pass_is_told_when_a_schedule_joins_batches():
    with collect_warnings() as collected:
        toy(4, n=64).fit(2, .01, cbs=[SecondPass(0),GradientAccumulationScheduler({0:1, 1:4})])
    assert entries(collected)>={'second-pass'}

def test_a_counter_that_is_the_same_within_a_step_is_not_told():
    "Nor is a counter of steps, or one of batches that are split after `before_batch`"
    class CountsSteps(CountsBatches):
        def before_batch(self): pass
        def after_batch(self): self.n += 1
        def after_loss(self): pass
    class OnlyCounts(CountsBatches):
        def after_loss(self): pass
    for cb,micro,acc in ((CountsSteps(),4,{}), (OnlyCounts(),16,dict(micro_batch_size=4))):
        with collect_warnings() as collected: toy(micro, n=64).fit(2, cbs=[cb,GradientAccumulation(16, **acc)])
        assert not collected

def test_optimizers_in_a_dict_are_found():
    class TwoOptimizers(Trains):
        def before_fit(self):
            self.own = nn.Parameter(torch.ones(()))
            self.opts = dict(first=torch.optim.SGD([self.own], .1))
        def after_loss(self): self.learn.loss_grad = self.learn.loss_grad+self.own*0
        def before_batch(self): self.opts['first'].zero_grad()
    with collect_warnings() as collected: toy(4, n=64).fit(1, cbs=[TwoOptimizers(),GradientAccumulation(16)])
    assert 'second-optimizer' in entries(collected)

def test_samples_that_are_lost_while_batches_are_made_are_told():
    learn = toy(4, n=64)
    def drop_first(items): return torch.utils.data.default_collate(items[1:])
    learn.dls.train.create_batch = drop_first
    with collect_warnings() as collected: learn.fit(1, cbs=GradientAccumulation(16))
    assert 'fewer-batches' in entries(collected)

# State that stays, and what must not be told

@pytest.mark.parametrize('kwargs', [{},dict(tokens=True)], ids=['sgd','tokens'])
def test_gradients_stay_over_a_step_that_is_cancelled_before_its_backward_pass(kwargs):
    "They are added to those of the next step that has any, also in the next epoch"
    def cancels(event, steps):
        def cancel(learn):
            if learn.iter in steps: raise CancelBatchException
        return CallAt(event, cancel)
    def cbs(): return [cancels('after_backward', (1,3)),cancels('before_batch', (2,4))]
    a,b = both_runs(n=70, cbs=cbs, fit=fit, **kwargs)
    assert deviation(weights(a), weights(b))<1e-9

def test_own_gradients_are_refused_also_if_another_callback_hears_everything():
    class Hears(Callback):
        def __call__(self, event): pass
    def own_gradients(learn):
        for p in learn.model.parameters(): p.grad = torch.ones_like(p)
        raise CancelBackwardException
    with pytest.raises(RuntimeError, match='ActivationCheckpoint'):
        toy(4, n=64).fit(1, cbs=[Hears(),CallAt('before_backward', own_gradients),GradientAccumulation(16)])

def test_a_constraint_that_changes_weights_only_once_is_not_told():
    class Limits(Trains):
        def before_batch(self):
            with torch.no_grad(): self.model[0].weight.clamp_(-.1, .1)
    class Rescales(Trains):
        def before_batch(self): self.model[0].weight.data = nn.functional.normalize(self.model[0].weight.data)
    for cb in (Limits,Rescales):
        with collect_warnings() as collected: a,b = both_runs(n=64, cbs=lambda: [cb()], fit=fit)
        assert not collected and assert_same_run(a, b)

def test_plain_numbers_of_a_loss_are_averaged_over_all_micro_batches_and_put_back_if_a_fit_ends():
    class Hits(CrossEntropy):
        hit,beta = 0.,.7
        def forward(self, pred, targ):
            self.hit = 1. if 0 in targ[:1] else 0.
            self.last = self.hit
            return super().forward(pred, targ)
    learn = toy(4, n=64, loss_func=Hits())
    means,firsts = [],[float(y==0) for _,y in learn.dls.train_ds][::4]
    def note(learn):
        means.append(learn.loss_func.hit)
        assert learn.loss_func.beta==.7
        if learn.iter==2: raise CancelFitException
    learn.fit(1, cbs=[CallAt('after_batch', note),GradientAccumulation(16)])
    assert means==[sum(o)/4 for o in (firsts[:4],firsts[4:8],firsts[8:12])] and 0<sum(means)<3
    assert learn.loss_func.hit==learn.loss_func.last==firsts[11]

def test_attributes_that_refer_to_themselves_do_not_matter():
    cb = Trains()
    cb.own = {}
    cb.own['self'] = cb.own
    toy(4, n=64).fit(1, cbs=[cb,GradientAccumulation(16)])
