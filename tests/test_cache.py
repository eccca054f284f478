"""`GradientCache`: the model sees micro-batches, and the run is that of the whole batch.

The twin is the same run without the callback. With dropout, which draws its random numbers per micro-batch, it is a
run whose model applies itself to the same micro-batches, in one graph.
"""
import pickle, pytest, random, sys, warnings, weakref
import torch
from collections import OrderedDict
from copy import deepcopy
from functools import partial
from pathlib import Path
from torch import nn
from torch.distributions import Beta
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from fastai.callback.core import Callback, CancelBackwardException, CancelBatchException, CancelFitException
from fastai.callback.fp16 import AMPMode
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.rnn import RNNCallback, RNNRegularizer
from fastai.callback.training import GradientClip
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.learner import Learner, trainable_params
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastaccum import GradientAccumulation, GradientCache, TwinWarning
from fastaccum.core.notices import BatchNormWarning
from fastaccum.testing import CrossEntropy, assert_twins, deviation, one_cycle, toy
from fastaccum.ways.cached import cuts
from fastaccum.ways.outputs import leaves
from fastaccum.ways.start import Autocast, SharedBuffers, Start
from common import CpuMixedPrecision, InBackward, Raise, Seen, grads, short_of, weights
from test_loud import Save
from test_precision import Scaled

# Losses in which all samples of a batch see each other

def nt_xent(z, y):
    "Chen et al., 2020: of samples 2i and 2i+1, each has to find the other"
    z = F.normalize(z.flatten(1))
    sim = (z@z.T/0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e4)
    return F.cross_entropy(sim, (torch.arange(len(z))^1).clamp(max=len(z)-1))

def batch_dice(z, y):
    "One Dice coefficient for all samples of the batch together"
    p,t = z.softmax(-1),F.one_hot(y, 3)
    return (1-2*(p*t).sum(0)/(p.sum(0)+t.sum(0))).mean()

class Mixed(nn.Module):
    "A loss function that MixUp can take apart, in double precision"
    y_int,reduction = True,'mean'
    def forward(self, z, y): return F.cross_entropy(z, y, reduction=self.reduction)

def fit(cbs, bs=16, fit=one_cycle, seed=0, **kwargs):
    "A Learner that was fitted with the callbacks"
    learn = toy(bs, seed=seed, **kwargs)
    torch.manual_seed(seed)
    fit(learn, cbs)
    return learn

def pair(size, cbs=list, **kwargs):
    "The twin, and the run with a cache"
    return fit(cbs(), **kwargs),fit([GradientCache(size),*cbs()], **kwargs)

# The law

@pytest.mark.parametrize('loss_func', [nt_xent,batch_dice,CrossEntropy()], ids=['nt_xent','dice','mean'])
@pytest.mark.parametrize('kwargs', [dict(), dict(n=61), dict(shuffle=True, opt_func=Adam),
    dict(opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)), dict(cbs=lambda: [GradientClip(0.05)]),
    dict(cbs=lambda: [Scaled(init_scale=2.**10, growth_interval=3)]), dict(metrics=accuracy)], ids=str)
def test_twins(loss_func, kwargs):
    a,b = pair(5, loss_func=loss_func, **kwargs)
    assert_twins(a, b, tol=1e-12)
    assert b.recorder.losses==a.recorder.losses

@pytest.mark.parametrize('seed', range(20))
def test_random_sizes(seed):
    rng = random.Random(seed)
    a,b = pair(rng.randint(1, 40), bs=rng.randint(2, 40), n=rng.randint(40, 90), seed=seed,
        loss_func=rng.choice([nt_xent,batch_dice]))
    assert_twins(a, b, tol=1e-12)

seen = []
class Sizes(nn.Module):
    "Notes how many samples it sees, in training; not in itself, where it would be put back"
    def forward(self, x):
        if self.training: seen.append(len(x))
        return x

