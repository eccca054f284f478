"""`micro_batch_size=16` makes micro-batches of a loader's larger batches, whatever they hold, and the run is the
full-batch run; so it is where `'auto'` has found that no more fit."""
import gc, pytest, torch, warnings
from collections import UserDict, namedtuple
from functools import partial
from hypothesis import given, strategies as st
from itertools import product
from random import Random
from torch import nn
from torch.distributions import Beta
from torch.utils.data import DataLoader as TorchLoader, TensorDataset
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.training import GradientClip, ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastcore.basics import noop
from fastaccum import GradientAccumulation, GradientAccumulationSchedule, GradientAccumulationScheduler
from fastaccum.testing import CrossEntropy, Float32Loss, assert_twins, deviation, one_cycle, toy, toy_data
from common import CpuMixedPrecision, Raise, Seen, grads, short_of, some, weights

pytestmark = pytest.mark.filterwarnings('ignore:memory ran out')

@pytest.fixture(autouse=True, scope='module')
def frozen():
    "Each time memory runs out, garbage is collected: that is fast if what is there already is left out"
    gc.freeze()
    yield
    gc.unfreeze()

class Scaled(CpuMixedPrecision):
    "The loss scaling of mixed precision without the half precision, so that runs can be compared"
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast('cpu', enabled=False)

class Short(Callback):
    "Memory runs out in training with more than `cap` samples"
    order,run_valid = 30,False
    def __init__(self, cap): self.cap = cap
    def after_pred(self): short_of(self.cap, 'forward')(len(self.pred))

def accumulating(accum, micro, cls=GradientAccumulation, **kwargs):
    "What splits batches: into parts of `micro` samples, or, with `('auto', cap)`, into what fits"
    if not isinstance(micro, tuple): return [cls(accum, micro_batch_size=micro, **kwargs)]
    return [cls(accum, micro_batch_size='auto', **kwargs),Short(micro[1])]

def full_and_split(bs, accum, micro, acc=None, cbs=list, fit=one_cycle, make=toy, seed=0, **kwargs):
    "The run on batches of `accum`, and the one whose batches of `bs` are split"
    acc = acc or {}
    def run(bs, whole, own):
        learn = make(bs, whole=whole, seed=seed, **kwargs)
        torch.manual_seed(seed)
        fit(learn, own+cbs())
        return learn
    return run(accum, accum if acc.get('drop_last') else 1, []),run(bs, 1, accumulating(accum, micro, **acc))

def gently(learn, cbs): learn.fit_one_cycle(2, 0.02, cbs=cbs)

def metered(*args, **kwargs):
    learn = toy(*args, metrics=accuracy, **kwargs)
    learn.recorder.train_metrics = True
    return learn

opts = [partial(SGD, mom=0.9),Adam,partial(OptimWrapper, opt=torch.optim.AdamW)]
extras = [list,lambda: [GradientClip(0.05)],lambda: [Scaled(init_scale=2.**10, growth_interval=3)]]

@given(bs=st.integers(2, 40), accum=st.integers(2, 40), micro=st.integers(1, 20), n=st.integers(60, 100),
    drop_last=st.sampled_from([None,True,False]), opt_func=st.sampled_from(opts), cbs=st.sampled_from(extras),
    shuffle=st.booleans(), tokens=st.booleans())
def test_any_batch_split_anyhow_is_the_full_batch_run(bs, accum, micro, n, drop_last, **kwargs):
    "Any batch size of the loader, any `accum_bs`, whichever is larger"
    acc = dict(drop_last=drop_last)
    a,b = full_and_split(bs, accum, min(micro, bs-1), acc, make=metered, fit=gently, n=n, **kwargs)
    assert_twins(a, b, tol=1e-5)   # Adam divides by what is nearly zero

