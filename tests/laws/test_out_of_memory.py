"""With `micro_batch_size='auto'`, a fit continues with smaller micro-batches wherever memory runs out.

A forward or backward pass that ran out of memory is undone, and the run is the full-batch run.
"""
import numpy as np, pytest, random, torch, warnings
from functools import partial
from hypothesis import example, given, strategies as st
from torch import nn
from torch.utils.data import TensorDataset
from fastai.vision.all import Callback, GradientClip, LossMetrics, accuracy, set_seed
from fastaccum import AutoSize, GradientAccumulation, GradientCache, StateWarning
from fastaccum.step.split import Division
from fastaccum.testing import CrossEntropy, assert_same_run, one_cycle, toy
from common import (CpuLossScaling, CpuMixedPrecision, LimitedMemory, RaiseAt, RecordAt, collect_warnings,
    runs_out_above, runs_out_on_attempts, weights_unchanged)
from small_learners import all_params, replaced_methods
from test_split import fit_with_small_rate, no_shrinking, opts

pytestmark = pytest.mark.filterwarnings('ignore:memory ran out', 'ignore:.*are larger than `accum_bs')

class CountsCalls(LimitedMemory):
    """A layer that counts its calls and samples

    After memory has run out, fastaccum must restore both counts.
    """
    def __init__(self, runs_out):
        super().__init__(runs_out)
        self.calls,self.sizes = 0,[]
        self.register_buffer('trained', torch.tensor(0))
    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        if self.training: self.trained += len(x)
        return super().forward(x)

class Loss(CrossEntropy):
    "A loss that needs memory of its own, in the stage 'loss'"
    def __init__(self, memory, weight):
        super().__init__(weight)
        self.memory = [memory]   # in a list, so that it is not a child module
    def forward(self, pred, targ):
        if torch.is_grad_enabled(): self.memory[0].check('loss', len(pred))
        self.own = pred.pow(2).mean()   # `LossMetrics('own')` reads this
        return super().forward(pred, targ)

def learner(bs, runs_out=None, norm=nn.Tanh, weight=None, **kwargs):
    "Return a Learner whose model and loss run out of memory where `runs_out(stage, n)` is true"
    memory = CountsCalls(runs_out)
    def net(): return nn.Sequential(nn.Linear(5, 6), norm(), memory, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    return toy(bs, model=lambda: net().double(), loss_func=Loss(memory, weight), **kwargs)

auto = partial(GradientAccumulation, micro_batch_size='auto', drop_last=False)

def full_batch_and_limited(bs, accum, runs_out, cbs=list, acc=auto, **kwargs):
    "Return two Learners: one of the full-batch run, one trained on batches of `bs` with little memory"
    a,b = learner(-(-accum//bs)*bs, **kwargs),learner(bs, runs_out, **kwargs)
    for learn,accumulation in ((a,[]),(b,[acc(accum)])):
        torch.manual_seed(0)
        fit_with_small_rate(learn, accumulation+cbs())
    return a,b

def test_an_odd_number_of_samples_is_halved():
    learn = learner(7, runs_out_above(4, 'backward'), n=7)
    learn.fit(1, cbs=auto(7))
    memory = next(o for o in learn.model if isinstance(o, CountsCalls))
    assert memory.sizes[:2]==[4,3]   # the failed pass with 7 samples was undone

extras = [list,lambda: [GradientClip(0.05)],lambda: [CpuLossScaling(init_scale=2.**10, growth_interval=3)]]
stages = ['forward','loss','backward']

@no_shrinking
@example(stage='backward', cap=2, bs=8, accum=24, attempts={1}, n=32, opt_func=opts[0], cbs=list, tokens=False,
    shuffle=False)   # memory runs out in the middle of a step
@given(stage=st.sampled_from(stages), cap=st.integers(1, 12), bs=st.integers(2, 20), accum=st.integers(4, 32),
    attempts=st.none()|st.sets(st.integers(0, 20), max_size=5), n=st.integers(32, 60), opt_func=st.sampled_from(opts),
    cbs=st.sampled_from(extras), tokens=st.booleans(), shuffle=st.booleans())
def test_the_run_is_the_full_batch_run(stage, cap, bs, accum, attempts, **kwargs):
    "Memory holds `cap` samples, or runs out in passes of this stage with a number in `attempts`"
    if kwargs['tokens'] and stage=='loss': return   # `Loss` would count tokens, not samples
    runs_out = runs_out_above(cap, stage) if attempts is None else runs_out_on_attempts(attempts, stage)
    a,b = full_batch_and_limited(bs, accum, runs_out, metrics=accuracy, **kwargs)
    assert_same_run(a, b, tol=1e-5)   # Adam divides by numbers that are nearly zero

@pytest.mark.parametrize('stage', stages)
def test_the_size_is_halved_until_it_fits_with_one_warning(stage):
    "The next fit with the same callback begins with the size that fits, and does not warn"
    acc,sizes = auto(32),RecordAt('after_backward', lambda l: len(l.x))
    learn = learner(16, runs_out_above(5, stage), n=48)
    with pytest.warns(UserWarning) as collected:
        for _ in range(2): learn.fit(1, 0.1, cbs=[acc,sizes])
    lines = [str(o.message).split('\n')[0] for o in collected if 'memory ran out' in str(o.message)]
    assert len(lines)==1 and 'a micro-batch of 16 samples' in lines[0] and 'at most 4 samples' in lines[0]
    assert 'planted' in lines[0]
    assert sizes.values==[4]*24

# A pass that runs out of memory leaves nothing behind

@pytest.mark.parametrize('stage', ['loss','backward'])
@pytest.mark.parametrize('norm', [lambda: nn.BatchNorm1d(6),lambda: nn.Dropout(0.3)], ids=['batchnorm','dropout'])
def test_the_run_is_that_of_a_fit_which_begins_with_smaller_micro_batches(norm, stage):
    "Random numbers, BatchNorm statistics and counts are those of a run with enough memory"
    class Draw(Callback):
        order,run_valid = -55,False
        def after_pred(self): self.now = random.random(),np.random.rand(),torch.rand(1).item()
        def after_backward(self): self.recorder.drawn.append(self.now)
    def run(bs, runs_out, micro):
        learn = learner(bs, runs_out, norm, n=64)
        learn.recorder.drawn = []
        set_seed(0)
        learn.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size=micro),Draw()])
        return learn
    a,b = run(2, None, None),run(16, runs_out_above(3, stage), 'auto')
    assert_same_run(a, b)
    assert a.recorder.drawn==b.recorder.drawn
    assert (a.model[2].calls,a.model[2].sizes)==(b.model[2].calls,b.model[2].sizes)

