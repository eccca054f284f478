"The loss probe and what depends on other samples: loud where the run is not the big batch's, silent where it is."
import random, warnings
from collections import deque
from functools import partial
from types import SimpleNamespace as NS
import numpy as np, pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from fastai.callback.core import Callback
from fastai.callback.mixup import CutMix, MixUp
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import (BCEWithLogitsLossFlat, CrossEntropyLossFlat, DiceLoss, FocalLossFlat, L1LossFlat,
    LabelSmoothingCrossEntropyFlat, MSELossFlat)
from fastai.optimizer import SGD
from fastcore.basics import noop
from fastcore.foundation import L
from fastaccum import GradientAccumulation, TwinWarning
from fastaccum.core.batch import samples
from fastaccum.core.kept import Kept
from fastaccum.core.notices import BatchNormWarning, LoaderWarning, LossWarning, StateWarning
from fastaccum.core.probe import probe
from fastaccum.core.sizes import find_size
from fastaccum.testing import CrossEntropy, assert_twins, deviation, toy, toy_data, twins
from common import CpuMixedPrecision, weights

def told(f, category=TwinWarning):
    "The warnings of `category` that `f` gives"
    with warnings.catch_warnings(record=True) as res:
        warnings.simplefilter('always')
        f()
    return [o for o in res if issubclass(o.category, category)]

# A table of losses: what the probe says of predictions and targets, and whether it is so

def gen(seed=0): return torch.Generator().manual_seed(seed)
n = 16
scores,classes = torch.randn(n, 5, generator=gen()),torch.randint(0, 5, (n,), generator=gen())
masks = torch.randn(n, 5, 8, 8, generator=gen()),torch.randint(0, 5, (n,8,8), generator=gen())
tokens = torch.randn(n, 6, 5, generator=gen()),torch.randint(0, 5, (n,6), generator=gen())
tokens[1][:,2:][torch.rand(n, 4, generator=gen())<torch.rand(n, 1, generator=gen())] = -100
values = torch.randn(n, 3, generator=gen()),torch.randn(n, 3, generator=gen(1))
bits = torch.randn(n, 5, generator=gen()),torch.randint(0, 2, (n,5), generator=gen()).float()
w = torch.tensor([0.2,1.,5.,0.5,2.])
plain = scores,classes

class Combined:
    "fastai's documentation: Focal's mean and Dice's sum"
    def __init__(self, reduction='sum'):
        self.focal,self.dice = FocalLossFlat(axis=1),DiceLoss(axis=1, reduction=reduction)
    def __call__(self, p, y): return self.focal(p, y)+self.dice(p, y)

class Masked(nn.Module):
    "A mean over what is not ignored, of which nobody knows"
    def forward(self, p, y):
        keep = y!=-100
        each = F.cross_entropy(p.flatten(0, -2), y.flatten().clamp(min=0), reduction='none')
        return (each*keep.flatten()).sum()/keep.sum()

def takes_sum(p, y): return F.cross_entropy(p, y, reduction='sum')
def n_t_xent(p, y):
    "Each row and the one half a batch away are a pair"
    z,k = F.normalize(p),len(p)//2
    sim = (z@z.T/0.5).fill_diagonal_(-1e9)
    return F.cross_entropy(sim, torch.cat([torch.arange(k)+k,torch.arange(len(p)-k)]))
def batch_dice(p, y):
    p,y = p.softmax(1),F.one_hot(y, 5).movedim(-1, 1)
    return 1-(2*(p*y).sum((0,2,3))/(p+y).sum((0,2,3))).mean()
def root(p, y): return F.mse_loss(p, y).sqrt()
def of_dict(p, y): return F.cross_entropy(p['logits'], y['labels'])
def of_several(p, y, z): return F.cross_entropy(p[0], y)+F.mse_loss(p[1], z)
several = (scores,values[0]),(classes,values[1])
def box(i): return torch.rand(2, 4, generator=gen(i))
boxes = [box(i) for i in range(n)],[{'boxes':box(i+n)} for i in range(n)]
def of_boxes(p, y): return torch.stack([F.l1_loss(a, b['boxes']) for a,b in zip(p, y)]).mean()
def in_place(p, y):
    y[y==0] = 1
    return F.cross_entropy(p.mul_(2), y)
