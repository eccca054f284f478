"The check says of a Learner's own fit whether it is the full batch's, and if not, why; it leaves everything as it was."
import random
from collections import UserDict
from copy import deepcopy
from functools import partial
import numpy as np, pytest, torch
from matplotlib import pyplot as plt
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader as TorchDataLoader, IterableDataset, TensorDataset
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.mixup import MixUp
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import SaveModelCallback, TerminateOnNaNCallback
from fastai.callback.training import (GradientAccumulation as FastaiGradientAccumulation, GradientClip,
    ShortEpochCallback)
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, Metric
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper
from fastai.text.data import LMDataLoader, SortedDL
from fastaccum import ActivationCheckpoint, GradientAccumulation, GradientAccumulationSchedule, GradientCache
from fastaccum.testing import CrossEntropy, deviation, toy, toy_data, twins
from common import CpuMixedPrecision, some, weights

whats = ['loss','predictions','draws','callbacks','loader','gradients','buffers']

def check(learn, **kwargs): return learn.twin_check(**kwargs)
def bad(res): return {o.what for o in res.rows if not o.ok}
def row(res, what): return next(o for o in res.rows if o.what==what)
def one_group(m): return [list(m.parameters())]
def net(*layers): return nn.Sequential(nn.Linear(5, 6), *layers, nn.Linear(6, 3))
def made(*layers, bs=12, **kwargs): return toy(bs, model=lambda: net(*layers).double(), splitter=one_group, **kwargs)

def single(*layers, seed=0, **kwargs):
    "In single precision"
    x,y = toy_data(40, seed=seed).tensors
    return toy(12, data=TensorDataset(x.float(), y), model=lambda: net(*layers or [nn.Tanh()]), splitter=one_group,
        seed=seed, **kwargs)

def loaded(dl, **kwargs):
    learn = toy(12, **kwargs)
    learn.dls = DataLoaders(dl, learn.dls.valid)
    return learn

# No false alarm

class TwoInputs(nn.Module):
    def __init__(self): super().__init__(); self.a,self.b = nn.Linear(5, 3),nn.Linear(2, 3)
    def forward(self, x, z): return self.a(x)+self.b(z)

def two_inputs():
    x,y = toy_data(40).tensors
    data = TensorDataset(x, x[:,:2].contiguous(), y)
    learn = toy(12, data=data, model=lambda: TwoInputs().double(), splitter=one_group)
    learn.dls.n_inp = 2
    return learn

class Mapped(nn.Linear):
    def forward(self, b): return dict(logits=super().forward(b['x']), note='text')

def mappings():
    def batch(items): return UserDict(x=torch.stack([x for x,_ in items])),torch.stack([y for _,y in items])
    return loaded(DataLoader(toy_data(40), bs=12, create_batch=batch), model=lambda: Mapped(5, 3).double(),
        splitter=one_group, loss_func=lambda p,y: F.cross_entropy(p['logits'], y))

class Eval(Callback):
    def before_batch(self): self.learn.model[1].eval()
class MeanPenalty(Callback):
    def after_loss(self): self.learn.loss_grad = self.loss_grad+self.pred.square().mean()
class OnceAFit(Callback):
    def before_fit(self): self.by = 1+random.random()
    def after_loss(self): self.learn.loss_grad = self.loss_grad*self.by
def before_norm():
    "A bias that normalisation takes out again"
    conv = nn.Unflatten(1, (1,5)),nn.Conv1d(1, 3, 2),nn.InstanceNorm1d(3),nn.Flatten()
    return nn.Sequential(*conv, nn.Linear(12, 3)).double()
class Unused(nn.Sequential):
    def forward(self, x): return self[1](x)
class Stream(IterableDataset):
    def __iter__(self): return iter(zip(*toy_data(40).tensors))
    def __len__(self): return 40

