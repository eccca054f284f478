"""The best learning rate for each step size: for the guide "Learning rate and batch size".

A small recurrent network learns to predict the next word of Python's language reference (`pydoc_data.topics`, the texts
of `help('for')`), with SGD and with Adam, by `fit_one_cycle`, in steps of 16, 64 and 256 samples. There are four epochs
for each size. Learning rates are a factor of two apart; the validation loss at the end is a mean over seeds. Steps are
real batches, because accumulation gives the same run, but takes longer here.

`python -m benchmarks.rates` takes about 10 minutes on one core.
"""
import argparse, math, re
from collections import Counter
from pydoc_data.topics import topics
from statistics import mean
import numpy as np, torch
from torch import nn
from fastai.callback.schedule import Learner   # this import adds fit_one_cycle
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, SGD
from fastai.torch_core import set_seed
from benchmarks import made, quiet, save

length,n_epoch,n_valid,sizes = 12,4,512,(16,64,256)
rates = {'SGD':(SGD,-2,5), 'Adam':(Adam,-9,-1)}   # (optimizer, low, high): rates from 2**low to 2**high

def samples():
    "Return pairs (numbers of words, numbers of the next words) of pieces of the text, and the number of words"
    prose = re.sub(r'[*`"|+=_-]+|\n *~+.*', ' ', ' '.join(topics[k] for k in sorted(topics)))
    words = re.findall(r"[a-z']+|[,;:.]", prose.lower())
    index = {w:i for i,(w,_) in enumerate(Counter(words).most_common(400), 1)}   # 0 is any other word
    ids = torch.tensor([index.get(w, 0) for w in words])
    items = [(ids[i:i+length],ids[i+1:i+length+1]) for i in range(0, len(ids)-length-1, length)]
    return [items[i] for i in np.random.default_rng(0).permutation(len(items))],len(index)+1

class NextWord(nn.Module):
    def __init__(self, n_words, n=32):
        super().__init__()
        self.emb,self.rnn,self.out = nn.Embedding(n_words, n),nn.GRU(n, n, batch_first=True),nn.Linear(n, n_words)
    def forward(self, x): return self.out(self.rnn(self.emb(x))[0])

def loss(items, n_words, opt_func, size, lr, seed):
    "Train, and return the validation loss at the end"
    set_seed(seed)
    train,valid = items[n_valid:],items[:n_valid]
    dls = DataLoaders(DataLoader(train, bs=size, shuffle=True, drop_last=True), DataLoader(valid, bs=n_valid))
    learn = quiet(Learner(dls, NextWord(n_words), CrossEntropyLossFlat(), opt_func=opt_func))
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
    items,n_words = samples()
    losses = {name:{} for name in rates}
    for name,(opt_func,low,high) in rates.items():
        for size in sizes:
            found = losses[name][str(size)] = {}
            for lr in (2.**o for o in range(low, high+1)):
                v = mean(loss(items, n_words, opt_func, size, lr, seed) for seed in seeds)
                found[str(lr)] = round(v, 3) if math.isfinite(v) else 99.
            print(name, size, found, flush=True)
    notes = f'{len(seeds)} seeds',f'{len(items)-n_valid} samples'
    save('rates', dict(made=made(*notes), best={nm:{k:best(o) for k,o in found.items()} for nm,found in losses.items()},
        losses=losses))

if __name__=='__main__': main()