class Hugging(dict):
    "As transformers' outputs: a mapping that is made with keywords"

right = dict(
    cross_entropy=(CrossEntropyLossFlat(), plain), functional=(F.cross_entropy, plain),
    weighted=(CrossEntropyLossFlat(weight=w), plain), ignored=(CrossEntropyLossFlat(ignore_index=2), plain),
    smoothed=(nn.CrossEntropyLoss(label_smoothing=0.1, weight=w), plain),
    fastais_smoothed=(LabelSmoothingCrossEntropyFlat(), plain),
    summed=(CrossEntropyLossFlat(reduction='sum'), plain), each=(CrossEntropyLossFlat(reduction='none'), plain),
    tokens=(CrossEntropyLossFlat(), tokens), focal=(FocalLossFlat(weight=w), plain),
    masks=(CrossEntropyLossFlat(axis=1), masks), dice=(DiceLoss(), masks),
    dice_mean=(DiceLoss(reduction='mean'), masks), combined=(Combined('mean'), masks),
    mse=(MSELossFlat(), values), l1=(L1LossFlat(), values), huber=(nn.HuberLoss(), values),
    bce=(BCEWithLogitsLossFlat(), bits), pos_weight=(nn.BCEWithLogitsLoss(pos_weight=w), bits),
    dict=(of_dict, (Hugging(logits=scores), {'labels':classes})), boxes=(of_boxes, boxes), in_place=(in_place, plain),
    constant=(lambda p, y: F.cross_entropy(p, y)+w.pow(2).sum(), plain), zero=(lambda p, y: 0*p.sum(), plain))
wrong = dict(
    combined=(Combined(), masks), hidden=(Masked(), tokens), sum_for_mean=(takes_sum, plain), root=(root, values),
    contrastive=(n_t_xent, plain), batch_dice=(batch_dice, masks),
    smoothed=(LabelSmoothingCrossEntropyFlat(weight=w), plain),
    of_the_batch=(lambda p, y: ((p-p.mean(0))**2).mean(), plain))

def probed(f, data, dtype=torch.float32, find=False, k=n):
    pred,y = data
    def cast(o): return o.to(dtype) if isinstance(o, torch.Tensor) and o.is_floating_point() else o
    pred = cast(pred).clone() if isinstance(pred, torch.Tensor) else pred
    yb = y if isinstance(y, tuple) else (cast(y).clone() if isinstance(y, torch.Tensor) else y,)
    return probe(NS(loss_func=f, pred=pred, yb=yb), k, find_size(f) if find is False else find)

@pytest.mark.parametrize('dtype', [torch.float32,torch.float16,torch.bfloat16], ids=str)
@pytest.mark.parametrize('nm', right)
def test_losses_that_are_right(nm, dtype):
    res = probed(*right[nm], dtype)
    assert res.off<1e-6 and not res.wrong and res.reason==''

@pytest.mark.parametrize('dtype', [torch.float32,torch.float16,torch.bfloat16], ids=str)
@pytest.mark.parametrize('nm', wrong)
def test_losses_that_are_wrong(nm, dtype):
    res = probed(*wrong[nm], dtype)
    assert res.wrong and res.off>1e-4

def test_several_outputs_and_targets():
    assert probed(of_several, several).off<1e-6
    assert probed(lambda p, y, z: of_several(p, y, z)+z.sum(), several).wrong

def test_a_size_of_your_own_makes_it_right():
    def size(learn): return (learn.y!=-100).sum()
    def outer(learn): return (tokens[1]!=-100).sum()    # it does not look at what it is given
    assert probed(*wrong['hidden'], find=size).off<1e-6
    assert 'add up' in probed(*wrong['hidden'], find=outer).reason