def hidden(p, y): return F.cross_entropy(p.flatten(0, -2), y.flatten())   # leaves -100 out, and does not tell
def contrastive(p, y): return F.cross_entropy(F.normalize(p)@F.normalize(p.roll(1, 1)).T, torch.arange(len(p)))
def counted(learn): return (learn.y!=-100).sum()

data = list(zip(*toy_data(40).tensors))
exact = dict(plain=lambda: toy(12), tokens=lambda: toy(12, tokens=True), batch_of_one=lambda: toy(1),
    batch_of_two=lambda: toy(2), shuffled=lambda: toy(12, shuffle=True), two_inputs=two_inputs, mappings=mappings,
    layer_norm=lambda: made(nn.LayerNorm(6)), no_dropout=lambda: made(nn.Dropout(0.)),
    no_gradient_but_rounding=lambda: toy(12, model=before_norm, splitter=one_group),
    frozen_statistics=lambda: made(nn.BatchNorm1d(6), cbs=Eval()),
    unused=lambda: toy(12, model=lambda: Unused(nn.Linear(5, 3), nn.Linear(5, 3)).double(), splitter=one_group),
    summed=lambda: toy(12, loss_func=CrossEntropy(reduction='sum')),
    fastais_loss=lambda: toy(12, loss_func=CrossEntropyLossFlat()), clipped=lambda: toy(12, cbs=GradientClip(1e-3)),
    mean_penalty=lambda: toy(12, cbs=MeanPenalty()), once_a_fit=lambda: toy(12, cbs=OnceAFit()),
    torchs=lambda: toy(12, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)),
    fp16=lambda: single(cbs=CpuMixedPrecision()), bf16=lambda: single(cbs=CpuMixedPrecision(amp_mode='bf16')),
    overflows=lambda: single(cbs=CpuMixedPrecision(), loss_func=lambda p,t: 1e4*F.cross_entropy(p, t)),
    relu=lambda: single(nn.ReLU(), nn.Linear(6, 6), nn.ReLU()),
    wide_relu=lambda: single(nn.Linear(6, 200), nn.ReLU(), nn.Linear(200, 6), seed=1),
    scheduled=lambda: toy(4, cbs=GradientAccumulationSchedule(8, 16)),
    own_sizes=lambda: toy(12, tokens=True, loss_func=hidden, cbs=GradientAccumulation(24, size=counted)),
    torch_loader=lambda: loaded(TorchDataLoader(data, 12, shuffle=True)),
    stream=lambda: loaded(DataLoader(Stream(), bs=12, n=40)),
    torch_stream=lambda: loaded(TorchDataLoader(Stream(), 12)),
    workers=lambda: loaded(DataLoader(data, bs=12, num_workers=2)), short=lambda: loaded(DataLoader(data[:7], bs=12)))

@pytest.mark.parametrize('nm', exact)
def test_no_false_alarm(nm):
    learn = exact[nm]()
    dl = learn.dls.train
    res = check(learn)
    assert res and res.ok and not bad(res) and [*res.off]==whats, res
    assert 'the same run' in repr(res) and learn.dls.train is dl and getattr(dl, '_iterator', None) is None

def blocks(*layers): return lambda: nn.Sequential(*map(nn.Sequential, layers)).double()
def pairs(cb): return toy(12, loss_func=contrastive, model=blocks(nn.Linear(5, 3)), splitter=one_group, cbs=cb)
def mixed(*cbs, **kwargs): return single(cbs=[MixUp(),*cbs], loss_func=CrossEntropyLossFlat(**kwargs))
drawing = blocks(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(.2), nn.Linear(6, 3))

ways = dict(cache=lambda: pairs(GradientCache(micro_batch_size=4)),
    cache_and_mixup=lambda: mixed(GradientCache(micro_batch_size=4)),
    checkpoint=lambda: pairs(ActivationCheckpoint(nn.Sequential)),
    checkpoint_draws=lambda: toy(12, model=drawing, splitter=one_group, cbs=ActivationCheckpoint(nn.Sequential)),
    split=lambda: toy(12, cbs=GradientAccumulation(12, micro_batch_size=4)),
    split_after_mixup=lambda: mixed(GradientAccumulation(12, micro_batch_size=4)),
    split_auto=lambda: toy(12, cbs=GradientAccumulation(12, micro_batch_size='auto')))

