"""`micro_batch_size='auto'`: wherever memory runs out in a fit, it is undone and the fit goes on in smaller
micro-batches, with the full-batch run for a result."""
import gc, numpy as np, pytest, random, torch, warnings
from functools import partial
from hypothesis import Phase, given, settings, strategies as st
from torch import nn
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastaccum import GradientAccumulation, GradientAccumulationSchedule
from fastaccum.testing import CrossEntropy, assert_same_run, deviation, toy
from common import CpuMixedPrecision, InBackward, Raise, Seen, short_of, weights

pytestmark = pytest.mark.filterwarnings('ignore:memory ran out', 'ignore:.*are larger than `accum_bs')

@pytest.fixture(autouse=True)
def frozen():
    gc.freeze()   # garbage is collected each time memory runs out: fast without what is there already
    yield
    gc.unfreeze()

class Brittle(nn.Module):
    "Three layers; `short(where, n)` says whether memory runs out there with `n` samples"
    short = None
    def __init__(self, norm=nn.Tanh):
        super().__init__()
        self.a,self.norm,self.b,self.c = nn.Linear(5, 6),norm(),nn.Linear(6, 6),nn.Linear(6, 3)
        self.calls,self.sizes = 0,[]
        self.register_buffer('trained', torch.tensor(0))
    def check(self, where, n):
        if self.short and self.short(where, n): short_of(0, where)(n)
    def forward(self, x):
        n = len(x)
        self.calls += 1
        self.sizes.append(n)
        if self.training: self.trained += n
        h = self.norm(self.a(x))
        self.check('forward' if self.training else 'validation', n)
        # `b` and `c` have their gradients when this fails
        if self.training: h = InBackward.apply(h, lambda n: self.check('backward', n))
        return self.c(self.b(h).tanh())

class Loss(CrossEntropy):
    def __init__(self, model): super().__init__(); self.model = [model]   # no part of this module
    def forward(self, pred, targ):
        if torch.is_grad_enabled(): self.model[0].check('loss', len(pred))
        return super().forward(pred, targ)

def learner(bs, short=None, norm=nn.Tanh, opt_func=partial(SGD, mom=0.9), **kwargs):
    learn = toy(bs, model=lambda: Brittle(norm).double(), opt_func=opt_func, splitter=lambda m:
        [list(m.a.parameters())+list(m.norm.parameters()),list(m.b.parameters())+list(m.c.parameters())], **kwargs)
    learn.loss_func,learn.model.short = Loss(learn.model),short
    return learn

def above(cap, where): return lambda at,n: at==where and n>cap

def at_times(times, where, cap=1):
    "Memory runs out at some of the attempts, counted from 0"
    tries = [-1]
    def short(at, n):
        tries[0] += at==where
        return at==where and n>cap and tries[0] in times
    return short

auto = partial(GradientAccumulation, micro_batch_size='auto', drop_last=False)

def one_cycle(learn, cbs): learn.fit_one_cycle(2, 0.02, cbs=cbs)

