"`GradientCache`: the model sees micro-batches, the loss and all else the loader's batch, and the run is the full-batch run."
import os, pytest, random, torch
from collections import OrderedDict
from copy import deepcopy
from functools import partial
from hypothesis import given, strategies as st
from itertools import product
from torch import nn
from torch.distributions import Beta
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader as TorchLoader, TensorDataset
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.callback.fp16 import AMPMode
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.training import GradientClip
from fastai.learner import trainable_params
from fastai.metrics import accuracy
from fastai.optimizer import Adam, OptimWrapper
from fastai.torch_core import TensorImage
from fastaccum import FreezeBN, GradientAccumulation, GradientCache
from fastaccum.testing import CrossEntropy, assert_twins, deviation, one_cycle, toy, toy_data
from common import CpuMixedPrecision, InBackward, Raise, Seen, grads, short_of, some, weights
from small_learners import Held, Holds, applications, frozen, make, replaced, scores

pytestmark = pytest.mark.usefixtures('frozen')

# Losses in which all samples of a batch see each other

def nt_xent(z, y=None):
    "Chen et al., 2020: of samples 2i and 2i+1, each has to find the other"
    z = F.normalize(z.flatten(1))
    sim = (z@z.T/0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
    return F.cross_entropy(sim, (torch.arange(len(z))^1)%len(z))

def dice(z, y):
    "One coefficient for all samples of the batch together; classes in the second dimension"
    p,t = z.softmax(1),F.one_hot(y, 3).movedim(-1, 1)
    return 1-2*(p*t).sum()/(p+t).sum()

def in_place(z, y):
    "Writes into the predictions"
    z[:,0] *= 2
    return nt_xent(z.sigmoid_())

class Penalty(Callback):
    "On the weights, which the loss's backward pass reaches by itself, and on the predictions"
    order,run_valid = 2,False
    def after_pred(self): self.learn.pred = self.pred*1.5
    def after_loss(self):
        self.learn.loss_grad = self.loss_grad+0.1*sum(p.pow(2).sum() for p in self.model.parameters())
        self.learn.loss_grad += 0.1*self.pred.pow(2).mean()

class CallsModel(Callback):
    "An adversarial input, and a second look of the loss at the model: both mean the model itself"
    order,run_valid = 1,False
    def before_batch(self):
        x = self.x.clone().requires_grad_()
        self.learn.xb = (self.x+0.1*torch.autograd.grad(self.model(x).sum(), x)[0].sign(),)
    def after_loss(self): self.learn.loss_grad = self.loss_grad+self.model(self.x*2).pow(2).mean()

class Scaled(CpuMixedPrecision):
    "The GradScaler without the half precision; the gradients of the second batch overflow"
    def before_fit(self):
        super().before_fit()
        self.autocast = torch.autocast('cpu', enabled=False)
    def before_backward(self):
        if self.training and self.iter==1: self.learn.loss_grad = self.loss_grad*float('inf')
        super().before_backward()

def all_params(m): return [list(m.parameters())]
def net(*more): return nn.Sequential(nn.Linear(5,6), *more, nn.Tanh(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).double()

def fit(cbs, bs=16, fit=one_cycle, seed=0, **kwargs):
    learn = toy(bs, **dict(dict(seed=seed, n=41, loss_func=nt_xent), **kwargs))
    torch.manual_seed(seed)
    random.seed(seed)
    fit(learn, cbs)
    return learn

same = partial(assert_twins, tol=1e-10)
def assert_same(size=5, cbs=list, model=None, **kwargs):
    "The run with a cache is the run without; returns the first"
    a,b = (fit([*own,*cbs()], model=model, **kwargs) for own in ([],[GradientCache(size)]))
    same(a, b)
    assert replaced(b)==replaced(a)
    return b

# The law

@given(st.integers(1, 30), st.integers(2, 30), st.integers(30, 60), st.integers(0, 9), st.booleans(),
    st.sampled_from([nt_xent,dice,CrossEntropy()]))
def test_any_loss_and_any_sizes(size, bs, n, seed, shuffle, loss):
    assert_same(size, bs=bs, n=n, seed=seed, shuffle=shuffle, loss_func=loss, fit=lambda l,cbs: l.fit_one_cycle(1, 0.1, cbs=cbs))

def accumulated(size=32, **kwargs): return GradientAccumulation(size, drop_last=False, **kwargs)
def fits(l, cbs):
    "Fits of several kinds, on a part and on the whole"
    with l.added_cbs(cbs):
        l.fit(1, 0.05)
        l.freeze()
        l.fit_flat_cos(1, 0.05)
        l.validate()
        l.unfreeze()
        l.fit_one_cycle(1, 0.05)
        l.recorder.values.append(l.get_preds()[0].flatten().tolist())
def lr_find(l, cbs):
    with l.added_cbs(cbs): l.lr_find(num_it=7, show_plot=False, suggest_funcs=None)
    assert len(l.recorder.lrs)==7

settings = dict(adam=dict(opt_func=Adam, metrics=accuracy), adamw=dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)),
    clip=dict(cbs=lambda: [GradientClip(0.05)]), scaler=dict(cbs=lambda: [Scaled(init_scale=2.**10, growth_interval=3)]),
    penalties=dict(cbs=lambda: [Penalty()]), calls=dict(cbs=lambda: [CallsModel()]), in_place=dict(loss_func=in_place),
    fits=dict(fit=fits), lr_find=dict(fit=lr_find), accumulated=dict(cbs=lambda: [accumulated()], n=75, metrics=accuracy),
    all=dict(cbs=lambda: [accumulated(),Scaled(init_scale=2.**10),GradientClip(0.05),Penalty()], n=75))