def net(*more):
    return nn.Sequential(nn.Linear(5,6), *more, nn.Tanh(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).double()

def test_the_model_sees_micro_batches():
    "Each twice, but the last of a batch, whose graph is kept; besides a look at a few samples, once in a fit"
    learn = toy(16, n=32, model=lambda: net(Sizes()), loss_func=nt_xent)
    preds = Seen('after_pred', lambda l: len(l.pred))
    seen.clear()
    learn.fit(2, 0.1, cbs=[GradientCache(5),preds])
    assert preds.values==[16]*4
    assert seen[-4*7:]==[4]*4*7 and len(seen)-4*7<=4 and max(seen)==4

def test_a_callback_that_trains_before_the_first_batch():
    class Early(Callback):
        order,run_valid = 10,False
        def before_train(self):
            self.learn.n_iter = len(self.dls.train)
            self.learn.one_batch(0, self.dls.train.one_batch())
    a = fit([Early()], loss_func=nt_xent)
    seen.clear()
    b = fit([Early(),GradientCache(5)], model=lambda: net(Sizes()), loss_func=nt_xent)
    assert max(seen)<=5
    assert_twins(a, b, tol=1e-12)

def test_a_model_that_is_replaced_in_mid_fit():
    "What the new one keeps is put back, and which of its outputs have rows is looked at"
    class Replace(Callback):
        order,run_valid = 1,False
        def before_batch(self):
            if (self.epoch,self.iter)!=(1,2): return
            m = self.model
            if isinstance(m, InChunks): self.learn.model = InChunks(nn.Sequential(m.m, Own()), 5)
            else: self.learn.model = nn.Sequential(m, Own())
    a,b = in_chunks(5, lambda: net(Own()), lambda: [Replace()])
    assert_twins(a, b, tol=1e-12)
    assert a.model[1].calls==b.model[1].calls>5

# What is random, and what modules keep

class InChunks(nn.Module):
    "The same model, applied to the same micro-batches in one graph"
    def __init__(self, m, size):
        super().__init__()
        self.m,self.size = m,size
    def forward(self, *args):
        if not self.training: return self.m(*args)
        return torch.cat([self.m(*(x[a:b] for x in args)) for a,b in cuts(len(args[0]), self.size)])

def in_chunks(size, model, cbs=list, **kwargs):
    "The run in one graph, and the run with a cache"
    kwargs = dict(splitter=lambda m: [list(m.parameters())], loss_func=nt_xent) | kwargs
    a = fit(cbs(), model=lambda: InChunks(model(), size), **kwargs)
    b = fit([GradientCache(size),*cbs()], model=model, **kwargs)
    a.model = a.model.m
    return a,b

@pytest.mark.parametrize('size', [1,5,7])
@pytest.mark.parametrize('layer', [nn.Dropout, lambda: nn.Dropout(0.9),
    lambda: spectral_norm(nn.Linear(6, 6), n_power_iterations=2)], ids=['dropout','much','spectral'])
def test_what_a_forward_pass_draws_and_moves(size, layer):
    a,b = in_chunks(size, lambda: net(layer()), n=61)
    assert_twins(a, b, tol=1e-12)
    assert deviation(list(a.model.buffers()), list(b.model.buffers()))<1e-12

@pytest.mark.parametrize('size', [2,5])
@pytest.mark.filterwarnings('ignore:BatchNorm1d normalises')
def test_batchnorm_is_as_in_one_graph(size):
    a,b = in_chunks(size, lambda: net(nn.BatchNorm1d(6), nn.Dropout()), n=64)
    assert_twins(a, b, tol=1e-12)
    assert b.model[1].num_batches_tracked==8*len(cuts(16, size))

def test_batchnorm_is_told_once_per_fit():
    learn = toy(16, model=lambda: net(nn.BatchNorm1d(6)))
    cb = GradientCache(8)
    for i in range(2):
        with pytest.warns(BatchNormWarning, match='8 at most') as got: learn.fit(2, 0.1, cbs=cb)
        assert len([o for o in got if issubclass(o.category, TwinWarning)])==1

def test_batchnorm_is_told_once_with_accumulation():
    "With the samples that it sees, not those of the loader's batch"
    with pytest.warns(BatchNormWarning) as got:
        fit([GradientAccumulation(48),GradientCache(5)], n=96, model=lambda: net(nn.BatchNorm1d(6)))
    assert ['5 at most' in str(o.message) for o in got if o.category is BatchNormWarning]==[True]

def test_generators_end_where_the_loss_left_them():
    "The run can be repeated, and what others draw is not drawn twice"
    def noisy(z, y): return nt_xent(z+torch.randn_like(z), y)
    class Draw(Callback):
        def after_batch(self): self.learn.drawn.append((torch.rand(1).item(), random.random()))
    def one(learn, cbs):
        learn.drawn = []
        random.seed(0)
        learn.fit(1, 0.1, cbs=[*cbs,Draw()])
    a,b = in_chunks(5, lambda: net(nn.Dropout()), loss_func=noisy, fit=one)
    assert_twins(a, b, tol=1e-12)
    assert a.drawn==b.drawn and len(set(b.drawn))==len(b.drawn)

class Own(nn.Module):
    "Draws from a generator of its own, and counts"
    def __init__(self):
        super().__init__()
        self.gen,self.calls,self.sums = torch.Generator().manual_seed(0),0,torch.zeros(())
    def forward(self, x):
        if not self.training: return x
        self.calls += 1
        self.sums += 1
        mask = torch.rand(x.shape, generator=self.gen, dtype=x.dtype)
        return x*mask*(1+self.calls/100)*self.sums.sqrt()

def test_a_module_may_keep_a_generator_and_a_counter():
    a,b = in_chunks(5, lambda: net(Own()))
    assert_twins(a, b, tol=1e-12)
    assert a.model[1].calls==b.model[1].calls>30 and a.model[1].sums==b.model[1].sums

def test_what_nobody_can_put_back_is_told():
    import os
    class Secret(nn.Module):
        def forward(self, x): return x*torch.tensor([o/255 for o in os.urandom(x.shape[-1])], dtype=x.dtype)
    with pytest.warns(TwinWarning, match='something else when it was run again'):
        fit([GradientCache(5)], model=lambda: net(Secret()))

class Remembers(nn.Module):
    "A hidden state for each sample of the batch before"
    def __init__(self):
        super().__init__()
        self.rnn,self.head,self.h = nn.GRU(5, 6, batch_first=True),nn.Linear(6, 3),None
    def reset(self): self.h = None
    def forward(self, x):
        if self.h is not None and self.h.shape[1]!=len(x): self.reset()
        out,h = self.rnn(x, self.h)
        self.h = h.detach()
        return self.head(out)

def test_hidden_states_have_rows():
    class Reset(Callback):
        def before_train(self): self.model.reset()
        def before_validate(self): self.model.reset()
    a,b = pair(5, model=lambda: Remembers().double(), tokens=True, n=64, splitter=lambda m: [list(m.parameters())],
        cbs=lambda: [Reset()])
    assert_twins(a, b, tol=1e-12)
    learn = toy(16, model=lambda: Remembers().double(), tokens=True, n=64, splitter=lambda m: [list(m.parameters())])
    learn.fit(1, 0.1, cbs=[GradientCache(5)])
    assert learn.model.h.shape[1]==32 or learn.model.h.shape[1]==16

def test_what_is_made_anew_and_changed_in_place_cannot_be_put_back():
    class Anew(nn.Module):
        h = None
        def forward(self, x):
            if self.h is not None: self.h.add_(1)
            self.h = torch.zeros(())
            return x
    start = Start(model := Anew())
    for _ in range(2):
        start.note(0)
        model(torch.ones(1))
    with pytest.raises(RuntimeError, match='cannot be run again from where it was'): start.put_back(0)

def test_what_was_put_back_is_not_copied_again():
    m = nn.Module()
    m.register_buffer('mask', torch.ones(8))
    bufs = SharedBuffers(m)
    first = bufs.note()
    m.mask.add_(1)
    bufs.put_back(first)
    assert (m.mask==1).all() and bufs.note()[0][2] is first[0][2]

def test_autocast_is_entered_again_as_it_was():
    with torch.autocast('cpu', torch.float16, cache_enabled=False): again = Autocast(None)
    with again():
        assert torch.is_autocast_enabled('cpu') and torch.get_autocast_dtype('cpu')==torch.float16
        assert not torch.is_autocast_cache_enabled()

# Everything else sees an ordinary big batch

class Images(nn.Module):
    "For CutMix: the five features as an image"
    def __init__(self, m):
        super().__init__()
        self.m = m
    def forward(self, x): return self.m(x.mean((1,2)))

@pytest.fixture
def double():
    "fastai's MixUp draws in the default precision"
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)

