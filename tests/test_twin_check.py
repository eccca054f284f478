"The check: no false alarm, no silence, and a Learner that is as it was, wherever it is interrupted."
import random
from collections import UserDict
from copy import deepcopy
from functools import partial
import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset, TensorDataset
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import (GradientAccumulation as FastaiGradientAccumulation, GradientClip,
    ShortEpochCallback)
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper, SGD
from fastai.text.data import SortedDL
from fastaccum import ActivationCheckpoint, GradientAccumulation, GradientAccumulationSchedule, GradientCache
from fastaccum.check.given import read
from fastaccum.check.rounding import Rounding
from fastaccum.check.runs import Runs
from fastaccum.memory.parts import split
from fastaccum.check.order import order_apart
from fastaccum.check.taken import Taken, apart
from fastaccum.memory.recovery import AutoSize
from fastaccum.testing import CrossEntropy, Float32Loss, toy, toy_data
from common import CpuMixedPrecision
from test_bs_find import Count, Ema, capped, everything, recorded, rich, same

whats = ['loss','predictions','draws','callbacks','loader','gradients','buffers']

def bad(res): return [o.what for o in res.rows if not o.ok]
def one_group(m): return [list(m.parameters())]
def small(*layers, double=True):
    net = nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 3))
    return net.double() if double else net
def made(*layers, bs=12, **kwargs): return toy(bs, model=lambda: small(*layers), splitter=one_group, **kwargs)

# No false alarm

class Residual(nn.Module):
    "Two inputs"
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5, 3),nn.Linear(2, 3)
    def forward(self, x, z): return self.a(x)+self.b(z)

def with_two_inputs():
    x,y = toy_data(40).tensors
    data = TensorDataset(x, x[:,:2].contiguous(), y)
    learn = toy(12, data=data, model=lambda: Residual().double(), splitter=one_group)
    learn.dls.n_inp = 2
    return learn

class Eval(Callback):
    def before_batch(self): self.learn.model[1].eval()