@pytest.mark.parametrize('nm', settings)
def test_with_what_else_there_is(nm): assert_same(**settings[nm])

def test_accumulated_mean_is_the_full_batchs():
    "Three sizes: the model's micro-batch, the loader's batch and the step; a mean needs none of them"
    same(fit([], bs=32, n=75, loss_func=CrossEntropy()), fit([accumulated(),GradientCache(5)], n=75, loss_func=CrossEntropy()))

@pytest.mark.parametrize('mix', [MixUp,CutMix])
def test_mixup_mixes_the_whole_batch(mix, monkeypatch):
    def mixes():
        cb = mix()
        cb.distrib = Beta(*torch.tensor([0.4, 0.4]).double())
        return [cb]
    class Images(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = net()
        def forward(self, x): return self.m(x.mean((1,2)))
    loss = CrossEntropy()
    loss.y_int,loss.forward = True,lambda z,y: F.cross_entropy(z, y, reduction=loss.reduction)
    x,y = torch.randn(41, 4, 5, 5, dtype=torch.float64),torch.randint(0, 3, (41,))
    torch.set_default_dtype(torch.float64)   # in which fastai's MixUp draws
    try: assert_same(3, mixes, Images, loss_func=loss, data=TensorDataset(x, y), splitter=all_params)
    finally: torch.set_default_dtype(torch.float32)

# Who sees what

class Sizes(nn.Module):
    "How many samples it sees"
    def __init__(self, seen):
        super().__init__()
        self.f = seen.append
    def forward(self, x):
        self.f(len(x))
        return x

def test_the_model_sees_micro_batches_and_the_others_the_batch():
    "Also in validation and prediction; a hook of the model is one of the others"
    seen,hooked,preds = [],[],Seen('after_pred', lambda l: len(l.pred))
    learn = toy(16, n=32, model=lambda: net(Sizes(seen)), loss_func=nt_xent, cbs=GradientCache(5))
    learn.model.register_forward_hook(lambda m,i,o: hooked.append((len(i[0]),len(o))))
    learn.fit(1, 0.1, cbs=preds)
    learn.validate()
    assert learn.get_preds()[0].shape==(32,3)
    assert preds.values==[16]*2 and hooked==[(16,16)]*2+[(32,32)]*3
    assert max(seen)<=5 and seen.count(4)>=2*(2*4-1)   # evenly, and all but the last twice
    learn.gradient_cache.run = False
    seen.clear()
    learn.fit(1, 0.1)
    assert seen==[16,16,32]

def test_activations_of_one_micro_batch_are_held():
    def most(*cbs):
        learn = toy(32, n=64, model=lambda: nn.Sequential(nn.Linear(5, 8), *(Holds(8) for _ in range(6))).double(),
            loss_func=nt_xent, splitter=all_params)
        Held.reset()
        learn.fit(1, 0.1, cbs=cbs)
        assert Held.now==0   # a batch is let go
        return Held.most
    assert most()>=6*32 and most(GradientCache(4))<=7*4

# What is random, and what a forward pass moves

class InParts(nn.Module):
    "The model, applied to the micro-batches in one graph"
    def __init__(self, m, size):
        super().__init__()
        self.m,self.size = m,size
    def forward(self, x): return torch.cat([self.m(o) for o in x.split(self.size)]) if self.training else self.m(x)

class Own(nn.Module):
    "Draws from a generator of its own, from Python's and PyTorch's, and counts"
    def __init__(self):
        super().__init__()
        self.gen,self.calls = torch.Generator().manual_seed(0),0
        self.register_buffer('sums', torch.ones(()).double())
    def forward(self, x):
        if not self.training: return x
        self.calls += 1
        self.sums += 1
        return x*torch.rand(x.shape, generator=self.gen, dtype=x.dtype)*(self.sums.log()+self.calls/9+random.random()+torch.rand(1))

moving = dict(dropout=lambda: nn.Dropout(0.7), spectral=lambda: spectral_norm(nn.Linear(6, 6), n_power_iterations=2),
    batchnorm=lambda: nn.BatchNorm1d(6), own=Own)

@pytest.mark.filterwarnings('ignore:BatchNorm1d normalises')
@pytest.mark.parametrize('nm,size', list(product(moving, [2,8])))
def test_forward_passes_are_those_of_one_pass_over_the_parts(nm, size):
    "What they draw and move, and what the loss and others draw after them; none of it twice"
    def noisy(z, y): return nt_xent(z+0.1*torch.randn_like(z))
    def run(model, cbs):
        drawn = Seen('after_batch', lambda _: (torch.rand(1).item(), random.random()))
        learn = fit([*cbs,drawn], n=48, model=model, splitter=all_params, loss_func=noisy)
        learn.recorder.values.append(drawn.values)
        return learn
    def model(): return net(moving[nm]())
    a,b = run(lambda: InParts(model(), size), []),run(model, [GradientCache(size)])
    a.model = a.model.m
    same(a, b)
    if nm=='own': assert a.model[1].calls==b.model[1].calls and deviation(*(o.model[1].gen.get_state() for o in (a,b)))==0

def test_what_cannot_be_done_again_is_said():
    class Secret(nn.Module):
        def forward(self, x): return x*torch.tensor([o/255 for o in os.urandom(x.shape[-1])], dtype=x.dtype)
    with pytest.warns(UserWarning, match='something else when it'): fit([GradientCache(5)], model=lambda: net(Secret()))

@pytest.mark.parametrize('more', [[],[accumulated]])
def test_batchnorm_is_told_once_in_a_fit(more):
    learn = toy(16, n=32, model=lambda: net(nn.BatchNorm1d(6)), cbs=[GradientCache(8),*(o() for o in more)])
    for _ in range(2):
        with pytest.warns(UserWarning, match='BatchNorm.*micro-batch, 8 at most') as said: learn.fit(2, 0.1)
        assert sum('BatchNorm' in str(o.message) for o in said)==1

# Half precision

@pytest.mark.parametrize('mode,penalty', list(product(AMPMode, [False,True])))
def test_mixed_precision_is_no_further_off_than_mixed_precision(mode, penalty):
    "The second pass is in the precision of the first. A penalty on weights meets those that autocast has cast"
    class OnWeights(Callback):
        order,run_valid = 2,False
        def after_loss(self): self.learn.loss_grad = self.loss_grad+(torch.eye(6)@self.model[2].weight).float().pow(2).mean()
    def run(half, cbs):
        types = Seen('after_pred', lambda l: l.pred.dtype)
        learn = fit([*([CpuMixedPrecision(mode)] if half else []),types,*([OnWeights()] if penalty else []),*cbs],
            data=TensorDataset(toy_data(41).tensors[0].float(), toy_data(41).tensors[1]), model=lambda: net().float())
        assert {o.itemsize for o in types.values}=={2 if half else 4} and None not in grads(learn)
        return learn
    single,a,b = run(False, []),run(True, []),run(True, [GradientCache(5)])
    for f in (weights,lambda l: l.recorder.losses): assert deviation(f(a), f(b))<=2*deviation(f(a), f(single))

def test_gradients_of_half_precision_weights_are_added_in_single():
    "A sum of ones in bfloat16 ends at 256"
    class Ones(Callback):
        order = -40
        def before_batch(self): self.learn.xb = (torch.ones(len(self.y), 5).bfloat16(),)
    noted = Seen('before_step', grads)
    fit([GradientCache(1),Ones(),noted], bs=512, n=512, model=lambda: nn.Linear(5, 3).bfloat16(), splitter=trainable_params,
        loss_func=lambda z,y: z.float().sum(), fit=lambda l,cbs: l.fit(1, 0., cbs=cbs))
    assert noted.values and all((g==512).all() for g in noted.values[0])

# What the model is given, and what it returns

class Output(OrderedDict):
    "As transformers' `ModelOutput`"
    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        self.__dict__[k] = v

class Towers(nn.Module):
    "As CLIP: two towers, one with a dict, and a temperature that is learned. Some outputs have no rows, gradient, or use"
    def __init__(self, out=dict):
        super().__init__()
        self.a,self.b,self.scale,self.out = net(),net(),nn.Parameter(torch.tensor(0.7).double()),out
    def forward(self, x, text):
        a,b = self.a(x.mul_(0.5)),self.b(text['ids'])   # it may write into its input
        res = a,b,self.scale.exp(),x.argmax(-1),a.detach(),None,'clip',[a*2,(b*3,)]
        if self.out is tuple: return res
        return self.out(zip('a b scale i fixed none name list'.split(), res if self.training else res[:5]))   # fewer in evaluation

def clip_loss(out, y):
    a,b,scale = (out if isinstance(out, tuple) else list(out.values()))[:3]
    sim,y = scale*F.normalize(a)@F.normalize(b).T,torch.arange(len(a))
    return F.cross_entropy(sim, y)+F.cross_entropy(sim.T, y)

class Pairs(Callback):
    "The batch with a second input: a dict, with a list of names; the first as one of fastai's tensors"
    order = 10
    def before_batch(self):
        x = self.x.as_subclass(TensorImage)
        x.img_size = 7
        self.learn.xb = x,dict(ids=self.x.roll(1, -1), names=['a']*len(x))

def flat(o):
    o = list(o.values()) if isinstance(o, dict) else o
    return [x for v in o for x in flat(v)] if isinstance(o, (tuple,list)) else [o]

@pytest.mark.parametrize('out,size', list(product([dict,tuple,Output], [1,5])))
def test_inputs_and_outputs_of_all_kinds(out, size):
    def look(l): return type(l.pred),[(type(o),o.shape,o.requires_grad,o.tolist() if o.dtype==torch.int64 else vars(o))
        if isinstance(o, torch.Tensor) else o for o in flat(l.pred)]
    seen = [Seen('after_pred', look) for _ in range(2)]
    order = iter(seen)
    assert_same(size, lambda: [Pairs(),next(order)], lambda: Towers(out), loss_func=clip_loss, splitter=all_params)
    assert seen[0].values==seen[1].values and len(seen[0].values)==6

# Real Learners, with BatchNorm that is frozen

@pytest.mark.filterwarnings('ignore:there is no BatchNorm')
@pytest.mark.parametrize('nm', applications)
def test_applications(nm):
    if nm in ('bert','gpt2'): pytest.importorskip('transformers')
    loss = dict(unet=dice, language_model=CrossEntropy()).get(nm, lambda out,*_: nt_xent(scores(out)))
    def run(*cbs):
        learn = make(nm, loss_func=loss)
        if nm=='gpt2': learn.model.config.use_cache = False
        before = weights(learn)
        learn.fit_one_cycle(1, 1e-3, cbs=[*cbs,FreezeBN()])
        assert not weights(learn).allclose(before, atol=1e-4) and len(learn.recorder.losses)>1
        return learn
    assert_twins(run(), run(GradientCache(3)))

def test_compiled():
    "By the eager backend, which compiles nothing: what matters is the wrapper"
    def run(*cbs):
        learn = toy(16, n=32, loss_func=nt_xent, splitter=trainable_params)
        learn.model = torch.compile(learn.model, backend='eager', dynamic=True)
        learn.fit(1, 0.1, cbs=cbs)
        return learn
    same(run(), run(GradientCache(5)))

# What cannot be had from micro-batches is refused, and no weight has moved

class Returns(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.m,self.f = net(),f
    def forward(self, x): return self.f(self.m(x))

class Event(Callback):
    "Call `f` with the Learner at `event`"
    order = 1
    def __init__(self, event, f, valid=False):
        self.run_valid = valid
        setattr(self, event, lambda: f(self.learn))

def refused(exc, match, *cbs, change=None, still=True, **kwargs):
    learn = toy(16, n=32, splitter=all_params, **kwargs)
    if change: change(learn)
    before = weights(learn)
    with pytest.raises(exc, match=match): learn.fit(1, 0.1, cbs=[GradientCache(4),*cbs])
    assert not replaced(learn) and weights(learn).equal(before)==still
    return learn

@pytest.mark.parametrize('f,match', [(lambda z: z@z.T, 'pairs|row for each'), (lambda z: z.pow(2).mean(), r'shape \(\)'),
    (lambda z: z.T, r'shape \(3, '), (lambda z: (z,object()), 'returned a object')], ids=['pairs','loss','transposed','object'])
def test_outputs_without_a_row_for_each_sample_are_refused(f, match):
    def total(z, y): return sum(o.sum() for o in flat(z) if isinstance(o, torch.Tensor))
    learn = refused(TypeError, match, model=lambda: Returns(f).double(), loss_func=total)
    learn.fit(1, 0.1)   # without the callback it trains

def test_inputs_that_cannot_be_split_are_refused_unless_you_say_how():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = net()
        def forward(self, x, scale): return self.m(x)*scale
    def extra(): return Event('before_batch', lambda l: setattr(l, 'xb', (l.x,torch.tensor([1.,2.,3.]).double())), valid=True)
    refused(TypeError, r'shape \(3,\).*cannot be split.*split=', extra(), model=Two)
    def split(o, start, stop, n): return o[0][start:stop],o[1]
    same(*(fit([*cbs,extra()], model=Two, splitter=all_params) for cbs in ([],[GradientCache(4, split=split)])))

@pytest.mark.parametrize('event,f,match', [('after_pred', lambda l: l.x.add_(1), 'changed in place'),
    ('before_backward', lambda l: [p.detach().mul_(2) for p in l.model.parameters()], 'changed in place'),
    ('after_loss', lambda l: l.loss_grad.backward(retain_graph=True), 'twice')], ids=['batch','weights','twice'])
def test_what_changes_between_the_passes_is_refused(event, f, match):
    refused(RuntimeError, match, Event(event, f), still=event!='before_backward')

def test_learners_that_cannot_be_cached_are_refused():
    refused(ValueError, 'two GradientCache', GradientCache(8))
    refused(ValueError, 'whole', GradientAccumulation(32, micro_batch_size=4))
    refused(ValueError, "'0.weight' has a hook",
        change=lambda l: l.model[0].weight.register_post_accumulate_grad_hook(lambda p: None))

@pytest.mark.parametrize('n,exc', [(0,ValueError), (-1,ValueError), (2.,TypeError), ('4',TypeError), (True,TypeError), (None,TypeError)])
def test_arguments(n, exc):
    with pytest.raises(exc, match='micro_batch_size'): GradientCache(n)
    with pytest.raises(TypeError, match='split'): GradientCache(4, split=3)

# Nothing is left

events = 'before_batch after_pred after_loss before_backward after_backward before_step after_batch'.split()
excs = CancelBatchException,CancelFitException,KeyboardInterrupt,ValueError
cases = [o for o in product(events, excs, [True,False], [5,'auto']) if o[:2]!=('after_batch',CancelBatchException)]

@pytest.mark.parametrize('event,exc,stays,size', some(16, cases))
def test_interrupts_leave_nothing(event, exc, stays, size):
    "The rest of the run, and the next, are those without a cache"
    def run(*cbs):
        learn = toy(16, n=41, loss_func=nt_xent, cbs=cbs if stays else None)
        own,fault = () if stays else cbs,Raise(event, exc, 20, at=1)
        try: learn.fit(2, 0.1, cbs=[fault,*own])
        except (KeyboardInterrupt,ValueError): pass
        assert fault.raised and not (replaced(learn) and not stays)
        learn.opt.zero_grad()
        learn.fit(1, 0.1, cbs=own)
        assert not replaced(learn)
        return learn
    same(run(), run(GradientCache(size)))

@pytest.mark.parametrize('event', ['before_batch','after_pred','before_backward','after_batch','before_validate'])
def test_taken_off_in_the_middle(event):
    def off(l):
        if l.epoch==1 and hasattr(l, 'gradient_cache'): l.remove_cb(l.gradient_cache)
    cb = Event(event, off)
    learn = fit([cb], fit=lambda l,cbs: one_cycle(l.add_cb(GradientCache(5)), cbs))
    assert not replaced(learn) and not hasattr(learn, 'gradient_cache')
    same(fit([]), learn)

@pytest.mark.parametrize('event', ['after_pred','after_batch','after_epoch'])
def test_a_copy_of_the_model_is_a_plain_model(event):
    learn = fit([GradientCache(5),Event(event, lambda l: setattr(l, 'copied', deepcopy(l.model)))])
    x,seen = torch.randn(16, 5).double(),[]
    learn.copied[0].register_forward_hook(lambda m,i,o: seen.append(len(o)))
    learn.copied(x).sum().backward()
    assert seen==[16] and 'forward' not in vars(learn.copied)

# 'auto': memory runs out

class Short(nn.Module):
    "Has memory for `cap` samples in a forward pass, and for `back` in a backward pass"
    def __init__(self, cap=99, back=99, valid=99):
        super().__init__()
        self.cap,self.back,self.valid = cap,back,valid
    def forward(self, x):
        if len(x)>(self.cap if self.training else self.valid): raise torch.OutOfMemoryError('planted, forward')
        return InBackward.apply(x, short_of(self.back)) if self.training else x

@pytest.mark.parametrize('nm,short,size', [('adam',dict(back=5),4), ('penalties',dict(cap=3),2), ('accumulated',dict(back=5),4),
    ('all',dict(cap=5),4)])
def test_auto_finds_the_size_that_fits(nm, short, size):
    cache,more = GradientCache('auto'),dict(settings[nm])
    cbs = more.pop('cbs', list)
    a = fit(cbs(), splitter=all_params, **more)
    with pytest.warns(UserWarning, match=f'memory ran out .planted.*micro-batches of {size} ') as said:
        b = fit([cache,*cbs()], model=lambda: net(Short(**short)), splitter=all_params, **more)
    same(a, b)
    assert cache.size==size and sum('memory ran out' in str(o.message) for o in said)==1

@pytest.mark.parametrize('at', [{0},{2},{0,4},{3,9,14}], ids=str)
@pytest.mark.parametrize('acc', [False,True])
@pytest.mark.filterwarnings('ignore:memory ran out')
def test_auto_in_the_middle_of_a_batch_or_a_step(at, acc):
    "The `at`th backward pass fails, after others have added to the gradients"
    calls = []
    def check(n):
        calls.append(n)
        if len(calls)-1 in at: raise torch.OutOfMemoryError('planted')
    class Fails(nn.Module):
        def forward(self, x): return InBackward.apply(x, check if self.training else lambda _: None)
    cbs = lambda: [accumulated()] if acc else []
    a,b = (fit([*cbs(),*o], n=75, model=m, splitter=all_params) for o,m in (([],None),([GradientCache('auto')],lambda: net(Fails()))))
    same(a, b)
    assert len(calls)>max(at)

@pytest.mark.filterwarnings('ignore:memory ran out')
def test_auto_draws_what_it_would_have_drawn_with_the_size_known():
    def run(cache, cap=99): return fit([cache], n=48, model=lambda: net(nn.Dropout(), Short(cap)), splitter=all_params)
    same(run(GradientCache(4)), run(GradientCache('auto'), 5))

def test_auto_splits_validation():
    learn = toy(16, n=41, model=lambda: net(Short(valid=5)), splitter=all_params, loss_func=nt_xent, cbs=GradientCache('auto'))
    with pytest.warns(UserWarning, match='memory ran out'): learn.fit(1, 0.1)
    same(fit([], fit=lambda l,_: l.fit(1, 0.1), splitter=all_params), learn)

def test_auto_gives_up_where_a_sample_does_not_fit():
    learn = toy(16, model=lambda: net(Short(0)), loss_func=nt_xent)
    before = weights(learn)
    with pytest.raises(torch.OutOfMemoryError, match='single sample.*planted'): learn.fit(1, cbs=GradientCache('auto'))
    assert weights(learn).equal(before) and not replaced(learn)

def test_bs_find_counts_the_parts():
    "How large the loader's batch may be, with a model that has memory for five samples and a loss that has for twenty"
    def loss(z, y):
        if len(z)>20: raise torch.OutOfMemoryError('planted')
        return nt_xent(z)
    learn = toy(4, n=64, model=lambda: net(Short(5)), loss_func=loss, splitter=all_params)
    assert int(learn.bs_find(show_plot=False))==4
    learn.add_cb(GradientCache(5))
    before = weights(learn)
    assert int(learn.bs_find(show_plot=False))==16 and weights(learn).equal(before)
