"""Parameters in half precision: gradients are added up in float32, and rounded once.

The oracle is the mean, in float32, of the gradients that plain backward passes on the micro-batches give.
"""
import pytest, torch
from functools import partial
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader as TorchLoader, TensorDataset
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.training import GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastaccum import GradientAccumulation
from fastaccum.testing import deviation
from common import Raise, grads, weights

class Model(nn.Module):
    "Two layers in half precision; `mixed`: what normalises is in single precision"
    def __init__(self, dtype=torch.bfloat16, mixed=False):
        super().__init__()
        self.a,self.norm,self.b = nn.Linear(4, 8),nn.LayerNorm(8),nn.Linear(8, 3)
        self.to(dtype)
        self.dtype = dtype
        if mixed: self.norm.float()
    def forward(self, x):
        x = self.a(x.to(self.dtype))
        return self.b(self.norm(x.to(self.norm.weight.dtype)).to(self.dtype).tanh()).float()

def loss_func(pred, y): return F.cross_entropy(pred, y, ignore_index=-100)

def learner(n, bs=2, model=None, cbs=None, ignored=False, **kwargs):
    torch.manual_seed(0)
    model = (model or Model)()
    y = torch.randint(0, 3, (n,))
    if ignored: y[torch.rand(n)<0.3] = -100
    ds = TensorDataset(torch.randn(n, 4), y)
    learn = Learner(DataLoaders(TorchLoader(ds, bs), TorchLoader(ds, 64)), model, loss_func,
        **{'opt_func':SGD, **kwargs}, cbs=cbs)
    learn.remove_cb(learn.progress)
    learn.logger = lambda *_: None
    return learn

def mean_grads(learn, batches, size=lambda y: len(y)):
    "In float32, of plain backward passes on the batches"
    ps,total = list(learn.model.parameters()),sum(size(y) for _,y in batches)
    res = [torch.zeros_like(p, dtype=torch.float32) for p in ps]
    for x,y in batches:
        if not size(y): continue
        gs = torch.autograd.grad(loss_func(learn.model(x), y), ps)
        for r,g in zip(res, gs): r += g.float()*(size(y)/total)
    return res

def ulps(a, b):
    "How far is `a` from `b`, in units of the last place of `a`'s precision?"
    bits = {torch.bfloat16:7,torch.float16:10,torch.float32:23}[a.dtype]
    last = 2.**(torch.floor(torch.log2(b.abs().clamp(min=2.**-14)))-bits)
    return ((a.float()-b).abs()/last).max().item()

class AtStep(Callback):
    "The gradients of each step"
    order,run_valid = 8,False
    def before_fit(self): self.grads = []
    def before_step(self): self.grads.append(grads(self.learn))

# The law

@pytest.mark.parametrize('k', [4,16,64,256,1024])
@pytest.mark.parametrize('kwargs', [dict(), dict(mixed=True), dict(dtype=torch.float16)], ids=str)
@pytest.mark.parametrize('bs,last', [(2,2),(3,1)])
def test_within_two_units_of_the_mean(k, kwargs, bs, last):
    n,at = bs*(k-1)+last,AtStep()
    learn = learner(n, bs, partial(Model, **kwargs), at)
    expected = mean_grads(learn, list(learn.dls.train))
    learn.fit(1, 0., cbs=GradientAccumulation(n, drop_last=False))
    halves = [(a,b) for a,b in zip(at.grads[0], expected) if a.dtype!=torch.float32]
    assert len(at.grads)==1 and max(ulps(a, b) for a,b in halves)<=1
    assert all(a.dtype==p.dtype for a,p in zip(at.grads[0], learn.model.parameters()))
    for a,b in zip(at.grads[0], expected):
        if a.dtype==torch.float32: assert deviation(a, b)<1e-5

def test_one_large_and_many_small():
    "Half of the sum is lost if it is rounded each time"
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        def forward(self, x): return x.to(torch.bfloat16)*self.w
    x = torch.full((512,1), 2.**-9)
    x[0] = 1.
    ds,at = TensorDataset(x, x),AtStep()
    learn = Learner(DataLoaders(TorchLoader(ds, 1), TorchLoader(ds, 64)), One(), lambda p,y: p.float().mean(),
        opt_func=SGD, cbs=at)
    learn.remove_cb(learn.progress)
    learn.logger = lambda *_: None
    learn.fit(1, 0., cbs=GradientAccumulation(512))
    assert abs(at.grads[0][0].item()*512/(1+511/512)-1)<2**-8

