"""With `micro_batch_size=16`, larger batches of a loader are split, whatever their structure.

The run is the full-batch run. It also is with `micro_batch_size='auto'`, which finds the size that fits
in memory.
"""
import pytest, torch
from collections import namedtuple
from copy import deepcopy
from functools import partial
from hypothesis import Phase, given, settings, strategies as st
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, TensorDataset
from fastai.vision.all import (Adam, Callback, CancelBatchException, CutMix, DataLoader, DataLoaders, GradientClip,
    Learner, OptimWrapper, RNNRegularizer, SGD, ShortEpochCallback, accuracy, noop)
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.step.split import MicroBatchLimit
from fastaccum.testing import CrossEntropy, assert_same_run, deviation, one_cycle, toy, toy_data
from common import CallAt, RecordAt, raise_oom_above, weights, weights_unchanged
from small_learners import (DoubleMixUp, MappingBatch, MixUpLoss, all_params, make_application, random_floats,
    random_ints, silence_in_double)

pytestmark = pytest.mark.filterwarnings('ignore:memory ran out')

def accumulating(accum, micro, acc=GradientAccumulation, **kwargs):
    """Return callbacks that accumulate with `micro_batch_size=micro`

    If `micro` is `('auto', cap)`, one of the callbacks runs out of memory with more than `cap` samples.
    """
    micro,*cap = micro if isinstance(micro, tuple) else (micro,)
    limits = [RecordAt('after_pred', lambda l: raise_oom_above(o, 'forward')(len(l.pred)), order=30) for o in cap]
    return [acc(accum, micro_batch_size=micro, **kwargs),*limits]

def full_and_split(bs, accum, micro, drop_last=False, cbs=list, fit=one_cycle, **kwargs):
    "Return two Learners: one trained on batches of `accum`, one on batches of `bs` that are split"
    a,b = toy(accum, whole=accum if drop_last else 1, **kwargs),toy(bs, **kwargs)
    for learn,accumulation in ((a,[]),(b,accumulating(accum, micro, drop_last=drop_last))):
        torch.manual_seed(0)
        fit(learn, accumulation+cbs())
    return a,b

def fit_with_small_rate(learn, cbs):
    learn.recorder.train_metrics = True
    learn.fit_one_cycle(2, 0.02, cbs=cbs)

# hypothesis would take minutes to simplify a failing example
no_shrinking = settings(phases=[Phase.generate])
opts = [partial(SGD, mom=0.9),Adam,partial(OptimWrapper, opt=torch.optim.AdamW)]

# no warning, even if a step is smaller than `micro_batch_size`
@pytest.mark.filterwarnings('error::UserWarning')
@no_shrinking
@given(bs=st.integers(2, 40), accum=st.integers(2, 40), micro=st.integers(1, 20), n=st.integers(50, 70),
    drop_last=st.sampled_from([None,True,False]), opt_func=st.sampled_from(opts),
    cbs=st.sampled_from([list,lambda: [GradientClip(0.05)]]), shuffle=st.booleans(), tokens=st.booleans())
def test_the_run_on_split_batches_is_the_full_batch_run(bs, micro, **kwargs):
    "The batch size `bs` of the loader may be smaller or larger than the samples of a step, `accum`"
    a,b = full_and_split(bs, micro=min(micro, bs-1), fit=fit_with_small_rate, metrics=accuracy, **kwargs)
    assert_same_run(a, b, tol=1e-5)   # Adam divides by numbers that are nearly zero