def even(n, most):
    k = -(-n//most)
    return [n//k+(i<n%k) for i in range(k)]

@given(bs=st.integers(2, 30), accum=st.integers(1, 30), micro=st.integers(1, 20), n=st.integers(30, 60))
def test_micro_batches_are_even_and_within_one_batch_and_one_step(bs, accum, micro, n):
    "None is larger than said; of 17 samples in parts of 16 come 9 and 8, as BatchNorm cannot do with a single one"
    micro = min(micro, bs-1)
    seen = Seen('after_pred', lambda l: len(l.pred))
    toy(bs, n=n).fit(1, 0.1, cbs=[GradientAccumulation(accum, micro_batch_size=micro, drop_last=False),seen])
    ends = sorted({*range(0, n, bs),*range(0, n, accum),n})
    assert seen.values==[o for a,b in zip(ends, ends[1:]) for o in even(b-a, micro)]

def test_dropped_samples_are_not_seen():
    seen = Seen('after_pred', lambda l: len(l.pred))
    toy(16, n=70).fit(1, 0.1, cbs=[GradientAccumulation(24, micro_batch_size=8, drop_last=True),seen])
    assert sum(seen.values)==48

# Batches of all kinds: each writes the same samples down in another way

class Encoding(UserDict):
    "As Hugging Face's `BatchEncoding`: a mapping that is no dict, and is as long as it has keys"
class Closed(Encoding):
    "Cannot be made anew from its contents"
    def __init__(self, a, b): super().__init__(dict(a=a, b=b))
Pair = namedtuple('Pair', 'a b')

def boxes(y, k): return [{'y':o[None],'boxes':torch.zeros((i+1)%k, 3)} for i,o in enumerate(y)]

kinds = dict(tensors=lambda x,y: (x,y), dicts=lambda x,y: ({'a':x,'b':x},{'y':y}),
    mapping=lambda x,y: (Encoding(a=x, b=x),y), lists=lambda x,y: ([x,x],[y,y]),
    named=lambda x,y: (Pair(x,x),Pair(y,y)), texts=lambda x,y: ((x,None),(y,['name']*len(y))),
    samples=lambda x,y: ([*x],boxes(y, 4)), boxes=lambda x,y: (x,boxes(y, 3)),
    tuples=lambda x,y: (tuple(x),tuple(boxes(y, 2))))

def find(o):
    "The tensor that has all samples"
    if isinstance(o, torch.Tensor): return o
    if hasattr(o, 'keys'): return o['y'] if 'y' in o else o['a']
    if isinstance(o[0], dict): return torch.cat([x['y'] for x in o])
    return torch.stack(list(o)) if o[0].ndim==1 and o[0].is_floating_point() else o[0]

class Model(nn.Module):
    def __init__(self, norm): super().__init__(); self.a,self.norm,self.b = nn.Linear(5, 6),norm,nn.Linear(6, 3)
    def forward(self, x): return self.b(self.norm(self.a(find(x)).tanh()))

def learner(kind, n, bs=None, sampler=None, norm=nn.Identity):
    "A Learner on batches of a kind"
    data = toy_data(n)
    batches = dict(batch_sampler=sampler) if sampler else dict(batch_size=bs)
    def collate(items): return kind(*map(torch.stack, zip(*items)))
    dls = DataLoaders(TorchLoader(data, collate_fn=collate, **batches), TorchLoader(data, 8, collate_fn=collate))
    dls.n_inp = 1
    torch.manual_seed(0)
    learn = Learner(dls, Model(norm()).double(), lambda p,*y: nn.functional.cross_entropy(p, find(y[0])),
        opt_func=partial(SGD, mom=0.9), cbs=Float32Loss())
    learn.remove_cb(learn.progress)
    learn.logger,learn._set_device = noop,noop   # (fastai's cannot move a named tuple)
    return learn

@pytest.mark.parametrize('bs,accum,micro', [(10,10,3),(10,4,3),(5,10,('auto',1)),(3,9,('auto',1)),(4,4,('auto',1))])
@pytest.mark.parametrize('kind', kinds)
def test_batches_of_all_kinds(kind, bs, accum, micro):
    "Also where a batch has as many parts as it has samples"
    a,b = learner(kinds[kind], 36, accum),learner(kinds[kind], 36, bs)
    a.fit(1, 0.05)
    b.fit(1, 0.05, cbs=accumulating(accum, micro, drop_last=False))
    assert_twins(a, b)

class Sizes:
    "A batch sampler whose batches vary in size"
    def __init__(self, sizes, batch_size): self.sizes,self.batch_size = sizes,batch_size
    def __len__(self): return len(self.sizes)
    def __iter__(self):
        start = 0
        for o in self.sizes:
            yield range(start, start+o)
            start += o

@pytest.mark.parametrize('seed', some(3, range(12)))
@pytest.mark.parametrize('kind', ['tensors','samples'])
def test_batches_that_vary_in_size(kind, seed):
    "A step has as many of them as reach `accum_bs`"
    sizes,steps = [Random(seed+i).randint(1, 6) for i in range(12)],[0]
    for o in sizes: steps[-1:] = [steps[-1]+o] if steps[-1]<8 else [steps[-1],o]
    a,b = (learner(kinds[kind], sum(sizes), sampler=Sizes(o, n)) for o,n in ((steps,8),(sizes,4)))
    a.fit(1, 0.05)
    b.fit(1, 0.05, cbs=accumulating(8, ('auto',3), drop_last=False))
    assert deviation(weights(a), weights(b))<1e-7 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

@pytest.mark.parametrize('micro', [5,('auto',2)], ids=str)
def test_what_cannot_be_split_is_refused_before_a_weight_moves(micro):
    class Graph:
        def __init__(self, x): self.x,self.ndim,self.shape = x,1,()
        def __getitem__(self, k): return self.x
        __contains__ = lambda self, k: False
        keys = None
    for kind in (lambda x,y: (Closed(x, x),y),lambda x,y: ([object()],y)):
        learn = learner(kind, 20, 10)
        learn.model.a = nn.Linear(5, 6).double()
        before = weights(learn)
        with pytest.raises(TypeError, match='cannot be split'): learn.fit(1, 0.1, cbs=accumulating(10, micro))
        assert weights(learn).equal(before)

def test_larger_batches_than_the_loader_says_are_split():
    "And the step is still a whole batch of the loader"
    ready = toy(16, n=64)
    ready.dls.loaders[0] = DataLoader(list(ready.dls.train), bs=None)
    for learn in (ready,learner(kinds['tensors'], 64, sampler=Sizes([16]*4, 4))):
        seen = Seen('after_pred', lambda l: len(l.pred))
        with pytest.warns(UserWarning, match='a batch has 16 samples'):
            learn.fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),seen])
        assert seen.values==[4]*16 and len(learn.recorder.losses)==4