class MeanPenalty(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad+self.pred.square().mean()

def scaled(*layers, **kwargs):
    data = TensorDataset(*(o.float() if o.is_floating_point() else o for o in toy_data(40).tensors))
    return toy(12, data=data, model=lambda: small(*layers or [nn.Tanh()], double=False), splitter=one_group, **kwargs)

exact = dict(plain=lambda: toy(12), tokens=lambda: toy(12, tokens=True), batch_of_one=lambda: toy(1),
    batch_of_two=lambda: toy(2), shuffled=lambda: toy(12, shuffle=True), two_inputs=with_two_inputs,
    layer_norm=lambda: made(nn.LayerNorm(6)), no_dropout=lambda: made(nn.Dropout(0.)),
    frozen_statistics=lambda: made(nn.BatchNorm1d(6), cbs=Eval()),
    summed=lambda: toy(12, loss_func=CrossEntropy(reduction='sum')),
    unreduced=lambda: toy(12, loss_func=CrossEntropyLossFlat()), clipped=lambda: toy(12, cbs=GradientClip(1e-3)),
    penalty=lambda: toy(12, cbs=MeanPenalty()), torchs=lambda: toy(12, opt_func=partial(OptimWrapper,
        opt=torch.optim.AdamW)), fp16=lambda: scaled(cbs=CpuMixedPrecision()),
    bf16=lambda: scaled(cbs=CpuMixedPrecision(amp_mode='bf16')),
    overflows=lambda: scaled(cbs=CpuMixedPrecision(), loss_func=lambda p,t: 1e4*F.cross_entropy(p, t)),
    scheduled=lambda: toy(4, cbs=GradientAccumulationSchedule(8, 16)))

@pytest.mark.parametrize('nm', exact)
def test_no_false_alarm(nm):
    learn = exact[nm]()
    res = learn.twin_check(steps=3)
    assert res.ok and bad(res)==['weights']*(nm=='overflows'), res   # in three steps, there is none
    assert [*res.off]==[*whats,'weights'] and (nm in ('fp16','bf16','overflows') or max(res.off.values())<1e-5)

# No silence

class Noise(nn.Module):
    "Draws, and is no dropout"
    def forward(self, x): return x+0.1*torch.randn_like(x) if self.training else x

class Centre(nn.Module):
    "Looks at the others, in evaluation mode too"
    def forward(self, x): return x-x.mean(0)

class Carry(nn.Module):
    "Begins a batch with what the one before has left"
    def __init__(self): super().__init__(); self.h = 0.
    def reset(self): self.h = 0.
    def forward(self, x):
        x = x+self.h
        self.h = x.mean(0).detach()
        return x
class Carries(nn.Sequential):
    def reset(self): self[1].reset()

class Summed(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad+0.1*self.pred.square().sum()
class Mixes(Callback):
    def after_pred(self): self.learn.pred = self.pred-self.pred.mean(0)
class Halves(Callback):
    "Too little by half, which clipping would hide"
    def after_loss(self):
        if self.training and len(self.y)<12: self.learn.loss_grad = self.loss_grad/2
class Harmless(Callback):
    def before_batch(self): self.learn.xb = tuple(o.clone() for o in self.xb)

def hidden(p, y): return F.cross_entropy(p.flatten(0, -2), y.flatten())   # leaves -100 out, and does not tell
def contrastive(p, y): return F.cross_entropy(F.normalize(p)@F.normalize(p.roll(1, 1)).T, torch.arange(len(p)))
def undeclared(p, y): return F.cross_entropy(p, y, reduction='sum')
def slope(p, y):
    "The value of a mean, the gradient of a sum"
    l = F.cross_entropy(p, y)
    return l+(len(p)-1)*(l-l.detach())

off = dict(batchnorm=(lambda: made(nn.BatchNorm1d(6)), ['predictions','gradients','buffers'], 'BatchNorm1d 1'),
    dropout=(lambda: made(nn.Dropout(0.2)), ['draws'], 'Dropout 1'),
    two_dropouts=(lambda: made(nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.2)), ['draws','gradients'], 'Dropout 1, 3'),
    noise=(lambda: made(Noise()), ['draws'], 'Noise 1'),
    centre=(lambda: made(Centre()), ['predictions','gradients'], 'Centre 1'),
    carry=(lambda: toy(12, model=lambda: Carries(*small(Carry()).children()), splitter=one_group),
        ['predictions','gradients'], 'remembers'),
    hidden=(lambda: toy(12, tokens=True, loss_func=hidden), ['loss','gradients'], ''),
    contrastive=(lambda: toy(12, loss_func=contrastive), ['loss','gradients'], ''),
    undeclared=(lambda: toy(12, loss_func=undeclared), ['loss','gradients'], ''),
    clipped=(lambda: toy(12, cbs=[Halves(),GradientClip(1e-3)]), ['callbacks','gradients'], 'Halves'),
    slope=(lambda: toy(12, loss_func=slope), ['loss','gradients'], 'its gradient'),
    mixup=(lambda: scaled(cbs=[Harmless(),MixUp()], loss_func=CrossEntropyLossFlat()),
        ['callbacks','gradients'], 'MixUp'),
    mixup_frozen=(lambda: scaled(nn.BatchNorm1d(6), cbs=[Eval(),MixUp()], loss_func=CrossEntropyLossFlat()),
        ['callbacks','gradients'], 'MixUp'),
    mixup_sum=(lambda: scaled(cbs=MixUp(), loss_func=CrossEntropyLossFlat(reduction='sum')),
        ['callbacks','gradients'], 'MixUp'),
    penalty=(lambda: toy(12, cbs=[Harmless(),Summed()]), ['callbacks','gradients'], 'Summed'),
    two=(lambda: toy(12, cbs=[Summed(),Mixes(),MeanPenalty()]), ['callbacks','gradients'], 'Summed, Mixes'),
    all=(lambda: made(nn.BatchNorm1d(6), nn.Dropout(), cbs=Mixes()),
        ['predictions','draws','callbacks','gradients','buffers'], 'Mixes'))

@pytest.mark.parametrize('nm', off)
def test_no_silence(nm):
    make,wanted,where = off[nm]
    res = make().twin_check()
    found = bad(res)
    assert not res.ok and set(wanted)<=set(found) and set(found)<={*wanted,'gradients','buffers'}, res
    row = next(o for o in res.rows if o.what==wanted[-3 if nm=='all' else 0])
    assert where in row.where and row.remedy, res
    assert row.where==where or nm not in ('batchnorm','dropout','two_dropouts','noise','centre','mixup','two'), res
    tol = next(o.tol for o in res.rows if o.what=='gradients')
    if nm not in ('centre','hidden','contrastive','undeclared','slope') and 'gradients' in found:
        assert max(res.still.values())<=tol, 'all causes were found, but it does not say so'
    assert any(res.off[o]>1e-3 for o in wanted)

def test_a_faint_memory_is_not_the_cause():
    "What the model remembers is next to nothing: not to be told, in the place of the remedy for the rest"
    class Faint(Carry):
        def forward(self, x):
            x = x+self.h
            self.h = -0.02*x.mean(0).detach()
            return x
    class Resets(nn.Sequential):
        def reset(self): self[3].reset()
    def net(): return Resets(*small(Centre(), nn.Tanh(), Faint()).children())
    res = toy(12, model=net, splitter=one_group).twin_check()
    row = next(o for o in res.rows if o.what=='predictions')
    assert row.where=='Centre 1' and 'ActivationCheckpoint' in row.remedy, res

class Kink(nn.Module):
    "ReLUs of zero, but for the last digit, which differs with the size of the batch as it does on some processors"
    def __init__(self, by=1e-3, norm=nn.Identity):
        super().__init__()
        self.by,self.net = by,nn.Sequential(nn.Linear(5, 6), norm(6))
        self.was = [deepcopy(self.net).eval()]   # in a list, so that it is no part of the model
    def forward(self, x):
        h = self.net(x)*(1+torch.finfo(x.dtype).eps*(len(x)<12))
        return h+self.by*F.relu(h-self.was[0](x).detach())

class Off(Callback):
    "The gradient of a part is wrong by a share"
    order = -1
    def __init__(self, by): self.by = by
    def after_loss(self): self.learn.loss_grad = self.loss_grad*(1+self.by*(len(self.x)<12))

def kinked(*layers, kink=Kink, **kwargs):
    data = TensorDataset(*(o.float() if o.is_floating_point() else o for o in toy_data(40).tensors))
    def net(): return nn.Sequential(kink(), *layers, nn.Linear(6, 3))
    return toy(12, data=data, model=net, splitter=one_group, **kwargs)

def test_rounding_is_measured_where_there_is_more_than_usual():
    learn = kinked()
    before = {k:o.clone() for k,o in learn.model.state_dict().items()}
    res = learn.twin_check()
    row = next(o for o in res.rows if o.what=='gradients')
    assert res.ok and 1e-4<res.off['gradients']<row.tol<=1e-2 and row.where.startswith('rounding')
    assert all(o.equal(before[k]) for k,o in learn.model.state_dict().items())

@pytest.mark.parametrize('make', [lambda: kinked(nn.BatchNorm1d(6)),
    lambda: kinked(kink=partial(Kink, norm=nn.BatchNorm1d))], ids=['always','with_the_norm_held_still'])
def test_rounding_is_measured_with_causes_held_still(make):
    row = next(o for o in make().twin_check().rows if o.what=='gradients')
    assert not row.ok and 'callbacks left out exact' in row.where

def test_no_model_makes_everything_rounding():
    runs = Runs(kinked(kink=partial(Kink, 1.)), lambda n, sizes: [GradientAccumulation(n)], split)
    runs.read()
    runs.use(12)
    limit = Rounding(runs, 1e-4)
    assert not limit.covers(0.02) and limit.tol==1e-4 and limit.covers(0.005) and limit.tol==1e-2
    assert not limit.covers(0.02)

@pytest.mark.parametrize('make,by', [(scaled,5e-4), (scaled,5e-3), (scaled,0.05), (kinked,0.05)])
def test_what_is_not_rounding_is_not_taken_for_it(make, by):
    assert bad(make(cbs=Off(by)).twin_check())==['callbacks','gradients']

def test_it_is_true():
    "What the check says is what training shows: weights after some steps, by twins of another make"
    from fastaccum.testing import deviation, twins
    for nm,layers in (('exact',[nn.Tanh()]), ('batchnorm',[nn.BatchNorm1d(6)])):
        a,b = twins(4, 12, n=48, model=lambda: small(*layers), splitter=one_group)
        apart = deviation(a.model.state_dict(), b.model.state_dict())
        assert made(*layers).twin_check().ok==(apart<1e-7), nm

def test_several_steps():
    "That differ, where one does"
    res = made(nn.BatchNorm1d(6)).twin_check(steps=3)
    assert 'weights' in bad(res) and 0.01<res.off['weights']<2 and '3 steps' in repr(res)

def test_each_run_starts_from_the_same_and_makes_no_step():
    from fastaccum.check.runs import Runs
    from fastaccum.check.taken import apart
    from fastaccum.memory.parts import split
    steps = []
    class Counts(torch.optim.SGD):
        def step(self, *args): steps.append(1)
    learn = made(nn.BatchNorm1d(6), nn.Dropout(), opt_func=partial(OptimWrapper, opt=Counts), cbs=Ema())
    runs = Runs(learn, lambda n, sizes: [GradientAccumulation(n, drop_last=False)], split)
    runs.read()
    for a,b in ((runs.fitting(),runs.whole()), (runs.micro(),runs.micro())):
        assert apart(a, b).grad==apart(a, b).buffers==apart(a, b).loss==0
    assert not steps

def test_a_frozen_layer_and_groups():
    learn = toy(12, splitter=lambda m: [list(m[:2].parameters()),list(m[2:4].parameters()),list(m[4:].parameters())])
    learn.freeze()
    res = learn.twin_check()
    assert res.ok and [*res.layers]==['4.weight','4.bias']

def test_a_parameter_without_a_gradient():
    class Unused(nn.Sequential):
        def forward(self, x): return self[1](x)
    res = toy(12, model=lambda: Unused(nn.Linear(5, 3), nn.Linear(5, 3)).double(), splitter=one_group).twin_check()
    assert res.ok and res.off['gradients']<1e-12

@pytest.mark.parametrize('way', ['cache','checkpoint'])
def test_other_ways(way):
    "With a cache, the loss and the callbacks get the whole batch; with checkpoints the model, too"
    def net():
        return nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), nn.Sequential(nn.Dropout(0.2)),
            nn.Linear(6, 3))
    def cb(): return GradientCache(4) if way=='cache' else ActivationCheckpoint(nn.Sequential)
    assert toy(12, loss_func=contrastive, model=lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 3))).double(),
        splitter=one_group).twin_check(cbs=cb(), steps=2).ok
    learn = toy(12, model=lambda: net().double(), splitter=one_group, cbs=cb())
    before = everything(learn)
    res = learn.twin_check()
    assert ('predictions' in bad(res) and 'draws' in bad(res))==(way=='cache') and res.ok==(way=='checkpoint'), res
    same(before, everything(learn))
    if way=='cache': assert scaled(cbs=MixUp(), loss_func=CrossEntropyLossFlat()).twin_check(cbs=cb()).ok

