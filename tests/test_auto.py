"""`micro_batch_size='auto'` under random failures, on batches of all kinds.

A kind is a way to write the same samples down, and a model that reads it. Memory runs out in the forward pass, in the
loss or in the middle of the backward pass, above a number of samples or at moments drawn by chance; the oracle is the
run with enough memory, on big batches where the batches can be joined.
"""
import pytest, random, warnings
import torch
from collections import UserDict, namedtuple
from functools import partial
from torch import nn
from torch.utils.data import DataLoader as TorchLoader
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam, SGD
from fastaccum import GradientAccumulation
from fastaccum.memory.recovery import AutoSize
from fastaccum.testing import CrossEntropy, Float32Loss, assert_twins, deviation, toy
from common import InBackward, Raise, grads, weights

pytestmark = pytest.mark.filterwarnings('ignore:memory ran out')

class Encoding(UserDict):
    "As Hugging Face's `BatchEncoding`: a mapping that is no dict, and as long as it has keys"
    def __init__(self, data=None): super().__init__(data)
    def to(self, device): return Encoding({k:v.to(device) for k,v in self.items()})

Pair = namedtuple('Pair', 'a b')

# Each kind: a function of samples `(x, y)` that makes a batch; one of its inputs gives `x`, one of its targets `y`

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
def listed(items):
    return [x for x,_ in items],[{'y':y[None],'more':torch.zeros(i%4, 3)} for i,(_,y) in enumerate(items)]
def boxes(items):
    return stacked(items)[0],[{'more':torch.zeros((i+1)%3, 3),'y':y[None]} for i,(_,y) in enumerate(items)]
def tupled(items): return tuple(x for x,_ in items),tuple({'y':y[None]} for _,y in items)

def first(o):
    if isinstance(o, torch.Tensor): return o
    if isinstance(o, (dict,UserDict)): return o['y'] if 'y' in o else o['a']+0*o['b']
    if isinstance(o[0], dict): return torch.cat([x['y'] for x in o])
    if isinstance(o, (list,tuple)) and o[0].ndim==1 and o[0].is_floating_point(): return joined(o)
    return o[0]

kinds = [tensors,dicts,encoding,lists,pairs,names,listed,boxes,tupled]

class Model(nn.Module):
    "Runs out of memory `where` `short` says so, for a number of samples"
    short = None
    def __init__(self, state=None):
        super().__init__()
        self.a,self.b,self.c,self.state = nn.Linear(5, 6),nn.Linear(6, 6),nn.Linear(6, 3),state
    def need(self, where, n):
        if self.short is None or not self.training or not (where=='backward' or torch.is_grad_enabled()): return
        if self.short(where, n): raise torch.OutOfMemoryError(f'planted, {where}')
    def forward(self, x):
        x = first(x)
        h = self.a(x).tanh()
        if self.state is not None: h = self.state(h)
        self.need('forward', len(x))
        return self.c(self.b(InBackward.apply(h, lambda n: self.need('backward', n))).tanh())

class Loss(nn.Module):
    def forward(self, pred, *targ):
        self.need('loss', len(pred))
        return nn.functional.cross_entropy(pred, first(targ[0]))

def items(n, seed):
    gen = torch.Generator().manual_seed(seed)
    return [(torch.randn(5, generator=gen, dtype=torch.float64),torch.randint(0, 3, (1,), generator=gen)[0])
        for _ in range(n)]

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
    a,b = (make(kind, sum(sizes), sampler=o, seed=seed) for o in (Sizes(big, 8),Sizes(sizes, 4)))
    if micro: b.model.short = trouble(rng, 6)
    a.fit(1, 0.05)
    b.fit(1, 0.05, cbs=GradientAccumulation(8, micro_batch_size=micro, drop_last=False))
    assert len(b.recorder.losses)==len(big)
    assert deviation(weights(a), weights(b))<1e-7 and deviation(a.recorder.losses, b.recorder.losses)<2e-6

def test_a_mapping_that_cannot_be_made_anew_is_refused_before_a_weight_moves():
    class Closed(Encoding):
        def __init__(self, a, b): super().__init__(dict(a=a, b=b))
        def to(self, device): return self
    def closed(items):
        x,y = stacked(items)
        return Closed(x, x),y
    learn = make(closed, 20, 4)
    learn._set_device = lambda b: b   # (fastai's makes it a dict)
    learn.model.short = lambda where,n: True
    before = weights(learn)
    with pytest.raises(TypeError, match='a Closed .* in a batch of 4 samples cannot be split'):
        learn.fit(1, 0.05, cbs=GradientAccumulation(4, micro_batch_size='auto'))
    assert weights(learn).equal(before)