# Fits, schedules, what is recorded

@pytest.mark.parametrize('acc', [partial(GradientAccumulationSchedule, 8, 40),
    partial(GradientAccumulationScheduler, {1:4,2:1}),
    partial(GradientAccumulationScheduler, {2:3,9:1,12:7}, mode='step')], ids=['smooth','epochs','steps'])
def test_schedules(acc):
    "A schedule is the same with a loader of micro-batches, and with one of large batches that are split"
    a,b = toy(4, n=90),toy(36, n=90)
    cbs = [acc(micro_batch_size=o, drop_last=False) for o in (None,4)]
    for learn,cb in zip((a,b), cbs): learn.fit_one_cycle(3, 0.1, cbs=cb)
    assert_twins(a, b)
    assert a.recorder.accum_bs==b.recorder.accum_bs and len(set(b.recorder.accum_bs))>1
    assert cbs[0].plan(a.dls, 3).sizes==cbs[1].plan(b.dls, 3).sizes

@pytest.mark.parametrize('bs,accum', [(32,8),(16,16),(8,24)])
def test_lr_find(bs, accum):
    def fit(learn, cbs):
        learn.add_cbs(cbs)
        learn.lr_find(num_it=12, show_plot=False)
    a,b = full_and_split(bs, accum, 4, fit=fit, n=90)
    assert len(b.recorder.lrs)==12 and deviation(a.recorder.losses, b.recorder.losses)<2e-6
    assert deviation(a.recorder.lrs, b.recorder.lrs)<1e-9

def test_every_micro_batch_is_recorded_if_asked_for():
    a,b = full_and_split(16, 24, 4, dict(log_accum_batch=False), n=70)
    assert deviation(weights(a), weights(b))<1e-7 and len(b.recorder.losses)==2*(4+2+2+4+4+2)

def test_a_step_smaller_than_the_number_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        toy(16, n=64).fit(1, 0.1, cbs=GradientAccumulation(4, micro_batch_size=8))

def test_validation_stays_whole():
    class Valid(Callback):
        run_train = False
        def after_pred(self): sizes.append(len(self.pred))
    sizes = []
    toy(16, n=64).fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),Valid()])
    assert sizes==[32,32]

# Callbacks that have a `before_batch` see the batch whole there, or as much of it as is for one step

class Mixes(Callback):
    "Changes the batch, in another way for each sample and for the batch as a whole"
    run_valid = False
    def __init__(self, order): self.order = order
    def before_batch(self):
        x = self.x+torch.randn_like(self.x)
        self.learn.xb = ((x-x.mean(0))/x.std(0),)