def test_gradients_that_were_left():
    "fastai's first step takes them in; they are no part of the batch"
    learn = toy(12)
    learn.loss_func(learn.model(learn.dls.one_batch()[0]), learn.dls.one_batch()[1]).backward()
    left = [p.grad.clone() for p in learn.model.parameters()]
    assert learn.twin_check().ok
    assert all(p.grad.equal(g) for p,g in zip(learn.model.parameters(), left))

def test_products_are_not_rounded():
    "Neither those of matrices nor those of convolutions, on GPUs that would"
    seen,cudnn,matmul = [],torch.backends.cudnn,torch.backends.cuda.matmul
    class See(Callback):
        def before_batch(self): See.seen.append((cudnn.allow_tf32,matmul.allow_tf32))
    See.seen = seen
    before,matmul.allow_tf32 = (cudnn.allow_tf32,matmul.allow_tf32),True
    try:
        cudnn.allow_tf32 = True
        toy(12, cbs=See()).twin_check()
        assert set(seen)=={(False,False)} and (cudnn.allow_tf32,matmul.allow_tf32)==(True,True)
    finally: cudnn.allow_tf32,matmul.allow_tf32 = before

@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, 'fp32_precision'), reason='PyTorch before 2.9')
def test_products_that_are_rounded_by_the_newer_setting():
    "After `fp32_precision` was set, `allow_tf32` cannot even be read"
    seen,matmul,conv = [],torch.backends.cuda.matmul,torch.backends.cudnn.conv
    class See(Callback):
        def before_batch(self): See.seen.append((matmul.fp32_precision,conv.fp32_precision))
    See.seen = seen
    before,matmul.fp32_precision = (matmul.fp32_precision,conv.fp32_precision),'tf32'
    try:
        conv.fp32_precision = 'tf32'
        assert toy(12, cbs=See()).twin_check().ok
        assert set(seen)=={('ieee','ieee')} and (matmul.fp32_precision,conv.fp32_precision)==('tf32','tf32')
    finally: matmul.fp32_precision,conv.fp32_precision = before