def test_ignored_targets():
    "Weights are tensors then"
    at = AtStep()
    learn = learner(60, 3, cbs=at, ignored=True)
    learn.loss_func = nn.CrossEntropyLoss()
    expected = mean_grads(learn, list(learn.dls.train), lambda y: int((y!=-100).sum()))
    learn.fit(1, 0., cbs=GradientAccumulation(60))
    assert max(ulps(a, b) for a,b in zip(at.grads[0], expected))<=1

def reference(learn, accum, n_epoch, lrs, clip=None):
    "The steps of a loop that sums in float32"
    opt,batches,i = learn.opt,list(learn.dls.train),0
    k = accum//learn.dls.train.batch_size
    for _ in range(n_epoch):
        for j in range(0, len(batches), k):
            gs = mean_grads(learn, batches[j:j+k])
            for p,g in zip(learn.model.parameters(), gs): p.grad = g.to(p.dtype)
            if clip: nn.utils.clip_grad_norm_(learn.model.parameters(), clip)
            opt.set_hyper('lr', float(lrs[i][0]))
            opt.set_hyper('mom', float(lrs[i][1]))
            opt.step()
            i += 1

@pytest.mark.parametrize('clip', [None,0.3])
@pytest.mark.parametrize('mixed', [False,True])
def test_one_cycle(mixed, clip):
    "The weights of a whole fit are those of a loop that sums in float32, with the same hyper-parameters"
    opt_func = partial(SGD, mom=0.9)
    b = learner(96, 2, partial(Model, mixed=mixed), opt_func=opt_func)
    b.fit_one_cycle(3, 0.1, cbs=[GradientAccumulation(16),*([GradientClip(clip)] if clip else [])])
    a = learner(96, 2, partial(Model, mixed=mixed), opt_func=opt_func)
    a.create_opt()
    reference(a, 16, 3, list(zip(b.recorder.hps['lr'], b.recorder.hps['mom'])), clip)
    if mixed: assert deviation(weights(a), weights(b))<1e-3   # sums in float32 are in another order
    else: assert weights(a).equal(weights(b))

# What it costs, and what it leaves

def test_nothing_happens_in_single_precision():
    "No sums are kept, and gradients stay where they are"
    seen = []
    class See(Callback):
        run_valid = False
        def before_batch(self):
            g = self.model.a.weight.grad
            seen.append((self.gradient_accumulation.held.wide,g is not None and g.any().item()))
    learner(16, 2, partial(Model, torch.float32), [See()]).fit(1, 0., cbs=GradientAccumulation(8))
    assert [wide for wide,_ in seen]==[None]*8 and [g for _,g in seen]==[False,True,True,True]*2

def test_what_is_held():
    "4 bytes for each parameter within a macro-batch, none between"
    held = []
    class See(Callback):
        order,run_valid = 7,False
        def after_pred(self): held.append(sum(o.nbytes for _,o in self.gradient_accumulation.held.wide.sums.values()))
        before_step = after_pred
    learn = learner(16, 2, cbs=[See()])
    learn.fit(1, 0., cbs=GradientAccumulation(8))
    n = sum(p.numel() for p in learn.model.parameters())
    assert held==[0,4*n,4*n,4*n,0]*2

@pytest.mark.parametrize('opt', [SGD,Adam,partial(OptimWrapper, opt=torch.optim.AdamW)])
def test_parameters_without_a_gradient(opt):
    "As after one backward pass: none with torch's optimizers; with fastai's zeros where there was one before"
    learns = []
    for acc in (False,True):
        learn = learner(32, 2 if acc else 8, opt_func=opt)
        learn.create_opt()
        learn.model.norm.requires_grad_(False)
        learn.fit(2, 0.1, wd=0.1, cbs=[GradientAccumulation(8)] if acc else None)
        learns.append([g is None for g in grads(learn)]+[learn.model.norm.weight.clone()])
    assert learns[0][:-1]==learns[1][:-1] and learns[0][-1].equal(learns[1][-1])

class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb,self.lin = nn.Embedding(5, 4, sparse=True),nn.Linear(4, 3)
        self.to(torch.bfloat16)
    def forward(self, x): return self.lin(self.emb(x[:,0].abs().long().clamp(max=4))).float()