def test_parts_in_which_nothing_counts():
    "One part is all padding, or all of it is: 0/0"
    y = tokens[1].clone()
    for rows in (slice(0, 5), slice(5, n)):
        o = y.clone()
        o[rows] = -100
        assert probed(CrossEntropyLossFlat(), (tokens[0],o)).off<1e-6
        res = probed(Masked(), (tokens[0],o))     # it hides what it ignores: there is no loss of that part
        assert res.off is None and 'finite' in res.reason
    assert probed(CrossEntropyLossFlat(), (tokens[0],torch.full_like(y, -100))).off is None

@pytest.mark.parametrize('k', [1,2,3,4,5,7])
def test_small_micro_batches(k):
    few = scores[:k],classes[:k]
    assert probed(CrossEntropyLossFlat(), few, k=k).off is None if k==1 else probed(F.cross_entropy, few, k=k).off<1e-6
    assert probed(takes_sum, few, find=samples, k=k).wrong==(k>1)

silent = dict(nan=(lambda p, y: F.cross_entropy(p, y)/0*0, 'finite'), infinite=(lambda p, y: p.sum()/0, 'finite'),
    draws=(lambda p, y: F.cross_entropy(p+torch.randn(p.shape), y), 'random'),
    python=(lambda p, y: p.mean()*random.random(), 'random'),
    numpy=(lambda p, y: p.mean()*np.random.rand(), 'random'),
    shape=(lambda p, y: (p.view(16, 5)**2).mean(), 'RuntimeError'),
    rows=(lambda p, y: (F.cross_entropy(p, y, reduction='none')*torch.arange(16)[:len(p)]).mean(), 'something else'),
    rows_too=(lambda p, y: (F.cross_entropy(p, y, reduction='none')*(1+1e-3*torch.arange(16)[:len(p)])).sum(),
        'something else'),
    used_up=(lambda p, y, it=iter(range(99)): p.mean()*next(it), 'put back'))

@pytest.mark.parametrize('nm', silent)
def test_what_cannot_be_told_is_left_out(nm):
    f,why = silent[nm]
    res = probed(f, plain)
    assert res.off is None and not res.wrong and why in res.reason

def test_rounding_is_no_difference():
    "Scores in the thousands that cancel: the loss is nothing but rounding"
    def loss(p, y): return ((p+1e4).sum(1)-(p+1e4).flip(1).sum(1)).mean()+(p.sum()*0)
    assert not probed(loss, plain).wrong

@pytest.mark.parametrize('dtype', [torch.float16,torch.bfloat16], ids=str)
def test_a_loss_that_returns_half_precision(dtype):
    "It is off by its rounding only"
    def half(f): return lambda p, y: f(p.to(dtype), y)
    offs = [probed(half(F.cross_entropy), (torch.randn(n, 5, generator=gen(i)),classes)) for i in range(4)]
    assert all(o.off>2e-5 for o in offs) and not any(o.wrong for o in offs)
    assert probed(half(takes_sum), plain, find=samples).wrong

# It leaves nothing behind

class Keeps(nn.Module):
    "A loss that keeps all sorts of things, and writes to a buffer that its backward pass needs"
    def __init__(self, noise):
        super().__init__()
        self.register_buffer('mean', torch.zeros(3, dtype=torch.float64))
        self.calls,self.losses,self.rng,self.noise = 0,[],np.random.default_rng(0),noise
    def forward(self, p, y):
        self.calls += 1
        self.mean.mul_(0.9).add_(p.detach().mean(0), alpha=0.1)
        keeps_global['n'] += 1
        loss = F.cross_entropy(p*(1+self.mean*0.1), y)
        if self.noise: loss = loss*(1+0.1*torch.rand(())+0.1*random.random()+0.1*np.random.rand()+0.1*self.rng.random())
        self.losses.append(loss.item())
        return loss