def full_and_short(bs, accum, short, cbs=list, fit=one_cycle, acc=auto, **kwargs):
    "The full-batch run with enough memory, and the one on batches of `bs` where memory is short"
    a,b = learner(-(-accum//bs)*bs, **kwargs),learner(bs, short, **kwargs)
    for learn,own in ((a,[]),(b,[acc(accum)])):
        torch.manual_seed(0)
        fit(learn, own+cbs())
    return a,b

def assert_same_trained(a, b, tol=1e-7):
    assert b.model.trained==a.model.trained   # no attempt that was undone is counted
    for o in (a,b): o.model.calls,o.model.sizes = 0,[]
    assert_same_run(a, b, tol=tol)

class Scaled(CpuMixedPrecision):
    "The loss scaling of mixed precision without the half precision, so that runs can be compared"
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast('cpu', enabled=False)

opts = [partial(SGD, mom=0.9),Adam,partial(OptimWrapper, opt=torch.optim.AdamW)]
extras = [list,lambda: [GradientClip(0.05)],lambda: [Scaled(init_scale=2.**10, growth_interval=3)]]
wheres = ['forward','loss','backward']

@settings(phases=[Phase.generate])   # shrinking a failure takes minutes
@given(where=st.sampled_from(wheres), cap=st.integers(1, 12), bs=st.integers(2, 20), accum=st.integers(4, 32),
    times=st.none()|st.sets(st.integers(0, 20), max_size=5), n=st.integers(32, 60), opt_func=st.sampled_from(opts),
    cbs=st.sampled_from(extras), tokens=st.booleans(), shuffle=st.booleans())
def test_the_run_is_the_full_batch_run(where, cap, bs, accum, times, **kwargs):
    "With any `cap`, or when memory is short now and then"
    if kwargs['tokens'] and where=='loss': return   # (that counts tokens)
    a,b = full_and_short(bs, accum, above(cap, where) if times is None else at_times(times, where), **kwargs)
    assert_same_trained(a, b, tol=1e-5)   # Adam divides by what is nearly zero

def lr_find(learn, cbs): learn.add_cbs(cbs).lr_find(num_it=8, show_plot=False)

@pytest.mark.parametrize('fit', [one_cycle,lr_find])
def test_train_metrics_schedules_and_lr_find(fit):
    "With a schedule of steps, where memory is short and where it is not"
    def scheduled(micro): return GradientAccumulationSchedule(8, 32, finish=0.5, micro_batch_size=micro)
    a,b = (learner(8, short, n=90, metrics=accuracy) for short in (None,above(3, 'loss')))
    for learn,micro in ((a,None),(b,'auto')):
        learn.recorder.train_metrics = True
        fit(learn, [scheduled(micro)] if fit is one_cycle else [GradientAccumulation(16, micro_batch_size=micro)])
    def told(l): return [getattr(l.recorder, o, 0) for o in ('losses','lrs','values','accum_bs')]
    assert deviation(told(a), told(b))<2e-6 and deviation(weights(a), weights(b))<1e-7

@pytest.mark.parametrize('where', wheres)
def test_the_size_is_halved_kept_and_said_once(where):
    "Also in the next fit with the same callback"
    acc,sizes = auto(32),Seen('after_backward', lambda l: len(l.x))
    learn = learner(16, above(5, where), n=48)
    with pytest.warns(UserWarning) as told:
        for _ in range(2): learn.fit(1, 0.1, cbs=[acc,sizes])
    said = [str(o.message).split('\n')[0] for o in told if 'memory ran out' in str(o.message)]
    assert len(said)==1 and '16 samples' in said[0] and 'planted' in said[0] and said[0].endswith('of 4')
    assert sizes.values==[4]*24

def test_the_size_is_logged(tmp_path):
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from fastai.callback.tensorboard import TensorBoardCallback
    board = TensorBoardCallback(tmp_path, trace_model=False, log_preds=False)
    learner(16, above(5, 'forward'), n=64).fit(1, 0.1, cbs=[auto(32),board])
    assert [o.value for o in EventAccumulator(str(tmp_path)).Reload().Scalars('micro_batch_size')]==[4.,4.]

# A failed attempt leaves nothing

@pytest.mark.parametrize('where', ['loss','backward'])
@pytest.mark.parametrize('norm', [lambda: nn.BatchNorm1d(6),lambda: nn.Dropout(0.3)], ids=['batchnorm','dropout'])
def test_it_is_the_run_with_smaller_micro_batches_to_begin_with(norm, where):
    "Random numbers, BatchNorm's statistics, and what modules count are those of a loader with such batches"
    learns,drawn = [],[]
    class Draw(Callback):
        order,run_valid = -55,False
        def after_pred(self): self.now = random.random(),np.random.rand(),torch.rand(1).item()
        def after_backward(self): drawn[-1].append(self.now)
    for bs,short in ((2,None),(16,above(3, where))):
        learn = learner(bs, short, norm, n=64)
        random.seed(0); np.random.seed(0); torch.manual_seed(0)
        drawn.append([])
        learn.fit(1, 0.1, cbs=[GradientAccumulation(32, micro_batch_size='auto' if short else None),Draw()])
        learns.append(learn)
    a,b = learns
    assert_same_trained(a, b)
    assert drawn[0]==drawn[1] and (a.model.calls,a.model.sizes)==(b.model.calls,b.model.sizes)

@pytest.mark.parametrize('where', wheres)
def test_autocast_is_left(where):
    def state(l): return torch.is_autocast_enabled('cpu')
    data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randint(0, 3, (64,)))
    learn = learner(16, above(3, where), data=data)
    learn.model.float()
    before,during = Seen('before_batch', state, order=5),Seen('after_pred', state, order=20)
    learn.fit(1, 0.1, cbs=[auto(32),CpuMixedPrecision('bf16'),before,during])
    assert set(before.values)=={False} and set(during.values)=={True} and not state(None)
    learn.model.short = above(0, where)
    with pytest.raises(torch.OutOfMemoryError): learn.fit(1, 0.1, cbs=[auto(32),CpuMixedPrecision('bf16')])
    assert not state(None)

# Validation, and what cannot be helped

def test_validation_is_split_too():
    "Its losses and metrics are those of whole batches; it finds a size of its own"
    def short(where, n): return where=='validation' and n>9 or where=='loss' and n>4
    seen = []
    class Valid(Callback):
        run_train = False
        def after_loss(self): seen.append(len(self.pred))
    a,b = full_and_short(16, 32, short, cbs=lambda: [Valid()], n=90, metrics=accuracy)
    assert_same_trained(a, b)
    assert max(seen[-12:])<=9   # after those of the full-batch run

def test_a_single_sample_that_does_not_fit():
    "No weight moves; and the next fit says nothing of it"
    learn,acc = learner(16, above(0, 'forward'), n=64),auto(32)
    before = weights(learn)
    with pytest.raises(torch.OutOfMemoryError, match='single sample.*planted'): learn.fit(1, 0.1, cbs=acc)
    assert weights(learn).equal(before)
    learn.model.short = None
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        learn.fit(1, 0.1, cbs=acc)

def test_an_error_of_the_allocator():
    def short(where, n): return where=='forward' and n>4 and torch.empty(2**58)   # more than any machine has
    assert_same_trained(*full_and_short(8, 16, short, n=48))

@pytest.mark.parametrize('event,exc,at', [('after_pred',RuntimeError,1),('after_loss',ValueError,1),
    ('before_backward',KeyboardInterrupt,1),
    *((o,torch.OutOfMemoryError,1) for o in ('after_backward','before_step','after_step')),
    ('after_batch',torch.OutOfMemoryError,3)])
def test_other_errors_pass_and_no_step_is_made_twice(event, exc, at):
    "Memory that runs out once the gradient is there, in the step or after it, is the user's to know of"
    learn,cb = learner(16, n=64),Raise(event, exc, 70, at=at)
    with pytest.raises(exc, match='planted'): learn.fit(1, 0.1, cbs=[auto(32),cb])
    assert cb.left==-1

# A split of one's own

from fastaccum import AutoSize

def test_a_split_of_ones_own_is_used():
    calls = []
    class Splits:
        def __call__(self, b, start, stop, n, more=None):
            calls.append((start,stop,n))
            return tuple(o[start:stop] for o in b)
    def acc(n): return GradientAccumulation(n, micro_batch_size=AutoSize(split=Splits()), drop_last=False)
    assert_same_trained(*full_and_short(8, 16, above(3, 'loss'), acc=acc, n=48))
    assert {(0,2,8),(6,8,8)}<=set(calls)

@pytest.mark.parametrize('f', ['auto',None,lambda b: b,lambda b,start,stop: b], ids=['text','none','one','three'])
def test_what_cannot_split_is_refused(f):
    with pytest.raises(TypeError, match='is no function of a batch'): AutoSize(split=f)