def even_parts(n, limit):
    "Return the sizes of the fewest parts of `n` samples that have at most `limit` samples each"
    k = -(-n//limit)
    return [n//k+(i<n%k) for i in range(k)]

@no_shrinking
@given(bs=st.integers(2, 30), accum=st.integers(1, 30), micro=st.integers(1, 20), n=st.integers(30, 60))
def test_micro_batches_are_of_even_size_and_each_is_part_of_one_batch_and_one_step(bs, accum, micro, n):
    "17 samples become 9 and 8, not 16 and 1, because BatchNorm cannot train on a single sample"
    micro = min(micro, bs-1)
    seen = RecordAt('after_pred', lambda l: len(l.pred))
    toy(bs, n=n).fit(1, 0.1, cbs=[GradientAccumulation(accum, micro_batch_size=micro, drop_last=False),seen])
    ends = sorted({*range(0, n, bs),*range(0, n, accum),n})
    assert seen.values==[o for a,b in zip(ends, ends[1:]) for o in even_parts(b-a, micro)]

# Batches of all structures: each of `kinds` puts the same inputs `x` and targets `y` into another
# structure

class OwnArguments(MappingBatch):
    "A mapping whose class takes other arguments than its items, so a part of it cannot be created"
    def __init__(self, a, b): super().__init__(dict(a=a, b=b))
Pair = namedtuple('Pair', 'a b')

def boxes(y, k):
    "Return a dict for each target, with its class and at most `k`-1 boxes"
    return [{'y':o[None],'boxes':torch.zeros((i+1)%k, 3)} for i,o in enumerate(y)]

kinds = dict(tensors=lambda x,y: (x,y), dicts=lambda x,y: ({'a':x,'b':x},{'y':y}), lists=lambda x,y: ([x,x],[y,y]),
    hugging=lambda x,y: (pytest.importorskip('transformers').BatchEncoding(dict(a=x, b=x)),y),
    mapping=lambda x,y: (MappingBatch(a=x, b=x),y), named=lambda x,y: (Pair(x,x),Pair(y,y)),
    texts=lambda x,y: ((x,None),(y,['name']*len(y))), samples=lambda x,y: ([*x],boxes(y, 4)),
    boxes=lambda x,y: (x,boxes(y, 3)), tuples=lambda x,y: (tuple(x),tuple(boxes(y, 2))))

def tensor_in(o):
    "Return the tensor with a row for each sample that is in `o`, the inputs or targets of any structure"
    if isinstance(o, torch.Tensor): return o
    if hasattr(o, 'keys'): return o['y'] if 'y' in o else o['a']
    if isinstance(o[0], dict): return torch.cat([x['y'] for x in o])
    return torch.stack(list(o)) if o[0].ndim==1 and o[0].is_floating_point() else o[0]

class Model(nn.Module):
    "A model of inputs of any structure"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(5, 6),nn.Linear(6, 3)
    def forward(self, x): return self.b(self.a(tensor_in(x)).tanh())

def learner(kind, n, bs):
    "Return a Learner whose batches are made by `kind(inputs, targets)`"
    def collate(items): return kind(*map(torch.stack, zip(*items)))
    dls = DataLoaders(*(TorchLoader(toy_data(n), o, collate_fn=collate) for o in (bs,8)))
    dls.n_inp = 1
    torch.manual_seed(0)
    learn = silence_in_double(Learner(dls, Model(), lambda p,*y: nn.functional.cross_entropy(p, tensor_in(y[0])),
        opt_func=partial(SGD, mom=0.9)))
    learn._set_device = noop   # fastai cannot move a named tuple to a device
    return learn

@pytest.mark.parametrize('kind', kinds)
@pytest.mark.parametrize('bs,accum,micro', [(10,4,3),(5,10,('auto',1)),(3,9,('auto',1)),(4,4,('auto',1))])
def test_batches_of_all_kinds_are_split(kind, bs, accum, micro):
    "In some cases, a batch has as many tensors as samples"
    a,b = learner(kinds[kind], 36, accum),learner(kinds[kind], 36, bs)
    a.fit(1, 0.05)
    b.fit(1, 0.05, cbs=accumulating(accum, micro, drop_last=False))
    assert_same_run(a, b)

@pytest.mark.parametrize('micro', [5,('auto',100)], ids=str)
@pytest.mark.parametrize('kind', [lambda x,y: (OwnArguments(x, x),y),lambda x,y: ([x,object()],y)],
    ids=['own_arguments','object'])
def test_a_batch_that_cannot_be_split_is_refused_before_a_weight_changes(kind, micro):
    learn = learner(kind, 20, 10)
    learn.model.forward = lambda x: learn.model.b(learn.model.a(x['a'] if isinstance(x, OwnArguments) else x[0]).tanh())
    with weights_unchanged(learn), pytest.raises(TypeError, match='cannot be split'):
        learn.fit(1, 0.1, cbs=accumulating(10, micro))

def test_batches_of_a_loader_without_a_size_are_split():
    "Each step is a whole batch of the loader, because `accum_bs` equals the size of its batches"
    learn,seen = toy(16, n=64),RecordAt('after_pred', lambda l: len(l.pred))
    learn.dls.loaders[0] = DataLoader(list(learn.dls.train), bs=None)
    with pytest.warns(UserWarning, match='a batch has 16 samples'):
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),seen])
    assert seen.values==[4]*16 and len(learn.recorder.losses)==4