keeps_global = {'n':0}

# Where a loss may count its calls: each returns the loss, and a function that returns the count

def in_a_global():
    def f(p, y):
        global n_calls
        n_calls += 1
        return p.sum()
    return f,lambda: n_calls
n_calls = 0

def in_a_global_of_a_function_within():
    def f(p, y):
        def count():
            global n_calls
            n_calls += 1
        count()
        return p.sum()
    return f,lambda: n_calls

def in_a_closure():
    k = 0
    def f(p, y):
        nonlocal k
        k += 1
        return p.sum()
    return f,lambda: k

def in_a_default_of_a_keyword():
    def f(p, y, *, seen=[]): seen.append(1); return p.sum()
    return f,lambda: len(f.__kwdefaults__['seen'])

def in_an_argument(seen, add=list.append, count=len):
    def f(p, y, seen=None): add(seen, 1); return p.sum()
    return partial(f, seen=seen),lambda: count(seen)

def on_a_tensor():
    t = torch.zeros(1)
    t.seen = []
    def f(p, y): t.seen.append(1); return p.sum()
    return f,lambda: len(t.seen)

def add_one(a, b): a += b
keepers = dict(a_global=in_a_global, a_function_within=in_a_global_of_a_function_within, a_closure=in_a_closure,
    a_keyword=in_a_default_of_a_keyword, an_argument=lambda: in_an_argument([]),
    a_deque=lambda: in_an_argument(deque(), deque.append),
    an_array=lambda: in_an_argument(np.zeros(1), add_one, lambda o: o.item()), a_tensor=on_a_tensor)

@pytest.mark.parametrize('nm', keepers)
def test_wherever_a_loss_keeps_something_it_is_put_back(nm):
    f,count = keepers[nm]()
    f(*plain)
    before = count()
    assert probed(f, plain, find=None).off is not None and count()==before
    f(*plain)
    assert count()==before+1

def test_of_a_learner_only_the_model_is_noted():
    "And of a callback's, not even that"
    class Own(Callback):
        def loss(self, p, y): return p.sum()
    learn = toy(4, n=8, cbs=Own())
    def noted(f): return Kept(f, device=torch.device('cpu')).seen
    def f(p, y): return p.sum()*learn.training
    assert id(learn.model) in noted(f) and id(learn.cbs) not in noted(f)
    assert id(learn.own) in noted(learn.own.loss) and id(learn.model) not in noted(learn.own.loss)

class NoProbe(GradientAccumulation):
    name = 'gradient_accumulation'
    probed = ()   # it has looked

@pytest.mark.parametrize('noise', [True,False])
def test_a_loss_that_keeps_state_does_not_notice(noise):
    def run(cls):
        keeps_global['n'] = 0
        f = Keeps(noise)
        learn = toy(4, n=64, loss_func=f)
        random.seed(0); np.random.seed(0); torch.manual_seed(0)
        learn.fit(2, 0.1, cbs=cls(16))
        state = random.getstate(),np.random.get_state()[1].tolist(),torch.get_rng_state().tolist()
        return weights(learn),f.mean,f.calls,f.losses,keeps_global['n'],f.rng.bit_generator.state,state
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', LossWarning)
        a,b = run(NoProbe),run(GradientAccumulation)
    assert a[0].equal(b[0]) and a[1].equal(b[1]) and a[2:]==b[2:]

class Tally:
    "Counts where the probe does not put back: without attributes that could be noted"
    __slots__ = ('n',)
    def __init__(self): self.n = 0
    def __call__(self):
        self.n += 1
        return self.n