# The Learner's own callback, and that of the fit

def counted(learn): return (learn.y!=-100).sum()

@pytest.mark.parametrize('where', ['learner','check'])
def test_size(where):
    "A mean over tokens that the loss function does not tell of, but `size` does"
    acc = GradientAccumulation(24, size=counted)
    learn = toy(12, tokens=True, loss_func=hidden, cbs=acc if where=='learner' else None)
    assert not toy(12, tokens=True, loss_func=hidden).twin_check().ok
    before = list(learn.cbs)
    res = learn.twin_check(cbs=None if where=='learner' else acc)
    assert res.ok and list(learn.cbs)==before, res

def test_callbacks_of_the_fit():
    learn = toy(12)
    assert learn.twin_check().ok
    res = learn.twin_check(cbs=[Summed()])
    assert bad(res)==['callbacks','gradients'] and 'Summed' in repr(res)
    assert not any(isinstance(o, Summed) for o in learn.cbs)

def test_own_way_of_splitting():
    "Samples along the second dimension, which nobody but the user knows"
    class Turned(nn.Linear):
        def forward(self, x): return super().forward(x.transpose(0, 1))
    def batches(items): return torch.stack([x for x,_ in items], 1),torch.stack([y for _,y in items])
    data = [(x,y) for x,y in zip(*toy_data(40).tensors)]
    dls = DataLoaders(*(DataLoader(data, bs=12, create_batch=batches, drop_last=True) for _ in range(2)))
    def learn(): return Learner(dls, Turned(5, 3).double(), CrossEntropy(), opt_func=SGD, cbs=Float32Loss())
    res = learn().twin_check()
    assert res.off['gradients'] is None and not res.ok and 'cannot be split' in repr(res)
    def split(b, start, stop, n):
        return (b[0][:,start:stop],*(o[start:stop] for o in b[1:]))
    acc = GradientAccumulation(12, micro_batch_size=AutoSize(split=split))
    assert learn().twin_check(cbs=acc).ok