@pytest.mark.parametrize('mix', [MixUp,CutMix])
@pytest.mark.parametrize('size', [3,7])
def test_mixup(mix, size, double):
    "fastai's mix samples of the whole batch, in `before_batch`, and change the loss function"
    kwargs = {}
    if mix is CutMix:
        x,y = torch.randn(61, 4, 5, 5, dtype=torch.float64),torch.randint(0, 3, (61,))
        kwargs = dict(data=torch.utils.data.TensorDataset(x, y), model=lambda: Images(net()),
            splitter=lambda m: [list(m.parameters())])
    def mixes():
        cb = mix()
        cb.distrib = Beta(torch.tensor(0.4), torch.tensor(0.4))
        return [cb]
    a,b = pair(size, loss_func=Mixed(), cbs=mixes, n=61, **kwargs)
    assert_twins(a, b, tol=1e-12)

class Penalty(Callback):
    "On the weights, which the loss's backward pass reaches by itself, and on the predictions"
    order,run_valid = 2,False
    def after_pred(self): self.learn.pred = self.pred*1.5
    def after_loss(self):
        self.learn.loss_grad = self.loss_grad+0.1*sum(p.pow(2).sum() for p in self.model.parameters())
        self.learn.loss_grad += 0.1*self.pred.pow(2).mean()

class Logits(nn.Module):
    "A loss with parameters of its own"
    def __init__(self, w):
        super().__init__()
        self.w = w
    def forward(self, z, y): return nt_xent(z*self.w, y)

@pytest.mark.parametrize('n', [64,61])
def test_penalties(n): assert_twins(*pair(5, loss_func=nt_xent, cbs=lambda: [Penalty()], n=n), tol=1e-12)

def test_parameters_of_the_loss_and_the_model():
    "One that the loss multiplies with, and the model has, too"
    def run(cbs):
        learn = toy(16, loss_func=nt_xent)
        learn.loss_func = Logits(learn.model[0].weight.sum())
        learn.loss_func.forward = lambda z,y: nt_xent(z*learn.model[0].weight.sum().exp(), y)
        learn.fit(2, 0.1, cbs=cbs)
        return learn
    assert_twins(run([]), run([GradientCache(5)]), tol=1e-12)

@pytest.mark.parametrize('mode', list(AMPMode))
@pytest.mark.parametrize('penalty', [False,True])
def test_half_precision_on_the_cpu(mode, penalty):
    """A real GradScaler and autocast: the second pass is in the precision of the first. The weights that autocast
    keeps are not those of the pass without gradients"""
    def single(n): return torch.utils.data.TensorDataset(*[o.float() if o.is_floating_point() else o
        for o in toy(16, n=n).dls.train_ds.tensors])
    def model(): return nn.Sequential(nn.Linear(5,16), nn.Tanh(), nn.Linear(16,16), nn.Tanh(), nn.Linear(16,3))
    class OnWeights(Callback):
        order,run_valid = 2,False
        def after_loss(self):
            w = self.model[2].weight
            self.learn.loss_grad = self.loss_grad+(torch.eye(16)@w).float().pow(2).mean()
    res = []
    for cbs in ([],[GradientCache(5)]):
        seen = Seen('after_pred', lambda l: l.model[0](l.x).dtype)
        learn = toy(16, data=single(61), model=model, loss_func=nt_xent, splitter=lambda m: [list(m.parameters())])
        more = [OnWeights()] if penalty else []
        learn.fit_one_cycle(2, 0.05, cbs=[CpuMixedPrecision(amp_mode=mode),seen,*more,*cbs])
        res.append(learn)
    half = dict(fp16=torch.float16, bf16=torch.bfloat16)[mode.value]
    assert set(seen.values)=={half}
    tol = 4*torch.finfo(half).eps
    assert_twins(*res, tol=tol, loss_tol=tol)
    # it learns: no weight was left without its gradient
    start = toy(16, data=single(61), model=model, splitter=lambda m: [list(m.parameters())])
    for p,q in zip(start.model.parameters(), res[1].model.parameters()): assert deviation(p, q)>3*tol or p.numel()<20
    for p in res[1].model.parameters(): assert p.grad is not None

def test_half_precision_parameters():
    "A sum in bfloat16 would end at 256"
    class Sum(nn.Module):
        def forward(self, z, y): return z.float().sum()
    class Ones(Callback):
        order = -40
        def before_batch(self): self.learn.xb = (torch.ones(len(self.y), 5, dtype=torch.bfloat16),)
    learn = toy(512, n=512, model=lambda: nn.Linear(5, 3).bfloat16(), loss_func=Sum(), splitter=trainable_params)
    noted = Seen('before_step', grads)
    learn.fit(1, 0., cbs=[GradientCache(1),Ones(),noted])
    for g in noted.values[0]: assert g.dtype==torch.bfloat16 and (g==512).all()

