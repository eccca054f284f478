"""`micro_batch_size='auto'` under random failures, on batches of all kinds.

A kind is a way to write the same samples down, and a model that reads it. Memory runs out in the forward pass, in the loss or in the
middle of the backward pass, above a number of samples or at moments drawn by chance; the oracle is the run with enough memory, on big
batches where the batches can be joined.
"""
import pytest, random
import torch
from collections import UserDict, namedtuple
from functools import partial
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastaccum import GradientAccumulation
from fastaccum.recovery import AutoSize
from fastaccum.testing import CrossEntropy, Float32Loss, assert_twins, deviation, toy
from common import Raise, weights

pytestmark = pytest.mark.filterwarnings('ignore:memory ran out')

class Encoding(UserDict):
    "As Hugging Face's `BatchEncoding`: a mapping that is no dict, and as long as it has keys"
    def __init__(self, data=None): super().__init__(data)
    def to(self, device): return Encoding({k:v.to(device) for k,v in self.items()})

Pair = namedtuple('Pair', 'a b')

# Each kind: a function of samples `(x, y)` that makes a batch, one of the batch's inputs that gives `x`, one of its targets that gives `y`

def stacked(items): return torch.stack([x for x,_ in items]),torch.stack([y for _,y in items])
def joined(xs): return torch.cat([x[None] for x in xs])

def tensors(items): return stacked(items)
def dicts(items):
    x,y = stacked(items)
    return {'a':x,'b':x},{'y':y}
def encoding(items):
    x,y = stacked(items)
    return Encoding({'a':x,'b':x}),y
def lists(items):
    x,y = stacked(items)
    return [x,x],[y,y]
def pairs(items):
    x,y = stacked(items)
    return Pair(x,x),Pair(y,y)
def names(items):
    x,y = stacked(items)
    return (x,None),(y,['name']*len(items))
def listed(items): return [x for x,_ in items],[{'y':y[None],'more':torch.zeros(i%4, 3)} for i,(_,y) in enumerate(items)]
def boxes(items): return stacked(items)[0],[{'more':torch.zeros((i+1)%3, 3),'y':y[None]} for i,(_,y) in enumerate(items)]
def tupled(items): return tuple(x for x,_ in items),tuple({'y':y[None]} for _,y in items)

def first(o):
    if isinstance(o, torch.Tensor): return o
    if isinstance(o, (dict,UserDict)): return o['y'] if 'y' in o else o['a']+0*o['b']
    if isinstance(o[0], dict): return torch.cat([x['y'] for x in o])
    if isinstance(o, (list,tuple)) and o[0].ndim==1 and o[0].is_floating_point(): return joined(o)
    return o[0]

kinds = [tensors,dicts,encoding,lists,pairs,names,listed,boxes,tupled]

class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        ctx.model.need('backward', len(g))
        return g,None

class Model(nn.Module):
    "Runs out of memory `where` `short` says so, for a number of samples"
    short = None
    def __init__(self, state=None):
        super().__init__()
        self.a,self.b,self.c,self.state = nn.Linear(5, 6),nn.Linear(6, 6),nn.Linear(6, 3),state
    def need(self, where, n):
        if self.training and self.short is not None and self.short(where, n): raise torch.OutOfMemoryError(f'planted, {where}')
    def forward(self, x):
        x = first(x)
        h = self.a(x).tanh()
        if self.state is not None: h = self.state(h)
        self.need('forward', len(x))
        return self.c(self.b(Fail.apply(h, self)).tanh())

class Loss(nn.Module):
    def forward(self, pred, *targ):
        self.need('loss', len(pred))
        return nn.functional.cross_entropy(pred, first(targ[0]))

def items(n, seed):
    gen = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, generator=gen, dtype=torch.float64),torch.randint(0, 3, (1,), generator=gen)[0]) for _ in range(n)]

def make(kind, n, bs=None, sampler=None, seed=0, state=None, opt_func=partial(SGD, mom=0.9)):
    "A Learner on batches of `kind`; `state` makes a module that remembers"
    data = items(n, seed)
    train = TorchLoader(data, collate_fn=kind, **(dict(batch_sampler=sampler) if sampler else dict(batch_size=bs)))
    dls = DataLoaders(train, TorchLoader(data, 8, collate_fn=kind))
    dls.n_inp = 1
    torch.manual_seed(seed)
    model,loss = Model(state() if state else None).double(),Loss()
    loss.need = model.need
    learn = Learner(dls, model, loss, opt_func=opt_func, cbs=Float32Loss())
    learn.remove_cb(learn.progress)
    learn.logger = lambda *_: None
    if kind is pairs: learn._set_device = lambda b: b   # (fastai's cannot make a named tuple anew)
    return learn