# Schedules and searches

@pytest.mark.parametrize('bs,micro', [(36,4),(4,('auto',3))], ids=str)
@pytest.mark.parametrize('acc,arg', [(partial(GradientAccumulationSchedule, final_accum_bs=40),8),
    (GradientAccumulationScheduler,{1:4,2:1}),
    (partial(GradientAccumulationScheduler, mode='step'),{2:3,9:1,12:7})], ids=['smooth','epochs','steps'])
def test_a_schedule_is_the_same_if_batches_are_split(acc, arg, bs, micro):
    "The steps are compared with those of the schedule on a loader of micro-batches"
    a,b = toy(4, n=90),toy(bs, n=90)
    cbs = [accumulating(arg, o, acc, drop_last=False) for o in (None,micro)]
    for learn,accumulation in zip((a,b), cbs): learn.fit_one_cycle(3, 0.1, cbs=accumulation)
    assert_same_run(a, b)
    assert a.recorder.accum_bs==b.recorder.accum_bs and len(set(b.recorder.accum_bs))>1
    assert cbs[0][0].plan(a.dls, 3).sizes==cbs[1][0].plan(b.dls, 3).sizes

@pytest.mark.parametrize('bs,accum,micro', [(32,8,4),(16,16,4),(8,24,4),(8,16,('auto',3))], ids=str)
def test_lr_find_gives_the_points_of_full_batches_if_batches_are_split(bs, accum, micro):
    def fit(learn, cbs): learn.add_cbs(cbs).lr_find(num_it=12, show_plot=False)
    recs = [o.recorder for o in full_and_split(bs, accum, micro, fit=fit, n=90)]
    assert len(recs[1].lrs)==12 and all(deviation(*(getattr(o, k) for o in recs))<2e-6 for k in ('losses','lrs'))

# Callbacks see the whole batch in `before_batch`

def mixes(l):
    "Add noise to each sample, and normalize by the statistics of the batch"
    x = l.x+torch.randn_like(l.x)
    l.xb = ((x-x.mean(0))/x.std(0),)

class TriplesRate(Callback):
    "Triples the learning rate during each batch, as fastai's `GANDiscriminativeLR` does"
    order,run_valid = 70,False   # runs after the scheduler
    def before_batch(self): self.opt.set_hyper('lr', float(self.opt.hypers[0]['lr']*3))
    def after_batch(self): self.opt.set_hyper('lr', float(self.opt.hypers[0]['lr']/3))

class DoubleCutMix(CutMix):
    def before_batch(self):
        super().before_batch()
        self.lam = self.lam.double()

@pytest.mark.parametrize('cb', [*(partial(RecordAt, 'before_batch', mixes, order) for order in (0,20)),TriplesRate,
    DoubleMixUp,DoubleCutMix,partial(ShortEpochCallback, 0.5)], ids=['early','late','rate','mixup','cutmix','short'])
@pytest.mark.parametrize('accum,micro', [(16,4),(16,('auto',5)),(32,5)], ids=str)
def test_callbacks_see_the_same_batches_as_without_a_split(cb, accum, micro):
    data = TensorDataset(random_floats(96, 1, 4, 4), random_ints(3, 96))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3)).double()
    a,b = (toy(16, data=data, model=lambda: deepcopy(model), splitter=all_params, loss_func=MixUpLoss())
        for _ in range(2))
    for learn,size in ((a,None),(b,micro)):
        torch.manual_seed(0)
        learn.fit_one_cycle(2, 0.02, cbs=[*accumulating(accum, size, drop_last=False),cb()])
    assert deviation(weights(a), weights(b))<1e-7 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