def test_half_precision_gradients_that_were_there():
    "256+1 is 256 in bfloat16, and so is 257+1 if the first 1 was lost"
    class Sum(nn.Module):
        def forward(self, z, y): return z.float().sum()
    class Gather(Callback):
        order = -40
        def before_batch(self): self.learn.xb = (torch.ones(len(self.y), 5, dtype=torch.bfloat16),)
        def before_step(self):
            if self.iter==0: raise CancelBatchException
    learn = toy(256, n=258, model=lambda: nn.Linear(5, 3).bfloat16(), loss_func=Sum(), splitter=trainable_params)
    noted = Seen('before_step', grads)
    learn.fit(1, 0., cbs=[GradientCache(1),Gather(),noted])
    for g in noted.values[-1]: assert (g==258).all()

def test_several_epochs_and_fits():
    def fits(l, cbs):
        for cb in cbs: l.add_cb(cb)
        l.fit(1, 0.05)
        l.freeze()
        l.fit_flat_cos(1, 0.05)
        l.validate()
        l.unfreeze()
        l.fit_one_cycle(1, 0.05)
        l.preds = l.get_preds()[0]
    a,b = pair(5, loss_func=nt_xent, fit=fits)
    assert_twins(a, b, tol=1e-12)
    assert deviation(a.preds, b.preds)<1e-12

def test_lr_find():
    def find(l, cbs):
        l.add_cbs(cbs)
        l.lr_find(num_it=20, show_plot=False)
    a,b = pair(5, loss_func=nt_xent, fit=find)
    assert len(b.recorder.lrs)==20
    assert_twins(a, b, tol=1e-12)

def test_validation_is_in_micro_batches_too():
    class Big(nn.Module):
        def forward(self, x):
            assert len(x)<=5
            return x
    learn = toy(16, model=lambda: net(Big()), loss_func=nt_xent, cbs=GradientCache(5))
    a = toy(16, loss_func=nt_xent)
    assert deviation(learn.validate(), a.validate())<1e-6
    assert learn.get_preds()[0].shape==(70,3) and clean(learn)

# Memory

def test_activations_of_one_micro_batch_are_held():
    "Live tensors of a step; those of weights and their gradients are the same in both"
    sys.path.insert(0, str(Path(__file__).parent.parent))
    from benchmarks.live import LiveTensors
    class Peak(Callback):
        order,run_valid = -45,False
        def before_batch(self): self.live = LiveTensors().__enter__()
        def after_batch(self):
            self.live.__exit__(None, None, None)
            self.learn.most = self.live.peak
    def peak(cbs):
        layers = [o for _ in range(12) for o in (nn.Linear(32, 32),nn.Tanh())]
        learn = toy(512, n=1024, model=lambda: nn.Sequential(nn.Linear(5, 32), *layers).double(), loss_func=batch_mean,
            splitter=trainable_params)
        learn.fit(1, 0.1, cbs=[Peak(),*cbs])
        return learn.most
    whole,parts = peak([]),peak([GradientCache(32)])
    assert parts<0.3*whole, (parts,whole)

def batch_mean(z, y): return z.mean(0).pow(2).sum()

def test_a_batch_is_let_go_once_its_gradients_are_there():
    "The predictions live until the next are there, but what the model was given need not"
    refs = []
    class Refs(Callback):
        order = 1
        def before_batch(self):
            assert not refs or refs[-1]() is None
            x = self.x.clone()
            refs.append(weakref.ref(x))
            self.learn.xb = (x,)
    fit([GradientCache(5),Refs()], loss_func=nt_xent)
    assert len(refs)==10+2*3

# What the model is given, and what it returns

def given(model, batch, size=5, loss_func=None, n=61, bs=16, cbs=list, n_inp=1, fit=one_cycle):
    """The twin and a run with a cache, on batches that `batch` makes of tensors `x` and `y`: inputs and targets"""
    from torch.utils.data import DataLoader as TorchLoader
    from fastai.data.core import DataLoaders
    from fastai.callback.progress import ProgressCallback
    from fastaccum.testing import Float32Loss
    data = toy(16, n=n).dls.train_ds
    def collate(items): return batch(torch.stack([x for x,_ in items]), torch.stack([y for _,y in items]))
    res = []
    for more in ([],[GradientCache(size)]):
        dls = DataLoaders(TorchLoader(data, bs, collate_fn=collate), TorchLoader(data, 32, collate_fn=collate))
        dls.n_inp = n_inp
        torch.manual_seed(0)
        learn = Learner(dls, model().double(), loss_func or nt_xent, opt_func=partial(SGD, mom=0.9), cbs=Float32Loss())
        learn.remove_cb(ProgressCallback)
        learn.logger = lambda *_: None
        torch.manual_seed(0)
        fit(learn, [*more,*cbs()])
        res.append(learn)
    return res

class Output(OrderedDict):
    "As transformers' `ModelOutput`"
    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        self.__dict__[k] = v

class Towers(nn.Module):
    "As CLIP: two towers, and a temperature that is learned"
    def __init__(self, out=dict):
        super().__init__()
        self.a,self.b,self.scale,self.out = net(),net(),nn.Parameter(torch.tensor(0.7)),out
    def forward(self, x, text):
        a,b = (F.normalize(o) for o in (self.a(x), self.b(text['ids'])))
        res = a,b,self.scale.exp(),x.argmax(-1),a.detach(),None,'clip'
        return res if self.out is tuple else self.out(zip(['a','b','scale','i','fixed','none','name'], res))

def clip_loss(out, y):
    a,b,scale = (out if isinstance(out, tuple) else list(out.values()))[:3]
    sim,y = scale*a@b.T,torch.arange(len(a))
    return (F.cross_entropy(sim, y)+F.cross_entropy(sim.T, y))/2