class Rate(Callback):
    "Another learning rate for a batch, as fastai's `GANDiscriminativeLR`"
    order,run_valid = 70,False   # after the scheduler
    def before_batch(self): self.opt.set_hyper('lr', float(self.opt.hypers[0]['lr']*3))
    def after_batch(self): self.opt.set_hyper('lr', float(self.opt.hypers[0]['lr']/3))

@pytest.mark.parametrize('cb', [partial(Mixes, 0),partial(Mixes, 20),Rate,partial(ShortEpochCallback, 0.5)],
    ids=['early','late','rate','short'])
@pytest.mark.parametrize('bs,micro', [(16,4),(32,5),(16,('auto',5))], ids=str)
def test_callbacks_see_what_they_see_in_the_full_batch_run(cb, bs, micro):
    if bs==32 and isinstance(cb(), ShortEpochCallback): return   # its epoch would end within a batch of the loader
    a,b = full_and_split(bs, 16, micro, dict(drop_last=False), lambda: [cb()], n=96)
    assert_twins(a, b)
    assert b.train_iter==a.train_iter

@pytest.mark.parametrize('bs,accum,sizes', [(16,8,[8]*4),(16,32,[16,16]),(40,16,[16,16,8,8,16])])
def test_events_come_in_pairs(bs, accum, sizes):
    "What a callback keeps in `before_batch` is its own, and whole, in `after_batch`; for the loss it is cut"
    class Keep(Callback):
        run_valid = False
        def before_batch(self): self.kept = self.same = self.x.clone()
        def after_pred(self): cut.append(self.kept.equal(self.x))
        def after_batch(self): ends.append(len(self.kept) if self.kept is self.same else None)
    cut,ends = [],[]
    toy(bs, n=max(32, sum(sizes))).fit(1, 0.1, cbs=[GradientAccumulation(accum, micro_batch_size=4),Keep()])
    assert ends==sizes and all(cut) and len(cut)==sum(sizes)//4

class CE(nn.CrossEntropyLoss): y_int = True

class Double:
    "fastai's draw in double precision"
    def before_fit(self): self.distrib = Beta(*[torch.tensor(0.4, dtype=torch.float64)]*2)
    def before_batch(self):
        super().before_batch()
        self.lam = self.lam.double()
class DoubleMixUp(Double, MixUp): pass
class DoubleCutMix(Double, CutMix): pass

class Conv(nn.Module):
    def __init__(self): super().__init__(); self.conv,self.lin = nn.Conv2d(3, 4, 3),nn.Linear(4, 3)
    def forward(self, x): return self.lin(self.conv(x).tanh().mean((2,3)))

@pytest.mark.parametrize('bs,micro', [(16,4),(48,5),(16,('auto',5))], ids=str)
@pytest.mark.parametrize('mix', [DoubleMixUp,DoubleCutMix])
def test_mixup(mix, bs, micro):
    "The whole batch is mixed, and the mixed targets and shares are cut with it"
    data = TensorDataset(torch.randn(64, 3, 8, 8).double(), torch.randint(0, 3, (64,)))
    a,b = full_and_split(bs, 16, micro, dict(drop_last=False), lambda: [mix()], data=data,
        model=lambda: Conv().double(), loss_func=CE(), splitter=lambda m: [list(m.parameters())])
    assert deviation(weights(a), weights(b))<1e-7 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

@pytest.mark.parametrize('mode', ['fp16','bf16'])
def test_autocast_is_on_for_each_part_and_off_after_it(mode):
    def on(l): return torch.is_autocast_enabled('cpu')
    during,after = Seen('after_pred', on, order=20),Seen('after_loss', on, order=20)
    data = TensorDataset(*(o.float() if o.is_floating_point() else o for o in toy_data(64).tensors))
    learn = toy(16, data=data, model=lambda: nn.Sequential(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,3)))
    learn.fit(1, 0.1, cbs=[CpuMixedPrecision(mode),GradientAccumulation(16, micro_batch_size=4),during,after])
    assert during.values==[True]*16 and after.values==[False]*16 and not on(None)