# BatchNorm

class Norm(nn.BatchNorm1d):
    def __init__(self): super().__init__(6); self.seen = []
    def forward(self, x):
        if self.training: self.seen.append(len(x))
        return super().forward(x)

@pytest.mark.parametrize('n,cap,sizes',
    [(25,12,[9,8,8]),(26,13,[13,13]),(9,4,[3,3,3]),(7,3,[3,2,2]),(17,5,[3,3,3,3,3,2])])
def test_batches_are_split_evenly(n, cap, sizes):
    "No sample is left alone, with which BatchNorm would fail; and nobody says that the result is the same"
    learn = make(tensors, n*2, n, state=Norm)
    learn.model.short = lambda where,k: where=='loss' and k>cap
    text = 'memory ran out.*but not with the same result: Norm normalises with the samples of a micro-batch'
    with pytest.warns(UserWarning, match=text) as told:
        learn.fit(2, 0.05, cbs=GradientAccumulation(n, micro_batch_size='auto'))
    assert not any(', with the same result' in str(o.message) for o in told)
    assert learn.model.state.seen[-4*len(sizes):]==sizes*4

@pytest.mark.parametrize('state', [None,Norm])
def test_the_same_result_is_said_where_it_is_true(state):
    learn = make(tensors, 32, 8, state=state)
    if state: learn.model.state.eval().requires_grad_(False)
    class Frozen(Callback):
        def before_train(self):
            if state: self.model.state.eval()
    learn.model.short = lambda where,k: k>4
    with pytest.warns(UserWarning, match='memory ran out.*, with the same result, in micro-batches of 4'):
        learn.fit(1, 0.05, cbs=[GradientAccumulation(8, micro_batch_size='auto'),Frozen()])

# Entering and leaving

def left(learn): return {'one_batch','_do_one_batch','all_batches','_step'}&vars(learn).keys()

def test_validation_after_a_refused_fit_leaves_nothing():
    acc = GradientAccumulation(64, micro_batch_size='auto', drop_last=True)
    learn = toy(8, n=40, cbs=acc)
    with pytest.raises(ValueError, match='would hold no step'): learn.fit(1, 0.1)
    learn.validate()
    assert not left(learn)

@pytest.mark.parametrize('event', ['before_epoch','after_epoch'])
def test_another_fit_between_epochs(event):
    "It is split, and the next epoch is split as well"
    from test_loud import Nested
    a,b = make(tensors, 40, 16),make(tensors, 40, 8)
    b.model.short = lambda where,n: where=='loss' and n>4
    acc = GradientAccumulation(16, micro_batch_size='auto', drop_last=False)
    b.add_cb(acc)
    for o in (a,b): o.fit(3, 0.05, cbs=Nested(event, 'fit'))
    assert deviation(weights(a), weights(b))<1e-7 and acc.micro.size==4
    assert not left(b)

def test_validation_in_a_fit_is_split_after_a_validation_of_a_callback():
    "`validate` in the middle of a fit changes nothing"
    a,b = make(tensors, 40, 16),make(tensors, 40, 8)
    b.model.short = lambda where,n: n>4
    class Midway(Callback):
        order,run_valid = 70,False
        def before_train(self): self.learn.validate()
    for o,cbs in ((a,[]),(b,[GradientAccumulation(16, micro_batch_size='auto', drop_last=False)])):
        o.fit_one_cycle(2, 0.05, cbs=[*cbs,Midway()])
    assert deviation(weights(a), weights(b))<1e-7 and not left(b)

def test_half_entered_and_left_twice():
    "`leave` finds what an interrupted `enter` has done, whatever it is"
    from fastaccum.memory import guard, pieces
    for nm in ('one_batch','_do_one_batch','_step'):
        acc = GradientAccumulation(8, micro_batch_size='auto')
        learn = toy(4, n=16)
        learn.create_opt()
        learn.add_cb(acc)
        class Broken(pieces.Instead):
            def enter(self):
                super().enter()
                if self.nm==nm: raise KeyboardInterrupt
        with pytest.MonkeyPatch.context() as mp:
            for o in (pieces,guard): mp.setattr(o, 'Instead', Broken)
            with pytest.raises(KeyboardInterrupt): acc.micro.enter(acc)
        assert nm in vars(learn)
        for _ in range(2): acc.micro.leave()
        assert not left(learn)
        learn.fit(1, 0.1)
        assert not left(learn)

def test_methods_of_the_learners_own_are_given_back():
    learn,called = toy(4, n=16),[]
    def one_batch(i, b):
        called.append(i)
        return type(learn).one_batch(learn, i, b)
    learn.one_batch = one_batch
    learn.fit(1, 0.1, cbs=GradientAccumulation(8, micro_batch_size='auto'))
    assert vars(learn)['one_batch'] is one_batch and called[:4]==[0,1,2,3]

