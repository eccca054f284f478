"""The best learning rate for each step size: for the guide "Learning rate and batch size".

A small recurrent network learns to predict the next pixel of the handwritten digits that come with scikit-learn, with
SGD and with Adam, by `fit_one_cycle`, in steps of 16, 64 and 256 samples. There are four epochs for each size. Learning
rates are a factor of two apart; the validation loss at the end is a mean over seeds. Steps are real batches, because
accumulation gives the same run, but takes longer here.

`python -m benchmarks.rates` takes about 15 minutes on one core.
"""
import argparse, math
from statistics import mean
import numpy as np, torch
from sklearn.datasets import load_digits
from torch import nn
from fastai.callback.schedule import Learner   # this import adds fit_one_cycle
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, SGD
from fastai.torch_core import set_seed
from benchmarks import made, quiet, save

n_epoch,n_valid,sizes = 4,512,(16,64,256)
rates = {'SGD':(SGD,-4,4), 'Adam':(Adam,-9,-1)}   # (optimizer, low, high): rates from 2**low to 2**high

def samples():
    "Return pairs (pixels, next pixels), each of two rows of a digit; a pixel is a whole number from 0 to 16"
    rows = torch.tensor(load_digits().data).long().view(-1, 16)
    return [(rows[i,:-1],rows[i,1:]) for i in np.random.RandomState(0).permutation(len(rows))]

class NextPixel(nn.Module):
    def __init__(self, n=32):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(17, n),nn.GRU(n, n, batch_first=True),nn.Linear(n, 17)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0])

def loss(items, opt_func, size, lr, seed):
    "Train, and return the validation loss at the end"
    set_seed(seed)
    train,valid = items[n_valid:],items[:n_valid]
    dls = DataLoaders(DataLoader(train, bs=size, shuffle=True, drop_last=True), DataLoader(valid, bs=n_valid))
    learn = quiet(Learner(dls, NextPixel(), CrossEntropyLossFlat(), opt_func=opt_func))
    learn.fit_one_cycle(n_epoch, lr)
    return learn.recorder.values[-1][1]

def best(losses):
    "Return the rate with the lowest loss, by a parabola through three rates, or None if it is the first or the last"
    lrs = sorted(losses, key=float)
    i = min(range(len(lrs)), key=lambda i: losses[lrs[i]])
    if not 0<i<len(lrs)-1: return None
    a,b,c = (losses[lrs[j]] for j in (i-1,i,i+1))
    return round(float(lrs[i])*2**((a-c)/(2*(a-2*b+c))), 4)

def main():
    args = argparse.ArgumentParser()
    args.add_argument('--seeds', type=int, default=2)
    seeds = range(args.parse_args().seeds)
    torch.set_num_threads(1)
    items = samples()
    losses = {name:{} for name in rates}
    for name,(opt_func,low,high) in rates.items():
        for size in sizes:
            found = losses[name][str(size)] = {}
            for lr in (2.**o for o in range(low, high+1)):
                v = mean(loss(items, opt_func, size, lr, seed) for seed in seeds)
                found[str(lr)] = round(v, 3) if math.isfinite(v) else 99.
            print(name, size, found, flush=True)
    notes = f'{len(seeds)} seeds',f'{len(items)-n_valid} samples'
    save('rates', dict(made=made(*notes), best={nm:{k:best(o) for k,o in found.items()} for nm,found in losses.items()},
        losses=losses))

if __name__=='__main__': main()