@pytest.mark.parametrize('micro', [16,('auto',8)], ids=str)
def test_batchnorm_meets_no_single_sample(micro):
    learn = learner(kinds['tensors'], 34, 17, norm=lambda: nn.BatchNorm1d(6))
    seen = Seen('after_loss', lambda l: len(l.x))
    learn.fit(1, 0.05, cbs=[*accumulating(17, micro),seen])
    assert set(seen.values[-4:])=={9,8} if micro==16 else min(seen.values)>1

@pytest.mark.parametrize('which', [0,1,3])
@pytest.mark.parametrize('event', ['after_pred','after_loss','before_backward'])
@pytest.mark.parametrize('micro', [4,('auto',4)], ids=str)
def test_a_part_that_is_cancelled_is_left_out(event, which, micro):
    "The step is the mean of all others"
    data = toy_data(16)
    first,rest = data[which*4][0],[i for i in range(16) if i//4!=which]
    class Cancel(Callback):
        run_valid = False
    def cancel():
        if len(cb.x)==4 and cb.x[0].equal(first): raise CancelBatchException
    setattr(cb := Cancel(), event, cancel)
    class Without(Callback):
        run_valid = False
        def before_batch(self): self.learn.xb,self.learn.yb = (self.x[rest],),(self.y[rest],)
    a,b = toy(16, data=data),toy(16, data=data)
    a.fit(2, 0.1, cbs=Without())
    b.fit(2, 0.1, cbs=[*accumulating(16, micro),cb])
    assert deviation(weights(a), weights(b))<1e-12

def test_the_end_of_a_fit_waits_for_the_step():
    "Who ends the fit after a part ends it after the step that the part is for"
    class Stop(Callback):
        run_valid = False
        def after_batch(self): raise CancelFitException
    a,b = full_and_split(16, 16, 4, cbs=lambda: [Stop()], n=64)
    assert deviation(weights(a), weights(b))<1e-12

# What is left behind

@pytest.mark.parametrize('micro', [3,('auto',3)], ids=str)
@pytest.mark.parametrize('event,exc', some(4, product(['before_batch','after_pred','after_loss','before_backward',
    'after_backward','after_batch'], [KeyboardInterrupt,RuntimeError])))
def test_an_interrupt_leaves_nothing(event, exc, micro):
    "The next fit, with or without accumulation, is that of a Learner to which nothing has happened"
    a,b = toy(16, n=64),toy(16, n=64)
    with pytest.raises(exc): b.fit(1, 0., cbs=[*accumulating(8, micro),Raise(event, exc, 0, at=2)])
    assert not any(g is not None and g.any() for g in grads(b))
    for o in (a,b): o.opt = None
    for o in (a,b): o.fit(1, 0.1)
    assert_twins(a, b)

def test_a_number_does_not_recover_when_memory_runs_out():
    learn = toy(16, n=64)
    before = weights(learn)
    with pytest.raises(torch.OutOfMemoryError, match='planted'):
        learn.fit(1, 0.1, cbs=[GradientAccumulation(16, micro_batch_size=4),Short(3)])
    assert weights(learn).equal(before)

# A model that remembers its samples

@pytest.mark.parametrize('micro', [4,1,('auto',3),('auto',1)], ids=str)
def test_awd_lstm_keeps_its_state(micro):
    "fastai's language model begins each batch where the one before has ended, row by row"
    from fastai.text.data import LMDataLoader
    from fastai.text.learner import language_model_learner
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    texts,learns = [(o,) for o in torch.randint(0, 10, (8, 41))],[]
    for own in (None,micro):
        torch.manual_seed(0)
        dls = DataLoaders(*(LMDataLoader(texts, bs=bs, seq_len=5, shuffle=False) for bs in (6,4)))
        dls.vocab = list('abcdefghij')
        config = {**awd_lstm_lm_config, 'emb_sz':8, 'n_hid':6, 'n_layers':2}
        # (fastai's regularization is in single precision, and a `drop_mult` of 0 fails in newer versions of torch)
        learn = language_model_learner(dls, AWD_LSTM, config=config, drop_mult=1e-12, pretrained=False, opt_func=SGD,
            alpha=0., beta=0., cbs=Float32Loss())
        learn.loss_func,learn.logger = CrossEntropy(),noop
        learn.model.double()
        learn.remove_cb(learn.progress)
        learn.fit_one_cycle(2, 0.05, cbs=accumulating(12, own))
        learns.append(learn)
    assert_twins(*learns)
    assert deviation(*[l.recorder.losses for l in learns])<2e-6