def trouble(rng, biggest):
    "A `short`: above a number of samples, now and then, or both"
    where,cap,now_and_then,n = rng.choice(['forward','loss','backward']),rng.randint(1, biggest),rng.random()<0.5,[0]
    moments = {rng.randrange(60) for _ in range(8)}
    def short(at, k):
        if at!=where: return False
        n[0] += 1
        return k>1 and n[0] in moments if now_and_then else k>cap
    return short

@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('kind', kinds, ids=lambda o: o.__name__)
def test_twins(kind, seed):
    rng = random.Random(f'{kind.__name__} {seed}')
    bs,k,n,opt = rng.randint(2, 9),rng.randint(1, 3),rng.randint(20, 40),rng.choice([partial(SGD, mom=0.9),Adam])
    a,b = make(kind, n, bs*k, seed=seed, opt_func=opt),make(kind, n, bs, seed=seed, opt_func=opt)
    b.model.short = trouble(rng, bs)
    a.fit_one_cycle(2, 0.05)
    b.fit_one_cycle(2, 0.05, cbs=GradientAccumulation(bs*k, micro_batch_size='auto', drop_last=False))
    assert_twins(a, b)

@pytest.mark.parametrize('bs', [2,3,4])
@pytest.mark.parametrize('kind', kinds, ids=lambda o: o.__name__)
def test_as_many_parts_as_samples(kind, bs):
    "No part of a batch is taken for its samples"
    a,b = make(kind, 24, bs),make(kind, 24, bs)
    b.model.short = lambda where,n: where=='forward' and n>1
    a.fit(1, 0.05)
    b.fit(1, 0.05, cbs=GradientAccumulation(bs, micro_batch_size='auto', drop_last=False))
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

def windows(sizes, target):
    "Sizes put together until they reach `target`"
    res,n = [],0
    for o in sizes:
        n += o
        if n>=target:
            res.append(n)
            n = 0
    return res+[n]*(n>0)

@pytest.mark.parametrize('micro', [None,'auto'])
@pytest.mark.parametrize('seed', range(4))
@pytest.mark.parametrize('kind', kinds, ids=lambda o: o.__name__)
def test_batches_that_vary_in_size(kind, seed, micro):
    rng = random.Random(f'{kind.__name__} {seed}')
    sizes = [rng.randint(1, 6) for _ in range(12)]
    big = windows(sizes, 8)
    a,b = make(kind, sum(sizes), sampler=Sizes(big, 8), seed=seed),make(kind, sum(sizes), sampler=Sizes(sizes, 4), seed=seed)
    if micro: b.model.short = trouble(rng, 6)
    a.fit(1, 0.05)
    b.fit(1, 0.05, cbs=GradientAccumulation(8, micro_batch_size=micro, drop_last=False))
    assert len(b.recorder.losses)==len(big)
    assert deviation(weights(a), weights(b))<1e-7 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

# Models that remember

class Hidden(nn.Module):
    "A state with a row per sample, detached, in a list of tuples as `AWD_LSTM`'s; takes the first rows if there are fewer samples"
    def __init__(self): super().__init__(); self.rnn,self.bs,self.hidden = nn.RNNCell(6, 6),1,[(torch.zeros(1, 1, 6, dtype=torch.float64),)]
    def forward(self, x):
        h,n = self.hidden[0][0],len(x)
        if n>self.bs: h = torch.cat([h,h.new_zeros(1, n-self.bs, 6)], 1)
        self.bs,h = n,self.rnn(x, h[0,:n])
        self.hidden = [(h[None].detach(),)]
        return h

class Unset(Hidden):
    "Has no state before the first batch, and fails with another number of rows"
    def __init__(self): super().__init__(); self.hidden = None
    def forward(self, x):
        self.hidden = h = self.rnn(x, *([] if self.hidden is None else [self.hidden.detach()]))
        return h