@pytest.mark.parametrize('out', [dict,tuple,Output])
@pytest.mark.parametrize('size', [1,5])
def test_two_towers(out, size):
    "Several inputs, one in a dict; several outputs, some without rows, without gradient, or no tensors at all"
    seen = []
    class See(Callback):
        order,run_valid = 1,False
        def after_pred(self): seen.append(self.pred)
    def batch(x, y): return x,{'ids':x.roll(1, -1), 'names':['a']*len(x)},y
    a,b = given(lambda: Towers(out), batch, size, clip_loss, n_inp=2, cbs=lambda: [See()])
    assert_twins(a, b, tol=1e-12)
    for p,q in zip(seen[:8], seen[8:]):
        assert type(p) is type(q) is out
        p,q = (list(o) if out is tuple else list(o.values()) for o in (p,q))
        assert [isinstance(o, torch.Tensor) and (o.shape,o.dtype,o.requires_grad) for o in p]==[
            isinstance(o, torch.Tensor) and (o.shape,o.dtype,o.requires_grad) for o in q] and p[5:]==q[5:]
        assert torch.equal(p[3], q[3])

class Bounded(nn.Module):
    "Writes into its input"
    def __init__(self):
        super().__init__()
        self.m = net()
    def forward(self, x): return self.m(x.mul_(0.5))

def test_a_model_may_write_into_its_input():
    assert_twins(*given(Bounded, lambda x,y: (x,y)), tol=1e-12)

class Listed(nn.Module):
    "As AWD_LSTM: the outputs of its layers, too"
    def __init__(self):
        super().__init__()
        self.a,self.b = nn.Linear(5, 6),nn.Linear(6, 3)
    def forward(self, x):
        h = self.a(x).tanh()
        return self.b(h),[h,h],[h*2,h*3]

def test_rnn_regularizer():
    "It uses outputs of layers, which the model returns"
    cbs = lambda: [RNNCallback(),RNNRegularizer(alpha=2., beta=1.)]
    def loss(z, y): return nt_xent(z, y)
    def batch(x, y): return torch.stack([x, x.roll(1, -1)], 1),y
    a,b = given(Listed, batch, loss_func=loss, cbs=cbs)
    assert_twins(a, b, tol=1e-12)
    c,_ = given(Listed, batch, loss_func=loss, cbs=lambda: [RNNCallback()])
    assert deviation(weights(a), weights(c))>1e-3

def test_fastai_keeps_its_classes():
    from fastai.torch_core import TensorImage
    class See(Callback):
        order,run_valid = 10,False   # after fastai's `CastToTensor`
        def before_batch(self):
            x = self.xb[0].as_subclass(TensorImage)
            x.img_size = 7
            self.learn.xb = (x,)
        def after_pred(self): self.learn.types = type(self.pred),self.pred.img_size
    a,b = pair(5, loss_func=nt_xent, cbs=lambda: [See()])
    assert a.types==b.types==(TensorImage,7)
    assert_twins(a, b, tol=1e-12)

def test_predictions_may_be_written_into():
    def inplace(z, y):
        z[:,0] *= 2
        return nt_xent(z.sigmoid_(), y)
    assert_twins(*pair(5, loss_func=inplace), tol=1e-12)

def test_outputs_without_rows_may_be_written_into():
    "What the second pass is compared with, and what the model keeps, are others"
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.net,self.scale = net(),nn.Parameter(torch.tensor(2.))
        def forward(self, x): return self.net(x),self.scale*3
    def inplace(o, y): return nt_xent(o[0]*o[1].clamp_(max=1.5), y)
    with warnings.catch_warnings():
        warnings.simplefilter('error', TwinWarning)
        a,b = given(Scale, lambda x,y: (x,y), loss_func=inplace)
    assert_twins(a, b, tol=1e-12)

def test_some_outputs_are_not_used():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a,self.b = net(),net()
        def forward(self, x): return self.a(x),self.b(x),self.b(x).detach()
    a,b = given(Two, lambda x,y: (x,y), loss_func=lambda o,y: nt_xent(o[0]+o[2], y))
    assert_twins(a, b, tol=1e-12)
    assert all(p.grad is None or not p.grad.any() for p in b.model.b.parameters())

def test_inputs_may_need_a_gradient():
    "A layer that is no part of the model, and an adversary who looks at the input's gradient"
    class Before(Callback):
        order,run_valid = 1,False
        def before_fit(self):
            torch.manual_seed(1)
            self.layer,self.xs = nn.Linear(5, 5).double(),[]
        def before_batch(self):
            self.learn.xb = (self.layer(self.x.requires_grad_()),)
            self.leaf = self.x
        def after_backward(self): self.xs.append([p.grad.clone() for p in self.layer.parameters()])
    made = []
    def cbs():
        made.append(Before())
        return made[-1:]
    a,b = pair(5, loss_func=nt_xent, cbs=cbs)
    assert_twins(a, b, tol=1e-12)
    assert len(made[0].xs)==len(made[1].xs)>4 and deviation(made[0].xs, made[1].xs)<1e-12

# What cannot be had from micro-batches is refused, before a weight moves

class Pairs(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.m,self.what = net(),what
    def forward(self, x):
        z = self.m(x)
        return dict(pairs=lambda: z@z.T, loss=lambda: z.pow(2).mean(), first=lambda: z.T, object=lambda: (z,object()),
            several=lambda: [z]*len(x))[self.what]()

@pytest.mark.parametrize('what,text', [('pairs','pairs of them'), ('loss',r'shape \(\)'), ('first',r'shape \(3, '),
    ('object','returned a object'), ('several','things in it')])
def test_outputs_that_are_refused(what, text):
    learn = toy(16, model=lambda: Pairs(what).double(), splitter=lambda m: [list(m.parameters())])
    def total(z, y): return sum(o.sum() for o in leaves(z) if isinstance(o, torch.Tensor))
    learn.loss_func = total
    before = weights(learn)
    with pytest.raises(TypeError, match=text): learn.fit(1, 0.1, cbs=GradientCache(4))
    assert torch.equal(weights(learn), before)
    learn.fit(1, 0.1)   # nothing is left behind
    assert not torch.equal(weights(learn), before)

def test_inputs_that_are_refused():
    class Extra(Callback):
        def before_batch(self): self.learn.xb = (*self.xb, torch.zeros(3))
    learn = toy(16, model=lambda: Towers().double(), splitter=trainable_params)
    with pytest.raises(TypeError, match=r'Tensor of shape \(3,\) in a batch of 16.*cannot be split.*split=f'):
        learn.fit(1, cbs=[GradientCache(4),Extra()])
    def some(o, start, stop, n): return o[0][start:stop],{'ids':o[0][start:stop]}
    learn.loss_func = clip_loss
    learn.fit(1, cbs=[GradientCache(4, split=some),Extra()])

@pytest.mark.parametrize('n,exc', [(0,ValueError), (-1,ValueError), (2.,TypeError), ('4',TypeError), (True,TypeError),
    (None,TypeError)])
def test_arguments(n, exc):
    with pytest.raises(exc, match='micro_batch_size'): GradientCache(n)

def test_two_caches():
    with pytest.raises(ValueError, match='two GradientCaches'): toy(16).fit(1, cbs=[GradientCache(4),GradientCache(8)])

def test_hooks_that_step_in_the_backward_pass():
    learn = toy(16)
    learn.model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match="'0.weight' has a hook"): learn.fit(1, cbs=GradientCache(4))

