"""Compare what a fit warns of with what it does, for random combinations of model, loss, callback and loader.

Some of them are wrong on purpose. The full-batch run is the judge: a run is wrong if its weights end elsewhere.

    python -m benchmarks.trials [number of combinations, default 500]
"""
import random, sys, torch
from collections import Counter
from pathlib import Path
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from fastai.basics import Callback, DataLoaders, Learner, Module, SGD, set_seed
from fastai.data.load import DataLoader
from fastaccum import AccumulationWarning, GradientAccumulation
from fastaccum.testing import Float32Loss
sys.path.insert(0, str(Path(__file__).resolve().parent.parent/'tests'))
from common import collect_warnings, weights

gen = torch.Generator().manual_seed(0)
xs = torch.randn(96, 8, generator=gen).double()
classes = xs[:,:3].argmax(1)
tokens = torch.where(torch.arange(5)<1+torch.randint(0, 5, (96,1), generator=gen),
    torch.randint(0, 3, (96,5), generator=gen), -100)

# Models: each takes inputs of 8 numbers and returns `n` numbers for each of them

class Experts(Module):
    "Has a term that balances its experts over the samples of a batch"
    def __init__(self, n): self.gate,self.experts = nn.Linear(8, 2),nn.ModuleList(nn.Linear(8, n) for _ in range(2))
    def forward(self, x):
        p = self.gate(x).softmax(-1)
        self.term = p.mean(0).square().sum()
        return sum(p[:,i:i+1]*expert(x) for i,expert in enumerate(self.experts))
class Centres(Module):
    def __init__(self, n): self.lin = nn.Linear(8, n)
    def forward(self, x): return self.lin(x-x.mean(0))
class Counts(Module):
    "A buffer that each forward pass changes scales the outputs"
    def __init__(self, n):
        self.lin = nn.Linear(8, n)
        self.register_buffer('calls', torch.zeros((), dtype=torch.float64))
    def forward(self, x):
        if self.training: self.calls.add_(1)
        return self.lin(x)*(1+.1*self.calls.sin())
class Noisy(Module):
    "Draws random numbers that do not matter"
    def __init__(self, n): self.lin = nn.Linear(8, n)
    def forward(self, x): return self.lin(x)+0*torch.randn(len(x), 1).double()
models = dict(linear=lambda n: nn.Linear(8, n),
    deep=lambda n: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, n)),
    norm=lambda n: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, n)), noisy=Noisy, experts=Experts,
    centres=Centres, counts=Counts, spectral=lambda n: spectral_norm(nn.Linear(8, n)),
    batchnorm=lambda n: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, n)))

# Losses: whether the targets are tokens, and a function that gets the model and returns the loss function

def token_loss(p, y, **kwargs): return F.cross_entropy(p.view(-1, 3), y.view(-1), **kwargs)
class OfTokens(Module):
    ignore_index = -100
    def forward(self, p, y): return token_loss(p, y)
def with_term(model): return lambda p,y: F.cross_entropy(p, y)+getattr(model, 'term', 0)
losses = dict(plain=(False,lambda m: nn.CrossEntropyLoss()),
    weighted=(False,lambda m: nn.CrossEntropyLoss(weight=torch.tensor([.2,1.,5.]).double())),
    total=(False,lambda m: nn.CrossEntropyLoss(reduction='sum')),
    undeclared_sum=(False,lambda m: lambda p,y: F.cross_entropy(p, y, reduction='sum')),
    root=(False,lambda m: lambda p,y: F.cross_entropy(p, y).sqrt()),
    compares=(False,lambda m: lambda p,y: F.cross_entropy(p-p.mean(0), y)),
    squares=(False,lambda m: lambda p,y: F.mse_loss(p, F.one_hot(y, 3).double())), term=(False,with_term),
    tokens=(True,lambda m: OfTokens()), hidden_tokens=(True,lambda m: token_loss),
    token_sum=(True,lambda m: lambda p,y: token_loss(p, y, reduction='sum')/len(y)))

# Callbacks

class Adds(Callback):
    "Adds the result of `f(learn)` to the loss"
    def __init__(self, f): self.f = f
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad+self.f(self.learn)
class Clean(Callback):
    "Scales the inputs of each sample by a factor of its own, and adds a mean over samples"
    def before_batch(self): self.factor = 1+self.x[:,:1].sigmoid()
    def after_loss(self):
        if self.training: self.learn.loss_grad = self.learn.loss_grad+(self.factor*self.pred).square().mean()
class Replaces(Callback):
    "Replaces class weights in the middle of an epoch"
    def before_step(self):
        if self.train_iter==1 and getattr(self.learn.loss_func, 'weight', None) is not None:
            self.learn.loss_func.weight = torch.tensor([3.,1.,.5]).double()
def of_weights(learn): return .1*sum(p.square().sum() for p in learn.model.parameters())
cbs = dict(none=list, none2=list, weights=lambda: [Adds(of_weights)],
    mean=lambda: [Adds(lambda l: l.pred.square().mean())], sums=lambda: [Adds(lambda l: .1*l.pred.square().sum())],
    centre=lambda: [Adds(lambda l: l.pred.mean(0).square().sum())], rows=lambda: [Clean()],
    replaces=lambda: [Replaces()])

def run(model, loss, callback, bs, acc=None):
    "Return the weights before and after a fit, and the entries of its warnings"
    has_tokens,make_loss = losses[loss]
    data = list(zip(xs, tokens if has_tokens else classes))
    set_seed(0)
    net = models[model](15 if has_tokens else 3).double()
    dls = DataLoaders(DataLoader(data, bs=bs), DataLoader(data, bs=32))
    learn = Learner(dls, net, make_loss(net), opt_func=SGD, cbs=[Float32Loss(),*cbs[callback]()])
    start = weights(learn)
    lr = 1e-3 if 'sum' in loss or loss=='total' else .05   # the gradients of a sum are large
    with collect_warnings() as told, learn.no_bar(), learn.no_logging(): learn.fit(2, lr, cbs=acc)
    entries = {str(o.message).partition('.html#')[2] for o in told if issubclass(o.category, AccumulationWarning)}
    return start,weights(learn),entries

def main(n=500, seed=0):
    rng,found,bad = random.Random(seed),Counter(),[]
    for _ in range(n):
        names = rng.choice([*models]),rng.choice([*losses]),rng.choice([*cbs])
        bs,kwargs = rng.choice([(4,{}), (8,{}), (32,dict(micro_batch_size=8)), (16,dict(micro_batch_size=4)), (1,{})])
        if names[0]=='batchnorm' and bs==1: bs = 4
        start,full,_ = run(*names, 32)
        _,ours,told = run(*names, bs, GradientAccumulation(32, **kwargs))
        off = ((ours-full).norm()/(full-start).norm()).item()
        kind = 'right' if off<1e-6 else 'wrong'
        said = 'told' if told-{'loss-not-tried'} else 'could not check' if told else 'silent'
        found[kind,said] += 1
        if (kind,said) in (('wrong','silent'),('right','told')): bad.append((*names, bs, *kwargs, f'{off:.1e}', *told))
    print(f'{n} random combinations, seed {seed}:')
    for (kind,said),k in sorted(found.items()): print(f'- {kind}, {said}: {k}')
    for o in bad: print('  ', *o)

if __name__=='__main__': main(*map(int, sys.argv[1:]))