@pytest.mark.parametrize('exc', [KeyboardInterrupt,RuntimeError])
@pytest.mark.parametrize('at', [2,3,4])
def test_interrupts_in_the_probe(exc, at):
    "The `at`th call of the loss function raises: the first is the fit's, the next three are the probe's"
    tally = Tally()
    class Breaks(Keeps):
        def forward(self, p, y):
            res = super().forward(p, y)
            if tally()==at: raise exc('planted')
            return res
    f = Breaks(False)
    learn = toy(4, n=64, loss_func=f)
    learn._do_epoch_validate = noop
    before,acc = weights(learn),GradientAccumulation(16)
    if exc is RuntimeError:
        assert told(lambda: learn.fit(1, 0.1, cbs=acc))==[]
        assert len(learn.recorder.losses)==4 and f.calls==16
        return
    with pytest.raises(KeyboardInterrupt): learn.fit(1, 0.1, cbs=acc)
    assert f.calls==len(f.losses)==1 and weights(learn).equal(before) and tally.n==at
    assert not acc.entered and acc.probed is None and '_backward' not in vars(learn)
    learn.fit(1, 0.1)
    assert f.calls==17

# What it costs

@pytest.mark.parametrize('loss,more', [(F.cross_entropy,3), (takes_sum,4)], ids=['right','wrong'])
def test_nothing_is_evaluated_after_the_first_micro_batch(loss, more):
    "Three evaluations of the loss in a fit; a fourth makes sure before a warning is given"
    tally,at = Tally(),[]
    class At(Callback):
        order,run_valid = 1000,False
        def after_batch(self): at.append(tally.n)
    def f(p, y):
        tally()
        return loss(p, y)
    learn = toy(4, n=64, loss_func=f)
    learn._do_epoch_validate = noop
    told(lambda: learn.fit(2, 1e-4, cbs=[GradientAccumulation(16),At()]))
    assert at==[i+1+more for i in range(32)]

def test_nothing_is_evaluated_where_nothing_accumulates():
    "Each micro-batch is a step of its own: whatever the loss is, it is the big batch's"
    tally = Tally()
    def f(p, y):
        tally()
        return takes_sum(p, y)
    learn = toy(16, n=64, loss_func=f, model=normed)
    learn._do_epoch_validate = noop
    assert told(lambda: learn.fit(1, 1e-4, cbs=GradientAccumulation(16)))==[] and tally.n==4

# In a fit

def normless(): return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
def normed():
    return nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()

@pytest.mark.parametrize('nm', ['cross_entropy','weighted','summed','tokens'])
@pytest.mark.parametrize('bs', [1,2,3,4,7])
def test_fits_that_are_exact_are_silent(nm, bs):
    fs = dict(cross_entropy=CrossEntropy, weighted=lambda: CrossEntropy(weight=torch.tensor([0.2,1.,5.]).double()),
        summed=lambda: CrossEntropy(reduction='sum'), tokens=CrossEntropy)
    learn = toy(bs, n=45, tokens=nm=='tokens', loss_func=fs[nm]())
    assert told(lambda: learn.fit_one_cycle(1, 1e-3, cbs=GradientAccumulation(16)))==[]
    assert told(lambda: learn.lr_find(num_it=3, show_plot=False))==[]

def test_it_is_said_once_per_fit_and_again_in_the_next():
    learn,acc = toy(4, n=64, loss_func=takes_sum),GradientAccumulation(16)
    for _ in range(2):
        o, = told(lambda: learn.fit(2, 1e-4, cbs=acc))
        text = str(o.message)
        for part in ("reduction='mean'",'size=','GradientCache','https','off by 0.'): assert part in text
        assert o.category is LossWarning

def test_that_warning_is_true():
    "The run is another than its twin's where the warning comes, and the same with the `size` that it asks for"
    def fit(l, cbs): l.fit(2, 0.05, cbs=cbs)
    with pytest.warns(LossWarning): a,b = twins(8, n=64, tokens=True, loss_func=Masked(), fit=fit)
    assert deviation(weights(a), weights(b))>1e-4
    acc = dict(size=lambda l: (l.y!=-100).sum())
    def run(): return twins(8, n=64, tokens=True, loss_func=Masked(), fit=fit, acc=acc)
    res = []
    assert told(lambda: res.extend(run()))==[]
    assert_twins(*res)