def test_a_loss_of_what_a_hook_has_seen_is_refused():
    learn = toy(16, loss_func=nt_xent)
    acts = []
    learn.model[2].register_forward_hook(lambda m,i,o: acts.append(o))
    class OnActs(Callback):
        order,run_valid = 1,False
        def after_loss(self): self.learn.loss_grad = self.loss_grad+acts[-1].pow(2).mean()
    before = weights(learn)
    with pytest.raises(RuntimeError, match='from inside the model'): learn.fit(1, 0.1, cbs=[GradientCache(4),OnActs()])
    assert torch.equal(weights(learn), before)

def test_a_batch_that_is_changed_between_the_passes_is_refused():
    class Change(Callback):
        order,run_valid = 1,False
        def after_pred(self): self.x.add_(1)
    with pytest.raises(RuntimeError, match='changed in place'): toy(16).fit(1, 0.1, cbs=[GradientCache(4),Change()])

def test_a_second_backward_pass_is_refused():
    class Twice(Callback):
        order,run_valid = 1,False
        def after_loss(self): self.learn.loss_grad.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match='back-propagated twice'): toy(16).fit(1, 0.1, cbs=[GradientCache(4),Twice()])

# Composition

@pytest.mark.parametrize('loss_func', [nt_xent,CrossEntropy()], ids=['nt_xent','mean'])
@pytest.mark.parametrize('first', [True,False])
def test_accumulation(loss_func, first):
    "Macro-batches of several batches of the loader, each in micro-batches: the run without a cache"
    kwargs = dict(loss_func=loss_func, n=150, metrics=accuracy)
    acc,cache = GradientAccumulation(48, drop_last=False),GradientCache(5)
    a = fit([GradientAccumulation(48, drop_last=False)], **kwargs)
    b = fit([cache,acc] if first else [acc,cache], **kwargs)
    assert_twins(a, b, tol=1e-12)
    assert acc.step==2*4
    if loss_func is not nt_xent: assert_twins(fit([], bs=48, **kwargs), b)   # a mean over samples

def test_clip_scaler_and_accumulation():
    def cbs(): return [GradientAccumulation(48), Scaled(init_scale=2.**10, growth_interval=3), GradientClip(0.05)]
    assert_twins(*pair(5, loss_func=nt_xent, n=150, cbs=cbs), tol=1e-12)

def test_overflow_skips_the_same_steps():
    class Overflow(Callback):
        order,run_valid = 9,False
        def before_backward(self):
            if self.iter==1: self.learn.loss_grad = self.loss_grad*float('inf')
    a,b = pair(5, loss_func=nt_xent, cbs=lambda: [Scaled(init_scale=2.**10),Overflow()])
    assert_twins(a, b, tol=1e-12)

def test_bs_find():
    "How large the loader's batch may be, with a model that has memory for five samples"
    class Short(nn.Module):
        def forward(self, x):
            if len(x)>5: raise torch.OutOfMemoryError('planted')
            return x
    class Loss(nn.Module):
        def forward(self, z, y):
            if len(z)>20: raise torch.OutOfMemoryError('planted, loss')
            return nt_xent(z, y)
    learn = toy(4, n=64, model=lambda: net(Short()), loss_func=Loss(), cbs=GradientCache(5))
    before = weights(learn)
    assert int(learn.bs_find(show_plot=False))==16 and torch.equal(weights(learn), before)
    assert int(learn.bs_find(mode='binsearch', show_plot=False))==20
    learn.remove_cb(GradientCache)
    assert int(learn.bs_find(show_plot=False))==4

# What is left behind: nothing

def clean(learn):
    return not {'one_batch','_do_one_batch','_backward'}&vars(learn).keys() and 'forward' not in vars(learn.model)

@pytest.mark.parametrize('event', ['before_batch','after_pred','after_loss','before_backward','after_backward',
    'before_step','after_batch'])
@pytest.mark.parametrize('exc', [CancelBatchException,CancelFitException,KeyboardInterrupt,ValueError])
def test_interrupts(event, exc):
    "At any event: the rest of the run, and the next, are the twin's"
    if exc is CancelBatchException and event=='after_batch': exc = CancelFitException   # (fastai's loop ends with it)
    def run(cbs, own=False):
        learn = toy(16, loss_func=nt_xent)
        if own: learn.add_cbs(cbs)
        try: learn.fit(2, 0.1, cbs=[Raise(event, exc, 20, at=2), *([] if own else cbs)])
        except (KeyboardInterrupt,ValueError): pass
        if not own: assert clean(learn)
        learn.opt.zero_grad()
        learn.fit(1, 0.1, cbs=[] if own else cbs)
        assert clean(learn)
        return learn
    twin = run([])
    for own in (True,False): assert_twins(twin, run([GradientCache(5)], own), tol=1e-12)