@pytest.mark.parametrize('stage', stages)
def test_autocast_is_off_after_a_fit_in_which_memory_ran_out(stage):
    def state(l): return torch.is_autocast_enabled('cpu')
    learn = learner(16, runs_out_above(3, stage), data=TensorDataset(torch.randn(64, 5), torch.randint(0, 3, (64,))))
    learn.model.float()
    before,during = RecordAt('before_batch', state, order=5),RecordAt('after_pred', state, order=20)
    learn.fit(1, 0.1, cbs=[auto(32),CpuMixedPrecision('bf16'),before,during])
    assert set(before.values)=={False} and set(during.values)=={True} and not state(None)
    learn.model[2].runs_out = runs_out_above(0, stage)
    with pytest.raises(torch.OutOfMemoryError): learn.fit(1, 0.1, cbs=[auto(32),CpuMixedPrecision('bf16')])
    assert not state(None)

# Validation, and errors that are raised

@pytest.mark.parametrize('weight', [None,torch.tensor([.01,.02,.03], dtype=torch.float64)], ids=['mean','weights'])
def test_validation_batches_are_split(weight):
    """Losses and metrics are those of whole batches

    Validation has its own size, whatever fits in training.
    """
    def runs_out(stage, n): return stage=='validation' and n>9 or stage=='loss' and n>4
    sizes = RecordAt('after_loss', lambda l: len(l.pred))
    sizes.run_valid,sizes.run_train = True,False
    more = dict(n=90, metrics=[accuracy,*LossMetrics('own')], weight=weight)
    assert_same_run(*full_batch_and_limited(16, 32, runs_out, cbs=lambda: [sizes], **more))
    assert max(sizes.values[-12:])<=9   # the list begins with the sizes of the full-batch run

class KeepsFloat(CrossEntropy):
    "Keeps the mean class of its targets as a plain number, for a `LossMetric`"
    def forward(self, p, y):
        self.own = y.float().mean().item()
        return super().forward(p, y)

@pytest.mark.parametrize('ignore_index', [-100,0])
def test_a_split_validation_batch_averages_plain_numbers_and_may_ignore_all_targets(ignore_index):
    "With `ignore_index=0`, all targets are 0, and the loss is NaN with and without a split"
    rows = []
    for cap in (10**9,4):
        def runs_out(stage, n): return stage=='validation' and n>cap
        learn = learner(16, runs_out, n=64, metrics=[*LossMetrics('own')])
        learn.loss_func = KeepsFloat(ignore_index=ignore_index)
        x,y = learn.dls.valid.dataset.tensors
        learn.dls.valid.dataset = TensorDataset(x, y.sort().values*(ignore_index!=0))
        with collect_warnings(): learn.fit(1, 0., cbs=auto(16))
        rows.append(learn.recorder.values[-1][1:])
    whole,split = map(torch.tensor, rows)
    assert torch.allclose(whole, split, equal_nan=True) and split.isnan().any()==(ignore_index==0)