def test_switched_off_in_the_middle_of_a_batch():
    "What is left of it is left out, so that it ends as an empty batch, and the fit goes on without accumulation"
    class Off(Callback):
        run_valid,n = False,0
        def after_batch(self):
            self.n += 1
            if self.n==2: self.gradient_accumulation.run = False
    learn,off = make(tensors, 32, 8),Off()
    learn.model.short = lambda where,n: where=='forward' and n>2 and not off.n
    learn.fit(1, 0.05, cbs=[GradientAccumulation(16, micro_batch_size='auto'),off])
    assert off.n==2+1+3 and not left(learn)

# A split of one's own

class Splits:
    def part(self, b, start, stop, n): return tuple(o[start:stop] for o in b)
    def __call__(self, b, start, stop, n, more=None): return self.part(b, start, stop, n)

@pytest.mark.parametrize('f', [3,'auto',None,lambda b: b,lambda b,start,stop: b,Splits,torch.split,
    nn.Linear(1, 1).weight], ids=lambda o: type(o).__name__)
def test_a_split_that_cannot_be_called_is_refused(f):
    with pytest.raises(TypeError, match=r'is no function of a batch.*AutoSize\(split=f\)') as e: AutoSize(f)
    assert f'`split={f!r}`' in str(e.value)

@pytest.mark.parametrize('f', [Splits(),Splits().part,partial(Splits().part),lambda *args: Splits().part(*args)],
    ids=type)
def test_a_split_that_can_be_called_is_used(f):
    a,b = make(tensors, 32, 16),make(tensors, 32, 8)
    b.model.short = lambda where,n: n>3
    a.fit(1, 0.05)
    b.fit(1, 0.05, cbs=GradientAccumulation(16, micro_batch_size=AutoSize(split=f)))
    assert_twins(a, b)

# Pieces that a callback cancels

class Cancel(Callback):
    "Cancels the `which`th micro-batch of four samples"
    run_valid = False
    def __init__(self, event, exc, order, which):
        self.exc,self.order,self.which = exc,order,which
        setattr(self, event, self.perhaps)
    def perhaps(self):
        if len(self.y)!=4: return
        self.which -= 1
        if not self.which: raise self.exc

class AtStep(Callback):
    "How far is each step's gradient from that of all samples that were counted?"
    order,run_valid = -1000,False
    def before_fit(self): self.xs,self.ys,self.offs = [],[],[]
    def after_backward(self):
        if self.gradient_accumulation.counted:
            self.xs.append(self.x)
            self.ys.append(self.y)
    def before_step(self):
        short,self.model.short = self.model.short,None
        loss = nn.functional.cross_entropy(self.model(torch.cat(self.xs)), torch.cat(self.ys))
        self.offs.append(deviation(list(torch.autograd.grad(loss, list(self.model.parameters()))), grads(self.learn)))
        self.model.short,self.xs,self.ys = short,[],[]

cancels = [(o,CancelBatchException) for o in ('after_pred','after_loss','before_backward')]
cancels.append(('before_backward',CancelBackwardException))

@pytest.mark.parametrize('order', [-5,8])
@pytest.mark.parametrize('which', [1,2])
@pytest.mark.parametrize('event,exc', cancels, ids=str)
@pytest.mark.parametrize('where', ['forward','backward'])
def test_a_piece_that_is_cancelled(where, event, exc, which, order):
    "No gradient is lost, and none stays that was not counted: where it was added already, an error says so"
    learn,at_step,calls = make(tensors, 32, 8),AtStep(),[]
    def short(at, n):   # the first batch fits, the second does not
        if at!=where or n<=4: return False
        calls.append(n)
        return len(calls)>1
    learn.model.short = short
    cbs = [GradientAccumulation(16, micro_batch_size='auto', drop_last=False),at_step,Cancel(event, exc, order, which)]
    if where=='backward':   # `b` and `c` have got all of it, `a` has not
        before = weights(learn)
        with pytest.raises(torch.OutOfMemoryError, match='cancelled 4 of its samples since.*batch size that fits'):
            learn.fit(1, 0.05, cbs=cbs)
        assert weights(learn).equal(before) and not left(learn)
    else:
        learn.fit(1, 0.05, cbs=cbs)
        assert len(at_step.offs)==2 and max(at_step.offs)<1e-12

# Models that remember