@pytest.mark.parametrize('nm', ways)
def test_each_way_is_checked_as_it_works(nm):
    "With a cache loss and callbacks get the whole batch, with checkpoints the model too, and callbacks before a split"
    res = check(ways[nm](), steps=2)
    assert res.ok and not bad(res) and [*res.off]==[*whats,'weights'], res

def test_a_cache_does_not_save_batchnorm_and_dropout():
    res = check(made(nn.BatchNorm1d(6), nn.Dropout(.2), cbs=GradientCache(micro_batch_size=4)))
    assert {'predictions','draws'}<=bad(res), res

def test_the_batch_may_be_larger_than_the_loaders():
    "Micro-batches are no larger than the loader's, and unequal, since equal ones hide the most common mistake"
    for bs,accum_bs,most in ((8,32,8),(12,None,8),(6,None,5),(16,None,15)):
        sizes = []
        class See(Callback):
            def before_batch(self): sizes.append(len(self.y))
        assert check(toy(bs, cbs=See()), accum_bs=accum_bs).ok
        parts = {o for o in sizes if o!=(accum_bs or bs)}
        assert len(parts)<len(set(sizes)) and max(parts)<=most and len(parts)>1, sizes

newer = hasattr(torch.backends.cuda.matmul, 'fp32_precision')   # PyTorch 2.9
ieee = [('allow_tf32', False, True)]+[('fp32_precision', 'ieee', 'tf32')]*newer

@pytest.mark.parametrize('nm,off,on', ieee, ids=[o[0] for o in ieee])
def test_products_are_not_rounded_on_gpus_that_would(nm, off, on):
    "As TF32, which may be told by two settings"
    seen,where = [],[torch.backends.cuda.matmul,torch.backends.cudnn if nm=='allow_tf32' else torch.backends.cudnn.conv]
    def now(): return [getattr(o, nm) for o in where]
    class See(Callback):
        def before_batch(self): seen.append(now())
    before = now()
    try:
        for o in where: setattr(o, nm, on)
        check(toy(12, cbs=See()))
        assert seen and all(o==[off]*2 for o in seen) and now()==[on]*2
    finally:
        for o,was in zip(where, before): setattr(o, nm, was)

# No silence

class Noise(nn.Module):
    "Draws, and is no dropout"
    def forward(self, x): return x+.1*torch.randn_like(x) if self.training else x
class Both(nn.Module):
    "Draws, and holds another that does"
    def __init__(self): super().__init__(); self.drop = nn.Dropout(.2)
    def forward(self, x): return self.drop(x)+(.1*torch.randn_like(x) if self.training else 0)
class Centre(nn.Module):
    "Looks at the other samples, in evaluation too"
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
    def after_loss(self): self.learn.loss_grad = self.loss_grad+.1*self.pred.square().sum()
class Mixes(Callback):
    def after_pred(self): self.learn.pred = self.pred-self.pred.mean(0)
class Harmless(Callback):
    def before_batch(self): self.learn.xb = tuple(o.clone() for o in self.xb)
class Off(Callback):
    "The gradient of a part is wrong by a share"
    order = -1
    def __init__(self, by): self.by = by
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.loss_grad*(1+self.by*(len(self.x)<12))

def undeclared(p, y): return F.cross_entropy(p, y, reduction='sum')
def slope(p, y):
    "The value of a mean, the gradient of a sum"
    l = F.cross_entropy(p, y)
    return l+(len(p)-1)*(l-l.detach())