def test_categories_silence_it():
    learn = toy(4, n=64, loss_func=takes_sum, model=normed)
    def fit(): learn.fit(1, 1e-4, cbs=GradientAccumulation(16))
    assert {o.category for o in told(fit)}=={LossWarning,BatchNormWarning}
    for ignored,left in ((LossWarning,{BatchNormWarning}), (BatchNormWarning,{LossWarning}), (TwinWarning,set())):
        with warnings.catch_warnings(record=True) as res:
            warnings.simplefilter('always')
            warnings.filterwarnings('ignore', category=ignored)
            fit()
        assert {o.category for o in res}==left
    before = weights(learn)
    with warnings.catch_warnings():
        warnings.simplefilter('error', TwinWarning)
        with pytest.raises(LossWarning): fit()
    assert weights(learn).equal(before)

def mixed(mix, reduction, loss=CrossEntropyLossFlat):
    gen = torch.Generator().manual_seed(0)
    ds = TensorDataset(torch.randn(64, 3, 6, 6, generator=gen), torch.randint(0, 3, (64,), generator=gen))
    dls = DataLoaders(DataLoader(ds, bs=8), DataLoader(ds, bs=32))
    model = nn.Sequential(nn.Flatten(), nn.Linear(108, 3))
    learn = Learner(dls, model, loss(reduction=reduction), opt_func=SGD)
    return told(lambda: learn.fit(1, 1e-4, cbs=[mix(),GradientAccumulation(32)]))

class SumForMean(CrossEntropyLossFlat):
    "Says that it is a mean, and with MixUp, which asks for each sample's, returns more than it should"
    def __call__(self, p, y): return super().__call__(p, y)*len(p)

@pytest.mark.parametrize('mix', [MixUp,CutMix])
@pytest.mark.parametrize('reduction', ['mean','sum'])
def test_mixing_callbacks(mix, reduction):
    "The second targets and the shares are split with the samples"
    torch.manual_seed(0)
    assert mixed(mix, reduction)==[]
    assert [o.category for o in mixed(mix, reduction, SumForMean)]==[LossWarning]

@pytest.mark.parametrize('amp', ['fp16','bf16'])
@pytest.mark.parametrize('loss', [F.cross_entropy,takes_sum,lambda p, y: F.cross_entropy(p.bfloat16(), y)],
    ids=['right','wrong','half'])
def test_mixed_precision(amp, loss):
    x,y = toy_data(64).tensors
    learn = toy(4, data=TensorDataset(x.float(), y), loss_func=loss, model=lambda: normless().float())
    learn._do_epoch_validate = noop
    res = told(lambda: learn.fit(1, 1e-4, cbs=[CpuMixedPrecision(amp),GradientAccumulation(16)]))
    assert [o.category for o in res]==[LossWarning]*(loss is takes_sum)

# What depends on the other samples

def test_batchnorm_is_told():
    learn = toy(4, n=64, model=normed)
    o, = told(lambda: learn.fit(2, 1e-4, cbs=GradientAccumulation(16)))
    assert o.category is BatchNormWarning
    assert str(o.message).startswith('1 BatchNorm layer normalises with the 4 samples of a micro-batch, not the 16 of')
    learn.model[3] = nn.BatchNorm1d(6, track_running_stats=False).double()
    o, = told(lambda: learn.fit(1, 1e-4, cbs=GradientAccumulation(16)))
    assert str(o.message).startswith('2 BatchNorm layers')

class Freeze(Callback):
    "As fastai's `BnFreeze`, of all there are"
    order,run_valid = 20,False
    def before_train(self):
        for m in self.model.modules():
            if isinstance(m, nn.BatchNorm1d): m.eval()

def test_batchnorm_that_is_frozen_is_silent_and_exact():
    def make(*args, **kwargs): return toy(*args, model=normed, **kwargs)
    res = []
    assert told(lambda: res.extend(twins(n=64, make=make, cbs=lambda: [Freeze()])))==[]
    assert_twins(*res)