class Buffered(Hidden):
    "The state is a buffer that is replaced, and begins anew with another number of rows"
    def __init__(self): super().__init__(); self.register_buffer('h', torch.zeros(1, 6))
    def forward(self, x):
        h = self.rnn(x, self.h if len(self.h)==len(x) else None)
        self.h = h.detach()
        return h

class Stateless(nn.Module):
    "Counts calls, keeps the last activations and a list that grows: nothing of it has an effect"
    def __init__(self): super().__init__(); self.calls,self.last,self.sizes,self.bank = 0,None,[],{}
    def forward(self, x):
        self.calls += 1
        self.sizes.append(len(x))
        self.last = self.bank['last'] = x
        return x

@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('state', [Hidden,Unset,Buffered,Stateless])
def test_stateful(state, seed):
    rng = random.Random(f'{state.__name__} {seed}')
    bs,k = rng.randint(3, 8),rng.randint(1, 3)
    a,b = (make(tensors, bs*8, bs, seed=seed, state=state) for _ in range(2))
    for o in (a,b): o.dls.loaders[1] = TorchLoader(items(bs*2, 1), bs, collate_fn=tensors)
    b.model.short = trouble(rng, bs)
    for o,micro in ((a,None),(b,'auto')):
        try: o.fit_one_cycle(2, 0.05, cbs=GradientAccumulation(bs*k, micro_batch_size=micro, drop_last=False))
        except ValueError as e:   # it failed before there was a whole batch, or never afterwards
            assert state is Unset and 'keeps something in its attribute `hidden`' in str(e)
            return
    assert_twins(a, b)
    if state is Hidden: assert deviation(a.model.state.hidden, b.model.state.hidden)<1e-7 and b.model.state.bs==bs

@pytest.mark.parametrize('where', ['forward','backward'])
def test_counted_once(where):
    "What a failed attempt has counted is taken back"
    a,b = make(tensors, 32, 4, state=Stateless),make(tensors, 32, 8, state=Stateless)
    b.model.short = lambda at,n: at==where and n>4
    a.fit(1, 0.05, cbs=GradientAccumulation(8))
    b.fit(1, 0.05, cbs=GradientAccumulation(8, micro_batch_size='auto'))
    assert (a.model.state.calls,a.model.state.sizes)==(b.model.state.calls,b.model.state.sizes)

@pytest.mark.parametrize('cap', [1,2,3])
@pytest.mark.parametrize('where', ['forward','backward'])
@pytest.mark.parametrize('moment', [0,3])
def test_awd_lstm(cap, where, moment):
    "A language model on `LMDataLoader`: memory is short from the first batch on, or from a later one"
    from fastai.text.data import LMDataLoader
    from fastai.text.learner import language_model_learner
    from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_config
    gen,learns = torch.Generator().manual_seed(0),[]
    texts = [torch.randint(0, 10, (41,), generator=gen) for _ in range(8)]
    class Short(Callback):
        n = 0
        def before_batch(self):
            if self.training: Short.n += 1
        def after_pred(self):
            if where=='forward': self.look()
        def before_backward(self): self.learn.pred.register_hook(lambda g: self.look())
        def look(self):
            if self.training and Short.n>moment and len(self.x)>cap: raise torch.OutOfMemoryError('planted')
    for on in (False,True):
        torch.manual_seed(0)
        ds = [(o,) for o in texts]
        dls = DataLoaders(*(LMDataLoader(ds, bs=bs, seq_len=5, shuffle=False) for bs in (6,4)))
        dls.vocab = list('abcdefghij')
        config = {**awd_lstm_lm_config, 'emb_sz':8, 'n_hid':6, 'n_layers':2}
        # (with a `drop_mult` of 0 fastai's own weight dropout fails in newer versions of torch)
        learn = language_model_learner(dls, AWD_LSTM, config=config, drop_mult=1e-12, pretrained=False, opt_func=SGD, cbs=Float32Loss())
        learn.loss_func = CrossEntropy()
        learn.model.double()
        learn.remove_cb(learn.progress)
        learn.logger = lambda *_: None
        learn.fit_one_cycle(2, 0.05, cbs=[GradientAccumulation(12, micro_batch_size='auto' if on else None)]+([Short()] if on else []))
        learns.append(learn)
    assert_twins(*learns)
    assert Short.n>moment and deviation(learns[0].recorder.losses, learns[1].recorder.losses)<2e-6
