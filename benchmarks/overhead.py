"""What a micro-batch costs: microseconds with a tiny model, where everything but the host's work vanishes.

The arms are alternated in one process, because machines are noisy; medians and ratios are printed. It is processor
time of one thread: on a quiet machine that is the time on the clock, and on a busy one it is disturbed less.
`python benchmarks/overhead.py`
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import statistics, sys, time, warnings
from pathlib import Path
root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
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
from fastaccum.core.probe import probe
from fastaccum.core.mean import find_n_items

bs,n_batches,rounds = 16,400,9
bare_loop = 'bare PyTorch loop'

class Batches(list):
    "Ready-made batches, so that loading costs nothing"
    bs,device = bs,torch.device('cpu')

def make_model(): return nn.Sequential(nn.Linear(10,16), nn.ReLU(), nn.Linear(16,3))

def learner(loss_func):
    data = Batches((torch.randn(bs,10), torch.randint(0, 3, (bs,)) if loss_func is not mse else torch.randn(bs,3))
        for _ in range(n_batches))
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
    t = time.process_time()
    f(*args)
    return time.process_time()-t

def measure(loss_func, k):
    "Microseconds per micro-batch of each arm, a list per arm"
    learn = learner(loss_func)
    learn.validate = None
    arms = {bare_loop:lambda: bare(learn, k),
        'fastai, no callback': lambda: learn.fit(1, 1e-3),
        "fastai's GradientAccumulation": lambda: learn.fit(1, 1e-3, cbs=FastaiGradientAccumulation(bs*k)),
        'fastaccum': lambda: learn.fit(1, 1e-3, cbs=GradientAccumulation(bs*k)),
        "fastaccum, 'auto'": lambda: learn.fit(1, 1e-3, cbs=GradientAccumulation(bs*k, micro_batch_size='auto'))}
    for f in arms.values(): f()
    times = {nm:[] for nm in arms}
    for i in progress_bar(range(rounds), leave=False) if sys.stderr.isatty() else range(rounds):
        for nm in list(arms) if i%2 else reversed(arms): times[nm].append(seconds(arms[nm])/n_batches*1e6)
    return times

def probe_cost(loss_func, n=200):
    "Microseconds that the probe of the loss takes, once in a fit, and one evaluation of the loss"
    learn = learner(loss_func)
    learn.xb,learn.yb = learn.dls.train[0][:1],learn.dls.train[0][1:]
    with torch.no_grad(): learn.pred = learn.model(*learn.xb)
    def probes():
        for _ in range(n): probe(learn, bs, find_n_items(loss_func))
    def losses():
        for _ in range(n): loss_func(learn.pred, *learn.yb)
    return [min(seconds(f) for _ in range(5))/n*1e6 for f in (probes,losses)]

def main():
    torch.set_num_threads(1)
    print(f'{n_batches} micro-batches of {bs}, {rounds} rounds, alternated; torch {torch.__version__}')
    for loss_func,nm in ((mse,'mean over samples'),(CrossEntropyLossFlat(),'mean over targets')):
        for k in (1,4,16):
            times = measure(loss_func, k)
            print(f'\nloss a {nm}, {k} micro-batches a step')
            print(f'  {"":32} µs/micro-batch   to fastai   to fastai\'s callback')
            for o,ts in times.items():
                to = [statistics.median(a/b for a,b in zip(ts, times[ref]))
                    for ref in ('fastai, no callback',"fastai's GradientAccumulation")]
                print(f'  {o:32} {statistics.median(ts):14.0f} {to[0]:11.2f} {to[1]:11.2f}', flush=True)
        once,loss = probe_cost(loss_func)
        print(f'\nthe probe of that loss, once in a fit: {once:.0f} µs; the loss itself {loss:.0f} µs')

if __name__=='__main__': main()