@pytest.mark.parametrize('event', ['before_batch','after_pred','before_backward','after_batch','before_validate'])
def test_taken_off_in_the_middle(event):
    class Off(Callback):
        def __init__(self): setattr(self, event, self.off)
        def off(self):
            if self.epoch==1 and hasattr(self.learn, 'gradient_cache'): self.learn.remove_cb(self.learn.gradient_cache)
    a = fit([], loss_func=nt_xent)
    learn = toy(16, loss_func=nt_xent)
    torch.manual_seed(0)
    one_cycle(learn.add_cb(GradientCache(5)), [Off()])
    assert clean(learn) and not hasattr(learn, 'gradient_cache')
    assert_twins(a, learn, tol=1e-12)

def test_switched_off():
    learn = toy(16, model=lambda: net(Sizes()), cbs=GradientCache(5))
    learn.gradient_cache.run = False
    seen.clear()
    learn.fit(1, 0.1)
    assert set(seen)=={16,6} and clean(learn)

def test_taken_out_of_the_list():
    class Out(Callback):
        def after_batch(self):
            if self.training and self.iter==1: self.learn.cbs.remove(self.gradient_cache)
    learn = toy(16, model=lambda: net(Sizes()), loss_func=nt_xent, cbs=GradientCache(5))
    seen.clear()
    learn.fit(1, 0.1, cbs=Out())
    assert seen[-3:]==[16,16,6]

@pytest.mark.parametrize('event', ['after_pred','after_batch','after_epoch'])
def test_saved_and_copied_in_the_middle_of_a_fit(event):
    class Copy(Callback):
        def __init__(self): setattr(self, event, self.save)
        def save(self): self.learn.copied = deepcopy(self.model)
    learn = toy(16, loss_func=nt_xent)
    learn.fit(1, 0.1, cbs=[GradientCache(5),Copy()])
    assert learn.copied(torch.randn(4, 5, dtype=torch.float64)).shape==(4,3) and 'forward' not in vars(learn.copied)

def test_a_learner_that_was_pickled_in_mid_fit():
    learn = toy(16, n=100, model=linear, splitter=trainable_params, cbs=GradientCache(5))
    learn.loss_func = nn.CrossEntropyLoss()
    save = Save()
    learn.fit(2, 0.05, cbs=save)
    loaded = pickle.loads(save.saved)
    assert 'one_batch' in vars(loaded)
    loaded.remove_cb(Save)
    loaded.fit(1, 0.05)
    assert clean(loaded)

def linear(): return nn.Sequential(nn.Linear(5,6), nn.Tanh(), nn.Linear(6,6), nn.Tanh(), nn.Linear(6,3)).double()

def test_validation_in_the_middle_of_an_epoch():
    class Between(Callback):
        order = 55
        def after_batch(self):
            if self.training and self.iter==1:
                self.learn.validate()
                self.learn.dl,self.learn.training = self.dls.train,True
                self.model.train()
    learn = toy(16, model=lambda: net(Sizes()), loss_func=nt_xent)
    seen.clear()
    learn.fit(1, 0.1, cbs=[GradientCache(5),Between()])
    assert max(seen)<=4 and clean(learn)

def test_calls_of_others_are_their_own():
    "A callback, or the loss function, that calls the model means the model: with graph, and at once"
    class Other(Callback):
        order,run_valid = 1,False
        def before_batch(self):
            x = self.x.clone().requires_grad_()
            self.learn.xb = (self.x+0.1*torch.autograd.grad(self.model(x).sum(), x)[0].sign(),)
        def after_loss(self): self.learn.loss_grad = self.loss_grad+self.model(self.x*2).pow(2).mean()
    def model(): return net(Sizes())
    a = fit([Other()], loss_func=nt_xent, model=model, n=64)
    seen.clear()
    b = fit([GradientCache(5),Other()], loss_func=nt_xent, model=model, n=64)
    assert_twins(a, b, tol=1e-12)
    assert seen.count(16)==2*2*4   # two calls a batch, of eight batches

def test_hooks_of_the_model_itself_fire_once():
    for kind in ('register_forward_hook','register_forward_pre_hook'):
        learn = toy(16, n=32, loss_func=nt_xent)
        shapes = []
        getattr(learn.model, kind)(lambda m,i,*o: shapes.append(len(i[0])))
        learn.fit(1, 0.1, cbs=GradientCache(5))
        assert shapes==[16,16,32]

def assert_own_twins(cls):
    "With the cache, a Learner of the class `cls` trains as it does without"
    res = []
    for cbs in ([],[GradientCache(5)]):
        learn = toy(16, loss_func=nt_xent)
        learn.__class__ = cls
        learn.fit(2, 0.1, cbs=cbs)
        res.append(learn)
    assert_twins(*res, tol=1e-12)

def test_a_learner_with_a_backward_pass_of_its_own():
    "It need not know of the cache"
    class Own(Learner):
        def _do_one_batch(self):
            self.pred = self.model(*self.xb)
            self.loss_grad = self.loss_func(self.pred, *self.yb)
            self.loss = self.loss_grad.clone().float()
            if not self.training: return
            self.loss_grad.backward()
            self.opt.step()
            self.opt.zero_grad()
    assert_own_twins(Own)

def test_a_loss_that_is_back_propagated_in_two_passes():
    "The predictions' gradients of both are added up, before the model is run again"
    class Own(Learner):
        def _backward(self):
            (0.3*self.loss_grad).backward(retain_graph=True)
            (0.7*self.loss_grad).backward()
    assert_own_twins(Own)

def test_a_model_that_returns_something_else_in_evaluation():
    "Which outputs have rows is looked at for both"
    class Aux(nn.Linear):
        def forward(self, x):
            z = super().forward(x)
            return (z,z.tanh()) if self.training else z
    def loss(z, y): return nt_xent(z[0]+z[1] if isinstance(z, tuple) else z, y)
    def model(): return Aux(5, 3).double()
    a,b = pair(5, loss_func=loss, model=model, splitter=trainable_params)
    assert_twins(a, b, tol=1e-12)