# Loaders

class Stream(IterableDataset):
    def __iter__(self): return iter(zip(*toy_data(40).tensors))
    def __len__(self): return 40

def loaded(dl, **kwargs):
    learn = toy(12, **kwargs)
    learn.dls = DataLoaders(dl, learn.dls.valid)
    return learn

data = list(zip(*toy_data(40).tensors))
loaders = dict(torchs=lambda: TorchDataLoader(data, 12, shuffle=True), stream=lambda: DataLoader(Stream(), bs=12, n=40),
    torch_stream=lambda: TorchDataLoader(Stream(), 12), workers=lambda: DataLoader(data, bs=12, num_workers=2),
    short=lambda: DataLoader(data[:7], bs=12), ready=lambda: DataLoader([tuple(o[:9] for o in toy_data(40).tensors)]*3,
        bs=None))

@pytest.mark.parametrize('nm', loaders)
def test_loaders(nm):
    dl = loaders[nm]()
    learn = loaded(dl)
    res = learn.twin_check()
    assert res.ok and sum(res.sizes)==dict(short=7, ready=9).get(nm, 12), res
    assert learn.dls.train is dl and getattr(dl, '_iterator', None) is None
    assert (res.off['loader'] is None)==(nm=='ready')

def test_sorted_loader():
    def pad(items):
        xs = nn.utils.rnn.pad_sequence([x for x,_ in items], batch_first=True)
        return xs,torch.stack([y for _,y in items])
    texts = [(torch.randn(2+i*7%30, 5).double(),torch.tensor(i%3)) for i in range(40)]
    class Mean(nn.Linear):
        def forward(self, x): return super().forward(x.mean(1))
    dl = SortedDL(texts, sort_func=lambda o: len(o[0]), bs=5, shuffle=True, create_batch=pad)
    learn = loaded(dl, model=lambda: Mean(5, 3).double(), splitter=one_group)
    res = learn.twin_check()
    assert bad(res)==['loader'] and 0.1<res.off['loader']<=1 and 'SortedDL' in repr(res)
    assert learn.twin_check(cbs=GradientCache(2)).off['loader']==0   # a step is one of its batches
    remedy = next(o.remedy for o in res.rows if o.what=='loader')
    assert '`bs=20`' in remedy and '`GradientAccumulation(20, micro_batch_size=5)`' in remedy
    learn = loaded(dl.new(bs=20), model=lambda: Mean(5, 3).double(), splitter=one_group)
    assert learn.twin_check(cbs=GradientAccumulation(20, micro_batch_size=5)).ok

def test_the_order_of_a_loader_of_few_batches():
    "Steps of two batches, even if the epoch has no two of them"
    class Turned(DataLoader):
        def get_idxs(self): return [*super().get_idxs()][::(-1 if self.bs>5 else 1)]
    assert order_apart(Turned(data[:15], bs=5), 4, lambda: None)==0.5

def test_larger_batches():
    "As many samples as the twin would have; micro-batches are no larger than the loader's"
    seen = []
    class See(Callback):
        def before_batch(self): seen.append(len(self.y))
    res = toy(8, cbs=See()).twin_check(accum_bs=32)
    assert res.ok and sum(res.sizes)==32 and max(res.sizes)==8
    assert len(set(res.sizes))>1 and 32 in seen and set(res.sizes)<=set(seen)