# A Learner; what is off besides gradients and buffers, and where; and whether nothing is off without it
off = dict(batchnorm=(lambda: made(nn.BatchNorm1d(6)), dict(predictions='BatchNorm1d 1'), True),
    dropout=(lambda: made(nn.Dropout(.2)), dict(draws='Dropout 1'), True),
    dropouts=(lambda: made(nn.Dropout(.2), nn.Tanh(), nn.Dropout(.2)), dict(draws='Dropout 1, 3'), True),
    noise=(lambda: made(Noise()), dict(draws='Noise 1'), True), both=(lambda: made(Both()), dict(draws='Both 1'), True),
    both_inner=(lambda: made(Both()), dict(draws='Dropout 1.drop'), True),
    centre=(lambda: made(Centre()), dict(predictions='Centre 1'), False),
    carry=(lambda: toy(12, model=lambda: Carries(*net(Carry()).double().children()), splitter=one_group),
        dict(predictions=''), False),
    hidden=(lambda: toy(12, tokens=True, loss_func=hidden), dict(loss=''), False),
    contrastive=(lambda: toy(12, loss_func=contrastive), dict(loss=''), False),
    undeclared=(lambda: toy(12, loss_func=undeclared), dict(loss=''), False),
    slope=(lambda: toy(12, loss_func=slope), dict(loss='gradient'), False),
    clipped=(lambda: toy(12, cbs=[Off(-.5),GradientClip(1e-3)]), dict(callbacks='Off'), True),
    small=(lambda: single(cbs=Off(5e-3)), dict(callbacks='Off'), True),
    small_relu=(lambda: single(nn.ReLU(), cbs=Off(5e-3)), dict(callbacks='Off'), True),
    tiny_double=(lambda: toy(12, cbs=Off(1e-5)), dict(callbacks='Off'), True),
    mixup=(lambda: mixed(Harmless()), dict(callbacks='MixUp'), True),
    mixup_summed=(lambda: mixed(reduction='sum'), dict(callbacks='MixUp'), True),
    penalty=(lambda: toy(12, cbs=[Harmless(),Summed()]), dict(callbacks='Summed'), True),
    two=(lambda: toy(12, cbs=[Summed(),Mixes()]), dict(callbacks='Mixes'), True),
    the_other_of_two=(lambda: toy(12, cbs=[Summed(),Mixes()]), dict(callbacks='Summed'), True),
    all=(lambda: made(nn.BatchNorm1d(6), nn.Dropout(), cbs=Mixes()),
        dict(predictions='BatchNorm1d 1', draws='Dropout 2', callbacks='Mixes'), True))

@pytest.mark.parametrize('nm', off)
def test_no_silence(nm):
    "The row that is off says where and what to type; others say nothing"
    make,wanted,alone = off[nm]
    res = check(make())
    assert not res and not res.ok and {*wanted}<=bad(res)<={*wanted,'gradients','buffers'}, res
    for k,where in wanted.items():
        assert where in row(res, k).where and 'Harmless' not in row(res, k).where and row(res, k).remedy, res
        assert where==row(res, k).where or nm.startswith(('both','two','the_other')) or not alone, res
    if alone and 'gradients' in bad(res): assert 'exact' in row(res, 'gradients').where, res
    assert 'not the same run' in repr(res) and all(res.off[k]>row(res, k).tol for k in bad(res))
    assert ('buffers' in bad(res))==(nm in ('batchnorm','all'))

@pytest.mark.parametrize('nm', ['batchnorm','penalty'])
def test_without_what_it_found_nothing_is_off(nm):
    "A remedy that the table names makes the same Learner exact"
    learn = off[nm][0]()
    cb = ActivationCheckpoint(nn.Sequential) if nm=='batchnorm' else GradientCache(micro_batch_size=4)
    if nm=='batchnorm':
        learn.model = nn.Sequential(nn.Sequential(*learn.model.children()))
        assert 'ActivationCheckpoint' in row(check(learn), 'predictions').remedy
    else: assert 'GradientCache' in row(check(learn), 'callbacks').remedy
    assert check(learn, cbs=cb).ok

def padded(items):
    return nn.utils.rnn.pad_sequence([x for x,_ in items], batch_first=True),torch.stack([y for _,y in items])
