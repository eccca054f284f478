"""What a fuzzer found wrong and silent: each is the full-batch run now, or the fit refuses it or warns of it."""
import numpy as np, pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader as TorchDataLoader, IterableDataset, SubsetRandomSampler
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.data import PartialDL
from fastai.learner import Learner
from fastaccum import GradientAccumulation, GradientCache
from fastaccum.testing import CrossEntropy, assert_same_run, both_runs, deviation, toy, toy_data
from common import CallAt, RecordAt, weights, weights_unchanged
from test_warned import count_warnings, fit, not_a_mean, warnings_and_runs, weights_apart

# A Learner's own `one_batch`

class DoublesInputs(Learner):
    def one_batch(self, i, b):
        self.iter = i
        self._split((b[0]*2,b[1]))
        self._with_events(self._do_one_batch, 'batch', CancelBatchException)

def trains_twice(learn, i, b):
    for _ in range(2): Learner.one_batch(learn, i, b)

def of_the_class(learn): learn.__class__ = DoublesInputs
def of_the_instance(learn): learn.one_batch = partial(trains_twice, learn)

@pytest.mark.parametrize('give', [of_the_class,of_the_instance])
def test_a_one_batch_that_is_not_fastais_is_refused(give):
    learn = toy(4)
    give(learn)
    with weights_unchanged(learn), pytest.raises(ValueError, match='(?s)own `one_batch`.*#own-training-loop'):
        learn.fit(1, 0.1, cbs=GradientAccumulation(16))

# Hooks on parameters

def clips(g): return g.clamp(-.02, .02)
def normalizes(g): return g/g.norm()
on_parameters = ('AccumulationWarning','parameter-hooks')

def hooked(*args, hook=clips, trains=True, **kwargs):
    learn = toy(*args, **kwargs)
    weight = learn.model[2].weight
    if hook: weight.register_hook(hook)
    weight.requires_grad_(trains)
    return learn

@pytest.mark.parametrize('hook', [clips,normalizes])
def test_a_hook_on_a_parameter_is_told_and_named_in_the_check(hook):
    said,a,b = warnings_and_runs(make=partial(hooked, hook=hook))
    assert said=={on_parameters:1} and weights_apart(a, b)>1e-4
    row, = [o for o in hooked(4, hook=hook).accum_check(16).rows if o.what=='gradients']
    assert not row.ok and 'the hook on the parameter 2.weight' in row.where and 'before_step' in row.remedy

@pytest.mark.parametrize('kwargs', [dict(trains=False),dict(hook=None)])
def test_a_hook_that_does_not_run_is_not_told(kwargs):
    assert not warnings_and_runs(make=partial(hooked, **kwargs))[0]

def test_a_hook_on_a_parameter_is_right_where_a_batch_is_a_step():
    said,a,b = warnings_and_runs(make=hooked, micro=16)
    assert not said and weights_apart(a, b)<1e-12

# Loaders whose samples are hard to count

class Stream(IterableDataset):
    "A stream of `n` samples that knows its length"
    def __init__(self, n): self.data = toy_data(n)
    def __len__(self): return len(self.data)
    def __iter__(self): return iter(self.data)

def stream(bs): return TorchDataLoader(Stream(70), batch_size=bs)
def partly(bs): return PartialDL(toy_data(90), bs=bs, partial_n=70)
def subset(bs):
    sampler = SubsetRandomSampler(range(70), generator=torch.Generator().manual_seed(0))
    return TorchDataLoader(toy_data(90), batch_sampler=BatchSampler(sampler, bs, drop_last=False))

@pytest.mark.parametrize('dl', [stream,partly,subset])
@pytest.mark.parametrize('bs,acc,full', [(32,dict(micro_batch_size=4),16), (8,dict(drop_last=True),24)])
def test_a_plan_has_as_many_steps_as_the_loader_has_samples_for(dl, bs, acc, full):
    learn,rates = toy(4),[]
    learn.dls.loaders[0] = dl(bs)
    np.random.seed(0)
    said = count_warnings(lambda: learn.fit_one_cycle(2, 0.1, cbs=GradientAccumulation(full, **acc)))
    n = 70//full if 'drop_last' in acc else -(-70//full)
    assert not said and len(learn.recorder.lrs)==2*n and abs(learn.pct_train-1)<1e-9

class Announces:
    "A loader of `n` samples, one batch after the other, which announces `n_batches`"
    def __init__(self, n, bs, n_batches): self.ds,self.bs,self.n_batches = toy_data(n),bs,n_batches
    def __len__(self): return self.n_batches
    def __iter__(self): return iter([self.ds[i:i+self.bs] for i in range(0, len(self.ds), self.bs)])