def test_normalisations_of_a_sample_are_silent():
    def model(): return nn.Sequential(nn.Linear(5, 6), nn.GroupNorm(2, 6), nn.LayerNorm(6), nn.Unflatten(1, (2,3)),
        nn.InstanceNorm1d(2), nn.Flatten(), nn.Linear(6, 3)).double()
    assert told(lambda: toy(4, n=64, model=model).fit(1, 1e-4, cbs=GradientAccumulation(16)))==[]

def lines(bs, is_lm, cls=None, **kwargs):
    from fastai.text.data import LMDataLoader, SortedDL
    gen = torch.Generator().manual_seed(0)
    ds = [torch.randint(2, 9, (12,), generator=gen) for _ in range(64)]
    if is_lm: return LMDataLoader([(o,) for o in ds], bs=bs, seq_len=5, **kwargs)
    return (cls or SortedDL)([(o,int(o[0])%2) for o in ds], bs=bs, **kwargs)

def text_learner(train, is_lm):
    from fastai.text.learner import language_model_learner, text_classifier_learner
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_clas_config, awd_lstm_lm_config
    dls = DataLoaders(train, lines(4, is_lm))
    dls.vocab = list('abcdefghi') if is_lm else L(list('abcdefghi'), ['a','b'])
    small = dict(emb_sz=4, n_hid=4, n_layers=2)
    if is_lm: return language_model_learner(dls, AWD_LSTM, config=awd_lstm_lm_config|small, pretrained=False)
    return text_classifier_learner(dls, AWD_LSTM, config=awd_lstm_clas_config|small, pretrained=False, n_out=2,
        loss_func=CrossEntropyLossFlat(), seq_len=5)

def categories(learn, acc=16, **kwargs):
    def fit(): learn.fit(1, 1e-4, cbs=GradientAccumulation(acc, **kwargs))
    with learn.no_bar(), learn.no_logging(): return {o.category for o in told(fit)}

def test_text():
    """A language model's loader and state; a classifier resets its LSTM, and a sorted loader that does not shuffle
    reads the same samples"""
    assert categories(text_learner(lines(4, True), True))=={LoaderWarning,StateWarning}
    assert categories(text_learner(lines(4, False, shuffle=True), False))=={LoaderWarning,BatchNormWarning}
    assert categories(text_learner(lines(4, False), False))=={BatchNormWarning}

def test_the_order_of_a_sorted_loader():
    "The fact behind it: without shuffling, another batch size reads the same samples in the same order"
    def order(bs, **kwargs):
        np.random.seed(0); random.seed(0)
        dl = lines(bs, False, res=list(range(64)), sort_func=len, **kwargs)
        return [int(i) for i in dl.get_idxs()]
    assert order(2)==order(8) and order(2, shuffle=True)!=order(8, shuffle=True)

class Remembers(nn.Module):
    "A sum of what it has seen"
    def __init__(self): super().__init__(); self.lin,self.seen = nn.Linear(5, 3).double(),torch.zeros(3).double()
    def reset(self): self.seen = torch.zeros_like(self.seen)
    def forward(self, x):
        res = self.lin(x)+self.seen
        self.seen = self.seen+0.1*res.detach().mean(0)
        return res

class Reset(Callback):
    "Between epochs, or between batches"
    run_valid = False
    def __init__(self, event): setattr(self, event, lambda: self.model.reset())

@pytest.mark.parametrize('event,cats', [('before_train',{StateWarning}), ('before_batch',set())])
def test_state_of_your_own(event, cats):
    learn = toy(4, n=64, model=Remembers, splitter=lambda m: [list(m.parameters())], cbs=Reset(event))
    assert categories(learn)==cats
    assert categories(learn)==cats            # and in the next fit
    assert 'forward' not in vars(learn.model)