class Mean(nn.Linear):
    def forward(self, x): return super().forward(x.mean(1))

def test_a_loader_whose_batches_depend_on_their_size():
    "Sorted by length; with its own remedy the run is the full batch's"
    texts = [(torch.randn(2+i*7%30, 5).double(),torch.tensor(i%3)) for i in range(40)]
    dl = SortedDL(texts, sort_func=lambda o: len(o[0]), bs=5, shuffle=True, create_batch=padded)
    def learn(dl): return loaded(dl, model=lambda: Mean(5, 3).double(), splitter=one_group)
    res = check(learn(dl))
    assert bad(res)=={'loader'} and 0<res.off['loader']<=1 and 'SortedDL' in repr(res)
    assert 'micro_batch_size' in row(res, 'loader').remedy
    assert check(learn(dl), cbs=GradientCache(micro_batch_size=2)).ok   # a step is one of its batches
    assert check(learn(dl.new(bs=20)), cbs=GradientAccumulation(20, micro_batch_size=5)).ok

def test_a_language_models_loader():
    dl = LMDataLoader([torch.randint(0, 9, (60,)) for _ in range(4)], bs=4, seq_len=5)
    net = nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)).double()
    res = check(loaded(dl, model=lambda: net, splitter=one_group))
    assert bad(res)=={'loader'} and res.off['loader']>0

layers = nn.Tanh,lambda: nn.BatchNorm1d(6),Centre

@pytest.mark.parametrize('kwargs', [{},dict(loss_func=undeclared),dict(tokens=True),dict(tokens=True, loss_func=hidden),
    *(dict(model=lambda o=o: net(o()).double(), splitter=one_group) for o in layers),
    *(dict(cbs=lambda cb=cb: [cb()]) for cb in (MeanPenalty,Summed,Mixes,Harmless))], ids=lambda o: '-'.join(o))
@pytest.mark.filterwarnings('ignore::fastaccum.TwinWarning')
def test_what_it_says_is_true_of_a_fit(kwargs):
    a,b = twins(4, 12, n=48, **kwargs)
    cbs = kwargs.pop('cbs', list)()
    assert check(toy(12, **kwargs), cbs=cbs).ok==(deviation(weights(a), weights(b))<1e-7)

def test_some_steps_of_training_are_compared():
    res = check(toy(12, n=30), steps=3)   # an epoch's ragged end takes no part
    assert res.ok and res.off['weights']<1e-7 and 'after 2 steps' in row(res, 'weights').where
    res = check(made(nn.BatchNorm1d(6)), steps=3)
    assert 'weights' in bad(res) and .01<res.off['weights']<2 and '3 steps' in repr(res)

def test_gradients_that_were_left_take_no_part():
    learn = toy(12)
    learn.loss_func(learn.model(learn.dls.one_batch()[0]), learn.dls.one_batch()[1]).backward()
    left = [p.grad.clone() for p in learn.model.parameters()]
    assert check(learn).ok and all(p.grad.equal(g) for p,g in zip(learn.model.parameters(), left))

# What it shows

def test_table_and_picture():
    res = check(made(nn.BatchNorm1d(6), nn.Dropout()))
    text,mark = repr(res),res._repr_markdown_()
    for o in ('predictions','off by','BatchNorm1d 1','Dropout 2','ActivationCheckpoint()','recalibrate_bn()','exact'):
        assert o in text and o in mark, o
    assert '`' not in text and all(len(l)<250 for l in text.splitlines()) and mark.count('\n| ')==1+len(whats)
    assert res.off=={o.what:o.off for o in res.rows} and [*res.off]==whats
    ax = res.plot()
    names = [nm for nm,_ in made(nn.BatchNorm1d(6), nn.Dropout()).model.named_parameters()]
    assert ax.get_xscale()=='log' and [o.get_text() for o in ax.get_yticklabels()]==names and len(ax.lines)==3
    before,after,tol = (np.array(o.get_xdata()) for o in ax.lines)
    assert before.max()>1e-3 and after.max()<tol[0]==row(res, 'gradients').tol
    learn = toy(12, splitter=lambda m: [list(m[:2].parameters()),list(m[2:].parameters())])
    learn.freeze()
    ax = check(learn).plot()   # what does not train is not there; nothing was found, so there is no second line
    assert len(ax.lines)==2 and [o.get_text() for o in ax.get_yticklabels()]==['2.weight','2.bias','4.weight','4.bias']
    plt.close('all')