@pytest.mark.parametrize('micro', [1,4,('auto',1),('auto',9)], ids=str)
def test_rows_that_a_callback_adds_are_trained_on(micro):
    def views(l): l.xb,l.yb = (torch.cat([l.x,-l.x]),),(torch.cat([l.y]*2),)
    assert_same_run(*full_and_split(16, 16, micro, cbs=lambda: [CallAt('before_batch', views)], n=64))

@pytest.mark.parametrize('accum,by_step,n_ends', [(16,None,2), (32,None,1), (32,False,2)])
def test_after_batch_comes_when_a_split_batch_is_whole_again(accum, by_step, n_ends):
    """In `before_batch`, the Learner has the whole batch, in `after_batch` its last part

    Within a part, an attribute of a callback that has a row for each sample of the batch is cut to the
    part.
    """
    class KeepsInputs(Callback):
        run_valid,per_step,run_bs_find = False,by_step,False   # `run_bs_find`: takes no part in trials of the loss
        def before_batch(self): self.kept = self.whole = self.x.clone()
        def after_pred(self): parts.append(self.kept.equal(self.x) and len(self.x))
        def after_batch(self): ends.append((self.kept is self.whole and len(self.kept), len(self.x), len(self.pred)))
    parts,ends = [],[]
    toy(16, n=32).fit(1, 0.1, cbs=[GradientAccumulation(accum, micro_batch_size=4),KeepsInputs()])
    assert ends==[(16,4,4)]*n_ends and parts==[4]*8

@pytest.mark.parametrize('which', [0,1,3])
@pytest.mark.parametrize('event', ['after_pred','after_loss','before_backward'])
@pytest.mark.parametrize('micro', [4,('auto',4)], ids=str)
def test_a_part_that_is_cancelled_is_left_out(event, which, micro):
    "The gradient of the step is the mean over the samples of the other parts"
    first,rest = toy_data(16)[which*4][0],[i for i in range(16) if i//4!=which]
    def cancel(l):
        if len(l.x)==4 and l.x[0].equal(first): raise CancelBatchException
    def leave_out(l): l.xb,l.yb = (l.x[rest],),(l.y[rest],)
    a,b = toy(16, n=16),toy(16, n=16)
    a.fit(2, 0.1, cbs=CallAt('before_batch', leave_out))
    b.fit(2, 0.1, cbs=[*accumulating(16, micro),CallAt(event, cancel)])
    assert deviation(weights(a), weights(b))<1e-12

def test_auto_validates_a_batch_that_a_callback_has_emptied_as_fastai_does():
    def empty(learn):
        if not learn.training: learn.xb,learn.yb = (learn.x[:0],),(learn.y[:0],)
    learn = toy(4, n=16)
    acc = GradientAccumulation(16, micro_batch_size='auto')
    learn.fit(1, 0.1, cbs=[acc,CallAt('before_batch', empty, run_valid=True)])
    assert len(learn.recorder.losses)==1 and len(learn.recorder.values)==1

# A model with a state for each row of the batch

@pytest.mark.parametrize('micro', [4,1,('auto',3),('auto',1)], ids=str)
def test_awd_lstm_keeps_its_hidden_state_if_batches_are_split(micro):
    "In each row, the model begins with the hidden state of the same row of the previous batch"
    learns = [make_application('language_model', loss_func=CrossEntropy()) for _ in range(2)]
    for learn,size in zip(learns, (None,micro)):
        learn.remove_cb(RNNRegularizer)   # `RNNRegularizer` computes in single precision
        learn.fit_one_cycle(2, 0.05, cbs=accumulating(16, size))
    assert_same_run(*learns)

def test_a_limit_that_does_not_describe_itself_leaves_no_comma_behind():
    acc = GradientAccumulation(16, micro_batch_size=MicroBatchLimit())
    assert repr(acc)=='GradientAccumulation: 16 samples per step'