def test_an_epochs_ragged_end_takes_no_part():
    res = toy(12, n=30).twin_check(steps=3)
    assert res.ok and 'after 2 steps' in repr(res), res

def test_what_draws_from_python():
    "Once per fit: the check itself draws nothing that a run would see"
    class Scales(Callback):
        def before_fit(self): self.by = 1+random.random()
        def after_loss(self): self.learn.loss_grad = self.loss_grad*self.by
    assert toy(12, cbs=Scales()).twin_check().ok

def test_parameters_that_wait_for_their_turn():
    "As a GAN's, which train by turns: the run goes on until all of them have had a step"
    class Two(nn.Module):
        def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5, 3),nn.Linear(5, 3)
        def forward(self, x): return self.a(x)+self.b(x)
    class Turn(Callback):
        run_valid = False
        def train(self, *names):
            for nm,o in self.model.named_children(): o.requires_grad_(nm in names)
        def before_fit(self): self.train('a')
        def after_cancel_step(self): self.train('b')
        def after_fit(self): self.train('a', 'b')
    learn = toy(12, model=lambda: Two().double(), splitter=one_group, cbs=Turn())
    res = learn.twin_check()
    assert res.ok and {*res.layers}=={'a.weight','a.bias','b.weight','b.bias'}, res

def test_another_number_of_steps_is_another_run():
    one = Taken(1., dict(w=torch.ones(2)), {})
    assert apart([one], [one]).grad==0 and apart([one], [one,one]).grad==float('inf')

def test_a_module_that_draws_and_holds_another_that_does():
    class Both(nn.Module):
        def __init__(self): super().__init__(); self.drop = nn.Dropout(0.2)
        def forward(self, x): return self.drop(x)+(0.1*torch.randn_like(x) if self.training else 0)
    res = made(Both()).twin_check()
    row = next(o for o in res.rows if o.what=='draws')
    assert bad(res)==['draws','gradients'] and 'Dropout 1.drop' in row.where and 'Both 1' in row.where, res
    assert max(res.still.values())<1e-7

def test_mapping_batches():
    class Takes(nn.Linear):
        def forward(self, b): return dict(logits=super().forward(b['x']), note='text')
    def batch(items): return UserDict(x=torch.stack([x for x,_ in items])),torch.stack([y for _,y in items])
    dls = DataLoaders(*(DataLoader(data, bs=12, create_batch=batch) for _ in range(2)))
    learn = Learner(dls, Takes(5, 3).double(), lambda p,y: F.cross_entropy(p['logits'], y), cbs=Float32Loss())
    res = learn.twin_check()
    assert res.ok, res

# What cannot be checked says so

def test_no_targets():
    dls = DataLoaders(*(DataLoader([(x,) for x,_ in data], bs=12) for _ in range(2)))
    learn = Learner(dls, nn.Linear(5, 3).double(), F.mse_loss)
    with pytest.raises(RuntimeError, match='no step was made.*no targets'): learn.twin_check()

def test_a_callback_that_ends_the_fit():
    class End(Callback):
        def before_batch(self): raise CancelFitException
    with pytest.raises(RuntimeError, match='no step was made'): toy(12, cbs=End()).twin_check()

def test_one_sample():
    res = loaded(DataLoader(data[:1], bs=12)).twin_check()
    assert not res.ok and res.off['gradients'] is None and 'single sample' in repr(res)

def test_targets_that_cannot_be_split():
    class Target:
        def __init__(self, y): self.y = y
    def batch(items): return torch.stack([x for x,_ in items]),Target(torch.stack([y for _,y in items]))
    dls = DataLoaders(*(DataLoader(data, bs=12, create_batch=batch) for _ in range(2)))
    learn = Learner(dls, nn.Linear(5, 3).double(), lambda p,t: F.cross_entropy(p, t.y), cbs=Float32Loss())
    res = learn.twin_check()
    assert res.off['gradients'] is None and 'Target' in repr(res) and 'could not be compared' in repr(res)

def test_what_accumulation_cannot_serve_is_refused():
    class Own(Learner):
        def _do_grad_opt(self):
            self.loss_grad.backward()
            self.opt.step()
            self.opt.zero_grad()
    a = toy(12)
    learn = Own(a.dls, a.model, a.loss_func, opt_func=SGD, cbs=Float32Loss())
    before = everything(learn)
    with pytest.raises(RuntimeError, match='no step was made'): learn.twin_check()
    same(before, everything(learn))