def test_it_does_not_say_twice_what_the_table_says(recwarn, capsys):
    check(made(nn.BatchNorm1d(6), nn.Dropout()))
    assert not recwarn.list and capsys.readouterr().out==''

def test_callbacks_of_the_fit():
    learn = toy(12)
    before = list(learn.cbs)
    res = check(learn, cbs=[Summed()])
    assert bad(res)=={'callbacks','gradients'} and list(learn.cbs)==before and check(learn).ok
    learn = toy(12, tokens=True, loss_func=hidden)
    assert not check(learn).ok and check(learn, cbs=GradientAccumulation(24, size=counted)).ok

# What cannot be checked says so

class Ends(Callback):
    def before_batch(self): raise CancelFitException
class Target:
    def __init__(self, y): self.y = y

def test_targets_that_cannot_be_split():
    def batch(items): return torch.stack([x for x,_ in items]),Target(torch.stack([y for _,y in items]))
    res = check(loaded(DataLoader(data, bs=12, create_batch=batch), loss_func=lambda p,t: F.cross_entropy(p, t.y)))
    assert not res.ok and res.off['gradients'] is None
    assert 'Target' in repr(res) and 'could not be compared' in repr(res)

def no_targets():
    learn = loaded(DataLoader([(x,) for x,_ in data], bs=12))
    learn.dls.valid = DataLoader([(x,) for x,_ in data], bs=12)
    return learn

@pytest.mark.parametrize('make,exc,match', [(no_targets,RuntimeError,'no step was made.*no targets'),
    (lambda: toy(12, cbs=Ends()),RuntimeError,'no step was made'),
    (lambda: loaded(DataLoader(data[:7], bs=12, drop_last=True)),ValueError,'no batch'),
    (lambda: toy(12, cbs=FastaiGradientAccumulation(24)),ValueError,"fastai's own"),
    (lambda: toy(12, cbs=[GradientAccumulation(24),GradientAccumulation(36)]),ValueError,'2 callbacks accumulate'),
    (lambda: toy(12, cbs=[GradientCache(micro_batch_size=4),GradientCache(micro_batch_size=6)]),ValueError,'two'),
    (lambda: toy(12, cbs=[GradientCache(micro_batch_size=4),GradientAccumulation(24, micro_batch_size=6)]),ValueError,
        'whole')], ids=['targets','ends','no_batch','fastai','two','caches','cache_and_split'])
def test_what_a_fit_refuses_is_refused(make, exc, match):
    learn = make()
    before = everything(learn)
    with pytest.raises(exc, match=match): check(learn)
    assert_same(before, learn)

@pytest.mark.parametrize('kwargs', [dict(accum_bs=1),dict(accum_bs=0),dict(accum_bs=2.5),dict(accum_bs=True),
    dict(accum_bs='8'),dict(accum_bs=71),dict(steps=-1),dict(steps=1.5),dict(cbs=0),dict(cbs='x')], ids=str)
def test_bad_arguments(kwargs):
    learn,(nm,val) = toy(12),next(iter(kwargs.items()))
    before = everything(learn)
    with pytest.raises((ValueError,TypeError), match=f'`{nm}={val!r}`'): check(learn, **kwargs)
    assert_same(before, learn)

