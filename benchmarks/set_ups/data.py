"Small data that scikit-learn and Python bring along, and what the set-ups share"
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
import numpy as np, torch
from pydoc_data.topics import topics
from sklearn.datasets import load_digits
from torch import nn
from fastai.callback.core import Callback
from fastai.callback.progress import ProgressCallback
from fastai.data.block import DataBlock
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.layers import ConvLayer, Flatten, ResBlock
from fastai.torch_core import set_seed
from fastcore.basics import noop

n_train,n_valid,full,micro = 48,8,16,4

@dataclass
class SetUp:
    "What somebody else trains, and how"
    make:Callable   # makes the Learner, given the batch size of its loader
    repo:str        # where it is from
    path:str
    what:str        # in a few words
    fit:Callable    # `fit(learn, cbs)`
    keeps:Callable  # what callbacks keep of the run, given the Learner
    still:Callable  # takes the random numbers of callbacks away, given the Learner
    around:Callable # a context in which all this happens
    alone:str       # what differs without a warning, in a few words

set_ups = {}

def set_up(repo, path, what, fit=None, keeps=None, still=noop, around=nullcontext, alone=''):
    "Register a function that makes a Learner"
    def keep(make):
        set_ups[make.__name__] = SetUp(make, repo, path, what, fit or two_epochs, keeps or (lambda learn: []), still,
            around, alone)
        return make
    return keep

def two_epochs(learn, cbs): learn.fit_one_cycle(2, 3e-3, cbs=cbs)
def fine_tune(learn, cbs): learn.fine_tune(1, 3e-3, cbs=cbs)

@contextmanager
def in_double_precision():
    "Everything in double precision, in which the same run differs from a similar one: `.float()` gives it, too"
    single,dtype = torch.Tensor.float,torch.get_default_dtype()
    torch.Tensor.float = lambda o, **kwargs: o.double(**kwargs)
    torch.set_default_dtype(torch.float64)
    try: yield
    finally:
        torch.Tensor.float = single
        torch.set_default_dtype(dtype)

def quiet(learn):
    "No progress bar, no lines of a table"
    learn.remove_cb(ProgressCallback)
    learn.logger = noop
    return learn

class Still(Callback):
    "Dropout and BatchNorm as in evaluation, and what else the set-up can do without"
    order,run_valid = -9,False   # after fastai's TrainEvalCallback
    def __init__(self, also): self.also = also
    def before_fit(self): self.also(self.learn)
    def before_train(self):
        for m in self.model.modules():
            if any(o in type(m).__name__ for o in ('Dropout','BatchNorm','StochasticDepth')): m.eval()

# Data

digits = load_digits()
pixels = np.kron(digits.images[:64]*15, np.ones((1,2,2))).astype('uint8')[...,None].repeat(3, -1)
classes = digits.target[:64]
words = [o for k in sorted(topics) for o in topics[k].split()]   # Python's language reference

def blocks(bs, *blocks, get_x=pixels.__getitem__, n_inp=None, n=n_train, **kwargs):
    "Loaders made from a DataBlock, whose items are numbers"
    splits = range(n),range(n, n+n_valid)
    kwargs['splitter'] = lambda _: splits
    block = DataBlock(blocks, n_inp=n_inp, get_x=None if 'getters' in kwargs else get_x, **kwargs)
    return block.dataloaders(range(n+n_valid), bs=bs, val_bs=n_valid, num_workers=0, device='cpu')

def loaders(bs, items, n=44, shuffle=True, cls=DataLoader, **kwargs):
    "Loaders of a list of items, of which the last incomplete batch is trained on"
    return DataLoaders(cls(items[:n], bs=bs, shuffle=shuffle, **kwargs), cls(items[n:], bs=n_valid, **kwargs),
        device='cpu')

def tensors(n=52):
    "Pictures in three colours and their classes"
    xs = torch.tensor(pixels[:n]).permute(0, 3, 1, 2)/255.
    return list(zip(xs, torch.tensor(classes[:n])))

# Models

def resnet(pretrained=False, n_out=10):
    "A small residual network, with BatchNorm"
    return nn.Sequential(ConvLayer(3, 8, stride=2), ResBlock(1, 8, 16, stride=2), ResBlock(1, 16, 32, stride=2),
        nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(32, n_out))

def conv(n_out=10):
    "A small network without BatchNorm"
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), Flatten(), nn.Linear(16, n_out))

def seeded(make):
    "`make` with all random numbers from the beginning"
    def run(bs, **_):
        set_seed(0)
        return quiet(make(bs))
    return run

def mlp(*sizes, bn=False):
    "Linear layers, with ReLU between them"
    layers = []
    for i,o in zip(sizes, sizes[1:]): layers += [nn.Linear(i, o), *([nn.BatchNorm1d(o)] if bn else []), nn.ReLU()]
    return nn.Sequential(*layers[:-2 if bn else -1])