@pytest.mark.parametrize('cbs,match', [
    (lambda: FastaiGradientAccumulation(24), "fastai's own"),
    (lambda: [GradientAccumulation(24),GradientAccumulation(36)], '2 callbacks accumulate'),
    (lambda: [GradientAccumulation(24),FastaiGradientAccumulation(24)], '2 callbacks accumulate'),
    (lambda: [GradientCache(4),GradientCache(6)], 'two GradientCaches'),
    (lambda: [GradientCache(4),GradientAccumulation(24, micro_batch_size=6)], 'the loss is to see whole')])
@pytest.mark.parametrize('where', ['learner','check'])
def test_what_a_fit_refuses_is_refused(cbs, match, where):
    "Although the check takes others in the place of these callbacks. fastai's own makes other steps, without a word"
    learn = toy(12, cbs=cbs() if where=='learner' else None)
    before = everything(learn)
    with pytest.raises(ValueError, match=match): learn.twin_check(cbs=cbs() if where=='check' else None)
    same(before, everything(learn))

@pytest.mark.parametrize('kwargs', [dict(accum_bs=1),dict(accum_bs=0),dict(accum_bs=2.5),dict(accum_bs=True),
    dict(accum_bs='8'),dict(steps=-1),dict(steps=1.5),dict(steps=False),dict(accum_bs=71),
    dict(cbs=0),dict(cbs='x')], ids=str)
def test_bad_arguments(kwargs):
    learn = toy(12)
    before = everything(learn)
    nm,val = next(iter(kwargs.items()))
    with pytest.raises((ValueError,TypeError), match=f'`{nm}={val!r}`'): learn.twin_check(**kwargs)
    same(before, everything(learn))

def test_no_batch():
    learn = loaded(DataLoader(data[:7], bs=12, drop_last=True))
    with pytest.raises(ValueError, match='no batch'): learn.twin_check()

