"""Small data that scikit-learn and this repository bring along, and what the set-ups share.

The other modules import everything from here, with all of fastai, as notebooks do."""
from contextlib import nullcontext
from dataclasses import dataclass
from sklearn.datasets import load_digits
from fastai.vision.all import *

n_train,n_valid,full,micro = 48,8,16,4

@dataclass
class SetUp:
    "What somebody else trains, and how"
    make:Callable                # makes the Learner, given the batch size of its loader
    repo:str                     # the GitHub repository of the original
    path:str                     # the original's file in that repository
    what:str                     # the set-up in a few words
    fit:Callable                 # trains: `fit(learn, cbs)`
    keeps:Callable = lambda learn: []   # returns what callbacks keep of the run, given the Learner
    still:Callable = noop        # takes the random numbers of callbacks away, given the Learner
    around:Callable = nullcontext   # a context in which the runs happen
    alone:str = ''               # a part of the set-up that differs without a warning

set_ups = {}

def by(method, *args, **kwargs):
    "A `fit` for a set-up: calls a method of the Learner"
    def fit(learn, cbs): getattr(learn, method)(*args, cbs=cbs, **kwargs)
    return fit

def frozen_first(method, frozen_lr, lr):
    "A `fit` for a set-up: an epoch with the model frozen, and an epoch with all of it, both by a method of the Learner"
    def fit(learn, cbs):
        learn.freeze()
        getattr(learn, method)(1, frozen_lr, cbs=cbs)
        learn.unfreeze()
        getattr(learn, method)(1, lr, cbs=cbs)
    return fit

fine_tune = by('fine_tune', 1, 3e-3)

def set_up(repo, path, what, fit=by('fit_one_cycle', 2, 3e-3), **kwargs):
    "Register the function below as a set-up"
    def register(make):
        set_ups[make.__name__] = SetUp(make, repo, path, what, fit, **kwargs)
        return make
    return register

# Data

digits = load_digits()
pixels = np.kron(digits.images[:64]*15, np.ones((1,2,2))).astype('uint8')[...,None].repeat(3, -1)
classes = digits.target[:64]
words = (Path(__file__).resolve().parents[2]/'LICENSE').read_text(encoding='utf-8').split()

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

def mlp(*sizes, bn=False):
    "Linear layers, with ReLU between them"
    layers = []
    for i,o in zip(sizes, sizes[1:]): layers += [nn.Linear(i, o), *([nn.BatchNorm1d(o)] if bn else []), nn.ReLU()]
    return nn.Sequential(*layers[:-2 if bn else -1])