@pytest.mark.parametrize('kind', ['mean','ignored','sum'])
def test_sparse_gradients(kind):
    "What a row got several times is added up before it is rounded"
    at = AtStep()
    learn = learner(256, 2, Embedded, opt_func=partial(OptimWrapper, opt=torch.optim.SGD), ignored=kind=='ignored',
        cbs=at)
    if kind!='mean': learn.loss_func = nn.CrossEntropyLoss(reduction='sum' if kind=='sum' else 'mean')
    expected = mean_grads(learn, list(learn.dls.train), lambda y: int((y!=-100).sum()))
    if kind=='sum':   # each sample counts what it counts in its own batch's sum
        expected = [torch.zeros_like(o) for o in expected]
        for x,y in learn.dls.train:
            gs = torch.autograd.grad(learn.loss_func(learn.model(x), y), list(learn.model.parameters()))
            expected = [a+g.float() for a,g in zip(expected, gs)]
    learn.fit(1, 0., cbs=GradientAccumulation(256))
    assert at.grads[0][0].is_sparse and ulps(at.grads[0][0].to_dense(), expected[0].to_dense())<=1

def test_parameters_outside_of_the_optimizer():
    "Their gradients add up over steps, as in the big batch's run"
    def run(bs, *acc):
        learn = learner(64, bs, splitter=lambda m: [list(m.b.parameters())])
        learn.fit(1, 0., cbs=acc)
        return learn.model.a.weight.grad
    a,b = run(16),run(4, GradientAccumulation(16))
    assert deviation(a, b)<0.02 and b.dtype==torch.bfloat16 and b.any()

@pytest.mark.parametrize('order', [0,20])
def test_a_cancelled_step(order):
    "What it has left is added to the next, and not scaled with it"
    class Cancel(Callback):
        run_valid,n = False,0
        def before_step(self):
            self.n += 1
            if self.n==1: raise CancelBatchException
    Cancel.order,at = order,AtStep()
    at.order = 30
    learn = learner(24, 2, cbs=[at])
    first,second = (mean_grads(learn, list(learn.dls.train)[i:i+4]) for i in (0,4))
    learn.fit(1, 0., cbs=[GradientAccumulation(8),Cancel()])
    assert len(at.grads)==2
    for g,a,b in zip(at.grads[0], first, second): assert ulps(g, a.to(g.dtype).float()+b)<=1

@pytest.mark.parametrize('event', ['after_pred','before_backward','after_backward','before_step'])
@pytest.mark.parametrize('exc', [KeyboardInterrupt,RuntimeError])
def test_an_interrupt_leaves_nothing(event, exc):
    acc,learn = GradientAccumulation(8),learner(32, 2)
    with pytest.raises(exc): learn.fit(1, 0.1, cbs=[acc,Raise(event, exc, 0, at=1 if event=='before_step' else 6)])
    assert acc.held is None and not any(g is not None and g.any() for g in grads(learn))
    fresh = learner(32, 2)
    fresh.create_opt()
    learn.opt = None
    learn.create_opt()
    with torch.no_grad():
        for p,q in zip(learn.model.parameters(), fresh.model.parameters()): p.copy_(q)
    for o in (fresh,learn): o.fit(1, 0.1, cbs=GradientAccumulation(8))
    assert weights(fresh).equal(weights(learn))

@pytest.mark.parametrize('where', ['after_pred','before_backward'])
def test_memory_that_runs_out(where):
    "With 'auto' a failed micro-batch adds nothing to the sums"
    at = AtStep()
    class Short(Callback):
        order,run_valid = 50,False
        def after_pred(self):
            if where=='after_pred': self.fail()
        def before_backward(self):
            if where!='after_pred': self.learn.model.norm.weight.register_hook(self.fail)
        def fail(self, g=None):
            if len(self.pred)>2: raise torch.OutOfMemoryError('planted')
            return g
    learn = learner(32, 8, cbs=[at])
    expected = mean_grads(learn, [(x,y) for o in learn.dls.train for x,y in zip(o[0].split(2), o[1].split(2))])
    with pytest.warns(UserWarning, match='memory ran out'):
        learn.fit(1, 0., cbs=[GradientAccumulation(32, micro_batch_size='auto'),Short()])
    assert max(ulps(a, b) for a,b in zip(at.grads[0], expected))<=1

def test_with_a_number():
    at = AtStep()
    learn = learner(32, 32, cbs=[at])
    (x,y), = learn.dls.train
    expected = mean_grads(learn, list(zip(x.split(2), y.split(2))))
    learn.fit(1, 0., cbs=GradientAccumulation(32, micro_batch_size=2))
    assert max(ulps(a, b) for a,b in zip(at.grads[0], expected))<=1