def test_outputs_of_another_precision_are_refused():
    class Casts(nn.Linear):
        def forward(self, x): return super().forward(x).to(torch.float32 if self.training and len(x)==5 else x.dtype)
    learn = toy(16, model=lambda: Casts(5, 3).double(), splitter=trainable_params)
    before = weights(learn)
    with pytest.raises(TypeError, match='does not go with the others'): learn.fit(1, 0.1, cbs=GradientCache(6))
    assert weights(learn).equal(before)

@pytest.mark.parametrize('in_place', [True,False])
def test_compiled(in_place):
    a,b = (toy(16, loss_func=nt_xent, splitter=trainable_params) for _ in range(2))
    if in_place: b.model.compile(backend='eager')
    else: b.model = torch.compile(b.model, backend='eager')
    a.fit(1, 0.1)
    b.fit(1, 0.1, cbs=GradientCache(5))
    if not in_place: b.model = b.model._orig_mod
    assert_twins(a, b, tol=1e-12)

# Memory runs out

class Short(nn.Module):
    "Has memory for `cap` samples in a forward pass, and for `back` in a backward pass"
    cap,back = 1000,1000
    def forward(self, x):
        short = len(x)>self.cap and (len(x)>3 or torch.is_grad_enabled())   # without gradients some more fit
        if short and self.training: raise torch.OutOfMemoryError('planted, forward')
        return InBackward.apply(x, short_of(self.back)) if self.training else x

def short(**kwargs):
    m = Short()
    vars(m).update(kwargs)
    return m

@pytest.mark.filterwarnings('ignore:memory ran out')
@pytest.mark.parametrize('where', ['cap','back'])
@pytest.mark.parametrize('kwargs', [dict(cap=1), dict(n=61), dict(cbs=lambda: [GradientClip(0.05)], opt_func=Adam),
    dict(cbs=lambda: [Scaled(init_scale=2.**10, growth_interval=3),Penalty()]),
    dict(cbs=lambda: [GradientAccumulation(48)], n=100)], ids=str)
def test_auto(where, kwargs):
    kwargs = dict(loss_func=nt_xent, cbs=list, cap=5) | kwargs
    cap = kwargs.pop('cap')
    cbs,cache = kwargs.pop('cbs'),GradientCache('auto')
    a = fit(cbs(), model=lambda: net(short()), **kwargs)
    b = fit([cache,*cbs()], model=lambda: net(short(**{where:cap})), **kwargs)
    assert_twins(a, b, tol=1e-12)
    assert cache.size==dict(zip((1,5), (1,4)))[cap]

class Counted(torch.autograd.Function):
    left = None   # backward passes before one fails; `None` if none does
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g):
        if Counted.left is not None: Counted.left -= 1
        if Counted.left==-1: raise torch.OutOfMemoryError('planted')
        return g

class Counts(nn.Module):
    def forward(self, x): return Counted.apply(x)

@pytest.mark.parametrize('fails', [0,1,3])
@pytest.mark.parametrize('more', [[],[GradientAccumulation]], ids=['alone','accumulation'])
def test_auto_in_the_middle_of_a_fit(fails, more):
    """The second pass of some micro-batch fails, after others have added to the gradients. With dropout, the run is
    the one that had smaller micro-batches from that batch on"""
    def run(fails):
        cache = GradientCache('auto')
        cache.sizes[True] = 4
        class Sometimes(Callback):
            order,run_valid = 1,False
            def before_batch(self):
                if fails is None and self.epoch==0 and self.iter==1: cache.sizes[True] = 2
            def before_backward(self):
                Counted.left = fails if self.epoch==0 and self.iter==1 and cache.size==4 else None
        return fit([cache,Sometimes(),*(o(32) for o in more)], n=61, model=lambda: net(nn.Dropout(), Counts()),
            loss_func=nt_xent)
    a = run(None)
    with pytest.warns(UserWarning, match='memory ran out .planted.*micro-batches of 2') as got: b = run(fails)
    assert len([o for o in got if 'memory' in str(o.message)])==1
    assert_twins(a, b, tol=1e-12)

def test_auto_in_validation():
    class Valid(nn.Module):
        def forward(self, x):
            if len(x)>7: raise torch.OutOfMemoryError('planted')
            return x
    cache = GradientCache('auto')
    learn = toy(4, model=lambda: net(Valid()), loss_func=nt_xent, cbs=cache)
    with pytest.warns(UserWarning, match='memory ran out'): learn.fit(1, 0.1)
    assert cache.sizes=={True:None, False:4}
    assert_twins(fit([], bs=4, loss_func=nt_xent, fit=lambda l,cbs: l.fit(1, 0.1)), learn, tol=1e-12)

def test_auto_does_not_try_again_what_metrics_have_counted():
    class Late(Callback):
        order,run_train,raised = 60,False,False
        def after_batch(self):
            was,self.raised = self.raised,True
            if not was: raise torch.OutOfMemoryError('planted')
    with pytest.raises(torch.OutOfMemoryError, match='planted'):
        toy(16, loss_func=nt_xent, metrics=accuracy).fit(1, 0.1, cbs=[GradientCache('auto'),Late()])

def test_auto_gives_up():
    learn = toy(16, model=lambda: net(short(cap=0)), loss_func=nt_xent)
    before = weights(learn)
    with pytest.raises(torch.OutOfMemoryError, match='single sample does not fit: planted'):
        learn.fit(1, cbs=GradientCache('auto'))
    assert torch.equal(weights(learn), before) and clean(learn)
    learn = toy(16, loss_func=nt_xent)
    with pytest.raises(ValueError, match='planted'):
        learn.fit(1, cbs=[GradientCache('auto'),Raise('after_loss', ValueError, 20)])
    assert clean(learn) and '_step' not in vars(learn)

def test_auto_twice_is_refused():
    with pytest.raises(ValueError, match='which the loss is to see whole'):
        toy(16).fit(1, cbs=[GradientCache(4),GradientAccumulation(32, micro_batch_size='auto')])