# batches announced, of 4 samples, where the loader has 66 samples; are there too few for the planned steps of 16?
@pytest.mark.parametrize('n_batches,acc,told', [(17,{},False), (20,{},False), (21,{},True), (30,{},True),
    (17,dict(drop_last=True),False), (20,dict(drop_last=True),True), (20,dict(micro_batch_size=2),False)])
def test_fewer_batches_than_planned_are_told(n_batches, acc, told):
    learn = toy(4)
    learn.dls.loaders[0] = Announces(66, 4, n_batches)
    said = count_warnings(lambda: learn.fit(2, 0.01, cbs=GradientAccumulation(16, **acc)))
    assert said==({('','fewer-batches'):1} if told else {})
    assert (learn.pct_train<1-1e-9)==told

def test_micro_batches_that_a_callback_cancels_are_not_missed_in_the_loader():
    def odd(learn):
        if learn.iter%2: raise CancelBatchException
    said = count_warnings(lambda: toy(4).fit(2, 0.01, cbs=[GradientAccumulation(16),CallAt('before_batch', odd)]))
    assert ('','fewer-batches') not in said

# Losses with a state

class Centred(nn.Module):
    "Subtracts a running mean of the predictions, like DINO's loss"
    def __init__(self):
        super().__init__()
        self.register_buffer('centre', torch.zeros(3).double())
    def forward(self, p, y):
        loss = F.cross_entropy(p-self.centre, y)
        self.centre = .9*self.centre+.1*p.detach().mean(0)
        return loss

class WarmsUp(nn.CrossEntropyLoss):
    "Grows over its first 40 calls"
    n_calls = 0
    def forward(self, p, y):
        self.n_calls += 1
        return super().forward(p, y)*min(1, self.n_calls/40)

class Counts(nn.CrossEntropyLoss):
    "Counts its calls, which does not change its value"
    n_calls = 0
    def forward(self, p, y):
        self.n_calls += 1
        return super().forward(p, y)

with_state = ('StateWarning','loss-with-state')

@pytest.mark.parametrize('loss', [Centred,WarmsUp])
def test_a_loss_that_depends_on_its_calls_before_is_told_and_the_cache_is_exact(loss):
    said,a,b = warnings_and_runs(loss_func=loss())
    assert said=={with_state:1} and weights_apart(a, b)>1e-4
    a,b = (toy(16, loss_func=loss()) for _ in range(2))
    fit(a, None)
    fit(b, GradientCache(micro_batch_size=4))
    assert weights_apart(a, b)<1e-12

def test_a_loss_that_only_counts_its_calls_is_right():
    said,a,b = warnings_and_runs(loss_func=Counts())
    assert not said and weights_apart(a, b)<1e-7

# Losses that do something else in training

def hardest(p, y, *, trains):
    "The mean of the losses, in training of the larger half"
    losses = F.cross_entropy(p, y, reduction='none')
    return losses.topk(max(1, len(y)//2)).values.mean() if trains(p, losses) else losses.mean()

@pytest.mark.parametrize('trains', [lambda p, losses: p.requires_grad, lambda p, losses: losses.requires_grad,
    lambda p, losses: torch.is_grad_enabled()])
def test_a_loss_is_tried_as_it_is_in_training(trains):
    said,a,b = warnings_and_runs(loss_func=partial(hardest, trains=trains))
    assert said=={not_a_mean:1} and weights_apart(a, b)>1e-4

def test_a_loss_may_write_into_the_predictions_that_it_is_tried_on():
    def in_place(p, y): return F.cross_entropy(p.mul_(2) if p.requires_grad else p*2, y)
    said,a,b = warnings_and_runs(loss_func=in_place)
    assert not said and weights_apart(a, b)<1e-7

# Counters of steps

class SetsRate(Callback):
    "Sets the learning rate by the number of steps so far"
    def before_step(self): self.opt.set_hyper('lr', 0.1/(1+self.train_iter))

def test_callbacks_count_steps_where_every_micro_batch_is_recorded():
    steps = RecordAt('before_batch', lambda l: l.train_iter)
    def run(bs, *cbs):
        learn = toy(bs)
        learn.fit(2, 0.1, cbs=[SetsRate(),*cbs])
        return learn
    a,b = run(16),run(4, steps, GradientAccumulation(16, log_accum_batch=False))
    assert (a.train_iter,b.train_iter)==(10,10) and weights_apart(a, b)<1e-9
    assert steps.values==[i//4 for i in range(18)]+[5+i//4 for i in range(18)]
    assert len(b.recorder.losses)==36

def test_those_who_record_every_micro_batch_count_micro_batches():
    rows = RecordAt('after_batch', lambda l: l.train_iter, order=51)
    toy(4).fit(2, 0.1, cbs=[rows,GradientAccumulation(16, log_accum_batch=False)])
    assert rows.values==list(range(1, 37))