@pytest.mark.parametrize('acc', [auto(32),GradientCache(micro_batch_size='auto')])
def test_an_error_is_raised_if_a_single_sample_does_not_fit(acc):
    "No weight changes, and the next fit gives no warning"
    learn = learner(16, runs_out_above(0, 'forward'), n=64)
    with weights_unchanged(learn), pytest.raises(torch.OutOfMemoryError, match='single sample.*planted'):
        learn.fit(1, 0.1, cbs=acc)
    assert not replaced_methods(learn)
    learn.model[2].runs_out = None
    with collect_warnings('error'):
        warnings.filterwarnings('ignore', category=StateWarning)   # the layer counts its samples in a buffer
        learn.fit(1, 0.1, cbs=acc)

@pytest.mark.parametrize('event,exc,skip', [('after_pred',RuntimeError,1),('before_backward',KeyboardInterrupt,1),
    *((o,torch.OutOfMemoryError,1) for o in ('after_backward','before_step','after_step')),
    ('after_batch',torch.OutOfMemoryError,3)])
def test_other_errors_are_raised_and_no_step_is_repeated(event, exc, skip):
    "Other errors include those of memory that runs out after the backward pass, in or after the step"
    learn,cb = learner(16, n=64),RaiseAt(event, exc, 70, skip=skip)
    with pytest.raises(exc, match='planted'): learn.fit(1, 0.1, cbs=[auto(32),cb])
    # an interrupt within a trial of the loss restores the number that the callback has heard
    assert cb.raised and cb.n_heard==(0 if exc is KeyboardInterrupt else skip+1)

# A `Division` of the user

class PairDivision(Division):
    "Keeps rows `2*i` and `2*i+1` in the same micro-batch"
    def end_of(self, start, end, max_samples):
        n_rows = super().end_of(start, end, max_samples)-start
        return min(end, start+max(2, n_rows//2*2))

class AutoPairs(AutoSize):
    "Splits batches where memory runs out, between pairs"
    def divide(self, model, xb, yb, n, warn_once): return PairDivision(n, self.split)

class CentrePairs(nn.Module):
    "Subtracts from each row the mean of its pair; a row without a partner stays as it is"
    def forward(self, x):
        n = len(x)//2*2
        pairs = x[:n].unflatten(0, (-1,2))
        return torch.cat([(pairs-pairs.mean(1, keepdim=True)).flatten(0, 1), x[n:]])

def pairs_learner(cap, stage):
    "Return a Learner whose memory runs out in this stage with more than `cap` samples"
    memory = LimitedMemory(runs_out_above(cap, stage))
    return toy(12, n=48, model=lambda: nn.Sequential(nn.Linear(5, 3), CentrePairs(), memory).double(),
        splitter=all_params)

def pairs_accumulated(): return GradientAccumulation(12, micro_batch_size=AutoPairs())
def pairs_cached(): return GradientCache(micro_batch_size=AutoPairs())

@pytest.mark.parametrize('acc', [pairs_accumulated,pairs_cached])
@pytest.mark.parametrize('stage', ['forward','backward'])
@pytest.mark.filterwarnings('ignore:memory ran out')
def test_a_division_of_the_user_also_divides_what_runs_again(acc, stage):
    "Half of a batch of 12 has 6 rows, and half of that would separate a pair, which changes the result"
    full,limited = pairs_learner(10**9, stage),pairs_learner(3, stage)
    one_cycle(full, [])
    one_cycle(limited, [acc()])
    assert_same_run(full, limited)

@pytest.mark.parametrize('acc', [pairs_accumulated,pairs_cached])
@pytest.mark.parametrize('stage', ['forward','backward'])
def test_an_error_is_raised_if_rows_that_stay_together_do_not_fit(acc, stage):
    learn = pairs_learner(1, stage)
    with weights_unchanged(learn), pytest.raises(torch.OutOfMemoryError, match='2 samples that are kept together'):
        learn.fit(1, 0.1, cbs=acc())

# A `split` function of the user

def test_a_split_function_of_the_user_is_called():
    calls = []
    def split(b, start, stop, n):
        calls.append((start,stop,n))
        return tuple(o[start:stop] for o in b)
    def acc(n): return GradientAccumulation(n, micro_batch_size=AutoSize(split=split), drop_last=False)
    assert_same_run(*full_batch_and_limited(8, 16, runs_out_above(3, 'loss'), acc=acc, n=48))
    assert {(0,2,8),(6,8,8)}<=set(calls)

def test_changed_gradients_are_warned_of_in_a_fit_after_one_in_which_memory_ran_out():
    "In the second fit, a callback empties the gradients before each micro-batch"
    acc = auto(32)
    learn = learner(16, runs_out_above(8, 'backward'))
    with collect_warnings(): learn.fit(1, 0.1, cbs=acc)
    with collect_warnings() as collected:
        learn.fit(1, 0.1, cbs=[acc,RecordAt('after_pred', lambda l: l.opt.zero_grad())])
    assert any('#gradients-changed' in str(o.message) for o in collected)
    with collect_warnings() as collected: learn.fit(1, 0.1, cbs=acc)
    assert not [o for o in collected if '#gradients-changed' in str(o.message)]