def test_several_processes_are_refused(monkeypatch):
    from torch import distributed
    learn = toy(12)
    before = everything(learn)
    monkeypatch.setattr(distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(distributed, 'get_world_size', lambda: 2)
    with pytest.raises(RuntimeError, match='in 2 processes.*in one process'): learn.twin_check()
    monkeypatch.undo()
    same(before, everything(learn))

# Memory

def test_half_of_the_samples_where_memory_runs_out():
    res = capped(7, bs=24).twin_check()
    assert res.ok and sum(res.sizes)==6, res
    with pytest.raises(torch.OutOfMemoryError, match='planted'): capped(1, bs=24).twin_check()

def test_modules_that_are_held_are_let_go():
    learn = made(nn.BatchNorm1d(6), nn.Dropout())
    learn.twin_check()
    assert all(m.training for m in learn.model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in learn.model.modules())

# All is as before

@pytest.mark.parametrize('steps', [0,2])
@pytest.mark.parametrize('fitted', [False,True])
@pytest.mark.parametrize('kind', ['success','oom','error','interrupt'])
def test_everything_is_as_before(kind, fitted, steps):
    exc = dict(error=lambda: ValueError('planted'), interrupt=KeyboardInterrupt).get(kind,
        lambda: torch.OutOfMemoryError('planted'))
    learn = rich(1000, fitted=fitted, exc=exc, bs=12)
    learn.model[2].cap = dict(success=1000, oom=1).get(kind, 7)   # micro-batches of up to 6: the whole one fails
    before = everything(learn)
    raised = dict(oom=torch.OutOfMemoryError, error=ValueError, interrupt=KeyboardInterrupt).get(kind)
    if raised:
        with pytest.raises(raised): learn.twin_check(steps=steps)
    else: assert 'predictions' in bad(learn.twin_check(steps=steps))
    same(before, everything(learn))

events = ('before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward '
    'before_step after_batch after_cancel_fit after_fit').split()

@pytest.mark.parametrize('event', events)
@pytest.mark.parametrize('at,exc', [(1,ZeroDivisionError),(2,KeyboardInterrupt),(4,KeyboardInterrupt)])
def test_interrupt_at_any_event(event, at, exc):
    "In the whole batch's run, in the look and in those after it"
    calls = []
    class Interrupt(Callback): order = -100
    def interrupt():
        calls.append(1)
        if len(calls)==at: raise exc('planted')
    learn,cb = rich(1000, bs=12),Interrupt()
    setattr(cb, event, interrupt)
    learn.add_cb(cb)
    calls.clear()
    before = everything(learn)
    with pytest.raises(exc): learn.twin_check()
    same(before, everything(learn))

@pytest.mark.parametrize('where', ['runs.Runs.read','runs.Runs.use','look.Passes.__call__','watch.Watch.__enter__',
    'look.Look._look_at_predictions','causes.order_apart','causes.blame','given.Given.__iter__'])
def test_interrupt_in_the_checks_own_code(where, monkeypatch):
    import importlib
    room,*path = where.split('.')
    holder = importlib.import_module(f'fastaccum.check.{room}')
    for nm in path[:-1]: holder = getattr(holder, nm)
    stock = getattr(holder, path[-1])
    def interrupt(*args, **kwargs):
        stock(*args, **kwargs)
        raise KeyboardInterrupt
    learn = rich(1000, bs=12)
    learn.add_cb(Summed())
    before = everything(learn)
    monkeypatch.setattr(holder, path[-1], interrupt)
    with pytest.raises(KeyboardInterrupt): learn.twin_check()
    monkeypatch.undo()
    same(before, everything(learn))

def test_training_goes_on_as_if_nothing_had_been():
    "Bit for bit"
    learns = []
    for checked in (False,True):
        torch.manual_seed(1)
        learn = capped(1000, bn=True, opt_func=Adam, shuffle=True, n=70, bs=12, cbs=[Ema(),GradientClip()],
            metrics=Count())
        with learn.no_logging():
            learn.fit_one_cycle(1, 0.1)
            if checked: learn.twin_check(steps=2)
            learn.fit_one_cycle(1, 0.1)
        learns.append(learn)
    a,b = learns
    assert all(p.equal(q) for p,q in zip(a.model.state_dict().values(), b.model.state_dict().values()))
    assert recorded(a)[1:]==recorded(b)[1:]
    assert all(p.equal(q) for p,q in zip(a.ema.shadow.parameters(), b.ema.shadow.parameters()))

def test_listeners_do_not_hear_of_it(tmp_path, capsys):
    heard = []
    class Log(Callback):
        order = 60
        def before_fit(self): heard.append('before_fit')
        def after_batch(self): heard.append('after_batch')
    cbs = [CSVLogger(tmp_path/'log.csv'),SaveModelCallback(fname='best'),TerminateOnNaNCallback(),
        ShortEpochCallback(0.01),Log()]
    learn = toy(12, cbs=cbs, metrics=Count())
    learn.logger = lambda *o: heard.append('logged')
    assert learn.twin_check(steps=2).ok
    assert heard==learn.metrics[0].calls==[] and not list(tmp_path.iterdir()) and not hasattr(learn.recorder, 'lrs')
    assert capsys.readouterr().out==''

def test_a_bar_only_where_there_is_one(capsys, monkeypatch):
    import fastaccum.twin_check as mod
    from fastai.callback.progress import ProgressCallback
    from fastprogress.fastprogress import ConsoleProgressBar
    monkeypatch.setattr(mod, 'progress_bar', ConsoleProgressBar)
    learn = toy(12)
    learn.twin_check()
    assert capsys.readouterr().out==''
    learn.add_cb(ProgressCallback())
    with learn.no_bar(): learn.twin_check()
    assert capsys.readouterr().out==''
    before = everything(learn)
    learn.twin_check(steps=2)
    learn.add_cb(Summed())
    learn.twin_check()   # more runs than announced
    learn.remove_cb(learn.cbs[-1])
    assert '█' in capsys.readouterr().out
    same(before, everything(learn))

def test_it_says_nothing_that_the_table_says(recwarn):
    "A fit with BatchNorm warns; the check has a row for it"
    made(nn.BatchNorm1d(6), nn.Dropout()).twin_check()
    assert not recwarn.list

def test_within_a_fit():
    class Check(Callback):
        order = 70
        def before_fit(self):
            if not hasattr(self, 'ok'): self.ok = self.learn.twin_check().ok
    learn,cb = toy(12),Check()
    learn.fit(1, cbs=cb)
    assert cb.ok and len(learn.recorder.losses)==6

# The result

def test_result():
    res = made(nn.BatchNorm1d(6), nn.Dropout()).twin_check()
    text,mark = repr(res),res._repr_markdown_()
    for o in ('predictions','off by','BatchNorm1d 1','Dropout 2','BnFreeze()','recalibrate_bn()','not the same run'):
        assert o in text and o in mark, o
    assert '`' not in text and all(len(l)<250 for l in text.splitlines())
    assert res.off==dict(zip(whats, [o.off for o in res.rows])) and not res and res.seconds>0
    ax = res.plot()
    assert ax.get_xscale()=='log' and [o.get_text() for o in ax.get_yticklabels()]==[*res.layers] and len(ax.lines)==3
    assert len(toy(12).twin_check().plot().lines)==2

def test_reading_begins_anew_where_the_loader_ends():
    assert [len(y) for _,y in read(toy(12, n=24).dls.train, 5)]==[12]*5
