"""What a micro-batch costs: microseconds with a tiny model, where almost all time is Python overhead, and with a
convolutional network and a transformer of usual sizes.

The arms are alternated in one process, because machines are noisy; medians and ratios are printed. It is processor
time of one thread: on a quiet machine that is the time on the clock, and on a busy one it is disturbed less.
`python benchmarks/overhead.py`
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import statistics, sys, time, warnings
from collections import namedtuple
from pathlib import Path
root = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(root))
warnings.filterwarnings('ignore')

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import resnet18
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

bs = 16
bare_loop = 'bare PyTorch loop'

class Batches(list):
    "Ready-made batches, so that loading costs nothing"
    bs,device = bs,torch.device('cpu')

class Texts(nn.Sequential):
    "A transformer of 4 layers of 128 that classifies texts"
    def __init__(self):
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0., batch_first=True)
        super().__init__(nn.Embedding(1000, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
            nn.Flatten(), nn.Linear(128*64, 3))

# A model, its inputs for `bs` samples, how many micro-batches are a fit, and how many times each arm is run
Case = namedtuple('Case', 'model x n_batches rounds')
tiny = Case(lambda: nn.Sequential(nn.Linear(10,16), nn.ReLU(), nn.Linear(16,3)), lambda: torch.randn(bs,10), 400, 9)
usual = {'resnet18, images of 64 pixels': Case(lambda: resnet18(num_classes=3), lambda: torch.randn(bs,3,64,64), 8, 7),
    'transformer, texts of 64 tokens': Case(Texts, lambda: torch.randint(0, 1000, (bs,64)), 8, 7)}

def learner(loss_func, case=tiny):
    data = Batches((case.x(), torch.randint(0, 3, (bs,)) if loss_func is not mse else torch.randn(bs,3))
        for _ in range(case.n_batches))
    learn = Learner(DataLoaders(data, Batches()), case.model(), loss_func, opt_func=SGD)
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

def measure(loss_func, k, case=tiny):
    "Microseconds per micro-batch of each arm, a list per arm"
    learn = learner(loss_func, case)
    learn.validate = None
    arms = {bare_loop:lambda: bare(learn, k),
        'fastai, no callback': lambda: learn.fit(1, 1e-3),
        "fastai's GradientAccumulation": lambda: learn.fit(1, 1e-3, cbs=FastaiGradientAccumulation(bs*k)),
        'fastaccum': lambda: learn.fit(1, 1e-3, cbs=GradientAccumulation(bs*k)),
        "fastaccum, 'auto'": lambda: learn.fit(1, 1e-3, cbs=GradientAccumulation(bs*k, micro_batch_size='auto'))}
    for f in arms.values(): f()
    times = {nm:[] for nm in arms}
    for i in progress_bar(range(case.rounds), leave=False) if sys.stderr.isatty() else range(case.rounds):
        for nm in list(arms) if i%2 else reversed(arms): times[nm].append(seconds(arms[nm])/case.n_batches*1e6)
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

def show(title, times):
    print(f'\n{title}')
    print(f'  {"":32} µs/micro-batch   to fastai   to fastai\'s callback')
    for o,ts in times.items():
        to = [statistics.median(a/b for a,b in zip(ts, times[ref]))
            for ref in ('fastai, no callback',"fastai's GradientAccumulation")]
        print(f'  {o:32} {statistics.median(ts):14.0f} {to[0]:11.2f} {to[1]:11.2f}', flush=True)

def main():
    torch.set_num_threads(1)
    print(f'{tiny.n_batches} micro-batches of {bs}, {tiny.rounds} rounds, alternated; torch {torch.__version__}')
    for loss_func,nm in ((mse,'mean over samples'),(CrossEntropyLossFlat(),'mean over targets')):
        for k in (1,4,16): show(f'loss a {nm}, {k} micro-batches a step', measure(loss_func, k))
        once,loss = probe_cost(loss_func)
        print(f'\na trial of that loss, four times an epoch: {once:.0f} µs; the loss itself {loss:.0f} µs')
    for nm,case in usual.items(): show(f'{nm}, 4 micro-batches a step', measure(CrossEntropyLossFlat(), 4, case))

if __name__=='__main__': main()