class Hidden(nn.Module):
    "A state with a row per sample, in a list of tuples as `AWD_LSTM`'s; takes the first rows of fewer samples"
    def __init__(self):
        super().__init__()
        self.rnn,self.bs,self.hidden = nn.RNNCell(6, 6),1,[(torch.zeros(1, 1, 6, dtype=torch.float64),)]
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

class Box:
    "An object that is neither a module nor a container"
    def __init__(self, hidden=None): self.hidden,self.calls,self.sizes = hidden,0,[]

class Kept(Hidden):
    "The state is in an object that stays, in a list; begins anew with another number of rows"
    def __init__(self): super().__init__(); self.boxes = [Box(),None]
    def forward(self, x):
        box = self.boxes[0]
        h = box.hidden
        box.calls += 1
        h = self.rnn(x, h if h is not None and len(h)==len(x) else None)
        box.hidden = h.detach()
        return h

class Anew(Kept):
    "The state is in an object that is made anew"
    def forward(self, x):
        h = super().forward(x)
        self.boxes = [Box(h.detach()),None]
        return h

class Noted(Stateless):
    "As `Stateless`, in an object"
    def __init__(self):
        super().__init__()
        self.book = Box()
    def forward(self, x):
        self.book.calls += 1
        self.book.sizes.append(len(x))
        self.calls,self.sizes = self.book.calls,self.book.sizes
        return x

class Told(Stateless):
    "Nobody reads what is in the object"
    def forward(self, x):
        self.last = Box(x)
        return x

@pytest.mark.parametrize('seed', range(5))
@pytest.mark.parametrize('state', [Hidden,Unset,Buffered,Stateless,Kept,Told])
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

class Fixed(Hidden):
    "Has a state for just as many rows"
    def __init__(self): super().__init__(); self.hidden = torch.zeros(4, 6, dtype=torch.float64)
    def forward(self, x):
        self.hidden = h = self.rnn(x, self.hidden.detach())
        return h

class First(Fixed):
    "Writes into the first rows of its state"
    def __init__(self): super().__init__(); del self.hidden; self.register_buffer('hidden', torch.zeros(4, 6))
    def forward(self, x):
        h = self.rnn(x, self.hidden[:len(x)].clone())
        self.hidden[:len(x)] = h.detach()
        return h

@pytest.mark.parametrize('state,why', [(Fixed,'fails with other samples'),
    (First,'writes into the first of its rows'),(Anew,'is an object that is made anew')])
def test_a_state_that_cannot_be_split_is_refused(state, why):
    learn = make(tensors, 32, 4, state=state)
    learn.dls.loaders[1] = TorchLoader(items(8, 1), 4, collate_fn=tensors)
    learn.model.short = lambda where,n: n>2
    before = weights(learn)
    with pytest.raises(ValueError, match=f'`hidden` from batch to batch, and {why}.*batch size that fits'):
        learn.fit(1, 0.05, cbs=GradientAccumulation(4, micro_batch_size='auto'))
    assert weights(learn).equal(before) and not left(learn)

def test_a_state_that_nobody_reads_may_have_other_rows():
    "As that of a text classifier, which begins anew with each batch"
    class Anew(Hidden):
        def forward(self, x):
            self.hidden = [(torch.zeros(1, self.bs, 6, dtype=torch.float64),)]
            return super().forward(x)
    a,b = (make(tensors, 36, bs, state=Anew) for bs in (16,8))
    b.model.short = lambda where,n: n>4
    a.fit(2, 0.05)
    b.fit(2, 0.05, cbs=GradientAccumulation(16, micro_batch_size='auto', drop_last=False))
    assert deviation(weights(a), weights(b))<1e-7

@pytest.mark.parametrize('where', ['forward','backward'])
@pytest.mark.parametrize('state', [Stateless,Noted])
def test_counted_once(state, where):
    "What a failed attempt has counted is taken back"
    a,b = make(tensors, 32, 4, state=state),make(tensors, 32, 8, state=state)
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
        # (with a `drop_mult` of 0 fastai's own weight dropout fails in newer versions of torch; its regularization is
        # in single precision)
        learn = language_model_learner(dls, AWD_LSTM, config=config, drop_mult=1e-12, pretrained=False, opt_func=SGD,
            alpha=0., beta=0., cbs=Float32Loss())
        learn.loss_func = CrossEntropy()
        learn.model.double()
        learn.remove_cb(learn.progress)
        learn.logger = lambda *_: None
        learn.fit_one_cycle(2, 0.05,
            cbs=[GradientAccumulation(12, micro_batch_size='auto' if on else None)]+([Short()] if on else []))
        learns.append(learn)
    assert_twins(*learns)
    assert Short.n>moment and deviation(learns[0].recorder.losses, learns[1].recorder.losses)<2e-6