def test_several_processes_are_refused(monkeypatch):
    from torch import distributed
    monkeypatch.setattr(distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(distributed, 'get_world_size', lambda *a: 2)
    with pytest.raises(RuntimeError, match='in 2 processes.*in one process'): check(toy(12))

# Everything is as it was

def plain(o, depth=0):
    "What can be compared of `o`; the rest by identity"
    if isinstance(o, torch.Tensor):
        grad = o.grad if o.is_leaf else None
        return id(o),o.requires_grad,repr(o.detach().tolist()),repr(grad if grad is None else grad.tolist())
    if isinstance(o, np.ndarray): return repr(o.tolist())
    if isinstance(o, torch.Generator): return repr(o.get_state().tolist())
    if isinstance(o, random.Random): return hash(o.getstate())
    if isinstance(o, (str,int,float,type(None))): return repr(o)
    if isinstance(o, dict): return [(plain(k, depth+1),plain(v, depth+1)) for k,v in o.items()]
    if isinstance(o, (list,tuple)) or type(o).__name__=='L': return [plain(x, depth+1) for x in o]
    skip = (type,nn.Module,Learner,DataLoaders,DataLoader)
    if depth>4 or not hasattr(o, '__dict__') or isinstance(o, skip) or callable(o): return id(o)
    return plain(vars(o), depth+1)

def everything(learn):
    "All of a Learner that a dry run may touch"
    opt,rec = learn.opt,getattr(learn, 'recorder', None)
    return dict(modules=[(nm,m.training,plain(m._parameters),plain(m._buffers),len(m._forward_hooks),
            len(m._forward_pre_hooks),sorted(vars(m))) for nm,m in learn.model.named_modules()],
        hooks=[len(p._backward_hooks or ()) for p in learn.model.parameters()],
        learn={k:plain(v) for k,v in vars(learn).items() if k not in ('opt','recorder')},
        recorder=plain(rec and vars(rec)),
        cbs=[(id(o),plain(vars(o)),o.order,o.run,o.run_train,o.run_valid) for o in learn.cbs],
        opt=opt and (id(opt),plain([opt.state.get(p) for p in learn.model.parameters()]),plain(list(opt.hypers))),
        loaders=[(id(o),plain(vars(o)),len(o)) for o in learn.dls.loaders], grad=torch.is_grad_enabled(),
        rng=(hash(random.getstate()),repr(np.random.get_state()),repr(torch.get_rng_state().tolist())))

def assert_same(before, learn):
    now = everything(learn)
    assert before.keys()==now.keys() and [k for k in before if before[k]!=now[k]]==[]

class Ema(Callback):
    "A moving average of the weights, in memory of its own"
    order = 11
    def before_fit(self):
        if not hasattr(self, 'shadow'): self.shadow = deepcopy(self.learn.model).requires_grad_(False)
        self.weights = list(self.shadow.parameters())
    def after_step(self):
        for a,b in zip(self.weights, self.learn.model.parameters()): a.mul_(.9).add_(b.detach(), alpha=.1)

class Draws(Callback):
    "Draws from all generators, keeps notes, sets flags, changes the Learner and the model"
    def __init__(self): self.notes,self.d,self.arr,self.rng = [],{},np.zeros(2),random.Random(3)
    def before_batch(self):
        random.random(); np.random.rand(); torch.rand(1); self.rng.random()
        self.notes.append(len(self.learn.xb[0])); self.d[len(self.d)] = [0]; self.arr += 1; self.run_valid = False
        self.learn.loss_func = partial(self.learn.loss_func); self.learn.logger = print; self.learn.new = 1
        self.learn.model[0].register_forward_hook(lambda *o: None)
        self.learn.model[0].new = torch.zeros(1)
        self.learn.model[3].bias.requires_grad_(False)

class Count(Metric):
    def __init__(self): self.calls = []
    def reset(self): self.calls.append('reset')
    def accumulate(self, learn): self.calls.append(random.random())
    @property
    def value(self): return float(len(self.calls))

class Fails(nn.Module):
    "Raises in batches of more than `cap` samples"
    def __init__(self): super().__init__(); self.cap,self.exc = 1000,None
    def forward(self, x):
        if len(x)>self.cap: raise self.exc
        return x

def rich(fitted=True, cbs=()):
    "A Learner with much to lose"
    cbs = [Draws(),Ema(),GradientClip(),GradientAccumulation(12),CSVLogger('log.csv'),*cbs]
    learn = made(nn.BatchNorm1d(6), Fails(), n=40, shuffle=True, opt_func=Adam, metrics=Count(), cbs=cbs)
    if fitted:
        with learn.no_logging(): learn.fit(1, .1)
        for p in learn.model.parameters(): p.grad = torch.ones_like(p)
    return learn

@pytest.mark.parametrize('steps', [0,2])
@pytest.mark.parametrize('fitted', [False,True])
@pytest.mark.parametrize('cap,exc', [(1000,None),(1,torch.OutOfMemoryError('planted')),(7,ValueError('planted')),
    (4,KeyboardInterrupt())], ids=['success','memory','error','interrupt'])
def test_everything_is_as_before(cap, exc, fitted, steps):
    learn = rich(fitted)
    learn.model[2].cap,learn.model[2].exc = cap,exc
    before = everything(learn)
    if exc is None: assert 'predictions' in bad(check(learn, steps=steps))
    else:
        with pytest.raises(type(exc)): check(learn, steps=steps)
    assert_same(before, learn)

events = ('before_fit before_epoch before_train before_batch after_pred after_loss before_backward after_backward '
    'before_step after_batch after_cancel_fit after_fit').split()

@pytest.mark.parametrize('event,at,exc', some(16, [(e,i,x) for e in events for i in (1,2,4)
    for x in (KeyboardInterrupt,ZeroDivisionError)]))
def test_everything_is_as_before_after_an_interrupt(event, at, exc):
    "At any event, in any of the runs that the check makes"
    heard,cb = [],Callback()
    def interrupt():
        heard.append(1)
        if len(heard)==at: raise exc('planted')
    cb.order = -100
    setattr(cb, event, interrupt)
    learn = rich(False, [cb])
    before = everything(learn)
    with pytest.raises(exc): check(learn)
    assert_same(before, learn)

def test_training_goes_on_as_if_nothing_had_been():
    "To the bit"
    def run(checked):
        learn = made(nn.BatchNorm1d(6), nn.Dropout(), opt_func=Adam, shuffle=True, n=40, cbs=[Ema(),GradientClip()],
            metrics=Count())
        random.seed(1)
        with learn.no_logging():
            learn.fit_one_cycle(1, .1)
            if checked: check(learn, steps=2)
            learn.fit_one_cycle(1, .1)
        return learn
    a,b = run(False),run(True)
    assert weights(a).equal(weights(b)) and all(p.equal(q) for p,q in zip(a.ema.weights, b.ema.weights))
    assert a.recorder.losses==b.recorder.losses and a.metrics[0].calls==b.metrics[0].calls

def test_nothing_is_logged_saved_or_measured(tmp_path, capsys):
    heard = []
    cbs = CSVLogger(tmp_path/'log.csv'),SaveModelCallback(fname='best'),TerminateOnNaNCallback(),ShortEpochCallback(.01)
    learn = toy(12, cbs=list(cbs), metrics=Count())
    learn.logger = lambda *o: heard.append('logged')
    assert check(learn, steps=2).ok
    assert heard==learn.metrics[0].calls==[] and not list(tmp_path.iterdir()) and capsys.readouterr().out==''

def test_within_a_fit():
    class Check(Callback):
        order,ok = 70,None
        def before_fit(self):
            if self.ok is None: self.ok = False; self.ok = check(self.learn).ok
    def run(*cbs):
        learn = toy(12)
        learn.fit(1, cbs=cbs)
        return learn
    cb = Check()
    a,b = run(),run(cb)
    assert cb.ok and weights(a).equal(weights(b)) and a.recorder.losses==b.recorder.losses
