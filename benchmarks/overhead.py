"""What a micro-batch costs: microseconds with a tiny model, where everything but the host's work vanishes.

The arms are alternated in one process, because machines are noisy; medians and ratios are printed. It is processor
time of one thread: on a quiet machine that is the time on the clock, and on a busy one it is disturbed less.
`python benchmarks/overhead.py`

`python benchmarks/overhead.py --tried` measures fastaccum without parts of what saves time too (see the page on
dispatch), writes the ratios to the bare loop to `benchmarks/results/tried.json`, and prints them as a Markdown table.
"""
import os
os.environ.setdefault('OMP_NUM_THREADS', '1')
import argparse, json, statistics, sys, time, warnings
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
from fastaccum.core import sizes
from fastaccum.core.dispatch import events
from fastaccum.core.probe import probe
from fastaccum.core.sizes import find_size

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

class Without(GradientAccumulation):
    "fastaccum without a part of what saves time"
    name = 'gradient_accumulation'
    def before_train(self):
        super().before_train()
        self.take_out()

class FastaisDispatch(Without):
    "Every callback is asked for every event"
    def take_out(self): self.dispatch.leave()

class FastaisEvents(Without):
    "Only the callbacks that have something to do are asked, through fastai's `_with_events`"
    def take_out(self): del vars(self.learn)['_with_events']

class FastaisBatch(Without):
    "Events within a batch make a list of their name"
    def take_out(self): self.dispatch.inside = None

class FastaisDevice(Without):
    "Batches that are in place are moved"
    def take_out(self): del vars(self.learn)['_set_device']

class NotLooked(Without):
    "Nobody looks whether the Learner or the model answer to an event"
    def take_out(self): self.dispatch.answered = lambda event_name: False

class Remembered(Without):
    "Who has something to do at an event is remembered while the list of callbacks is the same"
    def take_out(self):
        learn,known,items = self.learn,{},[]
        def call(event_name):
            if learn.cbs.items!=items:
                items[:] = learn.cbs.items
                known.clear()
            if event_name not in events: return Learner._call_one(learn, event_name)
            if event_name not in known:
                cbs = sorted(items, key=lambda o: o.order)
                known[event_name] = [o for o in cbs if hasattr(type(o), event_name) or event_name in vars(o)]
            for cb in known[event_name]: cb(event_name)
        vars(learn)['_call_one'] = call
    def after_train(self):
        super().after_train()
        vars(self.learn)['_call_one'] = self.dispatch.call   # so that it can leave

class AsOnDevice(Without):
    "Targets are counted in tensors, as on a device"
    def take_out(self):
        stock,sizes.on_host = sizes.on_host,lambda t: False
        self.put_back = lambda: setattr(sizes, 'on_host', stock)
    def after_train(self):
        super().after_train()
        self.put_back()

tried = {"fastaccum, fastai's dispatch":FastaisDispatch, "fastaccum, fastai's `_with_events`":FastaisEvents,
    'fastaccum, a list for each event within a batch':FastaisBatch, "fastaccum, fastai's `_set_device`":FastaisDevice,
    'fastaccum, targets as on a device':AsOnDevice, 'fastaccum, Learner not looked at':NotLooked,
    'fastaccum, remembering who hears':Remembered}

def seconds(f, *args):
    t = time.process_time()
    f(*args)
    return time.process_time()-t

def measure(loss_func, k, tried={}):
    "Microseconds per micro-batch of each arm, a list per arm"
    learn = learner(loss_func)
    learn.validate = None
    arms = {bare_loop:lambda: bare(learn, k),
        'fastai, no callback': lambda: learn.fit(1, 1e-3),
        "fastai's GradientAccumulation": lambda: learn.fit(1, 1e-3, cbs=FastaiGradientAccumulation(bs*k)),
        'fastaccum': lambda: learn.fit(1, 1e-3, cbs=GradientAccumulation(bs*k)),
        "fastaccum, 'auto'": lambda: learn.fit(1, 1e-3, cbs=GradientAccumulation(bs*k, micro_batch_size='auto'))}
    for nm,cls in tried.items(): arms[nm] = lambda cls=cls: learn.fit(1, 1e-3, cbs=cls(bs*k))
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
        for _ in range(n): probe(learn, bs, find_size(loss_func))
    def losses():
        for _ in range(n): loss_func(learn.pred, *learn.yb)
    return [min(seconds(f) for _ in range(5))/n*1e6 for f in (probes,losses)]

def to_bare(times): return {nm:statistics.median(a/b for a,b in zip(ts, times[bare_loop])) for nm,ts in times.items()}

def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument('--tried', action='store_true', help='fastaccum without parts of what saves time, too')
    args.add_argument('--note', help='a remark to go into the results')
    args = args.parse_args()
    torch.set_num_threads(1)
    print(f'{n_batches} micro-batches of {bs}, {rounds} rounds, alternated; torch {torch.__version__}')
    found,alone = {},{}
    kinds = (mse,'mean over samples','MSE'),(CrossEntropyLossFlat(),'mean over targets','cross-entropy')
    for loss_func,nm,short in kinds:
        for k in (1,4,16):
            times = measure(loss_func, k, tried if args.tried else {})
            case = f'{short}, {k} a step'
            found[case],alone[case] = to_bare(times),round(statistics.median(times[bare_loop]))
            print(f'\nloss a {nm}, {k} micro-batches a step')
            print(f'  {"":48} µs/micro-batch   to fastai   to fastai\'s callback')
            for o,ts in times.items():
                to = [statistics.median(a/b for a,b in zip(ts, times[ref]))
                    for ref in ('fastai, no callback',"fastai's GradientAccumulation")]
                print(f'  {o:48} {statistics.median(ts):14.0f} {to[0]:11.2f} {to[1]:11.2f}', flush=True)
        once,loss = probe_cost(loss_func)
        print(f'\nthe probe of that loss, once in a fit: {once:.0f} µs; the loss itself {loss:.0f} µs')
    if not args.tried: return
    from benchmarks.peers import report
    arms = [o for o in found[next(iter(found))] if o!=bare_loop]
    res = dict(about=report.about(args.note), bare_us=alone,
        to_bare={nm:{o:round(v[nm], 3) for o,v in found.items()} for nm in arms})
    (root/'benchmarks/results/tried.json').write_text(json.dumps(res, indent=1)+'\n')
    print(f'\nTo the bare loop:\n\n{report.tried(res)}')

if __name__=='__main__': main()
