"""What a micro-batch costs: microseconds with a tiny model, where everything but the host's work vanishes.

The arms are alternated in one process, because machines are noisy; medians and ratios are printed. `python benchmarks/overhead.py`
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import statistics, sys, time, warnings
warnings.filterwarnings('ignore')

import torch
from torch import nn
from torch.nn import functional as F
from fastai.callback.progress import ProgressCallback
from fastai.callback.training import GradientAccumulation as FastaiGradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import SGD
from fastprogress.fastprogress import progress_bar
from fastaccum import GradientAccumulation

bs,n_batches,rounds = 16,400,9

class Batches(list):
    "Ready-made batches, so that loading costs nothing"
    bs,device = bs,torch.device('cpu')

def make_model(): return nn.Sequential(nn.Linear(10,16), nn.ReLU(), nn.Linear(16,3))

def learner(loss_func):
    data = Batches((torch.randn(bs,10), torch.randint(0, 3, (bs,)) if loss_func is not mse else torch.randn(bs,3)) for _ in range(n_batches))
    learn = Learner(DataLoaders(data, Batches()), make_model(), loss_func, opt_func=SGD)
    learn.remove_cb(ProgressCallback)
    learn.logger = lambda *_: None
    return learn

def mse(p, y): return F.mse_loss(p, y)

def bare(learn, k):
    "A plain PyTorch loop that accumulates"
    model,opt = learn.model,torch.optim.SGD(learn.model.parameters(), lr=1e-3)
    model.train()
    for i,(x,y) in enumerate(learn.dls.train):
        (learn.loss_func(model(x), y)/k).backward()
        if (i+1)%k==0:
            opt.step()
            opt.zero_grad()

def seconds(f, *args):
    t = time.perf_counter()
    f(*args)
    return time.perf_counter()-t

def measure(loss_func, k):
    "Microseconds per micro-batch of each arm, a list per arm"
    learn = learner(loss_func)
    learn.validate = None
    arms = {'bare PyTorch loop':lambda: bare(learn, k),
        'fastai, no callback': lambda: learn.fit(1, 1e-3),
        "fastai's GradientAccumulation": lambda: learn.fit(1, 1e-3, cbs=FastaiGradientAccumulation(bs*k)),
        'fastaccum': lambda: learn.fit(1, 1e-3, cbs=GradientAccumulation(bs*k)),
        "fastaccum, 'auto'": lambda: learn.fit(1, 1e-3, cbs=GradientAccumulation(bs*k, micro_batch_size='auto'))}
    for f in arms.values(): f()
    times = {nm:[] for nm in arms}
    for i in progress_bar(range(rounds), leave=False) if sys.stderr.isatty() else range(rounds):
        for nm in list(arms) if i%2 else reversed(arms): times[nm].append(seconds(arms[nm])/n_batches*1e6)
    return times

def main():
    torch.set_num_threads(1)
    print(f'{n_batches} micro-batches of {bs}, {rounds} rounds, alternated; torch {torch.__version__}')
    for loss_func,nm in ((mse,'mean over samples'),(CrossEntropyLossFlat(),'mean over targets')):
        for k in (1,4,16):
            times = measure(loss_func, k)
            ref = times["fastai's GradientAccumulation"]
            print(f'\nloss a {nm}, {k} micro-batches a step\n  {"":30} µs/micro-batch   to fastai\'s callback')
            for o,ts in times.items():
                ratio = statistics.median(a/b for a,b in zip(ts, ref))
                print(f'  {o:30} {statistics.median(ts):14.0f} {ratio:14.2f}')

if __name__=='__main__': main()
